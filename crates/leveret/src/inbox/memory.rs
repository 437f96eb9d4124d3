//! An inbox in memory.

use std::any::TypeId;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::high_water::{HighWater, Progress};
use super::remember::{Known, Remember};
use super::{Changes, Doing, Inbox, Opened, OpenedBatch, Report, Standing, Unknown, Work};
use crate::amqp::{deadline_in, lock};
use crate::consumer::Incoming;
use crate::error::BoxError;
use crate::message::Message;

/// How many messages are remembered at most, unless said otherwise.
const MOST: usize = 1_000_000;

/// How long a copy waits for the first one before it says that it cannot be handled now.
const PATIENCE: Duration = Duration::from_secs(10);

/// Remembers in memory: as long as the program runs, for all consumers that are given this inbox or a clone of it.
///
/// What handlers change is not undone if they fail, and the record of a message is gone with the program. So this is for
/// tests and demos, for work on what is in the same memory, and where it is enough that nothing is repeated while the program
/// runs.
#[derive(Clone)]
pub struct MemoryInbox(Arc<Shared>);

struct Shared {
    remember: Remember,
    most: usize,
    state: Mutex<State>,
}

/// What a message is known by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Id(String, Vec<u8>),
    Number(String, String, u64),
}

#[derive(Default)]
struct State {
    /// Who waits for one of them hears of its end by this.
    at_work: HashMap<Key, watch::Receiver<()>>,
    /// What was released while it was at work.
    released: HashSet<Key>,
    /// The replies of those that are done. Where there are marks, only those that had one.
    done: HashMap<Key, Option<Message>>,
    /// When what is done is forgotten, the first one first. What waits to be released is not among them.
    expiring: VecDeque<(Instant, Key)>,
    marks: HashMap<(String, String), HighWater>,
}

impl MemoryInbox {
    /// An empty inbox.
    pub fn new(remember: Remember) -> Self {
        MemoryInbox(Arc::new(Shared { remember, most: MOST, state: Mutex::default() }))
    }

    /// How many messages are remembered at most, a million by default. Beyond that, messages wait until others are
    /// forgotten. Of numbers, only the replies count, and the oldest is forgotten for the next one.
    #[must_use]
    pub fn most(self, messages: usize) -> Self {
        let remember = self.0.remember.clone();
        MemoryInbox(Arc::new(Shared { remember, most: messages.max(1), state: Mutex::default() }))
    }

    /// How many messages it remembers one by one, and how many senders by a mark.
    pub fn len(&self) -> usize {
        let mut state = lock(&self.0.state);
        state.forget_expired();
        state.done.len() + state.marks.len()
    }

    /// Whether it remembers nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The mark of a sender whose messages came over a queue, or within a [scope](Remember::scope).
    pub fn high_water(&self, scope: &str, sender: &str) -> Option<HighWater> {
        lock(&self.0.state).marks.get(&(scope.to_owned(), sender.to_owned())).cloned()
    }

    /// Waits no longer for these numbers of a sender, and says which of them were missing.
    pub fn give_up(
        &self,
        scope: &str,
        sender: &str,
        numbers: RangeInclusive<u64>,
    ) -> Vec<RangeInclusive<u64>> {
        let mut state = lock(&self.0.state);
        let mark = state.marks.entry((scope.to_owned(), sender.to_owned())).or_default();
        mark.give_up(numbers)
    }

