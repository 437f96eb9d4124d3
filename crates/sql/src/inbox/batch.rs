//! Several messages with one commit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use leveret::inbox::{
    Changes, Doing, HighWater, Known, OpenedBatch, Progress, Report, Standing, Unknown, Work,
};
use leveret::{BoxError, Incoming, Message};
use sqlx::Transaction;

use super::records::{Records, Sender};
use super::work::{Held, overtaken, stays};
use super::{Shared, Turn, in_future, trouble};

/// What was written down, or is to be, of several messages.
#[derive(Default)]
struct Notes {
    /// Whether ids were written down.
    has_ids: bool,
    /// With the numbers of this batch.
    marks: BTreeMap<Sender, HighWater>,
    report: Report,
    /// What is both recorded and released by this batch.
    released: Vec<(String, Vec<u8>)>,
}

/// Dropped, its transaction is rolled back.
struct BatchWork<D: Records> {
    inbox: Arc<Shared<D>>,
    slot: Held<D>,
    known: Vec<Known>,
    messages: Vec<Standing>,
    notes: Notes,
    _turn: Turn,
}

impl<D: Records> Shared<D> {
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
        let (transaction, _turn) = self.begin().await?;
        let (transaction, messages, notes) = self.take_up(transaction, &known).await?;
        let (inbox, slot) = (Arc::clone(self), Held::new(transaction));
        let standings = messages.clone();
        let work = BatchWork { inbox, slot, known, messages, notes, _turn };
        Ok(OpenedBatch { work: Box::new(work), messages: standings })
    }

    /// Looks which messages are new, and locks them against copies.
    async fn take_up(
        &self,
        transaction: Transaction<'static, D>,
        known: &[Known],
    ) -> sqlx::Result<(Transaction<'static, D>, Vec<Standing>, Notes)> {
        let mut notes = Notes::default();
        let mut transaction = self.lock_marks(transaction, known, &mut notes).await?;
        let mut new = self.add_ids(&mut transaction, known, &mut notes).await?;
        let is_new = |scope: &str, id: &[u8]| new.contains(&(scope, id));
        notes.released = released(known).filter(|(scope, id)| is_new(scope, id)).collect();
        let mut messages = Vec::new();
        for one in known {
            messages.push(match one {
                Known::Nothing => Standing::New,
                Known::Unknown(unknown) => Standing::Unknown(*unknown),
                Known::Release { .. } => Standing::Released,
                Known::Old { scope, id } => {
                    match D::reply(&mut transaction, &self.statements, (scope, id)).await? {
                        Some(_) => Standing::Done,
                        None => Standing::Unknown(Unknown::Forgotten),
                    }
                }
                // The first of several copies is the new one.
                Known::Id { scope, id } => match new.remove(&(scope.as_str(), id.as_slice())) {
                    true => Standing::New,
                    false => Standing::Done,
                },
                Known::Number { .. } => notes.count(one),
            });
        }
        for (sender, mark) in &mut notes.marks {
            notes.report.give_up(&sender.1, mark.settle(self.remember.gaps_policy()));
        }
        Ok((transaction, messages, notes))
    }

    /// Writes down all ids, and says which are new.
    async fn add_ids<'k>(
        &self,
        connection: &mut D::Connection,
        known: &'k [Known],
        notes: &mut Notes,
    ) -> sqlx::Result<BTreeSet<(&'k str, &'k [u8])>> {
        // In order, so that two batches do not wait for each other.
        let ids: BTreeSet<_> = known
            .iter()
            .filter_map(|one| match one {
                Known::Id { scope, id } => Some((scope.as_str(), id.as_slice())),
                _ => None,
            })
            .collect();
        if ids.is_empty() {
            return Ok(ids);
        }
        let ids: Vec<_> = ids.into_iter().collect();
        let expires_at = self.remember.keeps_ids_for().map(in_future);
        let added = D::add_all(connection, &self.statements, &ids, expires_at).await?;
        let is_new = |(id, is_new): (&(&'k str, &'k [u8]), bool)| is_new.then_some(*id);
        let new: BTreeSet<_> = ids.iter().zip(added).filter_map(is_new).collect();
        notes.has_ids = !new.is_empty();
        Ok(new)
    }

    /// Locks the marks of all senders.
    async fn lock_marks(
        &self,
        mut transaction: Transaction<'static, D>,
        known: &[Known],
        notes: &mut Notes,
    ) -> sqlx::Result<Transaction<'static, D>> {
        let sender = |one: &Known| match one {
            Known::Number { scope, sender, .. } => Some((scope.clone(), sender.clone())),
            _ => None,
        };
        let senders: BTreeSet<Sender> = known.iter().filter_map(sender).collect();
        if senders.is_empty() {
            return Ok(transaction);
        }
        let senders: Vec<Sender> = senders.into_iter().collect();
        let marks = match D::marks(&mut transaction, &self.statements, &senders).await? {
            Some(marks) => marks,
            None => {
                // Those that are there are locked now, and must not be while others are waited for.
                transaction.rollback().await?;
                transaction = D::begin(&self.pool).await?;
                self.new_marks(&mut transaction, &senders).await?
            }
        };
        notes.marks = senders.into_iter().zip(marks).collect();
        Ok(transaction)
    }

    /// Writes down what is not yet, and commits, if all else is still there.
    async fn commit_batch(
        &self,
        mut transaction: Transaction<'static, D>,
        marks: BTreeMap<Sender, HighWater>,
        has_ids: bool,
    ) -> sqlx::Result<()> {
        let (senders, marks): (Vec<Sender>, Vec<HighWater>) = marks.into_iter().unzip();
        let has_marks = !senders.is_empty();
        if has_marks {
            D::set_marks(&mut transaction, &self.statements, &senders, &marks).await?;
        }
        if has_ids {
            return D::commit_record(transaction).await;
        }
        if !has_marks {
            D::is_sound(&mut transaction).await?;
        }
        transaction.commit().await
    }
}

