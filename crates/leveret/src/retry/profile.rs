//! What a design of retrying has to say: which objects it needs, how it counts, and what it does with a failed message.

use std::fmt::Debug;
use std::time::{Duration, SystemTime};

use crate::amqp::RawProperties;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::forwarder::ForwardedMessage;
use crate::topology::{Queue, QueueType, Topology};

use super::policy::{Decision, Facts, RetryPolicy};
use super::stamp::{self, Detail, Failed, Origin};

/// What is done with a failed message.
#[derive(Debug)]
pub(crate) enum Step {
    /// Back to its queue, after a pause in which it stays with the consumer.
    Requeue(Duration),
    /// Rejected: to the dead-letter exchange of its queue.
    DeadLetter,
    /// Published elsewhere, and acked once that is confirmed.
    Move(Box<ForwardedMessage>),
}

/// A design of retrying.
pub(crate) trait Profile: Debug + Send + Sync {
    /// When to try again.
    fn policy(&self) -> &RetryPolicy;

    /// What it needs on the broker for this queue, the queue itself included if it has to have something. An error if it
    /// cannot work with this queue, or falls into a trap of the broker.
    ///
    /// `queue` is what the client knows of it, or nothing but a name.
    fn topology(&self, queue: &WorkQueue) -> Result<Topology, Error>;

    /// What of that belongs to the queue alone, and is deleted with it.
    fn belongings(&self, queue: &WorkQueue) -> Result<Topology, Error> {
        self.topology(queue)
    }

    /// What should happen to a message that failed.
    fn decide(&self, facts: &Facts<'_>, _properties: &RawProperties) -> Decision {
        self.policy().decide(facts)
    }

    /// How many deliveries of a message failed before the present one.
    fn failures(&self, properties: &RawProperties, queue: &str) -> u32;

    /// Where a message was published to, if it has failed before and comes another way now.
    fn origin(&self, properties: &RawProperties, _queue: &str) -> Option<Origin> {
        stamp::origin(properties)
    }

    /// When a message failed first, if it failed before.
    fn first_failure(&self, properties: &RawProperties, _queue: &str) -> Option<SystemTime> {
        stamp::first_failure(properties)
    }

    /// What makes it come again.
    fn retry(
        &self,
        delivery: &Delivery,
        failed: &Failed<'_>,
        wait: Duration,
        detail: Detail,
    ) -> Step;

    /// Whether messages can wait for as long as a handler asks.
    fn has_any_wait(&self) -> bool {
        false
    }

    /// Whether somebody has asked for a type of its queues. If not, they serve as well if they are of another.
    fn asks_for_type(&self) -> bool {
        false
    }

    /// Whether failed messages wait at their consumer, and take up its prefetch meanwhile.
    fn holds_failed(&self) -> bool {
        false
    }

    /// The same message for the end of its queue, as a new one whose deliveries nobody has counted. By default it comes by
    /// the default exchange, under the name of the queue, and says where it had come from.
    fn anew(&self, delivery: &Delivery, queue: &str, origin: &Origin) -> ForwardedMessage {
        to_queue(delivery, queue, origin)
    }

    /// What parks it.
    fn park(&self, delivery: &Delivery, failed: &Failed<'_>, detail: Detail) -> Step;
}

/// A message for a queue and no other, which says where it had come from.
pub(crate) fn to_queue(delivery: &Delivery, queue: &str, origin: &Origin) -> ForwardedMessage {
    let mut parcel = ForwardedMessage::of(delivery, "");
    parcel.routing_key = queue.to_owned();
    parcel.keep_copies();
    origin.stamp(&mut parcel);
    parcel
}

/// The queue whose messages are tried again.
#[derive(Clone, Debug)]
pub(crate) enum WorkQueue {
    /// The client has declared it.
    Known(Queue),
    /// Somebody else has.
    Unknown(String),
}

impl WorkQueue {
    pub(crate) fn name(&self) -> &str {
        match self {
            WorkQueue::Known(queue) => queue.name(),
            WorkQueue::Unknown(name) => name,
        }
    }

    /// The queue as it is, or as nothing is known of it.
    pub(crate) fn queue(&self) -> Queue {
        match self {
            WorkQueue::Known(queue) => queue.clone(),
            WorkQueue::Unknown(name) => Queue::new(name),
        }
    }

    /// How often the broker delivers a message of it before it drops it or dead-letters it, if that is known.
    pub(crate) fn delivery_limit(&self) -> Option<i64> {
        let WorkQueue::Known(queue) = self else { return None };
        queue.arguments.get("x-delivery-limit")?.as_i64()
    }

    /// Whether it may be one in which the broker counts deliveries, to drop a message in the end: a quorum queue, as
    /// one of which nothing else is known may be by default.
    pub(crate) fn may_count_deliveries(&self) -> bool {
        let WorkQueue::Known(queue) = self else { return true };
        let may_be = matches!(queue.queue_type(), None | Some(QueueType::Quorum));
        may_be && !queue.is_exclusive() && !queue.is_named_by_broker()
    }

    /// A queue of the same type for messages that wait or are parked.
    pub(crate) fn companion(&self, name: impl Into<String>) -> Queue {
        let queue_type = match self {
            WorkQueue::Known(queue) => queue.queue_type(),
            WorkQueue::Unknown(_) => None,
        };
        match queue_type {
            Some(queue_type) => Queue::new(name).of_type(queue_type),
            None => Queue::new(name),
        }
    }
}
