//! The tables of the inbox.
//!
//! What is the same on all databases is here; how each of them waits for others, and works on several rows at a time, is its own.

use futures_util::future::BoxFuture;
use leveret::Message;
use leveret::amqp::RawProperties;
use leveret::inbox::HighWater;
use sqlx::{Pool, SqlStr, Transaction};

use crate::backend::Backend;
use crate::schema::Schema;

#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

/// A sender within its scope.
pub(super) type Sender = (String, String);

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
// Those for several at once are PostgreSQL's alone.
#[cfg_attr(not(feature = "postgres"), expect(dead_code))]
#[doc(hidden)]
pub struct Statements {
    add: SqlStr,
    add_all: SqlStr,
    reply: SqlStr,
    set_reply: SqlStr,
    release: SqlStr,
    peek: SqlStr,
    mark: SqlStr,
    marks: SqlStr,
    add_marks: SqlStr,
    set_mark: SqlStr,
    set_marks: SqlStr,
    number_reply: SqlStr,
    set_number_reply: SqlStr,
    clean: SqlStr,
    clean_replies: SqlStr,
}

const REPLY: &str = "SELECT properties, body FROM {inbox} WHERE scope = $1 AND id = $2";
const SET_REPLY: &str =
    "UPDATE {inbox} SET properties = $3, body = $4 WHERE scope = $1 AND id = $2";
const RELEASE: &str =
    "UPDATE {inbox} SET expires_at = $3 WHERE scope = $1 AND id = $2 AND expires_at IS NULL";
const PEEK: &str = "SELECT mark FROM {inbox_marks} WHERE scope = $1 AND sender = $2";
const NUMBER_REPLY: &str =
    "SELECT properties, body FROM {inbox_replies} WHERE scope = $1 AND sender = $2 AND number = $3";
const SET_NUMBER_REPLY: &str = "INSERT INTO {inbox_replies} (scope, sender, number, properties, body, expires_at) \
     VALUES ($1, $2, $3, $4, $5, $6)";

/// A database with the tables of an inbox.
///
/// What waits for another transaction does so for some seconds: a statement that nobody awaits any longer would hold its
/// connection. The statements of handlers wait as the application has it.
#[doc(hidden)]
pub trait Records: Backend {
    /// Whether only one transaction at a time may write.
    const ONE_WRITER: bool;

    fn statements(schema: &Schema) -> Statements;

    /// Begins a transaction that is going to write.
    fn begin(pool: &Pool<Self>) -> BoxFuture<'_, sqlx::Result<Transaction<'static, Self>>>;

    /// The same where all of it waits no longer than a record does: no handler works with it.
    fn begin_impatient(
        pool: &Pool<Self>,
    ) -> BoxFuture<'_, sqlx::Result<Transaction<'static, Self>>>;

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

    /// Whether an id is there, and its reply.
    fn reply<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        id: (&'a str, &'a [u8]),
    ) -> BoxFuture<'a, sqlx::Result<Option<Option<Kept>>>>;

    fn set_reply<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        id: (&'a str, &'a [u8]),
        reply: Kept,
    ) -> BoxFuture<'a, sqlx::Result<()>>;

    /// Commits, if what [`add`](Self::add) or [`add_all`](Self::add_all) have written down is still there. PostgreSQL takes a commit
    /// for a rollback, and says nothing, where a statement has failed before.
    fn commit_record(
        transaction: Transaction<'static, Self>,
    ) -> BoxFuture<'static, sqlx::Result<()>>;

    /// Fails if a statement has failed before, where nothing was written down.
    fn is_sound(connection: &mut Self::Connection) -> BoxFuture<'_, sqlx::Result<()>>;

    fn release<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        id: (&'a str, &'a [u8]),
        expires_at: i64,
    ) -> BoxFuture<'a, sqlx::Result<()>>;

    /// The mark of a sender as it was last committed, if it has one. Nobody is waited for.
    fn peek<'a>(
        pool: &'a Pool<Self>,
        statements: &'a Statements,
        sender: &'a Sender,
    ) -> BoxFuture<'a, sqlx::Result<Option<HighWater>>>;

    /// The mark of a sender, which nobody else may change until the end of the transaction. `None` if it has none.
    fn mark<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        sender: &'a Sender,
    ) -> BoxFuture<'a, sqlx::Result<Option<HighWater>>>;

    /// The marks of these senders, in their order, which nobody else may change until the end of the transaction. `None` if not
    /// all of them are there.
    fn marks<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        senders: &'a [Sender],
    ) -> BoxFuture<'a, sqlx::Result<Option<Vec<HighWater>>>>;

    /// Makes sure that all of these senders have marks, which nobody else may change until the end of the transaction.
    fn add_marks<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        senders: &'a [Sender],
    ) -> BoxFuture<'a, sqlx::Result<()>>;

    /// Writes down the mark of a sender, which has one, in the transaction in which that was locked. Fails if it has ended.
    fn set_mark<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        sender: &'a Sender,
        mark: &'a HighWater,
    ) -> BoxFuture<'a, sqlx::Result<()>>;

    /// The same for several.
    fn set_marks<'a>(
        connection: &'a mut Self::Connection,
        statements: &'a Statements,
        senders: &'a [Sender],
        marks: &'a [HighWater],
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

