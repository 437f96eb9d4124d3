//! The queues of the designs, with the arguments that keep RabbitMQ from losing messages, and headers.

use leveret::amqp::{RawProperties, Value};
use leveret::retry::{ForwardedMessage, WorkQueue};
use leveret::{Error, Queue, QueueType};

/// The exchange by which a parked message gets back to its queue alone, under the key it was published with.
pub(crate) const RETURN: &str = "x-leveret-return";

/// The queue whose consumer failed.
pub(crate) const QUEUE: &str = "x-leveret-queue";

/// How often a message has failed.
pub(crate) const ATTEMPTS: &str = "x-leveret-attempts";

/// How many errors a list of them keeps.
pub(crate) const MAX_HISTORY: usize = 10;

/// A delivery limit that no message reaches: a queue that names none has one of 20 from RabbitMQ 4.0 on.
const UNLIMITED: i64 = 1_000_000;

/// The same for parked messages, which are looked at.
const PARKED_LIMIT: i64 = 1_000_000_000;

/// The work queue as a design that rejects needs it. `plain` gives it only the arguments that the design names; otherwise a
/// quorum queue dead-letters at least once, and has a delivery limit that is out of the way.
pub(crate) fn rejecting(
    queue: Queue,
    exchange: &str,
    routing_key: Option<&str>,
    plain: bool,
) -> Result<Queue, Error> {
    if argument(&queue, "x-dead-letter-exchange").is_some() {
        check_argument(&queue, "x-dead-letter-exchange", exchange)?;
    }
    if argument(&queue, "x-dead-letter-routing-key").is_some() {
        check_argument(&queue, "x-dead-letter-routing-key", routing_key.unwrap_or_default())?;
    }
    let mut queue = queue.dead_letter_to(exchange);
    if let Some(key) = routing_key {
        queue = queue.dead_letter_key(key);
    }
    Ok(if plain { queue } else { at_least_once(unlimited(queue)) })
}

/// The work queue of a consumer that rejects. One that the client has declared already has to have the dead-letter exchange: a
/// rejected message would be gone. If another program has declared it otherwise, the broker says so.
pub(crate) fn consumed(
    work: &WorkQueue,
    exchange: &str,
    routing_key: Option<&str>,
) -> Result<Queue, Error> {
    let Some(queue) = work.declared() else {
        return rejecting(work.queue(), exchange, routing_key, true);
    };
    check_argument(queue, "x-dead-letter-exchange", exchange)?;
    if let Some(key) = routing_key {
        check_argument(queue, "x-dead-letter-routing-key", key)?;
    }
    if is_quorum(queue) && argument(queue, "x-delivery-limit").is_none() {
        // What the limit takes out of the queue does not come back by a wait queue: no consumer has rejected it.
        tracing::warn!(
            queue = queue.name(),
            "the queue has no x-delivery-limit: a broker that has one by default drops messages that are requeued too often"
        );
    }
    Ok(queue.clone())
}

fn check_argument(queue: &Queue, name: &str, wanted: &str) -> Result<(), Error> {
    let found = argument(queue, name);
    if found.and_then(Value::as_str) == Some(wanted) {
        return Ok(());
    }
    let found = found.map_or("none".to_owned(), |value| format!("{value:?}"));
    let why = format!(
        "it has to be declared with {name} {wanted:?}, and has {found}. Declare what `topology` of the profile says"
    );
    Err(WorkQueue::from(queue.clone()).refusal(why))
}

/// Dead letters leave it only once they have arrived, if it is of a type that can.
pub(crate) fn at_least_once(queue: Queue) -> Queue {
    let overflow = argument(&queue, "x-overflow").and_then(Value::as_str);
    match is_quorum(&queue) && matches!(overflow, None | Some("reject-publish")) {
        true => queue.dead_letter_at_least_once(),
        false => queue,
    }
}

/// No message leaves it because it comes back often.
pub(crate) fn unlimited(queue: Queue) -> Queue {
    match is_quorum(&queue) && argument(&queue, "x-delivery-limit").is_none() {
        true => queue.argument("x-delivery-limit", UNLIMITED),
        false => queue,
    }
}

/// However often its messages are looked at, they stay.
pub(crate) fn parking_lot(queue: Queue) -> Queue {
    if is_quorum(&queue) { queue.argument("x-delivery-limit", PARKED_LIMIT) } else { queue }
}

fn is_quorum(queue: &Queue) -> bool {
    queue.queue_type() == Some(QueueType::Quorum)
}

fn argument<'q>(queue: &'q Queue, name: &str) -> Option<&'q Value<'static>> {
    queue.arguments().find(|(known, _)| *known == name).map(|(_, value)| value)
}

/// A count in a header: text, or an integer of any width. One below zero is zero.
pub(crate) fn count(properties: &RawProperties, header: &str) -> Option<u32> {
    if !properties.has_headers() {
        return None;
    }
    number(&properties.header(header)?)
}

pub(crate) fn number(value: &Value<'_>) -> Option<u32> {
    let number = value.as_i64().or_else(|| value.as_str()?.trim().parse().ok())?;
    Some(u32::try_from(number.max(0)).unwrap_or(u32::MAX))
}

/// Whether further routing keys wait in a header.
pub(crate) fn has_copies(message: &ForwardedMessage) -> bool {
    message.header("x-leveret-cc").is_some()
}
