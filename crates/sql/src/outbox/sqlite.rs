//! The outbox on SQLite.
//!
//! Only one transaction at a time may write, so none is open while messages are under way: lanes are taken by a lease, which
//! is written down. Those of a relay that dies are free when it runs out.

use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt as _;
use futures_util::future::BoxFuture;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqlStr, SqliteConnection, SqlitePool};

use super::row::{LANES as ALL_LANES, NewRow};
use super::store::{
    AsideRow, Bell, CLEANED_AT_ONCE, Claim, Claimed, LANES_AT_ONCE, MAX_BYTES, Row, Settled,
    SharedStore, Store, Wish, seconds,
};
use super::{Backlog, Outbox, OutboxConnection};
use crate::backend::unique;
use crate::error::Error;
use crate::schema::Schema;

/// Milliseconds since 1970.
const NOW: &str = "CAST(unixepoch('subsec') * 1000 AS INTEGER)";

const INSERT: &str = "\
INSERT INTO {outbox} (lane, ordering_key, exchange, routing_key, mandatory, properties, body, written_at)
VALUES (?, ?, ?, ?, ?, ?, ?, NOW())";

/// What may be sent now, as `SENDABLE` in the statements: it is due, and nothing before it in its key has to be waited for. The
/// time is the same for all rows: were one still held back, and its successor looked at a moment later, that would overtake
/// it.
const SENDABLE: &str = "\
o.state = 0 AND (o.due_at IS NULL OR o.due_at <= ?1)
    AND NOT EXISTS (
        SELECT * FROM {outbox} h
        WHERE h.lane = o.lane AND h.ordering_key = o.ordering_key AND h.id < o.id
            AND h.attempts > 0 AND h.state < 2
            AND (CASE WHEN h.state = 0 THEN h.due_at > ?1 ELSE ?2 END)
    )";

/// Whether there is anything to do at all: asking this locks nothing.
const IS_DUE: &str = "\
SELECT EXISTS (
    SELECT * FROM {outbox_lanes} l
    WHERE l.held_until <= ?1
        AND EXISTS (SELECT * FROM {outbox} o WHERE o.lane = l.lane AND SENDABLE)
)";

/// The lanes that have waited longest, of those that nobody works on.
const LANES: &str = "\
UPDATE {outbox_lanes} SET holder = ?3, held_until = ?1 + ?4
WHERE lane IN (
    SELECT lane FROM (
        SELECT l.lane AS lane, (
            SELECT o.id FROM {outbox} o WHERE o.lane = l.lane AND SENDABLE ORDER BY o.id LIMIT 1
        ) AS first
        FROM {outbox_lanes} l WHERE l.held_until <= ?1
    )
    WHERE first IS NOT NULL ORDER BY first LIMIT ?5
)
RETURNING lane";

/// The rows of one lane.
const ROWS: &str = "\
SELECT id, ordering_key, exchange, routing_key, mandatory, properties, body, attempts,
    (?1 - written_at) / 1000.0 AS age
FROM {outbox} o WHERE o.lane = ?3 AND SENDABLE
ORDER BY o.id LIMIT ?4";

const COUNT_LANES: &str = "SELECT count(*) FROM {outbox_lanes}";

const RESTORE_LANES: &str = "\
INSERT INTO {outbox_lanes} (lane)
WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?1 - 1)
SELECT n FROM numbers WHERE true ON CONFLICT DO NOTHING";

const DELETE_SENT: &str = "DELETE FROM {outbox} WHERE id IN (SELECT value FROM json_each(?))";

const KEEP_SENT: &str = "\
UPDATE {outbox} SET state = 2, settled_at = NOW(), due_at = NULL
WHERE id IN (SELECT value FROM json_each(?))";

const REFUSED: &str = "\
UPDATE {outbox}
SET attempts = attempts + 1, error = ?2, state = CASE WHEN ?3 IS NULL THEN 1 ELSE 0 END,
    due_at = NOW() + ?3, settled_at = CASE WHEN ?3 IS NULL THEN NOW() END
