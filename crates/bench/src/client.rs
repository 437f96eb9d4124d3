//! Whole clients: Leveret, and its peers lapin, amqprs, deadpool-lapin and RustStream, against a null peer and a real RabbitMQ.
//!
//! ```text
//!   this process --starts--> null peer, RabbitMQ
//!        |                         ^
//!        +--starts, per run--> one client
//! ```
//!
//! Candidates run in turns, each run in a process of its own; the median by CPU time counts. A run in which a message
//! is not accounted for has failed, however fast it was.

use clap::Args;
use leveret_testkit::rabbitmq::Version;

mod amqprs;
mod broker;
mod child;
mod deadpool;
mod deliveries;
mod jobs;
mod lapin;
mod leveret;
mod limit;
mod meter;
mod null_peer;
mod ruststream;
mod table;
mod tags;
mod targets;
mod toolkit;

pub(crate) use child::{Server, answer, answer_on, ask, run_one};
pub(crate) use jobs::{Run, display_as_argument};
pub(crate) use meter::{Failure, Latency, Measured, Meter, all, all_in_one_task, expect};
pub(crate) use null_peer::run as run_null_peer;
pub(crate) use table::{json, print};

use crate::turns::{chosen, in_turns};
use broker::Broker;
use jobs::{Client, Job, Peer};
use table::Row;

/// What to measure. Options that name several things may be given more than once.
#[derive(Args, Clone)]
pub(crate) struct Arguments {
    /// Only these jobs
    #[arg(long, value_enum)]
    job: Vec<Job>,
    /// Only these clients
    #[arg(long, value_enum)]
    client: Vec<Client>,
    /// Only bodies of these sizes in bytes
    #[arg(long, default_values_t = targets::SIZES)]
    size: Vec<usize>,
    /// Only these numbers of channels, all on one connection
    #[arg(long, default_values_t = [1, 4], value_parser = clap::value_parser!(u64).range(1..=100))]
    channels: Vec<u64>,
    /// Messages per run, instead of about a second's worth. Given twice, everything runs with either number
    #[arg(long)]
    messages: Vec<u64>,
    /// Whether memory stays flat: Leveret and the null peer alone, with 1 and with 10 million messages of 16 B
    #[arg(long, conflicts_with_all = ["messages", "client", "size", "rabbitmq_only"])]
    soak: bool,
    /// Skip RabbitMQ
    #[arg(long)]
    null_only: bool,
    /// Skip the null peer
    #[arg(long, conflicts_with = "null_only")]
    rabbitmq_only: bool,
    /// Which RabbitMQ
    #[arg(long, default_value_t = Version::V3_10)]
    rabbitmq: Version,
}

/// Messages of the two runs of a soak.
const SOAK: [u64; 2] = [1_000_000, 10_000_000];

impl Arguments {
    /// With what `--soak` stands for.
    fn resolved(&self) -> Arguments {
        if !self.soak {
            return self.clone();
        }
        let mut job = chosen(&self.job);
        // One at a time, 10 million take minutes.
        job.retain(|job| *job != Job::Latency);
        let (client, messages) = (vec![Client::Leveret], SOAK.to_vec());
        Arguments { job, client, size: vec![16], messages, null_only: true, ..self.clone() }
    }
}

/// Where the runs go.
struct Peers {
    null: Option<Server>,
    broker: Option<Broker>,
}

/// Runs everything, `rounds` times each.
pub(crate) fn run(arguments: &Arguments, rounds: u32) -> Result<Vec<Row>, Failure> {
    let arguments = &arguments.resolved();
    tokio::runtime::Runtime::new()?.block_on(async {
        let null = if arguments.rabbitmq_only { None } else { Some(Server::start("null-peer")?) };
        let broker = match arguments.null_only {
            true => None,
            false => Some(Broker::start(arguments.rabbitmq).await?),
        };
        let peers = Peers { null, broker };
        let mut rows = Vec::new();
        for setting in settings(arguments, &peers) {
            rows.extend(compare(setting, &peers, rounds).await?);
        }
        Ok(rows)
    })
}

/// All settings, each with a run for each client that can do it.
fn settings(arguments: &Arguments, peers: &Peers) -> Vec<Vec<Run>> {
    let null = peers.null.as_ref().map(|peer| (Peer::Null, peer.port));
    let rabbitmq = peers.broker.as_ref().map(|broker| (Peer::Rabbitmq, broker.port()));
    let counts = match arguments.messages.as_slice() {
        [] => vec![None],
        counts => counts.iter().copied().map(Some).collect(),
    };
    let mut settings = Vec::new();
    for (peer, port) in null.into_iter().chain(rabbitmq) {
        for job in chosen(&arguments.job) {
            // What is in the bodies is not the point there.
            let sizes = if job == Job::Returns { &[16] } else { arguments.size.as_slice() };
            for &size in sizes {
                for &channels in &arguments.channels {
                    let run = |client, messages: Option<u64>| {
                        let messages = messages.unwrap_or(job.messages(client, peer, size));
                        let messages = messages.next_multiple_of(channels);
                        Run { client, job, peer, port, size, channels, messages }
                    };
                    let mut clients = chosen(&arguments.client);
                    clients.retain(|one| job.exists_for(*one, peer, channels));
                    for &messages in &counts {
                        settings.push(clients.iter().map(|one| run(*one, messages)).collect());
                    }
                }
            }
        }
    }
    settings
}

/// Runs the candidates of one setting in turns.
async fn compare(setting: Vec<Run>, peers: &Peers, rounds: u32) -> Result<Vec<Row>, Failure> {
    let results = in_turns(setting, rounds, async |run| once(run, peers).await).await?;
    let row = |(run, result): (Run, Result<Vec<Measured>, String>)| Row {
        peer: run.peer,
        job: run.job,
        size: run.size,
        channels: run.channels,
        client: run.client,
        result: result.map(median),
    };
    Ok(results.into_iter().map(row).collect())
}

async fn once(run: Run, peers: &Peers) -> Result<Result<Measured, String>, Failure> {
    let broker = peers.broker.as_ref().filter(|_| run.peer == Peer::Rabbitmq);
    if let Some(broker) = broker {
        broker.prepare(run).await?;
    }
    let mut measured = child::start(run).await?;
    if let Some(broker) = broker {
        let left = expect("are left in the queues", run.left(), broker.clear(run).await?);
        measured = measured.and_then(|measured| match left {
            Ok(()) => Ok(measured),
            Err(wrong) => Err(wrong.to_string()),
        });
    }
    Ok(measured)
}

/// The median by CPU time; of wrong outcomes, the most.
pub(crate) fn median(mut runs: Vec<Measured>) -> Measured {
    let mislabelled = runs.iter().filter_map(|run| run.mislabelled).max();
    runs.sort_by(|a, b| a.cpu_us_per_message().total_cmp(&b.cpu_us_per_message()));
    Measured { mislabelled, ..runs.swap_remove(runs.len() / 2) }
}
