//! A real RabbitMQ, and the queues that a run needs on it.

use std::time::Duration;

use bytes::Bytes;
use leveret::amqp::{Channel, Confirm, Connection, DeleteQueue, Options, Publish, QueueOptions};
use leveret_testkit::rabbitmq::RabbitNode;

use super::jobs::{Job, PUBLISHED, Run};
use crate::meter::Failure;

/// How long the broker may take to confirm what fills a queue.
const PATIENCE: Duration = Duration::from_secs(60);

/// A node of its own, and a channel to prepare queues with.
pub(crate) struct Broker {
    node: RabbitNode,
    _connection: Connection,
    channel: Channel<Confirm>,
}

impl Broker {
    pub(crate) async fn start(node: RabbitNode) -> Result<Broker, Failure> {
        let connection = Connection::open(&Options::from_uri(&node.url())?).await?;
        let channel = connection.open_channel().await?.into_confirm().await?;
        channel.declare_queue(PUBLISHED, queue_options()).await?;
        Ok(Broker { node, _connection: connection, channel })
    }

    pub(crate) fn port(&self) -> u16 {
        self.node.port()
    }

    /// Makes the queues of a run, and fills them if it consumes.
    pub(crate) async fn prepare(&self, run: Run) -> Result<(), Failure> {
        if run.job == Job::Publish {
            return Ok(());
        }
        let body = Bytes::from(vec![b'x'; run.size]);
        for queue in (0..run.channels).map(|place| run.queue(place)) {
            self.channel.declare_queue(&queue, queue_options()).await?;
            if run.job.consumes() {
                for _ in 0..run.share() {
                    let publish =
                        Publish { routing_key: &queue, body: body.clone(), ..Publish::default() };
                    drop(self.channel.publish(&publish).await?);
                }
                self.channel.confirmed(PATIENCE).await?;
            }
        }
        Ok(())
    }

    /// Takes the queues of a run away, and gives how many messages were in them.
    pub(crate) async fn clear(&self, run: Run) -> Result<u64, Failure> {
        let mut left = 0;
        for place in 0..run.channels {
            let queue = run.queue(place);
            let deleted = self.channel.delete_queue(&queue, DeleteQueue::default()).await?;
            left += u64::from(deleted);
        }
        Ok(left)
    }
}

/// In memory: the disk is not what is measured.
fn queue_options() -> QueueOptions {
    QueueOptions { durable: false, ..QueueOptions::default() }
}