WHERE id = ?1 AND state = 0";

const GIVE_BACK: &str = "UPDATE {outbox_lanes} SET holder = NULL, held_until = 0 WHERE holder = ?";

const CLEAN_UP: &str = "\
DELETE FROM {outbox} WHERE id IN (
    SELECT id FROM {outbox} WHERE state = 2 AND settled_at < NOW() - ?1 ORDER BY settled_at LIMIT ?2
)";

const BACKLOG: &str = "\
SELECT count(*) FILTER (WHERE state = 0) AS waiting,
    count(*) FILTER (WHERE state = 0 AND attempts > 0) AS refused,
    count(*) FILTER (WHERE state = 1) AS set_aside,
    (NOW() - min(written_at) FILTER (WHERE state = 0)) / 1000.0 AS oldest
FROM {outbox} WHERE state < 2";

const ASIDE: &str = "\
SELECT id, ordering_key, exchange, routing_key, mandatory, properties, body, attempts, error,
    (NOW() - written_at) / 1000.0 AS age, (NOW() - coalesce(settled_at, NOW())) / 1000.0 AS since
FROM {outbox} WHERE state = 1 AND id > ?1 ORDER BY id LIMIT ?2";

const SEND_AGAIN: &str = "\
UPDATE {outbox} SET state = 0, attempts = 0, due_at = NULL, settled_at = NULL
WHERE state = 1 AND (?1 IS NULL OR id IN (SELECT value FROM json_each(?1)))";

const DISCARD: &str = "\
DELETE FROM {outbox} WHERE state = 1 AND (?1 IS NULL OR id IN (SELECT value FROM json_each(?1)))";

fn sql(outbox: &Outbox, text: &str) -> SqlStr {
    outbox.schema().sqlite(&text.replace("NOW()", NOW))
}

/// As SQLite reads them.
fn json(ids: &[i64]) -> String {
    let ids: Vec<String> = ids.iter().map(i64::to_string).collect();
    format!("[{}]", ids.join(","))
}

fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX / 2)
}

pub(super) fn insert(schema: &Schema) -> SqlStr {
    schema.sqlite(&INSERT.replace("NOW()", NOW))
}

impl OutboxConnection for SqliteConnection {
    fn write_rows<'a>(
        &'a mut self,
        outbox: &'a Outbox,
        rows: Vec<NewRow>,
    ) -> BoxFuture<'a, sqlx::Result<()>> {
        Box::pin(async move {
            for row in rows {
                sqlx::query(outbox.inserts.sqlite.clone())
                    .bind(row.lane)
                    .bind(row.ordering_key)
                    .bind(row.exchange)
                    .bind(row.routing_key)
                    .bind(row.mandatory)
                    .bind(&*row.properties)
                    .bind(&*row.body)
                    .execute(&mut *self)
                    .await?;
            }
            Ok(())
        })
    }
}

#[derive(Debug)]
struct SqliteStore {
    pool: SqlitePool,
    outbox: Outbox,
    is_due: SqlStr,
    lanes: SqlStr,
    now: SqlStr,
    rows: SqlStr,
    statements: Arc<Statements>,
}

#[derive(Debug)]
struct Statements {
    delete_sent: SqlStr,
    keep_sent: SqlStr,
    refused: SqlStr,
    give_back: SqlStr,
}

pub(crate) fn store(pool: &SqlitePool, outbox: &Outbox) -> SharedStore {
    let sql = |text: &str| sql(outbox, text);
    let sendable = |text: &str| sql(&text.replace("SENDABLE", SENDABLE));
    Arc::new(SqliteStore {
        pool: pool.clone(),
        outbox: outbox.clone(),
        is_due: sendable(IS_DUE),
        lanes: sendable(LANES),
        now: sql("SELECT NOW()"),
        rows: sendable(ROWS),
        statements: Arc::new(Statements {
            delete_sent: sql(DELETE_SENT),
            keep_sent: sql(KEEP_SENT),
            refused: sql(REFUSED),
            give_back: sql(GIVE_BACK),
        }),
    })
}

