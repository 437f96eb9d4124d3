//! SQLite, which is in the process: several rows are as many statements.
//!
//! One transaction at a time may write. So none is open while messages of the outbox are under way: lanes are taken by a lease,
//! which is written down. Those of a relay that dies are free when it runs out. A transaction of the inbox is the only writer from
//! its begin on, and waits for nothing afterwards.

use std::time::Duration;

use futures_util::TryStreamExt as _;
use sqlx::error::DatabaseError;
use sqlx::sqlite::SqliteRow;
use sqlx::{
    Connection as _, Pool, Row as _, SqlSafeStr as _, Sqlite, SqliteConnection, SqlitePool,
    Transaction,
};

use super::{
    AsideAction, AsideRow, BuiltIn, ClaimOptions, Claimed, Dialect, ErrorClass, LANES,
    LANES_PER_CLAIM, MAX_BYTES, Maintained, Migration, NewRow, ROWS_PER_CLEANUP, Record, Reply,
    Row, Sender, SequenceNumbers, Settled, Tables, common,
};
use crate::outbox::Backlog;

/// `SQLITE_BUSY` and `SQLITE_LOCKED`, whose details are in the higher bits.
const BUSY: [u32; 2] = [5, 6];

/// Writing from the begin on: a transaction that begins by reading would not wait for another one, but fail.
const BEGIN_WRITING: &str = "BEGIN IMMEDIATE";

const MIGRATIONS: &str = "CREATE TABLE IF NOT EXISTS {migrations} (
    version INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    made_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
)";

/// Names that differ in case are the same here.
const HAS_MIGRATIONS: &str = "\
SELECT EXISTS (SELECT * FROM sqlite_master WHERE type = 'table' AND name = ? COLLATE NOCASE)";

/// The savepoint is gone with its transaction, which tells whether that is still the same.
const BEGIN: &str = "BEGIN IMMEDIATE; SAVEPOINT leveret";
const RELEASE_SAVEPOINT: &str = "RELEASE leveret";

const ADD_ID: &str =
    "INSERT INTO {inbox} (scope, id, expires_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING";

const ADD_MARK: &str =
    "INSERT INTO {inbox_marks} (scope, sender, mark) VALUES (?, ?, ?) ON CONFLICT DO NOTHING";

const CLEAN: &str = "DELETE FROM {inbox} WHERE rowid IN (
    SELECT rowid FROM {inbox} WHERE expires_at <= $1 LIMIT $2)";

const CLEAN_REPLIES: &str = "DELETE FROM {inbox_replies} WHERE rowid IN (
    SELECT rowid FROM {inbox_replies} WHERE expires_at <= $1 LIMIT $2)";

/// Milliseconds since 1970.
macro_rules! now {
    () => {
        "CAST(unixepoch('subsec') * 1000 AS INTEGER)"
    };
}

const NOW: &str = concat!("SELECT ", now!());

const INSERT: &str = concat!(
    "INSERT INTO {outbox} (lane, ordering_key, exchange, routing_key, mandatory, properties, body, written_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ",
    now!(),
    ")"
);

/// What may be sent now: it is due, and nothing before it in its key has to be waited for. The time is the same for all rows: were
/// one still held back, and its successor looked at a moment later, that would overtake it.
macro_rules! sendable {
    () => {
        "o.state = 0 AND (o.due_at IS NULL OR o.due_at <= ?1)
    AND NOT EXISTS (
        SELECT * FROM {outbox} h
        WHERE h.lane = o.lane AND h.ordering_key = o.ordering_key AND h.id < o.id
            AND h.attempts > 0 AND h.state < 2
            AND (CASE WHEN h.state = 0 THEN h.due_at > ?1 ELSE ?2 END)
    )"
    };
}

