//! A real RabbitMQ and a real PostgreSQL, and what is in them before and after a run.

use leveret::{Client, Queue, Topology};
use leveret_sql::Schema;
use leveret_testkit::postgres::Postgres;
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use sqlx::{AssertSqlSafe, PgPool};

use super::jobs::{Candidate, Job, QUEUE, Run};
use super::messages::{ACCOUNTS, Messages, SENDERS, total};
use crate::client::{Failure, expect};

/// What one writes by hand: no more than the job needs.
const TABLES: &str = "CREATE TABLE by_hand (id text PRIMARY KEY);
                      CREATE TABLE accounts (id bigint PRIMARY KEY, cents bigint NOT NULL)";

const EMPTY: &str = "TRUNCATE leveret.inbox, leveret.inbox_marks, by_hand, accounts";

/// What is left of a run in the table that remembers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kept {
    pub(super) rows: u64,
    /// With indexes.
    pub(super) bytes: u64,
}

pub(super) struct Stage {
    node: RabbitNode,
    postgres: Postgres,
    pool: PgPool,
    client: Client,
}

impl Stage {
    pub(super) async fn start(version: Version) -> Result<Stage, Failure> {
        let (postgres, node) = tokio::join!(Postgres::start_on_disk(), RabbitNode::start(version));
        let client = Client::connect(&*node.url()).await?;
        client.apply(&Topology::new().queue(Queue::classic(QUEUE))).await?;
        let pool = PgPool::connect(&postgres.url()).await?;
        Schema::default().migrate(&pool).await?;
        sqlx::raw_sql(TABLES).execute(&pool).await?;
        Ok(Stage { node, postgres, pool, client })
    }

    pub(super) fn run(&self, candidate: Candidate, job: Job, messages: u64, workers: u32) -> Run {
        let (port, database) = (self.node.port(), self.postgres.port());
        Run { candidate, job, port, database, messages, workers }
    }

    /// Makes the accounts and publishes the messages; those that are to be remembered come from elsewhere.
    pub(super) async fn fill(&self, run: Run) -> Result<(), Failure> {
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

    /// Says what was kept. Fails if a message is left, or the accounts do not have what they should.
    pub(super) async fn clear(&self, run: Run) -> Result<Kept, Failure> {
        let left = self.client.purge_queue(QUEUE).await?;
        let cents: i64 = sqlx::query_scalar("SELECT sum(cents)::bigint FROM accounts")
            .fetch_one(&self.pool)
            .await?;
        let table = run.candidate.table();
        let sql = format!("SELECT count(*), pg_total_relation_size('{table}') FROM {table}");
        let (rows, bytes): (i64, i64) =
            sqlx::query_as(AssertSqlSafe(sql)).fetch_one(&self.pool).await?;
        expect("are left", 0, left.into())?;
        let expected = if run.job == Job::Consume { total(run.messages) } else { 0 };
        if cents.unsigned_abs() != expected {
            return Err(format!("{cents} cents are in the accounts, not {expected}").into());
        }
        let marks = run.messages.min(SENDERS);
        let remembered = if run.candidate.has_marks() { marks } else { run.messages };
        expect("are remembered", remembered, rows.unsigned_abs())?;
        Ok(Kept { rows: rows.unsigned_abs(), bytes: bytes.unsigned_abs() })
    }
}
