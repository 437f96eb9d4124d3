//! The tables of the inbox.

#[cfg(feature = "postgres")]
use std::collections::HashSet;

use futures_util::future::BoxFuture;
use leveret::Message;
use leveret::amqp::RawProperties;
use leveret::inbox::HighWater;
use sqlx::{Pool, SqlStr, Transaction};

use crate::backend::Backend;
use crate::schema::Schema;

/// How many rows are deleted at a time: so few that nobody waits for it.
pub(super) const CLEANED: i64 = 1000;

/// A reply as it is kept: properties as on the wire, and the body.
pub(super) type Kept = (Vec<u8>, Vec<u8>);

/// The form in which a reply is kept.
pub(super) fn kept(reply: &Message) -> Result<Kept, leveret::Error> {
    let (body, properties) = reply.clone().into_parts()?;
    Ok((RawProperties::from(&properties).as_bytes().to_vec(), body.to_vec()))
}

/// The reply that was kept.
pub(super) fn reply((properties, body): Kept) -> Message {
    let properties = RawProperties::new(properties.into());
    Message::with_properties(body, properties.get().into_owned())
}

/// The statements of a schema.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct Statements {
    add: SqlStr,
    /// On PostgreSQL alone.
    #[cfg_attr(not(feature = "postgres"), allow(dead_code))]
    add_all: SqlStr,
    reply: SqlStr,
    set_reply: SqlStr,
    is_there: SqlStr,
    release: SqlStr,
    mark: SqlStr,
    add_mark: SqlStr,
    set_mark: SqlStr,
    number_reply: SqlStr,
    set_number_reply: SqlStr,
    clean: SqlStr,
    clean_replies: SqlStr,
}

/// What is waited for longer is asked for again, by another connection; what was set before is set again for the handler.
#[cfg(feature = "postgres")]
const BEGIN: &str = "BEGIN; \
     SELECT set_config('leveret.lock_timeout', current_setting('lock_timeout'), true), \
            set_config('lock_timeout', '10s', true)";
#[cfg(feature = "sqlite")]
const BEGIN_IMMEDIATE: &str = "BEGIN IMMEDIATE";

const ADD: &str =
    "INSERT INTO {inbox} (scope, id, expires_at) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
const ADD_ALL: &str = "INSERT INTO {inbox} (scope, id, expires_at) \
     SELECT scope, id, $3 FROM unnest($1::text[], $2::bytea[]) AS new (scope, id) \
     ON CONFLICT DO NOTHING RETURNING scope, id";
const REPLY: &str = "SELECT properties, body FROM {inbox} WHERE scope = $1 AND id = $2";
const SET_REPLY: &str =
    "UPDATE {inbox} SET properties = $3, body = $4 WHERE scope = $1 AND id = $2";
const IS_THERE: &str = "SELECT 1 FROM {inbox} WHERE scope = $1 AND id = $2";
const RELEASE: &str =
    "UPDATE {inbox} SET expires_at = $3 WHERE scope = $1 AND id = $2 AND expires_at IS NULL";
const MARK: &str = "SELECT mark FROM {inbox_marks} WHERE scope = $1 AND sender = $2";
const ADD_MARK: &str =
    "INSERT INTO {inbox_marks} (scope, sender, mark) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
const SET_MARK: &str = "UPDATE {inbox_marks} SET mark = $3 WHERE scope = $1 AND sender = $2";
const NUMBER_REPLY: &str =
    "SELECT properties, body FROM {inbox_replies} WHERE scope = $1 AND sender = $2 AND number = $3";
const SET_NUMBER_REPLY: &str = "INSERT INTO {inbox_replies} (scope, sender, number, properties, body, expires_at) \
     VALUES ($1, $2, $3, $4, $5, $6)";

/// A database with the tables of an inbox.
#[doc(hidden)]
pub trait Records: Backend {
    /// Whether only one transaction at a time may write.
    const ONE_WRITER: bool;

    fn statements(schema: &Schema) -> Statements;

