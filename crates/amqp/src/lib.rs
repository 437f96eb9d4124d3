//! One connection to a broker, without recovery: the protocol itself, fast and bounded.
//!
//! ```no_run
//! use leveret_amqp::{Connection, ConsumeOptions, Options, Publish, QueueOptions};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let connection = Connection::open(&Options::from_uri("amqp://localhost")?).await?;
//! let channel = connection.open_channel().await?.into_confirm().await?;
//! channel.declare_queue("letters", QueueOptions::default()).await?;
//!
//! let letter = Publish { routing_key: "letters", mandatory: true, body: "hello".into(), ..Publish::default() };
//! let outcome = channel.publish(&letter).await?.await;
//! assert!(outcome.is_acked());
//!
//! let mut letters = channel.consume("letters", ConsumeOptions::default()).await?;
//! while let Some(delivery) = letters.next().await {
//!     let delivery = delivery?;
//!     println!("{:?}", delivery.body());
//!     delivery.ack()?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Every method of the protocol has its call. These fields have no option, on purpose:
//!
//! - `immediate` of `basic.publish`, `prefetch-size` of `basic.qos`, `basic.recover` without `requeue`: RabbitMQ closes
//!   the connection on them (540, not implemented). `no-local` of `basic.consume`: it does nothing there.
//! - `nowait`: the broker answers such a call only by closing the channel if it fails, and then some other call gets the
//!   blame. To spare the wait, let several calls be under way at once: `tokio::join!(...)`.

mod calls;
mod channel;
mod confirm;
mod connection;
mod connector;
mod consumer;
mod delivery;
mod driver;
mod error;
mod handshake;
mod idle;
mod inlet;
mod limits;
mod link;
mod liveness;
mod options;
mod outbound;
mod publish;
mod range_set;
#[doc(hidden)]
pub mod seam;
mod settled;
#[doc(hidden)]
pub mod text;
#[cfg(feature = "tls")]
mod tls;
mod uri;

pub use channel::{
    Access, Channel, Confirm, ConsumeOptions, DeleteExchange, DeleteQueue, ExchangeOptions, Flow,
    GetOptions, Plain, QueueInfo, QueueOptions, Tx,
};
pub use confirm::{Confirmation, Outcome, Returned, Tally};
pub use connection::Connection;
pub use connector::Connector;
pub use consumer::Consumer;
pub use delivery::{Delivery, Refused};
pub use error::{Error, ErrorKind};
pub use limits::Limits;
pub use options::{Auth, Options, Password, Tls};
pub use publish::Publish;
pub use uri::{UriError, UriPart};

pub use leveret_wire::{Array, Properties, RawProperties, ReplyCode, ShortStr, Table, Value};

use seam::lock;
