//! Calls and their replies: Leveret's RPC client and service, and the same pattern by hand with lapin, over the embedded
//! broker and a real RabbitMQ.
//!
//! Candidates run in turns, client and server each in a process of its own; the median by the CPU time of both counts. Each
//! reply is compared with its request, so a run in which a caller gets another's reply has failed.

use std::fmt::Write;

use clap::Args;
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use serde_json::{Value, json};

mod child;
mod jobs;
mod lapin;
mod leveret;

pub(crate) use child::run_one;
pub(crate) use jobs::Run;

use crate::broker::EmbeddedBroker;
use crate::client::{Failure, Measured};
use crate::turns::{chosen, in_turns};
use child::Both;
use jobs::{Broker, Callers, Candidate, Side};

/// What to measure. Options that name several things may be given more than once.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Only these brokers
    #[arg(long, value_enum)]
    broker: Vec<Broker>,
    /// Only these candidates
    #[arg(long, value_enum)]
    candidate: Vec<Candidate>,
    /// Calls that are in flight at a time
    #[arg(long, default_values_t = [1, 10, 100], value_parser = clap::value_parser!(u64).range(1..=1000))]
    in_flight: Vec<u64>,
    /// Only callers that run so
    #[arg(long, value_enum)]
    callers: Vec<Callers>,
    /// How the server's handlers run. With tasks, Leveret's service runs as it does by default: who is done at once gets none
    #[arg(long, value_enum, default_value_t = Callers::Together)]
    handlers: Callers,
    /// Calls have a timeout, as most have
    #[arg(long)]
    timeout: bool,
    /// Calls per run with 100 in flight; a tenth of it with one
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..))]
    calls: u64,
    /// Bytes per body
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(8..))]
    size: u32,
    /// Threads of client and server each; as many as there are cores if not said
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Which RabbitMQ
    #[arg(long, default_value_t = Version::V4_3)]
    rabbitmq: Version,
}

/// One candidate over one broker, with so many calls in flight.
pub(crate) struct Row {
    broker: Broker,
    in_flight: u64,
    callers: Callers,
    handlers: Callers,
    timeout: bool,
    candidate: Candidate,
    /// The median run, or why a run failed.
    result: Result<Both, String>,
}

impl Row {
    /// Calls per second of CPU time of client and server together.
    fn calls_per_cpu_second(&self) -> Option<f64> {
        let both = self.result.as_ref().ok()?;
        Some(both.client.messages as f64 / both.cpu().as_secs_f64())
    }

    /// How many times the calls of lapin it makes of the same CPU time, as client and as server.
    fn times_lapin(&self, rows: &[Row]) -> Option<[f64; 2]> {
        let theirs = rows.iter().find(|row| {
            (row.broker, row.in_flight, row.callers, row.candidate)
                == (self.broker, self.in_flight, self.callers, Candidate::Lapin)
        })?;
        let (ours, theirs) = (self.result.as_ref().ok()?, theirs.result.as_ref().ok()?);
        let times = |theirs: &Measured, ours: &Measured| {
            theirs.cpu_us_per_message() / ours.cpu_us_per_message()
        };
        Some([times(&theirs.client, &ours.client), times(&theirs.server, &ours.server)])
    }

    /// What was hoped for, and whether it came true, on both sides.
    fn target(&self, rows: &[Row]) -> Option<bool> {
        let counts = self.in_flight == 100 && self.candidate == Candidate::Leveret;
        let times = counts.then(|| self.times_lapin(rows)).flatten()?;
        Some(times.iter().all(|times| *times >= 3.0))
    }
}

/// Runs everything, `rounds` times each.
pub(crate) fn run(arguments: &Arguments, rounds: u32) -> Result<Vec<Row>, Failure> {
    tokio::runtime::Runtime::new()?.block_on(async {
        let mut rows = Vec::new();
        for broker in chosen(&arguments.broker) {
            match broker {
                Broker::Embedded => {
                    let embedded = EmbeddedBroker::start()?;
                    rows.extend(over(broker, embedded.port(), arguments, rounds).await?);
                }
                Broker::Rabbitmq => {
                    let node = RabbitNode::start(arguments.rabbitmq).await;
                    rows.extend(over(broker, node.port(), arguments, rounds).await?);
                }
            }
        }
        Ok(rows)
    })
}

