//! The client on RabbitMQ nodes that fail: it comes back by itself, and says how it is meanwhile.

mod accounts;
mod channels;
mod delay;
mod events;
mod failover;
mod health;
mod nodes;
mod parking;
mod parking_slow;
mod plans;
mod retry;
mod rpc;
