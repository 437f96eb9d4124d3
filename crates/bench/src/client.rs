//! Whole clients: Leveret, and its peers lapin, amqprs, deadpool-lapin and RustStream, against a null peer and a real RabbitMQ.

use std::time::Duration;

use clap::Args;
use leveret_testkit::rabbitmq::Version;

mod amqprs;
mod broker;
mod channels;
mod deadpool;
mod deliveries;
mod jobs;
mod lapin;
mod leveret;
mod limit;
pub(crate) mod null_peer;
mod ruststream;
mod tags;
mod targets;
mod toolkit;

pub(crate) use channels::pipelined;

use crate::child::Server;
use crate::meter::{Failure, Measured, expect};
use crate::suite::{Load, Row, Suite, chosen, name};
use crate::table::{self, Column, Target, figure, label};
use broker::Broker;
use jobs::{Client, Job, Peer, Run};

/// What to measure. Options that name several things may be given more than once.
#[derive(Args, Clone)]
pub(crate) struct Arguments {
    /// Only these jobs
    #[arg(long, value_enum)]
    job: Vec<Job>,
    #[command(flatten)]
    load: Load<Client>,
    /// Only bodies of these sizes in bytes
    #[arg(long, default_values_t = targets::SIZES)]
    size: Vec<usize>,
    /// Only these numbers of channels, all on one connection
    #[arg(long, default_values_t = [1, 4], value_parser = clap::value_parser!(u64).range(1..=100))]
    channels: Vec<u64>,
    /// Whether memory stays flat: Leveret and the null peer alone, with 1 and with 10 million messages of 16 B
    #[arg(long, conflicts_with_all = ["messages", "candidate", "size", "rabbitmq_only"])]
    soak: bool,
    /// Skip RabbitMQ
    #[arg(long)]
    null_only: bool,
    /// Skip the null peer
    #[arg(long, conflicts_with = "null_only")]
    rabbitmq_only: bool,
}

/// Messages of the two runs of a soak.
const SOAK: [u64; 2] = [1_000_000, 10_000_000];

impl Arguments {
    /// With what `--soak` stands for.
    fn resolved(mut self) -> Arguments {
        if self.soak {
            self.job = chosen(&self.job);
            // One at a time, 10 million take minutes.
            self.job.retain(|job| *job != Job::Latency);
            self.load.candidate = vec![Client::Leveret];
            self.load.messages = SOAK.to_vec();
            self.size = vec![16];
            self.null_only = true;
        }
        self
    }
}

pub(crate) struct Clients {
    arguments: Arguments,
    null: Option<(Server, u16)>,
    broker: Option<Broker>,
}

impl Suite for Clients {
    const NAME: &'static str = "client";
    const DEADLINE: Duration = Duration::from_secs(60);
    const NOTES: &'static str = "× engine, × toolkit: times the CPU time that leveret, and toolkit, took; best/ours: times ours \
        that the best peer took; wake-ups, sleeps and allocations per 1000 messages; MiB: the most memory that was held; scaled: \
        the target, times what the limit takes here on one channel, through what it took where the target was made";

    type Arguments = Arguments;
    type Run = Run;

    async fn start(arguments: Arguments) -> Result<Self, Failure> {
        let arguments = arguments.resolved();
        let null = match arguments.rabbitmq_only {
            true => None,
            false => Some(Server::start("null-peer").await?),
        };
        let broker = match arguments.null_only {
            true => None,
            false => Some(Broker::start(arguments.load.rabbitmq.unwrap_or(Version::V3_10)).await?),
        };
        Ok(Clients { arguments, null, broker })
    }

    fn settings(&self) -> Vec<Vec<Run>> {
        let null = self.null.as_ref().map(|(_, port)| (Peer::Null, *port));
        let rabbitmq = self.broker.as_ref().map(|broker| (Peer::Rabbitmq, broker.port()));
        let mut settings = Vec::new();
        for (peer, port) in null.into_iter().chain(rabbitmq) {
            for job in chosen(&self.arguments.job) {
                // What is in the bodies is not the point there.
                let sizes = if job == Job::Returns { &[16] } else { &*self.arguments.size };
                for &size in sizes {
                    for &channels in &self.arguments.channels {
                        settings.extend(self.setting(peer, port, job, size, channels));
                    }
                }
            }
        }
        settings
    }

    async fn prepare(&self, run: &Run) -> Result<(), Failure> {
        match self.broker_of(run) {
            Some(broker) => broker.prepare(*run).await,
            None => Ok(()),
        }
    }

    async fn run(run: Run) -> Result<Measured, Failure> {
        match run.client {
            Client::Leveret | Client::Stamped => leveret::run(run).await,
            Client::Toolkit => toolkit::run(run).await,
            Client::Lapin => lapin::run(run).await,
            Client::Amqprs => amqprs::run(run).await,
            Client::Deadpool => deadpool::run(run).await,
            Client::Ruststream => ruststream::run(run).await,
            Client::Limit => limit::run(run).await,
        }
    }

