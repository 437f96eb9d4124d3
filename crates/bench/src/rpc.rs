//! Calls and their replies: Leveret's RPC client and service, and the same pattern by hand with lapin, over the embedded
//! broker and a real RabbitMQ.
//!
//! Client and server are processes of their own: the client starts the server. The median by the CPU time of both counts. Each
//! reply is compared with its request, so a run in which a caller gets another's reply has failed.

use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::{Args, ValueEnum};
use futures_util::future::BoxFuture;
use leveret_testkit::rabbitmq::Version;
use serde::{Deserialize, Serialize};
use serde_json::Value;

mod lapin;
mod leveret;

use crate::broker::EmbeddedBroker;
use crate::child::{Server, stdin_end};
use crate::message::numbered;
use crate::meter::{Failure, Measured, Meter, all, all_in_one_task};
use crate::rabbitmq::RabbitMq;
use crate::suite::{self, ArgumentsOf, Row, Suite, chosen, name};
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

/// The broker between client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Broker {
    /// The embedded broker, in a process of its own, over TCP
    Embedded,
    /// A real RabbitMQ
    Rabbitmq,
}

/// How callers, or handlers, are scheduled. That of the callers is the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Scheduling {
    /// One task polls all of them, as in a program that sends many requests and gathers the replies, or answers quickly
    Together,
    /// Each has a task of its own, as in a server: tokio wakes its threads for them
    Tasks,
}

#[derive(Args, Clone)]
pub(crate) struct Options {
    /// Only these brokers
    #[arg(long, value_enum)]
    broker: Vec<Broker>,
    /// The version of RabbitMQ
    #[arg(long, default_value = "4.3")]
    rabbitmq: Version,
    /// Calls in flight at a time. With one, a run has a tenth of the calls
    #[arg(long, default_values_t = [1, 10, 100], value_parser = clap::value_parser!(u64).range(1..=1000))]
    in_flight: Vec<u64>,
    #[command(flatten)]
    calls: CallOptions,
}

#[derive(Args, Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct CallOptions {
    /// How the server's handlers are scheduled. With tasks, Leveret's service runs as by default: a quick handler gets none
    #[arg(long, value_enum, default_value_t = Scheduling::Together)]
    handlers: Scheduling,
    /// Give each call a timeout
    #[arg(long)]
    timeout: bool,
    /// Bytes per body
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(8..))]
    size: u32,
    /// Threads of client and server each [default: the number of cores]
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
pub(crate) struct Setting {
    side: Side,
    broker: Broker,
    /// Where the broker listens on 127.0.0.1
    port: u16,
    in_flight: u64,
    calls: CallOptions,
}

type Run = suite::Run<Scheduling, Candidate, Setting>;

pub(crate) struct Calls {
    options: Options,
    embedded: Option<EmbeddedBroker>,
    rabbitmq: Option<RabbitMq>,
}

impl Suite for Calls {
    const NAME: &'static str = "rpc";
    const DEADLINE: Duration = Duration::from_secs(120);
    const NOTES: &'static str = "A message is a call. Server CPU is that of the process that replies; cost is the CPU time of both.";

    type Job = Scheduling;
    type Candidate = Candidate;
    type Options = Options;
    type Setting = Setting;

    async fn start(arguments: &mut ArgumentsOf<Self>) -> Result<Self, Failure> {
        let options = arguments.options.clone();
        let brokers = chosen(&options.broker);
        let (mut embedded, mut rabbitmq) = (None, None);
        if brokers.contains(&Broker::Embedded) {
            embedded = Some(EmbeddedBroker::start().await?);
        }
        if brokers.contains(&Broker::Rabbitmq) {
            rabbitmq = Some(RabbitMq::start(options.rabbitmq).await?);
        }
        Ok(Calls { options, embedded, rabbitmq })
    }

    fn settings(&self, _: Scheduling) -> Vec<Setting> {
        let embedded = self.embedded.as_ref().map(|broker| (Broker::Embedded, broker.port));
        let rabbitmq = self.rabbitmq.as_ref().map(|node| (Broker::Rabbitmq, node.port()));
        let (side, calls) = (Side::Client, self.options.calls);
        let mut settings = Vec::new();
        for (broker, port) in embedded.into_iter().chain(rabbitmq) {
            for &in_flight in &self.options.in_flight {
                settings.push(Setting { side, broker, port, in_flight, calls });
            }
        }
        settings
    }

