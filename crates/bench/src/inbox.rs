//! Handling messages exactly once: Leveret's inbox, and what one writes by hand with lapin and sqlx, between a real RabbitMQ and
//! a real PostgreSQL; and what it takes to remember many messages.
//!
//! Candidates run in turns, each run in a process of its own; the median by rate counts. Each tenth message comes twice, and
//! a run after which the accounts do not have exactly what they should has failed. PostgreSQL waits for the disk at each commit,
//! as it does outside of tests.

use std::fmt::Write;

use clap::Args;
use leveret_testkit::rabbitmq::Version;
use serde_json::{Value, json};

mod by_hand;
mod child;
mod jobs;
mod leveret;
mod messages;
mod remember;
mod stage;

pub(crate) use child::run_one;
pub(crate) use jobs::Run;

use crate::client::{Failure, Measured};
use crate::turns::{chosen, in_turns};
use jobs::{Candidate, Job};
use stage::{Kept, Stage};

/// What to measure. Options that name several things may be given more than once.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Only these jobs
    #[arg(long, value_enum)]
    job: Vec<Job>,
    /// Only these candidates
    #[arg(long, value_enum)]
    candidate: Vec<Candidate>,
    /// Messages per run, without the copies [default: 10000 to consume, 1000000 to remember]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    messages: Option<u64>,
    /// How many messages are handled at the same time, by those who handle them one by one
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=90))]
    workers: u32,
    /// Which RabbitMQ
    #[arg(long, default_value_t = Version::V4_3)]
    rabbitmq: Version,
}

/// One candidate at one job.
pub(crate) struct Row {
    job: Job,
    candidate: Candidate,
    /// The median run and what it has left in the database, or why a run failed.
    result: Result<(Measured, Kept), String>,
}

/// Runs everything, `rounds` times each; to remember, which takes long, once.
pub(crate) fn run(arguments: &Arguments, rounds: u32) -> Result<Vec<Row>, Failure> {
    tokio::runtime::Runtime::new()?.block_on(async {
        let stage = Stage::start(arguments.rabbitmq).await?;
        let mut rows = Vec::new();
        for job in chosen(&arguments.job) {
            let rounds = if job == Job::Remember { 1 } else { rounds };
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
    let messages = arguments.messages.unwrap_or(job.messages());
    let can = |candidate: &Candidate| candidate.can(job);
    let candidates = chosen(&arguments.candidate).into_iter().filter(can).collect();
    let run = async |candidate| {
        let run = stage.run(candidate, job, messages, arguments.workers);
        stage.fill(run).await?;
        let measured = child::start(run).await?;
        let kept = stage.clear(run).await.map_err(|wrong| wrong.to_string());
        Ok(measured.and_then(|measured| Ok((measured, kept?))))
    };
    let results = in_turns(candidates, rounds, run).await?;
    let row = |(candidate, result): (Candidate, Result<Vec<(Measured, Kept)>, String>)| Row {
        job,
        candidate,
        result: result.map(median),
    };
    Ok(results.into_iter().map(row).collect())
}

/// The median by time: what is waited for here is mostly the disk, which takes no CPU time.
fn median(mut runs: Vec<(Measured, Kept)>) -> (Measured, Kept) {
    runs.sort_by_key(|(measured, _)| measured.wall);
    runs.swap_remove(runs.len() / 2)
}

pub(crate) fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{:<9} {:<22} {:>9} {:>10} {:>15} {:>8} {:>9} {:>11}",
        "job", "with", "messages", "messages/s", "CPU µs/message", "seconds", "rows", "KiB on disk",
    );
    for Row { job, candidate, result } in rows {
        let _ = write!(out, "{job:<9} {candidate:<22} ");
        let _ = match result {
            Err(reason) => writeln!(out, "FAILED: {reason}"),
            Ok((measured, kept)) => writeln!(
                out,
                "{:>9} {:>10.0} {:>15.2} {:>8.2} {:>9} {:>11}",
                measured.messages,
                measured.messages_per_second(),
                measured.cpu_us_per_message(),
                measured.wall.as_secs_f64(),
                kept.rows,
                kept.bytes / 1024,
            ),
        };
    }
    let _ = writeln!(
        out,
        "CPU: of the candidate's process, without PostgreSQL; to remember, with an embedded broker and its publisher. Rows, KiB on \
         disk: of the table that remembers, with its indexes. PostgreSQL waits for the disk at each commit"
    );
    out
}

pub(crate) fn json(rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let mut value =
            json!({ "job": row.job.to_string(), "candidate": row.candidate.to_string() });
        match &row.result {
            Err(reason) => value["failed"] = json!(reason),
            Ok((measured, kept)) => {
                value["messages_per_second"] = json!(measured.messages_per_second());
                value["cpu_us_per_message"] = json!(measured.cpu_us_per_message());
                value["rows"] = json!(kept.rows);
                value["bytes_on_disk"] = json!(kept.bytes);
                value["median_run"] = measured.to_json();
            }
        }
        value
    };
    rows.iter().map(row).collect()
}
