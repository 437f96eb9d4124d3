//! The RabbitMQ of a command, and what is done to its queues before and after a run.

use std::time::Duration;

use bytes::Bytes;
use leveret::amqp::{
    Channel, Confirm, Connection, DeleteQueue, Options, Plain, Properties, Publish, QueueOptions,
};
use leveret_testkit::rabbitmq::{RabbitNode, Version};

use crate::meter::{Failure, expect};

/// How long a broker may take to confirm what fills a queue, or to hand out what is in it.
pub(crate) const BROKER_DEADLINE: Duration = Duration::from_secs(120);

/// A queue that keeps nothing on disk: the disk is not what is measured.
pub(crate) fn transient() -> QueueOptions {
    QueueOptions { durable: false, ..QueueOptions::default() }
}

pub(crate) async fn connect(url: &str) -> Result<Connection, Failure> {
    Ok(Connection::open(&Options::from_uri(url)?).await?)
}

/// A node, and a connection beside those of the runs.
pub(crate) struct RabbitMq {
    node: RabbitNode,
    connection: Connection,
}

impl RabbitMq {
    pub(crate) async fn start(version: Version) -> Result<RabbitMq, Failure> {
        let node = RabbitNode::start(version).await;
        let connection = connect(&node.url()).await?;
        Ok(RabbitMq { node, connection })
    }

    pub(crate) fn port(&self) -> u16 {
        self.node.port()
    }

    pub(crate) fn url(&self) -> String {
        self.node.url()
    }

    /// A refused method costs its channel. So each step has a channel of its own.
    pub(crate) async fn channel(&self) -> Result<Channel<Plain>, Failure> {
        Ok(self.connection.open_channel().await?)
    }

    pub(crate) async fn declare(&self, queue: &str, options: QueueOptions) -> Result<(), Failure> {
        let channel = self.channel().await?;
        channel.declare_queue(queue, options).await?;
        Ok(channel.close().await?)
    }

    /// Puts messages into a queue.
    pub(crate) async fn fill(
        &self,
        queue: &str,
        properties: Properties<'_>,
        bodies: impl Iterator<Item = Bytes>,
    ) -> Result<(), Failure> {
        let channel = self.channel().await?.into_confirm().await?;
        let publish = |body| Publish {
            routing_key: queue,
            properties: properties.clone(),
            body,
            ..Publish::default()
        };
        publish_all(&channel, bodies.map(publish)).await?;
        Ok(channel.close().await?)
    }

    /// Empties a queue, and gives how many messages were in it.
    pub(crate) async fn purge(&self, queue: &str) -> Result<u64, Failure> {
        let channel = self.channel().await?;
        let purged = channel.purge_queue(queue).await?;
        channel.close().await?;
        Ok(purged.into())
    }

    /// Takes a queue away, and gives how many messages were in it.
    pub(crate) async fn delete(&self, queue: &str) -> Result<u64, Failure> {
        let channel = self.channel().await?;
        let deleted = channel.delete_queue(queue, DeleteQueue::default()).await?;
        channel.close().await?;
        Ok(deleted.into())
    }
}

/// Publishes messages, and waits until all of them are confirmed.
pub(crate) async fn publish_all<'a>(
    channel: &Channel<Confirm>,
    messages: impl Iterator<Item = Publish<'a>>,
) -> Result<(), Failure> {
    let mut published = 0;
    for message in messages {
        drop(channel.publish(&message).await?);
        published += 1;
    }
    let tally = channel.confirmed(BROKER_DEADLINE).await?;
    expect("were confirmed", published, tally.acked)
}
