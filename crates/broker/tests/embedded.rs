//! The embedded broker: as a client sees it, what it does as RabbitMQ does, and what only it has: faults on request, restarts,
//! looking inside, and a door that hostile input does not get through.

#[macro_use]
mod dead_letters;
mod declaring;
#[macro_use]
mod frames;
#[macro_use]
mod lapin_client;
#[macro_use]
mod messages;
mod support;

mod embedded {
    mod alarm;
    mod at_least_once;
    mod broker;
    mod chains;
    mod dead_letters;
    mod declaring;
    mod expiring;
    mod faults;
    mod frames;
    mod hostile;
    mod keeping;
    mod lapin;
    mod memory;
    mod messages;
    mod permissions;
    mod protocol;
    mod recording;
    mod restarting;
    mod stopping;
    mod unfinished;
    mod watching;
}
