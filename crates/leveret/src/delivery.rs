//! A delivered message, and its settlement.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::amqp::{self, Acker, Properties, RawProperties, Refused, ShortStr, Value};
use crate::consumer::{ConsumerContext, Incoming};
use crate::error::{Error, ErrorKind};

/// A message that was delivered, to be settled by consuming it: [`ack`](Delivery::ack), [`requeue`](Delivery::requeue)
/// or [`discard`](Delivery::discard). One that is dropped goes back to its queue.
///
/// If the connection was lost meanwhile, settling fails as [`ErrorKind::Stale`] and sends nothing: the broker has given
/// the message to another consumer by then. With auto-ack settling does nothing.
#[must_use = "a delivery that is dropped goes back to its queue"]
pub struct Delivery {
    acker: Acker,
    incoming: Incoming,
}

impl Delivery {
    #[inline]
    pub(crate) fn new(delivery: amqp::Delivery, consumer: &Arc<ConsumerContext>) -> Self {
        let (acker, content) = delivery.split();
        Delivery { acker, incoming: Incoming::new(content, Arc::clone(consumer)) }
    }

    /// The message, as a handler sees it.
    pub(crate) fn incoming(&self) -> &Incoming {
        &self.incoming
    }

    /// Settles it for a caller that still needs the message.
    pub(crate) fn acker(&mut self) -> &mut Acker {
        &mut self.acker
    }

    /// The body.
    pub fn body(&self) -> &Bytes {
        self.incoming.body()
    }

    /// The properties.
    pub fn properties(&self) -> Properties<'_> {
        self.incoming.properties()
    }

    /// The properties as they came, to keep or to send on.
    pub fn raw_properties(&self) -> &RawProperties {
        self.incoming.raw_properties()
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<Value<'_>> {
        self.incoming.header(name)
    }

    /// The exchange it was published to.
    pub fn exchange(&self) -> ShortStr<'_> {
        self.incoming.info().exchange()
    }

    /// The routing key it was published with.
    pub fn routing_key(&self) -> ShortStr<'_> {
        self.incoming.info().routing_key()
    }

    /// The queue it came from, as the consumer was told it.
    pub fn queue(&self) -> &str {
        self.incoming.queue()
    }

    /// Whether it may still be settled.
    pub(crate) fn is_held(&self) -> bool {
        self.acker.is_held()
    }

    /// Whether the broker has delivered it before, to any consumer.
    pub fn redelivered(&self) -> bool {
        self.incoming.redelivered()
    }

    /// Its number on its channel.
    pub fn delivery_tag(&self) -> u64 {
        self.incoming.delivery_tag()
    }

    /// Acknowledges it: the broker removes the message.
    pub fn ack(mut self) -> Result<(), Error> {
        self.acker.ack().map_err(stale)
    }

    /// Acknowledges it and all before it of the same consumer.
    pub fn ack_all_before(mut self) -> Result<(), Error> {
        self.acker.ack_all_before().map_err(stale)
    }

    /// Returns it to its queue, to be delivered again.
    pub fn requeue(mut self) -> Result<(), Error> {
        self.acker.nack(Refused::Requeue).map_err(stale)
    }

    /// Sends it to the dead-letter exchange of its queue; drops it if that has none.
    pub fn discard(mut self) -> Result<(), Error> {
        self.acker.nack(Refused::Discard).map_err(stale)
    }
}

/// A settlement fails only if the delivery is stale: whatever the engine reports, nothing is left to do.
fn stale(error: amqp::Error) -> Error {
    let text = "the delivery can no longer be settled, and is delivered again unless it was settled before";
    Error::caused(ErrorKind::Stale, text, error)
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.incoming.fmt_as("Delivery", f)
    }
}
