//! A bounded number of messages that were published and are not confirmed yet, in order.

use std::collections::VecDeque;

use crate::connection::Client;
use crate::error::{Error, ErrorKind};
use crate::forwarder::{ForwardedMessage, Forwarder, PendingForward};

/// How many messages may be unconfirmed: so many may be published twice after a lost connection.
const CAPACITY: usize = 128;
/// The same in bytes of bodies.
const MAX_BYTES: usize = 16 * 1024 * 1024;

/// Publishes messages, each with an item that says which one it is.
pub(super) struct PublishWindow<T> {
    mover: Forwarder,
    in_flight: VecDeque<InFlight<T>>,
    bytes: usize,
    capacity: usize,
}

struct InFlight<T> {
    item: T,
    bytes: usize,
    /// `None` while it is being sent.
    moving: Option<PendingForward>,
    outcome: Option<Result<(), Error>>,
}

impl<T> PublishWindow<T> {
    /// `what` is being done with the messages, for errors.
    pub(super) fn new(client: &Client, what: &'static str) -> Self {
        let mover = Forwarder::new(client, what);
        PublishWindow { mover, in_flight: VecDeque::new(), bytes: 0, capacity: CAPACITY }
    }

    pub(super) fn mover(&self) -> &Forwarder {
        &self.mover
    }

    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// From now on publishes one message at a time, so that a broker that closes the channel says which message it was for.
    pub(super) fn send_one_at_a_time(&mut self) {
        self.capacity = 1;
    }

    pub(super) fn has_room_for(&self, parcel: &ForwardedMessage) -> bool {
        let fits = self.bytes + parcel.body.len() <= MAX_BYTES;
        self.is_empty() || (self.len() < self.capacity && fits)
    }

    /// Publishes one more message. If that fails, it is no longer in the window. It must not overtake those before it, so nothing is
    /// published while these are lost.
    pub(super) async fn send(&mut self, item: T, parcel: ForwardedMessage) -> Result<(), Error> {
        let last = self.in_flight.back().and_then(|last| last.moving.as_ref());
        if last.is_some_and(PendingForward::is_lost) {
            let text = "the channel of the messages before this one is gone";
            return Err(Error::new(ErrorKind::Lost, text));
        }
        let bytes = parcel.body.len();
        self.bytes += bytes;
        // Before it is sent: if this future is dropped, the item is still in the window.
        self.in_flight.push_back(InFlight { item, bytes, moving: None, outcome: None });
        match self.mover.send(parcel).await {
            Ok(moving) => {
                if let Some(last) = self.in_flight.back_mut() {
                    last.moving = Some(moving);
                }
                Ok(())
            }
            Err(error) => {
                self.in_flight.pop_back();
                self.bytes -= bytes;
                Err(error)
            }
        }
    }

    /// The outcome of the oldest message, if the broker has answered.
    pub(super) fn answered(&mut self) -> Option<(T, Result<(), Error>)> {
        let oldest = self.in_flight.front_mut()?;
        let outcome = oldest.outcome.take().or_else(|| oldest.moving.as_ref()?.answer())?;
        Some((self.pop()?, outcome))
    }

    /// Waits until the oldest message has its outcome, if there is one.
    pub(super) async fn wait(&mut self) -> Result<(), Error> {
        if let Some(InFlight { moving: Some(moving), outcome: outcome @ None, .. }) =
            self.in_flight.front_mut()
        {
            *outcome = Some(moving.answered().await?);
        }
        Ok(())
    }

    /// Waits for the outcome of the oldest message; `None` if the window is empty. After an error the message is still in it.
    pub(super) async fn next_outcome(&mut self) -> Result<Option<(T, Result<(), Error>)>, Error> {
        self.wait().await?;
        Ok(self.answered())
    }

    /// The oldest message, whatever becomes of it.
    pub(super) fn pop(&mut self) -> Option<T> {
        let oldest = self.in_flight.pop_front()?;
        self.bytes -= oldest.bytes;
        Some(oldest.item)
    }
}

/// Whether the broker, or a check before it, has refused one message and takes others.
pub(super) fn is_about_message(error: &Error) -> bool {
    use ErrorKind::{Invalid, Missing, Nacked, Unroutable};
    matches!(error.kind(), Invalid | Missing | Nacked | Unroutable)
}

/// Whether the broker has closed the channel over one of the messages in the window.
pub(super) fn is_channel_closed_over_message(error: &Error) -> bool {
    use ErrorKind::{Broker, Invalid, Missing};
    matches!(error.kind(), Broker | Invalid | Missing)
}

/// Whether the next connection may do better.
pub(super) fn is_loss(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Lost | ErrorKind::Stale)
}