    /// Begins the work, or says why not: a copy of it is at work, which can be waited for.
    fn begin(&self, known: &Known) -> Result<Opened, Busy> {
        let mut state = lock(&self.0.state);
        state.forget_expired();
        let key = match known {
            Known::Id { scope, id } => Key::Id(scope.clone(), id.clone()),
            Known::Number { scope, sender, number, .. } => {
                let mark = state.marks.entry((scope.clone(), sender.clone())).or_default();
                if mark.progress_of(*number) == Progress::GivenUp {
                    return Ok(Opened::Unknown(Unknown::GivenUp));
                }
                if !mark.has_room_for(*number) && mark.progress_of(*number) == Progress::New {
                    return Ok(Opened::Unknown(Unknown::Gaps));
                }
                Key::Number(scope.clone(), sender.clone(), *number)
            }
            Known::Old { scope, id } => {
                let done = state.is_done(&Key::Id(scope.clone(), id.clone()));
                return Ok(done.map_or(Opened::Unknown(Unknown::Forgotten), Opened::Done));
            }
            Known::Release { scope, ids } => {
                for id in ids {
                    state.release(Key::Id(scope.clone(), id.clone()), &self.0.remember);
                }
                return Ok(Opened::Released);
            }
            Known::Nothing => return Ok(Opened::New(Box::new(Unrecorded))),
            Known::Unknown(unknown) => return Ok(Opened::Unknown(*unknown)),
        };
        if let Some(reply) = state.is_done(&key) {
            return Ok(Opened::Done(reply));
        }
        if let Some(end) = state.at_work.get(&key) {
            return Err(Busy::Copy(end.clone()));
        }
        if matches!(key, Key::Id(..)) && state.done.len() + state.at_work.len() >= self.0.most {
            return Err(Busy::Full);
        }
        let (ended, end) = watch::channel(());
        state.at_work.insert(key.clone(), end);
        let given_up = match known {
            Known::Number { given_up, .. } => given_up.clone(),
            _ => None,
        };
        let inbox = Arc::clone(&self.0);
        Ok(Opened::New(Box::new(AtWork { inbox, key, given_up, _ended: ended })))
    }

    async fn open_within(&self, incoming: &Incoming) -> Result<Opened, BoxError> {
        self.open_known(&self.0.remember.read(incoming)).await
    }

    async fn open_batch_within(&self, batch: &[Incoming]) -> Result<OpenedBatch, BoxError> {
        let mut known = HashSet::new();
        let (mut works, mut messages) = (Vec::new(), Vec::new());
        for incoming in batch {
            let one = self.0.remember.read(incoming);
            // A copy of one that is part of this would wait for its end.
            let is_copy = match &one {
                Known::Id { .. } | Known::Number { .. } => !known.insert(one.clone()),
                Known::Old { scope, id } => {
                    known.contains(&Known::Id { scope: scope.clone(), id: id.clone() })
                }
                Known::Release { .. } | Known::Nothing | Known::Unknown(_) => false,
            };
            if is_copy {
                messages.push(Standing::Done);
                continue;
            }
            messages.push(match self.open_known(&one).await? {
                Opened::New(work) => {
                    works.push(work);
                    Standing::New
                }
                Opened::Done(_) => Standing::Done,
                Opened::Released => Standing::Released,
                Opened::Unknown(unknown) => Standing::Unknown(unknown),
            });
        }
        Ok(OpenedBatch { work: Box::new(Together(works)), messages })
    }

    async fn open_known(&self, known: &Known) -> Result<Opened, BoxError> {
        loop {
            match self.begin(known) {
                Ok(opened) => return Ok(opened),
                Err(Busy::Full) => return Err("the inbox is full".into()),
                // It changes when it ends: its sender is gone.
                Err(Busy::Copy(mut end)) => drop(end.changed().await),
            }
        }
    }
}

/// Why work cannot be begun now.
enum Busy {
    Copy(watch::Receiver<()>),
    Full,
}

impl Inbox for MemoryInbox {
    fn lends(&self, _argument: TypeId) -> bool {
        false
    }

    fn open<'a>(&'a self, incoming: &'a Incoming) -> Doing<'a, Opened> {
        Box::pin(async move {
            let opened = timeout(PATIENCE, self.open_within(incoming)).await;
            opened.unwrap_or_else(|_| Err("a copy of the message is still being handled".into()))
        })
    }

    fn open_batch<'a>(&'a self, batch: &'a [Incoming]) -> Doing<'a, OpenedBatch> {
        Box::pin(async move {
            let opened = timeout(PATIENCE, self.open_batch_within(batch)).await;
            opened.unwrap_or_else(|_| Err("copies of messages are still being handled".into()))
        })
    }
}

