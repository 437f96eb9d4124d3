//! A broker, and clients of it.

use std::time::Duration;

use leveret::amqp::{
    Channel, Confirm, Connection, GetOptions, Options, Outcome, Properties, Publish, QueueOptions,
};
use leveret_broker::Broker;
use leveret_testkit::peer::Peer;
use tokio::io::DuplexStream;

pub(crate) const SOON: Duration = Duration::from_secs(20);

pub(crate) fn broker() -> Broker {
    Broker::builder().start().unwrap()
}

pub(crate) async fn connect(broker: &Broker) -> Connection {
    Connection::open_over(broker.connect(), &Options::default()).await.unwrap()
}

/// A channel with confirms, and a queue `q`.
pub(crate) async fn with_queue(connection: &Connection) -> Channel<Confirm> {
    let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
    channel.declare_queue("q", QueueOptions::default()).await.unwrap();
    channel
}

pub(crate) async fn put(channel: &Channel<Confirm>, queue: &str, body: &str) -> Outcome {
    put_with(channel, queue, body, Properties::default()).await
}

pub(crate) async fn put_with(
    channel: &Channel<Confirm>,
    queue: &str,
    body: &str,
    properties: Properties<'_>,
) -> Outcome {
    let body = body.to_owned().into();
    let (routing_key, mandatory) = (queue, true);
    let publish = Publish { routing_key, mandatory, properties, body, ..Publish::default() };
    channel.publish(&publish).await.unwrap().await
}

/// The body of the next message in a queue, which is settled.
pub(crate) async fn get<M>(channel: &Channel<M>, queue: &str) -> Option<String> {
    let delivery = channel.get(queue, GetOptions::default()).await.unwrap()?;
    let body = String::from_utf8(delivery.body().to_vec()).unwrap();
    delivery.ack().unwrap();
    Some(body)
}

/// A client byte by byte, after the handshake.
pub(crate) async fn peer(broker: &Broker) -> Peer<DuplexStream> {
    let mut peer = Peer::over(broker.connect());
    peer.open_connection("/", "guest", "guest").await;
    peer
}
