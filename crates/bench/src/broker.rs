//! Whole brokers: Leveret's embedded one and RabbitMQ, with Leveret's engine on either.
//!
//! The embedded broker runs in a process of its own, which a run starts, so that its CPU time and memory are its own; `memory`
//! is the embedded broker in the client's process, without a socket.

mod jobs;
pub(crate) mod process;

use std::time::Duration;

use clap::{Args, ValueEnum};
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::meter::{Failure, Measured};
use crate::suite::{Row, Suite, name};
use crate::table::Target;
use jobs::Load;
pub(crate) use process::EmbeddedBroker;

#[derive(Args)]
pub(crate) struct Arguments {
    /// The RabbitMQ to compare with: 3.10, 4.0 or 4.3; or none
    #[arg(long, default_value = "3.10")]
    rabbitmq: String,
    /// Messages per run on the embedded broker; a tenth of it on RabbitMQ
    #[arg(long, default_value_t = 1_000_000)]
    messages: u64,
    /// Messages in the queue whose memory is measured
    #[arg(long, default_value_t = 5_000_000)]
    backlog: u64,
    /// Idle connections whose memory is measured
    #[arg(long, default_value_t = 5_000)]
    idle: u64,
}

#[derive(Clone, Copy, PartialEq, ValueEnum, Serialize, Deserialize)]
enum Broker {
    #[value(name = "embedded, TCP")]
    Tcp,
    #[value(name = "embedded, memory")]
    Memory,
    #[value(name = "RabbitMQ")]
    Rabbitmq,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
enum Job {
    /// Publish → queue → consume, all at once, without confirms and acks.
    AutoAck,
    /// The same with both.
    Confirmed,
    /// What a message costs the broker with so many bindings.
    Topics(usize),
    /// What a message in a queue costs beside its body.
    Backlog,
    /// What a connection costs that does nothing.
    Idle,
}

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Run {
    job: Job,
    broker: Broker,
    /// That of RabbitMQ.
    url: Option<String>,
    /// Or connections.
    messages: u64,
}

/// The least that is expected of the embedded broker over TCP, in messages per second.
const AUTO_ACK_RATE: f64 = 800_000.0;
const CONFIRMED_RATE: f64 = 300_000.0;

/// How many times RabbitMQ's rate is expected.
const TIMES_RABBITMQ: f64 = 8.0;

const BINDINGS: [usize; 2] = [10, 10_000];

pub(crate) struct Brokers {
    arguments: Arguments,
    rabbitmq: Option<RabbitNode>,
}

impl Suite for Brokers {
    const NAME: &'static str = "broker";
    const DEADLINE: Duration = Duration::from_secs(300);
    const NOTES: &'static str = "CPU: of the broker's process; times RabbitMQ: the rate; times as much: the CPU \
        time, with many bindings; bytes, KiB: of memory that the broker holds for each";

    type Arguments = Arguments;
    type Run = Run;

    async fn start(arguments: Arguments) -> Result<Self, Failure> {
        let rabbitmq = match arguments.rabbitmq.as_str() {
            "none" => None,
            version => Some(RabbitNode::start(version.parse::<Version>()?).await),
        };
        Ok(Brokers { arguments, rabbitmq })
    }

    fn settings(&self) -> Vec<Vec<Run>> {
        let Arguments { messages, backlog, idle, .. } = self.arguments;
        let on_tcp = |job, messages| Run { job, broker: Broker::Tcp, url: None, messages };
        let mut settings = Vec::new();
        for job in [Job::AutoAck, Job::Confirmed] {
            let tcp = on_tcp(job, messages);
            let mut setting = vec![tcp.clone(), Run { broker: Broker::Memory, ..tcp }];
            if let Some(node) = &self.rabbitmq {
                let (url, messages) = (Some(node.url()), messages / 10);
                setting.push(Run { job, broker: Broker::Rabbitmq, url, messages });
            }
            settings.push(setting);
        }
        settings.extend(BINDINGS.map(|count| vec![on_tcp(Job::Topics(count), messages / 4)]));
        settings.push(vec![on_tcp(Job::Backlog, backlog)]);
        settings.push(vec![on_tcp(Job::Idle, idle)]);
        settings
    }

    fn runs_once(run: &Run) -> bool {
        matches!(run.job, Job::Backlog | Job::Idle)
    }

