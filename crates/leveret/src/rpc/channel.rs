//! The channel over which calls go out and replies come in. [`RpcTask`] opens it with the first call, and again after each loss.

use std::collections::vec_deque::Drain;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_core::Stream as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use super::Replies;
use super::correlation::CorrelationId;
use super::pending_calls::{CallUpdate, PendingCalls, ReplyMode, ReplyResult};
use super::reply::Reply;
use super::request::{CallFailure, Request};
use super::task::RpcTask;
use crate::amqp::{
    self, Channel, ConfirmSink, ConsumeOptions, Consumer, Content, DeliveryInfo, DeliverySink,
    QueueOptions, Returned, ShortStr, Table, Tracked, deadline_in, lock,
};
use crate::clock;
use crate::connection::Client;
use crate::connection::health::CallerHealth;
use crate::connection::registry::ReportHealth;
use crate::connection::{ReliableChannel, UsableChannel};
use crate::error::Error;
use crate::publisher::{OnLoss, PublishSpan};
use crate::telemetry::UnmatchedReplies;

/// How many replies of a queue per call are in memory: each is acked when it is taken, so the broker holds back the others.
const PREFETCH_PER_CALL: u16 = 16;

/// How long a reply queue stays without a consumer, in milliseconds. It is deleted with its consumer; but a caller that stops
/// waiting may never consume it.
const UNUSED: i64 = 60_000;

/// How far apart the oldest unconfirmed request and the next one may be: replies make no room, only confirms do.
const MAX_UNCONFIRMED: u64 = 65_536;

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// What calls do, for people: `calling service "prices"`.
    pub(crate) what: String,
    /// The exchange of the requests. If it is missing and this client has declared it, the client declares it again.
    pub(crate) exchange: String,
    pub(crate) replies: Replies,
    pub(crate) on_loss: OnLoss,
    /// How many calls may be in flight at a time; the next one waits.
    pub(crate) max_in_flight: usize,
}

/// Sends requests and receives their replies. It clones cheaply; the channel is closed with the last clone and the last
/// [`ReplyReceiver`].
#[derive(Clone, Debug)]
pub(crate) struct RpcChannel {
    handle: Arc<Handle>,
}

#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
    _client: Client,
}

/// What the channel, its receivers and its task share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(super) settings: Settings,
    pub(super) channel: ReliableChannel<OpenChannel>,
    /// Locked while a request is sent, so that the loss of a channel finds all requests that were sent on it. No caller is woken and no
    /// channel dropped while it is locked: both may run code that locks it.
    pub(super) pending: Mutex<PendingCalls>,
    in_flight: Arc<Semaphore>,
    /// How long a request may wait to be sent.
    timeout: Duration,
    unmatched: UnmatchedReplies,
}

/// A channel to publish requests on.
#[derive(Debug)]
pub(super) struct OpenChannel {
    pub(super) channel: Channel<Tracked>,
    pub(super) epoch: u64,
    /// Where replies go; `None` if each call has a queue of its own.
    pub(super) reply_to: Option<ShortStr<'static>>,
}

impl UsableChannel for OpenChannel {
    fn is_usable(&self) -> bool {
        self.channel.is_usable()
    }
}

impl RpcChannel {
    pub(crate) fn new(client: &Client, settings: Settings, unmatched: UnmatchedReplies) -> Self {
        let (core, timeout) = (client.core(), client.core().options.timeout);
        // It connects now, and opens a channel with the first call.
        let _ = core.publishing();
        let shared = Arc::new(Shared {
            channel: ReliableChannel::new(core, &settings.what, timeout),
            pending: Mutex::new(PendingCalls::new()),
            in_flight: Arc::new(Semaphore::new(
                settings.max_in_flight.clamp(1, Semaphore::MAX_PERMITS),
            )),
            timeout,
            unmatched,
            settings,
        });
        core.health.callers.add(&(Arc::clone(&shared) as _));
        let task = core.spawn(RpcTask::new(Arc::clone(&shared), Arc::clone(core)).run());
        let task = AbortOnDropHandle::new(task);
        RpcChannel { handle: Arc::new(Handle { shared, _task: task, _client: client.clone() }) }
    }

    pub(crate) fn in_flight(&self) -> usize {
        lock(&self.handle.shared.pending).len()
    }

