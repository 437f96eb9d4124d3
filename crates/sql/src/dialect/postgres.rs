//! PostgreSQL, where each statement is a way to the server and back: several rows are one statement.
//!
//! A batch of the outbox is a transaction: it locks lanes, and ends when the rows are settled. A relay that dies takes its
//! transaction along, and its lanes are free at once; or, if its machine is gone, when the server has heard nothing for a while.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::stream;
use sqlx::error::DatabaseError;
use sqlx::postgres::{PgListener, PgRow};
use sqlx::{
    AssertSqlSafe, PgConnection, PgPool, Pool, Postgres, Row as _, SqlSafeStr, Transaction,
};

use super::{
    AsideAction, AsideRow, BuiltIn, ClaimOptions, Claimed, Dialect, ErrorClass, LANES,
    LANES_PER_CLAIM, MAX_BYTES, Maintained, Migration, NewRow, Notifications, ROWS_PER_CLEANUP,
    Record, Reply, Row, Sender, SequenceNumbers, Settled, Tables, common,
};
use crate::outbox::Backlog;

/// Whatever the database's default is: in the other levels, a statement would not see what was committed while it has waited for a
/// lock.
const BEGIN_READ_COMMITTED: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

/// `CREATE … IF NOT EXISTS` alone fails if two do it at once.
const LOCK_MIGRATION: &str = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))";

const MIGRATIONS: &str = "CREATE TABLE IF NOT EXISTS {migrations} (
    version integer PRIMARY KEY,
    name text NOT NULL,
    made_at timestamptz NOT NULL DEFAULT now()
)";

const HAS_SCHEMA: &str = "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)";

const HAS_MIGRATIONS: &str =
    "SELECT EXISTS (SELECT FROM pg_tables WHERE schemaname = $1 AND tablename = 'migrations')";

/// A wait ends after 10 s, or after the application's limit if that is shorter: a statement that nothing awaits any longer keeps its
/// connection from the pool. What may fail is before the transaction, which takes the setting over: sqlx does not roll back a begin
/// that has failed. The savepoint is gone with its transaction, see [`COMMIT`].
const BEGIN: &str = "\
SELECT set_config('lock_timeout', '10s', true)
WHERE current_setting('lock_timeout')::interval NOT BETWEEN '1 ms' AND '10 s';
BEGIN;
SAVEPOINT leveret";

/// PostgreSQL takes a plain commit for a rollback, without an error, where a statement has failed; the release fails there, and in
/// another transaction, and then there is no commit, all in one message. sqlx rolls back the transaction that follows.
const COMMIT: &str = "RELEASE SAVEPOINT leveret; COMMIT AND CHAIN";

/// No savepoint of this name, no transaction.
const NO_SAVEPOINT: [&str; 2] = ["3B001", "25P01"];

const ADD_IDS: &str = "\
INSERT INTO {inbox} (scope, id, expires_at)
SELECT new.scope, new.id, $3 FROM unnest($1::text[], $2::bytea[]) AS new (scope, id)
ON CONFLICT DO NOTHING RETURNING scope, id";

const LOCK_MARK: &str =
    "SELECT mark FROM {inbox_marks} WHERE scope = $1 AND sender = $2 FOR UPDATE";

const LOCK_MARKS: &str = "\
SELECT scope, sender, mark FROM {inbox_marks}
WHERE (scope, sender) IN (SELECT * FROM unnest($1::text[], $2::text[]))
ORDER BY scope, sender FOR UPDATE";

/// Gives up the locks of the marks that are there.
const UNLOCK_MARKS: &str = "ROLLBACK TO SAVEPOINT leveret";

/// In the same order. What is there is locked.
const ADD_MARKS: &str = "\
INSERT INTO {inbox_marks} AS marks (scope, sender, mark)
SELECT new.scope, new.sender, $3 FROM unnest($1::text[], $2::text[]) AS new (scope, sender)
ORDER BY new.scope, new.sender
ON CONFLICT (scope, sender) DO UPDATE SET mark = marks.mark
RETURNING marks.scope, marks.sender, marks.mark";

const SET_MARKS: &str = "\
UPDATE {inbox_marks} AS marks SET mark = new.mark
FROM unnest($1::text[], $2::text[], $3::bytea[]) AS new (scope, sender, mark)
WHERE marks.scope = new.scope AND marks.sender = new.sender";

