//! What RabbitMQ does that would lose a message that is tried again: found before the first one is.

use crate::error::{Error, ErrorKind};
use crate::topology::cycle::UNLIMITED;
use crate::topology::{Queue, QueueType};

use super::policy::RetryPolicy;
use super::profile::WorkQueue;

/// The longest name of a work queue: what is added to it has to fit into 255 bytes, and is 26 of them at most
/// (`.wait.49d17h2m47s294ms.255`).
const MAX_NAME: usize = 229;

/// That the messages of a queue cannot be tried again like this, and why.
pub(crate) fn refusal(queue: &str, why: impl AsRef<str>) -> Error {
    let why = why.as_ref();
    let text = format!("messages of queue {queue:?} cannot be tried again like this: {why}");
    Error::new(ErrorKind::Invalid, text)
}

/// Whether messages of a queue can be sent elsewhere and come back to it.
pub(crate) fn check_work_queue(work: &WorkQueue, policy: &RetryPolicy) -> Result<(), Error> {
    let name = work.name();
    if let Some(fault) = policy.fault() {
        return Err(refusal(name, fault));
    }
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(refusal(name, format!("its name has to have 1 to {MAX_NAME} bytes")));
    }
    let Some(queue) = work.declared() else { return Ok(()) };
    if queue.is_named_by_broker() || queue.is_exclusive() {
        let why = "it is gone with its connection, and what waits would find nowhere to go";
        return Err(refusal(name, why));
    }
    if queue.queue_type() == Some(QueueType::Stream) {
        let why = "it is a stream, where whatever is tried again is a new message for everybody";
        return Err(refusal(name, why));
    }
    of(queue, policy).map_or(Ok(()), |trap| Err(refusal(name, trap)))
}

/// Why a queue and a policy do not go together, if they do not.
///
/// A message that is tried again is a new one to its queue, and its deliveries are counted from the beginning: so the limit
/// does not take retries away, and with a dead-letter exchange both do what they should. Without one, whoever has set a
/// limit below the retries has a message dropped by consumers that die fewer times than it may fail.
pub(crate) fn of(queue: &Queue, policy: &RetryPolicy) -> Option<String> {
    let argument = |name: &str| queue.arguments().find(|(known, _)| *known == name);
    let limit = argument("x-delivery-limit").and_then(|(_, limit)| limit.as_i64())?;
    let has_exit = argument("x-dead-letter-exchange").is_some();
    let retries = policy.retries().map_or(i64::MAX, i64::from);
    ((0..UNLIMITED).contains(&limit) && limit < retries && !has_exit).then(|| {
        let retries = policy.retries().map_or("unlimited".to_owned(), |n| n.to_string());
        format!(
            "its delivery limit is {limit}, below the {retries} retries, and it has no dead-letter exchange: the broker drops \
             what was delivered more often. Raise the limit, or give the queue a dead-letter exchange"
        )
    })
}
