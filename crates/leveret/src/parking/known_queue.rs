//! What has to be known of a queue before a scan may take anything from it.
//!
//! RabbitMQ before 4.3 counts how often a message of a quorum queue is given back, and drops it beyond the delivery limit. That
//! is an argument or a policy (the lower one is in force) or, from 4.0 on, 20 by default; no client can ask for it. And a classic
//! queue that deletes itself would be gone with the scan's consumer.
//!
//! ```text
//!  said by the caller --> declared by this client --> declared here, exactly as Leveret declares a parking lot
//!                                                        +--> agreed to: it is one, and its limit is out of reach
//!                                                        +--> refused: the first argument that differs tells the rest
//! ```

use super::ParkingLot;
use crate::amqp::{Channel, QueueOptions, Table, Value};
use crate::connection::Client;
use crate::error::{Conflict, Error, ErrorKind};
use crate::retry::tiers::PARKED_DELIVERY_LIMIT;
use crate::topology::cycle::UNLIMITED;
use crate::topology::{Queue, QueueType};

/// The first version whose quorum queues do not count what a client gives back.
const COUNTS_NO_RETURNS: (u32, u32) = (4, 3);

/// How a scan treats its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScanMode {
    /// Whether messages are taken one by one: without a consumer, since the queue may delete itself with its last one.
    pub(super) by_get: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KnownQueue {
    queue_type: Option<QueueType>,
    has_limit_out_of_reach: bool,
    /// `None` if unknown.
    deletes_itself: Option<bool>,
}

impl KnownQueue {
    fn of(queue: &Queue) -> Self {
        let limit = queue.arguments.get("x-delivery-limit").and_then(|limit| limit.as_i64());
        KnownQueue {
            queue_type: queue.queue_type(),
            has_limit_out_of_reach: limit.is_some_and(|limit| limit >= UNLIMITED),
            deletes_itself: Some(queue.auto_delete),
        }
    }

    /// What the first argument tells that differs from those of a parking lot.
    fn from_conflict(conflict: &Conflict) -> Self {
        let of_type = |queue_type| KnownQueue { queue_type, ..KnownQueue::default() };
        let lasting =
            |queue_type| KnownQueue { deletes_itself: Some(false), ..of_type(queue_type) };
        match (conflict.argument.as_str(), conflict.found.as_str()) {
            // Only classic queues can be transient or delete themselves.
            ("durable", _) => of_type(Some(QueueType::Classic)),
            ("auto_delete", found) => KnownQueue {
                deletes_itself: Some(found == "true"),
                ..of_type(Some(QueueType::Classic))
            },
            ("x-queue-type", "stream") => lasting(Some(QueueType::Stream)),
            ("x-queue-type", "classic" | "none") => lasting(Some(QueueType::Classic)),
            _ => lasting(None),
        }
    }

    fn is_counting(&self) -> bool {
        self.queue_type != Some(QueueType::Classic) && !self.has_limit_out_of_reach
    }
}

impl ScanMode {
    /// Refuses a scan that could cost messages, before any is taken.
    pub(super) async fn choose(lot: &ParkingLot, version: (u32, u32)) -> Result<Self, Error> {
        let (client, queue) = (&lot.client, lot.queue.as_str());
        let may_count = version < COUNTS_NO_RETURNS && !lot.allows_counted_returns;
        let remembered = client.core().remembered.look(|topology| {
            topology.queues().iter().find(|known| known.name() == queue).map(KnownQueue::of)
        });
        let mut known = match (remembered, lot.queue_type) {
            (Some(known), _) if known.queue_type.is_some() => known,
            (_, Some(QueueType::Quorum)) if !may_count => KnownQueue::default(),
            // Without a type it has that of its virtual host.
            _ => ask(client, queue).await?,
        };
        known.queue_type = lot.queue_type.or(known.queue_type);
        match known {
            KnownQueue { queue_type: Some(QueueType::Stream), .. } => return Err(is_stream(queue)),
            KnownQueue { deletes_itself: Some(true), .. } => return Err(deletes_itself(queue)),
            _ => {}
        }
        if may_count && known.is_counting() {
            return Err(counts_returns(queue));
        }
        let is_quorum = known.queue_type == Some(QueueType::Quorum);
        Ok(ScanMode { by_get: known.deletes_itself.is_none() && !is_quorum })
    }
}

