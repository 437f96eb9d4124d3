//! Whole brokers: Leveret's embedded one and RabbitMQ, with Leveret's engine on either.
//!
//! The embedded broker runs in a process of its own, which a run starts, so that its CPU time and memory are its own; `memory`
//! is the embedded broker in the client's process, without a socket.

mod jobs;
pub(crate) mod process;

use std::time::Duration;

use clap::{Args, ValueEnum};
use leveret_testkit::rabbitmq::Version;
use serde::{Deserialize, Serialize};

use crate::meter::{Failure, Measured};
use crate::rabbitmq::RabbitMq;
use crate::suite::{self, ArgumentsOf, Row, Suite, chosen, ratio};
use crate::table::Target;
pub(crate) use process::EmbeddedBroker;

#[derive(Args)]
pub(crate) struct Options {
    /// The version of RabbitMQ
    #[arg(long, default_value = "3.10")]
    rabbitmq: Version,
}

#[derive(Clone, Copy, PartialEq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Broker {
    /// The embedded broker, over TCP
    Tcp,
    /// The embedded broker in the client's process, without a socket
    Memory,
    /// RabbitMQ, with a tenth of the messages
    Rabbitmq,
}

#[derive(Clone, Copy, PartialEq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Job {
    /// Publish → queue → consume, all at once, 16 B, without confirms and acks
    AutoAck,
    /// The same with both
    Confirmed,
    /// The CPU time of the broker for a message, with 10 topic bindings
    TenTopics,
    /// The same with 10,000
    ManyTopics,
    /// The memory that the broker holds for a message in a queue, without its body
    Backlog,
    /// The memory that the broker holds for a connection that does nothing; 5,000 of them at most
    Idle,
}

/// Where RabbitMQ is.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Setting {
    rabbitmq: Option<String>,
}

type Run = suite::Run<Job, Broker, Setting>;

/// The least that is expected of the embedded broker over TCP, in messages per second.
const AUTO_ACK_RATE: f64 = 800_000.0;
const CONFIRMED_RATE: f64 = 300_000.0;

/// How many times RabbitMQ's rate is expected.
const TIMES_RABBITMQ: f64 = 8.0;

/// How many times the CPU time of ten bindings 10,000 may take.
const TIMES_TEN_TOPICS: f64 = 2.0;

/// The most memory that a message in a queue may take, and a connection.
const MESSAGE_BYTES: f64 = 150.0;
const CONNECTION_BYTES: f64 = 20.0 * 1024.0;

pub(crate) struct Brokers(Option<RabbitMq>);

impl Suite for Brokers {
    const NAME: &'static str = "broker";
    const DEADLINE: Duration = Duration::from_secs(300);
    const NOTES: &'static str = "Cost is time per message or, with topics, CPU time of the broker. Server CPU is the broker's, \
        and so is the memory that it holds for each message or connection.";

    type Job = Job;
    type Candidate = Broker;
    type Options = Options;
    type Setting = Setting;

    async fn start(arguments: &mut ArgumentsOf<Self>) -> Result<Self, Failure> {
        Ok(Brokers(match chosen(&arguments.candidate).contains(&Broker::Rabbitmq) {
            true => Some(RabbitMq::start(arguments.options.rabbitmq).await?),
            false => None,
        }))
    }

    fn settings(&self, _: Job) -> Vec<Setting> {
        vec![Setting { rabbitmq: self.0.as_ref().map(RabbitMq::url) }]
    }

    fn messages(job: Job, broker: Broker, _: &Setting, asked: Option<u64>) -> Option<u64> {
        let messages = asked.unwrap_or(1_000_000);
        match (job, broker) {
            (Job::AutoAck | Job::Confirmed, Broker::Rabbitmq) => Some(messages.div_ceil(10)),
            (Job::AutoAck | Job::Confirmed, _) => Some(messages),
            (_, Broker::Memory | Broker::Rabbitmq) => None,
            (Job::TenTopics | Job::ManyTopics, Broker::Tcp) => Some(messages.div_ceil(4)),
            (Job::Backlog, Broker::Tcp) => Some(asked.unwrap_or(5_000_000)),
            (Job::Idle, Broker::Tcp) => Some(messages.min(5_000)),
        }
    }

    fn runs_once(job: Job) -> bool {
        matches!(job, Job::Backlog | Job::Idle)
    }

    async fn run(run: Run) -> Result<Measured, Failure> {
        let broker = EmbeddedBroker::start().await?;
        let url = match run.candidate {
            Broker::Memory => "memory://bench".to_owned(),
            Broker::Tcp => broker.url(),
            Broker::Rabbitmq => run.setting.rabbitmq.ok_or("RabbitMQ was not started")?,
        };
        match run.job {
            Job::AutoAck => jobs::end_to_end(url, run.messages, true, &broker).await,
            Job::Confirmed => jobs::end_to_end(url, run.messages, false, &broker).await,
            Job::TenTopics => jobs::topics(&url, run.messages, 10, &broker).await,
            Job::ManyTopics => jobs::topics(&url, run.messages, 10_000, &broker).await,
            Job::Backlog => jobs::backlog(&url, run.messages, &broker).await,
            Job::Idle => jobs::idle_connections(&url, run.messages, &broker).await,
        }
    }

    fn cost(measured: &Measured) -> f64 {
        let ns = if measured.wall_ns > 0 { Some(measured.wall_ns) } else { measured.server_cpu_ns };
        ns.unwrap_or(0) as f64 / measured.messages as f64
    }

    fn is_peer(broker: Broker) -> bool {
        broker == Broker::Rabbitmq
    }

    fn targets(row: &Row<Self>, rows: &[Row<Self>]) -> Vec<Target> {
        let rate = |row: &Row<Self>| row.median()?.messages_per_second();
        let at_least =
            |what, least, value: Option<f64>| Some(Target::at_least(what, least, value?));
        let at_most = |what, most, value: Option<f64>| Some(Target::at_most(what, most, value?));
        let times = || Some(row.times(rows, Broker::Rabbitmq)?.recip());
        let times_rabbitmq = || at_least("times RabbitMQ's rate", TIMES_RABBITMQ, times());
        let held = row.median().and_then(Measured::held_bytes_per_message);
        let targets = match (row.run.job, row.run.candidate) {
            (_, Broker::Rabbitmq) => [None, None],
            (_, Broker::Memory) => {
                let over_tcp = row.beside(rows, Broker::Tcp).and_then(rate);
                [at_least("msg/s", over_tcp.unwrap_or(0.0), rate(row)), None]
            }
            (Job::AutoAck, _) => [at_least("msg/s", AUTO_ACK_RATE, rate(row)), times_rabbitmq()],
            (Job::Confirmed, _) => [at_least("msg/s", CONFIRMED_RATE, rate(row)), times_rabbitmq()],
            (Job::TenTopics, _) => [None, None],
            (Job::ManyTopics, _) => {
                let ten = rows.iter().find(|row| row.run.job == Job::TenTopics);
                let ten = ten.and_then(Row::cost);
                let times = ten.zip(row.cost()).and_then(|(ten, many)| ratio(many, ten));
                [at_most("times ten-topics", TIMES_TEN_TOPICS, times), None]
            }
            (Job::Backlog, _) => [at_most("B", MESSAGE_BYTES, held), None],
            (Job::Idle, _) => [at_most("B", CONNECTION_BYTES, held), None],
        };
        targets.into_iter().flatten().collect()
    }
}
