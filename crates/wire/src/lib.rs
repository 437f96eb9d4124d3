//! AMQP 0-9-1 with RabbitMQ's extensions: bytes to values and back.
//!
//! This crate does no I/O and knows no async. The client and the embedded broker both stand on it, so
//! the two cannot drift apart. Everything it decodes borrows from the bytes it was given; everything it
//! encodes goes into one [`Outbound`] buffer; nothing a peer sends makes it panic or allocate more than
//! the frame at hand.
//!
//! With the feature `serde`, properties and tables can be written as JSON and the like, and read again.
//!
//! | going out | coming in |
//! |---|---|
//! | [`Method`], [`Properties`], body → [`Outbound`] → socket | socket → [`Inbound`] → [`Frame`] → [`Method`], [`Assembler`] → [`Content`] |
//!
//! ```
//! use bytes::{Buf, Bytes};
//! use leveret_wire::{Assembler, FrameKind, FrameMax, Inbound, Method, Outbound, Properties, method::basic};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Encode a publish: method, header and body frames in one pass.
//! let publish = basic::Publish {
//!     exchange: "orders".try_into()?,
//!     routing_key: "order.created".try_into()?,
//!     mandatory: true,
//!     immediate: false,
//! };
//! let properties = Properties { content_type: Some("text/plain".try_into()?), ..Properties::default() };
//! let mut outbound = Outbound::new();
//! outbound.content(1, &publish, &properties, &Bytes::from_static(b"hello"), FrameMax::DEFAULT)?;
//!
//! // Decode it again, as the other side would.
//! let mut inbound = Inbound::new(FrameMax::DEFAULT);
//! inbound.extend_from_slice(&outbound.copy_to_bytes(outbound.remaining()));
//! let mut assembler = Assembler::new(1024 * 1024);
//! let batch = inbound.take()?;
//! for frame in batch.frames() {
//!     let done = match frame.kind {
//!         FrameKind::Method => match Method::decode(frame.payload)? {
//!             Method::BasicPublish(publish) => {
//!                 assembler.begin(publish.routing_key.to_string())?;
//!                 None
//!             }
//!             other => panic!("unexpected {}", other.name()),
//!         },
//!         FrameKind::Header => assembler.header(batch.keep(frame.payload))?,
//!         FrameKind::Body => assembler.body(batch.keep(frame.payload))?,
//!         FrameKind::Heartbeat => None,
//!     };
//!     if let Some(content) = done {
//!         assert_eq!(content.method, "order.created");
//!         assert_eq!(content.properties.get().content_type.unwrap(), "text/plain");
//!         assert_eq!(content.body, "hello");
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod content;
mod error;
mod field;
mod frame;
mod inbound;
pub mod method;
mod outbound;
mod properties;
mod reply;
#[cfg(feature = "serde")]
mod serde;
mod table;
mod text;
mod value;

pub use content::{Assembler, Content, PartialBody};
pub use error::{DecodeError, EncodeError, Fault, InvalidValue};
pub use frame::{
    FRAME_END, FRAME_OVERHEAD, Frame, FrameKind, FrameMax, PROTOCOL_HEADER, ProtocolVersion,
};
pub use inbound::{FrameBatch, Frames, Inbound, Space};
pub use method::Method;
pub use outbound::{Body, Outbound};
pub use properties::{
    EncodeProperties, EncodedProperties, PlainProperties, Properties, RawProperties,
};
pub use reply::{ReplyCode, Scope};
pub use table::{Array, Table};
pub use text::{LongStr, Secret, ShortStr};
pub use value::{MAX_DEPTH, Value};
