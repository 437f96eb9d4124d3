//! Sending what is in an outbox: Leveret's relay, and relays written by hand with sqlx and lapin, between a real PostgreSQL and a
//! real RabbitMQ; and Leveret's relay on SQLite, whose work is in the relay's own process.
//!
//! Candidates run in turns, each run in a process of its own; the median by CPU time counts. Before each run the table is
//! filled, and a run after which not every message is in the queue, once, or a row is left, has failed. PostgreSQL is that of
//! the tests, which does not wait for the disk: elsewhere a commit for each message costs more. Neither does SQLite.

use std::fmt::Write;

use clap::Args;
use leveret_testkit::rabbitmq::Version;
use serde_json::{Value, json};

mod by_hand;
mod child;
mod jobs;
mod leveret;
mod stage;

pub(crate) use child::run_one;
pub(crate) use jobs::Run;

use crate::client::{Failure, Measured, median};
use crate::turns::{chosen, in_turns};
use jobs::{Candidate, Job};
use stage::Stage;

/// What to measure. Options that name several things may be given more than once.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Only these jobs
    #[arg(long, value_enum)]
    job: Vec<Job>,
    /// Only these candidates
    #[arg(long, value_enum)]
    candidate: Vec<Candidate>,
    /// Messages per run
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..))]
    messages: u64,
    /// Bytes per body
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(8..))]
    size: u32,
    /// Which RabbitMQ
    #[arg(long, default_value_t = Version::V4_3)]
    rabbitmq: Version,
}

/// One candidate at one job.
pub(crate) struct Row {
    job: Job,
    candidate: Candidate,
    /// The median run, or why a run failed.
    result: Result<Measured, String>,
}

impl Row {
    /// How many times the CPU time that Leveret took for the same job.
    fn times_leveret(&self, rows: &[Row]) -> Option<f64> {
        let cpu = |row: &Row| row.result.as_ref().ok().map(Measured::cpu_us_per_message);
        let is_ours = |row: &&Row| row.job == self.job && row.candidate == Candidate::Leveret;
        Some(cpu(self)? / cpu(rows.iter().find(is_ours)?)?)
    }
}

/// Runs everything, `rounds` times each.
pub(crate) fn run(arguments: &Arguments, rounds: u32) -> Result<Vec<Row>, Failure> {
    tokio::runtime::Runtime::new()?.block_on(async {
        let stage = Stage::start(arguments.rabbitmq).await?;
        let mut rows = Vec::new();
        for job in chosen(&arguments.job) {
            rows.extend(compare(job, arguments, &stage, rounds).await?);
        }
        Ok(rows)
    })
}

/// Has the candidates do one job in turns.
async fn compare(
    job: Job,
    arguments: &Arguments,
    stage: &Stage,
    rounds: u32,
) -> Result<Vec<Row>, Failure> {
    let Arguments { messages, size, .. } = *arguments;
    let can = |candidate: &Candidate| candidate.can(job);
    let candidates = chosen(&arguments.candidate).into_iter().filter(can).collect();
    let run = async |candidate| {
        let run = stage.run(candidate, job, messages, size);
        stage.fill(&run).await?;
        let measured = child::start(&run).await?;
        let checked = stage.clear(&run).await.map_err(|wrong| wrong.to_string());
        Ok(measured.and_then(|measured| checked.map(|()| measured)))
    };
    let results = in_turns(candidates, rounds, run).await?;
    let row = |(candidate, result): (Candidate, Result<Vec<Measured>, String>)| Row {
        job,
        candidate,
        result: result.map(median),
    };
    Ok(results.into_iter().map(row).collect())
}

pub(crate) fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{:<10} {:<17} {:>9} {:>11} {:>10} {:>9} {:>8} {:>7}",
        "job", "with", "messages", "CPU µs/row", "× leveret", "rows/s", "seconds", "MiB",
    );
    for row in rows {
        let Row { job, candidate, result } = row;
        let _ = write!(out, "{job:<10} {candidate:<17} ");
        let _ = match result {
            Err(reason) => writeln!(out, "FAILED: {reason}"),
            Ok(measured) => writeln!(
                out,
                "{:>9} {:>11.2} {:>10} {:>9.0} {:>8.2} {:>7.1}",
                measured.messages,
                measured.cpu_us_per_message(),
                row.times_leveret(rows).map_or(String::new(), |times| format!("{times:.2}")),
                measured.messages_per_second(),
                measured.wall.as_secs_f64(),
                measured.memory_kib as f64 / 1024.0,
            ),
        };
    }
    let _ = writeln!(
        out,
        "CPU: of the relay's process, without the servers, and on SQLite with the database; × leveret: times the CPU time that \
         leveret took; MiB: the most memory that was held"
    );
    out
}

pub(crate) fn json(rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let mut value =
            json!({ "job": row.job.to_string(), "candidate": row.candidate.to_string() });
        match &row.result {
            Err(reason) => value["failed"] = json!(reason),
            Ok(measured) => {
                value["cpu_us_per_row"] = json!(measured.cpu_us_per_message());
                value["rows_per_second"] = json!(measured.messages_per_second());
                value["times_leveret"] = json!(row.times_leveret(rows));
                value["median_run"] = measured.to_json();
            }
        }
        value
    };
    rows.iter().map(row).collect()
}
