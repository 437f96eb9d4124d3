//! The book: every message that is not confirmed yet, in the order of publishing.
//!
//! Messages are numbered. Those from `base` on are held here; what is before has its outcome: confirmed, unless `failed`
//! says otherwise. So a message that is confirmed leaves nothing behind.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

use super::heads::{Head, Heads, Place};
use super::ids::Ids;
use super::{OnLoss, Settings};
use crate::amqp::{self, Confirmation, EncodedProperties, Outcome, PlainProperties, Properties};
use crate::clock;
use crate::error::{Error, ErrorKind};
use crate::telemetry::Published;
use crate::text::escape;

/// How many messages are entered until the book is looked through for those that nobody has awaited.
const DROP_EVERY: u64 = 16;

/// A message that may have to be sent again.
#[derive(Debug)]
struct Held {
    head: Place,
    body: Bytes,
    state: State,
    /// Whoever awaits the outcome.
    waker: Option<Waker>,
    /// Nobody has asked for the outcome and nobody will.
    abandoned: bool,
    /// When it was first sent, and last, in ticks of the keeper.
    first_sent: u32,
    last_sent: u32,
    /// How often it was sent again because no answer came.
    resent: u8,
}

#[derive(Debug)]
enum State {
    Sent(Confirmation),
    /// Its channel went; it is to be sent again.
    Lost,
    Failed(Error),
    /// Its outcome was handed out.
    Done,
}

/// What the broker's answers become outcomes by.
#[derive(Debug)]
struct Answering {
    heads: Heads,
    on_loss: OnLoss,
    counts: Published,
}

impl Held {
    /// Resolves what the broker has answered.
    #[inline]
    fn look(&mut self, answering: &Answering) {
        if let State::Sent(confirmation) = &self.state
            && let Some(outcome) = confirmation.outcome()
        {
            self.resolve(outcome, answering);
        }
    }

    #[inline]
    fn resolve(&mut self, outcome: Outcome, answering: &Answering) {
        answering.counts.outcome(&outcome);
        self.state = match outcome {
            Outcome::Acked => State::Done,
            Outcome::Lost(_) if answering.on_loss == OnLoss::Replay => State::Lost,
            other => State::Failed(failure(answering.heads.routing_key(self.head), other)),
        };
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// What to send again.
#[derive(Debug)]
pub(super) struct Again {
    pub(super) number: u64,
    head: Head,
    pub(super) body: Bytes,
}

impl Again {
    pub(super) fn properties(&self) -> Properties<'_> {
        self.head.properties()
    }

    pub(super) fn routing_key(&self) -> &str {
        &self.head.routing_key
    }
}

/// How many ticks of the keeper a message may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) whole: u32,
    pub(super) resend: Option<u32>,
}

/// What the keeper finds when it looks at its watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    Nothing,
    /// Answers are missing for too long: the channel is not to be trusted.
    Channel,
}

/// What is known of a book without locking it: whoever awaits one message after the other finds most of them confirmed.
#[derive(Debug, Default)]
pub(super) struct Progress {
    base: AtomicU64,
    /// Not all that have their outcomes were confirmed.
    has_failed: AtomicBool,
}

