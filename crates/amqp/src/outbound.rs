//! The connection's outbound buffer: callers encode into it, the writer takes it whole.
//!
//! ```text
//!   callers --encode, one short lock--> buffer --swap--> writer --one system call--> socket
//! ```
//!
//! No message wakes the writer by itself: it is woken when the buffer stops being empty, and takes all that
//! has gathered by the time it runs.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Buf;
use leveret_wire::method::basic;
use leveret_wire::{FrameMax, Outbound};
use tokio::sync::Notify;
use tokio::time::timeout_at;

use super::error::{Error, ErrorKind};
use super::handshake::deadline_in;
use super::lock;

/// From here on, publishers wait until the writer has taken the buffer. Enough to keep a socket busy for some
/// milliseconds, little enough not to be missed. Acks and other methods do not wait: what has been delivered, or
/// how many calls are under way, bounds them.
const HIGH_WATER_MARK: usize = 512 * 1024;

/// A write so soon after a small one is delayed once, because more is likely to come: many tasks answer what came with one read. Messages
/// that are sent one at a time are further apart.
const SOON: Duration = Duration::from_micros(30);

/// After delays without effect, at least one write of two to this power is still delayed.
const MAX_BACKOFF: u32 = 6;

/// How many acks wait for company while the reader still has something to read. What a broker sends as fast as it can is
/// acked in few writes; it never waits for these acks, because the reader then has nothing left to read.
const HELD_ACKS: usize = 64;

/// Where callers put frames and the writer gets them.
#[derive(Debug)]
pub(super) struct Sender {
    state: Mutex<State>,
    /// Wakes publishers that wait for room.
    room: Notify,
    /// Wakes whoever waits for the end.
    closing: Notify,
    frame_max: FrameMax,
}

#[derive(Debug, Default)]
struct State {
    outbound: Outbound,
    /// An ack that may yet grow by the next one.
    ack: Option<(u16, basic::Ack)>,
    /// The reader has something to read at once, so acks may wait.
    reading: bool,
    /// How many acks wait.
    held: usize,
    /// The broker asked for no more publishes, and why.
    blocked: Option<String>,
    /// Nothing more is taken, and why.
    closed: Option<Error>,
    /// The writer, while it waits.
    writer: Option<Waker>,
    /// There is more than acks to write.
    has_frames: bool,
    /// How many publishes are likely to come at once, see [`Sender::expect`].
    expected: usize,
    backoff: FlushBackoff,
    /// How many publishes there were.
    published: u64,
}

/// Decides which writes are delayed for expected publishes. A delay costs a turn of the runtime: the more delays in a row had no effect,
/// the fewer writes are delayed.
#[derive(Debug, Default)]
struct FlushBackoff {
    /// How many delays in a row had no effect.
    without_effect: u32,
    /// How many writes are not delayed before the next one that is.
    skipped: u32,
}

impl FlushBackoff {
    /// Whether to delay this write.
    fn allows_delay(&mut self) -> bool {
        let is_allowed = self.skipped == 0;
        self.skipped = self.skipped.saturating_sub(1);
        is_allowed
    }

    /// A write was delayed. The delay had an effect if a publish came meanwhile.
    fn delayed(&mut self, had_effect: bool) {
        self.without_effect =
            if had_effect { 0 } else { (self.without_effect + 1).min(MAX_BACKOFF) };
        self.skipped = (1 << self.without_effect) - 1;
    }
}

impl Sender {
    pub(super) fn new(frame_max: FrameMax) -> Self {
        Sender { state: Mutex::default(), room: Notify::new(), closing: Notify::new(), frame_max }
    }

    pub(super) fn frame_max(&self) -> FrameMax {
        self.frame_max
    }

    /// Encodes frames that do not wait for room.
    pub(super) fn send<T>(
        &self,
        encode: impl FnOnce(&mut Outbound, FrameMax) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let state = lock(&self.state);
        state.check_open()?;
        self.encode(state, encode)
    }

    /// Encodes the frames of a publish, if there is room and the broker lets us. `None` if one would have to wait.
    #[inline]
    pub(super) fn publish_now<T>(
        &self,
        paused: &AtomicU8,
        encode: impl FnOnce(&mut Outbound, FrameMax) -> Result<T, Error>,
    ) -> Option<Result<T, Error>> {
        let mut state = lock(&self.state);
        if let Err(error) = state.check_open() {
            return Some(Err(error));
        }
        if !state.has_room(paused) {
            return None;
        }
        state.expected = state.expected.saturating_sub(1);
        state.published += 1;
        Some(self.encode(state, encode))
    }

    /// Hints that so many woken tasks may publish soon, so the writer yields once before it writes. Without that, callers in tasks cost
    /// more than twice the CPU time: `leveret-bench rpc --in-flight 100 --job tasks`.
    pub(super) fn expect(&self, publishes: usize) {
        lock(&self.state).expected += publishes;
    }

