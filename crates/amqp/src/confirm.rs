//! Confirms: each publish has exactly one [`Outcome`], and a [`Confirmation`] to await it by.
//!
//! The broker answers with numbers counted per channel, alone or as "all up to"; a message that it could not route it
//! sends back, before the ack, without a number.
//!
//! ```text
//!   publish ---------------------------> ConfirmTracker -- its entry --> Confirmation
//!   ack, nack (delivery tag) ----------> ConfirmTracker -- outcome ----> entry
//!   return (no tag) -- fingerprint ----> ConfirmTracker: whose confirm is to come
//! ```

use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use leveret_wire::{RawProperties, ReplyCode};

use super::error::Error;
use super::link::Link;
use super::lock;

mod entry;
mod fingerprint;
#[cfg(test)]
mod tests;
mod tracker;

use entry::{Entries, Entry};
pub use fingerprint::{Fingerprint, Fingerprints, Likeness};
pub use tracker::ConfirmTracker;

/// What became of a publish.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The broker has taken responsibility for the message.
    Acked,
    /// The broker could not take it. It may or may not be in some of the queues.
    Nacked,
    /// It was mandatory and reached no queue.
    Returned(Box<Returned>),
    /// The channel or connection went before the broker answered: it may have the message, or not.
    Lost(Error),
}

impl Outcome {
    /// Whether the broker has taken responsibility for the message.
    pub fn is_acked(&self) -> bool {
        matches!(self, Outcome::Acked)
    }
}

/// A message that the broker sent back.
#[derive(Clone, Debug, PartialEq)]
pub struct Returned {
    /// Why: `312 NO_ROUTE`, as a rule.
    pub reply_code: ReplyCode,
    /// Why, in the broker's words.
    pub reply_text: String,
    /// The exchange it was published to.
    pub exchange: String,
    /// The routing key it was published with.
    pub routing_key: String,
    /// Its properties.
    pub properties: RawProperties,
    /// Its body.
    pub body: Bytes,
}

/// How many publishes got which outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// The broker has taken responsibility.
    pub acked: u64,
    /// The broker could not.
    pub nacked: u64,
    /// Mandatory, and reached no queue.
    pub returned: u64,
    /// The channel or connection went before the broker answered.
    pub lost: u64,
}

/// The outcome of one publish, to be awaited at any time, or dropped.
///
/// It holds its channel open: the [`Channel`](super::Channel) itself may be dropped before.
#[must_use = "a publish is safe only once its confirmation says so"]
pub struct Confirmation {
    entry: Entry,
    _link: Arc<Link>,
}

impl Confirmation {
    #[inline]
    pub(super) fn new(entry: Entry, link: &Arc<Link>) -> Self {
        Confirmation { entry, _link: Arc::clone(link) }
    }

    /// The outcome, if there is one yet.
    #[inline]
    pub fn outcome(&self) -> Option<Outcome> {
        self.entry.outcome()
    }
}

impl Future for Confirmation {
    type Output = Outcome;

    #[inline]
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        self.entry.poll(context)
    }
}

impl fmt::Debug for Confirmation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Confirmation").field("outcome", &self.outcome()).finish_non_exhaustive()
    }
}

/// Where the reader takes the broker's answers to the publishes of a channel.
///
/// The channel has one of its own, which makes [`Confirmation`]s. A layer that keeps the messages until they are confirmed
/// brings its own, so that each publish is registered once.
pub trait ConfirmSink: fmt::Debug + Send + Sync {
    /// The broker has confirmed or rejected a delivery tag, or all up to it. The wakers are woken once nothing is locked.
    fn answered(
        &self,
        tag: u64,
        multiple: bool,
        acked: bool,
        wakers: &mut Vec<Waker>,
    ) -> Result<(), Error>;

    /// A message came back; the confirm that follows is for the same publish. Gives it back if no publish looks like it.
    fn returned(&self, returned: Returned) -> Option<Returned>;

    /// The channel is gone, and answers nothing more.
    fn lost(&self, error: &Error);

    /// From the oldest unconfirmed delivery tag to the next one.
    fn tags(&self) -> Range<u64>;
}

/// The confirms of a channel: each publish gets a [`Confirmation`].
#[derive(Debug)]
pub(super) struct Confirms {
    state: Mutex<State>,
    /// The tracker's span, stored under the lock and read without it: each publish compares it with the window.
    span: AtomicUsize,
    /// Outside of the lock, because a message is hashed before.
    pub(super) fingerprints: Fingerprints,
}

