//! A message at work: its transaction, and what is recorded of it.

use std::sync::Arc;

use leveret::inbox::{Changes, Doing, Known, Report, Work};
use leveret::{BoxError, Failure, Incoming, Message};
use sqlx::{Database, Transaction};

use super::tx::Slot;
use super::{Entry, Found, Shared, Turn, encode_reply, in_future};
use crate::dialect::{Dialect, Record};

/// The transaction, as long as the message is at work: whoever still has a part in it then lets it be rolled back.
pub(super) struct Held<DB: Database>(Slot<DB>);

impl<DB: Database> Held<DB> {
    pub(super) fn new(transaction: Transaction<'static, DB>) -> Self {
        Held(Slot::new(transaction))
    }

    pub(super) fn lend(&self, incoming: &mut Incoming) {
        incoming.lend(self.0.clone());
    }

    /// Takes it out, to commit it.
    pub(super) fn take(&self) -> Result<Transaction<'static, DB>, BoxError> {
        let kept =
            "the handler has kept its Tx beyond its end, so that nothing of it can be committed";
        self.0.close().ok_or_else(|| kept.into())
    }
}

impl<DB: Database> Drop for Held<DB> {
    fn drop(&mut self) {
        drop(self.0.close());
    }
}

/// Dropped, its transaction is rolled back.
pub(crate) struct SqlWork<DB: Database, L> {
    inbox: Arc<Shared<DB, L>>,
    slot: Held<DB>,
    known: Known,
    entry: Entry,
    /// After the transaction, in the order in which they are dropped.
    _turn: Turn,
}

impl<DB: Database, L: Dialect<DB>> SqlWork<DB, L> {
    pub(super) fn new(
        inbox: &Arc<Shared<DB, L>>,
        transaction: Transaction<'static, DB>,
        known: Known,
        entry: Entry,
        turn: Turn,
    ) -> Self {
        let (inbox, slot) = (Arc::clone(inbox), Held::new(transaction));
        SqlWork { inbox, slot, known, entry, _turn: turn }
    }

    async fn finish(self, changes: Changes, reply: Option<&Message>) -> Result<Report, BoxError> {
        let SqlWork { inbox, slot, known, entry, _turn } = self;
        let transaction = slot.take()?;
        if changes == Changes::Undo {
            transaction.rollback().await?;
        } else {
            match inbox.complete(transaction, entry, reply).await {
                Err(error) if changes == Changes::KeepIfSound && inbox.is_aborted(&error) => {}
                completed => return completed,
            }
        }
        inbox.complete_anew(&known, reply).await
    }
}

/// It comes again, and gets the reply of the copy. Nothing has failed that counts.
pub(super) fn overtaken() -> BoxError {
    Failure::requeue("a copy of the message was handled at the same time").kind("inbox").into()
}

impl<DB: Database, L: Dialect<DB>> Work for SqlWork<DB, L> {
    fn lend(&mut self, incoming: &mut Incoming) {
        self.slot.lend(incoming);
    }

    fn commit(self: Box<Self>, changes: Changes, reply: Option<&Message>) -> Doing<'_, Report> {
        let (reply, inbox) = (reply.cloned(), Arc::clone(&self.inbox));
        Box::pin(async move {
            let finished = self.finish(changes, reply.as_ref()).await;
            finished.map_err(|error| inbox.commit_failed(error))
        })
    }
}

impl<DB: Database, L: Dialect<DB>> Shared<DB, L> {
    /// Adds the reply to the record, and commits.
    async fn complete(
        &self,
        mut transaction: Transaction<'static, DB>,
        Entry { record, report }: Entry,
        reply: Option<&Message>,
    ) -> Result<Report, BoxError> {
        if let (Some(record), Some(reply)) = (record, reply) {
            self.set_reply(&mut transaction, &record, reply).await?;
        }
        self.dialect().commit(transaction).await?;
        Ok(report)
    }

    async fn set_reply(
        &self,
        connection: &mut DB::Connection,
        record: &Record,
        reply: &Message,
    ) -> Result<(), BoxError> {
        let (reply, kept_for) = (encode_reply(reply)?, self.remember.keeps_ids_for());
        if kept_for.is_none() && matches!(record, Record::Number { .. }) {
            return Ok(());
        }
        let (tables, expires_at) = (self.schema.tables(), in_future(kept_for.unwrap_or_default()));
        Ok(self.dialect().set_reply(connection, tables, record, &reply, expires_at).await?)
    }

    /// Records a message, whose handler's changes were undone, in a transaction of its own.
    async fn complete_anew(
        &self,
        known: &Known,
        reply: Option<&Message>,
    ) -> Result<Report, BoxError> {
        let mut transaction = self.dialect().begin(&self.pool).await?;
        match self.record(&mut transaction, known).await? {
            Found::New(entry) => self.complete(transaction, entry, reply).await,
            _ => Err(overtaken()),
        }
    }
}
