//! Whether the objects of a design lead each message where it belongs.

use std::collections::BTreeSet;

use leveret::retry::WorkQueue;
use leveret::{Destination, Error, ExchangeKind, Topology};

/// Which messages, their exchange, their key unless it can be any, and the queue that they have to reach, and no other.
pub(crate) type Route<'a> = (&'a str, &'a str, Option<&'a str>, &'a str);

/// Checks that the objects of a profile are distinct: with other names or keys, messages would multiply or be lost.
pub(crate) fn check(
    work: &WorkQueue,
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
        return Err(work.refusal(why));
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
        return Err(work.refusal(why));
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
fn check_cycles(work: &WorkQueue, topology: &Topology) -> Result<(), Error> {
    let Some(cycle) = topology.dropping_cycle() else { return Ok(()) };
    let mut way = cycle.join(" to ");
    way.push_str(" to ");
    way.push_str(cycle[0]);
    let why = format!(
        "messages would go by themselves from {way}, and the broker drops what comes back to a queue without having been \
         rejected. Take x-message-ttl, x-max-length or x-delivery-limit from the queue, or set x-overflow to reject-publish"
    );
    Err(work.refusal(why))
}
