//! A message in the application's hands.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use leveret_wire::{Content, Properties, RawProperties, ShortStr};

use super::error::Error;
use super::link::Link;

/// Exchange and routing key of a delivery, by reference to the frame they came in.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct Source {
    /// The exchange, one octet that is the key's length, the key.
    names: Bytes,
    exchange: usize,
}

impl Source {
    pub(super) fn new(names: Bytes, exchange: usize) -> Self {
        Source { names, exchange }
    }

    pub(super) fn copied(exchange: &[u8], routing_key: &[u8]) -> Self {
        Source { names: [exchange, &[0], routing_key].concat().into(), exchange: exchange.len() }
    }

    #[doc(hidden)]
    pub fn exchange(&self) -> ShortStr<'_> {
        let name = self.names.get(..self.exchange).unwrap_or_default();
        ShortStr::from_bytes(name).unwrap_or_default()
    }

    #[doc(hidden)]
    pub fn routing_key(&self) -> ShortStr<'_> {
        let key = self.names.get(self.exchange + 1..).unwrap_or_default();
        ShortStr::from_bytes(key).unwrap_or_default()
    }
}

/// What came with a message, besides what it holds.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct Envelope {
    pub tag: u64,
    pub redelivered: bool,
    pub source: Source,
}

/// A message as the reader makes it. It stays in one piece from there on: to take it apart, and put the pieces somewhere else,
/// costs more than it does to move.
#[doc(hidden)]
pub type Letter = Content<Envelope>;

/// How a delivery is settled, once: afterwards, and in auto-ack mode, settling sends nothing.
#[derive(Debug)]
#[doc(hidden)]
pub struct Settles {
    link: Option<Arc<Link>>,
    pub tag: u64,
}

impl Settles {
    pub(super) fn new(link: Option<Arc<Link>>, tag: u64) -> Self {
        Settles { link, tag }
    }

    /// Whether it may still be settled: its channel is open.
    #[doc(hidden)]
    pub fn is_held(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.channel.check_open().is_ok())
    }

    #[inline]
    #[doc(hidden)]
    pub fn ack(&mut self) -> Result<(), Error> {
        self.link.take().map_or(Ok(()), |link| link.ack(self.tag))
    }

    #[doc(hidden)]
    pub fn ack_all_before(&mut self) -> Result<(), Error> {
        self.link.take().map_or(Ok(()), |link| link.ack_through(self.tag))
    }

    #[doc(hidden)]
    pub fn nack(&mut self, refused: Refused) -> Result<(), Error> {
        self.link.take().map_or(Ok(()), |link| link.nack(self.tag, refused))
    }

    fn nack_all_before(&mut self, refused: Refused) -> Result<(), Error> {
        self.link.take().map_or(Ok(()), |link| link.nack_through(self.tag, refused))
    }

    fn reject(&mut self, refused: Refused) -> Result<(), Error> {
        self.link.take().map_or(Ok(()), |link| link.reject(self.tag, refused))
    }

    /// Nobody has settled it: it goes back to its queue, if it may.
    #[inline]
    #[doc(hidden)]
    pub fn give_back(&mut self, properties: &RawProperties) {
        if let Some(link) = self.link.take() {
            link.give_back(self.tag, properties);
        }
    }

    /// It is settled in another way, or not before its channel is closed.
    fn leave(&mut self) -> Settles {
        Settles { link: self.link.take(), tag: self.tag }
    }
}

/// What a delivery is made of.
#[derive(Debug)]
#[doc(hidden)]
pub struct Parts {
    pub settles: Settles,
    pub letter: Letter,
}

/// A message that a consumer or `get` received.
///
/// It is settled by consuming it: [`ack`](Delivery::ack), [`nack`](Delivery::nack) or
/// [`reject`](Delivery::reject). One that is dropped unsettled goes back to its queue. In auto-ack mode settling sends
/// nothing.
#[must_use = "a delivery that is dropped goes back to its queue"]
pub struct Delivery(Parts);

/// Where a message goes that is not acked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Back to its queue.
    Requeue,
    /// To the dead-letter exchange of the queue, or away if it has none.
    Discard,
}

impl Delivery {
    #[inline]
    pub(super) fn new(parts: Parts) -> Self {
        Delivery(parts)
    }

    /// What it is made of, to be settled by whoever gets it.
    #[doc(hidden)]
    pub fn into_parts(mut self) -> Parts {
        Parts { settles: self.0.settles.leave(), letter: self.0.letter.clone() }
    }

    /// The body.
    pub fn body(&self) -> &Bytes {
        &self.0.letter.body
    }

    /// The properties, decoded.
    pub fn properties(&self) -> Properties<'_> {
        self.0.letter.properties.get()
    }

    /// The properties as they came, to keep or to send on.
    pub fn raw_properties(&self) -> &RawProperties {
        &self.0.letter.properties
    }

    /// The exchange it was published to.
    pub fn exchange(&self) -> ShortStr<'_> {
        self.0.letter.method.source.exchange()
    }

    /// The routing key it was published with.
    pub fn routing_key(&self) -> ShortStr<'_> {
        self.0.letter.method.source.routing_key()
    }

    /// Whether it was delivered before, to anyone.
    pub fn redelivered(&self) -> bool {
        self.0.letter.method.redelivered
    }

    /// Its number on its channel.
    pub fn delivery_tag(&self) -> u64 {
        self.0.settles.tag
    }

    /// It is done: the broker may forget it.
    ///
    /// The ack is in the outbound buffer when this returns. It fails if the channel is gone; the message then goes to
    /// whoever consumes the queue next. It fails as [`Stale`](super::ErrorKind::Stale) if the delivery was settled
    /// together with a later one, or is delivered anew after a recover.
    pub fn ack(mut self) -> Result<(), Error> {
        self.0.settles.ack()
    }

    /// This one and all before it on the same channel are done, those of other consumers of the channel included.
    pub fn ack_all_before(mut self) -> Result<(), Error> {
        self.0.settles.ack_all_before()
    }

    /// It is not done.
    pub fn nack(mut self, refused: Refused) -> Result<(), Error> {
        self.0.settles.nack(refused)
    }

    /// This one and all before it on the same channel are not done.
    pub fn nack_all_before(mut self, refused: Refused) -> Result<(), Error> {
        self.0.settles.nack_all_before(refused)
    }

    /// Lets go of it without settling it: it is out until its tag is settled, or the channel closed.
    #[doc(hidden)]
    pub fn leave(self) -> (Source, RawProperties, Bytes) {
        let Letter { method, properties, body } = self.into_parts().letter;
        (method.source, properties, body)
    }

    /// It is not done, said by `basic.reject`. RabbitMQ counts it where it does not count a nack: from 4.3 on, only a
    /// reject raises the delivery count of a quorum queue.
    pub fn reject(mut self, refused: Refused) -> Result<(), Error> {
        self.0.settles.reject(refused)
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.0.settles.give_back(&self.0.letter.properties);
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("tag", &self.delivery_tag())
            .field("redelivered", &self.redelivered())
            .field("exchange", &self.exchange())
            .field("routing_key", &self.routing_key())
            .field("properties", &self.properties())
            .field("body", &format_args!("{} bytes", self.body().len()))
            .finish()
    }
}