    /// Encodes the frames of a publish, once there is room and the broker lets us. `paused` says that it does not
    /// let us on this channel.
    ///
    /// Nothing is encoded if this is cancelled or out of patience.
    #[inline]
    pub(super) async fn publish<T>(
        &self,
        patience: Duration,
        paused: &AtomicU8,
        encode: impl FnOnce(&mut Outbound, FrameMax) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let deadline = deadline_in(patience);
        loop {
            self.until_room(deadline, patience, paused).await?;
            let mut state = lock(&self.state);
            state.check_open()?;
            if state.has_room(paused) {
                state.published += 1;
                return self.encode(state, encode);
            }
        }
    }

    /// Waits until there is room for a publish and the broker lets us; up to the deadline, which was so far away.
    pub(super) async fn until_room(
        &self,
        deadline: tokio::time::Instant,
        patience: Duration,
        paused: &AtomicU8,
    ) -> Result<(), Error> {
        let wait = async {
            loop {
                let mut room = pin!(self.room.notified());
                // Registered before the check, so that no wake-up falls between the two.
                room.as_mut().enable();
                {
                    let state = lock(&self.state);
                    state.check_open()?;
                    if state.has_room(paused) {
                        return Ok(());
                    }
                }
                room.await;
            }
        };
        match timeout_at(deadline, wait).await {
            Ok(result) => result,
            Err(_) => Err(self.out_of_patience(patience, paused)),
        }
    }

    #[cold]
    fn out_of_patience(&self, patience: Duration, paused: &AtomicU8) -> Error {
        let reason = match &lock(&self.state).blocked {
            Some(reason) => format!("the broker blocks publishing ({reason})"),
            None if paused.load(Ordering::Relaxed) != 0 => {
                "the broker pauses the channel, or does not answer a commit".to_owned()
            }
            None => "the broker does not take what was published before".to_owned(),
        };
        let text = format!("a publish waited for {patience:?}: {reason}");
        Error::new(ErrorKind::Timeout, text)
    }

    #[inline]
    fn encode<T>(
        &self,
        mut state: MutexGuard<'_, State>,
        encode: impl FnOnce(&mut Outbound, FrameMax) -> Result<T, Error>,
    ) -> Result<T, Error> {
        state.flush_ack(self.frame_max);
        let result = encode(&mut state.outbound, self.frame_max);
        // Nothing is encoded if the channel is closed.
        state.has_frames |= state.outbound.has_remaining();
        self.wake_writer(state);
        result
    }

    /// Acks a delivery, or all up to it. `grows` says that all before it on its channel are settled: then it
    /// and the ack before it become one, if that one is still here.
    pub(super) fn ack(
        &self,
        channel: u16,
        ack: basic::Ack,
        grows: bool,
        check: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut state = lock(&self.state);
        state.check_open()?;
        check()?;
        match &mut state.ack {
            Some((on, last))
                if grows && *on == channel && last.delivery_tag + 1 == ack.delivery_tag =>
            {
                *last = basic::Ack { multiple: true, ..ack };
            }
            _ => {
                state.flush_ack(self.frame_max);
                state.ack = Some((channel, ack));
            }
        }
        state.held += 1;
        if state.is_due() {
            self.wake_writer(state);
        }
        Ok(())
    }

    /// Whether the reader has something to read at once. If not, acks that waited go out: the writer, which shares a task with
    /// the reader and has its turn after it, finds them.
    pub(super) fn set_reading(&self, reading: bool) {
        lock(&self.state).reading = reading;
    }

    fn wake_writer(&self, mut state: MutexGuard<'_, State>) {
        if let Some(writer) = state.writer.take() {
            drop(state);
            writer.wake();
        }
    }

    /// The broker asks for no more publishes, or for more again.
    pub(super) fn set_blocked(&self, reason: Option<String>) {
        lock(&self.state).blocked = reason;
        self.room.notify_waiters();
    }

    /// A channel is no longer paused: those who wait for room may find some.
    pub(super) fn look_again(&self) {
        self.room.notify_waiters();
    }

    /// Whether frames wait for the writer.
    pub(super) fn has_backlog(&self) -> bool {
        lock(&self.state).outbound.has_remaining()
    }

    /// Whether anything more is taken.
    pub(super) fn is_open(&self) -> bool {
        lock(&self.state).closed.is_none()
    }

    /// Why nothing more is taken, if so.
    pub(super) fn closed(&self) -> Option<Error> {
        lock(&self.state).closed.clone()
    }