    fn messages(
        callers: Scheduling,
        _: Candidate,
        setting: &Setting,
        asked: Option<u64>,
    ) -> Option<u64> {
        let calls = asked.unwrap_or(50_000);
        match (setting.in_flight, callers) {
            (1, Scheduling::Together) => Some(calls.div_ceil(10)),
            // One caller is one task.
            (1, Scheduling::Tasks) => None,
            _ => Some(calls),
        }
    }

    fn threads(setting: &Setting) -> Option<u16> {
        setting.calls.threads
    }

    async fn run(run: Run) -> Result<Measured, Failure> {
        match (run.setting.side, run.candidate) {
            (Side::Client, _) => call_and_serve(run).await,
            (Side::Server, Candidate::Leveret) => leveret::serve(run, ready, stdin_end()).await,
            (Side::Server, Candidate::Lapin) => lapin::serve(run, ready, stdin_end()).await,
        }
    }

    fn cost(measured: &Measured) -> f64 {
        cpu_of_both(measured)
    }

    fn is_peer(candidate: Candidate) -> bool {
        candidate == Candidate::Lapin
    }

    fn labels(at: &Setting) -> Vec<(&'static str, Value)> {
        vec![
            ("broker", name(at.broker)),
            ("in_flight", at.in_flight.into()),
            ("handlers", name(at.calls.handlers)),
            ("timeout", if at.calls.timeout { "yes" } else { "no" }.into()),
        ]
    }

    /// Client and server each take at most a third of lapin's CPU time.
    fn targets(row: &Row<Self>, rows: &[Row<Self>]) -> Vec<Target> {
        if row.run.setting.in_flight != 100 || row.run.candidate != Candidate::Leveret {
            return Vec::new();
        }
        let ours = row.median();
        let lapins = row.beside(rows, Candidate::Lapin).and_then(Row::median);
        let times = |what, cost: fn(&Measured) -> Option<f64>| {
            Some(Target::at_least(what, 3.0, cost(lapins?)? / cost(ours?)?))
        };
        let client = times("times less, client", |took| Some(took.cpu_us_per_message()));
        let server = times("times less, server", Measured::server_us_per_message);
        client.into_iter().chain(server).collect()
    }
}

/// User and system time of client and server per call, in microseconds.
fn cpu_of_both(measured: &Measured) -> f64 {
    measured.cpu_us_per_message() + measured.server_us_per_message().unwrap_or(0.0)
}

fn ready() {
    println!("{READY}");
}

/// The client's process: starts a server, and calls it.
async fn call_and_serve(run: Run) -> Result<Measured, Failure> {
    let setting = Setting { side: Side::Server, ..run.setting };
    let server = Server::of_run::<Calls>(&Run { setting, ..run }).await?;
    if server.ready != READY {
        return Err(format!("the server did not start: {}", server.ready).into());
    }
    let client = match run.candidate {
        Candidate::Leveret => leveret::call(run).await?,
        Candidate::Lapin => lapin::call(run).await?,
    };
    let server_cpu_ns = Some(server.finish().await??.cpu_ns);
    Ok(Measured { server_cpu_ns, ..client })
}

/// Has all callers call, and measures that.
async fn call_all(
    run: Run,
    caller: impl Fn(u64) -> BoxFuture<'static, Result<Vec<Duration>, Failure>>,
) -> Result<Measured, Failure> {
    let meter = Meter::start();
    let callers = (0..run.setting.in_flight).map(caller);
    let times = match run.job {
        Scheduling::Together => all_in_one_task(callers).await?,
        Scheduling::Tasks => all(callers).await?,
    };
    Ok(meter.stop(run.messages).with_latencies(times.concat()))
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
    for number in (caller..run.messages).step_by(run.setting.in_flight as usize) {
        let began = Instant::now();
        let request = numbered(number, run.setting.calls.size);
        if call(request.clone()).await? != request {
            return Err(format!("call {number} got the reply to another").into());
        }
        times.push(began.elapsed());
    }
    Ok(times)
}
