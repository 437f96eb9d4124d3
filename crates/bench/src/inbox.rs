//! Handling messages exactly once: Leveret's inbox, and what is written by hand with lapin and sqlx, between a real RabbitMQ and
//! a real PostgreSQL; and what it takes to remember many messages.
//!
//! Each tenth message comes twice, and a run after which the accounts do not have exactly what they should has failed. PostgreSQL
//! waits for the disk at each commit, as it does outside of tests: so the median by time counts, because waiting takes no CPU.

use std::time::Duration;

use ::leveret::Client;
use ::leveret::amqp::QueueOptions;
use clap::{Args, ValueEnum};
use leveret_sql::Schema;
use leveret_testkit::postgres::Postgres;
use leveret_testkit::rabbitmq::Version;
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, PgPool};

mod by_hand;
mod leveret;
mod messages;
mod remember;

use crate::meter::{Failure, Measured, expect};
use crate::rabbitmq::RabbitMq;
use crate::suite::{self, ArgumentsOf, Suite};
use messages::{ACCOUNTS, Messages, SENDERS, total};

/// Where messages come from.
const QUEUE: &str = "bench.inbox";

/// How many deliveries may be unsettled: enough for the largest batch, and the next one.
const PREFETCH: u16 = 2000;

/// What every handler does.
const DEPOSIT: &str = "UPDATE accounts SET cents = cents + $1 WHERE id = $2";

/// What a handler by hand needs: no more than the job.
const TABLES: &str = "CREATE TABLE by_hand (id text PRIMARY KEY);
                      CREATE TABLE accounts (id bigint PRIMARY KEY, cents bigint NOT NULL)";

const EMPTY: &str = "TRUNCATE leveret.inbox, leveret.inbox_marks, by_hand, accounts";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Candidate {
    /// Leveret remembers ids, with a transaction for each message
    Ids,
    /// Leveret remembers a mark for each sender, with a transaction for each message
    HighWater,
    /// Leveret remembers ids, with a transaction for each batch of messages
    IdsInBatches,
    /// Leveret remembers a mark for each sender, with a transaction for each batch of messages
    HighWaterInBatches,
    /// lapin and sqlx by hand, with a table of ids alone; to consume, a transaction for each message
    ByHand,
}

impl Candidate {
    fn can(self, job: Job) -> bool {
        job == Job::Consume || !matches!(self, Candidate::Ids | Candidate::HighWater)
    }

    fn has_marks(self) -> bool {
        matches!(self, Candidate::HighWater | Candidate::HighWaterInBatches)
    }

    /// Where it remembers.
    fn table(self) -> &'static str {
        match self {
            Candidate::Ids | Candidate::IdsInBatches => "leveret.inbox",
            Candidate::HighWater | Candidate::HighWaterInBatches => "leveret.inbox_marks",
            Candidate::ByHand => "by_hand",
        }
    }
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Job {
    /// Take messages from RabbitMQ and update one row for each; batches are of 100
    Consume,
    /// Take messages of 100 senders from an embedded broker and only remember them, in batches of 1000 with one commit each. One
    /// round, because it takes long
    Remember,
}

#[derive(Args, Clone, Copy)]
pub(crate) struct Options {
    /// The version of RabbitMQ
    #[arg(long, default_value = "4.3")]
    rabbitmq: Version,
    /// Messages that are handled at the same time, by the candidates that handle them one by one
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=90))]
    workers: u32,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Setting {
    /// Where RabbitMQ listens on 127.0.0.1
    port: u16,
    /// Where PostgreSQL listens on 127.0.0.1
    database: u16,
    workers: u32,
}

type Run = suite::Run<Job, Candidate, Setting>;

impl Setting {
    /// A connection for each worker, and one for cleaning up.
    async fn pool(&self) -> sqlx::Result<PgPool> {
        let url = format!("postgres://postgres@127.0.0.1:{}/postgres", self.database);
        PgPoolOptions::new().max_connections(self.workers + 1).connect(&url).await
    }
}

pub(crate) struct Inboxes {
    setting: Setting,
    rabbitmq: RabbitMq,
    client: Client,
    pool: PgPool,
    _postgres: Postgres,
}