/// Whether there is anything to do at all: asking this locks nothing.
const IS_DUE: &str = concat!(
    "SELECT EXISTS (
    SELECT * FROM {outbox_lanes} l
    WHERE l.held_until <= ?1
        AND EXISTS (SELECT * FROM {outbox} o WHERE o.lane = l.lane AND ",
    sendable!(),
    "))"
);

const CLAIM_LANES: &str = concat!(
    "UPDATE {outbox_lanes} SET holder = ?3, held_until = ?1 + ?4
WHERE lane IN (
    SELECT lane FROM (
        SELECT l.lane AS lane, (
            SELECT o.id FROM {outbox} o WHERE o.lane = l.lane AND ",
    sendable!(),
    " ORDER BY o.id LIMIT 1
        ) AS first
        FROM {outbox_lanes} l WHERE l.held_until <= ?1
    )
    WHERE first IS NOT NULL ORDER BY first LIMIT ?5
)
RETURNING lane"
);

/// The rows of one lane.
const CLAIM_ROWS: &str = concat!(
    "SELECT id, ordering_key, exchange, routing_key, mandatory, properties, body, attempts,
    (?1 - written_at) / 1000.0 AS age
FROM {outbox} o WHERE o.lane = ?3 AND ",
    sendable!(),
    " ORDER BY o.id LIMIT ?4"
);

const RESTORE_LANES: &str = "\
INSERT INTO {outbox_lanes} (lane)
WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?1 - 1)
SELECT n FROM numbers WHERE true ON CONFLICT DO NOTHING";

const DELETE_SENT: &str = "DELETE FROM {outbox} WHERE id IN (SELECT value FROM json_each(?))";

const KEEP_SENT: &str = concat!(
    "UPDATE {outbox} SET state = 2, settled_at = ",
    now!(),
    ", due_at = NULL WHERE id IN (SELECT value FROM json_each(?))"
);

const REFUSED: &str = concat!(
    "UPDATE {outbox}
SET attempts = attempts + 1, error = ?2, state = CASE WHEN ?3 IS NULL THEN 1 ELSE 0 END,
    due_at = ",
    now!(),
    " + ?3, settled_at = CASE WHEN ?3 IS NULL THEN ",
    now!(),
    " END WHERE id = ?1 AND state = 0"
);

const GIVE_BACK: &str = "UPDATE {outbox_lanes} SET holder = NULL, held_until = 0 WHERE holder = ?";

const CLEAN_SENT: &str = concat!(
    "DELETE FROM {outbox} WHERE id IN (
    SELECT id FROM {outbox} WHERE state = 2 AND settled_at < ",
    now!(),
    " - ?1 ORDER BY settled_at LIMIT ?2
)"
);

const BACKLOG: &str = concat!(
    "SELECT count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 0 AND attempts > 0),
    count(*) FILTER (WHERE state = 1), (",
    now!(),
    " - min(written_at) FILTER (WHERE state = 0)) / 1000.0
FROM {outbox} WHERE state < 2"
);

const ASIDE: &str = concat!(
    "SELECT id, ordering_key, exchange, routing_key, mandatory, properties, body, attempts, error,
    (",
    now!(),
    " - written_at) / 1000.0 AS age, (",
    now!(),
    " - coalesce(settled_at, ",
    now!(),
    ")) / 1000.0 AS since
FROM {outbox} WHERE state = 1 AND id > ?1 ORDER BY id LIMIT ?2"
);

const SEND_AGAIN: &str = "\
UPDATE {outbox} SET state = 0, attempts = 0, due_at = NULL, settled_at = NULL
WHERE state = 1 AND (?1 IS NULL OR id IN (SELECT value FROM json_each(?1)))";

const DISCARD: &str = "\
DELETE FROM {outbox} WHERE state = 1 AND (?1 IS NULL OR id IN (SELECT value FROM json_each(?1)))";

/// As SQLite reads them.
fn json(ids: &[i64]) -> String {
    let ids: Vec<String> = ids.iter().map(i64::to_string).collect();
    format!("[{}]", ids.join(","))
}

fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX / 2)
}

async fn now(connection: &mut SqliteConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar(NOW).fetch_one(connection).await
}

/// Where a handler or SQLite itself has ended a transaction, sqlx has not: it begins none on this connection any more.
async fn begin_with(
    pool: &SqlitePool,
    statement: &'static str,
) -> sqlx::Result<Transaction<'static, Sqlite>> {
    loop {
        let connection = pool.acquire().await?;
        if !connection.is_in_transaction() {
            return Transaction::begin(connection, Some(statement.into_sql_str())).await;
        }
        connection.close().await?;
    }
}

impl Dialect<Sqlite> for BuiltIn {
    const ONE_WRITER: bool = true;
    const POLL_EVERY: Duration = Duration::from_millis(100);

    /// The holder.
    type Claim = String;

    fn classify(&self, error: &dyn DatabaseError) -> ErrorClass {
        let code = error.code().and_then(|code| code.parse().ok());
        match code.is_some_and(|code: u32| BUSY.contains(&(code & 0xff))) {
            true => ErrorClass::Passing,
            false => ErrorClass::Other,
        }
    }