    async fn run(run: Run) -> Result<Measured, Failure> {
        let embedded = EmbeddedBroker::start().await?;
        let url = match (run.broker, run.url) {
            (Broker::Memory, _) => "memory://bench".to_owned(),
            (_, Some(rabbitmq)) => rabbitmq,
            (_, None) => embedded.url(),
        };
        let load = Load { url, messages: run.messages };
        match run.job {
            Job::AutoAck => jobs::end_to_end(&load, true, &embedded).await,
            Job::Confirmed => jobs::end_to_end(&load, false, &embedded).await,
            Job::Topics(bindings) => jobs::topics(&load, bindings, &embedded).await,
            Job::Backlog => jobs::backlog(&load, &embedded).await,
            Job::Idle => jobs::idle_connections(&load, &embedded).await,
        }
    }

    /// Time, or the broker's CPU time where it counts alone.
    fn cost(measured: &Measured) -> f64 {
        match measured.wall_ns {
            0 => measured.broker_cpu_ns.unwrap_or(0) as f64,
            wall_ns => wall_ns as f64,
        }
    }

    fn labels(run: &Run) -> Vec<(&'static str, Value)> {
        vec![("what", what(run).into()), ("broker", name(run.broker))]
    }

    fn comparisons(row: &Row<Run>, rows: &[Row<Run>]) -> Vec<(&'static str, Option<f64>)> {
        let is = |job| row.run.job == job;
        vec![
            ("times_RabbitMQ", times_rabbitmq(row, rows)),
            ("times_as_much", times_few_bindings(row, rows)),
            ("bytes", bytes_each(row).filter(|_| is(Job::Backlog))),
            ("KiB", bytes_each(row).map(|bytes| bytes / 1024.0).filter(|_| is(Job::Idle))),
        ]
    }

    fn targets(row: &Row<Run>, rows: &[Row<Run>]) -> Vec<Target> {
        let at_least = |least, value: Option<f64>| Some(Target::at_least(least, value?));
        let at_most = |most, value: Option<f64>| Some(Target::at_most(most, value?));
        let over_tcp = find(rows, row.run.job, Broker::Tcp).and_then(rate);
        let times_target = at_least(TIMES_RABBITMQ, times_rabbitmq(row, rows));
        let targets = match (row.run.job, row.run.broker) {
            (_, Broker::Rabbitmq) => [None, None],
            (_, Broker::Memory) => [at_least(over_tcp.unwrap_or(0.0), rate(row)), None],
            (Job::AutoAck, _) => [at_least(AUTO_ACK_RATE, rate(row)), times_target],
            (Job::Confirmed, _) => [at_least(CONFIRMED_RATE, rate(row)), times_target],
            (Job::Topics(_), _) => [at_most(2.0, times_few_bindings(row, rows)), None],
            (Job::Backlog, _) => [at_most(150.0, bytes_each(row)), None],
            (Job::Idle, _) => [at_most(20.0, bytes_each(row).map(|bytes| bytes / 1024.0)), None],
        };
        targets.into_iter().flatten().collect()
    }
}

fn what(run: &Run) -> String {
    match run.job {
        Job::AutoAck => "end to end, 16 B, auto-ack, no confirms".to_owned(),
        Job::Confirmed => "end to end, 16 B, confirms and acks".to_owned(),
        Job::Topics(bindings) if bindings == BINDINGS[0] => "CPU with 10 topic bindings".to_owned(),
        Job::Topics(_) => "CPU with 10,000".to_owned(),
        Job::Backlog => format!("overhead of a message in a queue of {}", run.messages),
        Job::Idle => format!("an idle connection of {}", run.messages),
    }
}

fn find(rows: &[Row<Run>], job: Job, broker: Broker) -> Option<&Row<Run>> {
    rows.iter().find(|row| (row.run.job, row.run.broker) == (job, broker))
}

fn rate(row: &Row<Run>) -> Option<f64> {
    row.median()?.messages_per_second()
}

fn times_rabbitmq(row: &Row<Run>, rows: &[Row<Run>]) -> Option<f64> {
    let theirs = rate(find(rows, row.run.job, Broker::Rabbitmq)?)?;
    (row.run.broker == Broker::Tcp).then_some(rate(row)? / theirs)
}

fn broker_cpu(row: &Row<Run>) -> Option<f64> {
    let measured = row.median()?;
    measured.us_per_message(measured.broker_cpu_ns)
}

fn times_few_bindings(row: &Row<Run>, rows: &[Row<Run>]) -> Option<f64> {
    let few = broker_cpu(find(rows, Job::Topics(BINDINGS[0]), Broker::Tcp)?)?;
    (row.run.job == Job::Topics(BINDINGS[1])).then_some(broker_cpu(row)? / few)
}

/// What one message or connection takes of the broker's memory, without the body.
fn bytes_each(row: &Row<Run>) -> Option<f64> {
    let measured = row.median()?;
    Some(measured.broker_bytes? as f64 / measured.messages as f64)
}