/// A statement that has to find so many rows, namely those which this transaction has written or locked.
fn all(expected: usize, rows: u64) -> sqlx::Result<()> {
    match rows == expected as u64 {
        true => Ok(()),
        false => Err(sqlx::Error::RowNotFound),
    }
}

/// Numbers come from headers, which have no larger ones.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

macro_rules! records {
    ($feature:literal: $database:ty, $name:ident, one writer $one_writer:literal) => {
        #[cfg(feature = $feature)]
        impl Records for $database {
            const ONE_WRITER: bool = $one_writer;

            fn statements(schema: &Schema) -> Statements {
                Statements {
                    add: schema.$name($name::ADD),
                    add_all: schema.$name($name::ADD_ALL),
                    reply: schema.$name(REPLY),
                    set_reply: schema.$name(SET_REPLY),
                    release: schema.$name(RELEASE),
                    peek: schema.$name(PEEK),
                    mark: schema.$name($name::MARK),
                    marks: schema.$name($name::MARKS),
                    add_marks: schema.$name($name::ADD_MARKS),
                    set_mark: schema.$name($name::SET_MARK),
                    set_marks: schema.$name($name::SET_MARKS),
                    number_reply: schema.$name(NUMBER_REPLY),
                    set_number_reply: schema.$name(SET_NUMBER_REPLY),
                    clean: schema.$name($name::CLEAN),
                    clean_replies: schema.$name($name::CLEAN_REPLIES),
                }
            }

            fn begin(pool: &Pool<Self>) -> BoxFuture<'_, sqlx::Result<Transaction<'static, Self>>> {
                Box::pin(pool.begin_with($name::BEGIN))
            }

            fn begin_impatient(
                pool: &Pool<Self>,
            ) -> BoxFuture<'_, sqlx::Result<Transaction<'static, Self>>> {
                Box::pin(pool.begin_with($name::BEGIN_IMPATIENT))
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
                Box::pin($name::add_all(connection, statements, ids, expires_at))
            }

            fn reply<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                (scope, id): (&'a str, &'a [u8]),
            ) -> BoxFuture<'a, sqlx::Result<Option<Option<Kept>>>> {
                type Row = (Option<Vec<u8>>, Option<Vec<u8>>);
                let reply = sqlx::query_as(statements.reply.clone()).bind(scope).bind(id);
                Box::pin(async move {
                    let row: Option<Row> = reply.fetch_optional(connection).await?;
                    Ok(row.map(|(properties, body)| properties.zip(body)))
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
                Box::pin(async move { all(1, set.execute(connection).await?.rows_affected()) })
            }

            fn commit_record(
                transaction: Transaction<'static, Self>,
            ) -> BoxFuture<'static, sqlx::Result<()>> {
                Box::pin($name::commit_record(transaction))
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

            fn peek<'a>(
                pool: &'a Pool<Self>,
                statements: &'a Statements,
                (scope, sender): &'a Sender,
            ) -> BoxFuture<'a, sqlx::Result<Option<HighWater>>> {
                let mark = sqlx::query_scalar(statements.peek.clone()).bind(scope).bind(sender);
                Box::pin(async move {
                    let found: Option<Vec<u8>> = mark.fetch_optional(pool).await?;
                    found.as_deref().map(decode).transpose()
                })
            }

            fn mark<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                (scope, sender): &'a Sender,
            ) -> BoxFuture<'a, sqlx::Result<Option<HighWater>>> {
                let mark = sqlx::query_scalar(statements.mark.clone()).bind(scope).bind(sender);
                Box::pin(async move {
                    let found: Option<Vec<u8>> = mark.fetch_optional(connection).await?;
                    found.as_deref().map(decode).transpose()
                })
            }

            fn marks<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                senders: &'a [Sender],
            ) -> BoxFuture<'a, sqlx::Result<Option<Vec<HighWater>>>> {
                Box::pin($name::marks(connection, statements, senders))
            }

            fn add_marks<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                senders: &'a [Sender],
            ) -> BoxFuture<'a, sqlx::Result<()>> {
                Box::pin($name::add_marks(connection, statements, senders))
            }

            fn set_mark<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                sender: &'a Sender,
                mark: &'a HighWater,
            ) -> BoxFuture<'a, sqlx::Result<()>> {
                Box::pin($name::set_mark(connection, statements, sender, mark))
            }

            fn set_marks<'a>(
                connection: &'a mut Self::Connection,
                statements: &'a Statements,
                senders: &'a [Sender],
                marks: &'a [HighWater],
            ) -> BoxFuture<'a, sqlx::Result<()>> {
                Box::pin($name::set_marks(connection, statements, senders, marks))
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

records!("postgres": sqlx::Postgres, postgres, one writer false);
records!("sqlite": sqlx::Sqlite, sqlite, one writer true);