/// What is released by the messages of a batch.
fn released(known: &[Known]) -> impl Iterator<Item = (String, Vec<u8>)> {
    known.iter().flat_map(|one| match one {
        Known::Release { scope, ids } => ids.iter().map(|id| (scope.clone(), id.clone())).collect(),
        _ => Vec::new(),
    })
}

impl Notes {
    /// What a numbered message is, which then counts as done.
    fn count(&mut self, known: &Known) -> Standing {
        let Known::Number { scope, sender, number, given_up } = known else { return Standing::New };
        let Some(mark) = self.marks.get_mut(&(scope.clone(), sender.clone())) else {
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

impl<D: Records> Work for BatchWork<D> {
    fn lend(&mut self, incoming: &mut Incoming) {
        self.slot.lend(incoming);
    }

    fn commit(self: Box<Self>, changes: Changes, _reply: Option<&Message>) -> Doing<'_, Report> {
        Box::pin(async move { (*self).finish(changes).await.map_err(trouble::of_commit) })
    }
}

impl<D: Records> BatchWork<D> {
    async fn finish(self, changes: Changes) -> Result<Report, BoxError> {
        let BatchWork { inbox, slot, known, messages, mut notes, _turn } = self;
        let mut transaction = slot.take()?;
        if !stays::<D>(changes, &mut transaction).await {
            transaction.rollback().await?;
            let standings;
            transaction = D::begin(&inbox.pool).await?;
            (transaction, standings, notes) = inbox.take_up(transaction, &known).await?;
            if standings != messages {
                return Err(overtaken());
            }
        }
        if let Some(linger) = inbox.remember.lingers_for() {
            for (scope, id) in &notes.released {
                let (id, expires_at) = ((scope.as_str(), id.as_slice()), in_future(linger));
                D::release(&mut transaction, &inbox.statements, id, expires_at).await?;
            }
        }
        let Notes { has_ids, marks, report, .. } = notes;
        inbox.commit_batch(transaction, marks, has_ids).await?;
        Ok(report)
    }
}
