//! A real RabbitMQ, and the messages of a run before and after it.

use std::time::Duration;

use leveret::amqp::{
    Channel, Connection, ConsumeOptions, Delivery, Options, Properties, Publish, QueueOptions,
    Value,
};
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use tokio::time::timeout;

use super::book::{Book, body};
use super::child;
use super::jobs::{Job, PARKED, QUEUE, Run, WAIT_QUEUE};
use crate::client::{Failure, expect};

/// How long the broker may take to take or give all messages.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) struct Stage {
    node: RabbitNode,
    connection: Connection,
}

impl Stage {
    pub(super) async fn start(version: Version) -> Result<Stage, Failure> {
        let node = RabbitNode::start(version).await;
        let connection = Connection::open(&Options::from_uri(&node.url())?).await?;
        connection.open_channel().await?.declare_queue(QUEUE, QueueOptions::default()).await?;
        Ok(Stage { node, connection })
    }

    pub(super) fn port(&self) -> u16 {
        self.node.port()
    }

    /// Puts the messages to where the run begins with them.
    pub(super) async fn fill(&self, run: Run) -> Result<(), Failure> {
        let channel = self.connection.open_channel().await?.into_confirm().await?;
        for number in 0..run.messages {
            let properties = Properties { delivery_mode: Some(2), ..Properties::default() };
            let body = body(number, run.size);
            let publish = Publish { routing_key: QUEUE, properties, body, ..Publish::default() };
            drop(channel.publish(&publish).await?);
        }
        let tally = channel.confirmed(PATIENCE).await?;
        expect("are in the queue", run.messages, tally.acked)?;
        channel.close().await?;
        if run.job == Job::Replay {
            child::start(Run { job: Job::Park, ..run }).await??;
        }
        Ok(())
    }

    /// Takes all messages away. Fails if they are not where the run should have left them.
    pub(super) async fn clear(&self, run: Run) -> Result<(), Failure> {
        let channel = self.connection.open_channel().await?;
        let place = match run.job {
            Job::FailOnce => None,
            Job::Park => Some(PARKED),
            Job::Replay => Some(QUEUE),
        };
        let found = match place {
            None => Ok(()),
            Some(queue) => timeout(PATIENCE, collect(&channel, queue, run)).await?,
        };
        channel.close().await?;
        let channel = self.connection.open_channel().await?;
        let mut elsewhere = 0;
        for queue in [QUEUE, WAIT_QUEUE, PARKED] {
            elsewhere += u64::from(channel.purge_queue(queue).await?);
        }
        channel.close().await?;
        found.and(expect("are where they do not belong", 0, elsewhere))
    }
}

/// Takes as many messages from a queue as the run had. Fails if they are not exactly those of the run, or one does not look
/// as it should.
async fn collect(channel: &Channel, queue: &str, run: Run) -> Result<(), Failure> {
    let here = channel.inspect_queue(queue).await?.messages;
    expect(&format!("are in {queue}"), run.messages, here.into())?;
    let options = ConsumeOptions { auto_ack: true, ..ConsumeOptions::default() };
    let mut consumer = channel.consume(queue, options).await?;
    let book = Book::new(Run { job: Job::Park, ..run });
    for _ in 0..run.messages {
        let delivery = consumer.next().await.ok_or("the consumer ended")??;
        check_marks(run.job, &delivery)?;
        book.note(delivery.body());
    }
    book.expect_each(1)
}

/// A parked message says what happened; of one that was replayed, that is forgotten.
fn check_marks(job: Job, delivery: &Delivery) -> Result<(), Failure> {
    let properties = delivery.properties();
    let headers = properties.headers.as_ref();
    let attempts = headers.and_then(|headers| headers.get("x-leveret-attempts"));
    let attempts = attempts.as_ref().and_then(Value::as_str);
    let expected = (job == Job::Park).then_some("1");
    if attempts != expected || properties.delivery_mode != Some(2) {
        return Err(format!("a message came out as {properties:?}").into());
    }
    Ok(())
}
