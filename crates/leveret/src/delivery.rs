//! A message in the application's hands.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::amqp::{
    self, Parts, Properties, RawProperties, Refused, Settles, ShortStr, Source, Value,
};
use crate::consumer::{Common, Incoming};
use crate::error::{Error, ErrorKind};

/// A message that was delivered, to be settled by consuming it: [`ack`](Delivery::ack), [`requeue`](Delivery::requeue)
/// or [`discard`](Delivery::discard). One that is dropped goes back to its queue.
///
/// If the connection was lost meanwhile, settling fails as [`ErrorKind::Stale`] and sends nothing: the broker has given
/// the message to somebody else by then. With auto-ack settling does nothing.
#[must_use = "a delivery that is dropped goes back to its queue"]
pub struct Delivery {
    settles: Settles,
    content: Incoming,
}

impl Delivery {
    #[inline]
    pub(crate) fn new(parts: Parts, common: &Arc<Common>) -> Self {
        let Parts { settles, letter } = parts;
        Delivery { settles, content: Incoming::new(letter, Arc::clone(common)) }
    }

    /// The message, as a handler sees it.
    pub(crate) fn content(&self) -> &Incoming {
        &self.content
    }

    /// The body.
    pub fn body(&self) -> &Bytes {
        self.content.body()
    }

    /// The properties.
    pub fn properties(&self) -> Properties<'_> {
        self.content.properties()
    }

    /// The properties as they came, to keep or to send on.
    pub fn raw_properties(&self) -> &RawProperties {
        self.content.raw_properties()
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<Value<'_>> {
        self.content.header(name)
    }

    /// The exchange it was published to.
    pub fn exchange(&self) -> ShortStr<'_> {
        self.source().exchange()
    }

    /// The routing key it was published with.
    pub fn routing_key(&self) -> ShortStr<'_> {
        self.content.came_with_key()
    }

    /// The queue it came from, as the consumer was told it.
    pub fn queue(&self) -> &str {
        self.content.queue()
    }

    /// Whether it may still be settled.
    pub(crate) fn is_held(&self) -> bool {
        self.settles.is_held()
    }

    pub(crate) fn source(&self) -> &Source {
        self.content.source()
    }

    /// Whether it was delivered before, to anyone.
    pub fn redelivered(&self) -> bool {
        self.content.redelivered()
    }

    /// Its number on its channel.
    pub fn delivery_tag(&self) -> u64 {
        self.settles.tag
    }

    /// It is done: the broker may forget it.
    pub fn ack(mut self) -> Result<(), Error> {
        self.ack_early()
    }

    /// The same, for who still needs what is in it.
    #[inline]
    pub(crate) fn ack_early(&mut self) -> Result<(), Error> {
        self.settles.ack().map_err(stale)
    }

    /// This one and all before it of the same consumer are done.
    pub fn ack_all_before(mut self) -> Result<(), Error> {
        self.settles.ack_all_before().map_err(stale)
    }

    /// Back to its queue, to be delivered again.
    pub fn requeue(mut self) -> Result<(), Error> {
        self.settles.nack(Refused::Requeue).map_err(stale)
    }

    /// To the dead-letter exchange of its queue, or away if that has none.
    pub fn discard(mut self) -> Result<(), Error> {
        self.settles.nack(Refused::Discard).map_err(stale)
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.settles.give_back(self.content.raw_properties());
    }
}

/// Settling sends one thing that can no longer matter, or nothing: whatever failed, the delivery is of no more use.
fn stale(error: amqp::Error) -> Error {
    let text = "the delivery can no longer be settled, and is delivered again unless it was settled before";
    Error::caused(ErrorKind::Stale, text, error)
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.content.fmt_as("Delivery", f)
    }
}
