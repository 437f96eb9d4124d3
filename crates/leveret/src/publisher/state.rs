//! What a publisher keeps: every message that is not confirmed yet, in the order of publishing.
//!
//! Messages are numbered. `unconfirmed` has those that went over the present channel; `lost` those that went over an earlier one
//! and are to be sent again, all of them newer. What is in neither has its outcome: confirmed, unless `failures` says otherwise.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

use super::heads::{Head, Heads, Place};
use super::ids::Ids;
use super::{OnLoss, Settings, Shared};
use crate::amqp::{
    self, Channel, ConfirmSink, ConfirmTracker, EncodedProperties, Fingerprints, Outcome,
    PlainProperties, Prepared, Properties, Returned, Tracked, lock,
};
use crate::clock;
use crate::error::{Error, ErrorKind};
use crate::telemetry::Published;
use crate::text::escape;

/// A message that may have to be sent again.
#[derive(Debug)]
struct Unconfirmed {
    number: u64,
    head: Place,
    body: Bytes,
    /// Of the task that awaits the ticket.
    waker: Option<Waker>,
    /// The ticket was dropped.
    is_abandoned: bool,
    /// It came back, and its confirm is to come.
    returned: Option<Box<Returned>>,
    /// When it was first sent, and last, in ticks of the publisher's task.
    first_sent: u32,
    last_sent: u32,
    /// How often it was sent again because no answer came.
    resent: u8,
}

/// How many ticks of the publisher's task a message may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) whole: u32,
    pub(super) resend: Option<u32>,
}

/// What a tick of the publisher's task finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    Nothing,
    /// Answers are missing for too long: the channel is not to be trusted.
    Channel,
}

/// What came of an attempt to send.
#[derive(Debug)]
pub(super) enum Attempt {
    /// With this number. `kick` says that the publisher's task sleeps, and has to watch over the message.
    Sent {
        number: u64,
        kick: bool,
    },
    /// The outbound buffer is full, or the broker takes no publishes.
    NoRoom,
    /// There is no channel now.
    NoChannel,
    Failed(amqp::Error),
}

/// Lock-free progress: a message below `oldest` is confirmed, unless some message has failed.
#[derive(Debug, Default)]
pub(super) struct Progress {
    oldest: AtomicU64,
    has_failed: AtomicBool,
}

impl Progress {
    /// Whether this message is known to be confirmed.
    #[inline]
    pub(super) fn is_confirmed(&self, number: u64) -> bool {
        number < self.oldest.load(Ordering::Acquire) && !self.has_failed.load(Ordering::Relaxed)
    }
}

/// Messages that failed, until their tickets are awaited or dropped.
#[derive(Debug)]
struct Failures {
    errors: BTreeMap<u64, Error>,
    progress: Arc<Progress>,
}

impl Failures {
    fn add(&mut self, message: Unconfirmed, error: Error, wakers: &mut Vec<Waker>) {
        if message.is_abandoned {
            unclaimed(&error);
            return;
        }
        self.errors.insert(message.number, error);
        // Known before the number is passed.
        self.progress.has_failed.store(true, Ordering::Relaxed);
        wakers.extend(message.waker);
    }

    fn take(&mut self, number: u64) -> Option<Error> {
        let error = self.errors.remove(&number)?;
        self.progress.has_failed.store(!self.errors.is_empty(), Ordering::Relaxed);
        Some(error)
    }
}

#[derive(Debug)]
pub(super) struct PublisherState {
    /// The channel to publish on, if there is one.
    pub(super) channel: Option<Arc<Channel<Tracked>>>,
    /// Counts the channels: what an earlier one answers is ignored.
    epoch: u64,
    unconfirmed: ConfirmTracker<Unconfirmed>,
    /// The first message that went over the present channel first, and its delivery tag.
    first_fresh: Option<(u64, u64)>,
    lost: VecDeque<Unconfirmed>,
    failures: Failures,
    /// The number of the next message.
    next: u64,
    /// How many places of the window are taken, from the oldest unconfirmed message on.
    taken: usize,
    /// How many of them are free again, and not given back yet.
    freed: usize,
    heads: Heads,
    identifies: bool,
    ids: Ids,
    on_loss: OnLoss,
    counts: Published,
    tick: u32,
    /// The time of day at the last tick of the publisher's task, which ticks each second as long as messages are unconfirmed: no
    /// message has to ask for it.
    timestamp: Option<u64>,
    /// The publisher's task sleeps until a message is sent.
    is_idle: bool,
    /// Why there is no channel any more, and never will be.
    ended: Option<Error>,
}