#[derive(Debug)]
struct State {
    tracker: ConfirmTracker<Unconfirmed>,
    entries: Entries,
    tally: Tally,
    /// Why nothing more is answered.
    closed: Option<Error>,
}

#[derive(Debug)]
struct Unconfirmed {
    entry: Entry,
    /// Of a mandatory publish.
    fingerprint: Option<Fingerprint>,
    /// It came back, and its confirm is to come.
    returned: Option<Box<Returned>>,
}

impl State {
    /// Gives a publish its outcome: this one, or that it came back.
    #[inline]
    fn resolve(
        entries: &mut Entries,
        tally: &mut Tally,
        unconfirmed: Unconfirmed,
        outcome: &Outcome,
    ) -> Option<Waker> {
        let Unconfirmed { entry, returned, .. } = unconfirmed;
        let outcome = returned.map_or_else(|| outcome.clone(), Outcome::Returned);
        *match &outcome {
            Outcome::Acked => &mut tally.acked,
            Outcome::Nacked => &mut tally.nacked,
            Outcome::Returned(_) => &mut tally.returned,
            Outcome::Lost(_) => &mut tally.lost,
        } += 1;
        let is_light = matches!(outcome, Outcome::Acked | Outcome::Nacked);
        let waker = entry.resolve(outcome);
        entries.resolved(entry, is_light);
        waker
    }
}

impl Confirms {
    pub(super) fn new() -> Self {
        let state = State {
            tracker: ConfirmTracker::new(),
            entries: Entries::default(),
            tally: Tally::default(),
            closed: None,
        };
        Confirms {
            state: Mutex::new(state),
            span: AtomicUsize::new(0),
            fingerprints: Fingerprints::default(),
        }
    }

    /// A message was encoded, and this is its entry. A mandatory one comes with its fingerprint.
    #[inline]
    pub(super) fn publish(&self, fingerprint: Option<Fingerprint>) -> Entry {
        let mut state = lock(&self.state);
        // The channel may go between the moment a publisher finds it open and this one.
        if let Some(error) = &state.closed {
            let lost = Outcome::Lost(error.clone());
            state.tally.lost += 1;
            return Entry::done(lost);
        }
        let entry = state.entries.next();
        let record = Unconfirmed { entry: entry.share(), fingerprint, returned: None };
        state.tracker.add(record);
        self.span.store(state.tracker.span(), Ordering::Relaxed);
        entry
    }

    /// How many publishes there are from the oldest unconfirmed one on; it may fall a moment after their outcomes are known.
    #[inline]
    pub(super) fn span(&self) -> usize {
        self.span.load(Ordering::Relaxed)
    }

    /// The same, no later than the outcomes.
    pub(super) fn exact_span(&self) -> usize {
        lock(&self.state).tracker.span()
    }

    /// How many publishes got which outcome.
    pub(super) fn tally(&self) -> Tally {
        lock(&self.state).tally
    }
}

impl ConfirmSink for Confirms {
    fn answered(
        &self,
        tag: u64,
        multiple: bool,
        acked: bool,
        wakers: &mut Vec<Waker>,
    ) -> Result<(), Error> {
        let outcome = if acked { Outcome::Acked } else { Outcome::Nacked };
        let State { tracker, entries, tally, .. } = &mut *lock(&self.state);
        let answered = tracker.answered(tag, multiple, |unconfirmed| {
            wakers.extend(State::resolve(entries, tally, unconfirmed, &outcome));
        });
        self.span.store(tracker.span(), Ordering::Relaxed);
        answered
    }

    fn returned(&self, returned: Returned) -> Option<Returned> {
        let came_back = self.fingerprints.of_returned(&returned);
        let mut state = lock(&self.state);
        let is_like = |one: &Unconfirmed, likeness| {
            one.returned.is_none()
                && one.fingerprint.is_some_and(|one| one.is_like(came_back, likeness))
        };
        match state.tracker.most_like(is_like) {
            Some(unconfirmed) => {
                unconfirmed.returned = Some(Box::new(returned));
                None
            }
            None => Some(returned),
        }
    }

    fn lost(&self, error: &Error) {
        let outcome = Outcome::Lost(error.clone());
        let wakers: Vec<Waker> = {
            let State { tracker, entries, tally, closed } = &mut *lock(&self.state);
            closed.get_or_insert_with(|| error.clone());
            self.span.store(0, Ordering::Relaxed);
            let open = tracker.drain();
            open.filter_map(|one| State::resolve(entries, tally, one, &outcome)).collect()
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    fn tags(&self) -> Range<u64> {
        lock(&self.state).tracker.tags()
    }
}
