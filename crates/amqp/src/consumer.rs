//! Deliveries for one consumer: a bounded queue between the reader and the application.

use std::collections::VecDeque;
use std::collections::vec_deque::Drain;
use std::fmt;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker, ready};

use futures_core::Stream;
use leveret_wire::{Content, ShortStr};
use tokio::sync::Notify;

use super::channel::Channel;
use super::connection::Connection;
use super::delivery::{Acker, Delivery, DeliveryInfo, is_of_stream};
use super::error::Error;
use super::link::Link;
use super::lock;

/// The queue between the reader, which fills it, and one [`Consumer`], which empties it.
#[derive(Debug)]
pub(super) struct ConsumerQueue {
    state: Mutex<State>,
    /// Woken when the consumer has taken deliveries.
    taken: Notify,
    pub(super) tag: ShortStr<'static>,
    pub(super) auto_ack: bool,
    /// It gets direct replies, whose delivery tags mean nothing.
    pub(super) replies: bool,
    /// Deliveries up to this tag are stale: after a recover the broker delivers them again.
    stale_through: AtomicU64,
    /// Whether all deliveries so far came from a stream.
    is_stream: AtomicBool,
    bound: Bound,
}

/// How much may wait for a consumer before the reader does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    pub(super) messages: usize,
    pub(super) bytes: usize,
}

/// Takes the deliveries of a consumer with auto-ack where they are read. To hand replies to a task first costs a third more CPU time:
/// `leveret-bench rpc --in-flight 100 --job tasks`.
pub trait DeliverySink: fmt::Debug + Send + Sync {
    /// The deliveries of one read. The wakers are woken once the read is sorted and nothing is locked.
    fn delivered(&self, deliveries: Drain<'_, Content<DeliveryInfo>>, wakers: &mut Vec<Waker>);
}

#[derive(Debug, Default)]
struct State {
    /// Takes what waits after each read, until the consumer ends.
    sink: Option<Arc<dyn DeliverySink>>,
    waiting: VecDeque<Content<DeliveryInfo>>,
    /// The bodies of those that wait.
    bytes: usize,
    /// How many deliveries came, and the tags of the first and the last one.
    delivered: u64,
    first_tag: u64,
    last_tag: u64,
    waker: Option<Waker>,
    end: Option<End>,
    /// The broker has agreed to deliver.
    begun: bool,
    /// A cancel is on its way; there must be no second one.
    cancelling: bool,
    /// The consumer was dropped: deliveries go back.
    abandoned: bool,
}

#[derive(Clone, Debug)]
pub(super) enum End {
    /// The application cancelled it.
    Cancelled,
    Failed(Error),
}

impl ConsumerQueue {
    pub(super) fn new(tag: ShortStr<'static>, auto_ack: bool, replies: bool, bound: Bound) -> Self {
        ConsumerQueue {
            state: Mutex::default(),
            taken: Notify::new(),
            tag,
            auto_ack,
            replies,
            stale_through: AtomicU64::new(0),
            is_stream: AtomicBool::new(true),
            bound,
        }
    }

    /// After a recover: the broker delivers everything up to this tag again.
    pub(super) fn set_stale(&self, tag: u64) {
        if !self.auto_ack {
            self.stale_through.store(tag, Ordering::Relaxed);
            lock(&self.state).waiting.retain(|one| one.method.delivery_tag() > tag);
        }
    }

    fn is_stale(&self, waiting: &Content<DeliveryInfo>) -> bool {
        waiting.method.delivery_tag() <= self.stale_through.load(Ordering::Relaxed)
    }

    /// The broker has agreed to deliver. True if the consumer was dropped meanwhile and has to be cancelled now. (Not before:
    /// RabbitMQ does not answer a consume that is cancelled at once.)
    pub(super) fn begin(&self) -> bool {
        let mut state = lock(&self.state);
        state.begun = true;
        let cancel = state.abandoned && !state.cancelling;
        state.cancelling |= cancel;
        cancel
    }

    /// Whether a cancel may be sent: one at most.
    pub(super) fn begin_cancel(&self) -> bool {
        let mut state = lock(&self.state);
        let cancel = state.begun && !state.cancelling && state.end.is_none();
        state.cancelling |= cancel;
        cancel
    }

