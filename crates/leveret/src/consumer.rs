//! Consuming: a stream of deliveries that outlives the connection, and handlers that are run with it.

use std::sync::Arc;
use std::time::Duration;

use tower::{Layer, Service};

use crate::amqp::{ConsumeOptions, Value};
use crate::connection::Client;
use crate::connection::registry::SeatKind;
use crate::error::{BoxError, Error, ErrorKind};
use crate::inbox::Inbox;
use crate::inbox::once::Once;
use crate::retry::{Classification, Classifiers, Retry, RetryProfile};
use crate::topology::Topology;
use crate::topology::arguments::Arguments;

mod batch;
mod drain;
mod failure;
mod handler;
mod handler_tasks;
mod handling;
mod incoming;
mod instrumented;
mod prefetch;
mod required_topology;
mod runner;
mod seen;
mod service;
mod settling;
mod source;
mod stream;
mod subscription;

pub use batch::{BatchOptions, BatchOutcome, BatchRunner, IntoBatchOutcome};
pub use handler::{Attempt, FromIncoming, Handler, Headers, IntoOutcome, State};
pub use incoming::Incoming;
pub use runner::{Runner, Summary};
pub use service::HandlerService;
pub use stream::{Deliveries, Next};

use drain::Drain;
pub(crate) use drain::Draining;
pub(crate) use failure::OnPark;
pub(crate) use handler::BoxFuture;
pub(crate) use handler_tasks::Abandoned;
use handler_tasks::HandlerTasks;
pub(crate) use incoming::ConsumerContext;
pub use incoming::Given;
use incoming::States;
pub(crate) use instrumented::InstrumentedHandler;
use required_topology::{RequiredTopology, Temporary};
pub(crate) use runner::{report, unless};
use seen::Seen;
use service::BoxLayer;
pub(crate) use service::Call;
use source::Source;

/// How a queue is consumed: as a [stream](ConsumerBuilder::stream), or with a [handler](ConsumerBuilder::handle).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use leveret::{Client, Json, Queue, State, Topology};
/// use tokio::sync::mpsc;
///
/// async fn greet(Json(name): Json<String>, State(done): State<mpsc::Sender<String>>) {
///     let _ = done.send(format!("hello {name}")).await;
/// }
///
/// let client = Client::embedded().await?;
/// client.apply(&Topology::new().queue(Queue::quorum("names"))).await?;
/// client.publisher("").build().await?.publish("names", Json("Ada")).await?;
///
/// let (sender, mut greetings) = mpsc::channel::<String>(1);
/// let summary = client
///     .consumer("names")
///     .workers(4)
///     .state(sender)
///     .handle(greet)
///     .run_until(async { assert_eq!(greetings.recv().await.unwrap(), "hello Ada") })
///     .await?;
/// assert_eq!(summary.handled, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct ConsumerBuilder {
    client: Client,
    settings: Settings,
    running: Running,
    needs: RequiredTopology,
}

impl std::fmt::Debug for ConsumerBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConsumerBuilder").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// How handlers are run.
#[derive(Clone)]
struct Running {
    workers: usize,
    in_one_task: bool,
    /// If handlers have tasks of their own.
    tasks: Option<HandlerTasks>,
    subscribers: usize,
    drain: Drain,
    retry: Option<Retry>,
    mode: Mode,
    seen: Option<Seen>,
    states: States,
    classifiers: Classifiers,
    layers: Vec<BoxLayer>,
    on_park: Option<OnPark>,
    tells_senders: bool,
    inbox: Option<Arc<dyn Inbox>>,
}

/// When a message is settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// After its handler.
    AtLeastOnce,
    /// Before its handler, and only if it was not delivered before.
    AtMostOnce,
}

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) queue: String,
    /// None: what suits the way in which it is consumed.
    prefetch: Option<u16>,
    auto_ack: bool,
    exclusive: bool,
    priority: i32,
    arguments: Arguments,
    missing_for: Duration,
    /// Acks happen when they are committed.
    transactional: bool,
}

impl Settings {
    fn seat_kind(&self) -> SeatKind {
        let has_priority = self.priority != 0 || self.arguments.get("x-priority").is_some();
        if has_priority { SeatKind::WithPriority } else { SeatKind::Usual }
    }

    fn options(&self) -> Result<ConsumeOptions, Error> {
        Ok(ConsumeOptions {
            tag: String::new(),
            prefetch: self.prefetch.unwrap_or_else(prefetch::for_stream),
            auto_ack: self.auto_ack,
            exclusive: self.exclusive,
            priority: self.priority,
            arguments: self.arguments.to_table()?,
        })
    }
}

