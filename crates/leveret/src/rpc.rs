//! RPC: calls with typed replies, and services whose methods are async functions.
//!
//! Everything on the wire is plain AMQP, so that clients and services in other languages can be on the other side: `reply-to`,
//! `correlation-id`, and `type` for the method where the routing key does not name it.
//!
//! ```text
//! leveret  call.rs              Call, awaited: Rpc::request; RpcChannel::permit (a semaphore), send
//!          channel.rs           RpcChannel::send: correlation id, reply address
//!          channel.rs           Shared::send_on: locks PendingCalls
//! amqp     publish.rs           Channel::publish_now, mandatory: the frames are in the outbound buffer
//! leveret  pending_calls.rs     PendingCalls::insert: the call, and its id in the ConfirmTracker; unlocks
//!          -- broker: the queue of the service --
//! leveret  replying_handler.rs  ReplyingHandler::handle, as the handler of a consumer
//!          method.rs            Dispatch: finds the method; what it returns stays in the ReplyRoute
//!          reply_route.rs       ReplyRoute::finish: publishes the reply, and waits for its confirm; then the consumer acks
//!          -- broker: direct reply-to, or a reply queue --
//! amqp     inlet.rs             Inlet::sort, wake: the replies of one read together
//! leveret  channel.rs           Shared::receive: PendingCalls::receive finds each call by its correlation id; unlocks, wakes
//!          channel.rs           ReplyReceiver::poll_next
//!          call.rs              FromReply
//! ```
//!
//! A call without a reply fails in the same place, `PendingCalls`: by a nack or a returned request
//! (`RequestConfirms` in `channel.rs`), or by the loss of the channel (`task.rs`), which may resend the request instead. Its timeout
//! drops it, and a call that is dropped is removed.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OnceCell;

use crate::amqp::ShortStr;
use crate::connection::Client;
use crate::error::{Error, ErrorKind};
use crate::message::{IntoMessage, Message};
use crate::publisher::{OnLoss, Publisher};
use crate::telemetry::{Called, UnmatchedReplies};

mod address;
mod call;
mod channel;
mod correlation;
mod method;
mod pending_calls;
mod receipt;
mod replier;
mod reply;
mod reply_route;
mod replying_handler;
mod request;
mod service;
mod stream;
mod task;
mod transaction;

pub use call::{Call, CallFuture};
pub(crate) use channel::{ReplyReceiver, RpcChannel, Settings as RpcSettings};
pub(crate) use correlation::new_correlation_id;
pub use method::{End, IntoReply, Method};
pub(crate) use pending_calls::ReplyMode;
pub(crate) use receipt::Receipts;
pub use replier::Replier;
pub use reply::{FromReply, Reply};
pub(crate) use reply_route::ReplyRoute;
pub(crate) use request::{CallFailure, Request};
pub use service::ServiceBuilder;
pub use stream::{ReplyStream, StreamCall};

use address::{ServiceAddress, Style};
use pending_calls::ReplyResult;

/// How many calls may be in flight at a time by default: with their requests, a few megabytes.
const MAX_IN_FLIGHT: usize = 4096;

/// Where replies come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replies {
    /// To the caller's channel, without a queue: RabbitMQ's direct reply-to. The default; a broker that does not have it
    /// gets a [`Queue`](Replies::Queue).
    #[default]
    Direct,
    /// To one queue for all calls, made with the first one and gone with the connection.
    Queue,
    /// To a queue for each call, gone with it: as some designs have it. Whatever comes to the queue is a reply to that call,
    /// with a correlation id or without. Costs three round trips more.
    QueuePerCall,
}

