//! Queues.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::arguments::Arguments;
use super::binding::Binding;
use crate::amqp::Value;

/// A queue: durable, unless said otherwise.
///
/// ```
/// use std::time::Duration;
/// use leveret::{Overflow, Queue};
///
/// let billing = Queue::quorum("billing")
///     .bind("orders", "order.*")
///     .max_length(100_000)
///     .overflow(Overflow::RejectPublish)
///     .dead_letter_to("failed");
/// // Named by the broker, for this client alone; the rest of the program calls it "replies".
/// let replies = Queue::temporary("replies").bind("answers", "#");
/// # let _ = (billing, replies);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Queue {
    pub(crate) name: String,
    /// The broker makes the name, and `name` is what it is called here.
    pub(crate) named_by_broker: bool,
    pub(crate) durable: bool,
    pub(crate) exclusive: bool,
    pub(crate) auto_delete: bool,
    pub(crate) arguments: Arguments,
    /// Moved into the topology that the queue becomes part of.
    pub(crate) bindings: Vec<Binding>,
}

/// The types of queues that RabbitMQ has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QueueType {
    /// On one node.
    Classic,
    /// Replicated on several nodes.
    Quorum,
    /// A log that consumers read at their own place.
    Stream,
}

impl QueueType {
    /// Its name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            QueueType::Classic => "classic",
            QueueType::Quorum => "quorum",
            QueueType::Stream => "stream",
        }
    }
}

/// What happens to a message that a full queue has no room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overflow {
    /// The oldest message makes room, and is dead-lettered or dropped.
    DropHead,
    /// The publisher gets a nack.
    RejectPublish,
    /// The publisher gets a nack, and the message is dead-lettered.
    RejectPublishDlx,
}

impl Overflow {
    /// Its name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Overflow::DropHead => "drop-head",
            Overflow::RejectPublish => "reject-publish",
            Overflow::RejectPublishDlx => "reject-publish-dlx",
        }
    }
}

const TYPE: &str = "x-queue-type";

impl Queue {
    /// A durable queue of the type that the broker has as its default.
    pub fn new(name: impl Into<String>) -> Self {
        Queue {
            name: name.into(),
            named_by_broker: false,
            durable: true,
            exclusive: false,
            auto_delete: false,
            arguments: Arguments::default(),
            bindings: Vec::new(),
        }
    }

    /// A queue on one node.
    pub fn classic(name: impl Into<String>) -> Self {
        Queue::new(name).of_type(QueueType::Classic)
    }

    /// A queue that is replicated on several nodes: the one for what must not be lost.
    pub fn quorum(name: impl Into<String>) -> Self {
        Queue::new(name).of_type(QueueType::Quorum)
    }

    /// A log that consumers read at their own place.
    pub fn stream(name: impl Into<String>) -> Self {
        Queue::new(name).of_type(QueueType::Stream)
    }

    /// A queue for this client alone, gone with it. The broker makes its name, anew after each reconnect;
    /// `local_name` is what bindings and consumers of this client call it.
    pub fn temporary(local_name: impl Into<String>) -> Self {
        let mut queue = Queue::new(local_name);
        queue.named_by_broker = true;
        queue.durable = false;
        queue.exclusive = true;
        queue.auto_delete = true;
        queue
    }

    /// Of this type.
    #[must_use]
    pub fn of_type(self, queue_type: QueueType) -> Self {
        self.argument(TYPE, queue_type.as_str())
    }

    /// Gone when the broker restarts.
    #[must_use]
    pub fn transient(mut self) -> Self {
        self.durable = false;
        self
    }

    /// For the connection that declares it alone, and gone with that.
    #[must_use]
    pub fn exclusive(mut self) -> Self {
        self.exclusive = true;
        self
    }

    /// Gone when its last consumer goes.
    #[must_use]
    pub fn auto_delete(mut self) -> Self {
        self.auto_delete = true;
        self
    }

    /// Messages older than this are dead-lettered or dropped. In whole milliseconds.
    #[must_use]
    pub fn message_ttl(self, ttl: Duration) -> Self {
        self.argument("x-message-ttl", milliseconds(ttl))
    }

    /// The queue is deleted after being unused for this long. In whole milliseconds.
    #[must_use]
    pub fn expires(self, after: Duration) -> Self {
        self.argument("x-expires", milliseconds(after))
    }

    /// At most so many messages are ready in it.
    #[must_use]
    pub fn max_length(self, messages: u64) -> Self {
        self.argument("x-max-length", signed(messages))
    }

