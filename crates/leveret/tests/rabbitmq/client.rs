//! The client's behaviour, the same on every broker.

mod abuse;
mod acknowledging;
mod consuming;
mod delay;
mod events;
mod events_limits;
mod handling;
mod inbox;
mod losses;
mod parking;
mod parking_beside;
mod parking_cuts;
mod parking_drops;
mod parking_kinds;
mod parking_limits;
mod pool;
mod publishing;
mod removal;
mod retry;
mod rpc;
mod sharing;
mod topology;
mod watching;
