//! A delivered message, and its settlement.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use leveret_wire::method::basic;
use leveret_wire::{Content, Properties, RawProperties, ShortStr};

use super::error::Error;
use super::link::Link;

/// What the broker says about a message that it delivers.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct DeliveryInfo {
    delivery_tag: u64,
    redelivered: bool,
    /// Exchange and routing key as in the frame, whose memory it shares: each follows its length in one octet.
    names: Bytes,
}

impl DeliveryInfo {
    #[inline]
    pub(super) fn new(delivery_tag: u64, redelivered: bool, names: Bytes) -> Self {
        DeliveryInfo { delivery_tag, redelivered, names }
    }

    pub(super) fn of_get(get: &basic::GetOk<'_>) -> Self {
        let mut names = Vec::new();
        for name in [&get.exchange, &get.routing_key] {
            // A short string has at most 255 octets.
            names.push(name.len() as u8);
            names.extend_from_slice(name.as_bytes());
        }
        DeliveryInfo::new(get.delivery_tag, get.redelivered, names.into())
    }

    #[inline]
    #[doc(hidden)]
    pub fn delivery_tag(&self) -> u64 {
        self.delivery_tag
    }

    #[doc(hidden)]
    pub fn redelivered(&self) -> bool {
        self.redelivered
    }

    #[doc(hidden)]
    pub fn exchange(&self) -> ShortStr<'_> {
        let name = self.names.get(1..self.routing_key_offset());
        ShortStr::from_bytes(name.unwrap_or_default()).unwrap_or_default()
    }

    #[doc(hidden)]
    pub fn routing_key(&self) -> ShortStr<'_> {
        let key = self.names.get(self.routing_key_offset() + 1..);
        ShortStr::from_bytes(key.unwrap_or_default()).unwrap_or_default()
    }

    /// Where the length of the routing key is.
    fn routing_key_offset(&self) -> usize {
        1 + usize::from(self.names.first().copied().unwrap_or_default())
    }
}

/// Settles one delivery, once: afterwards, and in auto-ack mode, it sends nothing. Dropped before, it returns the message to its
/// queue.
#[derive(Debug)]
#[doc(hidden)]
pub struct Acker {
    link: Option<Arc<Link>>,
    delivery_tag: u64,
    is_of_stream: bool,
}

impl Acker {
    /// Without a link in auto-ack mode.
    #[inline]
    pub(super) fn new(link: Option<Arc<Link>>, delivery_tag: u64, is_of_stream: bool) -> Self {
        Acker { link, delivery_tag, is_of_stream }
    }

    /// Whether it may still settle: it has not, and its channel is open.
    #[doc(hidden)]
    pub fn is_held(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.channel.check_open().is_ok())
    }

    #[inline]
    #[doc(hidden)]
    pub fn ack(&mut self) -> Result<(), Error> {
        match self.link.take() {
            Some(link) => link.ack(self.delivery_tag),
            None => Ok(()),
        }
    }

    #[doc(hidden)]
    pub fn ack_all_before(&mut self) -> Result<(), Error> {
        self.link.take().map_or(Ok(()), |link| link.ack_through(self.delivery_tag))
    }

    #[doc(hidden)]
    pub fn nack(&mut self, refused: Refused) -> Result<(), Error> {
        self.link.take().map_or(Ok(()), |link| link.nack(self.delivery_tag, refused))
    }

    fn nack_all_before(&mut self, refused: Refused) -> Result<(), Error> {
        self.link.take().map_or(Ok(()), |link| link.nack_through(self.delivery_tag, refused))
    }

    fn reject(&mut self, refused: Refused) -> Result<(), Error> {
        self.link.take().map_or(Ok(()), |link| link.reject(self.delivery_tag, refused))
    }

    /// Leaves the delivery unsettled until its channel settles its tag, or closes.
    #[doc(hidden)]
    pub fn forget(mut self) {
        self.link = None;
    }
}

impl Drop for Acker {
    #[inline]
    fn drop(&mut self) {
        if let Some(link) = self.link.take() {
            link.requeue(self.delivery_tag, self.is_of_stream);
        }
    }
}

/// Whether a message came from a stream, or has the headers of one that did.
pub(super) fn is_of_stream(properties: &RawProperties) -> bool {
    properties.has_headers() && properties.header("x-stream-offset").is_some()
}

/// A message that a consumer or `get` received.
///
/// It is settled by consuming it: [`ack`](Delivery::ack), [`nack`](Delivery::nack) or
/// [`reject`](Delivery::reject). One that is dropped unsettled goes back to its queue. In auto-ack mode settling sends
/// nothing.
#[must_use = "a delivery that is dropped goes back to its queue"]
pub struct Delivery {
    acker: Acker,
    content: Content<DeliveryInfo>,
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
    #[inline]
    pub(super) fn new(acker: Acker, content: Content<DeliveryInfo>) -> Self {
        Delivery { acker, content }
    }

    /// The message, and what settles it.
    #[inline]
    #[doc(hidden)]
    pub fn split(self) -> (Acker, Content<DeliveryInfo>) {
        (self.acker, self.content)
    }

    /// The body.
    pub fn body(&self) -> &Bytes {
        &self.content.body
    }

    /// The properties, decoded.
    pub fn properties(&self) -> Properties<'_> {
        self.content.properties.get()
    }

    /// The properties as they came, to keep or to send on.
    pub fn raw_properties(&self) -> &RawProperties {
        &self.content.properties
    }

    /// The exchange it was published to.
    pub fn exchange(&self) -> ShortStr<'_> {
        self.content.method.exchange()
    }

    /// The routing key it was published with.
    pub fn routing_key(&self) -> ShortStr<'_> {
        self.content.method.routing_key()
    }

    /// Whether the broker has delivered it before, to any consumer.
    pub fn redelivered(&self) -> bool {
        self.content.method.redelivered
    }

    /// Its number on its channel.
    pub fn delivery_tag(&self) -> u64 {
        self.content.method.delivery_tag
    }

    /// Acknowledges it: the broker removes the message.
    ///
    /// The ack is in the outbound buffer when this returns. It fails if the channel is gone; the message then goes to the
    /// next consumer of the queue. It fails as [`Stale`](super::ErrorKind::Stale) if the delivery was settled together with a
    /// later one, or is delivered again after a recover.
    pub fn ack(mut self) -> Result<(), Error> {
        self.acker.ack()
    }

    /// Acknowledges it and all before it on its channel, those of other consumers of the channel included.
    pub fn ack_all_before(mut self) -> Result<(), Error> {
        self.acker.ack_all_before()
    }

    /// Refuses it by `basic.nack`.
    pub fn nack(mut self, refused: Refused) -> Result<(), Error> {
        self.acker.nack(refused)
    }

    /// Refuses it and all before it on its channel.
    pub fn nack_all_before(mut self, refused: Refused) -> Result<(), Error> {
        self.acker.nack_all_before(refused)
    }

    /// Refuses it by `basic.reject`. RabbitMQ counts it where it does not count a nack: from 4.3 on, only a
    /// reject raises the delivery count of a quorum queue.
    pub fn reject(mut self, refused: Refused) -> Result<(), Error> {
        self.acker.reject(refused)
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
