//! The outbox on PostgreSQL.
//!
//! A batch is a transaction: it locks lanes, and ends when the rows are settled. A relay that dies takes its transaction along,
//! and its lanes are free at once; or, if its connection has gone without a word, when it has not been heard of for a while.

use std::io;
use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::postgres::{PgListener, PgRow};
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Postgres, Row as _, SqlStr, Transaction};

use super::row::{LANES as ALL_LANES, NewRow};
use super::store::{
    AsideRow, Bell, CLEANED_AT_ONCE, Claim, Claimed, LANES_AT_ONCE, MAX_BYTES, Refused, Row,
    Settled, SharedStore, Store, Wish, seconds,
};
use super::{Backlog, Outbox, OutboxConnection};
use crate::error::Error;
use crate::schema::Schema;

/// `ORDER BY` gives the rows ids in the order in which they were written.
const INSERT: &str = "\
INSERT INTO {outbox} (lane, ordering_key, exchange, routing_key, mandatory, properties, body)
SELECT lane, ordering_key, exchange, routing_key, mandatory, properties, body
FROM unnest($1::smallint[], $2::text[], $3::text[], $4::text[], $5::boolean[], $6::bytea[], $7::bytea[])
    WITH ORDINALITY AS r(lane, ordering_key, exchange, routing_key, mandatory, properties, body, place)
ORDER BY place";

/// Whatever the database's default is: in the other levels the second statement would see what the first one saw. PostgreSQL ends
/// it if the relay says nothing for longer than a batch takes: it might not notice for hours that nobody is there any more.
fn begin(wish: &Wish) -> AssertSqlSafe<String> {
    let silence = wish.lease.saturating_mul(2).as_millis().clamp(1, i32::MAX as u128);
    AssertSqlSafe(format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; \
         SET LOCAL idle_in_transaction_session_timeout = {silence}"
    ))
}

/// What may be sent now, as `SENDABLE` in the statements: it is due, and nothing before it in its key has to be waited for. That
/// is looked up row by row (`OFFSET 0` keeps it so): mostly there is nothing to be found, and the first rows are all that is
/// wanted.
const SENDABLE: &str = "\
o.state = 0 AND (o.due_at IS NULL OR o.due_at <= now())
    AND NOT EXISTS (
        SELECT FROM {outbox} h
        WHERE h.lane = o.lane AND h.ordering_key = o.ordering_key AND h.id < o.id
            AND h.attempts > 0 AND h.state < 2
            AND (CASE WHEN h.state = 0 THEN h.due_at > now() ELSE $2 END)
        OFFSET 0
    )";

/// The lanes that have waited longest, of those that nobody works on.
const LANES: &str = "\
SELECT l.lane
FROM {outbox_lanes} l
CROSS JOIN LATERAL (
    SELECT o.id FROM {outbox} o WHERE o.lane = l.lane AND SENDABLE ORDER BY o.id LIMIT 1
) first
ORDER BY first.id
LIMIT $1
FOR UPDATE OF l SKIP LOCKED";

/// A statement of its own, since it has to see what was settled by whoever had the lanes before: its snapshot is taken after
/// the locks.
const ROWS: &str = "\
SELECT id, ordering_key, exchange, routing_key, mandatory, properties, body, attempts, age
FROM (
    SELECT r.*, sum(octet_length(r.body)) OVER (ORDER BY r.id) - octet_length(r.body) AS bytes_before,
        extract(epoch FROM now() - r.written_at)::float8 AS age
    FROM unnest($1::smallint[]) AS l(lane)
    CROSS JOIN LATERAL (
        SELECT * FROM {outbox} o WHERE o.lane = l.lane AND SENDABLE ORDER BY o.id LIMIT $3
    ) r
) r
WHERE bytes_before < $4
ORDER BY id";

const COUNT_LANES: &str = "SELECT count(*) FROM {outbox_lanes}";

const RESTORE_LANES: &str = "\
INSERT INTO {outbox_lanes} (lane) SELECT generate_series(0, $1 - 1) ON CONFLICT DO NOTHING";

const DELETE_SENT: &str = "DELETE FROM {outbox} WHERE id = ANY($1)";

const KEEP_SENT: &str =
    "UPDATE {outbox} SET state = 2, settled_at = now(), due_at = NULL WHERE id = ANY($1)";

/// The wait begins now, and not with the transaction, which is as long as its batch has taken.
const REFUSED: &str = "\
UPDATE {outbox} o
SET attempts = o.attempts + 1, error = r.error,
    state = CASE WHEN r.again_in IS NULL THEN 1 ELSE 0 END,
    due_at = clock_timestamp() + make_interval(secs => r.again_in),
    settled_at = CASE WHEN r.again_in IS NULL THEN now() END
FROM unnest($1::bigint[], $2::text[], $3::float8[]) AS r(id, error, again_in)
WHERE o.id = r.id AND o.state = 0";

