//! What is measured: candidates, brokers, and the description of one run.

use std::time::Duration;

use clap::{Args, ValueEnum};
use futures_util::future::BoxFuture;

use crate::client::{Failure, all, all_in_one_task, display_as_argument};

/// The service, and its queue.
pub(super) const SERVICE: &str = "bench.rpc";
pub(super) const METHOD: &str = "echo";

/// How many requests a server may have at a time: more than are ever in flight.
pub(super) const PREFETCH: u16 = 1000;

/// Who calls and serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Candidate {
    /// Leveret's RPC client and service
    Leveret,
    /// The same by hand with lapin: direct replies, correlation by a map, each reply confirmed before its request is acked
    Lapin,
}

/// Over what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Broker {
    /// The embedded broker, in a process of its own, over TCP
    Embedded,
    /// A real RabbitMQ
    Rabbitmq,
}

/// How long a call may take, if that is watched: it never does.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// How those who call, or answer, run beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Callers {
    /// All of them in one task, as one writes it who sends many requests and gathers the replies, or answers quickly
    Together,
    /// Each in a task of its own, as in a server: tokio wakes its threads for them
    Tasks,
}

/// Which half of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Side {
    /// Calls
    Client,
    /// Answers
    Server,
}

/// One half of a run, in a process of its own.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Run {
    #[arg(long)]
    pub(super) candidate: Candidate,
    #[arg(long)]
    pub(super) side: Side,
    /// Where the broker listens on 127.0.0.1
    #[arg(long)]
    pub(super) port: u16,
    #[arg(long)]
    pub(super) calls: u64,
    #[arg(long)]
    pub(super) in_flight: u64,
    #[arg(long)]
    pub(super) callers: Callers,
    #[arg(long)]
    pub(super) handlers: Callers,
    #[arg(long, action = clap::ArgAction::Set)]
    pub(super) timeout: bool,
    #[arg(long)]
    pub(super) size: u32,
    /// Threads of the runtime
    #[arg(long)]
    pub(super) threads: Option<u16>,
}

/// The body of a request, known again in its reply.
pub(super) fn body(number: u64, size: u32) -> Vec<u8> {
    let mut body = vec![b'x'; size as usize];
    body[..8].copy_from_slice(&number.to_be_bytes());
    body
}

/// The calls that one of the callers makes: every so many of them one.
pub(super) fn share(caller: u64, run: Run) -> impl Iterator<Item = u64> {
    (caller..run.calls).step_by(run.in_flight as usize)
}

/// Has all callers call, and gives what they gave.
pub(super) async fn all_callers<T: Send + 'static>(
    run: Run,
    caller: impl Fn(u64) -> BoxFuture<'static, Result<T, Failure>>,
) -> Result<Vec<T>, Failure> {
    let callers = (0..run.in_flight).map(caller);
    match run.callers {
        Callers::Together => all_in_one_task(callers).await,
        Callers::Tasks => all(callers).await,
    }
}

display_as_argument!(Candidate Broker Callers Side);
