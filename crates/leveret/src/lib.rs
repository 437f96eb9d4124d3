//! Messaging on AMQP 0-9-1 (RabbitMQ) that does not lose work.
//!
//! An application holds a [`Client`]. It declares what it needs as a [`Topology`], publishes with a [`Publisher`] and
//! consumes with a [`ConsumerBuilder`]; brokers may come and go underneath.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), leveret::Error> {
//! use std::sync::Arc;
//! use leveret::{Client, Exchange, Json, Queue, State, Topology};
//! use tokio::sync::Notify;
//!
//! let client = Client::embedded().await?; // no server needed; or Client::connect("amqp://localhost")
//! let topology = Topology::new()
//!     .exchange(Exchange::topic("orders"))
//!     .queue(Queue::quorum("billing").bind("orders", "order.*"));
//! client.apply(&topology).await?;
//!
//! let orders = client.publisher("orders").build().await?;
//! orders.publish("order.created", Json(42)).await?; // Ok: routed, confirmed, safe
//!
//! async fn bill(Json(order): Json<u32>, State(done): State<Arc<Notify>>) {
//!     println!("billing order {order}");
//!     done.notify_one();
//! }
//! let done = Arc::new(Notify::new());
//! client.consumer("billing").workers(16).state(done.clone()).handle(bill).run_until(done.notified()).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What is counted
//!
//! With the feature `metrics`, for any collector of the facade `metrics` that was installed before:
//!
//! | name | of each | what |
//! |---|---|---|
//! | `leveret_published_total` | exchange | messages that were sent to the broker, each once |
//! | `leveret_confirmed_total`, `leveret_nacked_total`, `leveret_returned_total` | exchange | the broker's answers |
//! | `leveret_lost_total`, `leveret_replayed_total` | exchange | no answer before the channel went; sent again |
//! | `leveret_consumed_total`, `leveret_acked_total`, `leveret_failed_total` | queue | messages given to handlers, and how that ended |
//! | `leveret_retried_total`, `leveret_parked_total` | queue | failed messages that wait to be tried again, and those that are not |
//! | `leveret_in_flight` | queue | messages that handlers are at work on |
//! | `leveret_handler_seconds` | queue | how long handlers take |
//! | `leveret_pool_wait_seconds` | | how long borrowers wait for a channel |
//!
//! Spans and events go to `tracing`, by OpenTelemetry's conventions for messaging; [`TraceContext`] travels in headers.
//!
//! # Features
//!
//! All of them are on by default: `embedded` (a broker in the process), `files` (topologies from TOML and YAML), `metrics`,
//! `tls`.

pub mod amqp;
mod client;
mod consumer;
mod delivery;
#[cfg(feature = "files")]
mod duration;
mod error;
mod message;
mod mover;
mod parking;
mod payload;
mod pool;
mod publisher;
mod random;
mod retry;
mod telemetry;
mod topology;
mod trace;

pub use client::{
    Backoff, Client, ClientBuilder, ConnectLimits, ConnectionHealth, ConsumerHealth, Event, Events,
    Health, IntoEndpoints,
};
pub use consumer::{
    Attempt, BatchOptions, BatchOutcome, BatchRunner, BoxError, ConsumerBuilder, Deliveries,
    FromIncoming, Handler, HandlerService, Headers, Incoming, IntoBatchOutcome, IntoOutcome, Next,
    Runner, State, Summary,
};
pub use delivery::Delivery;
pub use error::{Error, ErrorKind};
pub use message::{IntoMessage, Message};
pub use parking::{
    Draft, Filter, Group, Import, Imported, NotDone, ParkedMessage, ParkingLot, PastError,
    Progress, Story, Target, Task,
};
pub use payload::{Json, MsgPack, Payload};
pub use pool::{BorrowedChannel, ChannelPool, ChannelPoolBuilder};
pub use publisher::{
    BatchError, OnLoss, Publisher, PublisherBuilder, Ticket, UnconfirmedPublisher,
};
pub use retry::{Death, Deaths, Decision, Facts, Failure, ParkReason, Retry, RetryPolicy, Verdict};
pub use topology::{
    Applied, Binding, Conflict, Destination, Exchange, ExchangeKind, Overflow, Queue, QueueType,
    Topology,
};
pub use trace::{InvalidTraceContext, TraceContext};
