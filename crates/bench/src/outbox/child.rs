//! One run in a process of its own.

use std::io;
use std::time::Duration;

use leveret_sql::Order;

use super::jobs::{Candidate, Run};
use super::{by_hand, leveret};
use crate::client::{Measured, answer, ask};

/// A run takes seconds, row by row a minute; one that takes this long hangs.
const PATIENCE: Duration = Duration::from_secs(240);

/// The child's side.
pub(crate) fn run_one(run: Run) -> io::Result<()> {
    answer(PATIENCE, async {
        match run.candidate {
            Candidate::Leveret | Candidate::LeveretSqlite => leveret::run(run, Order::Strict).await,
            Candidate::LeveretPipelined => leveret::run(run, Order::Pipelined).await,
            Candidate::ByHand => by_hand::run(run, 1).await,
            Candidate::HandInBatches => by_hand::run(run, 1000).await,
        }
    })
}

/// The parent's side: has a run done, and says how it went or why it failed.
pub(super) async fn start(run: &Run) -> io::Result<Result<Measured, String>> {
    let options = [
        ("--candidate", run.candidate.to_string()),
        ("--job", run.job.to_string()),
        ("--port", run.port.to_string()),
        ("--database", run.database.clone()),
        ("--size", run.size.to_string()),
        ("--messages", run.messages.to_string()),
    ];
    ask("run-outbox", &options).await
}
