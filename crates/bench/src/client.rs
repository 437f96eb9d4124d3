//! Whole clients: Leveret, and its peers lapin, amqprs, deadpool-lapin and RustStream, against a null peer and a real RabbitMQ.

use std::time::Duration;

use ::leveret::amqp::Properties;
use clap::Args;
use leveret_testkit::rabbitmq::Version;
use serde_json::Value;

mod amqprs;
mod channels;
mod frames;
mod jobs;
mod lapin;
mod leveret;
mod limit;
pub(crate) mod null_peer;
mod ruststream;
mod tags;
mod targets;
mod toolkit;

pub(crate) use channels::{concurrent, pipelined};

use crate::child::Server;
use crate::message::filler;
use crate::meter::{Failure, Measured, expect};
use crate::rabbitmq::{RabbitMq, transient};
use crate::suite::{ArgumentsOf, Row, Suite, chosen, name};
use crate::table::Target;
use jobs::{Client, Job, PUBLISHED, Peer, Run, Setting};

#[derive(Args, Clone)]
pub(crate) struct Options {
    /// Bytes per body
    #[arg(long, default_values_t = targets::SIZES)]
    size: Vec<usize>,
    /// Channels, all on one connection
    #[arg(long, default_values_t = [1, 4], value_parser = clap::value_parser!(u64).range(1..=100))]
    channels: Vec<u64>,
    /// Show that memory stays flat: Leveret on the null peer, with 1 and with 10 million messages of 16 B
    #[arg(long, conflicts_with_all = ["messages", "candidate", "size", "rabbitmq_only"])]
    soak: bool,
    /// Skip RabbitMQ
    #[arg(long)]
    null_only: bool,
    /// Skip the null peer
    #[arg(long, conflicts_with = "null_only")]
    rabbitmq_only: bool,
    /// The version of RabbitMQ
    #[arg(long, default_value = "3.10")]
    rabbitmq: Version,
}

/// Messages of the two runs of a soak.
const SOAK: [u64; 2] = [1_000_000, 10_000_000];

/// Sets the options that `--soak` stands for.
fn resolve_soak(arguments: &mut ArgumentsOf<Clients>) {
    arguments.job = chosen(&arguments.job);
    // One at a time, 10 million take minutes.
    arguments.job.retain(|job| *job != Job::Latency);
    arguments.candidate = vec![Client::Leveret];
    arguments.messages = SOAK.to_vec();
    arguments.options.size = vec![16];
    arguments.options.null_only = true;
}

pub(crate) struct Clients {
    options: Options,
    null: Option<(Server, u16)>,
    rabbitmq: Option<RabbitMq>,
}

impl Suite for Clients {
    const NAME: &'static str = "client";
    const DEADLINE: Duration = Duration::from_secs(60);
    const NOTES: &'static str = "Scaled is the target, times what the candidate `limit` takes here on one channel, through what \
        it took where the target was made.";

    type Job = Job;
    type Candidate = Client;
    type Options = Options;
    type Setting = Setting;

    async fn start(arguments: &mut ArgumentsOf<Self>) -> Result<Self, Failure> {
        if arguments.options.soak {
            resolve_soak(arguments);
        }
        let options = arguments.options.clone();
        let (mut null, mut rabbitmq) = (None, None);
        if !options.rabbitmq_only {
            null = Some(Server::start("null-peer").await?);
        }
        if !options.null_only {
            let started = RabbitMq::start(options.rabbitmq).await?;
            started.declare(PUBLISHED, transient()).await?;
            rabbitmq = Some(started);
        }
        Ok(Clients { options, null, rabbitmq })
    }

    fn settings(&self, job: Job) -> Vec<Setting> {
        let null = self.null.as_ref().map(|(_, port)| (Peer::Null, *port));
        let rabbitmq = self.rabbitmq.as_ref().map(|node| (Peer::Rabbitmq, node.port()));
        let mut settings = Vec::new();
        for (peer, port) in null.into_iter().chain(rabbitmq) {
            // What is in the bodies is not the point of returns.
            for &size in if job == Job::Returns { &[16] } else { &*self.options.size } {
                for &channels in &self.options.channels {
                    settings.push(Setting { peer, port, size, channels });
                }
            }
        }
        settings
    }

    fn messages(job: Job, client: Client, at: &Setting, asked: Option<u64>) -> Option<u64> {
        let messages = asked.unwrap_or_else(|| job.messages(client, at));
        job.exists_for(client, at).then(|| messages.next_multiple_of(at.channels))
    }

    async fn prepare(&self, run: &Run) -> Result<(), Failure> {
        let Some(rabbitmq) = self.rabbitmq_of(run) else { return Ok(()) };
        let messages = if run.job.consumes() { run.share() } else { 0 };
        for queue in run.queues() {
            rabbitmq.declare(&queue, transient()).await?;
            let bodies = (0..messages).map(|_| filler(run.setting.size));
            rabbitmq.fill(&queue, Properties::default(), bodies).await?;
        }
        Ok(())
    }

    async fn run(run: Run) -> Result<Measured, Failure> {
        match run.candidate {
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
        let Some(rabbitmq) = self.rabbitmq_of(run) else { return Ok(()) };
        let mut left = 0;
        for queue in run.queues() {
            left += rabbitmq.delete(&queue).await?;
        }
        expect("are left in the queues", run.left(), left)
    }

    fn is_peer(client: Client) -> bool {
        client.is_peer()
    }

    fn labels(at: &Setting) -> Vec<(&'static str, Value)> {
        vec![("peer", name(at.peer)), ("body_B", at.size.into()), ("channels", at.channels.into())]
    }

    fn targets(row: &Row<Self>, rows: &[Row<Self>]) -> Vec<Target> {
        let Some(measured) = row.median() else { return Vec::new() };
        match (row.run.candidate, row.run.job) {
            (Client::Leveret, Job::Returns) => {
                vec![Target { text: "0 wrong".to_owned(), met: measured.mislabelled == Some(0) }]
            }
            (Client::Leveret, _) => targets::of_engine(&row.run, measured, limit(row, rows)),
            (Client::Toolkit, Job::Confirm | Job::Mandatory | Job::Consume) => {
                // Where messages differ, the engine that sends the same ones counts.
                let times_engine = row.times(rows, Client::Stamped);
                let times_engine = times_engine.or_else(|| row.times(rows, Client::Leveret));
                times_engine.map(targets::of_toolkit).into_iter().collect()
            }
            _ => Vec::new(),
        }
    }
}

impl Clients {
    /// The node on which a run needs queues.
    fn rabbitmq_of(&self, run: &Run) -> Option<&RabbitMq> {
        let needs_queues = run.setting.peer == Peer::Rabbitmq && run.job != Job::Publish;
        self.rabbitmq.as_ref().filter(|_| needs_queues)
    }
}

/// What the limit of this job takes: on one channel, as where the targets were made.
fn limit(row: &Row<Clients>, rows: &[Row<Clients>]) -> Option<f64> {
    let on_one_channel = Setting { channels: 1, ..row.run.setting };
    let is_limit = |other: &&Row<Clients>| {
        (other.run.candidate, other.run.job, other.run.setting)
            == (Client::Limit, row.run.job, on_one_channel)
    };
    rows.iter().find(is_limit)?.cost()
}