const CLEAN: &str = "\
DELETE FROM {inbox} WHERE ctid = ANY (
    ARRAY(SELECT ctid FROM {inbox} WHERE expires_at <= $1 LIMIT $2))";

const CLEAN_REPLIES: &str = "\
DELETE FROM {inbox_replies} WHERE ctid = ANY (
    ARRAY(SELECT ctid FROM {inbox_replies} WHERE expires_at <= $1 LIMIT $2))";

/// `ORDER BY` gives the rows ids in the order in which they were written.
macro_rules! insert {
    ($($returning:literal)?) => {
        concat!(
            "INSERT INTO {outbox} (lane, ordering_key, exchange, routing_key, mandatory, properties, body)
SELECT lane, ordering_key, exchange, routing_key, mandatory, properties, body
FROM unnest($1::smallint[], $2::text[], $3::text[], $4::text[], $5::boolean[], $6::bytea[], $7::bytea[])
    WITH ORDINALITY AS r(lane, ordering_key, exchange, routing_key, mandatory, properties, body, place)
ORDER BY place",
            $($returning)?
        )
    };
}

const INSERT: &str = insert!();

/// What is told twice in a transaction is told once.
const INSERT_AND_NOTIFY: &str = insert!(" RETURNING pg_notify($8, '')");

const NOTIFY: &str = "SELECT pg_notify($1, '')";

/// What may be sent now: it is due, and nothing before it in its key has to be waited for. That is looked up row by row (`OFFSET 0`
/// keeps it so): mostly there is nothing to be found, and the first rows are all that is wanted.
macro_rules! sendable {
    () => {
        "o.state = 0 AND (o.due_at IS NULL OR o.due_at <= now())
    AND NOT EXISTS (
        SELECT FROM {outbox} h
        WHERE h.lane = o.lane AND h.ordering_key = o.ordering_key AND h.id < o.id
            AND h.attempts > 0 AND h.state < 2
            AND (CASE WHEN h.state = 0 THEN h.due_at > now() ELSE $2 END)
        OFFSET 0
    )"
    };
}

/// Locked by lane and not by row: rows that are skipped because another claim has them would let the later ones of their key
/// overtake.
const CLAIM_LANES: &str = concat!(
    "SELECT l.lane
FROM {outbox_lanes} l
CROSS JOIN LATERAL (
    SELECT o.id FROM {outbox} o WHERE o.lane = l.lane AND ",
    sendable!(),
    " ORDER BY o.id LIMIT 1
) first
ORDER BY first.id
LIMIT $1
FOR UPDATE OF l SKIP LOCKED"
);

/// A statement of its own, since it has to see what the claim before has settled: its snapshot is taken after the locks.
const CLAIM_ROWS: &str = concat!(
    "SELECT id, ordering_key, exchange, routing_key, mandatory, properties, body, attempts, age
FROM (
    SELECT r.*, sum(octet_length(r.body)) OVER (ORDER BY r.id) - octet_length(r.body) AS bytes_before,
        extract(epoch FROM now() - r.written_at)::float8 AS age
    FROM unnest($1::smallint[]) AS l(lane)
    CROSS JOIN LATERAL (
        SELECT * FROM {outbox} o WHERE o.lane = l.lane AND ",
    sendable!(),
    " ORDER BY o.id LIMIT $3
    ) r
) r
WHERE bytes_before < $4
ORDER BY id"
);

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

const CLEAN_SENT: &str = "\
DELETE FROM {outbox} WHERE id IN (
    SELECT id FROM {outbox}
    WHERE state = 2 AND settled_at < now() - make_interval(secs => $1)
    ORDER BY settled_at LIMIT $2 FOR UPDATE SKIP LOCKED
)";

const BACKLOG: &str = "\
SELECT count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 0 AND attempts > 0),
    count(*) FILTER (WHERE state = 1),
    extract(epoch FROM now() - min(written_at) FILTER (WHERE state = 0))::float8
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
fn channel(tables: &Tables) -> String {
    format!("{}_outbox", tables.name())
}

fn apart(senders: &[Sender]) -> (Vec<&str>, Vec<&str>) {
    senders.iter().map(|sender| (sender.scope.as_str(), sender.name.as_str())).unzip()
}

