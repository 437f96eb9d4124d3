//! Publishing: each message has one outcome, and survives the loss of the connection.
//!
//! ```text
//!  send --> PublisherState: number, head, body --> engine's channel
//!                 |   ^       ^
//!  Ticket <-------+   |       +-- channel lost: the publisher's task opens another, and sends again what is unconfirmed
//!        outcome      +-- ChannelSink: acks, nacks, returns, the loss of the channel
//! ```

use std::fmt;
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, ready};
use tokio::sync::{Notify, OnceCell, Semaphore, SemaphorePermit};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use crate::amqp::{self, Channel, Connection, Properties, Tracked, deadline_in, lock};
use crate::connection::Client;
use crate::connection::health::PublisherHealth;
use crate::connection::managed::LiveConnection;
use crate::connection::registry::ReportHealth;
use crate::connection::{ChannelState, ReliableChannel};
use crate::error::{Error, ErrorKind};
use crate::message::{IntoMessage, Message};

mod batch;
mod heads;
mod ids;
mod span;
mod state;
mod task;
mod ticket;
mod unconfirmed;

pub use batch::BatchError;
pub use ticket::Ticket;
pub use unconfirmed::UnconfirmedPublisher;

use heads::Head;
pub(crate) use span::PublishSpan;
use state::{Attempt, ChannelSink, Progress, PublisherState};
use task::PublisherTask;

/// What becomes of messages that the broker had not confirmed when the connection or channel was lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLoss {
    /// They are published again, in order and with the same ids, as soon as the broker is back; until then the publisher
    /// waits, up to its timeout. The broker may get one twice. The default.
    #[default]
    Replay,
    /// Their publish fails as [`ErrorKind::Lost`].
    Fail,
}

/// How to make a [`Publisher`].
#[derive(Clone, Debug)]
#[must_use]
pub struct PublisherBuilder {
    client: Client,
    settings: Settings,
}

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) exchange: String,
    mandatory: bool,
    persistent: bool,
    /// Each message gets an id and a timestamp, if it has none.
    identifies: bool,
    window: usize,
    timeout: Duration,
    on_loss: OnLoss,
    resend_after: Option<Duration>,
    on_unroutable: Option<Callback>,
}

#[derive(Clone)]
struct Callback(Arc<dyn Fn() + Send + Sync>);

impl fmt::Debug for Callback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Callback")
    }
}

impl Client {
    /// A publisher to an exchange; the default exchange, which leads straight to queues, has an empty name.
    pub fn publisher(&self, exchange: impl Into<String>) -> PublisherBuilder {
        PublisherBuilder::new(self.clone(), exchange.into())
    }
}

impl PublisherBuilder {
    pub(crate) fn new(client: Client, exchange: String) -> Self {
        let settings = Settings {
            exchange,
            mandatory: true,
            persistent: true,
            identifies: true,
            window: 4096,
            timeout: Duration::from_secs(30),
            on_loss: OnLoss::default(),
            resend_after: None,
            on_unroutable: None,
        };
        PublisherBuilder { client, settings }
    }

    /// A message that reaches no queue counts as published. By default it is an error.
    pub fn allow_unroutable(mut self) -> Self {
        self.settings.mandatory = false;
        self
    }

    /// Messages may be gone when the broker restarts, unless they say otherwise. By default they are persistent.
    pub fn transient(mut self) -> Self {
        self.settings.persistent = false;
        self
    }

    /// Messages get no id and no timestamp: who gets them knows them by something else.
    pub(crate) fn anonymous(mut self) -> Self {
        self.settings.identifies = false;
        self
    }

    /// How many messages may be unconfirmed at a time; the next one waits. 4096 by default.
    pub fn window(mut self, messages: usize) -> Self {
        self.settings.window = messages.max(1);
        self
    }

