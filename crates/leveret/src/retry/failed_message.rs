//! A failed message, as a design of retrying sees it.

use bytes::Bytes;

use crate::amqp::{RawProperties, ShortStr};
use crate::connection::ParkReason;
use crate::deaths::Deaths;
use crate::delivery::Delivery;
use crate::forwarder::{ForwardedMessage, ROOM_FOR_A_DEATH};

use super::stamp::{Detail, Failed, Origin, header};

/// A message whose handler failed, and what is known of its failure. For a [`RetryProfile`](super::RetryProfile).
#[derive(Clone, Copy, Debug)]
pub struct FailedMessage<'a> {
    pub(crate) delivery: &'a Delivery,
    pub(crate) failed: &'a Failed<'a>,
    pub(crate) detail: Detail,
}

impl<'a> FailedMessage<'a> {
    /// The queue whose consumer failed.
    pub fn queue(&self) -> &'a str {
        self.failed.queue
    }

    /// The properties as they came.
    pub fn properties(&self) -> &'a RawProperties {
        self.delivery.raw_properties()
    }

    /// The body.
    pub fn body(&self) -> &'a Bytes {
        self.delivery.body()
    }

    /// How often it has failed, this time included.
    pub fn failures(&self) -> u32 {
        self.failed.failures
    }

    /// The kind of the error, see [`Failure::kind`](crate::Failure::kind).
    pub fn kind(&self) -> &'a str {
        self.failed.kind
    }

    /// What the error says.
    pub fn error(&self) -> &'a str {
        self.failed.error
    }

    /// Why it is parked, if it is.
    pub fn reason(&self) -> Option<ParkReason> {
        self.failed.reason
    }

    /// Whether its headers have turned out to be too large for a frame. A design then adds what it needs and no more.
    pub fn is_brief(&self) -> bool {
        self.detail == Detail::Needed
    }

    /// Where it was published to, before it was tried again.
    pub fn origin(&self) -> &'a Origin {
        &self.failed.origin
    }

    /// The message for another place, with what is known of its failure in the headers that [`Retry`](super::Retry) lists.
    ///
    /// It keeps its properties, headers and body, with these exceptions: an `expiration` waits in a header, so that the
    /// message does not expire there, and so do the routing keys of a header `CC`, so that others get no copies. One that is to
    /// come back loses its `x-death` if the broker would drop it on the way because of that; one that is parked, if consumers
    /// of its queue have rejected it, so that it begins at zero if another program publishes it again.
    ///
    /// If the headers turn out to be too large for a frame, the consumer asks the design again; this then adds no history and
    /// less of the error.
    pub fn forward_to(
        &self,
        exchange: impl Into<String>,
        routing_key: impl Into<String>,
    ) -> ForwardedMessage {
        let mut message = self.forward_unstamped(exchange, routing_key);
        self.failed.stamp(&mut message, self.detail);
        message
    }

    /// The same, without the headers about its failure: for a message that has only waited.
    pub fn forward_unstamped(
        &self,
        exchange: impl Into<String>,
        routing_key: impl Into<String>,
    ) -> ForwardedMessage {
        let mut message = ForwardedMessage::of(self.delivery, exchange);
        // Text may be longer than the key was; no key is worth a message that cannot move.
        let routing_key: String = routing_key.into();
        message.routing_key = ShortStr::truncated(&routing_key).to_string();
        message.keep_expiration();
        message.keep_copies();
        let deaths = Deaths::of(self.properties());
        let rejection = deaths.rejection(self.queue());
        if let Some(rejection) = rejection {
            message.note_death(rejection);
        }
        if self.reason().is_none() {
            message.forget_fatal_deaths(self.queue());
            message.reserve = ROOM_FOR_A_DEATH;
        } else {
            message.remove_header(header::REJECTED);
            if rejection.is_some() {
                message.remove_deaths();
            }
        }
        message
    }
}
