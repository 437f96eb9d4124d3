//! The one seam between the inbox, the outbox and a database.

#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod common;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;
mod tables;
mod values;

use std::fmt;
use std::time::Duration;

use futures_util::stream::BoxStream;
use sqlx::error::DatabaseError;
use sqlx::{Database, Pool, Transaction};

pub use tables::{Migration, Tables};
pub use values::{
    AsideAction, AsideRow, ClaimOptions, Claimed, ErrorClass, LANES, LANES_PER_CLAIM, MAX_BYTES,
    Maintained, NewRow, ROWS_PER_CLEANUP, Record, Refused, Reply, Row, Sender, SequenceNumbers,
    Settled,
};

use crate::outbox::Backlog;

/// Ticks when there are new messages in an outbox, until it ends or fails.
pub type Notifications = BoxStream<'static, sqlx::Result<()>>;

/// The dialects of this crate: PostgreSQL and SQLite. What is made without a dialect has this one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BuiltIn;

/// A database below the inbox, the outbox and sequences: the SQL, and all that differs between databases.
///
/// Implement it for a type of your own to bring another database, or other tables, and give it to
/// [`Schema::with_dialect`](crate::Schema::with_dialect). All tables are the dialect's: nothing else reads or writes them. See the
/// migrations of this crate for what they hold.
///
/// The methods of one section share a contract, which is at its head. An error of a method undoes its transaction. Methods may be
/// dropped at any await: what they wait for in the database must end by itself.
///
/// # Schema
///
/// [`begin_migration`](Self::begin_migration) lets one process at a time migrate. What [`apply`](Self::apply) does is committed with
/// that transaction, together with the number of the step.
///
/// # Inbox
///
/// [`begin`](Self::begin), then [`lock_marks`](Self::lock_marks) before [`add_ids`](Self::add_ids) and
/// [`set_marks`](Self::set_marks), each at most once, record messages; the handler works in the same transaction;
/// [`set_reply`](Self::set_reply) adds the reply and [`commit`](Self::commit) makes all of it permanent.
///
/// - Atomicity: a transaction that the handler has ended or spoilt must not be taken for a committed one, see
///   [`commit`](Self::commit).
/// - Equality: scopes, senders, ids and the holders of claims and sequences are compared byte by byte. A collation that ignores case
///   takes `Shop` and `shop` for one sender, and loses messages. Ids have up to 1,056 bytes, names of senders up to 255. Scopes are
///   names of queues, with up to 255 bytes, or what the application has chosen.
/// - Locking: a record or a mark that another transaction has written and not committed is waited for, for some seconds. Then the
///   error is [`ErrorClass::Locked`].
/// - Order: ids and senders come sorted and without duplicates. All statements of a dialect lock them in this order, so that
///   transactions do not wait for each other in a circle.
/// - Visibility: after [`add_ids`](Self::add_ids) and [`lock_marks`](Self::lock_marks) have waited for another transaction, all methods
///   see what that has committed. A snapshot from the time of [`begin`](Self::begin), as of `REPEATABLE READ`, does not.
/// - Errors: what [`set_reply`](Self::set_reply) and [`commit`](Self::commit) meet in an aborted transaction is an
///   [`sqlx::Error::Database`] that [`classify`](Self::classify) takes for [`ErrorClass::Aborted`].
///
/// # Outbox
///
/// Rows are in [`LANES`]. A claim has lanes for itself, and takes their rows from the first on. So rows of an ordering key, which
/// are all in one lane, are claimed in the order in which they were written.
///
/// # Sequences
///
/// A row for each sender has the number that is `next`, the last one that is `reserved`, and the holder that has reserved it.
pub trait Dialect<DB: Database>: Clone + fmt::Debug + Send + Sync + 'static {
    /// Whether one transaction at a time may write. Then the workers of an inbox take turns, and do not poll for the lock.
    const ONE_WRITER: bool;

    /// How often a relay looks for messages, unless it is told otherwise.
    const POLL_EVERY: Duration;

    /// What a batch of the outbox holds while its rows are sent: row locks in a transaction, or the name of a lease. Dropped,
    /// its lanes become free after a while.
    type Claim: Send + 'static;

    /// What an error of the database says about a message.
    fn classify(&self, error: &dyn DatabaseError) -> ErrorClass;

    // Schema

    /// The steps that make the tables, numbered from 1 on: ascending, without gaps, and never derived from the list of another dialect,
    /// which may grow. A released step never changes.
    fn migrations(&self) -> &'static [Migration];

    /// Begins a transaction that other migrations of these tables wait for, and makes the table that notes the steps.
    fn begin_migration(
        &self,
        pool: &Pool<DB>,
        tables: &Tables,
    ) -> impl Future<Output = sqlx::Result<Transaction<'static, DB>>> + Send;

    /// The latest step that was made, if any was.
    fn version(
        &self,
        connection: &mut DB::Connection,
        tables: &Tables,
    ) -> impl Future<Output = sqlx::Result<Option<i32>>> + Send;

    /// Makes a step and notes it.
    fn apply(
        &self,
        connection: &mut DB::Connection,
        tables: &Tables,
        step: &Migration,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    // Inbox

    /// Begins a transaction that is going to write, and marks it for [`commit`](Self::commit). A connection of the pool may be one on
    /// which a handler has ended a transaction behind the back of sqlx.
    fn begin(
        &self,
        pool: &Pool<DB>,
    ) -> impl Future<Output = sqlx::Result<Transaction<'static, DB>>> + Send;

    /// Commits, if this is still the transaction of [`begin`](Self::begin) and the database has not given the transaction up because
    /// of a failed statement. Otherwise it is an error, [`ErrorClass::Aborted`] in the second case, and nothing of the transaction is
    /// there.
    fn commit(
        &self,
        transaction: Transaction<'static, DB>,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Adds ids within their scopes, and tells of each whether it was new. They expire at this time, in milliseconds since 1970; or
    /// when they are released.
    fn add_ids(
        &self,
        connection: &mut DB::Connection,
        tables: &Tables,
        ids: &[(&str, &[u8])],
        expires_at: Option<i64>,
    ) -> impl Future<Output = sqlx::Result<Vec<bool>>> + Send;

    /// Locks the marks of senders until the end of the transaction, and returns them in the order of the senders. A sender without a
    /// mark gets the initial one.
    fn lock_marks(
        &self,
        connection: &mut DB::Connection,
        tables: &Tables,
        senders: &[Sender],
        initial: &[u8],
    ) -> impl Future<Output = sqlx::Result<Vec<Vec<u8>>>> + Send;

    /// Replaces marks that are locked.
    fn set_marks(
        &self,
        connection: &mut DB::Connection,
        tables: &Tables,
        senders: &[Sender],
        marks: &[Vec<u8>],
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// The mark of a sender as it was last committed. It waits for no transaction.
    fn mark(
        &self,
        pool: &Pool<DB>,
        tables: &Tables,
        sender: &Sender,
    ) -> impl Future<Output = sqlx::Result<Option<Vec<u8>>>> + Send;

    /// The record of a message with its reply. `None` if there is no record; of a number only the reply is looked for. It sees what a
    /// transaction has committed that [`add_ids`](Self::add_ids) has waited for.
    fn reply(
        &self,
        connection: &mut DB::Connection,
        tables: &Tables,
        record: &Record,
    ) -> impl Future<Output = sqlx::Result<Option<Option<Reply>>>> + Send;

    /// Adds the reply to a record, or fails if this transaction does not see the record, or the record has a reply. The reply to a number
    /// expires at this time; the reply to an id expires with the id.
    fn set_reply(
        &self,
        connection: &mut DB::Connection,
        tables: &Tables,
        record: &Record,
        reply: &Reply,
        expires_at: i64,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Has ids without a time expire at this time.
    fn release_ids(
        &self,
        connection: &mut DB::Connection,
        tables: &Tables,
        scope: &str,
        ids: &[&[u8]],
        expires_at: i64,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Deletes ids and replies that have expired, about [`ROWS_PER_CLEANUP`] at most, and returns how many.
    fn clean_inbox(
        &self,
        pool: &Pool<DB>,
        tables: &Tables,
        now: i64,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    // Outbox

    /// Adds messages in the transaction of the application, with ids that grow in their order. Commits tell relays of it if
    /// `notify` is set and the database can.
    fn write(
        &self,
        connection: &mut DB::Connection,
        tables: &Tables,
        rows: &[NewRow],
        notify: bool,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Takes up to [`LANES_PER_CLAIM`] lanes that no other claim has, those that have waited longest, and their rows that are
    /// due, in order. `None` if there are none.
    ///
    /// The rows are read after the lanes are taken, so that they are as the claim before has left them. A row that was refused and is
    /// not due yet holds back the later rows of its key; so does a row that was set aside, if keys are held.
    fn claim(
        &self,
        pool: &Pool<DB>,
        tables: &Tables,
        options: &ClaimOptions,
    ) -> impl Future<Output = sqlx::Result<Option<Claimed<Self::Claim>>>> + Send;

    /// Notes the outcome of rows and gives the lanes back, both or neither. Rows without an outcome stay as they are.
    fn settle(
        &self,
        pool: &Pool<DB>,
        tables: &Tables,
        claim: Self::Claim,
        settled: &Settled,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Listens for new messages. `None` if the database tells of nothing; then relays poll.
    fn listen(
        &self,
        _pool: &Pool<DB>,
        _tables: &Tables,
    ) -> impl Future<Output = sqlx::Result<Option<Notifications>>> + Send {
        std::future::ready(Ok(None))
    }

    /// Counts the messages.
    fn backlog(
        &self,
        pool: &Pool<DB>,
        tables: &Tables,
    ) -> impl Future<Output = sqlx::Result<Backlog>> + Send;

    /// The first rows that were set aside, of those with higher ids than this.
    fn list_aside(
        &self,
        pool: &Pool<DB>,
        tables: &Tables,
        after: i64,
        limit: i64,
    ) -> impl Future<Output = sqlx::Result<Vec<AsideRow>>> + Send;

    /// Has rows sent again, as if for the first time, or deletes them: these of those that were set aside, or all. Returns how many.
    fn update_aside(
        &self,
        pool: &Pool<DB>,
        tables: &Tables,
        ids: Option<&[i64]>,
        action: AsideAction,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// Puts back lanes that are missing, and deletes rows that were sent longer ago than this, about [`ROWS_PER_CLEANUP`] at most.
    /// Without a time it deletes nothing, and locks nothing unless lanes are missing.
    fn maintain_outbox(
        &self,
        pool: &Pool<DB>,
        tables: &Tables,
        keep: Option<Duration>,
    ) -> impl Future<Output = sqlx::Result<Maintained>> + Send;

    // Sequences

    /// Takes so many numbers in a transaction, behind all that are reserved, and returns the number after them. Nothing more can be
    /// reserved by the holder.
    fn take_numbers(
        &self,
        connection: &mut DB::Connection,
        tables: &Tables,
        sender: &str,
        count: i64,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;

    /// Makes this the holder.
    fn hold_numbers(
        &self,
        pool: &Pool<DB>,
        tables: &Tables,
        sender: &str,
        holder: &str,
    ) -> impl Future<Output = sqlx::Result<SequenceNumbers>> + Send;

    /// Notes what the holder has used and reserved. False if there is another holder.
    fn keep_numbers(
        &self,
        pool: &Pool<DB>,
        tables: &Tables,
        sender: &str,
        holder: &str,
        numbers: SequenceNumbers,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;
}

/// The commit of a transaction that is not there any more.
#[cfg(feature = "postgres")]
fn ended_by_handler() -> sqlx::Error {
    sqlx::Error::Protocol("the handler has ended its transaction by itself".into())
}