impl SqliteStore {
    fn sql(&self, text: &str) -> SqlStr {
        sql(&self.outbox, text)
    }

    /// Rows of these lanes, in order, up to the bound on their bodies.
    async fn rows(
        &self,
        connection: &mut SqliteConnection,
        lanes: &[i16],
        wish: &Wish,
    ) -> sqlx::Result<Vec<Row>> {
        let limit = wish.rows.div_ceil(lanes.len()) as i64;
        // After the lanes were taken, so that it is not before what others have noted.
        let now = self.now(connection).await?;
        let mut rows = Vec::new();
        for lane in lanes {
            let found = sqlx::query(self.rows.clone()).bind(now).bind(wish.hold_keys);
            let mut found = found.bind(lane).bind(limit).fetch(&mut *connection);
            let mut bytes = 0;
            while bytes < MAX_BYTES / LANES_AT_ONCE
                && let Some(found) = found.try_next().await?
            {
                let row = row(&found)?;
                bytes += row.body.len() as i64;
                rows.push(row);
            }
        }
        rows.sort_by_key(|row| row.id);
        Ok(rows)
    }

    async fn now(&self, connection: &mut SqliteConnection) -> sqlx::Result<i64> {
        sqlx::query_scalar(self.now.clone()).fetch_one(connection).await
    }
}

impl Store for SqliteStore {
    fn check(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.outbox.schema().check(&self.pool))
    }

    fn restore_lanes(&self) -> BoxFuture<'_, sqlx::Result<u64>> {
        Box::pin(async move {
            let count = sqlx::query_scalar::<_, i64>(self.sql(COUNT_LANES)).fetch_one(&self.pool);
            // Asks first: asking locks nothing.
            if count.await? >= ALL_LANES as i64 {
                return Ok(0);
            }
            let restore = sqlx::query(self.sql(RESTORE_LANES)).bind(ALL_LANES as i64);
            Ok(restore.execute(&self.pool).await?.rows_affected())
        })
    }

    fn closed(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.pool.close_event())
    }

    fn claim<'a>(&'a self, wish: &'a Wish) -> BoxFuture<'a, sqlx::Result<Option<Claimed>>> {
        Box::pin(async move {
            let mut connection = self.pool.acquire().await?;
            let now = self.now(&mut connection).await?;
            let is_due = sqlx::query_scalar(self.is_due.clone()).bind(now).bind(wish.hold_keys);
            if !is_due.fetch_one(&mut *connection).await? {
                return Ok(None);
            }
            let claim = SqliteClaim::new(&self.pool, &self.statements);
            let lanes: Vec<i16> = sqlx::query_scalar(self.lanes.clone())
                .bind(now)
                .bind(wish.hold_keys)
                .bind(&claim.holder)
                .bind(milliseconds(wish.lease))
                .bind(LANES_AT_ONCE)
                .fetch_all(&mut *connection)
                .await?;
            if lanes.is_empty() {
                return Ok(None);
            }
            let rows = self.rows(&mut connection, &lanes, wish).await?;
            Ok(Some(Claimed { rows, claim: Box::new(claim) }))
        })
    }

    fn poll(&self) -> Duration {
        Duration::from_millis(100)
    }

    fn listen(&self) -> BoxFuture<'_, sqlx::Result<Option<Box<dyn Bell>>>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    fn clean_up(&self, age: Duration) -> BoxFuture<'_, sqlx::Result<u64>> {
        Box::pin(async move {
            let clean_up = sqlx::query(self.sql(CLEAN_UP));
            let cleaned = clean_up.bind(milliseconds(age)).bind(CLEANED_AT_ONCE);
            Ok(cleaned.execute(&self.pool).await?.rows_affected())
        })
    }

    fn backlog(&self) -> BoxFuture<'_, sqlx::Result<Backlog>> {
        Box::pin(async move {
            let row = sqlx::query(self.sql(BACKLOG)).fetch_one(&self.pool).await?;
            let count = |name| Ok::<_, sqlx::Error>(row.try_get::<i64, _>(name)?.unsigned_abs());
            Ok(Backlog {
                waiting: count("waiting")?,
                refused: count("refused")?,
                set_aside: count("set_aside")?,
                oldest: row.try_get::<Option<f64>, _>("oldest")?.map(seconds),
            })
        })
    }

    fn aside(&self, after: i64, limit: i64) -> BoxFuture<'_, sqlx::Result<Vec<AsideRow>>> {
        Box::pin(async move {
            let rows = sqlx::query(self.sql(ASIDE)).bind(after).bind(limit);
            let aside = |found: SqliteRow| {
                let (error, since) = (found.try_get("error")?, found.try_get("since")?);
                Ok(AsideRow { row: row(&found)?, error, since })
            };
            rows.fetch_all(&self.pool).await?.into_iter().map(aside).collect()
        })
    }

    fn send_again<'a>(&'a self, ids: Option<&'a [i64]>) -> BoxFuture<'a, sqlx::Result<u64>> {
        Box::pin(async move {
            let send_again = sqlx::query(self.sql(SEND_AGAIN)).bind(ids.map(json));
            Ok(send_again.execute(&self.pool).await?.rows_affected())
        })
    }

    fn discard<'a>(&'a self, ids: Option<&'a [i64]>) -> BoxFuture<'a, sqlx::Result<u64>> {
        Box::pin(async move {
            let discard = sqlx::query(self.sql(DISCARD)).bind(ids.map(json));
            Ok(discard.execute(&self.pool).await?.rows_affected())
        })
    }
}