/// Marks in the order of their senders, if all are there.
fn in_order(senders: &[Sender], found: Vec<(String, String, Vec<u8>)>) -> Option<Vec<Vec<u8>>> {
    let mut found: HashMap<Sender, Vec<u8>> =
        found.into_iter().map(|(scope, name, mark)| (Sender { scope, name }, mark)).collect();
    senders.iter().map(|sender| found.remove(sender)).collect()
}

/// In a task, which a cancelled caller does not end: sqlx would leave the transaction open. The task rolls back what nothing awaits.
async fn begin_with(
    pool: &PgPool,
    statement: impl SqlSafeStr,
) -> sqlx::Result<Transaction<'static, Postgres>> {
    let begin = Transaction::begin(pool.acquire().await?, Some(statement.into_sql_str()));
    tokio::spawn(begin).await.unwrap_or(Err(sqlx::Error::WorkerCrashed))
}

impl Dialect<Postgres> for BuiltIn {
    const ONE_WRITER: bool = false;
    const POLL_EVERY: Duration = Duration::from_secs(1);

    type Claim = Transaction<'static, Postgres>;

    fn classify(&self, error: &dyn DatabaseError) -> ErrorClass {
        match error.code().as_deref().unwrap_or_default() {
            "55P03" => ErrorClass::Locked,
            "25P02" => ErrorClass::Aborted,
            // A value, and what is too long for an index.
            code if code.starts_with("22") || code.starts_with("54") => ErrorClass::Permanent,
            // The connection, a shutdown, a rollback that it has chosen.
            code if ["08", "57P0", "40"].iter().any(|class| code.starts_with(class)) => {
                ErrorClass::Passing
            }
            _ => ErrorClass::Other,
        }
    }