/// Declares the queue, which was there a moment ago, with the arguments of a parking lot. A refusal changes nothing, and is a line in
/// the broker's log.
async fn ask(client: &Client, queue: &str) -> Result<KnownQueue, Error> {
    let queue = &client.queue_name(queue);
    let mut known = KnownQueue::default();
    for durable in [true, false] {
        let arguments = Table::from_pairs([
            ("x-queue-type", Value::from("quorum")),
            ("x-delivery-limit", PARKED_DELIVERY_LIMIT.into()),
        ]);
        let arguments = arguments.map_err(|error| Error::invalid(error.to_string()))?;
        let options = QueueOptions { durable, arguments, ..QueueOptions::default() };
        let declare = |channel: Channel| {
            let options = options.clone();
            async move {
                // It may have been deleted since it was looked at, and is not to be made.
                channel.inspect_queue(queue).await?;
                channel.declare_queue(queue, options).await
            }
        };
        let error = match client.on_channel("finding out of what type a queue is", declare).await {
            Ok(_) => {
                return Ok(KnownQueue::of(&crate::retry::tiers::lasting(Queue::quorum(queue))));
            }
            Err(error) => error,
        };
        match error.kind() {
            ErrorKind::TimedOut | ErrorKind::Closed | ErrorKind::Lost => return Err(error),
            _ => {}
        }
        let Some(conflict) = Conflict::read(queue, &error.to_string()) else { break };
        let told = KnownQueue::from_conflict(&conflict);
        known = KnownQueue { queue_type: told.queue_type.or(known.queue_type), ..told };
        if known.deletes_itself.is_some() {
            break;
        }
    }
    Ok(known)
}

fn counts_returns(queue: &str) -> Error {
    let text = format!(
        "queue {queue:?} may drop messages that are looked at, so none was taken: RabbitMQ before 4.3 counts how often a message of \
         a quorum queue is given back, and drops it beyond a delivery limit that no client can see. Either declare the queue \
         with an x-delivery-limit of {PARKED_DELIVERY_LIMIT}, as Leveret's parking lots have it, or accept that it counts: \
         allow_counted_returns(), --allow-counted-returns; on a classic queue that costs nothing"
    );
    Error::new(ErrorKind::Refused, text)
}

pub(super) fn is_stream(queue: &str) -> Error {
    let text = format!(
        "queue {queue:?} is a stream, which keeps its messages: nothing can be taken out or put back. Read it with a consumer \
         that has an x-stream-offset"
    );
    Error::new(ErrorKind::Invalid, text)
}

fn deletes_itself(queue: &str) -> Error {
    let text = format!(
        "queue {queue:?} deletes itself with its last consumer: looking into it would delete it and its messages. Declare it \
         without auto-delete"
    );
    Error::new(ErrorKind::Invalid, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_declaration_tells_as_much_as_its_first_difference() {
        let known = |argument: &str, found: &str| {
            let text = format!(
                "inequivalent arg '{argument}' for queue 'q' in vhost '/': received 'x' but current is '{found}'"
            );
            let known = KnownQueue::from_conflict(&Conflict::read("q", &text).unwrap());
            (known.queue_type, known.deletes_itself)
        };
        let table = [
            ("durable", "false", (Some(QueueType::Classic), None)),
            ("auto_delete", "true", (Some(QueueType::Classic), Some(true))),
            ("auto_delete", "false", (Some(QueueType::Classic), Some(false))),
            ("x-queue-type", "classic", (Some(QueueType::Classic), Some(false))),
            ("x-queue-type", "stream", (Some(QueueType::Stream), Some(false))),
            ("x-message-ttl", "5", (None, Some(false))),
            ("x-delivery-limit", "0", (None, Some(false))),
        ];
        for (argument, found, expected) in table {
            assert_eq!(known(argument, found), expected, "{argument}");
        }
    }
}