    /// Whether its name is taken.
    pub(super) fn is_alive(&self) -> bool {
        lock(&self.state).end.is_none()
    }

    /// Returns the delivery if its consumer was dropped.
    #[inline]
    pub(super) fn push(&self, delivery: Content<DeliveryInfo>) -> Option<Content<DeliveryInfo>> {
        let mut state = lock(&self.state);
        if state.abandoned {
            return Some(delivery);
        }
        state.bytes += delivery.body.len();
        if state.delivered == 0 {
            state.first_tag = delivery.method.delivery_tag();
        }
        if self.is_stream.load(Ordering::Relaxed) && !is_of_stream(&delivery.properties) {
            self.is_stream.store(false, Ordering::Relaxed);
        }
        state.delivered += 1;
        state.last_tag = delivery.method.delivery_tag();
        state.waiting.push_back(delivery);
        None
    }

    /// Hands the deliveries of a read to the sink, if there is one. True if there is.
    pub(super) fn pass_on(&self, wakers: &mut Vec<Waker>) -> bool {
        // Locked until the sink has them, so that the consumer does not end before.
        let State { sink: Some(sink), waiting, bytes, .. } = &mut *lock(&self.state) else {
            return false;
        };
        sink.delivered(waiting.drain(..), wakers);
        *bytes = 0;
        true
    }

    /// Wakes the consumer, once after a run of pushes.
    pub(super) fn wake(&self) {
        let waker = lock(&self.state).waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(super) fn is_over_bound(&self) -> bool {
        let state = lock(&self.state);
        let over = state.waiting.len() > self.bound.messages || state.bytes > self.bound.bytes;
        over && !state.abandoned && state.end.is_none()
    }

    /// Waits until the consumer has made room.
    pub(super) async fn until_within_bound(&self) {
        loop {
            let mut taken = pin!(self.taken.notified());
            taken.as_mut().enable();
            if !self.is_over_bound() {
                return;
            }
            taken.await;
        }
    }

    /// No more deliveries follow those that wait.
    pub(super) fn end(&self, end: End) {
        let _sink = {
            let mut state = lock(&self.state);
            state.end.get_or_insert(end);
            state.sink.take()
        };
        self.wake();
        self.taken.notify_waiters();
    }

    /// The consumer was dropped: returns the deliveries that wait for it.
    fn abandon(&self) -> VecDeque<Content<DeliveryInfo>> {
        let (waiting, _sink) = {
            let mut state = lock(&self.state);
            state.abandoned = true;
            (std::mem::take(&mut state.waiting), state.sink.take())
        };
        self.taken.notify_waiters();
        waiting
    }
}

/// Tells whether the broker still delivers to a consumer, without holding on to it.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct Pulse {
    queue: Weak<ConsumerQueue>,
    link: Weak<Link>,
}

impl Pulse {
    #[doc(hidden)]
    pub fn is_alive(&self) -> bool {
        self.queue.upgrade().is_some_and(|queue| queue.is_alive())
    }

    /// How many deliveries have come for it.
    #[doc(hidden)]
    pub fn delivered(&self) -> u64 {
        self.queue.upgrade().map_or(0, |queue| lock(&queue.state).delivered)
    }

    /// Whether all its deliveries are settled, so that the broker owes it the next message of the queue.
    #[doc(hidden)]
    pub fn is_idle(&self) -> bool {
        let (Some(queue), Some(link)) = (self.queue.upgrade(), self.link.upgrade()) else {
            return false;
        };
        let (first, last) = {
            let state = lock(&queue.state);
            (state.first_tag, state.last_tag)
        };
        // Another consumer of the channel may have left some before.
        lock(&link.channel.settled).contains_all(first..=last)
    }

    /// Its channel, to ask the broker something on. None if the consumer is gone.
    #[doc(hidden)]
    pub fn channel(&self) -> Option<Channel> {
        self.link.upgrade().map(Channel::over)
    }

    /// The connection of its channel.
    #[doc(hidden)]
    pub fn connection(&self) -> Option<Connection> {
        let guard = Arc::clone(&self.link.upgrade()?.connection);
        Some(Connection::over(guard))
    }

