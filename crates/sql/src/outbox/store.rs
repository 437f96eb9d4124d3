//! What a relay needs of a database.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::Backlog;

/// How many bytes of bodies a batch may have, give or take the last one: it is held in memory.
pub(crate) const MAX_BYTES: i64 = 16 * 1024 * 1024;

/// How many lanes are taken at once: a quarter, so that others find some too.
pub(crate) const LANES_AT_ONCE: i64 = 16;

/// How many rows are cleaned up in one transaction: others wait for it.
pub(crate) const CLEANED_AT_ONCE: i64 = 1000;

/// An outbox in a database.
pub trait Store: fmt::Debug + Send + Sync {
    /// Fails if the tables are not there, or other ones.
    fn check(&self) -> BoxFuture<'_, Result<(), crate::Error>>;

    /// Puts back lanes that are missing, which somebody has deleted: what is in them would never be sent. Says how many.
    fn restore_lanes(&self) -> BoxFuture<'_, sqlx::Result<u64>>;

    /// Waits until the pool is closed.
    fn closed(&self) -> BoxFuture<'_, ()>;

    /// Takes lanes that nobody else has, and rows in them that are due, in order. Nothing, if there is none.
    fn claim<'a>(&'a self, wish: &'a Wish) -> BoxFuture<'a, sqlx::Result<Option<Claimed>>>;

    /// How often to look for new rows, unless one says otherwise.
    fn poll(&self) -> Duration;

    /// What tells of new rows, if the database can.
    fn listen(&self) -> BoxFuture<'_, sqlx::Result<Option<Box<dyn Bell>>>>;

    /// Deletes rows that were sent longer ago than this. Says how many; if it is none, there are no more.
    fn clean_up(&self, age: Duration) -> BoxFuture<'_, sqlx::Result<u64>>;

    /// How much there is.
    fn backlog(&self) -> BoxFuture<'_, sqlx::Result<Backlog>>;

    /// Rows that were set aside, those with higher ids than this.
    fn aside(&self, after: i64, limit: i64) -> BoxFuture<'_, sqlx::Result<Vec<AsideRow>>>;

    /// Rows that were set aside, these or all, are to be sent again, as if for the first time.
    fn send_again<'a>(&'a self, ids: Option<&'a [i64]>) -> BoxFuture<'a, sqlx::Result<u64>>;

    /// Rows that were set aside, these or all, are deleted.
    fn discard<'a>(&'a self, ids: Option<&'a [i64]>) -> BoxFuture<'a, sqlx::Result<u64>>;
}

pub(crate) type SharedStore = Arc<dyn Store>;

/// What is to be claimed.
#[derive(Clone, Debug)]
pub struct Wish {
    pub(crate) rows: usize,
    /// A row that was set aside holds back the later ones of its key.
    pub(crate) hold_keys: bool,
    /// For how long lanes are taken where a lost connection does not give them back.
    pub(crate) lease: Duration,
}

/// Rows that nobody else sends now.
#[derive(Debug)]
pub struct Claimed {
    pub(crate) rows: Vec<Row>,
    pub(crate) claim: Box<dyn Claim>,
}

/// A row to be sent.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) id: i64,
    pub(crate) ordering_key: Option<String>,
    pub(crate) exchange: String,
    pub(crate) routing_key: String,
    pub(crate) mandatory: bool,
    pub(crate) properties: Vec<u8>,
    pub(crate) body: Vec<u8>,
    pub(crate) attempts: i32,
    /// How long ago it was written.
    pub(crate) age: f64,
}

/// Lanes that were taken. They are given back when their rows are settled; if this is dropped, soon.
pub(crate) trait Claim: fmt::Debug + Send {
    /// Writes down what became of the rows; those that are not named are as before.
    fn settle<'a>(self: Box<Self>, settled: &'a Settled) -> BoxFuture<'a, sqlx::Result<()>>
    where
        Self: 'a;
}

/// What became of rows.
#[derive(Debug, Default)]
pub(crate) struct Settled {
    pub(crate) sent: Vec<i64>,
    /// Whether those that were sent are kept for a while.
    pub(crate) keep: bool,
    pub(crate) refused: Vec<Refused>,
}

/// A row that the broker did not take.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) id: i64,
    pub(crate) exchange: String,
    pub(crate) routing_key: String,
    pub(crate) error: String,
    /// When it is tried again; never, if it is set aside.
    pub(crate) again_in: Option<Duration>,
}

/// A row that was set aside.
#[derive(Debug)]
pub struct AsideRow {
    pub(crate) row: Row,
    pub(crate) error: Option<String>,
    /// How long ago it was set aside, in seconds.
    pub(crate) since: f64,
}

/// Rings when there are new rows.
pub trait Bell: Send {
    /// Waits for it to ring. An error if it cannot now.
    fn rings(&mut self) -> BoxFuture<'_, sqlx::Result<()>>;
}

/// A time from the past, in seconds, which clocks that are set may make negative.
pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
