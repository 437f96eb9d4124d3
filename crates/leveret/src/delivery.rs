//! A message in the application's hands.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::amqp::{self, Properties, RawProperties, Refused, ShortStr, Source, Value};
use crate::error::{Error, ErrorKind};
use crate::parking::key_without_mark;

/// A message that was delivered, to be settled by consuming it: [`ack`](Delivery::ack), [`requeue`](Delivery::requeue)
/// or [`discard`](Delivery::discard). One that is dropped goes back to its queue.
///
/// If the connection was lost meanwhile, settling fails as [`ErrorKind::Stale`] and sends nothing: the broker has given
/// the message to somebody else by then. With auto-ack settling does nothing.
#[must_use = "a delivery that is dropped goes back to its queue"]
pub struct Delivery {
    inner: amqp::Delivery,
    queue: Arc<str>,
}

impl Delivery {
    pub(crate) fn new(inner: amqp::Delivery, queue: &Arc<str>) -> Self {
        Delivery { inner, queue: Arc::clone(queue) }
    }

    /// The body.
    pub fn body(&self) -> &Bytes {
        self.inner.body()
    }

    /// The properties.
    pub fn properties(&self) -> Properties<'_> {
        self.inner.properties()
    }

    /// The properties as they came, to keep or to send on.
    pub fn raw_properties(&self) -> &RawProperties {
        self.inner.raw_properties()
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<Value<'_>> {
        self.inner.raw_properties().header(name)
    }

    /// The exchange it was published to.
    pub fn exchange(&self) -> ShortStr<'_> {
        self.inner.exchange()
    }

    /// The routing key it was published with.
    pub fn routing_key(&self) -> ShortStr<'_> {
        key_without_mark(&self.inner.exchange(), self.inner.routing_key(), &self.queue)
    }

    /// The queue it came from, as the consumer was told it.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    pub(crate) fn shared_queue(&self) -> &Arc<str> {
        &self.queue
    }

    /// Whether it may still be settled.
    pub(crate) fn is_held(&self) -> bool {
        self.inner.is_held()
    }

    pub(crate) fn source(&self) -> &Source {
        self.inner.source()
    }

    /// Whether it was delivered before, to anyone.
    pub fn redelivered(&self) -> bool {
        self.inner.redelivered()
    }

    /// Its number on its channel.
    pub fn delivery_tag(&self) -> u64 {
        self.inner.delivery_tag()
    }

    /// It is done: the broker may forget it.
    pub fn ack(self) -> Result<(), Error> {
        self.inner.ack().map_err(stale)
    }

    /// This one and all before it of the same consumer are done.
    pub fn ack_all_before(self) -> Result<(), Error> {
        self.inner.ack_all_before().map_err(stale)
    }

    /// Back to its queue, to be delivered again.
    pub fn requeue(self) -> Result<(), Error> {
        self.inner.nack(Refused::Requeue).map_err(stale)
    }

    /// To the dead-letter exchange of its queue, or away if that has none.
    pub fn discard(self) -> Result<(), Error> {
        self.inner.nack(Refused::Discard).map_err(stale)
    }
}

/// Settling sends one thing that can no longer matter, or nothing: whatever failed, the delivery is of no more use.
fn stale(error: amqp::Error) -> Error {
    let text = "the delivery can no longer be settled, and is delivered again unless it was settled before";
    Error::caused(ErrorKind::Stale, text, error)
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}