    /// How many replies matched no pending call.
    pub(crate) fn unmatched(&self) -> u64 {
        lock(&self.handle.shared.pending).unmatched()
    }

    /// Waits until one more call may be in flight. Dropped while it waits, it takes no permit.
    pub(crate) async fn permit(&self) -> Result<OwnedSemaphorePermit, Error> {
        let shared = &self.handle.shared;
        let permits = Arc::clone(&shared.in_flight);
        if let Ok(permit) = Arc::clone(&permits).try_acquire_owned() {
            return Ok(permit);
        }
        let late = |_| {
            let Settings { what, max_in_flight, .. } = &shared.settings;
            Error::timed_out(format!("{what}: {max_in_flight} others"), shared.timeout)
        };
        let acquiring = timeout_at(deadline_in(shared.timeout), permits.acquire_owned());
        Box::pin(acquiring).await.map_err(late)?.map_err(|_| Error::closed("the client"))
    }

    /// Sends a request with the permit of its call; without one, the call holds it for all copies of its request. What waits is boxed:
    /// most requests are sent at once, and the future of a call is small then.
    pub(crate) async fn send(
        &self,
        mut request: Request<'_>,
        mode: ReplyMode,
        permit: Option<OwnedSemaphorePermit>,
        span: &PublishSpan,
    ) -> Result<ReplyReceiver, Error> {
        let shared = &self.handle.shared;
        let id = CorrelationId::fresh();
        let text = id.to_text();
        complete(&mut request, text.as_short_str(), span);
        let handle = Arc::clone(&self.handle);
        let mut receiver = ReplyReceiver { handle, id, permit, own_queue: None, has_ended: false };
        let deadline = deadline_in(shared.timeout);
        loop {
            let open = match shared.channel.open_now() {
                Some(open) => open,
                None => Box::pin(shared.channel.until_open(deadline)).await?,
            };
            let reply_to = match &open.reply_to {
                Some(reply_to) => reply_to.clone(),
                None => match Box::pin(receiver.declare_queue(&open.channel, deadline)).await {
                    Ok(name) => name,
                    Err(_) if !open.is_usable() => continue,
                    Err(error) => return Err(error),
                },
            };
            request.properties.reply_to = Some(reply_to);
            let insert = |pending: &mut PendingCalls| {
                let is_kept = shared.settings.on_loss == OnLoss::Replay;
                let kept = is_kept.then(|| Box::new(request.to_owned()));
                pending.insert(id, mode, kept);
            };
            if shared.send_on(&open, &request, deadline, insert).await? {
                return Ok(receiver);
            }
            // Nothing was sent: the next channel may take it.
            Box::pin(shared.channel.until_replaced(&open, deadline)).await?;
        }
    }
}

/// Gives a request its correlation id and, where they are missing, the other properties of requests.
fn complete<'a>(request: &mut Request<'a>, id: ShortStr<'a>, span: &PublishSpan) {
    let properties = &mut request.properties;
    if properties.message_id.is_none() {
        properties.message_id = Some(id.clone());
        properties.timestamp = properties.timestamp.or_else(|| clock::seconds(clock::now()));
    }
    properties.correlation_id = Some(id);
    // The caller waits for the reply, and calls again if the broker loses the request.
    properties.delivery_mode.get_or_insert(1);
    span.put_into(properties);
    span.describe(properties);
}

/// Receives the replies to one request. Dropped, it removes the call.
#[derive(Debug)]
pub(crate) struct ReplyReceiver {
    handle: Arc<Handle>,
    id: CorrelationId,
    permit: Option<OwnedSemaphorePermit>,
    /// The consumer of the call's own reply queue.
    own_queue: Option<Box<Consumer>>,
    /// The last reply was taken, and the call is removed.
    has_ended: bool,
}

impl ReplyReceiver {
    /// The next reply; `None` after the last one.
    pub(crate) async fn next(&mut self) -> Option<ReplyResult> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    #[inline]
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<ReplyResult>> {
        loop {
            let (update, _stale) = lock(&self.handle.shared.pending).poll(self.id, context);
            if let Poll::Ready(CallUpdate { reply, is_last }) = update {
                if is_last {
                    self.end();
                }
                return Poll::Ready(reply);
            }
            if !self.poll_own_queue(context) {
                return Poll::Pending;
            }
        }
    }

