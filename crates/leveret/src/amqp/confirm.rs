//! Confirms: each publish has exactly one [`Outcome`], and a [`Confirmation`] to await it by.
//!
//! The broker answers with numbers counted per channel, alone or as "all up to"; a message that it could not route it
//! sends back, before the ack, without a number.
//!
//! ```text
//!   publish ------------------> Ledger -- its entry --> Confirmation
//!   ack, nack (a number) -----> Ledger -- outcome ----> entry
//!   return (no number) --look--> Ledger: whose ack is to come
//! ```

use std::fmt;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::Bytes;
use leveret_wire::{RawProperties, ReplyCode};
use tokio::sync::Notify;

use super::error::Error;
use super::link::Link;
use super::lock;

mod entry;
mod ledger;
mod look;

use entry::Entry;
use ledger::Ledger;
use look::Looks;
pub(crate) use look::{Look, Visible};

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
    _link: Option<Arc<Link>>,
}

impl Confirmation {
    /// One that holds no channel: for who does that for all of its publishes, and need not for each.
    #[inline]
    pub(super) fn new(entry: Entry) -> Self {
        Confirmation { entry, _link: None }
    }

    /// The same, holding its channel open.
    #[inline]
    pub(super) fn holding(self, link: &Arc<Link>) -> Self {
        Confirmation { _link: Some(Arc::clone(link)), ..self }
    }

    /// The outcome, if there is one yet.
    #[inline]
    pub fn outcome(&self) -> Option<Outcome> {
        self.entry.outcome()
    }

    /// The outcome if it is any but [`Acked`](Outcome::Acked): for those who have something else to wait for if all goes
    /// well, and are not to be woken for it.
    #[inline]
    pub(crate) fn poll_failure(&self, context: &mut Context<'_>) -> Poll<Outcome> {
        self.entry.poll_failure(context)
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

/// The confirms of one channel: its ledger, and the ones that wait for it to empty.
#[derive(Debug)]
pub(super) struct Confirms {
    pub(super) ledger: Mutex<Ledger>,
    /// Woken whenever outcomes came.
    pub(super) progress: Notify,
    /// Outside of the ledger, so that nothing is locked while a message is looked at.
    pub(super) looks: Looks,
}

impl Confirms {
    pub(super) fn new() -> Self {
        Confirms { ledger: Mutex::new(Ledger::new()), progress: Notify::new(), looks: Looks::new() }
    }

    /// A message came back. Gives it back if no publish looks like it.
    pub(super) fn returned(&self, returned: Returned) -> Option<Returned> {
        let look = self.looks.of_returned(&returned);
        lock(&self.ledger).returned(look, returned)
    }

    /// The channel is gone: everything without an outcome is lost.
    pub(super) fn lost(&self, error: &Error) {
        let mut wakers = Vec::new();
        lock(&self.ledger).lost(error, &mut wakers);
        for waker in wakers {
            waker.wake();
        }
        self.progress.notify_waiters();
    }

    /// Waits until the ledger is as it should be.
    pub(super) async fn until(&self, is_so: impl Fn(&Ledger) -> bool) {
        loop {
            let mut progress = pin!(self.progress.notified());
            // Registered before the check, so that no wake-up falls between the two.
            progress.as_mut().enable();
            if is_so(&lock(&self.ledger)) {
                return;
            }
            progress.await;
        }
    }

    /// Waits until every publish so far has its outcome.
    pub(super) async fn until_answered(&self) {
        let next = lock(&self.ledger).next();
        self.until(|ledger| ledger.is_answered_before(next)).await;
    }
}