impl State {
    /// Whether it is done, and its reply.
    fn is_done(&self, key: &Key) -> Option<Option<Message>> {
        if let Some(reply) = self.done.get(key) {
            return Some(reply.clone());
        }
        let Key::Number(scope, sender, number) = key else { return None };
        let mark = self.marks.get(&(scope.clone(), sender.clone()))?;
        (mark.progress_of(*number) == Progress::Done).then_some(None)
    }

    fn keep(&mut self, key: Key, reply: Option<Message>, time: Option<Duration>) {
        if let Some(time) = time {
            self.expiring.push_back((deadline_in(time), key.clone()));
        }
        self.done.insert(key, reply);
    }

    fn release(&mut self, key: Key, remember: &Remember) {
        let Some(linger) = remember.lingers_for() else { return };
        if self.done.contains_key(&key) {
            self.expiring.push_back((deadline_in(linger), key));
        } else if self.at_work.contains_key(&key) {
            self.released.insert(key);
        }
    }

    fn forget_expired(&mut self) {
        let now = Instant::now();
        while self.expiring.front().is_some_and(|(at, _)| *at <= now) {
            self.forget_first();
        }
    }

    fn forget_first(&mut self) {
        if let Some((_, key)) = self.expiring.pop_front() {
            self.done.remove(&key);
        }
    }
}

/// A message that is being handled. Dropped, it is not: copies may be.
struct AtWork {
    inbox: Arc<Shared>,
    key: Key,
    given_up: Option<RangeInclusive<u64>>,
    _ended: watch::Sender<()>,
}

impl Work for AtWork {
    fn commit(self: Box<Self>, _changes: Changes, reply: Option<&Message>) -> Doing<'_, Report> {
        let report = self.record(reply.cloned());
        Box::pin(std::future::ready(Ok(report)))
    }
}

impl AtWork {
    fn record(&self, reply: Option<Message>) -> Report {
        let Shared { remember, most, state } = &*self.inbox;
        let mut state = lock(state);
        let time = match state.released.remove(&self.key) {
            true => remember.lingers_for(),
            false => remember.keeps_ids_for(),
        };
        let Key::Number(scope, sender, number) = &self.key else {
            state.keep(self.key.clone(), reply, time);
            return Report::default();
        };
        let mark = state.marks.entry((scope.clone(), sender.clone())).or_default();
        mark.add(*number);
        let mut report = Report::default();
        if let Some(numbers) = self.given_up.clone() {
            report.give_up(sender, mark.give_up(numbers));
        }
        report.give_up(sender, mark.settle(remember.gaps_policy()));
        if reply.is_some() {
            if state.done.len() >= *most {
                state.forget_first();
            }
            state.keep(self.key.clone(), reply, time);
        }
        report
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        let mut state = lock(&self.inbox.state);
        state.at_work.remove(&self.key);
        state.released.remove(&self.key);
    }
}

/// Messages that are handled together. In memory no commit fails, so that they are committed one by one.
struct Together(Vec<Box<dyn Work>>);

impl Work for Together {
    fn commit(self: Box<Self>, changes: Changes, _reply: Option<&Message>) -> Doing<'_, Report> {
        Box::pin(async move {
            let mut report = Report::default();
            for work in self.0 {
                report.given_up.extend(work.commit(changes, None).await?.given_up);
            }
            Ok(report)
        })
    }
}

/// A message that is handled without being remembered.
struct Unrecorded;

impl Work for Unrecorded {
    fn commit(self: Box<Self>, _changes: Changes, _reply: Option<&Message>) -> Doing<'_, Report> {
        Box::pin(std::future::ready(Ok(Report::default())))
    }
}

impl fmt::Debug for MemoryInbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { remember, most, .. } = &*self.0;
        f.debug_struct("MemoryInbox").field("remember", remember).field("most", most).finish()
    }
}