    /// Declares and consumes a reply queue for this call alone, and gives its name.
    async fn declare_queue(
        &mut self,
        channel: &Channel<Tracked>,
        deadline: Instant,
    ) -> Result<ShortStr<'static>, Error> {
        let declaring = async {
            let name = declare_reply_queue(channel).await?;
            let (prefetch, exclusive) = (PREFETCH_PER_CALL, true);
            let options = ConsumeOptions { prefetch, exclusive, ..ConsumeOptions::default() };
            let consumer = channel.consume(&name, options).await?;
            Ok((ShortStr::try_from(name)?, consumer))
        };
        let reliable = &self.handle.shared.channel;
        let late = |_| reliable.timed_out();
        let declared: Result<_, amqp::Error> =
            timeout_at(deadline, declaring).await.map_err(late)?;
        let (name, consumer) = declared.map_err(|error| reliable.failed(error))?;
        self.own_queue = Some(Box::new(consumer));
        Ok(name)
    }

    /// Takes one delivery of the call's own queue. `false` if there is none now.
    fn poll_own_queue(&mut self, context: &mut Context<'_>) -> bool {
        let shared = &self.handle.shared;
        let Some(own_queue) = &mut self.own_queue else { return false };
        match Pin::new(&mut **own_queue).poll_next(context) {
            Poll::Pending => return false,
            Poll::Ready(Some(Ok(delivery))) => {
                // Everything in the queue is a reply to this call, with or without a correlation id.
                shared.receive_one(Some(self.id), Reply::of(&delivery));
                // If the ack comes too late, the queue is gone, and the reply was taken all the same.
                let _ = delivery.ack();
            }
            Poll::Ready(Some(Err(error))) => {
                let error = Error::from_amqp("the queue of the reply", error);
                shared.fail(self.id, CallFailure::Lost(error));
                self.own_queue = None;
            }
            Poll::Ready(None) => self.own_queue = None,
        }
        true
    }

    /// Waits for no more replies than have come.
    pub(crate) fn stop(&mut self) {
        let _stale = lock(&self.handle.shared.pending).stop(self.id);
        self.own_queue = None;
    }

    /// The call is removed: another one may be in flight, also while this receiver is kept.
    fn end(&mut self) {
        self.has_ended = true;
        self.own_queue = None;
        self.permit = None;
    }
}

impl Drop for ReplyReceiver {
    fn drop(&mut self) {
        if !self.has_ended {
            let _call = lock(&self.handle.shared.pending).remove(self.id);
        }
    }
}

impl ReportHealth<CallerHealth> for Shared {
    fn health(&self) -> CallerHealth {
        let (_, error) = self.channel.health();
        let in_flight = lock(&self.pending).len();
        CallerHealth { what: self.settings.what.clone(), in_flight, error }
    }
}

impl Shared {
    /// Sends a request once there is room for it, and registers it under the same lock. `false` if the channel is gone and the request
    /// was not sent.
    pub(super) async fn send_on(
        &self,
        open: &Arc<OpenChannel>,
        request: &Request<'_>,
        deadline: Instant,
        register: impl Fn(&mut PendingCalls),
    ) -> Result<bool, Error> {
        let channel = &open.channel;
        loop {
            let is_window_full = {
                let mut pending = lock(&self.pending);
                if pending.epoch() != open.epoch {
                    return Ok(false);
                }
                let tags = pending.unconfirmed_tags();
                let is_window_full = tags.end - tags.start >= MAX_UNCONFIRMED;
                let sent = match is_window_full {
                    true => None,
                    false => channel.publish_now(request.prepared()),
                };
                match sent {
                    Some(Ok(())) => {
                        register(&mut pending);
                        return Ok(true);
                    }
                    Some(Err(_)) if channel.is_gone() => return Ok(false),
                    Some(Err(error)) => return Err(self.channel.failed(error)),
                    None => is_window_full,
                }
            };
            let waiting = async {
                match is_window_full {
                    true => {
                        channel.confirmed(deadline.saturating_duration_since(Instant::now())).await
                    }
                    false => channel.until_room(deadline, self.timeout).await,
                }
            };
            match Box::pin(waiting).await {
                Err(_) if channel.is_gone() => return Ok(false),
                waited => waited.map_err(|error| self.channel.failed(error))?,
            }
        }
    }