    /// Begins a transaction that is going to write. Until it is [ready](Self::ready), it waits for others for some seconds: a
    /// statement that nobody awaits any longer would hold its connection.
    fn begin(pool: &Pool<Self>) -> BoxFuture<'_, sqlx::Result<Transaction<'static, Self>>>;

    /// Writes down an id. False if it was there; one that another transaction is about to write is waited for.
    fn add<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        id: (&'a str, &'a [u8]),
        expires_at: Option<i64>,
    ) -> BoxFuture<'a, sqlx::Result<bool>>;

    /// The same for several, and whether each was new.
    fn add_all<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        ids: &'a [(&'a str, &'a [u8])],
        expires_at: Option<i64>,
    ) -> BoxFuture<'a, sqlx::Result<Vec<bool>>>;

    fn reply<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        id: (&'a str, &'a [u8]),
    ) -> BoxFuture<'a, sqlx::Result<Option<Kept>>>;

    fn set_reply<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        id: (&'a str, &'a [u8]),
        reply: Kept,
    ) -> BoxFuture<'a, sqlx::Result<()>>;

    /// The handler may begin: from now on its statements wait for locks as the application has it. [`add`](Self::add) has
    /// done this for a new id.
    fn ready(connection: &mut Self::Connection) -> BoxFuture<'_, sqlx::Result<()>>;

    /// Fails if a record that was written down in this transaction is not there any more. PostgreSQL takes a commit for a
    /// rollback, and says nothing, where a statement has failed before.
    fn is_there<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        id: (&'a str, &'a [u8]),
    ) -> BoxFuture<'a, sqlx::Result<()>>;

    /// The same where nothing was written down.
    fn is_sound(connection: &mut Self::Connection) -> BoxFuture<'_, sqlx::Result<()>>;

    fn release<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        id: (&'a str, &'a [u8]),
        expires_at: i64,
    ) -> BoxFuture<'a, sqlx::Result<()>>;

    /// The mark of a sender, which nobody else may change until the end of the transaction.
    fn mark<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        sender: (&'a str, &'a str),
    ) -> BoxFuture<'a, sqlx::Result<HighWater>>;

    fn set_mark<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        sender: (&'a str, &'a str),
        mark: &'a HighWater,
    ) -> BoxFuture<'a, sqlx::Result<()>>;

    fn number_reply<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        sender: (&'a str, &'a str),
        number: u64,
    ) -> BoxFuture<'a, sqlx::Result<Option<Kept>>>;

    fn set_number_reply<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        sender: (&'a str, &'a str),
        number: u64,
        reply: Kept,
        expires_at: i64,
    ) -> BoxFuture<'a, sqlx::Result<()>>;

    /// Deletes some of what is expired, and says how many rows those were.
    fn clean<'a>(
        pool: &'a Pool<Self>,
        statements: &'a Statements,
        now: i64,
    ) -> BoxFuture<'a, sqlx::Result<u64>>;
}

fn decode(bytes: &[u8]) -> sqlx::Result<HighWater> {
    HighWater::decode(bytes).map_err(|error| sqlx::Error::Decode(Box::new(error)))
}

/// A statement that has to find one row, namely that which this transaction has written.
fn one(rows: u64) -> sqlx::Result<()> {
    match rows {
        1 => Ok(()),
        _ => Err(sqlx::Error::RowNotFound),
    }
}

/// Numbers come from headers, which have no larger ones.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

