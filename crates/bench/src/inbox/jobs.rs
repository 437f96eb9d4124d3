//! What is measured: candidates, jobs, and the description of one run.

use clap::{Args, ValueEnum};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

use crate::client::display_as_argument;

/// Where messages come from.
pub(super) const QUEUE: &str = "bench.inbox";

/// How many deliveries may be unsettled: enough for the largest batch, and the next one.
pub(super) const PREFETCH: u16 = 2000;

/// What every handler does.
pub(super) const DEPOSIT: &str = "UPDATE accounts SET cents = cents + $1 WHERE id = $2";

/// Who does the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Candidate {
    /// Leveret, which remembers ids; a transaction for each message
    Ids,
    /// Leveret, which remembers a mark for each sender; a transaction for each message
    HighWater,
    /// Leveret, which remembers ids; a transaction for each batch of messages
    IdsInBatches,
    /// Leveret, which remembers a mark for each sender; a transaction for each batch of messages
    HighWaterInBatches,
    /// By hand with lapin and sqlx, in a table of nothing but ids; to consume, a transaction for each message
    ByHand,
}

impl Candidate {
    pub(super) fn can(self, job: Job) -> bool {
        job == Job::Consume || !matches!(self, Candidate::Ids | Candidate::HighWater)
    }

    pub(super) fn has_marks(self) -> bool {
        matches!(self, Candidate::HighWater | Candidate::HighWaterInBatches)
    }

    /// Where it remembers.
    pub(super) fn table(self) -> &'static str {
        match self {
            Candidate::Ids | Candidate::IdsInBatches => "leveret.inbox",
            Candidate::HighWater | Candidate::HighWaterInBatches => "leveret.inbox_marks",
            Candidate::ByHand => "by_hand",
        }
    }
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Job {
    /// Messages are taken from RabbitMQ, and their handler updates one row for each of them; batches are of 100
    Consume,
    /// Messages are taken from an embedded broker and remembered in batches of 1000, each with one commit, and nothing is done with
    /// them. They are of 100 senders in turn, so that each batch has all of them
    Remember,
}

impl Job {
    pub(super) fn messages(self) -> u64 {
        match self {
            Job::Consume => 10_000,
            Job::Remember => 1_000_000,
        }
    }

    /// How many messages make a batch.
    pub(super) fn batch(self) -> u16 {
        match self {
            Job::Consume => 100,
            Job::Remember => 1000,
        }
    }
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
    /// Where PostgreSQL listens on 127.0.0.1
    #[arg(long)]
    pub(super) database: u16,
    #[arg(long)]
    pub(super) messages: u64,
    #[arg(long)]
    pub(super) workers: u32,
}

impl Run {
    pub(super) fn broker_url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.port)
    }

    /// A connection for each worker, and one for whoever cleans up.
    pub(super) async fn pool(&self) -> sqlx::Result<PgPool> {
        let url = format!("postgres://postgres@127.0.0.1:{}/postgres", self.database);
        PgPoolOptions::new().max_connections(self.workers + 1).connect(&url).await
    }
}

display_as_argument!(Candidate Job);
