//! What only the embedded broker has: faults on request, restarts, looking inside, and a door that hostile input does not get
//! through.

mod alarm;
mod at_least_once;
mod chains;
mod expiring;
mod faults;
mod hostile;
mod keeping;
mod memory;
mod permissions;
mod protocol;
mod recording;
mod restarting;
mod stopping;
mod support;
mod unfinished;
mod watching;