impl PublisherState {
    pub(super) fn new(settings: &Settings, progress: Arc<Progress>) -> Self {
        PublisherState {
            channel: None,
            epoch: 0,
            unconfirmed: ConfirmTracker::new(),
            first_fresh: None,
            lost: VecDeque::new(),
            failures: Failures { errors: BTreeMap::new(), progress },
            next: 0,
            taken: 0,
            freed: 0,
            heads: Heads::default(),
            identifies: settings.identifies,
            ids: Ids::new(),
            on_loss: settings.on_loss,
            counts: Published::new(&settings.exchange),
            tick: 0,
            timestamp: clock::seconds(clock::now()),
            is_idle: false,
            ended: None,
        }
    }

    /// Writes down the head of a message, with an id if it has none and is to have one, and with that a timestamp. It is to be
    /// sent next, or taken back.
    #[inline]
    pub(super) fn write<'p>(
        &'p mut self,
        properties: &mut Properties<'p>,
        routing_key: &str,
    ) -> Place {
        if self.identifies && properties.message_id.is_none() {
            self.update_time_if_idle();
            properties.timestamp = properties.timestamp.or(self.timestamp);
            properties.message_id = Some(self.ids.next());
        }
        self.heads.add(properties, routing_key)
    }

    /// The same for a message without properties of its own.
    #[inline]
    pub(super) fn write_plain(&mut self, delivery_mode: Option<u8>, routing_key: &str) -> Place {
        self.update_time_if_idle();
        let (message_id, timestamp) = (self.ids.next(), self.timestamp);
        let properties = PlainProperties { delivery_mode, message_id, timestamp };
        self.heads.add(&properties, routing_key)
    }

    /// The publisher's task does as long as messages are unconfirmed.
    #[inline]
    fn update_time_if_idle(&mut self) {
        if self.is_idle {
            self.update_time();
        }
    }

    fn update_time(&mut self) {
        self.timestamp = clock::seconds(clock::now());
    }

    /// Takes back a head that was just written down: the message was not sent.
    pub(super) fn take_back(&mut self, head: Place) -> Head {
        self.heads.take_last(head)
    }

    /// Sends a message whose head was just written down and which has a place in the window, if it need not wait.
    #[inline]
    pub(super) fn send(
        &mut self,
        settings: &Settings,
        routing_key: &str,
        head: Place,
        body: &mut Bytes,
    ) -> Attempt {
        let Some(channel) = &self.channel else { return Attempt::NoChannel };
        let properties = self.heads.properties(head);
        match publish_on(channel, settings, routing_key, properties, body) {
            Some(Ok(())) => {}
            None => return Attempt::NoRoom,
            Some(Err(error)) => return Attempt::Failed(error),
        }
        self.counts.published();
        self.taken += 1;
        let number = self.next;
        self.next += 1;
        let tag = self.unconfirmed.add(Unconfirmed {
            number,
            head,
            body: std::mem::take(body),
            waker: None,
            is_abandoned: false,
            returned: None,
            first_sent: self.tick,
            last_sent: self.tick,
            resent: 0,
        });
        self.first_fresh.get_or_insert((number, tag));
        Attempt::Sent { number, kick: std::mem::take(&mut self.is_idle) }
    }

    /// The same for a head that was taken back before. It stays with the caller if it is not sent.
    pub(super) fn send_again(
        &mut self,
        settings: &Settings,
        head: &Head,
        body: &mut Bytes,
    ) -> Attempt {
        let place = self.heads.add_again(head);
        let attempt = self.send(settings, &head.routing_key, place, body);
        if !matches!(attempt, Attempt::Sent { .. }) {
            drop(self.heads.take_last(place));
        }
        attempt
    }

    /// Why nothing more is sent.
    pub(super) fn ended(&self) -> Option<&Error> {
        self.ended.as_ref()
    }

    /// A new channel is opened: what was not confirmed on the one before is lost. Gives its epoch.
    pub(super) fn begin_epoch(&mut self, wakers: &mut Vec<Waker>) -> u64 {
        let error = amqp::Error::new(amqp::ErrorKind::ConnectionLost, "the channel is gone");
        self.lost(&error, wakers);
        self.update_time();
        self.epoch += 1;
        self.unconfirmed = ConfirmTracker::new();
        self.first_fresh = None;
        self.epoch
    }

    /// What was not confirmed on the present channel is lost.
    pub(super) fn lost(&mut self, error: &amqp::Error, wakers: &mut Vec<Waker>) {
        let mut lost = VecDeque::new();
        for mut message in self.unconfirmed.drain() {
            let outcome = match message.returned.take() {
                Some(returned) => Outcome::Returned(returned),
                None => Outcome::Lost(error.clone()),
            };
            self.counts.outcome(&outcome);
            if matches!(outcome, Outcome::Lost(_)) && self.on_loss == OnLoss::Replay {
                lost.push_back(message);
            } else {
                let error = failure(self.heads.routing_key(message.head), outcome);
                self.failures.add(message, error, wakers);
            }
        }
        lost.append(&mut self.lost);
        self.lost = lost;
        self.pass();
    }

    /// Sends the oldest lost message on a channel, and gives its number; `None` if there is none, or no room for it.
    pub(super) fn resend(
        &mut self,
        settings: &Settings,
        channel: &Channel<Tracked>,
        wakers: &mut Vec<Waker>,
    ) -> Option<Result<u64, amqp::Error>> {
        loop {
            let message = self.lost.front()?;
            let number = message.number;
            let routing_key = self.heads.routing_key(message.head);
            let properties = self.heads.properties(message.head);
            match publish_on(channel, settings, routing_key, properties, &message.body)? {
                Ok(()) => {
                    let mut message = self.lost.pop_front()?;
                    message.last_sent = self.tick;
                    self.counts.replayed();
                    self.unconfirmed.add(message);
                    return Some(Ok(number));
                }
                // This broker takes smaller frames than the one before.
                Err(error) if error.kind() == amqp::ErrorKind::InvalidArgument => {
                    let error = lost(routing_key, error);
                    self.fail(number, error, wakers);
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }

    pub(super) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// A message cannot be sent.
    pub(super) fn fail(&mut self, number: u64, error: Error, wakers: &mut Vec<Waker>) {
        let failures = &mut self.failures;
        self.unconfirmed.remove_if(
            |message| message.number == number,
            |message| failures.add(message, error.clone(), wakers),
        );
        if let Ok(index) = self.lost.binary_search_by_key(&number, |message| message.number)
            && let Some(message) = self.lost.remove(index)
        {
            failures.add(message, error.clone(), wakers);
        }
        self.pass();
    }

    /// The same for a message that closed its channel, with the channel's error.
    pub(super) fn blame(&mut self, number: u64, error: &amqp::Error, wakers: &mut Vec<Waker>) {
        let error = match self.find(number).map(|message| message.head) {
            Some(head) => lost(self.heads.routing_key(head), error.clone()),
            None => return,
        };
        self.fail(number, error, wakers);
    }

    /// What was lost is not to be sent again.
    pub(super) fn fail_lost(&mut self, error: &Error, wakers: &mut Vec<Waker>) {
        for message in self.lost.drain(..) {
            self.failures.add(message, error.clone(), wakers);
        }
        self.pass();
    }

    /// There will be no channel any more. Gives the last one, which is to be dropped once nothing is locked.
    pub(super) fn end(
        &mut self,
        error: &Error,
        wakers: &mut Vec<Waker>,
    ) -> Option<Arc<Channel<Tracked>>> {
        self.ended = Some(error.clone());
        for message in self.unconfirmed.drain() {
            self.failures.add(message, error.clone(), wakers);
        }
        self.fail_lost(error, wakers);
        self.channel.take()
    }

    /// Whether the publisher's task may sleep until a message is sent.
    pub(super) fn rest(&mut self) -> bool {
        self.is_idle = self.unanswered() == 0;
        self.is_idle
    }

    /// A tick of the publisher's task. What takes too long fails.
    pub(super) fn tick(
        &mut self,
        patience: Patience,
        late: impl Fn() -> Error,
        wakers: &mut Vec<Waker>,
    ) -> Overdue {
        self.tick = self.tick.wrapping_add(1);
        self.update_time();
        let (tick, failures) = (self.tick, &mut self.failures);
        let is_late =
            |message: &Unconfirmed| tick.wrapping_sub(message.first_sent) > patience.whole;
        let mut overdue = Overdue::Nothing;
        self.unconfirmed.remove_if(is_late, |message| {
            overdue = Overdue::Channel;
            failures.add(message, late(), wakers);
        });
        for message in self.unconfirmed.iter_mut() {
            if let Some(resend) = patience.resend
                && tick.wrapping_sub(message.last_sent) > resend << message.resent.min(16)
            {
                message.resent = message.resent.saturating_add(1);
                overdue = Overdue::Channel;
            }
        }
        let (late_ones, lost): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.lost).into_iter().partition(is_late);
        self.lost = lost;
        for message in late_ones {
            failures.add(message, late(), wakers);
        }
        self.pass();
        overdue
    }

    /// How many places of the window are free again.
    pub(super) fn take_freed(&mut self) -> usize {
        std::mem::take(&mut self.freed)
    }

    /// The publisher was dropped: answers of the present channel are ignored from now on.
    pub(super) fn forget_channel(&mut self) {
        self.epoch += 1;
    }

    /// The number that the next message will have.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    pub(super) fn is_answered_before(&self, number: u64) -> bool {
        self.oldest().is_none_or(|oldest| oldest.number >= number)
    }

    /// How many messages have no outcome.
    pub(super) fn unanswered(&self) -> usize {
        self.unconfirmed.unconfirmed() + self.lost.len()
    }

    /// For how many ticks of the publisher's task the oldest message without an outcome has waited for it.
    pub(super) fn oldest_wait(&self) -> u32 {
        self.oldest().map_or(0, |oldest| self.tick.wrapping_sub(oldest.first_sent))
    }

    #[inline]
    fn oldest(&self) -> Option<&Unconfirmed> {
        self.unconfirmed.oldest().or(self.lost.front())
    }

    /// The oldest messages may have got their outcomes: tells how far that is, and lets go of their heads and places.
    #[inline]
    fn pass(&mut self) {
        let taken = self.unconfirmed.span() + self.lost.len();
        self.freed += self.taken - taken;
        self.taken = taken;
        let oldest = self.oldest().map(|oldest| (oldest.number, oldest.head));
        let number = oldest.map_or(self.next, |(number, _)| number);
        self.failures.progress.oldest.store(number, Ordering::Release);
        self.heads.forget_before(oldest.map(|(_, head)| head));
    }

    /// A message that has no outcome yet.
    #[inline]
    fn find(&mut self, number: u64) -> Option<&mut Unconfirmed> {
        if let Ok(index) = self.lost.binary_search_by_key(&number, |message| message.number) {
            return self.lost.get_mut(index);
        }
        match self.first_fresh {
            Some((first, tag)) if number >= first => {
                let index = (tag + (number - first)).checked_sub(self.unconfirmed.tags().start)?;
                self.unconfirmed.get_mut(index as usize)
            }
            // It was sent again, as others that were not confirmed before.
            _ if number < self.unconfirmed.oldest()?.number => None,
            _ => {
                let mut from = self.unconfirmed.iter_mut().skip_while(|one| one.number < number);
                from.next().filter(|message| message.number == number)
            }
        }
    }

    /// The outcome of a message, to the holder of its ticket. What it gives besides is to be dropped once nothing is locked.
    #[inline]
    pub(super) fn poll(
        &mut self,
        number: u64,
        context: &Context<'_>,
    ) -> (Poll<Result<(), Error>>, Option<Waker>) {
        let Some(message) = self.find(number) else {
            return (Poll::Ready(self.failures.take(number).map_or(Ok(()), Err)), None);
        };
        let stale = match &message.waker {
            Some(waker) if waker.will_wake(context.waker()) => None,
            _ => message.waker.replace(context.waker().clone()),
        };
        (Poll::Pending, stale)
    }

    /// The ticket of this message was dropped. If it fails, the log has to do. What it gives is to be dropped once nothing is
    /// locked.
    pub(super) fn abandon(&mut self, number: u64) -> Option<Waker> {
        match self.find(number) {
            Some(message) => {
                message.is_abandoned = true;
                message.waker.take()
            }
            None => {
                if let Some(error) = self.failures.take(number) {
                    unclaimed(&error);
                }
                None
            }
        }
    }

    fn answered(
        &mut self,
        tag: u64,
        multiple: bool,
        acked: bool,
        wakers: &mut Vec<Waker>,
    ) -> Result<(), amqp::Error> {
        let PublisherState { unconfirmed, failures, heads, counts, .. } = self;
        unconfirmed.answered(tag, multiple, |mut message| {
            let outcome = match (message.returned.take(), acked) {
                (Some(returned), _) => Outcome::Returned(returned),
                (None, true) => Outcome::Acked,
                (None, false) => Outcome::Nacked,
            };
            counts.outcome(&outcome);
            if outcome.is_acked() {
                wakers.extend(message.waker);
            } else {
                let error = failure(heads.routing_key(message.head), outcome);
                failures.add(message, error, wakers);
            }
        })?;
        self.pass();
        Ok(())
    }

    /// A message came back; see [`Likeness`].
    fn returned(&mut self, returned: Returned) -> Option<Returned> {
        let prints = Fingerprints::default();
        let came_back = prints.of_returned(&returned);
        let PublisherState { unconfirmed, heads, .. } = self;
        let is_like = |one: &Unconfirmed, likeness| {
            let routing_key = heads.routing_key(one.head);
            one.returned.is_none()
                && routing_key == returned.routing_key
                && prints
                    .of(&returned.exchange, routing_key, &heads.decoded(one.head), &one.body)
                    .is_like(came_back, likeness)
        };
        match unconfirmed.most_like(is_like) {
            Some(message) => {
                message.returned = Some(Box::new(returned));
                None
            }
            None => Some(returned),
        }
    }
}