    /// Ends a consumer that the broker no longer knows. A cancel is sent all the same.
    #[doc(hidden)]
    pub fn stop(&self, error: Error) {
        let Some(queue) = self.queue.upgrade() else { return };
        // One that is being cancelled is to end with that.
        if !queue.begin_cancel() {
            return;
        }
        // First, so that the broker's agreement is not taken for what ended it.
        queue.end(End::Failed(error));
        if let Some(link) = self.link.upgrade() {
            link.cancel_and_forget(&queue.tag);
        }
    }
}

/// A stream of deliveries from one queue.
///
/// It ends with `None` after [`Consumer::cancel`], and with an error and then `None` if the broker or the
/// connection ended it. Dropping it cancels it, and what it had not handed out goes back to the queue.
#[derive(Debug)]
pub struct Consumer {
    link: Arc<Link>,
    queue: Arc<ConsumerQueue>,
    /// Taken from the queue in one go, so that most deliveries cost no lock.
    taken: VecDeque<Content<DeliveryInfo>>,
    ended: bool,
}

impl Consumer {
    pub(super) fn new(link: Arc<Link>, queue: Arc<ConsumerQueue>) -> Self {
        Consumer { link, queue, taken: VecDeque::new(), ended: false }
    }

    /// The consumer's name on its channel.
    pub fn tag(&self) -> &ShortStr<'static> {
        &self.queue.tag
    }

    /// The next delivery, or the reason why there is none, or `None` once it ended.
    ///
    /// Nothing is lost if the future is dropped.
    pub async fn next(&mut self) -> Option<Result<Delivery, Error>> {
        std::future::poll_fn(|context| self.poll_delivery(context)).await
    }

