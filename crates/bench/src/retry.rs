//! Trying failed messages again, parking and replaying them: Leveret's consumer and parking lot, and the same objects driven
//! by lapin code written by hand, on a real RabbitMQ.
//!
//! After each run the queues are emptied, and a run after which a message is not where it belongs, or is there twice, has failed.
//! The objects stay from one run to the next: the broker would refuse a candidate that declares another one.

use std::time::Duration;

use ::leveret::amqp::{
    Channel, Connection, ConsumeOptions, Delivery, Options, Properties, Publish, QueueOptions,
    Value as AmqpValue,
};
use clap::{Args, ValueEnum};
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::timeout;

mod book;
mod lapin;
mod leveret;

use crate::child;
use crate::meter::{Failure, Measured, expect};
use crate::suite::{Load, Row, Suite, name};
use book::{Book, body};

/// The work queue. Beside it are the objects that Leveret's default design has.
const QUEUE: &str = "bench.retry";
const WAIT_EXCHANGE: &str = "bench.retry.wait";
const WAIT_QUEUE: &str = "bench.retry.wait.1s";
const RETURN_EXCHANGE: &str = "bench.retry.return";
/// Exchange and queue.
const PARKED: &str = "bench.retry.parked";

/// How long a failed message waits.
const WAIT: Duration = Duration::from_secs(1);

/// How many deliveries may be unacked, and so how many moves may be under way.
const PREFETCH: u16 = 1000;

/// How long the broker may take to take or give all messages.
const BROKER_DEADLINE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Candidate {
    /// A consumer of Leveret with a retry policy, and its parking lot
    Leveret,
    /// The same objects and headers, but for the history of errors, by hand with lapin: many moves under way at once, each
    /// original acked when its copy is confirmed
    Lapin,
}

/// What is done with the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Job {
    /// Each message fails when it comes first, waits for a second, and succeeds
    FailOnce,
    /// Each message fails for good, and is parked
    Park,
    /// Messages that the same candidate has parked go back to their queue, as they were before they failed
    Replay,
}

/// What to measure. Options that name several things may be given more than once.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    load: Load<Job, Candidate>,
    /// Bytes per body
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(8..))]
    size: u32,
    /// How many handlers of Leveret's consumer may be at work at once
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    workers: u32,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Run {
    candidate: Candidate,
    job: Job,
    /// Where RabbitMQ listens on 127.0.0.1
    port: u16,
    size: u32,
    messages: u64,
    workers: u32,
}

pub(crate) struct Retries {
    arguments: Arguments,
    node: RabbitNode,
    connection: Connection,
}

impl Suite for Retries {
    const NAME: &'static str = "retry";
    const DEADLINE: Duration = Duration::from_secs(120);
    const NOTES: &'static str = "seconds: from connected to closed; rate at work: messages/s, of fail-once, less the one second that even the last \
        message waits; times leveret: the CPU time that leveret took; MiB: the most memory that was held";

    type Arguments = Arguments;
    type Run = Run;

    async fn start(arguments: Arguments) -> Result<Self, Failure> {
        let node = arguments.load.start_rabbitmq(Version::V4_3).await;
        let connection = Connection::open(&Options::from_uri(&node.url())?).await?;
        connection.open_channel().await?.declare_queue(QUEUE, QueueOptions::default()).await?;
        Ok(Retries { arguments, node, connection })
    }

    fn settings(&self) -> Vec<Vec<Run>> {
        let Arguments { ref load, size, workers } = self.arguments;
        let port = self.node.port();
        let of_job = |job| {
            let run = |candidate, messages| Run { candidate, job, port, size, messages, workers };
            load.settings(|_| 100_000, |candidate, messages| Some(run(candidate, messages)))
        };
        load.jobs().into_iter().flat_map(of_job).collect()
    }

    /// Puts the messages into the queue; to be replayed, they are parked.
    async fn prepare(&self, run: &Run) -> Result<(), Failure> {
        let channel = self.connection.open_channel().await?.into_confirm().await?;
        for number in 0..run.messages {
            let properties = Properties { delivery_mode: Some(2), ..Properties::default() };
            let body = body(number, run.size);
            let publish = Publish { routing_key: QUEUE, properties, body, ..Publish::default() };
            drop(channel.publish(&publish).await?);
        }
        let tally = channel.confirmed(BROKER_DEADLINE).await?;
        expect("are in the queue", run.messages, tally.acked)?;
        channel.close().await?;
        if run.job == Job::Replay {
            child::ask::<Retries>(&Run { job: Job::Park, ..*run }).await??;
        }
        Ok(())
    }

    async fn run(run: Run) -> Result<Measured, Failure> {
        match run.candidate {
            Candidate::Leveret => leveret::run(run).await,
            Candidate::Lapin => lapin::run(run).await,
        }
    }

    /// Takes all messages away. Fails if they are not where the run should have left them.
    async fn check(&self, run: &Run, _: &mut Measured) -> Result<(), Failure> {
        let channel = self.connection.open_channel().await?;
        let found = match run.job {
            Job::FailOnce => Ok(()),
            Job::Park => timeout(BROKER_DEADLINE, collect(&channel, PARKED, run)).await?,
            Job::Replay => timeout(BROKER_DEADLINE, collect(&channel, QUEUE, run)).await?,
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

    fn labels(run: &Run) -> Vec<(&'static str, Value)> {
        vec![("job", name(run.job)), ("candidate", name(run.candidate))]
    }

    fn comparisons(row: &Row<Run>, rows: &[Row<Run>]) -> Vec<(&'static str, Option<f64>)> {
        let is_leverets = |run: &Run| (run.job, run.candidate) == (row.run.job, Candidate::Leveret);
        vec![("times_leveret", row.times(rows, is_leverets)), ("rate_at_work", rate_at_work(row))]
    }
}

/// Without the one wait that even the last message of a run cannot be spared.
fn rate_at_work(row: &Row<Run>) -> Option<f64> {
    let measured = row.median()?;
    let wait = if row.run.job == Job::FailOnce { WAIT.as_secs_f64() } else { 0.0 };
    Some(measured.messages as f64 / (measured.seconds() - wait).max(0.0))
}

/// Takes as many messages from a queue as the run had. Fails if they are not exactly those of the run, or one does not look
/// as it should.
async fn collect(channel: &Channel, queue: &str, run: &Run) -> Result<(), Failure> {
    let here = channel.inspect_queue(queue).await?.messages;
    expect(&format!("are in {queue}"), run.messages, here.into())?;
    let options = ConsumeOptions { auto_ack: true, ..ConsumeOptions::default() };
    let mut consumer = channel.consume(queue, options).await?;
    let book = Book::new(Job::Park, run.messages);
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
    let attempts = attempts.as_ref().and_then(AmqpValue::as_str);
    let expected = (job == Job::Park).then_some("1");
    if attempts != expected || properties.delivery_mode != Some(2) {
        return Err(format!("a message came out as {properties:?}").into());
    }
    Ok(())
}
