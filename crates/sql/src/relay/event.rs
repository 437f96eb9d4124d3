//! What happens to a relay and its messages, for whoever wants to know.

use std::fmt;

use leveret::text::escape;
use tokio::sync::broadcast;

use super::health::Side;

/// How many events wait for a listener that does not take them. One that falls behind further misses the oldest.
const KEEP: usize = 256;

/// Something happened to a [`Relay`](super::Relay), or to a message that it should send.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RelayEvent {
    /// The broker did not take a message; it is tried again later.
    Refused {
        /// Its number in the outbox.
        id: i64,
        /// Where it should go.
        exchange: String,
        /// With this routing key.
        routing_key: String,
        /// Why.
        error: String,
    },
    /// A message is not tried any more: see [`Outbox::aside`](crate::Outbox::aside).
    SetAside {
        /// Its number in the outbox.
        id: i64,
        /// Where it should go.
        exchange: String,
        /// With this routing key.
        routing_key: String,
        /// Why.
        error: String,
    },
    /// Nothing is sent, because the database or the broker is away. It is tried again.
    Interrupted {
        /// Which of them.
        side: Side,
        /// Why.
        error: String,
    },
    /// What was away is back.
    Resumed {
        /// Which of them.
        side: Side,
    },
}

impl fmt::Display for RelayEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RelayEvent::Refused { id, exchange, routing_key, error } => write!(
                f,
                "message {id} of the outbox, for {exchange:?}, {routing_key:?}, is tried again later: {}",
                escape(error)
            ),
            RelayEvent::SetAside { id, exchange, routing_key, error } => write!(
                f,
                "message {id} of the outbox, for {exchange:?}, {routing_key:?}, is set aside: {}",
                escape(error)
            ),
            RelayEvent::Interrupted { side, error } => {
                write!(f, "the relay has no {side} now: {}", escape(error))
            }
            RelayEvent::Resumed { side } => write!(f, "the relay's {side} is back"),
        }
    }
}

/// A listener's end: events since it was made.
#[derive(Debug)]
pub struct RelayEvents(broadcast::Receiver<RelayEvent>);

impl RelayEvents {
    /// The next event, or `None` once the relay and its monitors are gone. A listener that has fallen far behind goes on with
    /// the oldest event that is still known.
    pub async fn next(&mut self) -> Option<RelayEvent> {
        loop {
            match self.0.recv().await {
                Ok(event) => return Some(event),
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    }
}

/// Where events come from.
#[derive(Debug)]
pub(super) struct Announcer(broadcast::Sender<RelayEvent>);

impl Announcer {
    pub(super) fn new() -> Self {
        Announcer(broadcast::Sender::new(KEEP))
    }

    pub(super) fn listen(&self) -> RelayEvents {
        RelayEvents(self.0.subscribe())
    }

    /// Tells all listeners, and the log.
    pub(super) fn announce(&self, event: RelayEvent) {
        match &event {
            RelayEvent::Resumed { .. } => tracing::info!("{event}"),
            RelayEvent::SetAside { .. } => tracing::error!("{event}"),
            _ => tracing::warn!("{event}"),
        }
        // Nobody listening is no error.
        let _ = self.0.send(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_whatever_the_error_says() {
        let [exchange, routing_key] = ["x", "k"].map(str::to_owned);
        let error = "a\nforged".to_owned();
        for event in [
            RelayEvent::Interrupted { side: Side::Database, error: error.clone() },
            RelayEvent::Refused { id: 1, exchange, routing_key, error },
        ] {
            let text = event.to_string();
            assert!(text.ends_with("a\\nforged"), "{text}");
        }
    }
}
