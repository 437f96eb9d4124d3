//! Streams that are opened by a connector of the user's.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leveret::amqp::{Connector, Options};
use leveret::{Client, ConnectLimits, ErrorKind, Queue, Topology};
use leveret_broker::Broker;
use tokio::io::DuplexStream;
use tokio::time::Instant;

use crate::{broker, soon};

/// Leads to a broker, whatever the address, from the attempt of this number on.
#[derive(Clone)]
struct Tunnel {
    broker: Broker,
    attempts: Arc<AtomicUsize>,
    first_good: usize,
}

impl Tunnel {
    fn to(broker: &Broker, first_good: usize) -> Self {
        Tunnel { broker: broker.clone(), attempts: Arc::default(), first_good }
    }
}

impl Connector for Tunnel {
    type Stream = DuplexStream;

    async fn connect(&self, broker: &Options) -> io::Result<DuplexStream> {
        assert_eq!(broker.host, "rabbit-1");
        match self.attempts.fetch_add(1, Ordering::SeqCst) >= self.first_good {
            true => Ok(self.broker.connect()),
            false => Err(io::Error::other("the tunnel is closed")),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_connects_and_reconnects_through_its_connector() {
    let broker = broker();
    let tunnel = Tunnel::to(&broker, 2);
    // The order of the builder's calls does not matter.
    let builder = Client::builder().connector(tunnel.clone());
    let client = builder.endpoint("amqp://rabbit-1").unwrap().connect().await.unwrap();
    assert_eq!(tunnel.attempts.load(Ordering::SeqCst), 3);
    client.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
    broker.faults().cut_all_connections();
    assert_eq!(soon("an answer", client.inspect_queue("q")).await.unwrap().messages, 0);
    assert_eq!(tunnel.attempts.load(Ordering::SeqCst), 4);
}

#[tokio::test(start_paused = true)]
async fn a_connector_that_fails_says_why() {
    let tunnel = Tunnel::to(&broker(), usize::MAX);
    let limits = ConnectLimits { max_retries: 1, ..ConnectLimits::default() };
    let builder = Client::builder().connector(tunnel).connect_limits(limits);
    let error = builder.endpoint("amqp://rabbit-1").unwrap().connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    let text = error.to_string();
    assert!(text.contains("rabbit-1") && text.contains("the tunnel is closed"), "{text}");
}

struct Hanging;

impl Connector for Hanging {
    type Stream = DuplexStream;

    async fn connect(&self, _broker: &Options) -> io::Result<DuplexStream> {
        std::future::pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_connector_that_hangs_is_given_the_connection_timeout() {
    let began = Instant::now();
    let limits = ConnectLimits { max_retries: 0, ..ConnectLimits::default() };
    let builder = Client::builder().connector(Hanging).connect_limits(limits);
    let error = builder.endpoint("amqp://rabbit-1").unwrap().connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(began.elapsed().as_secs(), Duration::from_secs(10).as_secs());
}
