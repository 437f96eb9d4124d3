//! Several messages with one commit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use leveret::inbox::{
    Changes, Doing, HighWater, Known, OpenedBatch, Progress, Report, Standing, Unknown, Work,
};
use leveret::{BoxError, Incoming, Message};
use sqlx::{Database, Transaction};

use super::work::{Held, overtaken};
use super::{Shared, Turn, in_future, sender_of};
use crate::dialect::{Dialect, Record, Sender};

/// What was written down of several messages.
#[derive(Default)]
struct Notes {
    /// With the numbers of this batch.
    marks: BTreeMap<Sender, HighWater>,
    report: Report,
    /// Ids that this batch both records and releases.
    released: BTreeSet<(String, Vec<u8>)>,
}

/// Dropped, its transaction is rolled back.
struct BatchWork<DB: Database, L> {
    inbox: Arc<Shared<DB, L>>,
    slot: Held<DB>,
    known: Vec<Known>,
    messages: Vec<Standing>,
    notes: Notes,
    _turn: Turn,
}

impl<DB: Database, L: Dialect<DB>> Shared<DB, L> {
    /// Begins a transaction for all messages of a batch that are new.
    pub(super) async fn open_batch(
        self: &Arc<Self>,
        batch: &[Incoming],
    ) -> Result<OpenedBatch, BoxError> {
        self.check().await?;
        let known: Vec<_> = batch.iter().map(|incoming| self.read(incoming)).collect();
        for one in &known {
            if let Known::Release { scope, ids } = one {
                self.release(scope, ids).await?;
            }
        }
        let (mut transaction, _turn) = self.begin().await?;
        let (messages, notes) = self.record_all(&mut transaction, &known).await?;
        let (inbox, slot) = (Arc::clone(self), Held::new(transaction));
        let standings = messages.clone();
        let work = BatchWork { inbox, slot, known, messages, notes, _turn };
        Ok(OpenedBatch { work: Box::new(work), messages: standings })
    }

    /// Writes down that messages were handled, as far as they are new. Copies wait for the end of the transaction.
    async fn record_all(
        &self,
        connection: &mut DB::Connection,
        known: &[Known],
    ) -> sqlx::Result<(Vec<Standing>, Notes)> {
        let senders = senders(known);
        let mut notes = Notes::default();
        if !senders.is_empty() {
            let marks = self.lock_marks(connection, &senders).await?;
            notes.marks = senders.iter().cloned().zip(marks).collect();
        }
        let mut new = self.add_new_ids(connection, known).await?;
        notes.released = released(known, &new);
        let mut messages = Vec::new();
        for one in known {
            messages.push(match one {
                Known::Nothing => Standing::New,
                Known::Unknown(unknown) => Standing::Unknown(*unknown),
                Known::Release { .. } => Standing::Released,
                Known::Old { scope, id } => self.look_up_old(connection, scope, id).await?,
                // The first of several copies is the new one.
                Known::Id { scope, id } => match new.remove(&(scope.as_str(), id.as_slice())) {
                    true => Standing::New,
                    false => Standing::Done,
                },
                Known::Number { .. } => notes.count(one),
            });
        }
        for (sender, mark) in &mut notes.marks {
            notes.report.give_up(&sender.name, mark.settle(self.remember.gaps_policy()));
        }
        if !senders.is_empty() {
            let marks: Vec<HighWater> = notes.marks.values().cloned().collect();
            self.set_marks(connection, &senders, &marks).await?;
        }
        Ok((messages, notes))
    }

    async fn look_up_old(
        &self,
        connection: &mut DB::Connection,
        scope: &str,
        id: &[u8],
    ) -> sqlx::Result<Standing> {
        let record = Record::Id { scope: scope.to_owned(), id: id.to_vec() };
        let found = self.dialect().reply(connection, self.schema.tables(), &record).await?;
        Ok(found.map_or(Standing::Unknown(Unknown::Forgotten), |_| Standing::Done))
    }

