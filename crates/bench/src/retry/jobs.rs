//! What is measured: candidates, jobs, the names that both use, and the description of one run.

use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::client::display_as_argument;

/// The work queue. Beside it are the objects that Leveret's default design has.
pub(super) const QUEUE: &str = "bench.retry";
pub(super) const WAIT_EXCHANGE: &str = "bench.retry.wait";
pub(super) const WAIT_QUEUE: &str = "bench.retry.wait.1s";
pub(super) const RETURN_EXCHANGE: &str = "bench.retry.return";
/// Exchange and queue.
pub(super) const PARKED: &str = "bench.retry.parked";

/// How long a failed message waits.
pub(super) const WAIT: Duration = Duration::from_secs(1);

/// How many deliveries may be unacked, and so how many moves may be under way.
pub(super) const PREFETCH: u16 = 1000;

/// Who does the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Candidate {
    /// A consumer of Leveret with a retry policy, and its parking lot
    Leveret,
    /// The same objects and headers, but for the history of errors, by hand with lapin: many moves under way at once, each
    /// original acked when its copy is confirmed
    Lapin,
}

/// What is done with the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Job {
    /// Each message fails when it comes first, waits for a second, and succeeds
    FailOnce,
    /// Each message fails for good, and is parked
    Park,
    /// Messages that the same candidate has parked go back to their queue, as they were before they failed
    Replay,
}

/// One run of one candidate, in a process of its own.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Run {
    #[arg(long)]
    pub(super) candidate: Candidate,
    #[arg(long)]
    pub(super) job: Job,
    /// Where RabbitMQ listens on 127.0.0.1
    #[arg(long)]
    pub(super) port: u16,
    #[arg(long)]
    pub(super) size: u32,
    #[arg(long)]
    pub(super) messages: u64,
    #[arg(long)]
    pub(super) workers: u32,
}

display_as_argument!(Candidate Job);