    async fn check(&self, run: &Run, _: &mut Measured) -> Result<(), Failure> {
        match self.broker_of(run) {
            Some(broker) => expect("are left in the queues", run.left(), broker.clear(*run).await?),
            None => Ok(()),
        }
    }

    fn columns() -> Vec<Column<Run>> {
        vec![
            label("peer", |run| name(run.peer)),
            label("job", |run| name(run.job)),
            figure("size", "size", 0, |row, _| Some(row.run.size as f64)),
            figure("ch", "channels", 0, |row, _| Some(row.run.channels as f64)),
            label("client", |run| name(run.client)),
            table::messages(),
            table::cpu(),
            table::rate(),
            figure("× engine", "times_engine", 2, |row, rows| times(row, Client::Leveret, rows)),
            figure("× toolkit", "times_toolkit", 2, |row, rows| times(row, Client::Toolkit, rows)),
            figure("best/ours", "times_best_peer", 1, times_best_peer),
            figure("wake-ups", "wake_ups", 1, |row, _| per_1000(row, |took| Some(took.polls))),
            figure("sleeps", "sleeps", 1, |row, _| per_1000(row, |took| Some(took.parks))),
            figure("allocs", "allocations", 1, |row, _| per_1000(row, |took| took.allocations)),
            table::memory(),
            table::p50(),
            table::p99(),
            figure("wrong outcomes", "mislabelled", 0, |row, _| Some(mislabelled(row)? as f64)),
        ]
    }

    fn targets(row: &Row<Run>, rows: &[Row<Run>]) -> Vec<Target> {
        let Some(measured) = row.median() else { return Vec::new() };
        match (row.run.client, row.run.job) {
            (Client::Leveret, Job::Returns) => {
                let met = mislabelled(row) == Some(0);
                vec![Target { text: "0 wrong".to_owned(), met }]
            }
            (Client::Leveret, _) => targets::of_engine(&row.run, measured, limit(row, rows)),
            (Client::Toolkit, Job::Confirm | Job::Mandatory | Job::Consume) => {
                // Where messages differ, the engine that sends the same ones counts.
                let times_engine = times(row, Client::Stamped, rows);
                let times_engine = times_engine.or_else(|| times(row, Client::Leveret, rows));
                times_engine.map(targets::of_toolkit).into_iter().collect()
            }
            _ => Vec::new(),
        }
    }
}

impl Clients {
    fn broker_of(&self, run: &Run) -> Option<&Broker> {
        self.broker.as_ref().filter(|_| run.peer == Peer::Rabbitmq)
    }

    /// A run for each client that can do the job; with each number of messages, if there are several.
    fn setting(
        &self,
        peer: Peer,
        port: u16,
        job: Job,
        size: usize,
        channels: u64,
    ) -> Vec<Vec<Run>> {
        let load = &self.arguments.load;
        let mut clients = load.candidates();
        clients.retain(|client| job.exists_for(*client, peer, channels));
        let runs = |nth: usize| {
            let run = |client| {
                let default = job.messages(client, peer, size);
                let messages = load.messages_or(default)[nth].next_multiple_of(channels);
                Run { client, job, peer, port, size, channels, messages }
            };
            clients.iter().copied().map(run).collect()
        };
        (0..load.messages.len().max(1)).map(runs).collect()
    }
}

/// How many times the CPU time that another client took in the same setting.
fn times(row: &Row<Run>, other: Client, rows: &[Row<Run>]) -> Option<f64> {
    let is_other = |run: &Run| run.client == other && run.same_setting(&row.run);
    (row.run.client != other).then(|| row.times(rows, is_other)).flatten()
}

/// How many times the CPU time of this client the best peer took in the same setting, if this is one of ours.
fn times_best_peer(row: &Row<Run>, rows: &[Row<Run>]) -> Option<f64> {
    let is_peer =
        |other: &&Row<Run>| other.run.client.is_peer() && other.run.same_setting(&row.run);
    let best = rows.iter().filter(is_peer).filter_map(Row::cpu).min_by(f64::total_cmp)?;
    row.run.client.is_ours().then_some(best / row.cpu()?)
}

/// What the limit of this job takes: on one channel, as where the targets were made.
fn limit(row: &Row<Run>, rows: &[Row<Run>]) -> Option<f64> {
    let on_one_channel = Run { channels: 1, ..row.run };
    let is_limit =
        |row: &&Row<Run>| row.run.client == Client::Limit && row.run.same_setting(&on_one_channel);
    rows.iter().find(is_limit)?.cpu()
}

fn per_1000(row: &Row<Run>, count: fn(&Measured) -> Option<u64>) -> Option<f64> {
    let measured = row.median()?;
    Some(count(measured)? as f64 * 1000.0 / measured.messages as f64)
}

/// The most wrong outcomes of all rounds.
fn mislabelled(row: &Row<Run>) -> Option<u64> {
    row.result.as_ref().ok()?.iter().filter_map(|run| run.mislabelled).max()
}