    /// How long a publish may take as a whole, waiting for the broker to come back included. Half a minute by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = timeout;
        self
    }

    /// What becomes of messages that were not confirmed when the connection was lost.
    pub fn on_loss(mut self, on_loss: OnLoss) -> Self {
        self.settings.on_loss = on_loss;
        self
    }

    /// Publishes again what is not confirmed after this long, on another channel; after twice the time again, and so on.
    /// By default it waits, up to the timeout. Needs [`OnLoss::Replay`].
    pub fn resend_after(mut self, time: Duration) -> Self {
        self.settings.resend_after = Some(time);
        self
    }

    /// The publisher, ready to publish.
    pub async fn build(self) -> Result<Publisher, Error> {
        let PublisherBuilder { client, settings } = self;
        if settings.resend_after.is_some() && settings.on_loss == OnLoss::Fail {
            let text =
                "a publisher that resends has to replay: leave out resend_after, or OnLoss::Fail";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let progress = Arc::new(Progress::default());
        let shared = Arc::new(Shared {
            channel: ReliableChannel::new(client.core(), settings.what(), settings.timeout),
            state: Mutex::new(PublisherState::new(&settings, Arc::clone(&progress))),
            progress,
            kick: Notify::new(),
            window: Semaphore::new(settings.window.min(Semaphore::MAX_PERMITS)),
            settings,
        });
        shared.open_first().await?;
        client.core().health.publishers.add(&(Arc::clone(&shared) as _));
        let task = PublisherTask::new(Arc::clone(&shared), Arc::clone(client.core()));
        let task = client.core().spawn(task.run());
        let handle = Handle { shared, task, client, companion: OnceCell::new() };
        Ok(Publisher { handle: Arc::new(handle) })
    }

    /// A publisher without confirms, for messages whose loss does not matter: it knows only that they were written.
    pub async fn build_unconfirmed(self) -> Result<UnconfirmedPublisher, Error> {
        UnconfirmedPublisher::new(self.client, self.settings).await
    }
}

impl Settings {
    /// What a failure is a failure of.
    fn what(&self) -> String {
        match self.exchange.as_str() {
            "" => "publishing to the default exchange".to_owned(),
            exchange => format!("publishing to exchange {exchange:?}"),
        }
    }
}

/// What a publisher, its tickets and its task share.
#[derive(Debug)]
pub(crate) struct Shared {
    settings: Settings,
    channel: ReliableChannel<Channel<Tracked>>,
    state: Mutex<PublisherState>,
    /// Up to which message all are confirmed.
    progress: Arc<Progress>,
    /// Wakes the task: a message is unconfirmed.
    kick: Notify,
    /// A place for each message that may be unconfirmed. Those that wait for one are served in order; a confirm wakes as many
    /// as it frees places.
    window: Semaphore,
}

/// Holds the publisher: its clones and its tickets share one. The task ends with the last.
#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
    client: Client,
    /// A further publisher, made when it is needed first.
    companion: OnceCell<Publisher>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        lock(&self.shared.state).forget_channel();
        self.shared.channel_has_ended(Error::closed("the publisher"));
        self.task.abort();
    }
}

/// Publishes to one exchange.
///
/// It clones cheaply; clones share a channel and its window, and may publish at the same time. `Ok` means that the
/// broker has taken responsibility: the message is in every queue that it was routed to, at least in one, and on disk
/// if message and queue are durable.
#[derive(Clone)]
pub struct Publisher {
    handle: Arc<Handle>,
}

impl Publisher {
    fn shared(&self) -> &Arc<Shared> {
        &self.handle.shared
    }

    /// The exchange it publishes to.
    pub fn exchange(&self) -> &str {
        &self.shared().settings.exchange
    }

    /// Whether a message that reaches no queue fails as unroutable, see [`PublisherBuilder::allow_unroutable`].
    pub fn is_mandatory(&self) -> bool {
        self.shared().settings.mandatory
    }

    /// Whether the delivery mode of messages is persistent, see [`PublisherBuilder::transient`].
    pub fn is_persistent(&self) -> bool {
        self.shared().settings.persistent
    }

    /// Publishes, and waits for the outcome.
    pub async fn publish(&self, routing_key: &str, message: impl IntoMessage) -> Result<(), Error> {
        let span = PublishSpan::begin(self.exchange(), routing_key);
        let outcome = match self.send_within(&span, routing_key, message).await {
            Ok(ticket) => ticket.await,
            Err(error) => Err(error),
        };
        span.record(&outcome);
        outcome
    }

    /// Publishes, and gives a ticket to await the outcome by: for throughput, many can be under way at once.
    ///
    /// It waits only for room: in the window, or while the broker is away or blocks publishers. Dropped while waiting,
    /// it has published nothing. While it waits it may have a place in the window already: poll it or drop it, or as many as the
    /// window has places keep others out.
    pub async fn send(
        &self,
        routing_key: &str,
        message: impl IntoMessage,
    ) -> Result<Ticket, Error> {
        let span = PublishSpan::begin(self.exchange(), routing_key);
        let sent = self.send_within(&span, routing_key, message).await;
        span.record(&sent);
        sent
    }

    /// The same, and the message gets no trace context: it is the copy of another one.
    pub(crate) async fn send_as_it_is(
        &self,
        routing_key: &str,
        message: Message,
    ) -> Result<Ticket, Error> {
        self.send_within(&PublishSpan::none(), routing_key, message).await
    }