impl Progress {
    /// Whether this message is known to be confirmed.
    #[inline]
    pub(super) fn is_confirmed(&self, number: u64) -> bool {
        number < self.base.load(Ordering::Acquire) && !self.has_failed.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
pub(super) struct Book {
    base: u64,
    held: VecDeque<Held>,
    failed: BTreeMap<u64, Error>,
    progress: Arc<Progress>,
    answering: Answering,
    identifies: bool,
    ids: Ids,
    /// The channel that messages go over, by its number.
    epoch: u64,
    tick: u32,
    /// The time of day when the keeper has last looked at its watch, which it does each second as long as messages are held: no
    /// message has to look itself.
    timestamp: Option<u64>,
    /// The keeper sleeps until something is entered.
    is_idle: bool,
    /// Why there is no channel any more, and never will be.
    ended: Option<Error>,
}

impl Book {
    pub(super) fn new(settings: &Settings, progress: Arc<Progress>) -> Self {
        let counts = Published::new(&settings.exchange);
        let on_loss = settings.on_loss;
        Book {
            base: 0,
            held: VecDeque::new(),
            failed: BTreeMap::new(),
            progress,
            answering: Answering { heads: Heads::default(), on_loss, counts },
            identifies: settings.identifies,
            ids: Ids::new(),
            epoch: 0,
            tick: 0,
            timestamp: clock::seconds(clock::now()),
            is_idle: false,
            ended: None,
        }
    }

    /// Writes down the head of a message, with an id if it has none and is to have one, and with that a timestamp. It is to be
    /// entered next, or taken back.
    #[inline]
    pub(super) fn write<'p>(
        &'p mut self,
        properties: &mut Properties<'p>,
        routing_key: &str,
    ) -> Place {
        self.drop_now_and_then();
        if self.identifies && properties.message_id.is_none() {
            self.look_if_nobody_does();
            properties.timestamp = properties.timestamp.or(self.timestamp);
            properties.message_id = Some(self.ids.next());
        }
        self.answering.heads.add(properties, routing_key)
    }

    /// The same for a message that has nothing to say.
    #[inline]
    pub(super) fn write_plain(
        &mut self,
        delivery_mode: Option<u8>,
        routing_key: &str,
    ) -> (Place, PlainProperties<'_>) {
        self.drop_now_and_then();
        self.look_if_nobody_does();
        let (message_id, timestamp) = (self.ids.next(), self.timestamp);
        let properties = PlainProperties { delivery_mode, message_id, timestamp };
        (self.answering.heads.add(&properties, routing_key), properties)
    }

    #[inline]
    fn drop_now_and_then(&mut self) {
        if self.next().is_multiple_of(DROP_EVERY) {
            self.drop_answered();
        }
    }

    /// The keeper does as long as messages are held.
    #[inline]
    fn look_if_nobody_does(&mut self) {
        if self.is_idle {
            self.look_at_the_time();
        }
    }

    fn look_at_the_time(&mut self) {
        self.timestamp = clock::seconds(clock::now());
    }

    /// Writes down a head that was taken back.
    pub(super) fn write_again(&mut self, head: &Head) -> Place {
        self.drop_answered();
        self.answering.heads.add_again(head)
    }

    /// The properties that were just written down.
    #[inline]
    pub(super) fn written(&self, head: Place) -> EncodedProperties<'_> {
        self.answering.heads.properties(head)
    }

    /// Takes back a head that was just written down: the message was not sent.
    pub(super) fn take_back(&mut self, head: Place) -> Head {
        self.answering.heads.take_last(head)
    }

    /// Enters a message whose head was just written down, and that was sent over the channel of this epoch. Gives its
    /// number, and whether the keeper is to be woken.
    #[inline]
    pub(super) fn enter(
        &mut self,
        head: Place,
        body: Bytes,
        confirmation: Confirmation,
        epoch: u64,
    ) -> (u64, bool) {
        self.answering.counts.published();
        let number = self.next();
        self.held.push_back(Held {
            head,
            body,
            state: State::Sent(confirmation),
            waker: None,
            abandoned: false,
            first_sent: self.tick,
            last_sent: self.tick,
            resent: 0,
        });
        // One that went over a channel that is gone by now would be overlooked.
        let kick = self.is_idle || epoch != self.epoch;
        self.is_idle = false;
        (number, kick)
    }

    /// The number that the next message will have.
    pub(super) fn next(&self) -> u64 {
        self.base + self.held.len() as u64
    }

    /// Forgets the oldest ones as far as they are answered.
    #[inline]
    fn drop_answered(&mut self) {
        let base = self.base;
        while let Some(front) = self.held.front_mut() {
            front.look(&self.answering);
            match &front.state {
                State::Sent(_) | State::Lost => break,
                State::Done => {}
                State::Failed(error) if front.abandoned => unclaimed(error),
                State::Failed(error) => {
                    self.failed.insert(self.base, error.clone());
                    // Known before the number is passed.
                    self.progress.has_failed.store(true, Ordering::Relaxed);
                }
            }
            front.wake();
            self.held.pop_front();
            self.base += 1;
        }
        if self.base != base {
            self.progress.base.store(self.base, Ordering::Release);
            self.answering.heads.forget_before(self.held.front().map(|front| front.head));
        }
    }