impl Suite for Inboxes {
    const NAME: &'static str = "inbox";
    /// Ten million messages take some minutes.
    const DEADLINE: Duration = Duration::from_secs(1800);
    const NOTES: &'static str = "Cost is time. CPU is without PostgreSQL; to remember, with an embedded broker and its publisher. \
        Rows, disk: of the table that remembers, with its indexes. PostgreSQL waits for the disk at each commit.";

    type Job = Job;
    type Candidate = Candidate;
    type Options = Options;
    type Setting = Setting;

    async fn start(arguments: &mut ArgumentsOf<Self>) -> Result<Self, Failure> {
        let Options { rabbitmq, workers } = arguments.options;
        let (postgres, rabbitmq) =
            tokio::join!(Postgres::start_on_disk(), RabbitMq::start(rabbitmq));
        let rabbitmq = rabbitmq?;
        rabbitmq.declare(QUEUE, QueueOptions::default()).await?;
        let setting = Setting { port: rabbitmq.port(), database: postgres.port(), workers };
        let client = Client::connect(&*rabbitmq.url()).await?;
        let pool = setting.pool().await?;
        Schema::default().migrate(&pool).await?;
        sqlx::raw_sql(TABLES).execute(&pool).await?;
        Ok(Inboxes { setting, rabbitmq, client, pool, _postgres: postgres })
    }

    fn settings(&self, _: Job) -> Vec<Setting> {
        vec![self.setting]
    }

    fn messages(job: Job, candidate: Candidate, _: &Setting, asked: Option<u64>) -> Option<u64> {
        let messages = if job == Job::Consume { 10_000 } else { 1_000_000 };
        candidate.can(job).then(|| asked.unwrap_or(messages))
    }

    fn runs_once(job: Job) -> bool {
        job == Job::Remember
    }

    /// Makes the accounts and publishes the messages; those that are to be remembered come from elsewhere.
    async fn prepare(&self, run: &Run) -> Result<(), Failure> {
        sqlx::raw_sql(EMPTY).execute(&self.pool).await?;
        sqlx::query("INSERT INTO accounts SELECT generate_series(0, $1 - 1), 0")
            .bind(ACCOUNTS as i64)
            .execute(&self.pool)
            .await?;
        if run.job == Job::Consume {
            let mut messages = Messages::new(&self.client, run.messages).await?;
            while messages.publish_some().await? {}
        }
        sqlx::raw_sql("VACUUM ANALYZE").execute(&self.pool).await?;
        sqlx::raw_sql("CHECKPOINT").execute(&self.pool).await?;
        Ok(())
    }

    async fn run(run: Run) -> Result<Measured, Failure> {
        match (run.job, run.candidate) {
            (Job::Consume, Candidate::ByHand) => by_hand::consume(run).await,
            (Job::Consume, _) => leveret::consume(run).await,
            (Job::Remember, _) => remember::run(run).await,
        }
    }

    /// Notes what was kept. Fails if a message is left, or the accounts do not have what they should.
    async fn check(&self, run: &Run, measured: &mut Measured) -> Result<(), Failure> {
        let left = self.rabbitmq.purge(QUEUE).await?;
        let cents: i64 = sqlx::query_scalar("SELECT sum(cents)::bigint FROM accounts")
            .fetch_one(&self.pool)
            .await?;
        let table = run.candidate.table();
        let sql = format!("SELECT count(*), pg_total_relation_size('{table}') FROM {table}");
        let (rows, bytes): (i64, i64) =
            sqlx::query_as(AssertSqlSafe(sql)).fetch_one(&self.pool).await?;
        expect("are left", 0, left)?;
        let expected = if run.job == Job::Consume { total(run.messages) } else { 0 };
        if cents.unsigned_abs() != expected {
            return Err(format!("{cents} cents are in the accounts, not {expected}").into());
        }
        let marks = run.messages.min(SENDERS);
        let remembered = if run.candidate.has_marks() { marks } else { run.messages };
        expect("are remembered", remembered, rows.unsigned_abs())?;
        measured.rows = Some(rows.unsigned_abs());
        measured.bytes_on_disk = Some(bytes.unsigned_abs());
        Ok(())
    }

    fn cost(measured: &Measured) -> f64 {
        measured.wall_ns as f64 / measured.messages as f64
    }

    fn is_peer(candidate: Candidate) -> bool {
        candidate == Candidate::ByHand
    }
}
