//! What is measured: candidates, brokers, and the description of one run.

use clap::{Args, ValueEnum};

use crate::client::display_as_argument;

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
    pub(super) size: u32,
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

display_as_argument!(Candidate Broker Side);
