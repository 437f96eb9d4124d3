//! What happens to a client's connections, for whoever wants to know.

use std::fmt;

use tokio::sync::broadcast;

use crate::error::Error;
use crate::text::escape;

/// How many events wait for a listener that does not take them. One that falls behind further misses the oldest.
const KEEP: usize = 256;

/// Something happened to a connection of a client, or to what lives on it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ClientEvent {
    /// A connection is there, and the topology with it.
    Connected {
        /// Which of the client's connections.
        connection: String,
        /// To which broker, without the password.
        endpoint: String,
        /// It had been there before.
        again: bool,
    },
    /// An attempt to connect failed; others follow.
    ConnectFailed {
        /// Which of the client's connections.
        connection: String,
        /// Why.
        error: Error,
    },
    /// A connection was lost; it will be made again.
    Lost {
        /// Which of the client's connections.
        connection: String,
        /// Why.
        error: Error,
    },
    /// The broker takes no publishes for now.
    Blocked {
        /// Which of the client's connections.
        connection: String,
        /// Why, in the broker's words.
        reason: String,
    },
    /// It takes them again.
    Unblocked {
        /// Which of the client's connections.
        connection: String,
    },
    /// The client has stopped trying to connect.
    GaveUp {
        /// Which of the client's connections.
        connection: String,
        /// Why.
        error: Error,
    },
    /// An object could not be declared again after a reconnect. It is tried again.
    NotRestored {
        /// Which: `queue "billing"`.
        object: String,
        /// Why.
        error: Error,
    },
    /// An object that could not be declared again is back.
    Restored {
        /// Which.
        object: String,
    },
    /// A message was parked: it is not tried again until somebody replays it.
    Parked {
        /// The queue whose consumer failed.
        queue: String,
        /// The routing key with which it came.
        routing_key: String,
        /// Its message id, if it has one.
        message_id: Option<String>,
        /// Why it is not tried again.
        reason: ParkReason,
        /// What the last error said.
        error: String,
    },
    /// Messages are no longer waited for: they are missing among those of a sender that counts its messages, see
    /// [`HighWater`](crate::inbox::HighWater). One that comes all the same is parked.
    GivenUp {
        /// The queue whose consumer waited for them.
        queue: String,
        /// Who has counted them.
        sender: String,
        /// The first number.
        from: u64,
        /// The last number.
        to: u64,
    },
    /// A parking lot that is [watched](crate::ParkingLot::watch) has more messages than it should.
    LotFilled {
        /// Its queue.
        queue: String,
        /// How many messages it has.
        depth: u64,
        /// How many it should have at most.
        threshold: u64,
    },
    /// It has no more than it should again.
    LotDrained {
        /// Its queue.
        queue: String,
        /// How many messages it has.
        depth: u64,
    },
    /// A consumer gets nothing for now: its channel, its queue or its connection went.
    ConsumerLost {
        /// The queue it consumes.
        queue: String,
        /// Why.
        error: Error,
    },
    /// A consumer gets messages again.
    ConsumerResumed {
        /// The queue it consumes.
        queue: String,
    },
    /// The application has closed the client.
    Closed,
}

impl fmt::Display for ClientEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientEvent::Connected { connection, endpoint, again: false } => {
                write!(f, "{connection} is connected to {endpoint}")
            }
            ClientEvent::Connected { connection, endpoint, again: true } => {
                write!(f, "{connection} is connected again, to {endpoint}")
            }
            ClientEvent::ConnectFailed { connection, error } => {
                write!(f, "{connection}: {error}")
            }
            ClientEvent::Lost { connection, error } => write!(f, "{connection} was lost: {error}"),
            ClientEvent::Blocked { connection, reason } => {
                write!(f, "the broker takes no publishes on {connection}: {}", escape(reason))
            }
            ClientEvent::Unblocked { connection } => {
                write!(f, "the broker takes publishes on {connection} again")
            }
            ClientEvent::GaveUp { connection, error } => {
                write!(f, "{connection} is given up: {error}")
            }
            ClientEvent::NotRestored { object, error } => {
                write!(f, "{object} could not be restored: {error}")
            }
            ClientEvent::Restored { object } => write!(f, "{object} is restored"),
            ClientEvent::GivenUp { queue, sender, from, to } => {
                write!(
                    f,
                    "messages {from} to {to} of {sender:?} are no longer waited for in queue {queue:?}"
                )
            }
            ClientEvent::Parked { queue, routing_key, message_id, reason, error } => {
                let id = message_id.as_ref().map(|id| format!(", id {id:?}")).unwrap_or_default();
                write!(
                    f,
                    "a message of queue {queue:?} with routing key {routing_key:?}{id} is parked ({reason}): {}",
                    escape(error)
                )
            }
            ClientEvent::LotFilled { queue, depth, threshold } => {
                write!(f, "parking lot {queue:?} has {depth} messages, more than {threshold}")
            }
            ClientEvent::LotDrained { queue, depth } => {
                write!(f, "parking lot {queue:?} has {depth} messages again")
            }
            ClientEvent::ConsumerLost { queue, error } => {
                write!(f, "the consumer of queue {queue:?} is interrupted: {error}")
            }
            ClientEvent::ConsumerResumed { queue } => {
                write!(f, "the consumer of queue {queue:?} is back")
            }
            ClientEvent::Closed => f.write_str("the client is closed"),
        }
    }
}

/// A listener's end: events since it was made.
#[derive(Debug)]
pub struct ClientEvents(broadcast::Receiver<ClientEvent>);

impl ClientEvents {
    /// The next event, or `None` once the client is gone. A listener that has fallen far behind goes on with the oldest
    /// event that is still known.
    pub async fn next(&mut self) -> Option<ClientEvent> {
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
pub(crate) struct Announcer(broadcast::Sender<ClientEvent>);

impl Announcer {
    pub(crate) fn new() -> Self {
        Announcer(broadcast::Sender::new(KEEP))
    }

    pub(crate) fn listen(&self) -> ClientEvents {
        ClientEvents(self.0.subscribe())
    }

    /// Tells all listeners, and the log.
    pub(crate) fn announce(&self, event: ClientEvent) {
        match &event {
            ClientEvent::Connected { .. }
            | ClientEvent::Unblocked { .. }
            | ClientEvent::Restored { .. }
            | ClientEvent::ConsumerResumed { .. }
            | ClientEvent::LotDrained { .. }
            | ClientEvent::Closed => tracing::info!("{event}"),
            ClientEvent::GaveUp { .. }
            | ClientEvent::Parked { .. }
            | ClientEvent::LotFilled { .. } => {
                tracing::error!("{event}")
            }
            _ => tracing::warn!("{event}"),
        }
        // Nobody listening is no error.
        let _ = self.0.send(event);
    }
}

/// Why a message is parked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ParkReason {
    /// Its retries are used up.
    Exhausted,
    /// It would be too old by the next attempt.
    TooOld,
    /// Its error will not go away.
    Permanent,
    /// It cannot be sent to where it would wait: its headers are too large for one more.
    Unmovable,
    /// Nobody knows where it should go, or there is no such place.
    Unroutable,
}

impl ParkReason {
    /// A word for it, as the parked message carries it.
    pub fn as_str(self) -> &'static str {
        match self {
            ParkReason::Exhausted => "exhausted",
            ParkReason::TooOld => "too-old",
            ParkReason::Permanent => "permanent",
            ParkReason::Unmovable => "unmovable",
            ParkReason::Unroutable => "unroutable",
        }
    }
}

impl fmt::Display for ParkReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
