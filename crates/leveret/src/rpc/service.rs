//! A service: a consumer whose handler replies.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tower::{Layer, Service};

use super::address::{ServiceAddress, Style};
use super::method::{Dispatch, Method, Methods};
use super::reply_route::ReplyOutput;
use super::replying_handler::ReplyingHandler;
use super::transaction::TransactionalService;
use crate::amqp::ShortStr;
use crate::connection::Client;
use crate::consumer::{
    ConsumerBuilder, HandlerService, Incoming, InstrumentedHandler, Runner, Summary, unless,
};
use crate::error::{BoxError, Error, ErrorKind};
use crate::inbox::Inbox;
use crate::retry::{Classification, Retry};
use crate::telemetry::{Consumed, Replied};
use crate::topology::{Applied, Exchange, Queue, Topology};

/// How many requests are handled at the same time, unless said otherwise.
const WORKERS: usize = 16;

/// How a service is offered: its methods, and how they are run. See [`Rpc`](super::Rpc) for an example, and for how it is
/// called.
///
/// A request with a `reply-to` is a call, and gets a reply; any other one is a cast. The reply goes to the queue of that name,
/// or to an exchange if it is an address such as `topic://exchange/key`, with the correlation id of the request, and is
/// confirmed before the request is acked. If the caller is gone, the reply is counted as undeliverable, and the request is done.
///
/// An error of a method becomes a reply that says so. A cast that fails is tried again and parked, as a consumer's messages
/// are. Several instances of a service, in one program or many, share its requests.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use std::time::Duration;
/// use leveret::{Client, Json, Queue, RetryPolicy, State};
///
/// async fn add(Json(numbers): Json<Vec<i64>>, State(offset): State<i64>) -> Json<i64> {
///     Json(offset + numbers.iter().sum::<i64>())
/// }
///
/// let client = Client::embedded().await?;
/// let sums = client
///     .service("sums")
///     .queue(Queue::quorum("sums")) // in place of a classic one
///     .method("add", add)
///     .state(1000_i64)
///     .workers(4)
///     .layer(tower::timeout::TimeoutLayer::new(Duration::from_secs(30)))
///     .retry(RetryPolicy::fixed(Duration::from_secs(1)).max_retries(3)); // of casts
/// sums.declare().await?;
///
/// let rpc = client.rpc("sums").build().await?;
/// let summary = sums
///     .run_until(async {
///         let Json(sum): Json<i64> = rpc.call("add", Json([1, 2, 3])).await.unwrap();
///         assert_eq!(sum, 1006);
///     })
///     .await?;
/// assert_eq!(summary.handled, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct ServiceBuilder {
    client: Client,
    consumer: ConsumerBuilder,
    methods: Methods,
    queue: Queue,
    workers: Option<usize>,
    prefetch: Option<u16>,
    retries_calls: bool,
    is_transactional: bool,
}

impl Client {
    /// A service to be offered, by its name.
    pub fn service(&self, name: impl Into<String>) -> ServiceBuilder {
        ServiceBuilder::new(self.clone(), name.into())
    }
}

impl ServiceBuilder {
    pub(crate) fn new(client: Client, name: String) -> Self {
        ServiceBuilder {
            consumer: client.consumer(name.clone()),
            queue: Queue::classic(name.clone()),
            methods: Methods::new(ServiceAddress::new(name)),
            client,
            workers: None,
            prefetch: None,
            retries_calls: false,
            is_transactional: false,
        }
    }