const CLEAN_UP: &str = "\
DELETE FROM {outbox} WHERE id IN (
    SELECT id FROM {outbox}
    WHERE state = 2 AND settled_at < now() - make_interval(secs => $1)
    ORDER BY settled_at LIMIT $2 FOR UPDATE SKIP LOCKED
)";

const BACKLOG: &str = "\
SELECT count(*) FILTER (WHERE state = 0) AS waiting,
    count(*) FILTER (WHERE state = 0 AND attempts > 0) AS refused,
    count(*) FILTER (WHERE state = 1) AS set_aside,
    extract(epoch FROM now() - min(written_at) FILTER (WHERE state = 0))::float8 AS oldest
FROM {outbox} WHERE state < 2";

const ASIDE: &str = "\
SELECT id, ordering_key, exchange, routing_key, mandatory, properties, body, attempts, error,
    extract(epoch FROM now() - written_at)::float8 AS age,
    extract(epoch FROM now() - coalesce(settled_at, now()))::float8 AS since
FROM {outbox} WHERE state = 1 AND id > $1 ORDER BY id LIMIT $2";

const SEND_AGAIN: &str = "\
UPDATE {outbox} SET state = 0, attempts = 0, due_at = NULL, settled_at = NULL
WHERE state = 1 AND ($1::bigint[] IS NULL OR id = ANY($1))";

const DISCARD: &str =
    "DELETE FROM {outbox} WHERE state = 1 AND ($1::bigint[] IS NULL OR id = ANY($1))";

/// The channel that relays listen on.
fn channel(outbox: &Outbox) -> String {
    format!("{}_outbox", outbox.schema().name())
}

async fn notify(connection: &mut PgConnection, outbox: &Outbox) -> sqlx::Result<()> {
    if outbox.notifies() {
        let notify = sqlx::query("SELECT pg_notify($1, '')").bind(channel(outbox));
        notify.execute(connection).await?;
    }
    Ok(())
}

/// Who tells relays does so in the same round trip. What is told twice in a transaction is told once.
pub(super) fn insert(schema: &Schema, notify: bool) -> SqlStr {
    match notify {
        true => schema.postgres(&format!("{INSERT} RETURNING pg_notify($8, '')")),
        false => schema.postgres(INSERT),
    }
}

impl OutboxConnection for PgConnection {
    fn write_rows<'a>(
        &'a mut self,
        outbox: &'a Outbox,
        rows: Vec<NewRow>,
    ) -> BoxFuture<'a, sqlx::Result<()>> {
        Box::pin(async move {
            let mut insert = sqlx::query(outbox.inserts.postgres.clone())
                .bind(rows.iter().map(|row| row.lane).collect::<Vec<_>>())
                .bind(rows.iter().map(|row| row.ordering_key.as_deref()).collect::<Vec<_>>())
                .bind(rows.iter().map(|row| row.exchange.as_str()).collect::<Vec<_>>())
                .bind(rows.iter().map(|row| row.routing_key.as_str()).collect::<Vec<_>>())
                .bind(rows.iter().map(|row| row.mandatory).collect::<Vec<_>>())
                .bind(rows.iter().map(|row| &*row.properties).collect::<Vec<&[u8]>>())
                .bind(rows.iter().map(|row| &*row.body).collect::<Vec<&[u8]>>());
            if outbox.notifies() {
                insert = insert.bind(channel(outbox));
            }
            insert.execute(self).await.map(drop)
        })
    }
}

/// The statements are made once: their text has the name of the schema in it.
#[derive(Debug)]
struct PostgresStore {
    pool: PgPool,
    outbox: Outbox,
    lanes: SqlStr,
    rows: SqlStr,
    delete_sent: SqlStr,
    keep_sent: SqlStr,
    refused: SqlStr,
}

pub(crate) fn store(pool: &PgPool, outbox: &Outbox) -> SharedStore {
    let sql = |text: &str| outbox.schema().postgres(text);
    std::sync::Arc::new(PostgresStore {
        pool: pool.clone(),
        outbox: outbox.clone(),
        lanes: sql(&LANES.replace("SENDABLE", SENDABLE)),
        rows: sql(&ROWS.replace("SENDABLE", SENDABLE)),
        delete_sent: sql(DELETE_SENT),
        keep_sent: sql(KEEP_SENT),
        refused: sql(REFUSED),
    })
}

impl PostgresStore {
    fn sql(&self, text: &str) -> SqlStr {
        self.outbox.schema().postgres(text)
    }
}

