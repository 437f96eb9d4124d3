//! An outbox in a database, whichever that is: what a relay works on.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::{Database, Pool};

use super::Backlog;
use crate::dialect::{
    AsideAction, AsideRow, ClaimOptions, Dialect, Maintained, Notifications, Row, Settled,
};
use crate::error::Error;
use crate::schema::Schema;

/// The outbox of a [`Dialect`] without its types, so that relays have none.
pub(crate) trait Store: fmt::Debug + Send + Sync {
    fn schema(&self) -> &str;
    fn poll_every(&self) -> Duration;
    fn check(&self) -> BoxFuture<'_, Result<(), Error>>;
    /// Waits until the pool is closed.
    fn closed(&self) -> BoxFuture<'_, ()>;
    fn claim<'a>(&'a self, options: &'a ClaimOptions) -> Working<'a, Option<ClaimedRows>>;
    fn listen(&self) -> Working<'_, Option<Notifications>>;
    fn backlog(&self) -> Working<'_, Backlog>;
    fn list_aside(&self, after: i64, limit: i64) -> Working<'_, Vec<AsideRow>>;
    fn update_aside<'a>(&'a self, ids: Option<&'a [i64]>, action: AsideAction) -> Working<'a, u64>;
    fn maintain(&self, keep: Option<Duration>) -> Working<'_, Maintained>;
}

type Working<'a, T> = BoxFuture<'a, sqlx::Result<T>>;

pub(crate) type SharedStore = Arc<dyn Store>;

/// Rows that no other relay sends now.
pub(crate) struct ClaimedRows {
    pub(crate) rows: Vec<Row>,
    pub(crate) claim: Box<dyn Settle>,
}

/// A claim of a [`Dialect`] without its type.
pub(crate) trait Settle: Send {
    fn settle<'a>(self: Box<Self>, settled: &'a Settled) -> Working<'a, ()>
    where
        Self: 'a;
}

#[derive(Debug)]
struct OutboxIn<DB: Database, L> {
    pool: Pool<DB>,
    schema: Schema<L>,
}

pub(crate) fn store<DB: Database, L: Dialect<DB>>(
    pool: &Pool<DB>,
    schema: &Schema<L>,
) -> SharedStore {
    Arc::new(OutboxIn { pool: pool.clone(), schema: schema.clone() })
}

impl<DB: Database, L: Dialect<DB>> Store for OutboxIn<DB, L> {
    fn schema(&self) -> &str {
        self.schema.name()
    }

    fn poll_every(&self) -> Duration {
        L::POLL_EVERY
    }

    fn check(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.schema.check(&self.pool))
    }

    fn closed(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.pool.close_event())
    }

    fn claim<'a>(&'a self, options: &'a ClaimOptions) -> Working<'a, Option<ClaimedRows>> {
        let OutboxIn { pool, schema } = self;
        Box::pin(async move {
            let claimed = schema.dialect().claim(pool, schema.tables(), options).await?;
            Ok(claimed.map(|claimed| {
                let (pool, schema) = (pool.clone(), schema.clone());
                let claim = HeldClaim { pool, schema, claim: claimed.claim };
                ClaimedRows { rows: claimed.rows, claim: Box::new(claim) }
            }))
        })
    }

    fn listen(&self) -> Working<'_, Option<Notifications>> {
        Box::pin(self.schema.dialect().listen(&self.pool, self.schema.tables()))
    }

    fn backlog(&self) -> Working<'_, Backlog> {
        Box::pin(self.schema.dialect().backlog(&self.pool, self.schema.tables()))
    }

    fn list_aside(&self, after: i64, limit: i64) -> Working<'_, Vec<AsideRow>> {
        let OutboxIn { pool, schema } = self;
        Box::pin(schema.dialect().list_aside(pool, schema.tables(), after, limit))
    }

    fn update_aside<'a>(&'a self, ids: Option<&'a [i64]>, action: AsideAction) -> Working<'a, u64> {
        let OutboxIn { pool, schema } = self;
        Box::pin(schema.dialect().update_aside(pool, schema.tables(), ids, action))
    }

    fn maintain(&self, keep: Option<Duration>) -> Working<'_, Maintained> {
        Box::pin(self.schema.dialect().maintain_outbox(&self.pool, self.schema.tables(), keep))
    }
}

struct HeldClaim<DB: Database, L: Dialect<DB>> {
    pool: Pool<DB>,
    schema: Schema<L>,
    claim: L::Claim,
}

impl<DB: Database, L: Dialect<DB>> Settle for HeldClaim<DB, L> {
    fn settle<'a>(self: Box<Self>, settled: &'a Settled) -> Working<'a, ()>
    where
        Self: 'a,
    {
        Box::pin(async move {
            let HeldClaim { pool, schema, claim } = *self;
            schema.dialect().settle(&pool, schema.tables(), claim, settled).await
        })
    }
}
