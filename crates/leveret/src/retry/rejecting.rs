//! What designs have in common that reject a message to have it tried again: the broker moves it and counts, and the
//! client adds nothing to it.

use std::time::SystemTime;

use crate::amqp::RawProperties;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::forwarder::{ForwardedMessage, kept};
use crate::topology::cycle::UNLIMITED;
use crate::topology::{Queue, QueueType};

use super::profile::{WorkQueue, to_queue};
use super::stamp::{self, Origin};
use super::{iso8601, one_wait, traps};
use crate::deaths::{Death, Deaths};

/// The work queue with the dead-letter exchange that the design needs. One that the client has declared already has to
/// have it: a rejected message would be gone.
pub(crate) fn work_queue(
    work: &WorkQueue,
    exchange: &str,
    routing_key: Option<&str>,
) -> Result<Queue, Error> {
    match work.declared() {
        Some(queue) => {
            traps::check_argument(queue, "x-dead-letter-exchange", exchange)?;
            if let Some(key) = routing_key {
                traps::check_argument(queue, "x-dead-letter-routing-key", key)?;
            }
            warn_of_limit(queue);
            Ok(queue.clone())
        }
        // If somebody else has declared it otherwise, the broker says so.
        None => described(work.queue(), exchange, routing_key, Arguments::Plain),
    }
}

/// Which arguments the work queue gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arguments {
    /// Those that the design names.
    Plain,
    /// A quorum queue also dead-letters at least once, and has a delivery limit that is out of the way.
    Safe,
}

impl Arguments {
    pub(crate) fn plain_if(plain: bool) -> Self {
        if plain { Arguments::Plain } else { Arguments::Safe }
    }
}

/// The same for a queue that is yet to be declared.
pub(crate) fn described(
    queue: Queue,
    exchange: &str,
    routing_key: Option<&str>,
    arguments: Arguments,
) -> Result<Queue, Error> {
    let has = |name: &str| queue.arguments.get(name).is_some();
    if has("x-dead-letter-exchange") {
        traps::check_argument(&queue, "x-dead-letter-exchange", exchange)?;
    }
    if has("x-dead-letter-routing-key") {
        let key = routing_key.unwrap_or_default();
        traps::check_argument(&queue, "x-dead-letter-routing-key", key)?;
    }
    let is_limited = has("x-delivery-limit");
    let mut queue = queue.dead_letter_to(exchange);
    if let Some(key) = routing_key {
        queue = queue.dead_letter_key(key);
    }
    if arguments == Arguments::Plain {
        return Ok(queue);
    }
    if queue.queue_type() == Some(QueueType::Quorum) && !is_limited {
        queue = queue.argument("x-delivery-limit", UNLIMITED);
    }
    Ok(one_wait::at_least_once(queue))
}

/// From RabbitMQ 4.0 on there is a limit of 20 if none is declared, and what it takes out of the queue does not come back
/// by a wait queue: nobody has rejected it.
fn warn_of_limit(queue: &Queue) {
    let is_quorum = queue.queue_type() == Some(QueueType::Quorum);
    if is_quorum && queue.arguments.get("x-delivery-limit").is_none() {
        let queue = queue.name();
        tracing::warn!(
            queue,
            "the queue has no x-delivery-limit: a broker that has one by default drops messages that are requeued too often"
        );
    }
}

/// How often a message had been rejected before it was put into its queue anew. From RabbitMQ 4.0 on the broker begins to count
/// at one then, whatever the message says.
const REJECTED: &str = "x-leveret-rejected";

/// How often a message was rejected.
pub(crate) fn failures(properties: &RawProperties, queue: &str) -> u32 {
    let before = properties.has_headers().then(|| properties.header(REJECTED)).flatten();
    let before = before.and_then(|before| stamp::count(&before));
    Deaths::of(properties).rejected_from(queue).saturating_add(before.unwrap_or_default())
}

/// The same message for the end of its queue. What the broker has counted so far it says itself from now on.
pub(crate) fn republish(delivery: &Delivery, queue: &str, origin: &Origin) -> ForwardedMessage {
    let mut parcel = to_queue(delivery, queue, origin);
    let properties = delivery.raw_properties();
    let rejected = failures(properties, delivery.queue());
    if rejected > 0 {
        parcel.set_header(REJECTED, rejected.to_string());
        if let Some(first) = first_failure(properties, delivery.queue()) {
            parcel.set_header(stamp::header::FIRST, iso8601::format(first));
        }
        if let Some(death) = Deaths::of(properties).rejection(delivery.queue()) {
            keep_what_dying_took(&mut parcel, death);
        }
        parcel.forget_deaths();
    }
    parcel
}

/// Where a message was published to: the broker has it in the story of its first death.
pub(crate) fn origin(properties: &RawProperties, queue: &str) -> Option<Origin> {
    stamp::origin(properties).or_else(|| {
        let deaths = Deaths::of(properties);
        origin_of(deaths.rejection(queue)?)
    })
}

pub(crate) fn origin_of(death: &Death) -> Option<Origin> {
    let exchange = stamp::short(death.exchange.as_bytes())?;
    let routing_key = stamp::short(death.routing_keys.first()?.as_bytes())?;
    Some(Origin { exchange, routing_key })
}

/// A dead letter has no `expiration` any more and, where it got another routing key on 3.10, no `CC`.
pub(crate) fn keep_what_dying_took(parcel: &mut ForwardedMessage, death: &Death) {
    if let Some(expiration) = &death.expiration {
        parcel.set_header(kept::EXPIRATION, expiration.as_str());
    }
    let has_copies = ["CC", kept::COPIES].iter().any(|name| parcel.header(name).is_some());
    if !has_copies && death.routing_keys.len() > 1 {
        let keys = death.routing_keys[1..].iter().map(|key| key.as_bytes());
        parcel.set_header(kept::COPIES, kept::keys_as_text(keys));
    }
}

/// When a message was rejected first.
pub(crate) fn first_failure(properties: &RawProperties, queue: &str) -> Option<SystemTime> {
    stamp::first_failure(properties)
        .or_else(|| stamp::time(Deaths::of(properties).rejection(queue)?.time?))
}

/// Makes a message ready to be parked: what the broker noted about its deaths goes, and with it the count, so that it
/// begins anew if it is published again; what dying took from it is kept.
pub(crate) fn close_the_story(
    parcel: &mut ForwardedMessage,
    properties: &RawProperties,
    queue: &str,
) {
    parcel.keep_expiration();
    if let Some(death) = Deaths::of(properties).rejection(queue) {
        keep_what_dying_took(parcel, death);
    }
    parcel.remove_header(REJECTED);
    parcel.forget_deaths();
}