impl Client {
    /// A consumer of a queue. The queue is not declared by this.
    pub fn consumer(&self, queue: impl Into<String>) -> ConsumerBuilder {
        ConsumerBuilder::new(self.clone(), queue.into())
    }
}

impl ConsumerBuilder {
    pub(crate) fn new(client: Client, queue: String) -> Self {
        let settings = Settings {
            queue,
            prefetch: None,
            auto_ack: false,
            exclusive: false,
            priority: 0,
            arguments: Arguments::default(),
            missing_for: Duration::from_secs(60),
            transactional: false,
        };
        let running = Running {
            workers: 1,
            in_one_task: false,
            tasks: None,
            subscribers: 1,
            drain: Drain::For(Duration::from_secs(30)),
            retry: None,
            mode: Mode::AtLeastOnce,
            seen: None,
            states: States::default(),
            classifiers: Classifiers::default(),
            layers: Vec::new(),
            on_park: None,
            tells_senders: false,
            inbox: None,
        };
        ConsumerBuilder { client, settings, running, needs: RequiredTopology::default() }
    }

    /// Declares this before it begins: the queue, and what it is bound to. Without it, the queue has to exist.
    pub fn declaring(self, topology: Topology) -> Self {
        self.needing(Ok(topology))
    }

    /// The same, or why there is nothing to declare: then the consumer does not begin.
    pub(crate) fn needing(mut self, topology: Result<Topology, Error>) -> Self {
        self.needs.add(topology);
        self
    }

    /// The queue is forgotten once nobody consumes it any more.
    pub(crate) fn temporary(mut self) -> Self {
        self.needs.temporary = Some(Temporary::new(&self.client, &self.settings.queue));
        self
    }

    /// Declares what the consumer [needs](Self::declaring) now, and not when it begins: its queue keeps messages from now
    /// on.
    pub async fn declare(&self) -> Result<(), Error> {
        self.needs.declare(&self.client).await
    }

    /// How many deliveries may be unsettled at a time, for each [subscriber](Self::subscribers).
    ///
    /// By default, a consumer with a [handler](Self::handle) takes as many as it has [workers](Self::workers): a message that
    /// waits here cannot be handled by another subscriber or program that is idle. A [batch](Self::handle_batches) takes its size.
    /// A [stream](Self::stream) takes 100, and so does a consumer whose messages no other one could take: of an exclusive queue,
    /// a stream queue, or one with a single active consumer.
    ///
    /// Failed messages that [cannot be moved](Self::retry) for now do not count against the default: 32 more or so are held beside
    /// it. They count against a prefetch that was set.
    ///
    /// Handlers that take less time than a round trip to the broker are busier with a larger prefetch.
    pub fn prefetch(mut self, deliveries: u16) -> Self {
        self.settings.prefetch = Some(deliveries.max(1));
        self
    }

    /// Deliveries count as settled when they are sent: fast, and lost when the connection or the program is.
    pub fn auto_ack(mut self) -> Self {
        self.settings.auto_ack = true;
        self
    }

    /// No other consumer beside this one.
    pub fn exclusive(mut self) -> Self {
        self.settings.exclusive = true;
        self
    }

    /// Consumers of a higher priority are served first. 0 by default.
    pub fn priority(mut self, priority: i32) -> Self {
        self.settings.priority = priority;
        self
    }

    /// Any other argument: `x-stream-offset`, and so on.
    pub fn argument(mut self, name: impl Into<String>, value: impl Into<Value<'static>>) -> Self {
        self.settings.arguments.set(name, value);
        self
    }

    /// How long the queue may be missing, or refuse the consumer, before the stream ends with an error. A minute by
    /// default. A queue that this client has declared is declared again.
    pub fn missing_for(mut self, time: Duration) -> Self {
        self.settings.missing_for = time;
        self
    }

    /// How many messages are handled at the same time. One by default: one after the other, in order.
    ///
    /// A handler should not block its thread, least of all to wait for another message of the same consumer: that may never be
    /// handled then. What blocks belongs into [`spawn_blocking`](tokio::task::spawn_blocking).
    pub fn workers(mut self, workers: usize) -> Self {
        self.running.workers = workers.max(1);
        self
    }

