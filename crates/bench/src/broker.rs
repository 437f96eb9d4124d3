//! Whole brokers: Leveret's embedded one and RabbitMQ, with Leveret's client on either.
//!
//! The broker runs in a process of its own, so that its CPU time and memory are its own; `memory` is the embedded broker
//! in the client's process, without a socket.

mod jobs;
mod process;

use std::time::Duration;

use clap::Args;
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use serde_json::{Value, json};

use crate::client::Failure;
use jobs::{Flow, Target};
pub(crate) use process::{EmbeddedBroker, serve};

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

/// One line of the table.
pub(crate) struct Row {
    what: String,
    broker: &'static str,
    value: f64,
    unit: &'static str,
    /// What was hoped for, and whether it came true.
    target: Option<(String, bool)>,
}

impl Row {
    fn new(what: &str, broker: &'static str, value: f64, unit: &'static str) -> Self {
        Row { what: what.to_owned(), broker, value, unit, target: None }
    }

    fn at_least(mut self, target: f64) -> Self {
        self.target = Some((format!("≥ {target:.0}"), self.value >= target));
        self
    }

    fn at_most(mut self, target: f64) -> Self {
        self.target = Some((format!("≤ {target:.0}"), self.value <= target));
        self
    }
}

/// The least that is expected of the embedded broker over TCP, in messages per second.
fn expected(flow: Flow) -> f64 {
    match flow {
        Flow::AutoAck => 800_000.0,
        Flow::Confirmed => 300_000.0,
    }
}

/// How many times RabbitMQ's rate is expected.
const TIMES_RABBITMQ: f64 = 8.0;

pub(crate) fn run(arguments: &Arguments, rounds: u32) -> Result<Vec<Row>, Failure> {
    tokio::runtime::Runtime::new()?.block_on(measure(arguments, rounds))
}

async fn measure(arguments: &Arguments, rounds: u32) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    let rabbitmq = match arguments.rabbitmq.as_str() {
        "none" => None,
        version => Some(RabbitNode::start(version.parse::<Version>()?).await),
    };
    for flow in [Flow::AutoAck, Flow::Confirmed] {
        rows.extend(end_to_end(arguments, rounds, flow, rabbitmq.as_ref()).await?);
    }
    drop(rabbitmq);
    rows.extend(topics(arguments, rounds).await?);
    rows.push(backlog(arguments.backlog).await?);
    rows.push(idle_connections(arguments.idle).await?);
    Ok(rows)
}

/// Publish → queue → consume, all at once.
async fn end_to_end(
    arguments: &Arguments,
    rounds: u32,
    flow: Flow,
    rabbitmq: Option<&RabbitNode>,
) -> Result<Vec<Row>, Failure> {
    let broker = EmbeddedBroker::start()?;
    let (mut tcp, mut memory, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    let mut broker_cpu = Vec::new();
    for round in 0..rounds {
        let cpu = broker.cpu_time()?;
        let target = Target { url: broker.url(), messages: arguments.messages };
        tcp.push(jobs::end_to_end(&target, flow).await?);
        let spent = broker.cpu_time()? - cpu;
        broker_cpu.push(spent.as_secs_f64() * 1e6 / arguments.messages as f64);
        let url = format!("memory://{flow:?}-{round}");
        memory.push(jobs::end_to_end(&Target { url, ..target }, flow).await?);
        if let Some(node) = rabbitmq {
            let target = Target { url: node.url(), messages: arguments.messages / 10 };
            theirs.push(jobs::end_to_end(&target, flow).await?);
        }
    }
    let what = match flow {
        Flow::AutoAck => "end to end, 16 B, auto-ack, no confirms",
        Flow::Confirmed => "end to end, 16 B, confirms and acks",
    };
    let ours = median(tcp);
    let mut rows = vec![
        Row::new(what, "embedded, TCP", ours, "messages/s").at_least(expected(flow)),
        Row::new("  its CPU", "embedded, TCP", median(broker_cpu), "µs/message"),
        Row::new(what, "embedded, memory", median(memory), "messages/s").at_least(ours),
    ];
    if !theirs.is_empty() {
        let theirs = median(theirs);
        rows.push(Row::new(what, "RabbitMQ", theirs, "messages/s"));
        let times = Row::new("  times RabbitMQ", "embedded, TCP", ours / theirs, "");
        rows.push(times.at_least(TIMES_RABBITMQ));
    }
    Ok(rows)
}

/// What a message costs the broker with few bindings and with many.
async fn topics(arguments: &Arguments, rounds: u32) -> Result<Vec<Row>, Failure> {
    let mut costs = Vec::new();
    for bindings in [10, 10_000] {
        let broker = EmbeddedBroker::start()?;
        let target = Target { url: broker.url(), messages: arguments.messages / 4 };
        let topics = jobs::Topics::bind(&target, bindings).await?;
        let mut samples = Vec::new();
        for _ in 0..rounds {
            let cpu = broker.cpu_time()?;
            topics.publish(&target).await?;
            let spent = broker.cpu_time()? - cpu;
            samples.push(spent.as_secs_f64() * 1e6 / target.messages as f64);
        }
        costs.push(median(samples));
    }
    let (few, many) = (costs[0], costs[1]);
    Ok(vec![
        Row::new("CPU with 10 topic bindings", "embedded, TCP", few, "µs/message"),
        Row::new("CPU with 10,000", "embedded, TCP", many, "µs/message"),
        Row::new("  times as much", "embedded, TCP", many / few, "").at_most(2.0),
    ])
}

/// What a message in a queue costs beside its body.
async fn backlog(messages: u64) -> Result<Row, Failure> {
    let broker = EmbeddedBroker::start()?;
    let target = Target { url: broker.url(), messages };
    jobs::fill(&Target { messages: 1000, ..target.clone() }).await?;
    let before = broker.memory()?;
    jobs::fill(&target).await?;
    let each = (broker.memory()? - before) as f64 / messages as f64 - jobs::BODY as f64;
    let what = format!("overhead of a message in a queue of {messages}");
    Ok(Row::new(&what, "embedded, TCP", each, "bytes").at_most(150.0))
}

/// What a connection costs that does nothing.
async fn idle_connections(count: u64) -> Result<Row, Failure> {
    let broker = EmbeddedBroker::start()?;
    let _warm = jobs::connect(&broker.url(), 10).await?;
    let before = broker.memory()?;
    let _idle = jobs::connect(&broker.url(), count).await?;
    // They have been served once they are open; what the broker frees after that takes a moment.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let each = (broker.memory()? - before) as f64 / 1024.0 / count as f64;
    let what = format!("an idle connection of {count}");
    Ok(Row::new(&what, "embedded, TCP", each, "KiB").at_most(20.0))
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

pub(crate) fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.what.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for Row { what, broker, value, unit, target } in rows {
        let value = if *value < 100.0 { format!("{value:.2}") } else { format!("{value:.0}") };
        let target = match target {
            Some((target, true)) => format!("{target}, met"),
            Some((target, false)) => format!("{target}, MISSED"),
            None => String::new(),
        };
        let line = format!("{what:width$}  {broker:16}  {value:>10} {unit:10}  {target}");
        text += line.trim_end();
        text.push('\n');
    }
    text
}

pub(crate) fn json(rows: &[Row]) -> Value {
    let row = |row: &Row| {
        json!({
            "what": row.what.trim(),
            "broker": row.broker,
            "value": row.value,
            "unit": row.unit,
            "target": row.target.as_ref().map(|(target, _)| target),
            "met": row.target.as_ref().map(|(_, met)| met),
        })
    };
    rows.iter().map(row).collect()
}