macro_rules! records {
    ($feature:literal, $database:ty, $name:ident: $one_writer:literal, $begin:ident, lock $lock:literal,
     returning $returning:expr, ready $ready:literal,
     clean $clean:literal, $clean_replies:literal, $add_all:path) => {
        #[cfg(feature = $feature)]
        impl Records for $database {
            const ONE_WRITER: bool = $one_writer;

            fn statements(schema: &Schema) -> Statements {
                Statements {
                    add: schema.$name(&format!("{ADD}{}", $returning)),
                    add_all: schema.$name(ADD_ALL),
                    reply: schema.$name(REPLY),
                    set_reply: schema.$name(SET_REPLY),
                    is_there: schema.$name(IS_THERE),
                    release: schema.$name(RELEASE),
                    mark: schema.$name(&format!("{MARK}{}", $lock)),
                    add_mark: schema.$name(ADD_MARK),
                    set_mark: schema.$name(SET_MARK),
                    number_reply: schema.$name(NUMBER_REPLY),
                    set_number_reply: schema.$name(SET_NUMBER_REPLY),
                    clean: schema.$name($clean),
                    clean_replies: schema.$name($clean_replies),
                }
            }

            fn begin(pool: &Pool<Self>) -> BoxFuture<'_, sqlx::Result<Transaction<'static, Self>>> {
                Box::pin(pool.begin_with($begin))
            }

            fn add<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                (scope, id): (&'a str, &'a [u8]),
                expires_at: Option<i64>,
            ) -> BoxFuture<'a, sqlx::Result<bool>> {
                let add = sqlx::query(statements.add.clone()).bind(scope).bind(id).bind(expires_at);
                Box::pin(async move { Ok(add.execute(connection).await?.rows_affected() == 1) })
            }

            fn add_all<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                ids: &'a [(&'a str, &'a [u8])],
                expires_at: Option<i64>,
            ) -> BoxFuture<'a, sqlx::Result<Vec<bool>>> {
                Box::pin($add_all(connection, statements, ids, expires_at))
            }

            fn reply<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                (scope, id): (&'a str, &'a [u8]),
            ) -> BoxFuture<'a, sqlx::Result<Option<Kept>>> {
                type Row = (Option<Vec<u8>>, Option<Vec<u8>>);
                let reply = sqlx::query_as(statements.reply.clone()).bind(scope).bind(id);
                Box::pin(async move {
                    let row: Option<Row> = reply.fetch_optional(connection).await?;
                    Ok(row.and_then(|(properties, body)| properties.zip(body)))
                })
            }

            fn set_reply<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                (scope, id): (&'a str, &'a [u8]),
                (properties, body): Kept,
            ) -> BoxFuture<'a, sqlx::Result<()>> {
                let set = sqlx::query(statements.set_reply.clone()).bind(scope).bind(id);
                let set = set.bind(properties).bind(body);
                Box::pin(async move { one(set.execute(connection).await?.rows_affected()) })
            }

            fn is_there<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                (scope, id): (&'a str, &'a [u8]),
            ) -> BoxFuture<'a, sqlx::Result<()>> {
                let is_there = sqlx::query(statements.is_there.clone()).bind(scope).bind(id);
                Box::pin(async move {
                    let found = is_there.fetch_optional(connection).await?;
                    one(u64::from(found.is_some()))
                })
            }

            fn ready(connection: &mut Self::Connection) -> BoxFuture<'_, sqlx::Result<()>> {
                Box::pin(async move { sqlx::query($ready).execute(connection).await.map(drop) })
            }

            fn is_sound(connection: &mut Self::Connection) -> BoxFuture<'_, sqlx::Result<()>> {
                Box::pin(async move { sqlx::query("SELECT 1").execute(connection).await.map(drop) })
            }

            fn release<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                (scope, id): (&'a str, &'a [u8]),
                expires_at: i64,
            ) -> BoxFuture<'a, sqlx::Result<()>> {
                let release = sqlx::query(statements.release.clone()).bind(scope).bind(id);
                let release = release.bind(expires_at);
                Box::pin(async move { release.execute(connection).await.map(drop) })
            }

            fn mark<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                (scope, sender): (&'a str, &'a str),
            ) -> BoxFuture<'a, sqlx::Result<HighWater>> {
                let mark =
                    move || sqlx::query_scalar(statements.mark.clone()).bind(scope).bind(sender);
                Box::pin(async move {
                    let found: Option<Vec<u8>> = mark().fetch_optional(&mut *connection).await?;
                    if let Some(found) = found {
                        return decode(&found);
                    }
                    let first = HighWater::default();
                    let add = sqlx::query(statements.add_mark.clone()).bind(scope).bind(sender);
                    add.bind(first.encode()).execute(&mut *connection).await?;
                    // Somebody else may have been first.
                    let found: Vec<u8> = mark().fetch_one(connection).await?;
                    decode(&found)
                })
            }

            fn set_mark<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                (scope, sender): (&'a str, &'a str),
                mark: &'a HighWater,
            ) -> BoxFuture<'a, sqlx::Result<()>> {
                let set = sqlx::query(statements.set_mark.clone()).bind(scope).bind(sender);
                let set = set.bind(mark.encode());
                Box::pin(async move { one(set.execute(connection).await?.rows_affected()) })
            }

            fn number_reply<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                (scope, sender): (&'a str, &'a str),
                number: u64,
            ) -> BoxFuture<'a, sqlx::Result<Option<Kept>>> {
                let reply =
                    sqlx::query_as(statements.number_reply.clone()).bind(scope).bind(sender);
                let reply = reply.bind(signed(number));
                Box::pin(reply.fetch_optional(connection))
            }

            fn set_number_reply<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                (scope, sender): (&'a str, &'a str),
                number: u64,
                (properties, body): Kept,
                expires_at: i64,
            ) -> BoxFuture<'a, sqlx::Result<()>> {
                let set = sqlx::query(statements.set_number_reply.clone()).bind(scope).bind(sender);
                let set = set.bind(signed(number)).bind(properties).bind(body).bind(expires_at);
                Box::pin(async move { set.execute(connection).await.map(drop) })
            }

            fn clean<'a>(
                pool: &'a Pool<Self>,
                statements: &'a Statements,
                now: i64,
            ) -> BoxFuture<'a, sqlx::Result<u64>> {
                Box::pin(async move {
                    let mut rows = 0;
                    for sql in [&statements.clean, &statements.clean_replies] {
                        let clean = sqlx::query(sql.clone()).bind(now).bind(CLEANED);
                        rows += clean.execute(pool).await?.rows_affected();
                    }
                    Ok(rows)
                })
            }
        }
    };
}

