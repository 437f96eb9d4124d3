//! The embedded broker, and clients of it.

// It is a part of several tests, and each uses some of it.
#![allow(dead_code)]

use leveret::{Client, ClientBuilder, Queue, Topology};
use leveret_broker::Broker;

pub(crate) use leveret_testkit::{SOON as PATIENCE, soon};

pub(crate) fn broker() -> Broker {
    Broker::builder().start().expect("a broker")
}

pub(crate) async fn client_of(broker: &Broker) -> Client {
    builder_of(broker).connect().await.expect("a client of the embedded broker")
}

pub(crate) fn builder_of(broker: &Broker) -> ClientBuilder {
    Client::builder().broker(broker).name("test")
}

/// A client with one queue.
pub(crate) async fn client_with(broker: &Broker, queue: Queue) -> Client {
    let client = client_of(broker).await;
    client.apply(&Topology::new().queue(queue)).await.expect("a queue");
    client
}

pub(crate) fn depth(broker: &Broker, queue: &str) -> Option<usize> {
    let snapshot = broker.snapshot();
    snapshot.virtual_host("/")?.queue(queue).map(|queue| queue.ready)
}

pub(crate) fn unsettled(broker: &Broker, queue: &str) -> Option<usize> {
    let snapshot = broker.snapshot();
    snapshot.virtual_host("/")?.queue(queue).map(|queue| queue.unsettled)
}
