//! Messaging on AMQP 0-9-1 (RabbitMQ) that does not lose work.
//!
//! An application holds a [`Client`]. It declares what it needs as a [`Topology`], publishes with a [`Publisher`] and
//! consumes with a [`ConsumerBuilder`]; it calls services with an [`Rpc`], and offers them with a [`ServiceBuilder`]. Brokers
//! may come and go underneath.
//!
//! ```
//! use std::time::Duration;
//!
//! use leveret::prelude::*;
//! use serde::{Deserialize, Serialize};
//! use tokio::sync::mpsc;
//!
//! #[derive(Clone, Serialize, Deserialize)]
//! struct Order {
//!     number: u32,
//! }
//!
//! // A handler is an async function: its arguments are picked by type, and its result decides what becomes of the message.
//! async fn bill(Json(order): Json<Order>, State(bills): State<mpsc::Sender<u32>>) -> Result<(), BoxError> {
//!     Ok(bills.send(order.number).await?)
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! // No server needed; or Client::connect("amqp://localhost"), or a list of URLs, of which the first that answers is used.
//! let client = Client::embedded().await?;
//!
//! // Topology is a value. Once applied, it is remembered, and restored after every reconnect.
//! let topology = Topology::new()
//!     .exchange(Exchange::topic("orders"))
//!     .queue(Queue::quorum("billing").bind("orders", "order.*"))
//!     .queue(Queue::quorum("audit").bind("orders", "#"));
//! client.apply(&topology).await?;
//!
//! // Publishing: `Ok` means routed, confirmed, safe. The error says which of unroutable, nacked, timed out, lost.
//! let orders = client.publisher("orders").build().await?;
//! let order = Order { number: 1 };
//! orders.publish("order.created", Json(&order)).await?;
//! let ticket = orders.send("order.created", Json(&order)).await?; // for throughput: in the window now ...
//! ticket.await?; // ... and safe now
//! orders.publish_batch((2..10).map(|number| ("order.created", Json(Order { number })))).await?;
//!
//! // Consuming, with a handler: it drains when it is told to stop, and says what it did.
//! let (sender, mut bills) = mpsc::channel::<u32>(100);
//! let ten_bills = async { for _ in 0..10 { bills.recv().await; } };
//! let summary = client
//!     .consumer("billing")
//!     .workers(16)
//!     .layer(tower::timeout::TimeoutLayer::new(Duration::from_secs(30)))
//!     .state(sender)
//!     .handle(bill)
//!     .run_until(ten_bills)
//!     .await?;
//! assert_eq!(summary.handled, 10);
//!
//! // Or as a stream, which goes on when the broker was away.
//! let mut deliveries = client.consumer("audit").stream().await?;
//! let delivery = deliveries.next().await.expect("ten of them")?;
//! delivery.ack()?;
//! client.close().await;
//! # Ok(())
//! # }
//! ```
//!
//! Services [call](Client::rpc) each other and [offer](Client::service) methods; [events](Client::events) are broadcast to
//! whoever subscribes.
//!
//! # What is counted
//!
//! With the feature `metrics`, for any collector of the facade `metrics` that was installed before:
//!
//! | name | of each | what |
//! |---|---|---|
//! | `leveret_published_total` | exchange | counter: messages that were sent to the broker, each once |
//! | `leveret_confirmed_total`, `leveret_nacked_total`, `leveret_returned_total` | exchange | counters: the broker's answers |
//! | `leveret_lost_total`, `leveret_replayed_total` | exchange | counters: no answer before the channel went; sent again |
//! | `leveret_consumed_total` | queue | counter: messages that were taken from the queue, by streams and handlers |
//! | `leveret_acked_total`, `leveret_failed_total` | queue | counters: messages whose handler succeeded, or not |
//! | `leveret_retried_total`, `leveret_parked_total` | queue | counters: failed messages that wait to be tried again, and those that are not |
//! | `leveret_in_flight` | queue | gauge: messages that handlers are at work on |
//! | `leveret_handler_seconds` | queue | histogram: how long handlers take, for a message or a batch |
//! | `leveret_duplicates_total`, `leveret_given_up_total` | queue | counters: messages that an [`inbox`] knew already; those that it no longer waits for |
//! | `leveret_calls_total` | service, outcome | counter: calls that ended with a `reply`, `remote` error, `timed-out`, `unroutable`, `lost` or `other` |
//! | `leveret_call_seconds` | service | histogram: how long calls take |
//! | `leveret_stray_replies_total` | service | counter: replies that came for nobody |
//! | `leveret_replies_total` | service, kind | counter: replies of a service that are a `value` or `error`; `undeliverable`: found nobody |
//! | `leveret_pool_wait_seconds` | | histogram: how long borrowers wait for a channel |
//!
//! # What is traced
//!
//! Spans and events go to `tracing`, under the target `leveret`, by OpenTelemetry's conventions for messaging. What nobody
//! collects costs nothing.
//!
//! | span | of each | fields |
//! |---|---|---|
//! | `publish` | publish, from its begin to its outcome; send, until it is sent; batch | destination, routing key, message and conversation id, number of messages of a batch, error |
//! | `call` | call of a service, from its begin to its outcome; of a stream of replies, until it is sent | service, method, message and conversation id, error |
//! | `process` | call of a handler or method | destination, routing key, delivery tag, message and conversation id |
//! | `process` | call of a handler of batches | queue, number of messages, `links`: the contexts of the messages |
//!
//! [`TraceContext`] travels in the headers: a message that is published within a `publish` or `call` span belongs to that, and the
//! `process` span of its handler to the message (`trace_id`, `span_id` and `parent_id`). A batch has many parents, so it is
//! a trace of its own, with links.
//!
//! # Features
//!
//! | feature | default | what |
//! |---|---|---|
//! | `files` | on | topologies from TOML and YAML |
//! | `metrics` | on | counters for the facade `metrics` |
//! | `tls` | on | `amqps://`, by rustls |
//! | `embedded` | off | [`Client::embedded`] and `memory://`: a broker in the process, for tests and demonstrations |

