//! A dialect with other transactions, claims and marks than the built-in one, which does the rest.

use std::time::Duration;

use leveret_sql::dialect::{
    AsideAction, AsideRow, ClaimOptions, Claimed, ErrorClass, MAX_BYTES, Maintained, Migration,
    NewRow, Record, Reply, Row, Sender, SequenceNumbers, Settled, Tables,
};
use leveret_sql::{Backlog, BuiltIn, Dialect};
use sqlx::error::DatabaseError;
use sqlx::{
    Connection as _, Row as _, SqlSafeStr as _, Sqlite, SqliteConnection, SqlitePool, Transaction,
};

#[derive(Clone, Debug)]
pub(crate) struct Own;

/// Steps of its own, of which each keeps its number and its text: what the built-in dialect adds later is added here, if it is needed,
/// behind these.
const STEPS: &[Migration] = &[
    Migration {
        version: 1,
        name: "outbox",
        sql: include_str!("../../migrations/sqlite/1_outbox.sql"),
    },
    Migration {
        version: 2,
        name: "inbox",
        sql: include_str!("../../migrations/sqlite/2_inbox.sql"),
    },
    Migration {
        version: 3,
        name: "sequences",
        sql: include_str!("../../migrations/sqlite/3_sequences.sql"),
    },
    Migration { version: 4, name: "own marks", sql: OWN_MARKS },
];

const OWN_MARKS: &str =
    "CREATE TABLE {own_marks} (scope TEXT, sender TEXT, mark BLOB, UNIQUE (scope, sender))";

/// Of one lane: that of the oldest row which is due and has no refused row of its key before it.
const CLAIM: &str = "\
UPDATE {outbox_lanes} SET holder = $1, held_until = unixepoch('subsec') * 1000 + $2
WHERE lane = (
    SELECT o.lane FROM {outbox} o JOIN {outbox_lanes} l ON l.lane = o.lane
    WHERE l.held_until <= unixepoch('subsec') * 1000 AND o.state = 0
        AND coalesce(o.due_at, 0) <= unixepoch('subsec') * 1000
        AND NOT EXISTS (
            SELECT * FROM {outbox} h
            WHERE h.lane = o.lane AND h.ordering_key = o.ordering_key AND h.id < o.id AND h.attempts > 0
                AND (h.state = 0 AND h.due_at > unixepoch('subsec') * 1000 OR h.state = 1 AND $3)
        )
    ORDER BY o.id LIMIT 1
)
RETURNING lane, CAST(held_until - $2 AS INTEGER) AS taken_at";

const ROWS: &str = "\
SELECT o.*, ($2 - o.written_at) / 1000.0 AS age FROM {outbox} o
WHERE o.lane = $1 AND o.state = 0 AND coalesce(o.due_at, 0) <= $2
    AND NOT EXISTS (
        SELECT * FROM {outbox} h
        WHERE h.lane = o.lane AND h.ordering_key = o.ordering_key AND h.id < o.id AND h.attempts > 0
            AND (h.state = 0 AND h.due_at > $2 OR h.state = 1 AND $3)
    )
ORDER BY o.id LIMIT $4";

const BACKLOG: &str = "\
SELECT coalesce(sum(state = 0), 0), coalesce(sum(state = 0 AND attempts > 0), 0), coalesce(sum(state = 1), 0)
FROM {outbox}";

macro_rules! as_built_in {
    ($($name:ident($($argument:ident: $type:ty),*) -> $output:ty;)*) => {$(
        async fn $name(&self, $($argument: $type),*) -> sqlx::Result<$output> {
            Dialect::<Sqlite>::$name(&BuiltIn, $($argument),*).await
        }
    )*};
}

impl Dialect<Sqlite> for Own {
    const ONE_WRITER: bool = true;
    const POLL_EVERY: Duration = Duration::from_millis(50);

    type Claim = String;

    fn classify(&self, error: &dyn DatabaseError) -> ErrorClass {
        Dialect::<Sqlite>::classify(&BuiltIn, error)
    }

