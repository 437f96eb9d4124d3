//! One run in a process of its own.

use std::io;
use std::time::Duration;

use super::jobs::{Candidate, Job, Run};
use super::{by_hand, leveret, remember};
use crate::client::{Measured, answer, ask};

/// A run takes seconds, and ten million messages some minutes; one that takes this long hangs.
const PATIENCE: Duration = Duration::from_secs(1800);

/// The child's side.
pub(crate) fn run_one(run: Run) -> io::Result<()> {
    answer(PATIENCE, async {
        match (run.job, run.candidate) {
            (Job::Consume, Candidate::ByHand) => by_hand::consume(run).await,
            (Job::Consume, _) => leveret::consume(run).await,
            (Job::Remember, _) => remember::run(run).await,
        }
    })
}

/// The parent's side: has a run done, and says how it went or why it failed.
pub(super) async fn start(run: Run) -> io::Result<Result<Measured, String>> {
    let options = [
        ("--candidate", run.candidate.to_string()),
        ("--job", run.job.to_string()),
        ("--port", run.port.to_string()),
        ("--database", run.database.to_string()),
        ("--messages", run.messages.to_string()),
        ("--workers", run.workers.to_string()),
    ];
    ask("run-inbox", &options).await
}
