//! What RabbitMQ does that would lose a message that is tried again: found before the first one is.

use std::collections::BTreeSet;

use crate::error::{Error, ErrorKind};
use crate::topology::cycle::UNLIMITED;
use crate::topology::{Destination, ExchangeKind, Queue, QueueType, Topology};

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

/// Whether the queue that is there has an argument without which messages would be lost.
pub(crate) fn check_argument(queue: &Queue, name: &str, wanted: &str) -> Result<(), Error> {
    let found = queue.arguments.get(name);
    if found.and_then(|value| value.as_str()) == Some(wanted) {
        return Ok(());
    }
    let found = found.map_or("none".to_owned(), |value| format!("{value:?}"));
    let why = format!(
        "it has to be declared with {name} {wanted:?}, and has {found}. Declare what `topology` of the profile says"
    );
    Err(refusal(queue.name(), why))
}

/// Which messages, their exchange, their key unless it can be any, and the queue that they have to reach, and no other.
type Route<'a> = (&'a str, &'a str, Option<&'a str>, &'a str);

/// Checks that the objects of a profile are distinct: with other names or keys, messages would multiply or be lost.
pub(crate) fn check_routes(
    work: &str,
    topology: &Topology,
    mut queues: Vec<&str>,
    routes: &[Route<'_>],
) -> Result<(), Error> {
    queues.sort_unstable();
    if let Some(pair) = queues.windows(2).find(|pair| pair[0] == pair[1]) {
        let why = format!(
            "two of the queues {queues:?} have the name {:?}: give them different names",
            pair[0]
        );
        return Err(refusal(work, why));
    }
    for &(what, exchange, key, queue) in routes {
        let reached = reached(topology, exchange, key);
        let is_plugin = topology.exchanges().iter().any(|known| {
            known.name() == exchange && matches!(known.kind(), ExchangeKind::Other(_))
        });
        // Only the plugin knows how it routes.
        if is_plugin || reached.iter().eq([&queue]) {
            continue;
        }
        let key = key.map_or(String::new(), |key| format!(" with the key {key:?}"));
        let why = format!(
            "{what}{key} would go from the exchange {exchange:?} to the queues {reached:?}, and has to go to {queue:?} alone. \
             Use another exchange, or a direct or topic one with a key that this queue alone is bound with"
        );
        return Err(refusal(work, why));
    }
    check_cycles(work, topology)
}

fn reached<'t>(topology: &'t Topology, exchange: &str, key: Option<&str>) -> BTreeSet<&'t str> {
    if let Some(key) = key {
        return topology.queues_for(exchange, key);
    }
    let bindings = topology.bindings().iter().filter(|binding| binding.source() == exchange);
    bindings
        .filter_map(|binding| match binding.destination() {
            Destination::Queue(queue) => Some(queue.as_str()),
            Destination::Exchange(_) => None,
        })
        .collect()
}

/// Whether messages go round by themselves, which ends with the broker dropping them.
fn check_cycles(queue: &str, topology: &Topology) -> Result<(), Error> {
    let Some(cycle) = topology.dropping_cycle() else { return Ok(()) };
    let mut way = cycle.join(" to ");
    way.push_str(" to ");
    way.push_str(cycle[0]);
    let why = format!(
        "messages would go by themselves from {way}, and the broker drops what comes back to a queue without having been \
         rejected. Take x-message-ttl, x-max-length or x-delivery-limit from the queue, or set x-overflow to reject-publish"
    );
    Err(refusal(queue, why))
}