    pub(super) fn unanswered(&mut self) -> usize {
        self.drop_answered();
        self.held.iter().filter(|held| matches!(held.state, State::Sent(_) | State::Lost)).count()
    }

    /// For how many ticks of the keeper the oldest message without an outcome has waited for it.
    pub(super) fn oldest_wait(&mut self) -> u32 {
        self.drop_answered();
        self.held.front().map_or(0, |oldest| self.tick.wrapping_sub(oldest.first_sent))
    }

    pub(super) fn is_answered_before(&mut self, number: u64) -> bool {
        self.drop_answered();
        let count = number.saturating_sub(self.base) as usize;
        let mut before = self.held.iter_mut().take(count);
        before.all(|held| {
            held.look(&self.answering);
            !matches!(held.state, State::Sent(_) | State::Lost)
        })
    }

    /// The outcome of a message, to whoever holds its ticket.
    #[inline]
    pub(super) fn poll(
        &mut self,
        number: u64,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Error>> {
        let Some(index) = number.checked_sub(self.base) else {
            return Poll::Ready(self.take_failed(number).map_or(Ok(()), Err));
        };
        let Some(held) = self.held.get_mut(index as usize) else {
            // There is no ticket for a number that was not given out.
            return Poll::Ready(Err(Error::closed("the publisher")));
        };
        if let State::Sent(confirmation) = &mut held.state
            && let Poll::Ready(outcome) = Pin::new(confirmation).poll(context)
        {
            held.resolve(outcome, &self.answering);
        }
        let outcome = match std::mem::replace(&mut held.state, State::Done) {
            State::Done => Ok(()),
            State::Failed(error) => Err(error),
            waiting @ (State::Sent(_) | State::Lost) => {
                held.state = waiting;
                match &held.waker {
                    Some(waker) if waker.will_wake(context.waker()) => {}
                    _ => held.waker = Some(context.waker().clone()),
                }
                return Poll::Pending;
            }
        };
        held.waker = None;
        if index == 0 {
            self.drop_answered();
        }
        Poll::Ready(outcome)
    }

    /// Why a message of which nothing else is left failed, if it did.
    fn take_failed(&mut self, number: u64) -> Option<Error> {
        let failed = self.failed.remove(&number)?;
        self.progress.has_failed.store(!self.failed.is_empty(), Ordering::Relaxed);
        Some(failed)
    }

    /// Nobody will ask for the outcome of this one. If it fails, the log has to do.
    pub(super) fn abandon(&mut self, number: u64) {
        match number.checked_sub(self.base) {
            None => {
                if let Some(error) = self.take_failed(number) {
                    unclaimed(&error);
                }
            }
            Some(index) => {
                if let Some(held) = self.held.get_mut(index as usize) {
                    (held.abandoned, held.waker) = (true, None);
                }
            }
        }
    }

    /// A new channel: from now on, what went over the old one and is not answered is lost.
    pub(super) fn begin_epoch(&mut self) -> u64 {
        self.look_at_the_time();
        self.epoch += 1;
        self.epoch
    }

    /// The first message from this number on that has to be sent again.
    pub(super) fn lost_from(&mut self, number: u64) -> Option<Again> {
        let skip = number.saturating_sub(self.base) as usize;
        let (base, answering) = (self.base, &self.answering);
        let mut held = self.held.iter_mut().enumerate().skip(skip);
        held.find_map(|(index, held)| {
            held.look(answering);
            if !matches!(held.state, State::Lost) {
                // Whoever awaits it learns the outcome.
                held.wake_if_answered();
                return None;
            }
            Some(Again {
                number: base + index as u64,
                head: answering.heads.copy(held.head),
                body: held.body.clone(),
            })
        })
    }

    /// It was sent again.
    pub(super) fn sent_again(&mut self, number: u64, confirmation: Confirmation) {
        let tick = self.tick;
        if let Some(held) = self.lost(number) {
            held.state = State::Sent(confirmation);
            held.last_sent = tick;
            held.wake();
            self.answering.counts.replayed();
        }
    }

    /// It cannot be sent.
    pub(super) fn fail(&mut self, number: u64, error: Error) {
        if let Some(held) = self.lost(number) {
            held.state = State::Failed(error);
            held.wake();
        }
        self.drop_answered();
    }

    /// A message that has no outcome yet.
    fn lost(&mut self, number: u64) -> Option<&mut Held> {
        let held = self.held.get_mut(number.checked_sub(self.base)? as usize)?;
        held.look(&self.answering);
        matches!(held.state, State::Lost).then_some(held)
    }

    /// What was lost is not to be sent again.
    pub(super) fn fail_lost(&mut self, error: &Error) {
        for held in &mut self.held {
            held.look(&self.answering);
            if matches!(held.state, State::Lost) {
                held.state = State::Failed(error.clone());
                held.wake();
            }
        }
        self.drop_answered();
    }

    /// There will be no channel any more.
    pub(super) fn end(&mut self, error: &Error) {
        self.ended = Some(error.clone());
        for held in &mut self.held {
            held.look(&self.answering);
            if matches!(held.state, State::Sent(_) | State::Lost) {
                held.state = State::Failed(error.clone());
            }
            held.wake();
        }
        self.drop_answered();
    }

    /// Why nothing is entered any more, because nobody would look after it.
    pub(super) fn ended(&self) -> Option<&Error> {
        self.ended.as_ref()
    }

    /// Whether the keeper may sleep until something is entered.
    pub(super) fn rest(&mut self) -> bool {
        self.drop_answered();
        self.is_idle = self.held.is_empty();
        self.is_idle
    }

    /// A tick of the keeper's watch has passed. What took too long fails.
    pub(super) fn tick(&mut self, patience: Patience, what: impl Fn() -> Error) -> Overdue {
        self.tick = self.tick.wrapping_add(1);
        self.look_at_the_time();
        self.drop_answered();
        let mut overdue = Overdue::Nothing;
        for held in &mut self.held {
            held.look(&self.answering);
            let is_sent = match held.state {
                State::Sent(_) => true,
                State::Lost => false,
                State::Failed(_) | State::Done => continue,
            };
            if self.tick.wrapping_sub(held.first_sent) > patience.whole {
                held.state = State::Failed(what());
                held.wake();
                overdue = if is_sent { Overdue::Channel } else { overdue };
            } else if let Some(resend) = patience.resend
                && is_sent
                && self.tick.wrapping_sub(held.last_sent) > resend << held.resent.min(16)
            {
                held.resent = held.resent.saturating_add(1);
                overdue = Overdue::Channel;
            }
        }
        self.drop_answered();
        overdue
    }
}

impl Held {
    fn wake_if_answered(&mut self) {
        if matches!(self.state, State::Done | State::Failed(_)) {
            self.wake();
        }
    }
}

/// Why a publish failed, for its caller.
fn failure(routing_key: &str, outcome: Outcome) -> Error {
    let key = format!("the message with key {routing_key:?}");
    match outcome {
        Outcome::Returned(returned) => {
            let to = match returned.exchange.as_str() {
                "" => "the default exchange".to_owned(),
                exchange => format!("exchange {exchange:?}"),
            };
            let why = amqp::close_reason(returned.reply_code, &returned.reply_text, 0, 0);
            let why = escape(&why);
            Error::unroutable(format!("{key} reached no queue from {to} ({why})"), returned)
        }
        Outcome::Lost(error) => lost(routing_key, error),
        Outcome::Nacked | Outcome::Acked => {
            let text =
                format!("the broker could not take {key}: a queue is full, or its node failed");
            Error::new(ErrorKind::Nacked, text)
        }
    }
}

pub(super) fn lost(routing_key: &str, error: amqp::Error) -> Error {
    Error::from_amqp(format!("the message with key {routing_key:?} was not confirmed"), error)
}

/// A message failed whose publisher does not ask.
fn unclaimed(error: &Error) {
    tracing::error!("a message was published and not awaited, and failed: {error}");
}