    fn poll_delivery(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Delivery, Error>>> {
        loop {
            match ready!(self.poll_ready(context)) {
                Ok(true) => {
                    if let Some(delivery) = self.take() {
                        return Poll::Ready(Some(Ok(delivery)));
                    }
                }
                Ok(false) => return Poll::Ready(None),
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }

    /// Ready with true when a delivery can be [taken](Self::take), with false once the consumer has ended, after the error that
    /// ended it.
    #[inline]
    #[doc(hidden)]
    pub fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        if self.is_ready() {
            return Poll::Ready(Ok(true));
        }
        if self.ended {
            return Poll::Ready(Ok(false));
        }
        self.poll_queue(context)
    }

    /// Whether a delivery can be taken. Drops stale ones.
    #[inline]
    fn is_ready(&mut self) -> bool {
        while let Some(delivery) = self.taken.front() {
            if !self.queue.is_stale(delivery) {
                return true;
            }
            self.taken.pop_front();
        }
        false
    }

    /// Takes what the reader has queued, or registers the waker.
    fn poll_queue(&mut self, context: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        let mut state = lock(&self.queue.state);
        while !state.waiting.is_empty() {
            std::mem::swap(&mut state.waiting, &mut self.taken);
            state.bytes = 0;
            drop(state);
            self.queue.taken.notify_waiters();
            if self.is_ready() {
                return Poll::Ready(Ok(true));
            }
            state = lock(&self.queue.state);
        }
        match &state.end {
            Some(end) => {
                let last = match end {
                    End::Cancelled => Ok(false),
                    End::Failed(error) => Err(error.clone()),
                };
                drop(state);
                self.ended = true;
                Poll::Ready(last)
            }
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// The next one, if it is here already.
    #[inline]
    #[doc(hidden)]
    pub fn take(&mut self) -> Option<Delivery> {
        if !self.is_ready() {
            return None;
        }
        let content = self.taken.pop_front()?;
        let link = (!self.queue.auto_ack).then(|| Arc::clone(&self.link));
        let is_of_stream = self.queue.is_stream.load(Ordering::Relaxed);
        let acker = Acker::new(link, content.method.delivery_tag(), is_of_stream);
        Some(Delivery::new(acker, content))
    }

    /// The delivery tag of the next one, if it is here already.
    #[doc(hidden)]
    pub fn first_tag(&mut self) -> Option<u64> {
        if !self.is_ready() {
            let mut state = lock(&self.queue.state);
            std::mem::swap(&mut state.waiting, &mut self.taken);
            state.bytes = 0;
            drop(state);
            self.queue.taken.notify_waiters();
        }
        self.is_ready().then(|| self.taken.front().map(|next| next.method.delivery_tag()))?
    }

    /// Hands the deliveries of each read to `sink` from now on. The consumer still says when it ends, and why, and has the
    /// deliveries that came together with its end.
    #[doc(hidden)]
    pub fn set_sink(&self, sink: Arc<dyn DeliverySink>) {
        lock(&self.queue.state).sink = Some(sink);
    }

    /// Its channel, in the mode that it is known to have.
    #[doc(hidden)]
    pub fn channel<M>(&self) -> Channel<M> {
        Channel::over(Arc::clone(&self.link))
    }

    /// Observes whether the broker still delivers to it.
    #[doc(hidden)]
    pub fn pulse(&self) -> Pulse {
        Pulse { queue: Arc::downgrade(&self.queue), link: Arc::downgrade(&self.link) }
    }

    /// Asks the broker for no more deliveries. Those that came before its answer are still handed out; then the stream
    /// ends.
    pub async fn cancel(&mut self) -> Result<(), Error> {
        match self.queue.begin_cancel() {
            true => self.link.cancel(&self.queue.tag).await,
            false => Ok(()),
        }
    }
}

/// As [`Consumer::next`] hands them out.
impl Stream for Consumer {
    type Item = Result<Delivery, Error>;

    fn poll_next(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Delivery, Error>>> {
        self.get_mut().poll_delivery(context)
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        let waiting = std::mem::take(&mut self.taken).into_iter().chain(self.queue.abandon());
        if self.queue.begin_cancel() {
            self.link.cancel_and_forget(&self.queue.tag);
        }
        if !self.queue.auto_ack {
            for delivery in waiting {
                let is_of_stream = self.queue.is_stream.load(Ordering::Relaxed);
                self.link.requeue(delivery.method.delivery_tag(), is_of_stream);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;
    use std::time::Duration;

    use leveret_wire::{FrameMax, Outbound, Table};

    use super::super::connection::{Core, Guard};
    use super::super::handshake::Agreed;
    use super::super::limits::Limits;
    use super::super::link::ChannelState;
    use super::*;

    /// A broker that agrees to a cancel at the very moment it is written.
    struct Prompt(Arc<ConsumerQueue>);

    impl Wake for Prompt {
        fn wake(self: Arc<Self>) {
            self.0.end(End::Cancelled);
        }
    }

    fn consuming() -> (Arc<Core>, Consumer) {
        let agreed = Agreed {
            server_properties: Table::new(),
            channel_max: 1,
            frame_max: FrameMax::MIN,
            heartbeat: Duration::ZERO,
            user: None,
        };
        let core = Arc::new(Core::new(agreed, Limits::default()));
        let connection = Arc::new(Guard { core: Arc::clone(&core) });
        let link = Arc::new(Link { channel: Arc::new(ChannelState::new(1, 1)), connection });
        let bound = Bound { messages: 1, bytes: 1 };
        let tag = ShortStr::from_static("one");
        let queue = Arc::new(ConsumerQueue::new(tag, false, false, bound));
        assert!(!queue.begin());
        (core, Consumer::new(link, queue))
    }

    #[test]
    fn a_consumer_that_is_known_to_be_gone_ends_with_that_however_soon_its_cancel_is_agreed_to() {
        let (core, mut consumer) = consuming();
        let mut buffer = Outbound::new();
        let mut writer = pin!(core.sender.take(&mut buffer, None));
        let waker = Waker::from(Arc::new(Prompt(Arc::clone(&consumer.queue))));
        assert!(writer.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        consumer.pulse().stop(Error::unknown_consumer());
        assert!(writer.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
        let end = consumer.poll_ready(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(end, Poll::Ready(Err(_))), "{end:?}");
    }

    #[test]
    fn a_consumer_that_is_being_cancelled_ends_with_that_although_it_is_known_to_be_gone() {
        let (_core, mut consumer) = consuming();
        assert!(consumer.queue.begin_cancel());
        consumer.pulse().stop(Error::unknown_consumer());
        consumer.queue.end(End::Cancelled);
        let end = consumer.poll_ready(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(end, Poll::Ready(Ok(false))), "{end:?}");
    }
}