    fn migrations(&self) -> &'static [Migration] {
        STEPS
    }

    async fn begin(&self, pool: &SqlitePool) -> sqlx::Result<Transaction<'static, Sqlite>> {
        loop {
            let connection = pool.acquire().await?;
            if !connection.is_in_transaction() {
                let begin = "BEGIN EXCLUSIVE; SAVEPOINT own".into_sql_str();
                return Transaction::begin(connection, Some(begin)).await;
            }
            // A handler has ended the transaction before, which sqlx does not notice.
            connection.close().await?;
        }
    }

    async fn commit(&self, mut transaction: Transaction<'static, Sqlite>) -> sqlx::Result<()> {
        sqlx::query("RELEASE own").execute(&mut *transaction).await?;
        transaction.commit().await
    }

    async fn add_ids(
        &self,
        connection: &mut SqliteConnection,
        tables: &Tables,
        ids: &[(&str, &[u8])],
        expires_at: Option<i64>,
    ) -> sqlx::Result<Vec<bool>> {
        let sql =
            "INSERT OR IGNORE INTO {inbox} (scope, id, expires_at) VALUES ($1, $2, $3) RETURNING 1";
        let mut added = Vec::new();
        for (scope, id) in ids {
            let add = sqlx::query(tables.prefixed(sql)).bind(scope).bind(id).bind(expires_at);
            added.push(add.fetch_optional(&mut *connection).await?.is_some());
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
        let sql = "INSERT INTO {own_marks} VALUES ($1, $2, $3) \
                   ON CONFLICT DO UPDATE SET mark = mark RETURNING mark";
        let mut marks = Vec::new();
        for Sender { scope, name } in senders {
            let lock = sqlx::query_scalar(tables.prefixed(sql)).bind(scope).bind(name);
            marks.push(lock.bind(initial).fetch_one(&mut *connection).await?);
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
        let sql = "REPLACE INTO {own_marks} VALUES ($1, $2, $3)";
        for (Sender { scope, name }, mark) in senders.iter().zip(marks) {
            let set = sqlx::query(tables.prefixed(sql)).bind(scope).bind(name).bind(mark);
            set.execute(&mut *connection).await?;
        }
        Ok(())
    }

    async fn mark(
        &self,
        pool: &SqlitePool,
        tables: &Tables,
        Sender { scope, name }: &Sender,
    ) -> sqlx::Result<Option<Vec<u8>>> {
        let sql = tables.prefixed("SELECT mark FROM {own_marks} WHERE scope = $1 AND sender = $2");
        sqlx::query_scalar(sql).bind(scope).bind(name).fetch_optional(pool).await
    }

    async fn set_reply(
        &self,
        connection: &mut SqliteConnection,
        tables: &Tables,
        record: &Record,
        reply: &Reply,
        expires_at: i64,
    ) -> sqlx::Result<()> {
        let Record::Number { sender: Sender { scope, name }, number, mark } = record else {
            let (of_id, until) = (record, expires_at);
            return Dialect::<Sqlite>::set_reply(&BuiltIn, connection, tables, of_id, reply, until)
                .await;
        };
        let sql = "INSERT INTO {inbox_replies} SELECT $1, $2, $3, $4, $5, $6 FROM {own_marks} \
                   WHERE scope = $1 AND sender = $2 AND mark = $7";
        let set = sqlx::query(tables.prefixed(sql)).bind(scope).bind(name).bind(number);
        let set = set.bind(&reply.properties).bind(&reply.body).bind(expires_at).bind(mark);
        match set.execute(connection).await?.rows_affected() {
            1 => Ok(()),
            _ => Err(sqlx::Error::RowNotFound),
        }
    }

    async fn claim(
        &self,
        pool: &SqlitePool,
        tables: &Tables,
        options: &ClaimOptions,
    ) -> sqlx::Result<Option<Claimed<String>>> {
        let claim = sqlx::query_as(tables.prefixed(CLAIM)).bind(&options.holder);
        let claim = claim.bind(options.lease.as_millis() as i64).bind(options.hold_keys);
        let Some((lane, taken_at)): Option<(i16, i64)> = claim.fetch_optional(pool).await? else {
            return Ok(None);
        };
        let rows = sqlx::query(tables.prefixed(ROWS)).bind(lane).bind(taken_at);
        let rows = rows.bind(options.hold_keys).bind(options.rows as i64).fetch_all(pool).await?;
        let mut bytes = 0;
        let mut claimed = Vec::new();
        for row in rows.iter().map(read) {
            let row = row?;
            bytes += row.body.len() as i64;
            claimed.push(row);
            if bytes >= MAX_BYTES {
                break;
            }
        }
        Ok(Some(Claimed { rows: claimed, claim: options.holder.clone() }))
    }

    async fn backlog(&self, pool: &SqlitePool, tables: &Tables) -> sqlx::Result<Backlog> {
        let counts = sqlx::query_as(tables.prefixed(BACKLOG)).fetch_one(pool);
        let (waiting, refused, set_aside): (i64, i64, i64) = counts.await?;
        let mut backlog = Backlog::default();
        backlog.waiting = waiting.unsigned_abs();
        backlog.refused = refused.unsigned_abs();
        backlog.set_aside = set_aside.unsigned_abs();
        Ok(backlog)
    }

    as_built_in! {
        begin_migration(pool: &SqlitePool, tables: &Tables) -> Transaction<'static, Sqlite>;
        version(connection: &mut SqliteConnection, tables: &Tables) -> Option<i32>;
        apply(connection: &mut SqliteConnection, tables: &Tables, step: &Migration) -> ();
        reply(connection: &mut SqliteConnection, tables: &Tables, record: &Record)
            -> Option<Option<Reply>>;
        release_ids(connection: &mut SqliteConnection, tables: &Tables, scope: &str, ids: &[&[u8]],
            expires_at: i64) -> ();
        clean_inbox(pool: &SqlitePool, tables: &Tables, now: i64) -> u64;
        write(connection: &mut SqliteConnection, tables: &Tables, rows: &[NewRow], notify: bool) -> ();
        settle(pool: &SqlitePool, tables: &Tables, claim: String, settled: &Settled) -> ();
        list_aside(pool: &SqlitePool, tables: &Tables, after: i64, limit: i64) -> Vec<AsideRow>;
        update_aside(pool: &SqlitePool, tables: &Tables, ids: Option<&[i64]>, action: AsideAction)
            -> u64;
        maintain_outbox(pool: &SqlitePool, tables: &Tables, keep: Option<Duration>) -> Maintained;
        take_numbers(connection: &mut SqliteConnection, tables: &Tables, sender: &str, count: i64)
            -> i64;
        hold_numbers(pool: &SqlitePool, tables: &Tables, sender: &str, holder: &str)
            -> SequenceNumbers;
        keep_numbers(pool: &SqlitePool, tables: &Tables, sender: &str, holder: &str,
            numbers: SequenceNumbers) -> bool;
    }
}

fn read(row: &sqlx::sqlite::SqliteRow) -> sqlx::Result<Row> {
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