    /// Takes nothing more from anyone but `last`, which is encoded as the last thing that is sent.
    pub(super) fn close(&self, error: Error, last: impl FnOnce(&mut Outbound, FrameMax)) {
        let mut state = lock(&self.state);
        if state.closed.is_none() {
            state.flush_ack(self.frame_max);
            last(&mut state.outbound, self.frame_max);
            state.closed = Some(error);
        }
        self.wake_writer(state);
        self.room.notify_waiters();
        self.closing.notify_waiters();
    }

    /// Waits until nothing more is taken.
    pub(super) async fn until_closed(&self) {
        loop {
            let mut closing = pin!(self.closing.notified());
            closing.as_mut().enable();
            if lock(&self.state).closed.is_some() {
                return;
            }
            closing.await;
        }
    }

    /// The writer's side: waits for bytes and swaps them against its empty buffer. False when closed and empty. `last` is when
    /// it wrote before, if that was little.
    ///
    /// If publishes are expected, the writer yields once, behind the tasks that are ready already. Unlike tokio's `yield_now`, that does
    /// not wait for a task that computes if another thread is free, and the runtime does not poll for events in between.
    pub(super) async fn take(&self, buffer: &mut Outbound, last: Option<Instant>) -> bool {
        let (mut has_waited, mut before) = (false, None);
        poll_fn(|context| {
            let mut state = lock(&self.state);
            if has_waited
                && before.is_none()
                && state.is_more_expected(last)
                && state.backoff.allows_delay()
            {
                before = Some(state.published);
                drop(state);
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            if state.is_due() {
                if let Some(before) = before {
                    let did = state.published != before;
                    state.backoff.delayed(did);
                }
                state.flush_ack(self.frame_max);
                state.held = 0;
                state.has_frames = false;
                state.expected = 0;
                std::mem::swap(&mut state.outbound, buffer);
                drop(state);
                self.room.notify_waiters();
                return Poll::Ready(true);
            }
            if state.closed.is_some() {
                return Poll::Ready(false);
            }
            has_waited = true;
            match &mut state.writer {
                Some(writer) => writer.clone_from(context.waker()),
                None => state.writer = Some(context.waker().clone()),
            }
            Poll::Pending
        })
        .await
    }
}

impl State {
    fn check_open(&self) -> Result<(), Error> {
        match &self.closed {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Whether there is something to write, and no reason to wait for more of it.
    fn is_due(&self) -> bool {
        let is_empty = self.ack.is_none() && !self.outbound.has_remaining();
        let may_wait = self.reading && self.held <= HELD_ACKS;
        !is_empty && (self.has_frames || self.closed.is_some() || !may_wait)
    }

    fn is_more_expected(&self, last: Option<Instant>) -> bool {
        let is_soon = || last.is_some_and(|last| last.elapsed() < SOON);
        self.has_frames && (self.expected > 0 || is_soon())
    }

    fn has_room(&self, paused: &AtomicU8) -> bool {
        self.outbound.remaining() < HIGH_WATER_MARK
            && self.blocked.is_none()
            && paused.load(Ordering::Relaxed) == 0
    }

    fn flush_ack(&mut self, frame_max: FrameMax) {
        if let Some((channel, ack)) = self.ack.take() {
            // An ack has 21 bytes: it fits any frame.
            let _ = self.outbound.method(channel, &ack, frame_max);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::task::{Context, Wake};

    use super::*;

    fn ack(sender: &Sender, delivery_tag: u64) {
        sender.ack(1, basic::Ack { delivery_tag, multiple: false }, true, || Ok(())).unwrap();
    }

    fn noop() -> Context<'static> {
        Context::from_waker(Waker::noop())
    }

    /// Whether the writer is given something when it has its turn.
    fn is_given(writer: Pin<&mut impl Future<Output = bool>>) -> bool {
        writer.poll(&mut noop()).is_ready()
    }

    /// Whether the writer, which waits already, is woken by this.
    fn is_woken(writer: Pin<&mut impl Future<Output = bool>>, by: impl FnOnce()) -> bool {
        struct Bell(AtomicBool);
        impl Wake for Bell {
            fn wake(self: Arc<Self>) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let bell = Arc::new(Bell(AtomicBool::new(false)));
        let waker = Waker::from(Arc::clone(&bell));
        assert!(writer.poll(&mut Context::from_waker(&waker)).is_pending());
        by();
        bell.0.load(Ordering::Relaxed)
    }

    fn sender() -> Sender {
        Sender::new(FrameMax::DEFAULT)
    }

    #[test]
    fn acks_wait_while_there_is_something_to_read() {
        let (sender, mut buffer) = (sender(), Outbound::new());
        sender.set_reading(true);
        let mut writer = pin!(sender.take(&mut buffer, None));
        assert!(!is_given(writer.as_mut()));
        ack(&sender, 1);
        ack(&sender, 2);
        assert!(!is_given(writer.as_mut()));
        sender.set_reading(false);
        assert!(is_given(writer.as_mut()));
    }

    #[test]
    fn acks_do_not_wait_otherwise() {
        let (sender, mut buffer) = (sender(), Outbound::new());
        let mut writer = pin!(sender.take(&mut buffer, None));
        assert!(!is_given(writer.as_mut()));
        ack(&sender, 1);
        assert!(is_given(writer.as_mut()));
    }

    #[test]
    fn no_more_acks_wait_than_may() {
        let (sender, mut buffer) = (sender(), Outbound::new());
        sender.set_reading(true);
        let mut writer = pin!(sender.take(&mut buffer, None));
        assert!(!is_given(writer.as_mut()));
        (1..=HELD_ACKS as u64).for_each(|tag| ack(&sender, tag));
        assert!(!is_given(writer.as_mut()));
        ack(&sender, HELD_ACKS as u64 + 1);
        assert!(is_given(writer.as_mut()));
    }

    fn publish(sender: &Sender) {
        let heartbeat = |outbound: &mut Outbound, _| {
            outbound.heartbeat();
            Ok(())
        };
        sender.publish_now(&AtomicU8::new(0), heartbeat).unwrap().unwrap();
    }

    #[test]
    fn the_writer_yields_once_for_expected_publishes() {
        let (sender, mut buffer) = (sender(), Outbound::new());
        let mut writer = pin!(sender.take(&mut buffer, None));
        assert!(!is_given(writer.as_mut()));
        sender.expect(3);
        publish(&sender);
        assert!(!is_given(writer.as_mut()));
        publish(&sender);
        // The third does not come.
        assert!(is_given(writer.as_mut()));
    }

    #[test]
    fn the_writer_does_not_yield_for_publishes_that_came() {
        let (sender, mut buffer) = (sender(), Outbound::new());
        let mut writer = pin!(sender.take(&mut buffer, None));
        assert!(!is_given(writer.as_mut()));
        sender.expect(2);
        publish(&sender);
        publish(&sender);
        assert!(is_given(writer.as_mut()));
    }

    #[test]
    fn a_publish_that_did_not_come_is_not_expected_the_next_time() {
        let (sender, mut buffer) = (sender(), Outbound::new());
        sender.expect(3);
        publish(&sender);
        assert!(is_given(pin!(sender.take(&mut buffer, None))));
        buffer = Outbound::new();
        let mut writer = pin!(sender.take(&mut buffer, None));
        assert!(!is_given(writer.as_mut()));
        publish(&sender);
        assert!(is_given(writer.as_mut()));
    }

    #[test]
    fn writes_are_delayed_less_often_while_delays_have_no_effect() {
        let mut backoff = FlushBackoff::default();
        // So many writes are not delayed before the next one that is.
        let mut skipped = |had_effect| {
            let delays = std::iter::repeat_with(|| backoff.allows_delay());
            let count = delays.take_while(|is_delayed| !is_delayed).count();
            backoff.delayed(had_effect);
            count
        };
        assert_eq!([(); 4].map(|()| skipped(true)), [0; 4]);
        assert_eq!([(); 8].map(|()| skipped(false)), [0, 1, 3, 7, 15, 31, 63, 63]);
        assert_eq!([skipped(true), skipped(true), skipped(false), skipped(false)], [63, 0, 0, 1]);
    }

    #[test]
    fn the_writer_seldom_yields_for_publishes_that_never_come() {
        let sender = sender();
        let mut waited = 0;
        for _ in 0..100 {
            let mut buffer = Outbound::new();
            let mut writer = pin!(sender.take(&mut buffer, None));
            assert!(!is_given(writer.as_mut()));
            sender.expect(2);
            publish(&sender);
            if !is_given(writer.as_mut()) {
                waited += 1;
                assert!(is_given(writer.as_mut()));
            }
        }
        assert!((1..10).contains(&waited), "{waited}");
    }

    #[test]
    fn a_writer_that_waits_is_woken_for_what_there_is_to_write() {
        let sender = sender();
        let wakes = |what: &dyn Fn()| {
            let mut buffer = Outbound::new();
            let mut writer = pin!(sender.take(&mut buffer, None));
            is_woken(writer.as_mut(), what) && writer.poll(&mut noop()).is_ready()
        };
        assert!(wakes(&|| ack(&sender, 1)));
        assert!(wakes(&|| publish(&sender)));
        sender.set_reading(true);
        assert!(!wakes(&|| (2..=65).for_each(|tag| ack(&sender, tag))));
        assert!(wakes(&|| ack(&sender, 66)));
        assert!(wakes(&|| publish(&sender)));
        let closed = Error::new(ErrorKind::ConnectionClosedHere, "closed");
        assert!(wakes(&|| sender.close(closed.clone(), |_, _| ())));
        let mut buffer = Outbound::new();
        assert_eq!(pin!(sender.take(&mut buffer, None)).poll(&mut noop()), Poll::Ready(false));
    }
}
