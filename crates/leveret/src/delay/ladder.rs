//! The ladder: a queue for each power of two, and how messages get from one to the next.
//!
//! ```text
//!  leveret.delay       headers, by level         --> queue of the highest bit
//!  queue  .07          16 s, then dead-letters   --> exchange .06
//!  exchange .06        headers, by the bit of it --> set: queue .06 (8 s)      clear: exchange .05
//!  ...
//!  queue .00 | exchange .00, bit clear           --> leveret.delay.out
//!  leveret.delay.out   headers                   --> queue targets             alternate: leveret.delay.unroutable
//!                                                --> queues leveret.delay.relay and .exit, for exchange targets
//!  leveret.delay.exit  headers                   --> exchange targets          alternate: leveret.delay.unroutable
//! ```
//!
//! No exchange looks at the routing key, so that a message keeps its own, and `CC` makes no copies on the way.
//!
//! A bit that is clear is said and not left out: if a queue is missing, because somebody deleted it or its node is down,
//! what should have waited there is parked. Were it to fall through to the next level instead, it would come early.
//!
//! Exchange targets have queues of their own before them, because the broker drops a dead letter that its target has no queue
//! for, and nobody hears of it. (An alternate exchange of ours does not help: it is for what an exchange has no binding for,
//! and here there is one. A quorum queue with at-least-once dead-lettering keeps such messages, and some thirty of them
//! block it for all others.) So messages wait in the queue `leveret.delay.relay` until a client takes the last step, which
//! hears of it ([`relay`](super::relay)). The broker takes it, through `leveret.delay.exit`, only to exchanges that are known
//! to have an alternate exchange themselves: they drop nothing.

use std::ops::Range;
use std::time::Duration;

use crate::amqp::Value;
use crate::retry::tiers::{at_least_once, lasting};
use crate::topology::{Binding, Exchange, Queue, QueueType, Topology};

use super::steps;

/// Where delayed messages are published to.
pub(crate) const ENTRY: &str = "leveret.delay";
/// Where they come out, to queues or on to [`EXIT`].
pub(crate) const OUT: &str = "leveret.delay.out";
/// The exchange from which they go to exchanges, and the queue before it.
pub(crate) const EXIT: &str = "leveret.delay.exit";
/// The queue from which a client takes them, to send them to exchanges. They stay until one does.
pub(crate) const RELAY: &str = "leveret.delay.relay";
/// Where they are parked whose target is gone: exchange and queue.
pub(crate) const UNROUTABLE: &str = "leveret.delay.unroutable";

/// The headers by which they are routed. The broker does not look at names that begin with `x-`.
///
/// Their values are text, since there are programs that refuse any other header. Earlier versions wrote numbers and truth values,
/// and bound the queues by those: such bindings stay, so that messages of both kinds find their way.
pub(crate) mod header {
    /// What all of them begin with.
    pub(crate) const PREFIX: &str = "leveret-delay-";
    /// Where it begins to wait.
    pub(crate) const LEVEL: &str = "leveret-delay-level";
    /// The queue that it is for.
    pub(crate) const QUEUE: &str = "leveret-delay-queue";
    /// The exchange that it is for, if the broker takes it there.
    pub(crate) const EXCHANGE: &str = "leveret-delay-exchange";
    /// The exchange that it is for, if a client takes it there.
    pub(crate) const RELAY: &str = "leveret-delay-relay";
    /// How often clients could not take it there.
    pub(crate) const TRIES: &str = "leveret-delay-tries";

    /// Whether it waits at a level.
    pub(crate) fn bit(level: u8) -> String {
        format!("{PREFIX}{level:02}")
    }
}

/// What a level's exchange and queue are called.
pub(crate) fn name(level: u8) -> String {
    format!("{ENTRY}.{level:02}")
}

/// Who gets a message when its time has come.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Target {
    Queue(String),
    /// By the broker: it has an alternate exchange.
    Exchange(String),
    /// By a client.
    Relayed(String),
}

impl Target {
    /// What is published to the default exchange is for a queue.
    pub(crate) fn of(known: &Topology, exchange: &str, routing_key: &str) -> Self {
        match exchange {
            "" => Target::Queue(routing_key.to_owned()),
            exchange if drops_nothing(known, exchange) => Target::Exchange(exchange.to_owned()),
            exchange => Target::Relayed(exchange.to_owned()),
        }
    }

