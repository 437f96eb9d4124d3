//! A message at work: its transaction, and what is to be recorded.

use std::ops::RangeInclusive;
use std::sync::Arc;

use leveret::inbox::{Changes, Doing, HighWater, Report, Work};
use leveret::{BoxError, Failure, Incoming, Message};
use sqlx::Transaction;

use super::records::{Records, kept};
use super::tx::Slot;
use super::{Found, Shared, Turn, in_future, trouble};

/// What a message is recorded as.
pub(crate) enum Record {
    Nothing,
    Id {
        scope: String,
        id: Vec<u8>,
    },
    Number {
        scope: String,
        sender: String,
        number: u64,
        given_up: Option<RangeInclusive<u64>>,
        /// As it was found, and is locked.
        mark: HighWater,
    },
}

/// The transaction, as long as the message is at work: whoever still has a part in it then lets it be rolled back.
pub(super) struct Held<D: Records>(Slot<D>);

impl<D: Records> Held<D> {
    pub(super) fn new(transaction: Transaction<'static, D>) -> Self {
        Held(Slot::new(transaction))
    }

    pub(super) fn lend(&self, incoming: &mut Incoming) {
        incoming.lend(self.0.clone());
    }

    /// Takes it out, to commit it.
    pub(super) fn take(&self) -> Result<Transaction<'static, D>, BoxError> {
        let kept =
            "the handler has kept its Tx beyond its end, so that nothing of it can be committed";
        self.0.close().ok_or_else(|| kept.into())
    }
}

impl<D: Records> Drop for Held<D> {
    fn drop(&mut self) {
        drop(self.0.close());
    }
}

/// Dropped, its transaction is rolled back.
pub(crate) struct SqlWork<D: Records> {
    inbox: Arc<Shared<D>>,
    slot: Held<D>,
    record: Record,
    /// After the transaction, in the order in which they are dropped.
    _turn: Turn,
}

impl<D: Records> SqlWork<D> {
    pub(super) fn new(
        inbox: &Arc<Shared<D>>,
        transaction: Transaction<'static, D>,
        record: Record,
        turn: Turn,
    ) -> Self {
        SqlWork { inbox: Arc::clone(inbox), slot: Held::new(transaction), record, _turn: turn }
    }

    async fn finish(self, changes: Changes, reply: Option<&Message>) -> Result<Report, BoxError> {
        let SqlWork { inbox, slot, record, _turn } = self;
        let mut transaction = slot.take()?;
        let (mut transaction, record) = match stays::<D>(changes, &mut transaction).await {
            true => (transaction, record),
            false => inbox.begin_anew(transaction, record).await?,
        };
        let is_recorded = matches!(record, Record::Id { .. }) && reply.is_none();
        let report = inbox.write_down(&mut transaction, record, reply).await?;
        match is_recorded {
            true => D::commit_record(transaction).await?,
            false => transaction.commit().await?,
        }
        Ok(report)
    }
}

/// Whether what was changed in a transaction stays. PostgreSQL takes no more statements where one has failed.
pub(super) async fn stays<D: Records>(changes: Changes, connection: &mut D::Connection) -> bool {
    match changes {
        Changes::Keep => true,
        Changes::KeepIfSound => D::is_sound(connection).await.is_ok(),
        Changes::Undo => false,
    }
}

/// It comes again, and gets the reply of the copy. Nothing has failed that counts.
pub(super) fn overtaken() -> BoxError {
    Failure::requeue("a copy of the message was handled at the same time").kind("inbox").into()
}

impl<D: Records> Work for SqlWork<D> {
    fn lend(&mut self, incoming: &mut Incoming) {
        self.slot.lend(incoming);
    }

    fn commit(self: Box<Self>, changes: Changes, reply: Option<&Message>) -> Doing<'_, Report> {
        let reply = reply.cloned();
        Box::pin(
            async move { self.finish(changes, reply.as_ref()).await.map_err(trouble::of_commit) },
        )
    }
}

impl<D: Records> Shared<D> {
    /// Undoes what was done in a transaction, and begins another one for the same record.
    async fn begin_anew(
        &self,
        transaction: Transaction<'static, D>,
        record: Record,
    ) -> Result<(Transaction<'static, D>, Record), BoxError> {
        transaction.rollback().await?;
        let mut transaction = D::begin(&self.pool).await?;
        match self.look_up(&mut transaction, record).await? {
            (Found::New, record) => Ok((transaction, record)),
            _ => Err(overtaken()),
        }
    }

    /// Writes down that a message was handled, as far as that is not done. It fails if the handler has hidden a failure, unless
    /// there is nothing more to write down.
    async fn write_down(
        &self,
        connection: &mut D::Connection,
        record: Record,
        reply: Option<&Message>,
    ) -> Result<Report, BoxError> {
        let (statements, reply) = (&self.statements, reply.map(kept).transpose()?);
        match record {
            Record::Nothing => D::is_sound(connection).await?,
            Record::Id { scope, id } => {
                if let Some(reply) = reply {
                    D::set_reply(connection, statements, (&scope, &id), reply).await?;
                }
            }
            Record::Number { scope, sender, number, given_up, mut mark } => {
                mark.add(number);
                let mut report = Report::default();
                if let Some(numbers) = given_up {
                    report.give_up(&sender, mark.give_up(numbers));
                }
                report.give_up(&sender, mark.settle(self.remember.gaps_policy()));
                let sender = (scope, sender);
                D::set_mark(connection, statements, &sender, &mark).await?;
                let sender = (sender.0.as_str(), sender.1.as_str());
                if let (Some(reply), Some(time)) = (reply, self.remember.keeps_ids_for()) {
                    let expires_at = in_future(time);
                    let set = D::set_number_reply(
                        connection, statements, sender, number, reply, expires_at,
                    );
                    set.await?;
                }
                return Ok(report);
            }
        }
        Ok(Report::default())
    }
}
