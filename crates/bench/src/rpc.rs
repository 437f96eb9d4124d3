//! Calls and their replies: Leveret's RPC client and service, and the same pattern by hand with lapin, over the embedded
//! broker and a real RabbitMQ.
//!
//! Client and server are processes of their own: the client starts the server. The median by the CPU time of both counts. Each
//! reply is compared with its request, so a run in which a caller gets another's reply has failed.

use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::{Args, ValueEnum};
use futures_util::future::BoxFuture;
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use serde::{Deserialize, Serialize};
use serde_json::Value;

mod lapin;
mod leveret;

use crate::broker::EmbeddedBroker;
use crate::child::{Server, stdin_end};
use crate::meter::{Failure, Measured, Meter, all, all_in_one_task};
use crate::suite::{Load, Row, Suite, chosen, name};
use crate::table::Target;

/// The service, and its queue.
const SERVICE: &str = "bench.rpc";
const METHOD: &str = "echo";

/// How many requests a server may have at a time: more than are ever in flight.
const PREFETCH: u16 = 1000;

/// How long a call may take, if that is watched: it never does.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// What a server prints when it can be called.
const READY: &str = "ready";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Candidate {
    /// Leveret's RPC client and service
    Leveret,
    /// The same by hand with lapin: direct replies, correlation by a map, each reply confirmed before its request is acked
    Lapin,
}

/// Over what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Broker {
    /// The embedded broker, in a process of its own, over TCP
    Embedded,
    /// A real RabbitMQ
    Rabbitmq,
}

/// How callers, or handlers, run beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Callers {
    /// All of them in one task, as in a program that sends many requests and gathers the replies, or answers quickly
    Together,
    /// Each in a task of its own, as in a server: tokio wakes its threads for them
    Tasks,
}

/// What to measure. Options that name several things may be given more than once.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    load: Load<Broker, Candidate>,
    /// Calls that are in flight at a time
    #[arg(long, default_values_t = [1, 10, 100], value_parser = clap::value_parser!(u64).range(1..=1000))]
    in_flight: Vec<u64>,
    /// Only callers that run so
    #[arg(long, value_enum)]
    callers: Vec<Callers>,
    /// How the server's handlers run. With tasks, Leveret's service runs as by default: a handler that is done at once gets none
    #[arg(long, value_enum, default_value_t = Callers::Together)]
    handlers: Callers,
    /// Calls have a timeout, as most have
    #[arg(long)]
    timeout: bool,
    /// Bytes per body
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(8..))]
    size: u32,
    /// Threads of client and server each; as many as there are cores if not given
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

/// Which half of a run a process does.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Side {
    Client,
    Server,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Run {
    candidate: Candidate,
    side: Side,
    broker: Broker,
    /// Where the broker listens on 127.0.0.1
    port: u16,
    calls: u64,
    in_flight: u64,
    callers: Callers,
    handlers: Callers,
    timeout: bool,
    size: u32,
    threads: Option<u16>,
}

pub(crate) struct Calls {
    arguments: Arguments,
    embedded: Option<EmbeddedBroker>,
    rabbitmq: Option<RabbitNode>,
}

impl Suite for Calls {
    const NAME: &'static str = "rpc";
    const DEADLINE: Duration = Duration::from_secs(120);
    const NOTES: &'static str = "CPU: µs per call, of the client's process and of the server's; per CPU second: calls of both \
        together; times lapin: what it does with the same CPU time, as client and as server";

    type Arguments = Arguments;
    type Run = Run;

    async fn start(arguments: Arguments) -> Result<Self, Failure> {
        let brokers = arguments.load.jobs();
        let embedded = match brokers.contains(&Broker::Embedded) {
            true => Some(EmbeddedBroker::start().await?),
            false => None,
        };
        let rabbitmq = match brokers.contains(&Broker::Rabbitmq) {
            true => Some(arguments.load.start_rabbitmq(Version::V4_3).await),
            false => None,
        };
        Ok(Calls { arguments, embedded, rabbitmq })
    }

    fn settings(&self) -> Vec<Vec<Run>> {
        let embedded = self.embedded.as_ref().map(|broker| (Broker::Embedded, broker.port));
        let rabbitmq = self.rabbitmq.as_ref().map(|node| (Broker::Rabbitmq, node.port()));
        let Arguments { ref load, handlers, timeout, size, threads, .. } = self.arguments;
        let mut settings = Vec::new();
        for (broker, port) in embedded.into_iter().chain(rabbitmq) {
            for &in_flight in &self.arguments.in_flight {
                // One caller is one task.
                let one = if in_flight == 1 { 1 } else { usize::MAX };
                for callers in chosen(&self.arguments.callers).into_iter().take(one) {
                    let run = |candidate, calls: u64| Run {
                        calls: if in_flight == 1 { calls.div_ceil(10) } else { calls },
                        side: Side::Client,
                        candidate,
                        broker,
                        port,
                        in_flight,
                        callers,
                        handlers,
                        timeout,
                        size,
                        threads,
                    };
                    let run = |candidate, calls| Some(run(candidate, calls));
                    settings.extend(load.settings(|_| 50_000, run));
                }
            }
        }
        settings
    }