    /// Publishes now if it need not wait: then what is awaited is small, because who need not wait does not carry what waiting
    /// needs.
    #[inline(always)]
    fn send_within(
        &self,
        span: &PublishSpan,
        routing_key: &str,
        message: impl IntoMessage,
    ) -> impl Future<Output = Result<Ticket, Error>> {
        let mut message = match message.into_message() {
            Ok(message) => message,
            Err(error) => return Either::Left(ready(Err(error))),
        };
        if let Err(error) = message.check() {
            return Either::Left(ready(Err(error)));
        }
        let shared = self.shared();
        let ticket = |number| Ticket::new(Arc::clone(&self.handle), number);
        match shared.send_now(span, routing_key, &mut message) {
            Ok(number) => Either::Left(ready(Ok(ticket(number)))),
            Err(head) => Either::Right(Box::pin(async move {
                let number = shared.send(&head, message.body).await?;
                Ok(ticket(number))
            })),
        }
    }

    /// Waits until everything published so far has its outcome, up to the timeout. What failed is reported by the
    /// tickets.
    pub async fn flush(&self) -> Result<(), Error> {
        self.shared().flush().await?;
        match self.handle.companion.get() {
            Some(publisher) => publisher.shared().flush().await,
            None => Ok(()),
        }
    }

    /// How many messages have no outcome yet.
    pub fn unconfirmed(&self) -> usize {
        let of = |publisher: &Publisher| lock(&publisher.shared().state).unanswered();
        of(self) + self.handle.companion.get().map_or(0, of)
    }

    /// The client it belongs to.
    pub fn client(&self) -> &Client {
        &self.handle.client
    }

    /// A publisher like this one for another exchange, made once and flushed with this one. `on_unroutable` is called when a
    /// ticket of it says that its message reached no queue.
    pub(crate) async fn companion(
        &self,
        exchange: &str,
        on_unroutable: impl Fn() + Send + Sync + 'static,
    ) -> Result<&Publisher, Error> {
        let make = || {
            let mut settings = self.shared().settings.clone();
            settings.exchange = exchange.to_owned();
            settings.mandatory = true;
            settings.on_unroutable = Some(Callback(Arc::new(on_unroutable)));
            PublisherBuilder { client: self.client().clone(), settings }.build()
        };
        self.handle.companion.get_or_try_init(make).await
    }
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher")
            .field("exchange", &self.exchange())
            .field("unconfirmed", &self.unconfirmed())
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Opens the first channel.
    async fn open_first(self: &Arc<Self>) -> Result<(), Error> {
        let open = |up: LiveConnection| async move { self.open_on(&up.connection).await };
        let channel = self.channel.get(deadline_in(self.settings.timeout), open).await?;
        lock(&self.state).channel = Some(channel);
        Ok(())
    }

    /// Opens the next channel to publish on. What the one before has not confirmed is lost.
    async fn open_on(
        self: &Arc<Self>,
        connection: &Connection,
    ) -> Result<Channel<Tracked>, amqp::Error> {
        let epoch = self.with_state(PublisherState::begin_epoch);
        let sink = ChannelSink::new(self, epoch);
        connection.open_channel().await?.into_tracked(sink).await
    }

    /// Changes the state; gives freed places of the window to those that wait, and wakes those whose messages have their outcomes.
    fn with_state<T>(&self, change: impl FnOnce(&mut PublisherState, &mut Vec<Waker>) -> T) -> T {
        let mut wakers = Vec::new();
        let (changed, freed) = {
            let mut state = lock(&self.state);
            (change(&mut state, &mut wakers), state.take_freed())
        };
        self.window.add_permits(freed);
        wakers.into_iter().for_each(Waker::wake);
        changed
    }

    /// Publishes if it need not wait, and gives the message's number; else gives its head back.
    fn send_now(
        &self,
        span: &PublishSpan,
        routing_key: &str,
        message: &mut Message,
    ) -> Result<u64, Box<Head>> {
        let place = self.window.try_acquire();
        let mut state = lock(&self.state);
        let extra = message.extra.take();
        let head = if extra.is_none() && span.is_none() && self.settings.identifies {
            state.write_plain(self.settings.persistent.then_some(2), routing_key)
        } else {
            let mut properties = extra.map_or_else(Properties::default, |extra| extra.properties);
            self.settings.complete(&mut properties);
            span.put_into(&mut properties);
            let head = state.write(&mut properties, routing_key);
            span.describe(&properties);
            head
        };
        if place.is_ok()
            && let Attempt::Sent { number, kick } =
                state.send(&self.settings, routing_key, head, &mut message.body)
        {
            drop(state);
            place.into_iter().for_each(SemaphorePermit::forget);
            self.kick_if(kick);
            return Ok(number);
        }
        let head = state.take_back(head);
        // Dropping the permit may wake another task: not under the lock.
        drop(state);
        Err(Box::new(head))
    }

