//! A message in the application's hands.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use leveret_wire::{Properties, RawProperties, ShortStr};

use super::consumer::Envelope;
use super::error::Error;
use super::link::Link;

/// Exchange and routing key of a delivery, by reference to the frame they came in.
#[derive(Clone, Debug)]
pub(crate) struct Source {
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

    pub(crate) fn exchange(&self) -> ShortStr<'_> {
        let name = self.names.get(..self.exchange).unwrap_or_default();
        ShortStr::from_bytes(name).unwrap_or_default()
    }

    pub(crate) fn routing_key(&self) -> ShortStr<'_> {
        let key = self.names.get(self.exchange + 1..).unwrap_or_default();
        ShortStr::from_bytes(key).unwrap_or_default()
    }
}

/// A message that a consumer or `get` received.
///
/// It is settled by consuming it: [`ack`](Delivery::ack), [`nack`](Delivery::nack) or
/// [`reject`](Delivery::reject). One that is dropped unsettled goes back to its queue. In auto-ack mode settling sends
/// nothing.
#[must_use = "a delivery that is dropped goes back to its queue"]
pub struct Delivery {
    /// `None` when there is nothing to settle, or no longer.
    settles: Option<Arc<Link>>,
    envelope: Envelope,
    properties: RawProperties,
    body: Bytes,
}

/// Where a message goes that is not acked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Back to its queue.
    Requeue,
    /// To the dead-letter exchange of the queue, or away if it has none.
    Discard,
}

impl Delivery {
    pub(super) fn new(
        settles: Option<Arc<Link>>,
        envelope: Envelope,
        properties: RawProperties,
        body: Bytes,
    ) -> Self {
        Delivery { settles, envelope, properties, body }
    }

    /// The body.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// The properties, decoded.
    pub fn properties(&self) -> Properties<'_> {
        self.properties.get()
    }

    /// The properties as they came, to keep or to send on.
    pub fn raw_properties(&self) -> &RawProperties {
        &self.properties
    }

    /// The exchange it was published to.
    pub fn exchange(&self) -> ShortStr<'_> {
        self.envelope.source.exchange()
    }

    /// The routing key it was published with.
    pub fn routing_key(&self) -> ShortStr<'_> {
        self.envelope.source.routing_key()
    }

    /// Whether it may still be settled: its channel is open.
    pub(crate) fn is_held(&self) -> bool {
        self.settles.as_ref().is_some_and(|link| link.channel.check_open().is_ok())
    }

    pub(crate) fn source(&self) -> &Source {
        &self.envelope.source
    }

    /// Whether it was delivered before, to anyone.
    pub fn redelivered(&self) -> bool {
        self.envelope.redelivered
    }

    /// Its number on its channel.
    pub fn delivery_tag(&self) -> u64 {
        self.envelope.tag
    }

    /// It is done: the broker may forget it.
    ///
    /// The ack is in the outbound buffer when this returns. It fails if the channel is gone; the message then goes to
    /// whoever consumes the queue next. It fails as [`Stale`](super::ErrorKind::Stale) if the delivery was settled
    /// together with a later one, or is delivered anew after a recover.
    pub fn ack(mut self) -> Result<(), Error> {
        match self.settles.take() {
            Some(link) => link.ack(self.envelope.tag),
            None => Ok(()),
        }
    }

    /// This one and all before it on the same channel are done, those of other consumers of the channel included.
    pub fn ack_all_before(mut self) -> Result<(), Error> {
        match self.settles.take() {
            Some(link) => link.ack_through(self.envelope.tag),
            None => Ok(()),
        }
    }

    /// It is not done.
    pub fn nack(mut self, refused: Refused) -> Result<(), Error> {
        match self.settles.take() {
            Some(link) => link.nack(self.envelope.tag, refused),
            None => Ok(()),
        }
    }

    /// This one and all before it on the same channel are not done.
    pub fn nack_all_before(mut self, refused: Refused) -> Result<(), Error> {
        match self.settles.take() {
            Some(link) => link.nack_through(self.envelope.tag, refused),
            None => Ok(()),
        }
    }

    /// Lets go of it without settling it: it is out until its tag is settled, or the channel closed.
    pub(crate) fn leave(mut self) -> (Source, RawProperties, Bytes) {
        self.settles = None;
        let (properties, body) = (self.properties.clone(), self.body.clone());
        (self.envelope.source.clone(), properties, body)
    }

    /// It is not done, said by `basic.reject`. RabbitMQ counts it where it does not count a nack: from 4.3 on, only a
    /// reject raises the delivery count of a quorum queue.
    pub fn reject(mut self, refused: Refused) -> Result<(), Error> {
        match self.settles.take() {
            Some(link) => link.reject(self.envelope.tag, refused),
            None => Ok(()),
        }
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if let Some(link) = self.settles.take() {
            link.give_back(self.envelope.tag, &self.properties);
        }
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("tag", &self.envelope.tag)
            .field("redelivered", &self.envelope.redelivered)
            .field("exchange", &self.exchange())
            .field("routing_key", &self.routing_key())
            .field("properties", &self.properties())
            .field("body", &format_args!("{} bytes", self.body.len()))
            .finish()
    }
}