    /// At most so many bytes of bodies are ready in it.
    #[must_use]
    pub fn max_length_bytes(self, bytes: u64) -> Self {
        self.argument("x-max-length-bytes", signed(bytes))
    }

    /// What happens to what it has no room for.
    #[must_use]
    pub fn overflow(self, overflow: Overflow) -> Self {
        self.argument("x-overflow", overflow.as_str())
    }

    /// Where messages go that are rejected, expire or have no room. They keep their routing key.
    #[must_use]
    pub fn dead_letter_to(self, exchange: impl Into<String>) -> Self {
        self.argument("x-dead-letter-exchange", exchange.into())
    }

    /// The routing key that they get instead of their own.
    #[must_use]
    pub fn dead_letter_key(self, routing_key: impl Into<String>) -> Self {
        self.argument("x-dead-letter-routing-key", routing_key.into())
    }

    /// Dead letters leave a quorum queue only once they have arrived. Needs a dead-letter exchange, and sets
    /// [`Overflow::RejectPublish`], which RabbitMQ asks for then.
    #[must_use]
    pub fn dead_letter_at_least_once(self) -> Self {
        self.overflow(Overflow::RejectPublish).argument("x-dead-letter-strategy", "at-least-once")
    }

    /// Messages have priorities up to this one.
    #[must_use]
    pub fn max_priority(self, priority: u8) -> Self {
        self.argument("x-max-priority", i32::from(priority))
    }

    /// One consumer at a time gets messages; another takes over when it goes.
    #[must_use]
    pub fn single_active_consumer(self) -> Self {
        self.argument("x-single-active-consumer", true)
    }

    /// After so many failed deliveries, a quorum queue dead-letters or drops a message.
    #[must_use]
    pub fn delivery_limit(self, deliveries: u32) -> Self {
        self.argument("x-delivery-limit", i64::from(deliveries))
    }

    /// Any other argument.
    #[must_use]
    pub fn argument(mut self, name: impl Into<String>, value: impl Into<Value<'static>>) -> Self {
        self.arguments.set(name, value);
        self
    }

    /// Gets messages from an exchange.
    #[must_use]
    pub fn bind(mut self, exchange: impl Into<String>, routing_key: impl Into<String>) -> Self {
        let binding = Binding::to_queue(self.name.clone(), exchange, routing_key);
        self.bindings.push(binding);
        self
    }

    /// Its name; of one that the broker names, what it is called here.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its type, if it names one.
    pub fn queue_type(&self) -> Option<QueueType> {
        let name = self.arguments.get(TYPE)?.as_str()?;
        [QueueType::Classic, QueueType::Quorum, QueueType::Stream]
            .into_iter()
            .find(|queue_type| queue_type.as_str() == name)
    }

    /// Whether the broker makes its name.
    pub fn is_named_by_broker(&self) -> bool {
        self.named_by_broker
    }

    /// Whether it survives a restart of the broker.
    pub fn is_durable(&self) -> bool {
        self.durable
    }

    /// Whether it is for one connection alone.
    pub fn is_exclusive(&self) -> bool {
        self.exclusive
    }

    pub(crate) fn has_single_active_consumer(&self) -> bool {
        let argument = self.arguments.get("x-single-active-consumer");
        argument.and_then(|value| value.as_bool()) == Some(true)
    }

    /// Whether it goes with its last consumer.
    pub fn is_auto_delete(&self) -> bool {
        self.auto_delete
    }

    /// Its arguments.
    pub fn arguments(&self) -> impl Iterator<Item = (&str, &Value<'static>)> {
        self.arguments.iter()
    }
}

/// More than 292 million years are not told apart.
fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typed_helpers_are_the_arguments_that_rabbitmq_knows() {
        let queue = Queue::quorum("q")
            .message_ttl(Duration::from_secs(2))
            .dead_letter_to("failed")
            .dead_letter_at_least_once()
            .delivery_limit(5);
        let argument = |name| queue.arguments.get(name).cloned();
        assert_eq!(argument("x-queue-type"), Some("quorum".into()));
        assert_eq!(argument("x-message-ttl"), Some(2000i64.into()));
        assert_eq!(argument("x-dead-letter-exchange"), Some("failed".into()));
        assert_eq!(argument("x-dead-letter-strategy"), Some("at-least-once".into()));
        assert_eq!(argument("x-overflow"), Some("reject-publish".into()));
        assert_eq!(argument("x-delivery-limit"), Some(5i64.into()));
        assert_eq!(queue.queue_type(), Some(QueueType::Quorum));
    }
}