    /// A method, by its name: an async function whose arguments are picked by type, see
    /// [`FromIncoming`](crate::FromIncoming), and whose result is the reply, see [`IntoReply`](crate::IntoReply). Two of one
    /// name are refused when the service is declared or run.
    pub fn method<A: 'static>(mut self, name: &str, method: impl Method<A>) -> Self {
        self.methods.add(name, method);
        self
    }

    /// What is called for requests of any other method, and for those that name none. A service with a fallback alone has one
    /// function for all requests, for callers that know nothing of methods:
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leveret::Error> {
    /// # let client = leveret::Client::embedded().await?;
    /// let shouting = client.service("shouting").fallback(async |text: String| text.to_uppercase());
    /// # drop(shouting);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Without a fallback such requests are answered with an error of the kind `unknown-method`; one that asks for no reply is
    /// parked. A request names its method in the property `type`, or by its routing key if it comes over the
    /// [exchange](Self::exchange) of the service. To serve requests without a name beside methods with names, name a method
    /// `""`.
    pub fn fallback<A: 'static>(mut self, method: impl Method<A>) -> Self {
        self.methods.set_fallback(method);
        self
    }

    /// Requests come over an exchange of the service's own, a direct one, and the routing key is the method. Others may bind
    /// queues to it, to see what is asked. By default requests come straight to the queue that is named like the service,
    /// and the property `type` has the method.
    pub fn exchange(mut self, exchange: impl Into<String>) -> Self {
        self.methods.address.style = Style::Own(exchange.into());
        self
    }

    /// Requests come over a topic exchange that several services share, and the routing key is the service, a dot and the
    /// method: `prices.quote`. Where names of methods have dots, no service should be named like the beginning of another: the
    /// method `b.c` of a service `a` and the method `c` of a service `a.b` have the same key, and both get the requests for either.
    pub fn shared_exchange(mut self, exchange: impl Into<String>) -> Self {
        self.methods.address.style = Style::Shared(exchange.into());
        self
    }

    /// The queue that requests wait in, in place of a durable classic one that is named like the service. That is the
    /// default because a caller waits for the reply, and notices when there is none; where requests without replies must
    /// survive the loss of a node, take a quorum queue.
    pub fn queue(mut self, queue: Queue) -> Self {
        self.queue = queue;
        self
    }

    /// How many requests are handled at the same time. 16 by default.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = Some(workers.max(1));
        self
    }

    /// Methods run within the service's own task: for those that wait, and compute little. See
    /// [`ConsumerBuilder::in_one_task`].
    pub fn in_one_task(mut self) -> Self {
        self.consumer = self.consumer.in_one_task();
        self
    }

    /// How many requests may be here at a time, those that wait for a worker included. As many as workers by default, see
    /// [`ConsumerBuilder::prefetch`].
    pub fn prefetch(mut self, requests: u16) -> Self {
        self.prefetch = Some(requests.max(1));
        self
    }

    /// How many subscriptions handle requests beside each other, see [`ConsumerBuilder::subscribers`]. One by default.
    pub fn subscribers(mut self, subscribers: usize) -> Self {
        self.consumer = self.consumer.subscribers(subscribers);
        self
    }

    /// How long methods get to finish when the service is stopped. Half a minute by default.
    pub fn drain(mut self, time: Duration) -> Self {
        self.consumer = self.consumer.drain(time);
        self
    }

    /// Lets methods finish until this future is done, see [`ConsumerBuilder::drain_until`].
    pub fn drain_until(mut self, end: impl Future<Output = ()> + Send + 'static) -> Self {
        self.consumer = self.consumer.drain_until(end);
        self
    }

    /// What becomes of requests without replies whose method fails, see [`ConsumerBuilder::retry`]. One that asks for a reply
    /// gets an error as its reply, unless there is [`retry_calls`](Self::retry_calls).
    pub fn retry(mut self, retry: impl Into<Retry>) -> Self {
        self.consumer = self.consumer.retry(retry);
        self
    }

    /// Requests that ask for a reply are tried again, too, and get one when it goes well, or an error when they are parked.
    pub fn retry_calls(mut self) -> Self {
        self.retries_calls = true;
        self
    }

    /// Each request is a transaction: it is handled, its replies are published, it is acked, and all of that happens with one
    /// commit or not at all. Requests are handled one after the other, and replies go out when the method is done. (RabbitMQ 3.10
    /// does not hold back direct replies for the commit: callers that must not see one too early take
    /// [`Replies::Queue`](crate::Replies::Queue).)
    ///
    /// There are no confirms in a transaction, so there is nothing that moves failed requests: one that asks for no reply,
    /// and fails, goes to the dead-letter exchange of the queue, or away if that has none. Together with more than one worker
    /// or subscriber, or with retrying, it is refused.
    pub fn transactional(mut self) -> Self {
        self.is_transactional = true;
        self
    }

    /// Each request is handled once, however often it comes: this inbox remembers which ones were, and their replies. A copy
    /// gets the same reply, byte for byte. See [`inbox`](crate::inbox) for what that promises.
    ///
    /// The method, with the layers around it, works between the begin of the inbox's transaction and its commit; then the
    /// reply goes out, and then the request is acked. If it fails, what it has changed is undone; the error is the reply,
    /// and remains so for copies, unless there is [`retry_calls`](Self::retry_calls). A method that has a
    /// [`Replier`](crate::Replier) cannot be called in this way.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leveret::Error> {
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use std::time::Duration;
    /// use leveret::inbox::{MemoryInbox, Remember};
    /// use leveret::{Client, Json, Message};
    ///
    /// static TICKETS: AtomicU64 = AtomicU64::new(1);
    ///
    /// let client = Client::embedded().await?;
    /// let service = client
    ///     .service("tickets")
    ///     .exactly_once(MemoryInbox::new(Remember::ids_for(Duration::from_secs(3600))))
    ///     .method("draw", || async { Json(TICKETS.fetch_add(1, Ordering::Relaxed)) });
    /// service.declare().await?;
    /// let rpc = client.rpc("tickets").build().await?;
    /// let summary = service
    ///     .run_until(async {
    ///         for _ in 0..2 {
    ///             let request = Message::new("").message_id("the ticket of Ada");
    ///             let Json(ticket): Json<u64> = rpc.call("draw", request).await.unwrap();
    ///             assert_eq!(ticket, 1);
    ///         }
    ///     })
    ///     .await?;
    /// assert_eq!((summary.handled, summary.duplicates), (1, 1));
    /// # Ok(())
    /// # }
    /// ```
    pub fn exactly_once(mut self, inbox: impl Inbox) -> Self {
        self.consumer = self.consumer.exactly_once(inbox);
        self
    }

    /// A value for methods to share, one of each type. They get a clone of it as an argument [`State`](crate::State).
    pub fn state<T: Clone + Send + Sync + 'static>(mut self, value: T) -> Self {
        self.consumer = self.consumer.state(value);
        self
    }

    /// What errors of one type mean, see [`ConsumerBuilder::classify`]: whether a request without a reply is tried again, and the
    /// kind of the error that a caller gets.
    pub fn classify<E, C>(mut self, classify: impl Fn(&E) -> C + Send + Sync + 'static) -> Self
    where
        E: std::error::Error + 'static,
        C: Into<Classification>,
    {
        self.consumer = self.consumer.classify(classify);
        self
    }

    /// A layer of tower around the methods: timeouts, limits, tracing. The first one is the outermost. An error of a layer is
    /// answered like one of a method.
    pub fn layer<L>(mut self, layer: L) -> Self
    where
        L: Layer<HandlerService> + Send + Sync + 'static,
        L::Service: Service<Incoming, Response = ()> + Clone + Send + Sync + 'static,
        <L::Service as Service<Incoming>>::Error: Into<BoxError>,
        <L::Service as Service<Incoming>>::Future: Send + 'static,
    {
        self.consumer = self.consumer.layer(layer);
        self
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.methods.address.service
    }

    /// The names of its methods, sorted.
    pub fn method_names(&self) -> Vec<String> {
        self.methods.names()
    }

    /// Whether it has a [fallback](Self::fallback).
    pub fn has_fallback(&self) -> bool {
        self.methods.has_fallback()
    }

    /// What the service needs: its queue, and where it has an exchange that one, with a binding for each method. With a
    /// [fallback](Self::fallback), all requests for the service come over a shared exchange; over one of its own only those
    /// for its methods, and others are unroutable. Bindings of methods that the service no longer has are not undone.
    pub fn topology(&self) -> Topology {
        let ServiceAddress { service, style } = &self.methods.address;
        let mut queue = self.queue.clone();
        let topology = Topology::new();
        match style {
            Style::Queue => topology.queue(queue),
            Style::Own(exchange) => {
                for method in self.methods.names() {
                    queue = queue.bind(exchange, method);
                }
                topology.exchange(Exchange::direct(exchange)).queue(queue)
            }
            Style::Shared(exchange) => {
                for method in self.methods.names() {
                    queue = queue.bind(exchange, format!("{service}.{method}"));
                }
                if self.methods.has_fallback() {
                    queue = queue.bind(exchange, format!("{service}.#"));
                }
                topology.exchange(Exchange::topic(exchange)).queue(queue)
            }
        }
    }

    fn check(&self) -> Result<(), Error> {
        let ServiceAddress { service, style } = &self.methods.address;
        let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
        if self.queue.name().is_empty() {
            return invalid(format!(
                "service {service:?} has a queue without a name, which would be another one whenever it runs: name it"
            ));
        }
        if *style == Style::Queue && self.queue.name() != service {
            return invalid(format!(
                "service {service:?} is to have the queue {:?}, and is called by the name of its queue: give both the \
                 same name, or the service an exchange",
                self.queue.name()
            ));
        }
        if self.is_transactional {
            self.check_transactional()?;
        }
        self.methods.check(&self.consumer.given(true))?;
        let is_pattern = |name: &String| name.contains(['#', '*']);
        if let Some(name) = self.methods.names().into_iter().find(is_pattern) {
            return invalid(format!("a method cannot be named {name:?}: that is a pattern"));
        }
        let is_long = |name: &String| ShortStr::try_from(name.as_str()).is_err();
        if let Some(name) = self.methods.names().into_iter().find(is_long) {
            return invalid(format!(
                "the method {name:?} cannot be called: its name has {} bytes, and AMQP takes at most 255",
                name.len()
            ));
        }
        if let Some(name) = self.methods.twice() {
            return invalid(format!(
                "service {service:?} has two methods {name:?}, of which only the last would be called: name one of them \
                 otherwise, or leave it out"
            ));
        }
        if matches!(style, Style::Shared(_)) && is_pattern(service) {
            return invalid(format!(
                "a service of a shared exchange cannot be named {service:?}: that is a pattern, and it would get the \
                 requests for others"
            ));
        }
        Ok(())
    }

    fn check_transactional(&self) -> Result<(), Error> {
        let other = if self.workers.is_some_and(|workers| workers > 1) {
            "more than one worker, and a transaction is one request at a time"
        } else if self.prefetch.is_some_and(|prefetch| prefetch > 1) {
            "a prefetch, and a transaction is one request at a time"
        } else if self.consumer.has_subscribers() {
            "more than one subscriber, and a transaction is one request at a time"
        } else if self.consumer.has_inbox() {
            "an inbox, which commits by itself"
        } else if self.consumer.has_retry() || self.retries_calls {
            "a retry policy, which moves requests by confirmed publishes"
        } else {
            return Ok(());
        };
        let text = format!(
            "service {:?} is to be transactional, and to have {other}: leave one of the two out",
            self.methods.address.service
        );
        Err(Error::new(ErrorKind::Invalid, text))
    }

    /// Declares what the service [needs](Self::topology): from then on requests wait for it, if it does not run yet. Running it
    /// does the same.
    pub async fn declare(&self) -> Result<Applied, Error> {
        self.check()?;
        self.client.apply(&self.topology()).await
    }

    /// Serves until the client is closed.
    pub async fn run(self) -> Result<Summary, Error> {
        self.run_until(std::future::pending::<()>()).await
    }

    /// Declares what the service [needs](Self::topology) and serves until `stop` is done: then takes no more requests, lets
    /// the methods that are at work finish and reply within the time for draining, and returns what was done.
    ///
    /// It fails if the service cannot begin, or ends because its queue stays away.
    pub async fn run_until(self, stop: impl Future) -> Result<Summary, Error> {
        let mut stop = std::pin::pin!(stop);
        let Some(declared) = unless(&mut stop, self.declare()).await else {
            return Ok(Summary::default());
        };
        declared?;
        if self.is_transactional {
            return self.transactions().run_until(stop).await;
        }
        let Some(runner) = unless(&mut stop, self.runner()).await else {
            return Ok(Summary::default());
        };
        runner?.run_until(stop).await
    }

    async fn runner(self) -> Result<Runner, Error> {
        let service = &self.methods.address.service;
        let output = ReplyOutput::confirmed(&self.client, service).await?;
        let workers = self.workers.unwrap_or(WORKERS);
        let mut consumer = self.consumer.of_queue(self.queue.name()).workers(workers);
        if let Some(prefetch) = self.prefetch {
            consumer = consumer.prefetch(prefetch);
        }
        if self.retries_calls {
            consumer = consumer.on_park(output.clone().on_park());
        }
        let once = consumer.take_once();
        let methods = consumer.layered(Dispatch(Arc::new(self.methods)));
        let retries_calls = self.retries_calls;
        let call = match once {
            Some(once) => ReplyingHandler { methods, output, retries_calls }.once(once),
            None => {
                let methods = consumer.until_abandoned(methods);
                ReplyingHandler { methods, output, retries_calls }.call()
            }
        };
        Ok(consumer.call(call))
    }

    fn transactions(self) -> TransactionalService {
        let counts = Replied::new(&self.methods.address.service);
        let consumer = self.consumer.of_queue(self.queue.name());
        let methods = consumer.layered(Dispatch(Arc::new(self.methods)));
        let handler = InstrumentedHandler::new(methods, Consumed::new(self.queue.name()));
        TransactionalService::new(self.client, consumer, handler, counts)
    }
}

impl fmt::Debug for ServiceBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceBuilder")
            .field("address", &self.methods.address)
            .field("methods", &self.methods.names())
            .finish_non_exhaustive()
    }
}
