//! What happened to messages, one event after another, for tests to assert on.
//!
//! Nothing is recorded unless [`Builder::record`](crate::Builder::record) asks for it. Direct replies pass no queue, and are
//! never recorded.
//!
//! ```
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use leveret::amqp::{Connection, GetOptions, Options, Publish, QueueOptions};
//! use leveret_broker::Broker;
//! use leveret_broker::events::What;
//!
//! let broker = Broker::builder().record(1000).start()?;
//! let connection = Connection::open_over(broker.connect(), &Options::default()).await?;
//! let channel = connection.open_channel().await?.into_confirm().await?;
//! channel.declare_queue("orders", QueueOptions::default()).await?;
//! let publish = Publish { routing_key: "orders", body: "one book".into(), ..Publish::default() };
//! channel.publish(&publish).await?.await;
//! channel.get("orders", GetOptions { auto_ack: true }).await?;
//!
//! let events = broker.events();
//! let happened: Vec<_> = events.iter().map(|event| &event.what).collect();
//! let queue = || "orders".to_owned();
//! assert_eq!(
//!     happened,
//!     [
//!         &What::Published { to: vec![queue()], returned: false },
//!         &What::Delivered { queue: queue(), consumer: None, redelivered: false, auto_ack: true },
//!     ]
//! );
//! assert_eq!(events[0].routing_key, "orders");
//! # Ok(()) }
//! ```

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::death::Reason;
use crate::message::Message;
use crate::time::Moment;

/// Something that happened to a message. From [`Broker::events`](crate::Broker::events).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// How many there were before it. If the first one of a record is not 0, older ones did not fit and are forgotten.
    pub number: u64,
    /// How long after the start of the broker, by tokio's clock.
    pub at: Duration,
    /// The virtual host it happened in.
    pub virtual_host: String,
    /// The exchange that the message was published to; for a dead letter, the dead-letter exchange.
    pub exchange: String,
    /// The routing key of the message.
    pub routing_key: String,
    /// The `message_id` of the message.
    pub message_id: Option<String>,
    /// What happened to it.
    pub what: What,
}

/// What can happen to a message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum What {
    /// A client published it (in a transaction: has committed it).
    Published {
        /// The queues that it was routed to, sorted, and addresses of direct replies (which are no queues to 3.10); none if it
        /// is unroutable.
        to: Vec<String>,
        /// It is unroutable, mandatory, and was sent back.
        returned: bool,
    },
    /// A queue that it was routed to did not take it.
    Refused {
        /// The queue, which was full; none if a fault was asked for.
        queue: Option<String>,
    },
    /// It was handed to a client.
    Delivered {
        /// From this queue.
        queue: String,
        /// To the consumer with this tag; to `basic.get` if there is none.
        consumer: Option<String>,
        /// It may have been delivered before.
        redelivered: bool,
        /// The client need not settle it.
        auto_ack: bool,
    },
    /// A delivery came to its end.
    Settled {
        /// The queue that it was delivered from.
        queue: String,
        /// How.
        how: Settled,
    },
    /// A queue gave it up. If the queue has no dead-letter exchange, that is all.
    Died {
        /// The queue.
        queue: String,
        /// Why.
        why: Death,
    },
    /// It was sent on after its death: exchange and key of the event are the new ones.
    DeadLettered {
        /// The queue that it died in.
        from: String,
        /// The queues that it was routed to and had not reached before, sorted.
        to: Vec<String>,
    },
    /// It reached no queue after its death, and is gone.
    Gone {
        /// The queue that it died in.
        queue: String,
    },
    /// It did not reach all queues after its death, and is kept to try again: the queue dead-letters at least once.
    Kept {
        /// The queue that it died in.
        queue: String,
    },
    /// It went without having died.
    Discarded {
        /// From this queue.
        queue: String,
        /// Why.
        why: Discarded,
    },
}

/// How a delivery came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Settled {
    /// The client acked it.
    Acked,
    /// The client does not want it, and not back in its queue either: it dies.
    Discarded,
    /// The client put it back: by reject, nack or recover.
    Requeued,
    /// The client's channel ended.
    Abandoned,
    /// The client kept it for too long.
    TimedOut,
}

/// Why a queue gives up a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Death {
    /// A consumer refused it and did not want it back in the queue.
    Rejected,
    /// Its time was up.
    Expired,
    /// The queue was full.
    OverLength,
    /// It failed too often.
    OverDeliveryLimit,
}

impl From<Reason> for Death {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::Rejected => Death::Rejected,
            Reason::Expired => Death::Expired,
            Reason::MaxLen => Death::OverLength,
            Reason::DeliveryLimit => Death::OverDeliveryLimit,
        }
    }
}

/// Why a message went without having died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Discarded {
    /// Its queue was purged.
    Purged,
    /// Its queue was deleted, or ended by itself.
    QueueDeleted,
    /// It does not survive a restart.
    Restarted,
}

/// The newest events of all virtual hosts, up to a number.
#[derive(Debug)]
pub(crate) struct Record {
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Event>,
    next: u64,
}

impl Record {
    pub(crate) fn new(capacity: usize) -> Self {
        Record { capacity, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn note(&self, virtual_host: &str, at: Moment, message: &Message, what: What) {
        let message_id = message.properties().message_id.map(|id| id.to_string());
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        if state.events.len() >= self.capacity {
            state.events.pop_front();
        }
        if self.capacity > 0 {
            state.events.push_back(Event {
                number,
                at: at.since_start(),
                virtual_host: virtual_host.to_owned(),
                exchange: message.exchange().to_string(),
                routing_key: message.routing_key().to_string(),
                message_id,
                what,
            });
        }
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.lock().events.iter().cloned().collect()
    }

    pub(crate) fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.lock().events).into()
    }
}