/// All in one statement.
#[cfg(feature = "postgres")]
async fn add_at_once(
    connection: &mut sqlx::PgConnection,
    statements: &Statements,
    ids: &[(&str, &[u8])],
    expires_at: Option<i64>,
) -> sqlx::Result<Vec<bool>> {
    let (scopes, keys): (Vec<&str>, Vec<&[u8]>) = ids.iter().copied().unzip();
    let add = sqlx::query_as(statements.add_all.clone()).bind(scopes).bind(keys).bind(expires_at);
    let added: Vec<(String, Vec<u8>)> = add.fetch_all(connection).await?;
    let added: HashSet<_> =
        added.iter().map(|(scope, id)| (scope.as_str(), id.as_slice())).collect();
    Ok(ids.iter().map(|id| added.contains(id)).collect())
}

/// One by one, which costs little where the database is in the process.
#[cfg(feature = "sqlite")]
async fn add_each(
    connection: &mut sqlx::SqliteConnection,
    statements: &Statements,
    ids: &[(&str, &[u8])],
    expires_at: Option<i64>,
) -> sqlx::Result<Vec<bool>> {
    let mut added = Vec::new();
    for id in ids {
        added.push(<sqlx::Sqlite as Records>::add(connection, statements, *id, expires_at).await?);
    }
    Ok(added)
}

records!(
    "postgres", sqlx::Postgres, postgres: false, BEGIN, lock " FOR UPDATE",
    returning " RETURNING set_config('lock_timeout', current_setting('leveret.lock_timeout'), true)",
    ready "SELECT set_config('lock_timeout', current_setting('leveret.lock_timeout'), true)",
    clean "DELETE FROM {inbox} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {inbox} WHERE expires_at <= $1 LIMIT $2))",
    "DELETE FROM {inbox_replies} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {inbox_replies} WHERE expires_at <= $1 LIMIT $2))",
    add_at_once
);
records!(
    "sqlite", sqlx::Sqlite, sqlite: true, BEGIN_IMMEDIATE, lock "", returning "", ready "SELECT 1",
    clean "DELETE FROM {inbox} WHERE rowid IN (SELECT rowid FROM {inbox} WHERE expires_at <= $1 LIMIT $2)",
    "DELETE FROM {inbox_replies} WHERE rowid IN (SELECT rowid FROM {inbox_replies} WHERE expires_at <= $1 LIMIT $2)",
    add_each
);
