//! Calls and their replies: Leveret's RPC client and service, and the same pattern by hand with lapin, over the embedded
//! broker and a real RabbitMQ.
//!
//! Candidates run in turns, client and server each in a process of its own; the median by the CPU time of both counts. Each
//! reply is compared with its request, so a run in which a caller gets another's reply has failed.

use std::fmt::Write;

use clap::{Args, ValueEnum};
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
use child::Both;
use jobs::{Broker, Candidate, Side};

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
    /// Calls per run with 100 in flight; a tenth of it with one
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..))]
    calls: u64,
    /// Bytes per body
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(8..))]
    size: u32,
    /// Which RabbitMQ
    #[arg(long, default_value_t = Version::V4_3)]
    rabbitmq: Version,
}

/// One candidate over one broker, with so many calls in flight.
pub(crate) struct Row {
    broker: Broker,
    in_flight: u64,
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

    /// How many times the calls of lapin it makes of the same CPU time.
    fn times_lapin(&self, rows: &[Row]) -> Option<f64> {
        let theirs = rows.iter().find(|row| {
            (row.broker, row.in_flight, row.candidate)
                == (self.broker, self.in_flight, Candidate::Lapin)
        })?;
        Some(self.calls_per_cpu_second()? / theirs.calls_per_cpu_second()?)
    }

    /// What was hoped for, and whether it came true.
    fn target(&self, rows: &[Row]) -> Option<bool> {
        let counts = self.in_flight == 100 && self.candidate == Candidate::Leveret;
        counts.then(|| self.times_lapin(rows).map(|times| times >= 3.0)).flatten()
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

/// What is asked for or, if nothing is, all there is.
fn chosen<T: ValueEnum + Clone>(asked_for: &[T]) -> Vec<T> {
    if asked_for.is_empty() { T::value_variants().to_vec() } else { asked_for.to_vec() }
}

/// Everything over one broker.
async fn over(
    broker: Broker,
    port: u16,
    arguments: &Arguments,
    rounds: u32,
) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    for &in_flight in &arguments.in_flight {
        let calls = if in_flight == 1 { arguments.calls.div_ceil(10) } else { arguments.calls };
        let run = Run {
            candidate: Candidate::Leveret,
            side: Side::Client,
            port,
            calls,
            in_flight,
            size: arguments.size,
        };
        let candidates = chosen(&arguments.candidate);
        let mut results: Vec<Result<Vec<Both>, String>> = vec![Ok(Vec::new()); candidates.len()];
        for _ in 0..rounds {
            for (candidate, result) in candidates.iter().zip(&mut results) {
                // One failure is enough to say so.
                let Ok(runs) = result else { continue };
                match child::start(Run { candidate: *candidate, ..run }).await? {
                    Ok(both) => runs.push(both),
                    Err(reason) => *result = Err(reason),
                }
            }
        }
        rows.extend(candidates.into_iter().zip(results).map(|(candidate, result)| Row {
            broker,
            in_flight,
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
    let _ = writeln!(
        out,
        "{:<9} {:>9} {:<8} {:>7} {:>10} {:>10} {:>9} {:>8} {:>8} {:>11} {:>8}",
        "broker",
        "in flight",
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
        let Row { broker, in_flight, candidate, result } = row;
        let _ = write!(out, "{broker:<9} {in_flight:>9} {candidate:<8} ");
        let _ = match result {
            Err(reason) => writeln!(out, "FAILED: {reason}"),
            Ok(Both { client, server }) => writeln!(
                out,
                "{:>7} {:>10.2} {:>10.2} {:>9.0} {:>8} {:>8} {:>11.0} {:>8} {}",
                client.messages,
                client.cpu_us_per_message(),
                server.cpu_us_per_message(),
                client.messages as f64 / client.wall.as_secs_f64(),
                client.latency.map_or(0, |latency| latency.p50.as_micros()),
                client.latency.map_or(0, |latency| latency.p99.as_micros()),
                row.calls_per_cpu_second().unwrap_or_default(),
                row.times_lapin(rows).map_or(String::new(), |times| format!("{times:.2}")),
                row.target(rows).map_or("", |met| if met { "≥ 3 met" } else { "≥ 3 MISSED" }),
            ),
        };
    }
    let _ = writeln!(
        out,
        "CPU: µs per call, of the process; calls/CPU s: of both processes together; × lapin: times what lapin does with the \
         same CPU time"
    );
    out
}

pub(crate) fn json(rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let mut value = json!({
            "broker": row.broker.to_string(),
            "in_flight": row.in_flight,
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
