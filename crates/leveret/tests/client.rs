//! The client on the embedded broker, whose faults and clock are in the test's hands.

mod client {
    mod abuse;
    mod batches;
    mod bounds;
    mod classifying;
    mod compiler_messages;
    mod connector;
    mod consuming;
    mod cuts;
    mod delay;
    mod delay_defaults;
    mod errors;
    mod events;
    mod examples;
    mod failover;
    mod handling;
    mod health;
    mod hostile;
    mod inbox;
    mod layers;
    mod mishaps;
    mod on_the_wire;
    mod parking;
    mod parking_counts;
    mod parking_cuts;
    mod pool;
    mod publishing;
    mod recovery;
    mod relay;
    mod removal;
    mod requeue;
    mod retry;
    mod rpc;
    mod runtimes;
    mod sharing;
    mod spans;
    mod suspects;
    mod telemetry;
    mod topology;
}

#[path = "support/drops.rs"]
mod drops;
#[path = "support/embedded.rs"]
mod embedded;
#[path = "support/examples.rs"]
mod examples;
#[path = "support/on_the_wire.rs"]
mod on_the_wire;
#[path = "support/services.rs"]
mod services;

use std::net::SocketAddr;

use embedded::{PATIENCE, broker, builder_of, client_of, client_with, depth, soon, unsettled};
use leveret::Client;
use leveret_broker::{Broker, Permissions};

/// A broker with two users, one who may do anything and one who may do no more than this, and where it listens: over TCP users
/// are told apart, so that the clock has to be the real one.
async fn broker_with_users(permissions: Permissions) -> (Broker, SocketAddr) {
    let broker = Broker::builder()
        .user("all", "all")
        .user("limited", "limited")
        .permissions("limited", "/", permissions)
        .start()
        .expect("patterns that are in order");
    let address = broker.listen("127.0.0.1:0").await.expect("a free port");
    (broker, address)
}

async fn client_of_user(address: SocketAddr, user: &str) -> Client {
    let url = format!("amqp://{user}:{user}@{address}");
    Client::connect(url.as_str()).await.expect("a client over TCP")
}
