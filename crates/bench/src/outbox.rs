//! Sending what is in an outbox: Leveret's relay, and relays written by hand with sqlx and lapin, between a real PostgreSQL and a
//! real RabbitMQ; and Leveret's relay on SQLite, whose work is in the relay's own process.
//!
//! Before each run the table is filled, and a run after which not every message is in the queue, once, or a row is left, has
//! failed. PostgreSQL is that of the tests, which does not wait for the disk: elsewhere a commit for each message costs more.
//! Neither does SQLite.

use std::time::Duration;

use ::leveret::amqp::QueueOptions;
use clap::{Args, ValueEnum};
use leveret_sql::{BuiltIn, Dialect, Order, Outbox, Outgoing, Schema};
use leveret_testkit::ScratchFolder;
use leveret_testkit::postgres::Postgres;
use leveret_testkit::rabbitmq::Version;
use serde::{Deserialize, Serialize};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{Database, PgPool, Pool, SqlitePool};

mod by_hand;
mod leveret;

use crate::meter::{Failure, Measured, expect};
use crate::rabbitmq::RabbitMq;
use crate::suite::{self, ArgumentsOf, Suite};

/// Where messages go, through the default exchange.
const QUEUE: &str = "bench.outbox";

/// How many rows are written in one transaction.
const CHUNK: u64 = 1000;

/// What a relay by hand reads: no more than the job needs.
const BY_HAND: &str = "CREATE TABLE by_hand (
    id bigserial PRIMARY KEY, routing_key text NOT NULL, message_id text NOT NULL, body bytea NOT NULL
)";
const FILL_BY_HAND: &str = "INSERT INTO by_hand (routing_key, message_id, body)
    SELECT $1, gen_random_uuid()::text, decode(repeat('aa', $2), 'hex') FROM generate_series(1, $3)";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Candidate {
    /// Leveret's relay with its defaults, on PostgreSQL like all but one
    Leveret,
    /// The same, pipelined: it does not wait for the confirm of one message of a key before it sends the next
    LeveretPipelined,
    /// Leveret's relay with its defaults, on SQLite in a file
    LeveretSqlite,
    /// By hand, as it is mostly written: one row at a time, published with lapin, confirmed, deleted, committed
    ByHand,
    /// By hand, for speed: 1000 rows at a time, all published before their confirms are awaited, deleted together. It keeps no
    /// order by key when there are several of it
    HandInBatches,
}

impl Candidate {
    fn can(self, job: Job) -> bool {
        match self {
            Candidate::Leveret | Candidate::LeveretSqlite | Candidate::ByHand => true,
            Candidate::LeveretPipelined => job == Job::OneKey,
            Candidate::HandInBatches => job == Job::NoOrder,
        }
    }
}

/// What is in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Job {
    /// Messages without an ordering key
    NoOrder,
    /// Messages of a thousand ordering keys in turn
    ManyKeys,
    /// Messages of one ordering key
    OneKey,
}

#[derive(Args, Clone, Copy)]
pub(crate) struct Options {
    /// The version of RabbitMQ
    #[arg(long, default_value = "4.3")]
    rabbitmq: Version,
    /// Bytes per body
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(8..))]
    size: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setting {
    /// Where RabbitMQ listens on 127.0.0.1
    port: u16,
    /// The URLs of the databases
    postgres: String,
    sqlite: String,
    size: u32,
}

type Run = suite::Run<Job, Candidate, Setting>;

impl Setting {
    async fn postgres(&self) -> sqlx::Result<PgPool> {
        PgPool::connect(&self.postgres).await
    }

    /// As SQLite is set up where several write: a commit does not wait for the disk, and what it has written is safe all the same
    /// once the next checkpoint has.
    async fn sqlite(&self) -> sqlx::Result<SqlitePool> {
        let options: SqliteConnectOptions = self.sqlite.parse()?;
        let options = options.journal_mode(SqliteJournalMode::Wal);
        SqlitePool::connect_with(options.synchronous(SqliteSynchronous::Normal)).await
    }
}

pub(crate) struct Relays {
    setting: Setting,
    rabbitmq: RabbitMq,
    pool: PgPool,
    _postgres: Postgres,
    /// Of SQLite's file.
    _folder: ScratchFolder,
}

impl Suite for Relays {
    const NAME: &'static str = "outbox";
    /// Row by row takes a minute.
    const DEADLINE: Duration = Duration::from_secs(240);
    const NOTES: &'static str =
        "CPU is that of the relay's process, without the servers, and on SQLite with the database.";

    type Job = Job;
    type Candidate = Candidate;
    type Options = Options;
    type Setting = Setting;