    /// Publishes once there is a place in the window, a channel, and room on it; gives the message's number.
    async fn send(&self, head: &Head, mut body: Bytes) -> Result<u64, Error> {
        let Settings { window, timeout, on_loss, .. } = self.settings;
        let deadline = deadline_in(timeout);
        let place = timeout_at(deadline, self.window.acquire()).await.map_err(|_| {
            // Others have all places, and wait themselves.
            if lock(&self.state).unanswered() == 0 {
                return self.channel.timed_out();
            }
            let what = format!("confirming the oldest of {window} publishes");
            self.channel.failed(amqp::Error::timeout(&what, timeout))
        })?;
        let place = place.map_err(|_| Error::closed("the publisher"))?;
        loop {
            let open = self.channel.until_open(deadline).await?;
            let (attempt, channel) = {
                let mut state = lock(&self.state);
                if let Some(error) = state.ended() {
                    return Err(error.clone());
                }
                let attempt = state.send_again(&self.settings, head, &mut body);
                (attempt, state.channel.clone().unwrap_or(open))
            };
            let result = match attempt {
                Attempt::Sent { number, kick } => {
                    place.forget();
                    self.kick_if(kick);
                    return Ok(number);
                }
                Attempt::NoRoom => channel.until_room(deadline, timeout).await,
                Attempt::NoChannel => Ok(()),
                Attempt::Failed(error) => Err(error),
            };
            // Nothing was sent: the next channel may take it.
            if channel.is_gone() {
                if let (OnLoss::Fail, Err(error)) = (on_loss, result) {
                    return Err(Error::from_amqp(self.settings.what(), error));
                }
                self.channel.until_replaced(&channel, deadline).await?;
            } else if let Err(error) = result {
                return Err(self.channel.failed(error));
            }
        }
    }

    fn channel_is_open(&self, channel: Channel<Tracked>) {
        let channel = Arc::new(channel);
        self.set_channel(Some(Arc::clone(&channel)), ChannelState::Open(channel));
    }

    fn channel_is_lost(&self) {
        self.set_channel(None, ChannelState::Closed { since: Instant::now() });
    }

    fn channel_has_ended(&self, error: Error) {
        self.set_channel(None, ChannelState::Ended(error));
    }

    /// The state has the channel, too: a publish holds its lock anyway.
    fn set_channel(
        &self,
        channel: Option<Arc<Channel<Tracked>>>,
        state: ChannelState<Channel<Tracked>>,
    ) {
        // The last handle to a channel closes it, which takes the lock again.
        let _before = std::mem::replace(&mut lock(&self.state).channel, channel);
        self.channel.set(state);
    }

    #[inline]
    fn kick_if(&self, kick: bool) {
        if kick {
            self.kick.notify_one();
        }
    }

    async fn flush(&self) -> Result<(), Error> {
        let deadline = deadline_in(self.settings.timeout);
        let until = lock(&self.state).next();
        loop {
            if lock(&self.state).is_answered_before(until) {
                return Ok(());
            }
            let channel = self.channel.until_open(deadline).await?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.channel.timed_out());
            }
            let confirmed = channel.confirmed(left).await;
            if confirmed.is_err() && channel.check_open().is_err() {
                self.channel.until_replaced(&channel, deadline).await?;
            }
        }
    }
}

/// A publisher whose oldest message has waited for longer than this for its confirm is not healthy.
const UNCONFIRMED_FOR: Duration = Duration::from_secs(10);

impl ReportHealth<PublisherHealth> for Shared {
    fn health(&self) -> PublisherHealth {
        let blocked = self.channel.connection().blocked();
        let (interrupted, error) = self.channel.health();
        let (unconfirmed, oldest) = {
            let state = lock(&self.state);
            (state.unanswered(), state.oldest_wait())
        };
        let waited = task::tick(&self.settings) * oldest;
        let is_late = waited > UNCONFIRMED_FOR;
        let late_since = Instant::now().checked_sub(waited).filter(|_| is_late);
        let blocked_since = blocked.as_ref().map(|blocked| blocked.since);
        PublisherHealth {
            exchange: self.settings.exchange.clone(),
            unconfirmed,
            held_back_since: interrupted.or(blocked_since).or(late_since),
            blocked: blocked.map(|blocked| blocked.reason),
            error,
        }
    }
}

impl Settings {
    /// With what every message of this publisher has, unless it says otherwise.
    #[inline]
    fn complete(&self, properties: &mut Properties<'_>) {
        if self.persistent && properties.delivery_mode.is_none() {
            properties.delivery_mode = Some(2);
        }
    }
}