#[inline]
fn publish_on(
    channel: &Channel<Tracked>,
    settings: &Settings,
    routing_key: &str,
    properties: EncodedProperties<'_>,
    body: &Bytes,
) -> Option<Result<(), amqp::Error>> {
    channel.publish_now(Prepared {
        exchange: &settings.exchange,
        routing_key,
        mandatory: settings.mandatory,
        properties: &properties,
        body,
    })
}

/// Takes the answers to what went over one channel.
#[derive(Debug)]
pub(super) struct ChannelSink {
    shared: Weak<Shared>,
    epoch: u64,
}

impl ChannelSink {
    pub(super) fn new(shared: &Arc<Shared>, epoch: u64) -> Arc<Self> {
        Arc::new(ChannelSink { shared: Arc::downgrade(shared), epoch })
    }

    /// The publisher's state, if this is its present channel.
    fn with<T>(&self, use_it: impl FnOnce(&mut PublisherState) -> T) -> Option<T> {
        let shared = self.shared.upgrade()?;
        let mut state = lock(&shared.state);
        if state.epoch != self.epoch {
            return None;
        }
        let used = use_it(&mut state);
        let freed = state.take_freed();
        drop(state);
        shared.window.add_permits(freed);
        Some(used)
    }
}

impl ConfirmSink for ChannelSink {
    fn answered(
        &self,
        tag: u64,
        multiple: bool,
        acked: bool,
        wakers: &mut Vec<Waker>,
    ) -> Result<(), amqp::Error> {
        self.with(|state| state.answered(tag, multiple, acked, wakers)).unwrap_or(Ok(()))
    }

    fn returned(&self, returned: Returned) -> Option<Returned> {
        self.with(|state| state.returned(returned)).flatten()
    }

    fn lost(&self, error: &amqp::Error) {
        let mut wakers = Vec::new();
        self.with(|state| state.lost(error, &mut wakers));
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Of a channel that is not the present one any more, nothing is unconfirmed.
    fn tags(&self) -> Range<u64> {
        const NONE: Range<u64> = u64::MAX..u64::MAX;
        let shared = self.shared.upgrade();
        let state = shared.as_ref().map(|shared| lock(&shared.state));
        state
            .filter(|state| state.epoch == self.epoch)
            .map_or(NONE, |state| state.unconfirmed.tags())
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