    fn migrations(&self) -> &'static [Migration] {
        common::migrations!("sqlite": 1 "outbox", 2 "inbox", 3 "sequences")
    }

    async fn begin_migration(
        &self,
        pool: &SqlitePool,
        tables: &Tables,
    ) -> sqlx::Result<Transaction<'static, Sqlite>> {
        let mut transaction = begin_with(pool, BEGIN_WRITING).await?;
        sqlx::raw_sql(tables.prefixed(MIGRATIONS)).execute(&mut *transaction).await?;
        Ok(transaction)
    }

    async fn version(
        &self,
        connection: &mut SqliteConnection,
        tables: &Tables,
    ) -> sqlx::Result<Option<i32>> {
        let exists =
            sqlx::query_scalar(HAS_MIGRATIONS).bind(format!("{}_migrations", tables.name()));
        if !exists.fetch_one(&mut *connection).await? {
            return Ok(None);
        }
        let latest = tables.prefixed("SELECT max(version) FROM {migrations}");
        sqlx::query_scalar(latest).fetch_one(connection).await
    }

    async fn apply(
        &self,
        connection: &mut SqliteConnection,
        tables: &Tables,
        step: &Migration,
    ) -> sqlx::Result<()> {
        sqlx::raw_sql(tables.prefixed(step.sql)).execute(&mut *connection).await?;
        let note = tables.prefixed("INSERT INTO {migrations} (version, name) VALUES (?, ?)");
        let note = sqlx::query(note).bind(step.version).bind(step.name);
        note.execute(connection).await.map(drop)
    }

    async fn begin(&self, pool: &SqlitePool) -> sqlx::Result<Transaction<'static, Sqlite>> {
        begin_with(pool, BEGIN).await
    }

    async fn commit(&self, mut transaction: Transaction<'static, Sqlite>) -> sqlx::Result<()> {
        sqlx::raw_sql(RELEASE_SAVEPOINT).execute(&mut *transaction).await?;
        transaction.commit().await
    }

    async fn add_ids(
        &self,
        connection: &mut SqliteConnection,
        tables: &Tables,
        ids: &[(&str, &[u8])],
        expires_at: Option<i64>,
    ) -> sqlx::Result<Vec<bool>> {
        let mut added = Vec::with_capacity(ids.len());
        for (scope, id) in ids {
            let add = sqlx::query(tables.prefixed(ADD_ID)).bind(scope).bind(id).bind(expires_at);
            added.push(add.execute(&mut *connection).await?.rows_affected() == 1);
        }
        Ok(added)
    }

    async fn lock_marks(
        &self,
        connection: &mut SqliteConnection,
        tables: &Tables,
        senders: &[Sender],
        initial: &[u8],
    ) -> sqlx::Result<Vec<Vec<u8>>> {
        let mut marks = Vec::with_capacity(senders.len());
        for Sender { scope, name } in senders {
            let mark = sqlx::query_scalar(tables.prefixed(common::MARK)).bind(scope).bind(name);
            let mark: Option<Vec<u8>> = mark.fetch_optional(&mut *connection).await?;
            if mark.is_none() {
                let add = sqlx::query(tables.prefixed(ADD_MARK)).bind(scope).bind(name);
                add.bind(initial).execute(&mut *connection).await?;
            }
            marks.push(mark.unwrap_or_else(|| initial.to_vec()));
        }
        Ok(marks)
    }

    async fn set_marks(
        &self,
        connection: &mut SqliteConnection,
        tables: &Tables,
        senders: &[Sender],
        marks: &[Vec<u8>],
    ) -> sqlx::Result<()> {
        for (Sender { scope, name }, mark) in senders.iter().zip(marks) {
            let set = sqlx::query(tables.prefixed(common::SET_MARK)).bind(scope).bind(name);
            let set = set.bind(mark).execute(&mut *connection).await?;
            common::expect_rows(1, set.rows_affected())?;
        }
        Ok(())
    }

    async fn write(
        &self,
        connection: &mut SqliteConnection,
        tables: &Tables,
        rows: &[NewRow],
        _notify: bool,
    ) -> sqlx::Result<()> {
        for row in rows {
            sqlx::query(tables.prefixed(INSERT))
                .bind(row.lane)
                .bind(&row.ordering_key)
                .bind(&row.exchange)
                .bind(&row.routing_key)
                .bind(row.mandatory)
                .bind(&*row.properties)
                .bind(&*row.body)
                .execute(&mut *connection)
                .await?;
        }
        Ok(())
    }

    async fn claim(
        &self,
        pool: &SqlitePool,
        tables: &Tables,
        options: &ClaimOptions,
    ) -> sqlx::Result<Option<Claimed<String>>> {
        let mut connection = pool.acquire().await?;
        let asked_at = now(&mut connection).await?;
        let is_due = sqlx::query_scalar(tables.prefixed(IS_DUE)).bind(asked_at);
        if !is_due.bind(options.hold_keys).fetch_one(&mut *connection).await? {
            return Ok(None);
        }
        let lanes: Vec<i16> = sqlx::query_scalar(tables.prefixed(CLAIM_LANES))
            .bind(asked_at)
            .bind(options.hold_keys)
            .bind(&options.holder)
            .bind(milliseconds(options.lease))
            .bind(LANES_PER_CLAIM)
            .fetch_all(&mut *connection)
            .await?;
        if lanes.is_empty() {
            return Ok(None);
        }
        let rows = rows(&mut connection, tables, &lanes, options).await?;
        Ok(Some(Claimed { rows, claim: options.holder.clone() }))
    }

    async fn settle(
        &self,
        pool: &SqlitePool,
        tables: &Tables,
        holder: String,
        settled: &Settled,
    ) -> sqlx::Result<()> {
        let mut transaction = begin_with(pool, BEGIN_WRITING).await?;
        let sent = sqlx::query(tables.prefixed(if settled.keep { KEEP_SENT } else { DELETE_SENT }));
        sent.bind(json(&settled.sent)).execute(&mut *transaction).await?;
        for row in &settled.refused {
            sqlx::query(tables.prefixed(REFUSED))
                .bind(row.id)
                .bind(&row.error)
                .bind(row.again_in.map(milliseconds))
                .execute(&mut *transaction)
                .await?;
        }
        let give_back = sqlx::query(tables.prefixed(GIVE_BACK)).bind(holder);
        give_back.execute(&mut *transaction).await?;
        transaction.commit().await
    }

    async fn update_aside(
        &self,
        pool: &SqlitePool,
        tables: &Tables,
        ids: Option<&[i64]>,
        action: AsideAction,
    ) -> sqlx::Result<u64> {
        let sql = match action {
            AsideAction::SendAgain { .. } => SEND_AGAIN,
            AsideAction::Discard => DISCARD,
        };
        let update = sqlx::query(tables.prefixed(sql)).bind(ids.map(json));
        Ok(update.execute(pool).await?.rows_affected())
    }

    async fn maintain_outbox(
        &self,
        pool: &SqlitePool,
        tables: &Tables,
        keep: Option<Duration>,
    ) -> sqlx::Result<Maintained> {
        let mut done = Maintained::default();
        let lanes: i64 =
            sqlx::query_scalar(tables.prefixed(common::COUNT_LANES)).fetch_one(pool).await?;
        // Asks first: asking locks nothing.
        if lanes < i64::from(LANES) {
            let restore = sqlx::query(tables.prefixed(RESTORE_LANES)).bind(LANES);
            done.restored = restore.execute(pool).await?.rows_affected();
        }
        if let Some(keep) = keep {
            let clean = sqlx::query(tables.prefixed(CLEAN_SENT)).bind(milliseconds(keep));
            done.deleted = clean.bind(ROWS_PER_CLEANUP).execute(pool).await?.rows_affected();
        }
        Ok(done)
    }

    common::methods!(Sqlite, SqliteConnection, prefixed);
}

/// Rows of these lanes, in order, up to the bound on their bodies.
async fn rows(
    connection: &mut SqliteConnection,
    tables: &Tables,
    lanes: &[i16],
    options: &ClaimOptions,
) -> sqlx::Result<Vec<Row>> {
    let limit = options.rows.div_ceil(lanes.len()) as i64;
    // After the lanes were taken, so that it is not before what others have noted.
    let now = now(connection).await?;
    let mut rows = Vec::new();
    for lane in lanes {
        let found = sqlx::query(tables.prefixed(CLAIM_ROWS)).bind(now).bind(options.hold_keys);
        let mut found = found.bind(lane).bind(limit).fetch(&mut *connection);
        let mut bytes = 0;
        while bytes < MAX_BYTES / i64::from(LANES_PER_CLAIM)
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

common::row_of!(SqliteRow);
