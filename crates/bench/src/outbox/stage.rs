//! A real PostgreSQL, SQLite and a real RabbitMQ, and the messages of a run before and after it.

use leveret::amqp::{Connection, Options, QueueOptions};
use leveret_sql::{Backend, Outbox, OutboxConnection, Outgoing, Schema};
use leveret_testkit::ScratchFolder;
use leveret_testkit::postgres::Postgres;
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use sqlx::{PgPool, Pool};

use super::jobs::{Candidate, Job, QUEUE, Run};
use crate::client::{Failure, expect};

/// How many rows are written in one transaction.
const CHUNK: u64 = 1000;

/// What one writes by hand: no more than the job needs.
const BY_HAND: &str = "CREATE TABLE by_hand (
    id bigserial PRIMARY KEY, routing_key text NOT NULL, message_id text NOT NULL, body bytea NOT NULL
)";

pub(super) struct Stage {
    node: RabbitNode,
    postgres: Postgres,
    pool: PgPool,
    connection: Connection,
    /// Of SQLite's file.
    folder: ScratchFolder,
}

impl Stage {
    pub(super) async fn start(version: Version) -> Result<Stage, Failure> {
        let (postgres, node) = tokio::join!(Postgres::start(), RabbitNode::start(version));
        let connection = Connection::open(&Options::from_uri(&node.url())?).await?;
        connection.open_channel().await?.declare_queue(QUEUE, QueueOptions::default()).await?;
        let pool = PgPool::connect(&postgres.url()).await?;
        Schema::default().migrate(&pool).await?;
        sqlx::raw_sql(BY_HAND).execute(&pool).await?;
        Ok(Stage { node, postgres, pool, connection, folder: ScratchFolder::new() })
    }

    pub(super) fn run(&self, candidate: Candidate, job: Job, messages: u64, size: u32) -> Run {
        let database = match candidate {
            Candidate::LeveretSqlite => {
                format!("sqlite://{}?mode=rwc", self.folder.path().join("bench.db").display())
            }
            _ => self.postgres.url(),
        };
        Run { candidate, job, port: self.node.port(), database, size, messages }
    }

    /// Writes the messages down.
    pub(super) async fn fill(&self, run: &Run) -> Result<(), Failure> {
        if run.candidate == Candidate::LeveretSqlite {
            let pool = run.sqlite().await?;
            Schema::default().migrate(&pool).await?;
            write(&pool, run).await?;
            pool.close().await;
            return Ok(());
        }
        if matches!(run.candidate, Candidate::Leveret | Candidate::LeveretPipelined) {
            write(&self.pool, run).await?;
        } else {
            sqlx::query(
                "INSERT INTO by_hand (routing_key, message_id, body)
                 SELECT $1, gen_random_uuid()::text, decode(repeat('aa', $2), 'hex')
                 FROM generate_series(1, $3)",
            )
            .bind(QUEUE)
            .bind(run.size as i32)
            .bind(run.messages as i64)
            .execute(&self.pool)
            .await?;
        }
        sqlx::raw_sql("VACUUM ANALYZE").execute(&self.pool).await?;
        Ok(())
    }

    /// Takes all messages away. Fails if they are not all in the queue, once, or a row is left.
    pub(super) async fn clear(&self, run: &Run) -> Result<(), Failure> {
        let channel = self.connection.open_channel().await?;
        let sent = channel.purge_queue(QUEUE).await?;
        channel.close().await?;
        let left = match run.candidate {
            Candidate::LeveretSqlite => self.left_on_sqlite(run).await?,
            _ => self.left_on_postgres().await?,
        };
        expect("are in the queue", run.messages, sent.into())?;
        expect("are left", 0, left.unsigned_abs())
    }

    async fn left_on_postgres(&self) -> sqlx::Result<i64> {
        let sql = "SELECT (SELECT count(*) FROM leveret.outbox) + (SELECT count(*) FROM by_hand)";
        let left = sqlx::query_scalar(sql).fetch_one(&self.pool).await?;
        sqlx::raw_sql("TRUNCATE leveret.outbox, by_hand").execute(&self.pool).await?;
        Ok(left)
    }

    async fn left_on_sqlite(&self, run: &Run) -> sqlx::Result<i64> {
        let pool = run.sqlite().await?;
        let sql = "SELECT count(*) FROM leveret_outbox";
        let left = sqlx::query_scalar(sql).fetch_one(&pool).await?;
        sqlx::raw_sql("DELETE FROM leveret_outbox").execute(&pool).await?;
        pool.close().await;
        Ok(left)
    }
}

async fn write<D: Backend>(pool: &Pool<D>, run: &Run) -> Result<(), Failure>
where
    D::Connection: OutboxConnection,
{
    let message = |number: u64| {
        let outgoing = Outgoing::new("", QUEUE, vec![0xaa; run.size as usize]);
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