    fn migrations(&self) -> &'static [Migration] {
        common::migrations!("postgres": 1 "outbox", 2 "inbox", 3 "sequences")
    }

    async fn begin_migration(
        &self,
        pool: &PgPool,
        tables: &Tables,
    ) -> sqlx::Result<Transaction<'static, Postgres>> {
        let mut transaction = begin_with(pool, BEGIN_READ_COMMITTED).await?;
        let lock = sqlx::query(LOCK_MIGRATION).bind(format!("leveret-sql {}", tables.name()));
        lock.execute(&mut *transaction).await?;
        // Asks first, because a role without the right to make schemas may not even try.
        let exists = sqlx::query_scalar(HAS_SCHEMA).bind(tables.name());
        if !exists.fetch_one(&mut *transaction).await? {
            let sql = AssertSqlSafe(format!("CREATE SCHEMA \"{}\"", tables.name()));
            sqlx::raw_sql(sql).execute(&mut *transaction).await?;
        }
        sqlx::raw_sql(tables.qualified(MIGRATIONS)).execute(&mut *transaction).await?;
        Ok(transaction)
    }

    async fn version(
        &self,
        connection: &mut PgConnection,
        tables: &Tables,
    ) -> sqlx::Result<Option<i32>> {
        let exists = sqlx::query_scalar(HAS_MIGRATIONS).bind(tables.name());
        if !exists.fetch_one(&mut *connection).await? {
            return Ok(None);
        }
        let latest = tables.qualified("SELECT max(version) FROM {migrations}");
        sqlx::query_scalar(latest).fetch_one(connection).await
    }

    async fn apply(
        &self,
        connection: &mut PgConnection,
        tables: &Tables,
        step: &Migration,
    ) -> sqlx::Result<()> {
        sqlx::raw_sql(tables.qualified(step.sql)).execute(&mut *connection).await?;
        let note = tables.qualified("INSERT INTO {migrations} (version, name) VALUES ($1, $2)");
        let note = sqlx::query(note).bind(step.version).bind(step.name);
        note.execute(connection).await.map(drop)
    }

    async fn begin(&self, pool: &PgPool) -> sqlx::Result<Transaction<'static, Postgres>> {
        begin_with(pool, BEGIN).await
    }

    async fn commit(&self, mut transaction: Transaction<'static, Postgres>) -> sqlx::Result<()> {
        let committed = sqlx::raw_sql(COMMIT).execute(&mut *transaction).await;
        committed.map(drop).map_err(|error| {
            match error.as_database_error().and_then(|error| error.code()) {
                Some(code) if NO_SAVEPOINT.contains(&&*code) => super::ended_by_handler(),
                _ => error,
            }
        })
    }

    async fn add_ids(
        &self,
        connection: &mut PgConnection,
        tables: &Tables,
        ids: &[(&str, &[u8])],
        expires_at: Option<i64>,
    ) -> sqlx::Result<Vec<bool>> {
        let (scopes, keys): (Vec<&str>, Vec<&[u8]>) = ids.iter().copied().unzip();
        let add = sqlx::query_as(tables.qualified(ADD_IDS));
        let add = add.bind(scopes).bind(keys).bind(expires_at);
        let added: Vec<(String, Vec<u8>)> = add.fetch_all(connection).await?;
        let added: HashSet<(&str, &[u8])> =
            added.iter().map(|(scope, id)| (scope.as_str(), id.as_slice())).collect();
        Ok(ids.iter().map(|id| added.contains(id)).collect())
    }

    async fn lock_marks(
        &self,
        connection: &mut PgConnection,
        tables: &Tables,
        senders: &[Sender],
        initial: &[u8],
    ) -> sqlx::Result<Vec<Vec<u8>>> {
        let (scopes, names) = apart(senders);
        if let [Sender { scope, name }] = senders {
            let lock = sqlx::query_scalar(tables.qualified(LOCK_MARK)).bind(scope).bind(name);
            if let Some(mark) = lock.fetch_optional(&mut *connection).await? {
                return Ok(vec![mark]);
            }
        } else {
            let lock = sqlx::query_as(tables.qualified(LOCK_MARKS)).bind(&scopes).bind(&names);
            if let Some(marks) = in_order(senders, lock.fetch_all(&mut *connection).await?) {
                return Ok(marks);
            }
            // No lock may be held while others are waited for that come before it in the order.
            sqlx::raw_sql(UNLOCK_MARKS).execute(&mut *connection).await?;
        }
        let add = sqlx::query_as(tables.qualified(ADD_MARKS)).bind(scopes).bind(names);
        let marks = add.bind(initial).fetch_all(connection).await?;
        in_order(senders, marks).ok_or(sqlx::Error::RowNotFound)
    }

    async fn set_marks(
        &self,
        connection: &mut PgConnection,
        tables: &Tables,
        senders: &[Sender],
        marks: &[Vec<u8>],
    ) -> sqlx::Result<()> {
        let set = if let ([Sender { scope, name }], [mark]) = (senders, marks) {
            sqlx::query(tables.qualified(common::SET_MARK)).bind(scope).bind(name).bind(mark)
        } else {
            let (scopes, names) = apart(senders);
            sqlx::query(tables.qualified(SET_MARKS)).bind(scopes).bind(names).bind(marks)
        };
        common::expect_rows(senders.len(), set.execute(connection).await?.rows_affected())
    }

    async fn write(
        &self,
        connection: &mut PgConnection,
        tables: &Tables,
        rows: &[NewRow],
        notify: bool,
    ) -> sqlx::Result<()> {
        let sql = if notify { INSERT_AND_NOTIFY } else { INSERT };
        let mut insert = sqlx::query(tables.qualified(sql))
            .bind(rows.iter().map(|row| row.lane).collect::<Vec<_>>())
            .bind(rows.iter().map(|row| row.ordering_key.as_deref()).collect::<Vec<_>>())
            .bind(rows.iter().map(|row| row.exchange.as_str()).collect::<Vec<_>>())
            .bind(rows.iter().map(|row| row.routing_key.as_str()).collect::<Vec<_>>())
            .bind(rows.iter().map(|row| row.mandatory).collect::<Vec<_>>())
            .bind(rows.iter().map(|row| &*row.properties).collect::<Vec<&[u8]>>())
            .bind(rows.iter().map(|row| &*row.body).collect::<Vec<&[u8]>>());
        if notify {
            insert = insert.bind(channel(tables));
        }
        insert.execute(connection).await.map(drop)
    }

    async fn claim(
        &self,
        pool: &PgPool,
        tables: &Tables,
        options: &ClaimOptions,
    ) -> sqlx::Result<Option<Claimed<Self::Claim>>> {
        // The server ends it if it hears nothing for longer than a batch takes: it might not notice for hours that a machine is gone.
        let silence = options.lease.saturating_mul(2).as_millis().clamp(1, i32::MAX as u128);
        let begin = AssertSqlSafe(format!(
            "{BEGIN_READ_COMMITTED}; SET LOCAL idle_in_transaction_session_timeout = {silence}"
        ));
        let mut transaction = begin_with(pool, begin).await?;
        let lanes: Vec<i16> = sqlx::query_scalar(tables.qualified(CLAIM_LANES))
            .bind(i64::from(LANES_PER_CLAIM))
            .bind(options.hold_keys)
            .fetch_all(&mut *transaction)
            .await?;
        if lanes.is_empty() {
            transaction.rollback().await?;
            return Ok(None);
        }
        let rows = sqlx::query(tables.qualified(CLAIM_ROWS))
            .bind(&lanes)
            .bind(options.hold_keys)
            .bind(options.rows.div_ceil(lanes.len()) as i64)
            .bind(MAX_BYTES)
            .fetch_all(&mut *transaction)
            .await?;
        let rows = rows.iter().map(row).collect::<sqlx::Result<Vec<Row>>>()?;
        Ok(Some(Claimed { rows, claim: transaction }))
    }

    async fn settle(
        &self,
        _pool: &PgPool,
        tables: &Tables,
        mut claim: Self::Claim,
        settled: &Settled,
    ) -> sqlx::Result<()> {
        if !settled.sent.is_empty() {
            let sql = if settled.keep { KEEP_SENT } else { DELETE_SENT };
            let sent = sqlx::query(tables.qualified(sql)).bind(&settled.sent);
            sent.execute(&mut *claim).await?;
        }
        if !settled.refused.is_empty() {
            let rows = || settled.refused.iter();
            let again = rows().map(|row| row.again_in.map(|wait| wait.as_secs_f64()));
            sqlx::query(tables.qualified(REFUSED))
                .bind(rows().map(|row| row.id).collect::<Vec<_>>())
                .bind(rows().map(|row| row.error.replace('\0', "")).collect::<Vec<_>>())
                .bind(again.collect::<Vec<_>>())
                .execute(&mut *claim)
                .await?;
        }
        claim.commit().await
    }

    async fn listen(&self, pool: &PgPool, tables: &Tables) -> sqlx::Result<Option<Notifications>> {
        let mut listener = PgListener::connect_with(pool).await?;
        // It would connect again at once, and again if the server hangs up each time. This ends then.
        listener.eager_reconnect(false);
        listener.listen(&channel(tables)).await?;
        let notifications = stream::try_unfold(listener, async |mut listener: PgListener| {
            let told = listener.try_recv().await?;
            Ok(told.map(|_| ((), listener)))
        });
        Ok(Some(Box::pin(notifications)))
    }

    async fn update_aside(
        &self,
        pool: &PgPool,
        tables: &Tables,
        ids: Option<&[i64]>,
        action: AsideAction,
    ) -> sqlx::Result<u64> {
        let sql = match action {
            AsideAction::SendAgain { .. } => SEND_AGAIN,
            AsideAction::Discard => DISCARD,
        };
        let mut transaction = begin_with(pool, "BEGIN").await?;
        let update = sqlx::query(tables.qualified(sql)).bind(ids);
        let updated = update.execute(&mut *transaction).await?.rows_affected();
        if action == (AsideAction::SendAgain { notify: true }) {
            sqlx::query(NOTIFY).bind(channel(tables)).execute(&mut *transaction).await?;
        }
        transaction.commit().await?;
        Ok(updated)
    }

    async fn maintain_outbox(
        &self,
        pool: &PgPool,
        tables: &Tables,
        keep: Option<Duration>,
    ) -> sqlx::Result<Maintained> {
        let mut done = Maintained::default();
        let lanes: i64 =
            sqlx::query_scalar(tables.qualified(common::COUNT_LANES)).fetch_one(pool).await?;
        // Asks first, because a role without the right to write there may not even try.
        if lanes < i64::from(LANES) {
            let restore = sqlx::query(tables.qualified(RESTORE_LANES)).bind(i32::from(LANES));
            done.restored = restore.execute(pool).await?.rows_affected();
        }
        if let Some(keep) = keep {
            let clean = sqlx::query(tables.qualified(CLEAN_SENT)).bind(keep.as_secs_f64());
            done.deleted = clean.bind(ROWS_PER_CLEANUP).execute(pool).await?.rows_affected();
        }
        Ok(done)
    }

    common::methods!(Postgres, PgConnection, qualified);
}

common::row_of!(PgRow);