fn row(row: &SqliteRow) -> sqlx::Result<Row> {
    Ok(Row {
        id: row.try_get("id")?,
        ordering_key: row.try_get("ordering_key")?,
        exchange: row.try_get("exchange")?,
        routing_key: row.try_get("routing_key")?,
        mandatory: row.try_get("mandatory")?,
        properties: row.try_get("properties")?,
        body: row.try_get("body")?,
        attempts: row.try_get("attempts")?,
        age: row.try_get("age")?,
    })
}

/// Dropped, its lanes are free when the lease has run out.
#[derive(Debug)]
struct SqliteClaim {
    pool: SqlitePool,
    statements: Arc<Statements>,
    /// A name that no other claim has.
    holder: String,
}

impl SqliteClaim {
    fn new(pool: &SqlitePool, statements: &Arc<Statements>) -> Self {
        SqliteClaim { pool: pool.clone(), statements: Arc::clone(statements), holder: unique() }
    }
}

impl Claim for SqliteClaim {
    fn settle<'a>(self: Box<Self>, settled: &'a Settled) -> BoxFuture<'a, sqlx::Result<()>>
    where
        Self: 'a,
    {
        Box::pin(async move {
            let mut transaction = self.pool.begin_with("BEGIN IMMEDIATE").await?;
            let Statements { delete_sent, keep_sent, refused, give_back } = &*self.statements;
            let sent = if settled.keep { keep_sent } else { delete_sent };
            sqlx::query(sent.clone()).bind(json(&settled.sent)).execute(&mut *transaction).await?;
            for row in &settled.refused {
                sqlx::query(refused.clone())
                    .bind(row.id)
                    .bind(&row.error)
                    .bind(row.again_in.map(milliseconds))
                    .execute(&mut *transaction)
                    .await?;
            }
            sqlx::query(give_back.clone()).bind(&self.holder).execute(&mut *transaction).await?;
            transaction.commit().await
        })
    }
}