/// Everything over one broker.
async fn over(
    broker: Broker,
    port: u16,
    arguments: &Arguments,
    rounds: u32,
) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    let in_flight = arguments.in_flight.iter();
    let chosen_callers = chosen(&arguments.callers);
    for (&in_flight, &callers) in in_flight.flat_map(|n| chosen_callers.iter().map(move |c| (n, c)))
    {
        // One caller is one task.
        if in_flight == 1 && callers != chosen_callers[0] {
            continue;
        }
        let calls = if in_flight == 1 { arguments.calls.div_ceil(10) } else { arguments.calls };
        let run = Run {
            candidate: Candidate::Leveret,
            side: Side::Client,
            port,
            calls,
            in_flight,
            callers,
            handlers: arguments.handlers,
            timeout: arguments.timeout,
            size: arguments.size,
            threads: arguments.threads,
        };
        let start = async |candidate| child::start(Run { candidate, ..run }).await;
        let results = in_turns(chosen(&arguments.candidate), rounds, start).await?;
        rows.extend(results.into_iter().map(|(candidate, result)| Row {
            broker,
            in_flight,
            callers,
            handlers: arguments.handlers,
            timeout: arguments.timeout,
            candidate,
            result: result.map(median),
        }));
    }
    Ok(rows)
}

fn median(mut runs: Vec<Both>) -> Both {
    runs.sort_by_key(Both::cpu);
    runs.swap_remove(runs.len() / 2)
}

pub(crate) fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    if let Some(Row { handlers, timeout, .. }) = rows.first() {
        let timeout = if *timeout { "with" } else { "without" };
        let _ = writeln!(out, "handlers: {handlers}; calls {timeout} a timeout");
    }
    let _ = writeln!(
        out,
        "{:<9} {:>9} {:<8} {:<8} {:>7} {:>10} {:>10} {:>9} {:>8} {:>8} {:>11} {:>13}",
        "broker",
        "in flight",
        "callers",
        "with",
        "calls",
        "CPU client",
        "CPU server",
        "calls/s",
        "p50 µs",
        "p99 µs",
        "calls/CPU s",
        "× lapin",
    );
    for row in rows {
        let Row { broker, in_flight, callers, candidate, result, .. } = row;
        let _ = write!(out, "{broker:<9} {in_flight:>9} {callers:<8} {candidate:<8} ");
        let _ = match result {
            Err(reason) => writeln!(out, "FAILED: {reason}"),
            Ok(Both { client, server }) => writeln!(
                out,
                "{:>7} {:>10.2} {:>10.2} {:>9.0} {:>8} {:>8} {:>11.0} {:>13} {}",
                client.messages,
                client.cpu_us_per_message(),
                server.cpu_us_per_message(),
                client.messages as f64 / client.wall.as_secs_f64(),
                client.latency.map_or(0, |latency| latency.p50.as_micros()),
                client.latency.map_or(0, |latency| latency.p99.as_micros()),
                row.calls_per_cpu_second().unwrap_or_default(),
                row.times_lapin(rows).map_or(String::new(), |[client, server]| {
                    format!("{client:.2} / {server:.2}")
                }),
                row.target(rows).map_or("", |met| if met { "≥ 3 met" } else { "≥ 3 MISSED" }),
            ),
        };
    }
    let _ = writeln!(
        out,
        "CPU: µs per call, of the process; calls/CPU s: of both processes together; × lapin: times what lapin does with the \
         same CPU time, as client and as server"
    );
    out
}

pub(crate) fn json(rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let mut value = json!({
            "broker": row.broker.to_string(),
            "in_flight": row.in_flight,
            "callers": row.callers.to_string(),
            "handlers": row.handlers.to_string(),
            "timeout": row.timeout,
            "candidate": row.candidate.to_string(),
        });
        match &row.result {
            Err(reason) => value["failed"] = json!(reason),
            Ok(both) => {
                let side = |measured: &Measured| measured.to_json();
                value["calls_per_cpu_second"] = json!(row.calls_per_cpu_second());
                value["times_lapin"] = json!(row.times_lapin(rows));
                value["client"] = side(&both.client);
                value["server"] = side(&both.server);
            }
        }
        value
    };
    rows.iter().map(row).collect()
}