impl Store for PostgresStore {
    fn check(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.outbox.schema().check(&self.pool))
    }

    fn restore_lanes(&self) -> BoxFuture<'_, sqlx::Result<u64>> {
        Box::pin(async move {
            let count = sqlx::query_scalar::<_, i64>(self.sql(COUNT_LANES)).fetch_one(&self.pool);
            // Asks first, because who may not write there may not even try.
            if count.await? >= ALL_LANES as i64 {
                return Ok(0);
            }
            let restore = sqlx::query(self.sql(RESTORE_LANES)).bind(ALL_LANES as i32);
            Ok(restore.execute(&self.pool).await?.rows_affected())
        })
    }

    fn closed(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.pool.close_event())
    }

    fn claim<'a>(&'a self, wish: &'a Wish) -> BoxFuture<'a, sqlx::Result<Option<Claimed>>> {
        Box::pin(async move {
            let mut transaction = self.pool.begin_with(begin(wish)).await?;
            let lanes: Vec<i16> = sqlx::query_scalar(self.lanes.clone())
                .bind(LANES_AT_ONCE)
                .bind(wish.hold_keys)
                .fetch_all(&mut *transaction)
                .await?;
            if lanes.is_empty() {
                transaction.rollback().await?;
                return Ok(None);
            }
            let rows = sqlx::query(self.rows.clone())
                .bind(&lanes)
                .bind(wish.hold_keys)
                .bind(wish.rows.div_ceil(lanes.len()) as i64)
                .bind(MAX_BYTES)
                .fetch_all(&mut *transaction)
                .await?;
            let rows = rows.iter().map(row).collect::<sqlx::Result<Vec<Row>>>()?;
            let statements = [&self.delete_sent, &self.keep_sent, &self.refused].map(SqlStr::clone);
            let claim = PostgresClaim { transaction, statements };
            Ok(Some(Claimed { rows, claim: Box::new(claim) }))
        })
    }

    fn poll(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn listen(&self) -> BoxFuture<'_, sqlx::Result<Option<Box<dyn Bell>>>> {
        Box::pin(async move {
            let mut listener = PgListener::connect_with(&self.pool).await?;
            listener.eager_reconnect(false);
            listener.listen(&channel(&self.outbox)).await?;
            let bell: Box<dyn Bell> = Box::new(listener);
            Ok(Some(bell))
        })
    }

    fn clean_up(&self, age: Duration) -> BoxFuture<'_, sqlx::Result<u64>> {
        Box::pin(async move {
            let clean_up = sqlx::query(self.sql(CLEAN_UP));
            let cleaned = clean_up.bind(age.as_secs_f64()).bind(CLEANED_AT_ONCE);
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
            let aside = |found: PgRow| {
                let (error, since) = (found.try_get("error")?, found.try_get("since")?);
                Ok(AsideRow { row: row(&found)?, error, since })
            };
            rows.fetch_all(&self.pool).await?.into_iter().map(aside).collect()
        })
    }

    fn send_again<'a>(&'a self, ids: Option<&'a [i64]>) -> BoxFuture<'a, sqlx::Result<u64>> {
        Box::pin(async move {
            let mut transaction = self.pool.begin().await?;
            let send_again = sqlx::query(self.sql(SEND_AGAIN)).bind(ids);
            let sent = send_again.execute(&mut *transaction).await?.rows_affected();
            notify(&mut transaction, &self.outbox).await?;
            transaction.commit().await?;
            Ok(sent)
        })
    }

    fn discard<'a>(&'a self, ids: Option<&'a [i64]>) -> BoxFuture<'a, sqlx::Result<u64>> {
        Box::pin(async move {
            let discard = sqlx::query(self.sql(DISCARD)).bind(ids);
            Ok(discard.execute(&self.pool).await?.rows_affected())
        })
    }
}

fn row(row: &PgRow) -> sqlx::Result<Row> {
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

/// Dropped, it is rolled back.
#[derive(Debug)]
struct PostgresClaim {
    transaction: Transaction<'static, Postgres>,
    /// Delete what was sent, keep it, note what was refused.
    statements: [SqlStr; 3],
}

impl Claim for PostgresClaim {
    fn settle<'a>(mut self: Box<Self>, settled: &'a Settled) -> BoxFuture<'a, sqlx::Result<()>>
    where
        Self: 'a,
    {
        Box::pin(async move {
            let [delete, keep, refused] = self.statements;
            if !settled.sent.is_empty() {
                let sent = sqlx::query(if settled.keep { keep } else { delete });
                sent.bind(&settled.sent).execute(&mut *self.transaction).await?;
            }
            if !settled.refused.is_empty() {
                note_refused(&mut self.transaction, refused, &settled.refused).await?;
            }
            self.transaction.commit().await
        })
    }
}

async fn note_refused(
    connection: &mut PgConnection,
    sql: SqlStr,
    refused: &[Refused],
) -> sqlx::Result<()> {
    let again = |row: &Refused| row.again_in.map(|wait| wait.as_secs_f64());
    sqlx::query(sql)
        .bind(refused.iter().map(|row| row.id).collect::<Vec<_>>())
        .bind(refused.iter().map(|row| row.error.replace('\0', "")).collect::<Vec<_>>())
        .bind(refused.iter().map(again).collect::<Vec<_>>())
        .execute(connection)
        .await
        .map(drop)
}

impl Bell for PgListener {
    fn rings(&mut self) -> BoxFuture<'_, sqlx::Result<()>> {
        Box::pin(async move {
            match self.try_recv().await? {
                Some(_) => Ok(()),
                // It would connect again at once, and again if the server hangs up each time.
                None => Err(io::Error::from(io::ErrorKind::ConnectionAborted).into()),
            }
        })
    }
}
