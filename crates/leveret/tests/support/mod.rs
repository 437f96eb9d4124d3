//! A connection whose other side is a script, over a pipe: no socket, so time can be paused.

// Each test file uses a part of this.
#![allow(dead_code, unreachable_pub)]

use leveret::amqp::{Connection, Error, Options};
use leveret_testkit::peer::Peer;
use leveret_wire::Table;
use leveret_wire::method::{basic, channel, confirm, connection};
use tokio::io::DuplexStream;

/// The broker's side.
pub type Broker = Peer<DuplexStream>;

/// What a pipe holds: enough that neither side waits for the other by accident.
const PIPE: usize = 4 * 1024 * 1024;

/// A connection over a pipe, before the handshake.
pub fn pipe(
    options: Options,
) -> (Broker, impl Future<Output = Result<Connection, Error>> + Send + 'static) {
    let (ours, theirs) = tokio::io::duplex(PIPE);
    (Peer::over(theirs), async move { Connection::open_over(ours, &options).await })
}

/// A connection after the handshake, with these limits.
pub async fn connected_with(options: Options, tune: connection::Tune) -> (Connection, Broker) {
    let (mut broker, connecting) = pipe(options);
    let (connection, _) =
        tokio::join!(connecting, broker.accept_connection_with(tune, Table::new()));
    (connection.unwrap(), broker)
}

/// A connection after the handshake, without heartbeats.
pub async fn connected() -> (Connection, Broker) {
    let tune = connection::Tune { channel_max: 2047, frame_max: 131_072, heartbeat: 0 };
    connected_with(Options::default(), tune).await
}

/// A channel with confirms.
pub async fn confirming(
    connection: &Connection,
    broker: &mut Broker,
) -> leveret::amqp::Channel<leveret::amqp::Confirm> {
    let channel = open_channel(connection, broker).await;
    let id = channel.id();
    let (channel, ()) = tokio::join!(channel.into_confirm(), async {
        broker.expect::<confirm::Select>(id).await;
        broker.send(id, &confirm::SelectOk {}).await;
    });
    channel.unwrap()
}

/// A plain channel.
pub async fn open_channel(connection: &Connection, broker: &mut Broker) -> leveret::amqp::Channel {
    let (channel, ()) = tokio::join!(connection.open_channel(), async {
        match broker.receive().await {
            leveret_testkit::peer::Received::Method(id, leveret_wire::Method::ChannelOpen(_)) => {
                broker.send(id, &channel::OpenOk {}).await;
            }
            other => panic!("awaited channel.open; instead came {other:?}"),
        }
    });
    channel.unwrap()
}

/// A consumer named `c` of the queue `q`.
pub async fn consuming<M>(
    channel: &leveret::amqp::Channel<M>,
    options: leveret::amqp::ConsumeOptions,
    broker: &mut Broker,
) -> leveret::amqp::Consumer {
    let id = channel.id();
    let options = leveret::amqp::ConsumeOptions { tag: "c".to_owned(), ..options };
    let auto_ack = options.auto_ack;
    let (consumer, ()) = tokio::join!(channel.consume("q", options), async {
        if !auto_ack {
            broker.expect::<basic::Qos>(id).await;
            broker.send(id, &basic::QosOk {}).await;
        }
        let consume = broker.expect::<basic::Consume<'_>>(id).await;
        broker.send(id, &basic::ConsumeOk { consumer_tag: consume.consumer_tag }).await;
    });
    consumer.unwrap()
}

/// Returns when the connection has dealt with everything that the broker sent before.
pub async fn barrier(connection: &Connection, broker: &mut Broker) {
    let (updated, ()) = tokio::join!(connection.update_secret(b"", "barrier"), async {
        broker.expect::<connection::UpdateSecret<'_>>(0).await;
        broker.send(0, &connection::UpdateSecretOk {}).await;
    });
    updated.unwrap();
}