/// Configures the calls of a service.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use std::time::Duration;
/// use leveret::{Client, ErrorKind, Json, Replies};
///
/// let client = Client::embedded().await?;
/// let prices = client
///     .rpc("prices")
///     .shared_exchange("services") // requests go there, with the routing key prices.quote
///     .replies(Replies::Queue)
///     .timeout(Duration::from_secs(2))
///     .build()
///     .await?;
/// // The exchange is not declared.
/// let error = prices.call::<Json<f64>>("quote", Json("IBM")).await.unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Missing);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct RpcBuilder {
    client: Client,
    address: ServiceAddress,
    timeout: Option<Duration>,
    on_loss: OnLoss,
    replies: Replies,
    max_in_flight: usize,
}

impl Client {
    /// A service to be called, by its name.
    pub fn rpc(&self, service: impl Into<String>) -> RpcBuilder {
        RpcBuilder::new(self.clone(), service.into())
    }
}

impl RpcBuilder {
    pub(crate) fn new(client: Client, service: String) -> Self {
        RpcBuilder {
            client,
            address: ServiceAddress::new(service),
            timeout: None,
            on_loss: OnLoss::Fail,
            replies: Replies::default(),
            max_in_flight: MAX_IN_FLIGHT,
        }
    }

    /// Requests go to an exchange of the service's own, and the routing key is the method. By default they go straight to
    /// the queue that is named like the service, and the property `type` has the method.
    pub fn exchange(mut self, exchange: impl Into<String>) -> Self {
        self.address.style = Style::Own(exchange.into());
        self
    }

    /// Requests go to an exchange that several services share, and the routing key is the service, a dot and the method:
    /// `prices.quote`.
    pub fn shared_exchange(mut self, exchange: impl Into<String>) -> Self {
        self.address.style = Style::Shared(exchange.into());
        self
    }

    /// How long a call may take, unless [it says otherwise](Call::timeout). By default it may take for ever.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// What becomes of calls that were in flight when the connection was lost. By default they fail as
    /// [`ErrorKind::Lost`]; with [`OnLoss::Replay`] their requests are sent again, with the same ids, and the service may
    /// get one twice. If the broker has closed the channel because of a request, all of them fail, those that it had
    /// confirmed before as [`ErrorKind::Lost`]; if it has closed the connection, which may have been for something else,
    /// those fail that are under way when it happens again.
    pub fn on_loss(mut self, on_loss: OnLoss) -> Self {
        self.on_loss = on_loss;
        self
    }

    /// Where replies come to.
    pub fn replies(mut self, replies: Replies) -> Self {
        self.replies = replies;
        self
    }

    /// How many calls may be in flight at a time; the next one waits. 4096 by default.
    pub fn max_in_flight(mut self, calls: usize) -> Self {
        self.max_in_flight = calls.max(1);
        self
    }