    async fn start(arguments: &mut ArgumentsOf<Self>) -> Result<Self, Failure> {
        let Options { rabbitmq, size } = arguments.options;
        let (postgres, rabbitmq) = tokio::join!(Postgres::start(), RabbitMq::start(rabbitmq));
        let rabbitmq = rabbitmq?;
        rabbitmq.declare(QUEUE, QueueOptions::default()).await?;
        let folder = ScratchFolder::new();
        let sqlite = format!("sqlite://{}?mode=rwc", folder.path().join("bench.db").display());
        let setting = Setting { port: rabbitmq.port(), postgres: postgres.url(), sqlite, size };
        let pool = setting.postgres().await?;
        Schema::default().migrate(&pool).await?;
        sqlx::raw_sql(BY_HAND).execute(&pool).await?;
        Ok(Relays { setting, rabbitmq, pool, _postgres: postgres, _folder: folder })
    }

    fn settings(&self, _: Job) -> Vec<Setting> {
        vec![self.setting.clone()]
    }

    fn messages(job: Job, candidate: Candidate, _: &Setting, asked: Option<u64>) -> Option<u64> {
        candidate.can(job).then(|| asked.unwrap_or(20_000))
    }

    /// Writes the messages down.
    async fn prepare(&self, run: &Run) -> Result<(), Failure> {
        match run.candidate {
            Candidate::LeveretSqlite => {
                let pool = run.setting.sqlite().await?;
                Schema::default().migrate(&pool).await?;
                write(&pool, run).await?;
                pool.close().await;
                return Ok(());
            }
            Candidate::Leveret | Candidate::LeveretPipelined => write(&self.pool, run).await?,
            Candidate::ByHand | Candidate::HandInBatches => {
                let fill = sqlx::query(FILL_BY_HAND).bind(QUEUE).bind(run.setting.size as i32);
                fill.bind(run.messages as i64).execute(&self.pool).await?;
            }
        }
        sqlx::raw_sql("VACUUM ANALYZE").execute(&self.pool).await?;
        Ok(())
    }

    async fn run(run: Run) -> Result<Measured, Failure> {
        match run.candidate {
            Candidate::Leveret | Candidate::LeveretSqlite => leveret::run(run, Order::Strict).await,
            Candidate::LeveretPipelined => leveret::run(run, Order::Pipelined).await,
            Candidate::ByHand => by_hand::run(run, 1).await,
            Candidate::HandInBatches => by_hand::run(run, 1000).await,
        }
    }

    /// Takes all messages away. Fails if they are not all in the queue, once, or a row is left.
    async fn check(&self, run: &Run, _: &mut Measured) -> Result<(), Failure> {
        let sent = self.rabbitmq.purge(QUEUE).await?;
        let left = match run.candidate {
            Candidate::LeveretSqlite => left_on_sqlite(run).await?,
            _ => self.left_on_postgres().await?,
        };
        expect("are in the queue", run.messages, sent)?;
        expect("are left", 0, left.unsigned_abs())
    }

    fn is_peer(candidate: Candidate) -> bool {
        matches!(candidate, Candidate::ByHand | Candidate::HandInBatches)
    }
}

impl Relays {
    async fn left_on_postgres(&self) -> sqlx::Result<i64> {
        let sql = "SELECT (SELECT count(*) FROM leveret.outbox) + (SELECT count(*) FROM by_hand)";
        let left = sqlx::query_scalar(sql).fetch_one(&self.pool).await?;
        sqlx::raw_sql("TRUNCATE leveret.outbox, by_hand").execute(&self.pool).await?;
        Ok(left)
    }
}

async fn left_on_sqlite(run: &Run) -> sqlx::Result<i64> {
    let pool = run.setting.sqlite().await?;
    let sql = "SELECT count(*) FROM leveret_outbox";
    let left = sqlx::query_scalar(sql).fetch_one(&pool).await?;
    sqlx::raw_sql("DELETE FROM leveret_outbox").execute(&pool).await?;
    pool.close().await;
    Ok(left)
}

async fn write<D: Database>(pool: &Pool<D>, run: &Run) -> Result<(), Failure>
where
    BuiltIn: Dialect<D>,
{
    let message = |number: u64| {
        let outgoing = Outgoing::new("", QUEUE, vec![0xaa; run.setting.size as usize]);
        match run.job {
            Job::NoOrder => outgoing,
            Job::ManyKeys => outgoing.ordered_by((number % 1000).to_string()),
            Job::OneKey => outgoing.ordered_by("one"),
        }
    };
    let outbox = Outbox::default();
    for first in (0..run.messages).step_by(CHUNK as usize) {
        let numbers = first..run.messages.min(first + CHUNK);
        let mut transaction = pool.begin().await?;
        outbox.write_all(&mut *transaction, numbers.map(message)).await?;
        transaction.commit().await?;
    }
    Ok(())
}
