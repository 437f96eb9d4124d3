//! What is measured: candidates, jobs, and the description of one run.

use clap::{Args, ValueEnum};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{PgPool, SqlitePool};

use crate::client::display_as_argument;

/// Where messages go, through the default exchange.
pub(super) const QUEUE: &str = "bench.outbox";

/// Who does the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Candidate {
    /// A relay of leveret-sql, as it is by default, on PostgreSQL as all but one
    Leveret,
    /// The same, pipelined: it does not wait for the confirm of one message of a key before it sends the next
    LeveretPipelined,
    /// A relay of leveret-sql, as it is by default, on SQLite in a file
    LeveretSqlite,
    /// By hand, as it is mostly written: one row at a time, published with lapin, its confirm awaited, deleted, committed
    ByHand,
    /// By hand, for speed: 1000 rows at a time, all published before their confirms are awaited, deleted together. It keeps no
    /// order by key when there are several of it
    HandInBatches,
}

impl Candidate {
    pub(super) fn can(self, job: Job) -> bool {
        match self {
            Candidate::Leveret | Candidate::LeveretSqlite | Candidate::ByHand => true,
            Candidate::LeveretPipelined => job == Job::OneKey,
            Candidate::HandInBatches => job == Job::NoOrder,
        }
    }
}

/// What is in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Job {
    /// Messages without an ordering key
    NoOrder,
    /// Messages of a thousand ordering keys in turn
    ManyKeys,
    /// Messages of one ordering key
    OneKey,
}

/// One run of one candidate, in a process of its own.
#[derive(Args, Clone, Debug)]
pub(crate) struct Run {
    #[arg(long)]
    pub(super) candidate: Candidate,
    #[arg(long)]
    pub(super) job: Job,
    /// Where RabbitMQ listens on 127.0.0.1
    #[arg(long)]
    pub(super) port: u16,
    /// The URL of the database
    #[arg(long)]
    pub(super) database: String,
    #[arg(long)]
    pub(super) size: u32,
    #[arg(long)]
    pub(super) messages: u64,
}

impl Run {
    pub(super) async fn postgres(&self) -> sqlx::Result<PgPool> {
        PgPool::connect(&self.database).await
    }

    /// As SQLite is set up where several write: a commit does not wait for the disk, and what it has written is safe all the same
    /// once the next checkpoint has.
    pub(super) async fn sqlite(&self) -> sqlx::Result<SqlitePool> {
        let options: SqliteConnectOptions = self.database.parse()?;
        let options = options.journal_mode(SqliteJournalMode::Wal);
        SqlitePool::connect_with(options.synchronous(SqliteSynchronous::Normal)).await
    }

    pub(super) fn broker_url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.port)
    }
}

display_as_argument!(Candidate Job);