    /// The service, to be called. Nothing is sent to the broker before the first call.
    pub async fn build(self) -> Result<Rpc, Error> {
        let RpcBuilder { client, address, timeout, on_loss, replies, max_in_flight } = self;
        client.core().check_open()?;
        if replies == Replies::QueuePerCall && on_loss == OnLoss::Replay {
            let text = "a call with a queue of its own loses that with the connection, and cannot be sent again: leave out \
                        OnLoss::Replay, or take Replies::Queue";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let settings = RpcSettings {
            what: format!("calling service {:?}", address.service),
            exchange: address.exchange().to_owned(),
            replies,
            on_loss,
            max_in_flight,
        };
        let unmatched = UnmatchedReplies::new(&address.service);
        let inner = Inner {
            channel: RpcChannel::new(&client, settings, unmatched),
            counts: Called::new(&address.service),
            address,
            timeout,
            cast_publisher: OnceCell::new(),
            client,
        };
        Ok(Rpc { inner: Arc::new(inner) })
    }
}

/// A service, to be called.
///
/// It clones cheaply. Any number of calls may be in flight at the same time, from any number of tasks: each gets the reply
/// that carries its correlation id, or comes to [its own queue](Replies::QueuePerCall), and no other. A reply that comes late, twice
/// or without a call is counted and ignored.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::BoxError> {
/// use std::time::Duration;
/// use leveret::{Client, End, ErrorKind, Failure, Json, Replier};
///
/// // A method is an async function: its arguments are picked by type, and its result is the reply.
/// async fn quote(Json(symbol): Json<String>) -> Result<Json<f64>, Failure> {
///     match symbol.as_str() {
///         "IBM" => Ok(Json(142.5)),
///         other => Err(Failure::permanent(format!("no price for {other}")).kind("unknown-symbol")),
///     }
/// }
///
/// // One with several replies sends them before it returns.
/// async fn history(Json(days): Json<u32>, mut replier: Replier) -> Result<End, leveret::Error> {
///     for day in 0..days {
///         replier.send(Json(142.0 + f64::from(day))).await?;
///     }
///     Ok(End)
/// }
///
/// let client = Client::embedded().await?;
/// let service = client.service("prices").method("quote", quote).method("history", history);
/// service.declare().await?; // from now on requests wait for the service
/// let service = tokio::spawn(service.run());
///
/// let prices = client.rpc("prices").build().await?;
/// let Json(price): Json<f64> = prices.call("quote", Json("IBM")).timeout(Duration::from_secs(2)).await?;
/// assert_eq!(price, 142.5);
///
/// let error = prices.call::<Json<f64>>("quote", Json("XYZ")).await.unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Remote);
/// assert_eq!(error.remote().unwrap().kind, "unknown-symbol");
///
/// let mut days = prices.stream::<Json<f64>>("history", Json(3)).await?;
/// while let Some(price) = days.next().await {
///     println!("{}", price?.0);
/// }
///
/// prices.cast("quote", Json("IBM")).await?; // asks for no reply: Ok says that it is in the queue
/// # service.abort();
/// # Ok(())
/// # }
/// ```
///
/// # What happened, when it failed
///
/// | [`ErrorKind`] | |
/// |---|---|
/// | `Remote` | the service has answered with an error: [`Error::remote`] |
/// | `TimedOut` | no reply came in time, or the request could not be sent in the client's time |
/// | `Unroutable`, `Missing` | there is no queue for the request, or no such exchange: no service got it |
/// | `Nacked` | the broker could not take the request |
/// | `Lost` | the connection was lost, and with it the reply: it may have been handled, or not |
/// | `Payload` | the reply is not what was asked for |
///
/// # What goes over the wire
///
/// A request has `reply-to`, a UUID as its `correlation-id` and `message-id`, and the method as its `type`, unless the
/// routing key is the method. A call of the method `""` has no `type` of its own accord: that is for services that know nothing
/// of methods. A reply has the `correlation-id` of its request. These headers are optional:
///
/// | header of a reply | |
/// |---|---|
/// | `leveret-error` | it is an error of this kind, and its body the text |
/// | `leveret-reply` | `more`: others follow; `end`: none follows, and this one is no value |
/// | `leveret-reply-number` | of one that others follow: 1, 2 and so on |
#[derive(Clone)]
pub struct Rpc {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    channel: RpcChannel,
    address: ServiceAddress,
    timeout: Option<Duration>,
    counts: Called,
    /// Publishes casts, from the first one on.
    cast_publisher: OnceCell<Publisher>,
    client: Client,
}

impl Rpc {
    /// Calls a method, and waits for its reply. To be awaited, which gives the reply as what is asked for: see [`FromReply`].
    ///
    /// The request is mandatory and confirmed: if there is no queue for it, or the broker cannot take it, the call fails at
    /// once. It is transient unless it says otherwise. A call that is dropped is forgotten; the service may
    /// handle it all the same.
    pub fn call<'r, R: FromReply>(
        &'r self,
        method: &'r str,
        message: impl IntoMessage,
    ) -> Call<'r, R> {
        Call::new(self, method, message.into_message())
    }

    /// Calls a method that has several replies, and gives a stream of them.
    pub fn stream<'r, R: FromReply>(
        &'r self,
        method: &'r str,
        message: impl IntoMessage,
    ) -> StreamCall<'r, R> {
        StreamCall::new(self, method, message.into_message())
    }

    /// Sends a request that asks for no reply. `Ok` means that it is in the queue of the service.
    ///
    /// Properties and headers that the message has are not changed. Where it has none, it gets
    ///
    /// - the delivery mode 2, because no reply tells the caller that a restart of the broker has lost the request;
    /// - an id and a timestamp: the client publishes again what was not confirmed when the connection was lost, and without an
    ///   id an [inbox](crate::inbox) of the service cannot recognise the copy, and parks the request;
    /// - the header `traceparent`, and those that belong to it, while spans are collected or within a
    ///   [trace](crate::TraceContext).
    ///
    /// The method is a part of the address: a service that is called by the name of its queue finds it in the property `type`.
    /// A message with another `type` of its own is refused, unless the method is `""`: then the `type` stays as it is.
    pub async fn cast(&self, method: &str, message: impl IntoMessage) -> Result<(), Error> {
        let mut message = message.into_message()?;
        let Inner { address, client, .. } = &*self.inner;
        if let Some(kind) = address.kind(method) {
            let own = message.extra.as_ref().and_then(|extra| extra.properties.kind.as_ref());
            check_type(own, kind)?;
            message = message.kind(kind);
        }
        let make = || client.publisher(address.exchange()).build();
        let publisher = self.inner.cast_publisher.get_or_try_init(make).await?;
        publisher.publish(&address.routing_key(method), message).await
    }

    /// The service, by its name.
    pub fn service(&self) -> &str {
        &self.inner.address.service
    }

    /// How many calls are in flight.
    pub fn in_flight(&self) -> usize {
        self.inner.channel.in_flight()
    }

    /// How many replies matched no pending call: late, repeated, or never asked for.
    pub fn stray_replies(&self) -> u64 {
        self.inner.channel.unmatched()
    }

    fn describe<'a>(&'a self, method: &'a str) -> CallDescription<'a> {
        CallDescription { service: self.service(), method }
    }

    fn request<'a>(&'a self, method: &'a str, message: Message) -> Result<Request<'a>, Error> {
        let address = &self.inner.address;
        let mut request = Request::new(address.exchange(), address.routing_key(method), message)?;
        if let Some(kind) = address.kind(method) {
            let properties = &mut request.properties;
            check_type(properties.kind.as_ref(), kind)?;
            properties.kind = Some(kind.try_into().map_err(|error| {
                Error::new(ErrorKind::Invalid, format!("the name of the method: {error}"))
            })?);
        }
        Ok(request)
    }

    /// The reply to a call, which has exactly one.
    fn reply(&self, method: &str, reply: Option<ReplyResult>) -> Result<Reply, Error> {
        let reply = reply.unwrap_or(Err(CallFailure::NoValue));
        reply.map_err(|failure| failure.into_error(self.describe(method)))
    }
}

/// The method goes into the property `type`. Fails if the message has another `type` of its own.
fn check_type(own: Option<&ShortStr<'_>>, method: &str) -> Result<(), Error> {
    let Some(own) = own.filter(|own| own.as_bytes() != method.as_bytes()) else { return Ok(()) };
    let text = format!(
        "the message has the type {own:?}, and the method {method:?} would take its place: leave one of them out, or reach \
         the service over an exchange, where the routing key is the method"
    );
    Err(Error::new(ErrorKind::Invalid, text))
}

impl fmt::Debug for Rpc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rpc")
            .field("service", &self.service())
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

/// What a call attempts, for errors.
#[derive(Clone, Copy)]
struct CallDescription<'a> {
    service: &'a str,
    method: &'a str,
}

impl fmt::Display for CallDescription<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "calling {:?} of service {:?}", self.method, self.service)
    }
}