pub mod amqp;
mod client;
mod clock;
mod connection;
mod consumer;
mod deaths;
mod delay;
mod delivery;
mod duration;
mod error;
mod events;
mod forwarder;
pub mod inbox;
mod message;
mod parking;
mod payload;
mod pool;
pub mod prelude;
mod publisher;
mod random;
mod removal;
pub mod retry;
mod rpc;
mod telemetry;
mod topology;
mod trace;

/// Bodies of messages: the type of the crate `bytes`.
pub use bytes::Bytes;

#[doc(hidden)]
pub use leveret_amqp::text;

pub use client::ClientBuilder;
pub use connection::{
    Backoff, CallerHealth, Client, ClientEvent, ClientEvents, ConnectLimits, ConnectionHealth,
    ConsumerHealth, Health, IntoEndpoints, ParkReason, PoolHealth, PublisherHealth,
};
#[doc(hidden)]
pub use consumer::Given;
pub use consumer::{
    Attempt, BatchOptions, BatchOutcome, BatchRunner, ConsumerBuilder, Deliveries, FromIncoming,
    Handler, HandlerService, Headers, Incoming, IntoBatchOutcome, IntoOutcome, Next, Runner, State,
    Summary,
};
pub use deaths::{Death, Deaths};
pub use delay::Delays;
pub use delivery::Delivery;
pub use error::{BoxError, Conflict, Error, ErrorKind, RemoteError};
pub use events::{Emit, Events, Gather, GatherStream, Gathered};
pub use message::{IntoMessage, Message};
pub use parking::{
    Draft, Export, Filter, Group, Import, Imported, NotDone, ParkedMessage, ParkingLot, PastError,
    Progress, Story, Target, Task,
};
pub use payload::{Json, MsgPack, Payload};
pub use pool::{BorrowedChannel, ChannelPool, ChannelPoolBuilder};
pub use publisher::{
    BatchError, OnLoss, Publisher, PublisherBuilder, Ticket, UnconfirmedPublisher,
};
pub use removal::{Belonging, QueueRemoval};
#[doc(hidden)]
pub use retry::classify::look_behind_errors;
#[doc(inline)]
pub use retry::{Classification, Decision, Facts, Failure, Retry, RetryPolicy, Verdict};
pub use rpc::{
    Call, CallFuture, End, FromReply, IntoReply, Method, Replier, Replies, Reply, ReplyStream, Rpc,
    RpcBuilder, ServiceBuilder, StreamCall,
};
pub use topology::{
    Applied, Binding, Change, Destination, Exchange, ExchangeKind, Overflow, Plan, Queue,
    QueueType, Step, Topology,
};
pub use trace::{InvalidTraceContext, TraceContext};