    /// All handlers of a subscription share one task. They still wait beside each other, for databases or other services, and
    /// that costs much less where each has little to do. But no two of them compute at the same time, and one that blocks its
    /// thread holds up all of them: such work belongs into [`spawn_blocking`](tokio::task::spawn_blocking).
    ///
    /// By default, handlers have tasks of their own if there is more than one [worker](Self::workers). Only while they compute for
    /// no more than a few microseconds each do they run in the task of their subscription, which is cheaper; one that takes longer
    /// ends that.
    pub fn in_one_task(mut self) -> Self {
        self.running.in_one_task = true;
        self
    }

    /// How many subscriptions handle messages beside each other, each on a channel of its own and with its own workers;
    /// beyond the client's limit, on further connections. One by default.
    pub fn subscribers(mut self, subscribers: usize) -> Self {
        self.running.subscribers = subscribers.max(1);
        self
    }

    /// How long handlers get to finish when the consumer is stopped. Half a minute by default.
    pub fn drain(mut self, time: Duration) -> Self {
        self.running.drain = Drain::For(time);
        self
    }

    /// Lets handlers finish until this future is done, in place of a [time](Self::drain): its end may depend on why the consumer
    /// is stopped. It is first polled when the consumer is stopped.
    pub fn drain_until(mut self, end: impl Future<Output = ()> + Send + 'static) -> Self {
        self.running.drain = Drain::until(end);
        self
    }

    /// What becomes of messages whose handler fails: a [`RetryPolicy`](crate::RetryPolicy), or a [`Retry`]. Without it, they are
    /// tried again by [`RetryPolicy::default`](crate::RetryPolicy::default) and then parked; where that cannot be, for a queue
    /// that is gone with its connection or a stream, they go back to their queue after a second.
    pub fn retry(mut self, retry: impl Into<Retry>) -> Self {
        self.running.retry = Some(retry.into());
        self
    }

    /// Messages are settled before they are handled, and skipped if they were delivered before: none is handled twice,
    /// and some may not be handled at all.
    pub fn at_most_once(mut self) -> Self {
        self.running.mode = Mode::AtMostOnce;
        self
    }

    /// Messages of one key are handled once within this time; further ones are acked and passed over. Without a key
    /// of its own, see [`deduplicate_by`](Self::deduplicate_by), a message is known by its message id; one without any is
    /// always handled.
    ///
    /// The keys are in the memory of this consumer: it suppresses what is sent twice in a short time, and is no promise to
    /// handle a message only once.
    pub fn deduplicate(self, within: Duration) -> Self {
        self.deduplicate_by(within, |incoming| {
            incoming.properties().message_id.map(|id| id.as_bytes().to_vec())
        })
    }

    /// The same, by a key that is made of the message.
    pub fn deduplicate_by(
        mut self,
        within: Duration,
        key: impl Fn(&Incoming) -> Option<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        self.running.seen = Some(Seen::new(within, Arc::new(key)));
        self
    }

    /// Each message is handled once, however often it comes: this inbox remembers which ones were. A copy is acked and counted
    /// as one of [`Summary::duplicates`]. See [`inbox`](crate::inbox) for what that promises, and for an example.
    ///
    /// The handler, with the layers around it, works between the begin of the inbox's transaction and its commit, and the
    /// message is acked after that. Together with [`auto_ack`](Self::auto_ack), [`at_most_once`](Self::at_most_once)
    /// or [`deduplicate`](Self::deduplicate) it is refused. A [batch](Self::handle_batches) has one transaction and one commit; if
    /// anything of it fails, its messages are handled again one by one.
    pub fn exactly_once(mut self, inbox: impl Inbox) -> Self {
        self.running.inbox = Some(Arc::new(inbox));
        self
    }

    /// Tells whoever sent a message, if it has a `reply-to`, that it was handled: an empty reply with its correlation id goes out before
    /// it is acked, and also for a copy that was handled [before](Self::exactly_once). Of one that is parked, an error is told.
    ///
    /// That is the receiver's own acknowledgement, where that of the broker is not enough. Who sends with a
    /// [call](crate::Rpc::call) that is [sent again](crate::Call::resend_after) until it has it has the message handled at least once,
    /// and together with `exactly_once`, once.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leveret::Error> {
    /// use std::time::Duration;
    /// use leveret::{Client, Queue, Topology};
    ///
    /// let client = Client::embedded().await?;
    /// client.apply(&Topology::new().queue(Queue::quorum("jobs"))).await?;
    /// let jobs = client.rpc("jobs").build().await?;
    /// let consumer = client.consumer("jobs").tell_senders().handle(async |job: String| println!("{job}"));
    /// let summary = consumer
    ///     .run_until(async {
    ///         let sending = jobs.call::<()>("sweep", "the hall").resend_after(Duration::from_secs(5));
    ///         sending.await.unwrap(); // it was handled
    ///     })
    ///     .await?;
    /// assert_eq!(summary.handled, 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// With [`auto_ack`](Self::auto_ack), [`at_most_once`](Self::at_most_once), [`deduplicate`](Self::deduplicate) or
    /// [batches](Self::handle_batches) it is refused: those pass over messages of which nobody would be told.
    pub fn tell_senders(mut self) -> Self {
        self.running.tells_senders = true;
        self
    }

