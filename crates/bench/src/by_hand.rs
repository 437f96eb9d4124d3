//! What candidates that are written by hand with lapin have in common.

use lapin::options::{
    BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
    QueueDeclareOptions,
};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties, Consumer};

/// A message that no queue takes comes back.
pub(crate) const MANDATORY: BasicPublishOptions =
    BasicPublishOptions { mandatory: true, immediate: false };

pub(crate) fn uri(port: u16) -> String {
    format!("amqp://guest:guest@127.0.0.1:{port}/%2f")
}

pub(crate) async fn connect(port: u16) -> lapin::Result<Connection> {
    Connection::connect(&uri(port), ConnectionProperties::default()).await
}

/// Closes a connection whose work is done: an error here is about channels that are being closed at the same time.
pub(crate) async fn close(connection: &Connection) {
    let _ = connection.close(200, "done".into()).await;
}

/// Opens a channel that confirms.
pub(crate) async fn confirm_channel(connection: &Connection) -> lapin::Result<Channel> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}

/// Consumes with this prefetch or, without one, without acks.
pub(crate) async fn consume(
    channel: &Channel,
    queue: &str,
    prefetch: Option<u16>,
) -> lapin::Result<Consumer> {
    if let Some(prefetch) = prefetch {
        channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
    }
    let options = BasicConsumeOptions { no_ack: prefetch.is_none(), ..Default::default() };
    channel.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await
}

pub(crate) async fn declare_queue(
    channel: &Channel,
    queue: &str,
    arguments: FieldTable,
) -> lapin::Result<()> {
    let options = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare(queue.into(), options, arguments).await.map(drop)
}

/// How many messages a passive declaration says are in a queue.
pub(crate) async fn messages_in(channel: &Channel, queue: &str) -> lapin::Result<u64> {
    let options = QueueDeclareOptions { passive: true, ..Default::default() };
    let queue = channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
    Ok(queue.message_count().into())
}
