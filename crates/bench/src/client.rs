//! Whole clients: Leveret, and its peers lapin, amqprs, deadpool-lapin and RustStream, against a null peer and a real RabbitMQ.

use std::time::Duration;

use clap::Args;
use leveret_testkit::rabbitmq::Version;
use serde_json::Value;

mod amqprs;
mod broker;
mod channels;
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
use crate::suite::{Load, Row, Suite, name};
use crate::table::Target;
use broker::Broker;
use jobs::{Client, Job, Peer, Run};

/// What to measure. Options that name several things may be given more than once.
#[derive(Args, Clone)]
pub(crate) struct Arguments {
    #[command(flatten)]
    load: Load<Job, Client>,
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
            self.load.job = self.load.jobs();
            // One at a time, 10 million take minutes.
            self.load.job.retain(|job| *job != Job::Latency);
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
    const NOTES: &'static str = "times engine, times toolkit: the CPU time that leveret, and toolkit, took; times best peer: \
        times ours that it took; wake-ups, sleeps and allocs: per 1000 messages; MiB: the most memory that was held; scaled: the \
        target, times what the limit takes here on one channel, through what it took where the target was made";

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
            false => {
                Some(Broker::start(arguments.load.start_rabbitmq(Version::V3_10).await).await?)
            }
        };
        Ok(Clients { arguments, null, broker })
    }

    fn settings(&self) -> Vec<Vec<Run>> {
        let null = self.null.as_ref().map(|(_, port)| (Peer::Null, *port));
        let rabbitmq = self.broker.as_ref().map(|broker| (Peer::Rabbitmq, broker.port()));
        let Arguments { load, size, channels, .. } = &self.arguments;
        let mut settings = Vec::new();
        for (peer, port) in null.into_iter().chain(rabbitmq) {
            for job in load.jobs() {
                // What is in the bodies is not the point there.
                for &size in if job == Job::Returns { &[16] } else { &**size } {
                    for &channels in channels {
                        let messages = |client| job.messages(client, peer, size);
                        let run = |client, messages: u64| {
                            let messages = messages.next_multiple_of(channels);
                            let run = Run { client, job, peer, port, size, channels, messages };
                            job.exists_for(client, peer, channels).then_some(run)
                        };
                        settings.extend(load.settings(messages, run));
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
            Client::Deadpool => lapin::run_pooled(run).await,
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

    fn labels(run: &Run) -> Vec<(&'static str, Value)> {
        vec![
            ("peer", name(run.peer)),
            ("job", name(run.job)),
            ("size", run.size.into()),
            ("channels", run.channels.into()),
            ("client", name(run.client)),
        ]
    }

    fn comparisons(row: &Row<Run>, rows: &[Row<Run>]) -> Vec<(&'static str, Option<f64>)> {
        vec![
            ("times_engine", times(row, Client::Leveret, rows)),
            ("times_toolkit", times(row, Client::Toolkit, rows)),
            ("times_best_peer", times_best_peer(row, rows)),
        ]
    }

    fn targets(row: &Row<Run>, rows: &[Row<Run>]) -> Vec<Target> {
        let Some(measured) = row.median() else { return Vec::new() };
        match (row.run.client, row.run.job) {
            (Client::Leveret, Job::Returns) => {
                vec![Target { text: "0 wrong".to_owned(), met: measured.mislabelled == Some(0) }]
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
