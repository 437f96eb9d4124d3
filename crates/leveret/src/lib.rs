//! Messaging on AMQP 0-9-1 (RabbitMQ) that does not lose work.

pub mod amqp;
mod client;
mod consumer;
mod delivery;
#[cfg(feature = "files")]
mod duration;
mod error;
mod message;
mod payload;
mod pool;
mod publisher;
mod random;
mod telemetry;
mod topology;
mod trace;

pub use client::{
    Backoff, Client, ClientBuilder, ConnectLimits, ConnectionHealth, ConsumerHealth, Event, Events,
    Health, IntoEndpoints,
};
pub use consumer::{
    BatchOptions, BatchOutcome, BatchRunner, BoxError, ConsumerBuilder, Deliveries, FromIncoming,
    Handler, HandlerService, Headers, Incoming, IntoBatchOutcome, IntoOutcome, Next, OnFailure,
    Runner, State, Summary,
};
pub use delivery::Delivery;
pub use error::{Error, ErrorKind};
pub use message::{IntoMessage, Message};
pub use payload::{Json, MsgPack, Payload};
pub use pool::{BorrowedChannel, ChannelPool, ChannelPoolBuilder};
pub use publisher::{
    BatchError, OnLoss, Publisher, PublisherBuilder, Ticket, UnconfirmedPublisher,
};
pub use topology::{
    Applied, Binding, Conflict, Destination, Exchange, ExchangeKind, Overflow, Queue, QueueType,
    Topology,
};
pub use trace::{InvalidTraceContext, TraceContext};
