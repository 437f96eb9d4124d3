//! Trying failed messages again, parking and replaying them: Leveret's consumer and parking lot, and the same objects driven
//! by lapin code written by hand, on a real RabbitMQ.
//!
//! After each run the queues are emptied, and a run after which a message is not where it belongs, or is there twice, has failed.
//! The objects stay from one run to the next: the broker would refuse a candidate that declares another one.

use std::time::Duration;

use ::leveret::amqp::{
    Channel, ConsumeOptions, Delivery, Plain, Properties, QueueOptions, Value as AmqpValue,
};
use clap::{Args, ValueEnum};
use leveret_testkit::rabbitmq::Version;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

mod delivery_counts;
mod lapin;
mod leveret;

use crate::child;
use crate::message::numbered;
use crate::meter::{Failure, Measured, expect};
use crate::rabbitmq::{BROKER_DEADLINE, RabbitMq};
use crate::suite::{self, ArgumentsOf, Suite};
use delivery_counts::DeliveryCounts;

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

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Candidate {
    /// Leveret's consumer with a retry policy, and its parking lot
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

#[derive(Args, Clone, Copy)]
pub(crate) struct Options {
    /// The version of RabbitMQ
    #[arg(long, default_value = "4.3")]
    rabbitmq: Version,
    #[command(flatten)]
    load: LoadOptions,
}

#[derive(Args, Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct LoadOptions {
    /// Bytes per body
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(8..))]
    size: u32,
    /// Handlers of Leveret's consumer that may run at once
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    workers: u32,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Setting {
    /// Where RabbitMQ listens on 127.0.0.1
    port: u16,
    load: LoadOptions,
}

type Run = suite::Run<Job, Candidate, Setting>;

pub(crate) struct Retries {
    options: Options,
    rabbitmq: RabbitMq,
}

impl Suite for Retries {
    const NAME: &'static str = "retry";
    const DEADLINE: Duration = Duration::from_secs(120);
    const NOTES: &'static str = "Time is from connected to closed. That of fail-once has the second in it for which even the last \
        message waits.";

    type Job = Job;
    type Candidate = Candidate;
    type Options = Options;
    type Setting = Setting;

    async fn start(arguments: &mut ArgumentsOf<Self>) -> Result<Self, Failure> {
        let options = arguments.options;
        let rabbitmq = RabbitMq::start(options.rabbitmq).await?;
        rabbitmq.declare(QUEUE, QueueOptions::default()).await?;
        Ok(Retries { options, rabbitmq })
    }

    fn settings(&self, _: Job) -> Vec<Setting> {
        vec![Setting { port: self.rabbitmq.port(), load: self.options.load }]
    }

    fn messages(_: Job, _: Candidate, _: &Setting, asked: Option<u64>) -> Option<u64> {
        Some(asked.unwrap_or(100_000))
    }

    /// Puts the messages into the queue; to be replayed, they are parked.
    async fn prepare(&self, run: &Run) -> Result<(), Failure> {
        let properties = Properties { delivery_mode: Some(2), ..Properties::default() };
        let bodies = (0..run.messages).map(|number| numbered(number, run.setting.load.size));
        self.rabbitmq.fill(QUEUE, properties, bodies).await?;
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
        let channel = self.rabbitmq.channel().await?;
        let found = match run.job {
            Job::FailOnce => Ok(()),
            Job::Park => timeout(BROKER_DEADLINE, collect(&channel, PARKED, run)).await?,
            Job::Replay => timeout(BROKER_DEADLINE, collect(&channel, QUEUE, run)).await?,
        };
        channel.close().await?;
        let mut elsewhere = 0;
        for queue in [QUEUE, WAIT_QUEUE, PARKED] {
            elsewhere += self.rabbitmq.purge(queue).await?;
        }
        found.and(expect("are where they do not belong", 0, elsewhere))
    }

    fn is_peer(candidate: Candidate) -> bool {
        candidate == Candidate::Lapin
    }
}

/// Takes as many messages from a queue as the run had. Fails if they are not exactly those of the run, or one does not look
/// as it should.
async fn collect(channel: &Channel<Plain>, queue: &str, run: &Run) -> Result<(), Failure> {
    let here = channel.inspect_queue(queue).await?.messages;
    expect(&format!("are in {queue}"), run.messages, here.into())?;
    let options = ConsumeOptions { auto_ack: true, ..ConsumeOptions::default() };
    let mut consumer = channel.consume(queue, options).await?;
    let counts = DeliveryCounts::new(Job::Park, run.messages);
    for _ in 0..run.messages {
        let delivery = consumer.next().await.ok_or("the consumer ended")??;
        check_marks(run.job, &delivery)?;
        counts.count(delivery.body());
    }
    counts.expect_each(1)
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
