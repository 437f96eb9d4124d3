//! Trying failed messages again, parking and replaying them: Leveret's consumer and parking lot, and the same objects driven
//! by lapin code written by hand, on a real RabbitMQ.
//!
//! Candidates run in turns, each run in a process of its own; the median by CPU time counts. After each run the queues are
//! emptied, and a run after which a message is not where it belongs, or is there twice, has failed. The objects stay from
//! one run to the next: the broker would refuse a candidate that declares another one.

use std::fmt::Write;
use std::time::Duration;

use clap::Args;
use leveret_testkit::rabbitmq::Version;
use serde_json::{Value, json};

mod book;
mod child;
mod jobs;
mod lapin;
mod leveret;
mod stage;

pub(crate) use child::run_one;
pub(crate) use jobs::Run;

use crate::client::{Failure, Measured, median};
use crate::turns::{chosen, in_turns};
use jobs::{Candidate, Job, WAIT};
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
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    messages: u64,
    /// Bytes per body
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(8..))]
    size: u32,
    /// How many handlers of Leveret's consumer may be at work at once
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    workers: u32,
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
    fn cpu(&self) -> Option<f64> {
        self.result.as_ref().ok().map(Measured::cpu_us_per_message)
    }

    /// How many times the CPU time that Leveret took for the same job.
    fn times_leveret(&self, rows: &[Row]) -> Option<f64> {
        let ours =
            rows.iter().find(|row| row.job == self.job && row.candidate == Candidate::Leveret)?;
        Some(self.cpu()? / ours.cpu()?)
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
    let Arguments { messages, size, workers, .. } = *arguments;
    let run = async |candidate| {
        let port = stage.port();
        once(Run { candidate, job, port, size, messages, workers }, stage).await
    };
    let results = in_turns(chosen(&arguments.candidate), rounds, run).await?;
    let row = |(candidate, result): (Candidate, Result<Vec<Measured>, String>)| Row {
        job,
        candidate,
        result: result.map(median),
    };
    Ok(results.into_iter().map(row).collect())
}

async fn once(run: Run, stage: &Stage) -> Result<Result<Measured, String>, Failure> {
    stage.fill(run).await?;
    let measured = child::start(run).await?;
    // Whatever became of the run, the next one finds nothing of it.
    let checked = stage.clear(run).await;
    Ok(measured.and_then(|measured| match checked {
        Ok(()) => Ok(measured),
        Err(wrong) => Err(wrong.to_string()),
    }))
}

/// The time of a run, without the one wait that even its last message cannot be spared.
fn at_work(job: Job, measured: &Measured) -> Duration {
    match job {
        Job::FailOnce => measured.wall.saturating_sub(WAIT),
        Job::Park | Job::Replay => measured.wall,
    }
}

fn messages_per_second(job: Job, measured: &Measured) -> f64 {
    measured.messages as f64 / at_work(job, measured).as_secs_f64()
}

pub(crate) fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{:<10} {:<8} {:>9} {:>11} {:>10} {:>11} {:>8} {:>7}",
        "job", "with", "messages", "CPU µs/msg", "× leveret", "messages/s", "seconds", "MiB",
    );
    for row in rows {
        let Row { job, candidate, result } = row;
        let _ = write!(out, "{job:<10} {candidate:<8} ");
        let _ = match result {
            Err(reason) => writeln!(out, "FAILED: {reason}"),
            Ok(measured) => writeln!(
                out,
                "{:>9} {:>11.2} {:>10} {:>11.0} {:>8.2} {:>7.1}",
                measured.messages,
                measured.cpu_us_per_message(),
                row.times_leveret(rows).map_or(String::new(), |times| format!("{times:.2}")),
                messages_per_second(*job, measured),
                measured.wall.as_secs_f64(),
                measured.memory_kib as f64 / 1024.0,
            ),
        };
    }
    let _ = writeln!(
        out,
        "messages/s: of fail-once, in the seconds less {WAIT:?}, the wait of the last message; seconds: from connected to \
         closed; × leveret: times the CPU time that leveret took; MiB: the most memory that was held"
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
                value["cpu_us_per_message"] = json!(measured.cpu_us_per_message());
                value["messages_per_second"] = json!(messages_per_second(row.job, measured));
                value["times_leveret"] = json!(row.times_leveret(rows));
                value["median_run"] = measured.to_json();
            }
        }
        value
    };
    rows.iter().map(row).collect()
}