    /// A value for handlers to share, one of each type. They get a clone of it as an argument [`State`].
    pub fn state<T: Clone + Send + Sync + 'static>(mut self, value: T) -> Self {
        self.running.states.set(value);
        self
    }

    /// What errors of one type mean for their messages, wherever such an error stands in the chain of causes. The function
    /// returns a [`Verdict`](crate::Verdict), or one with a kind. It may be called for several types. What a handler returns as a
    /// [`Failure`](crate::Failure) made by name, such as `Failure::permanent`, is not asked about.
    ///
    /// ```
    /// use leveret::{Client, Verdict};
    ///
    /// #[derive(Debug)]
    /// enum BillError {
    ///     Declined,
    ///     Offline,
    /// }
    /// # impl std::fmt::Display for BillError {
    /// #     fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
    /// #         write!(f, "{self:?}")
    /// #     }
    /// # }
    /// impl std::error::Error for BillError {} // as thiserror writes it
    ///
    /// async fn bill(card: String) -> Result<(), BillError> {
    ///     match card.as_str() {
    ///         "stolen" => Err(BillError::Declined),
    ///         _ => Err(BillError::Offline),
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leveret::Error> {
    /// let client = Client::embedded().await?;
    /// let runner = client
    ///     .consumer("cards")
    ///     .classify(|error: &BillError| match error {
    ///         BillError::Declined => Verdict::Permanent.kind("declined"), // parked at once
    ///         BillError::Offline => Verdict::Retry.kind("offline"),
    ///     })
    ///     .handle(bill);
    /// # let _ = runner;
    /// # Ok(())
    /// # }
    /// ```
    pub fn classify<E, C>(mut self, classify: impl Fn(&E) -> C + Send + Sync + 'static) -> Self
    where
        E: std::error::Error + 'static,
        C: Into<Classification>,
    {
        self.running.classifiers.add(classify);
        self
    }

    /// A layer of tower around the handler: timeouts, limits, tracing. The first one is the outermost.
    pub fn layer<L>(mut self, layer: L) -> Self
    where
        L: Layer<HandlerService> + Send + Sync + 'static,
        L::Service: Service<Incoming, Response = ()> + Clone + Send + Sync + 'static,
        <L::Service as Service<Incoming>>::Error: Into<BoxError>,
        <L::Service as Service<Incoming>>::Future: Send + 'static,
    {
        self.running.layers.push(service::boxed(layer));
        self
    }

    /// With a handler for each message: an async function whose arguments are picked by type, see [`FromIncoming`].
    pub fn handle<A: 'static>(self, handler: impl Handler<A>) -> Runner {
        let checked = handler.check(&self.given(false));
        let call = self.layered(handler);
        self.needing(checked.map(|()| Topology::new())).call(call)
    }

    /// The same for another queue.
    pub(crate) fn of_queue(mut self, queue: &str) -> Self {
        self.settings.queue = queue.to_owned();
        self
    }

    /// On a channel with transactions, see [`Deliveries::transaction`].
    pub(crate) fn transactional(mut self) -> Self {
        self.settings.transactional = true;
        self
    }

    /// What is done for a message that is not tried again, before it is settled.
    pub(crate) fn on_park(mut self, tell: OnPark) -> Self {
        self.running.on_park = Some(tell);
        self
    }

    pub(crate) fn has_retry(&self) -> bool {
        self.running.retry.is_some()
    }

    pub(crate) fn has_subscribers(&self) -> bool {
        self.running.subscribers > 1
    }

    pub(crate) fn start_draining(&self) -> Draining {
        self.running.drain.start()
    }

    /// A handler with the layers around it.
    pub(crate) fn layered<A: 'static>(&self, handler: impl Handler<A>) -> Call {
        Call::new(handler, &self.running.layers).classified(self.running.classifiers.clone())
    }

    /// A handler that ends with its consumer, if it is to have tasks of its own. What is put around it from here on is done all the
    /// same for a handler that was computing, and is done after all.
    pub(crate) fn until_abandoned(&mut self, call: Call) -> Call {
        let Running { workers, in_one_task, tasks, .. } = &mut self.running;
        if *workers == 1 || *in_one_task || tasks.is_some() {
            return call;
        }
        tasks.insert(HandlerTasks::default()).around(call)
    }

    /// Takes out the inbox, for who asks it by themselves.
    pub(crate) fn take_once(&mut self) -> Option<Once> {
        let inbox = self.running.inbox.take()?;
        Some(Once::new(inbox, &self.client, &self.settings.queue))
    }

    /// What there is for the arguments of handlers, or of the methods of a service.
    pub(crate) fn given(&self, is_service: bool) -> Given<'_> {
        Given::new(&self.running.states, self.running.inbox.as_deref(), is_service)
    }

    pub(crate) fn has_inbox(&self) -> bool {
        self.running.inbox.is_some()
    }

    /// With a prefetch that suits its handlers, unless one was set. Says whether that is for its workers alone.
    fn with_prefetch_for_handlers(mut self, retry: &dyn RetryProfile) -> (Self, bool) {
        let Self { client, settings, running, .. } = &self;
        let (prefetch, is_for_workers) = prefetch::for_handlers(client, settings, running, retry);
        self.settings.prefetch = Some(prefetch);
        (self, is_for_workers)
    }

    /// With what is called for each message, layers and all.
    pub(crate) fn call(self, call: Call) -> Runner {
        Runner::new(self, call)
    }

    /// With a handler for batches of messages: they are acked at once if all of them are done. Batches are handled one
    /// after the other; layers do not apply.
    pub fn handle_batches<F, Fut>(self, options: BatchOptions, handler: F) -> BatchRunner
    where
        F: Fn(Vec<Incoming>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output: IntoBatchOutcome> + Send + 'static,
    {
        BatchRunner::new(self, options, handler)
    }

    /// What was asked for goes together.
    fn check(&self) -> Result<(), Error> {
        self.check_once()?;
        self.check_telling()?;
        let mode = match (self.settings.auto_ack, self.running.mode) {
            (true, _) => "auto-ack",
            (_, Mode::AtMostOnce) => "at most once",
            _ => return Ok(()),
        };
        if self.running.retry.is_none() {
            return Ok(());
        }
        let text = format!(
            "a consumer of queue {:?} is asked to try messages again and to handle them {mode}, which are settled before \
             they are handled: leave one of the two out",
            self.settings.queue
        );
        Err(Error::new(ErrorKind::Invalid, text))
    }

    fn check_once(&self) -> Result<(), Error> {
        if !self.has_inbox() {
            return Ok(());
        }
        let other = if self.settings.auto_ack {
            "with auto-ack, which loses messages"
        } else if self.running.mode == Mode::AtMostOnce {
            "at most once"
        } else if self.running.seen.is_some() {
            "with deduplication, which is what the inbox does"
        } else {
            return Ok(());
        };
        let text = format!(
            "a consumer of queue {:?} is asked to handle messages exactly once and {other}: leave one of the two out",
            self.settings.queue
        );
        Err(Error::new(ErrorKind::Invalid, text))
    }

    fn check_telling(&self) -> Result<(), Error> {
        if !self.running.tells_senders {
            return Ok(());
        }
        if self.settings.auto_ack {
            return Err(self.cannot_tell("to have messages acked as they are sent"));
        }
        if self.running.mode == Mode::AtMostOnce {
            return Err(self.cannot_tell("to handle messages at most once"));
        }
        if self.running.seen.is_some() {
            return Err(self.cannot_tell("to pass over copies: exactly_once tells of them"));
        }
        Ok(())
    }

    fn cannot_tell(&self, what: &str) -> Error {
        let queue = &self.settings.queue;
        let text = format!(
            "a consumer of queue {queue:?} is to tell senders, and {what}: leave one of the two out"
        );
        Error::new(ErrorKind::Invalid, text)
    }

    /// Begins to consume. The queue has to exist, unless it is [declared](Self::declaring) by this.
    pub async fn stream(self) -> Result<Deliveries, Error> {
        self.declare().await?;
        self.begin(&Retry::discard().profile()).await
    }

    /// The same, once all is declared.
    async fn begin(self, retry: &Arc<dyn RetryProfile>) -> Result<Deliveries, Error> {
        let ConsumerBuilder { client, settings, running, needs } = self;
        let context = ConsumerContext::new(&settings.queue, Arc::clone(retry), running.states);
        let source = Source::new(&client, settings, needs.temporary)?;
        let consumer = source.first().await?;
        Ok(Deliveries::new(source, consumer, client, context))
    }
}