    /// The header that says so, and its value.
    pub(crate) fn header(&self) -> (&'static str, &str) {
        match self {
            Target::Queue(name) => (header::QUEUE, name),
            Target::Exchange(name) => (header::EXCHANGE, name),
            Target::Relayed(name) => (header::RELAY, name),
        }
    }

    /// Whether the topology declares the target.
    pub(crate) fn is_declared_by(&self, topology: &Topology) -> bool {
        match self {
            Target::Queue(name) => topology.queues().iter().any(|queue| queue.name() == name),
            Target::Exchange(name) | Target::Relayed(name) => {
                topology.exchanges().iter().any(|exchange| exchange.name() == name)
            }
        }
    }

    /// What lets messages out to it. A relay has no need for it, but whoever binds an exchange hears at once if it is not
    /// there, or not for this user.
    pub(crate) fn binding(&self) -> Binding {
        let (header, name) = self.header();
        let binding = match self {
            Target::Queue(_) => Binding::to_queue(name, OUT, ""),
            Target::Exchange(_) | Target::Relayed(_) => Binding::to_exchange(name, EXIT, ""),
        };
        binding.argument(header, name.to_owned())
    }
}

/// Whether an exchange is known to have our place for what is unroutable as its alternate. Of no other is it certain that it
/// leads to a queue when the message is due.
fn drops_nothing(known: &Topology, exchange: &str) -> bool {
    let known = known.exchanges().iter().find(|known| known.name() == exchange);
    let alternate = known.and_then(|exchange| {
        exchange.arguments().find(|(name, _)| *name == "alternate-exchange")?.1.as_str()
    });
    alternate == Some(UNROUTABLE)
}

/// Some levels, from the lowest, with the way in and the way out if that is among them.
pub(crate) fn topology(levels: Range<u8>, queue_type: QueueType) -> Topology {
    let ends = if levels.start == 0 { ends(queue_type) } else { Topology::new() };
    levels.fold(ends, |topology, level| topology.and(rung(level, queue_type)))
}

fn ends(queue_type: QueueType) -> Topology {
    let queue = |name| Queue::new(name).of_type(queue_type);
    let exit = queue(EXIT).message_ttl(Duration::ZERO).dead_letter_to(EXIT);
    let with = |name, header| Binding::to_queue(name, OUT, "").argument(header, Value::Void);
    Topology::new()
        .exchange(Exchange::headers(ENTRY))
        .exchange(Exchange::headers(OUT).alternate(UNROUTABLE))
        .exchange(Exchange::headers(EXIT).alternate(UNROUTABLE))
        .exchange(Exchange::fanout(UNROUTABLE))
        .queue(lasting(queue(UNROUTABLE)).bind(UNROUTABLE, ""))
        .queue(at_least_once(exit))
        .queue(lasting(queue(RELAY)))
        .binding(with(EXIT, header::EXCHANGE))
        .binding(with(RELAY, header::RELAY))
}

fn rung(level: u8, queue_type: QueueType) -> Topology {
    let below = level.checked_sub(1).map_or(OUT.to_owned(), name);
    let (name, bit) = (name(level), header::bit(level));
    let queue = Queue::new(&name)
        .of_type(queue_type)
        .message_ttl(steps::wait(level))
        .dead_letter_to(&below);
    let enters = Binding::to_queue(&name, ENTRY, "").argument(header::LEVEL, level.to_string());
    Topology::new()
        .exchange(Exchange::headers(&name).alternate(UNROUTABLE))
        .queue(at_least_once(queue))
        .binding(enters)
        .binding(Binding::to_queue(&name, &name, "").argument(&bit, "true"))
        .binding(Binding::to_exchange(below, &name, "").argument(&bit, "false"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_broker_takes_the_last_step_only_where_nothing_is_dropped() {
        let own = |alternate| Topology::new().exchange(Exchange::topic("own").alternate(alternate));
        let bound = Queue::classic("rest").bind("other", "");
        let cases = [
            (Topology::new(), false),
            (Topology::new().exchange(Exchange::topic("own")), false),
            (own(UNROUTABLE), true),
            (own("other"), false),
            (own("other").exchange(Exchange::fanout("other")).queue(bound), false),
        ];
        for (known, expected) in cases {
            assert_eq!(drops_nothing(&known, "own"), expected, "{known:?}");
        }
    }
}