    /// Adds all ids, and returns those that are new.
    async fn add_new_ids<'k>(
        &self,
        connection: &mut DB::Connection,
        known: &'k [Known],
    ) -> sqlx::Result<BTreeSet<(&'k str, &'k [u8])>> {
        let id = |one: &'k Known| match one {
            Known::Id { scope, id } => Some((scope.as_str(), id.as_slice())),
            _ => None,
        };
        // In order, so that two batches do not wait for each other.
        let ids: BTreeSet<_> = known.iter().filter_map(id).collect();
        if ids.is_empty() {
            return Ok(ids);
        }
        let ids: Vec<_> = ids.into_iter().collect();
        let expires_at = self.remember.keeps_ids_for().map(in_future);
        let (dialect, tables) = (self.dialect(), self.schema.tables());
        let added = dialect.add_ids(connection, tables, &ids, expires_at).await?;
        Ok(ids.into_iter().zip(added).filter_map(|(id, is_new)| is_new.then_some(id)).collect())
    }

    /// Releases what the batch itself has recorded, and commits.
    async fn complete_batch(
        &self,
        mut transaction: Transaction<'static, DB>,
        notes: Notes,
    ) -> Result<Report, BoxError> {
        if let Some(linger) = self.remember.lingers_for() {
            for (scope, id) in &notes.released {
                self.release_in(&mut transaction, scope, &[id], linger).await?;
            }
        }
        self.dialect().commit(transaction).await?;
        Ok(notes.report)
    }
}

/// The senders of a batch, in order.
fn senders(known: &[Known]) -> Vec<Sender> {
    let sender = |one: &Known| match one {
        Known::Number { scope, sender, .. } => Some(sender_of(scope, sender)),
        _ => None,
    };
    known.iter().filter_map(sender).collect::<BTreeSet<_>>().into_iter().collect()
}

/// What the messages of a batch release, of these ids.
fn released(known: &[Known], new: &BTreeSet<(&str, &[u8])>) -> BTreeSet<(String, Vec<u8>)> {
    let released = known.iter().flat_map(|one| match one {
        Known::Release { scope, ids } => ids.iter().map(|id| (scope.clone(), id.clone())).collect(),
        _ => Vec::new(),
    });
    released.filter(|(scope, id)| new.contains(&(scope.as_str(), id.as_slice()))).collect()
}

impl Notes {
    /// What a numbered message is, which then counts as done.
    fn count(&mut self, known: &Known) -> Standing {
        let Known::Number { scope, sender, number, given_up } = known else { return Standing::New };
        let Some(mark) = self.marks.get_mut(&sender_of(scope, sender)) else {
            return Standing::New;
        };
        match mark.progress_of(*number) {
            Progress::Done => return Standing::Done,
            Progress::GivenUp => return Standing::Unknown(Unknown::GivenUp),
            Progress::New if !mark.has_room_for(*number) => {
                return Standing::Unknown(Unknown::Gaps);
            }
            Progress::New => mark.add(*number),
        };
        if let Some(numbers) = given_up.clone() {
            self.report.give_up(sender, mark.give_up(numbers));
        }
        Standing::New
    }
}

impl<DB: Database, L: Dialect<DB>> Work for BatchWork<DB, L> {
    fn lend(&mut self, incoming: &mut Incoming) {
        self.slot.lend(incoming);
    }

    fn commit(self: Box<Self>, changes: Changes, _reply: Option<&Message>) -> Doing<'_, Report> {
        let inbox = Arc::clone(&self.inbox);
        Box::pin(async move {
            let finished = (*self).finish(changes).await;
            finished.map_err(|error| inbox.commit_failed(error))
        })
    }
}

impl<DB: Database, L: Dialect<DB>> BatchWork<DB, L> {
    async fn finish(self, changes: Changes) -> Result<Report, BoxError> {
        let BatchWork { inbox, slot, known, messages, notes, _turn } = self;
        let transaction = slot.take()?;
        if changes == Changes::Undo {
            transaction.rollback().await?;
        } else {
            match inbox.complete_batch(transaction, notes).await {
                Err(error) if changes == Changes::KeepIfSound && inbox.is_aborted(&error) => {}
                completed => return completed,
            }
        }
        let mut transaction = inbox.dialect().begin(&inbox.pool).await?;
        let (standings, notes) = inbox.record_all(&mut transaction, &known).await?;
        if standings != messages {
            return Err(overtaken());
        }
        inbox.complete_batch(transaction, notes).await
    }
}