    /// Gives replies to their calls. The callers are to be woken once nothing is locked.
    fn receive(
        &self,
        replies: impl Iterator<Item = (Option<CorrelationId>, Reply)>,
        wakers: &mut Vec<Waker>,
    ) {
        let mut unmatched = 0;
        {
            let mut pending = lock(&self.pending);
            for (id, reply) in replies {
                unmatched += u64::from(!pending.receive(id, reply, wakers));
            }
        }
        if unmatched > 0 {
            self.unmatched.add(unmatched);
            tracing::debug!("{}: {unmatched} replies match no pending call", self.settings.what);
        }
    }

    /// Gives a reply to its call, and wakes the caller.
    pub(super) fn receive_one(&self, id: Option<CorrelationId>, reply: Reply) {
        let mut wakers = Vec::new();
        self.receive(std::iter::once((id, reply)), &mut wakers);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Fails one call.
    pub(super) fn fail(&self, id: CorrelationId, failure: CallFailure) {
        let waker = lock(&self.pending).fail(id, failure);
        waker.into_iter().for_each(Waker::wake);
    }
}

/// Takes the broker's answers to the requests of one channel.
#[derive(Debug)]
pub(super) struct RequestConfirms {
    shared: Weak<Shared>,
    epoch: u64,
}

impl RequestConfirms {
    pub(super) fn new(shared: &Arc<Shared>, epoch: u64) -> Arc<Self> {
        Arc::new(RequestConfirms { shared: Arc::downgrade(shared), epoch })
    }

    /// Calls `use_it` with the pending calls, if this is the sink of the present channel.
    fn with<T>(&self, use_it: impl FnOnce(&mut PendingCalls) -> T) -> Option<T> {
        let shared = self.shared.upgrade()?;
        let mut pending = lock(&shared.pending);
        (pending.epoch() == self.epoch).then(|| use_it(&mut pending))
    }
}

impl ConfirmSink for RequestConfirms {
    fn answered(
        &self,
        tag: u64,
        multiple: bool,
        acked: bool,
        wakers: &mut Vec<Waker>,
    ) -> Result<(), amqp::Error> {
        let answered = self.with(|pending| pending.answered(tag, multiple, acked, wakers));
        answered.unwrap_or(Ok(()))
    }

    /// A request is recognised by its correlation id, and its call need not wait for the confirm that follows.
    fn returned(&self, returned: Returned) -> Option<Returned> {
        let id = returned.properties.correlation_id();
        if let Some(id) = id.and_then(|id| CorrelationId::parse(id.as_bytes())) {
            let failure = CallFailure::Returned(Box::new(returned));
            let waker = self.with(|pending| pending.fail(id, failure)).flatten();
            waker.into_iter().for_each(Waker::wake);
        }
        None
    }

    /// [`RpcTask`] notices the loss of the channel, and resends or fails its calls.
    fn lost(&self, _: &amqp::Error) {
        self.with(PendingCalls::forget_unconfirmed);
    }

    fn tags(&self) -> Range<u64> {
        self.with(|pending| pending.unconfirmed_tags()).unwrap_or(u64::MAX..u64::MAX)
    }
}

/// Takes the replies of a channel where they are read, all that came with one read at once.
#[derive(Debug)]
pub(super) struct ReplySink(pub(super) Arc<Shared>);

impl DeliverySink for ReplySink {
    fn delivered(&self, deliveries: Drain<'_, Content<DeliveryInfo>>, wakers: &mut Vec<Waker>) {
        let replies = deliveries.map(|delivery| {
            let reply = Reply::new(delivery.properties, delivery.body);
            (reply.correlation_id(), reply)
        });
        self.0.receive(replies, wakers);
    }
}

/// Declares a reply queue, which belongs to this connection and is deleted with its consumer. Gives its name.
pub(super) async fn declare_reply_queue(channel: &Channel<Tracked>) -> Result<String, amqp::Error> {
    let arguments = Table::from_pairs([("x-expires", UNUSED.into())])?;
    let options = QueueOptions { durable: false, exclusive: true, auto_delete: true, arguments };
    Ok(channel.declare_queue("", options).await?.name)
}