    fn threads(run: &Run) -> Option<u16> {
        run.threads
    }

    async fn run(run: Run) -> Result<Measured, Failure> {
        match (run.side, run.candidate) {
            (Side::Client, _) => call_and_serve(run).await,
            (Side::Server, Candidate::Leveret) => leveret::serve(run, ready, stdin_end()).await,
            (Side::Server, Candidate::Lapin) => lapin::serve(run, ready, stdin_end()).await,
        }
    }

    fn cost(measured: &Measured) -> f64 {
        cpu_of_both(measured)
    }

    fn labels(run: &Run) -> Vec<(&'static str, Value)> {
        vec![
            ("broker", name(run.broker)),
            ("in_flight", run.in_flight.into()),
            ("callers", name(run.callers)),
            ("handlers", name(run.handlers)),
            ("timeout", if run.timeout { "yes" } else { "no" }.into()),
            ("candidate", name(run.candidate)),
        ]
    }

    fn comparisons(row: &Row<Run>, rows: &[Row<Run>]) -> Vec<(&'static str, Option<f64>)> {
        let calls = row.median().map(|both| both.messages as f64 * 1e9 / cpu_of_both(both));
        let [client, server] = times_lapin(row, rows).map_or([None; 2], |times| times.map(Some));
        vec![("per_CPU_second", calls), ("times_lapin", client), ("times_lapin_server", server)]
    }

    fn targets(row: &Row<Run>, rows: &[Row<Run>]) -> Vec<Target> {
        let counts = row.run.in_flight == 100 && row.run.candidate == Candidate::Leveret;
        let times = counts.then(|| times_lapin(row, rows)).flatten();
        let target = |times: [f64; 2]| Target {
            text: "≥ 3".to_owned(),
            met: times.iter().all(|times| *times >= 3.0),
        };
        times.map(target).into_iter().collect()
    }
}

/// User and system time of client and server, in nanoseconds.
fn cpu_of_both(measured: &Measured) -> f64 {
    let server = measured.server.as_ref().map_or(0, |server| server.cpu_ns);
    (measured.cpu_ns + server) as f64
}

/// How many times the calls of lapin it makes of the same CPU time, as client and as server.
fn times_lapin(row: &Row<Run>, rows: &[Row<Run>]) -> Option<[f64; 2]> {
    let is_lapins = |run: &Run| {
        (run.broker, run.in_flight, run.callers, run.candidate)
            == (row.run.broker, row.run.in_flight, row.run.callers, Candidate::Lapin)
    };
    let theirs = rows.iter().find(|row| is_lapins(&row.run))?.median()?;
    let servers = theirs.server_us_per_message()? / row.median()?.server_us_per_message()?;
    Some([theirs.cpu_us_per_message() / row.cpu()?, servers])
}

fn ready() {
    println!("{READY}");
}

/// The client's process: starts a server, and calls it.
async fn call_and_serve(run: Run) -> Result<Measured, Failure> {
    let server = Server::of_run::<Calls>(&Run { side: Side::Server, ..run }).await?;
    if server.ready != READY {
        return Err(format!("the server did not start: {}", server.ready).into());
    }
    let client = match run.candidate {
        Candidate::Leveret => leveret::call(run).await?,
        Candidate::Lapin => lapin::call(run).await?,
    };
    let server = Some(Box::new(server.finish().await??));
    Ok(Measured { server, ..client })
}

/// Has all callers call, and measures that.
async fn call_all(
    run: Run,
    caller: impl Fn(u64) -> BoxFuture<'static, Result<Vec<Duration>, Failure>>,
) -> Result<Measured, Failure> {
    let meter = Meter::start();
    let callers = (0..run.in_flight).map(caller);
    let times = match run.callers {
        Callers::Together => all_in_one_task(callers).await?,
        Callers::Tasks => all(callers).await?,
    };
    Ok(meter.stop(run.calls).with_latencies(times.concat()))
}

/// Makes the calls of one caller, compares their replies, and gives the time of each.
async fn call_in_turn<F>(
    run: Run,
    caller: u64,
    mut call: impl FnMut(Bytes) -> F,
) -> Result<Vec<Duration>, Failure>
where
    F: Future<Output = Result<Bytes, Failure>>,
{
    let mut times = Vec::new();
    for number in (caller..run.calls).step_by(run.in_flight as usize) {
        let began = Instant::now();
        let request = request(number, run.size);
        if call(request.clone()).await? != request {
            return Err(format!("call {number} got the reply to another").into());
        }
        times.push(began.elapsed());
    }
    Ok(times)
}

/// The body of a request, which its reply repeats.
fn request(number: u64, size: u32) -> Bytes {
    let mut body = vec![b'x'; size as usize];
    body[..8].copy_from_slice(&number.to_be_bytes());
    body.into()
}
