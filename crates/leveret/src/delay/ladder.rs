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
//! Exchange targets have queues of their own before them. A target that routes a message nowhere keeps a quorum queue with
//! at-least-once dead-lettering from getting rid of it, and some thirty of those block the queue for all others. (An
//! alternate exchange does not help: it is for what an exchange has no binding for, and here there is one.) So the broker
//! takes that last step at most once, and all before it at least once. In the queue `leveret.delay.relay` messages wait a
//! moment for a client that takes it, and hears of it if there is no queue for them ([`relay`](super::relay)); the broker
//! does if none comes. Straight through `leveret.delay.exit` goes what a client could not send on as it is.

use std::ops::Range;
use std::time::Duration;

use crate::amqp::Value;
use crate::topology::{Binding, Exchange, Queue, QueueType, Topology};

use super::steps;

/// Where delayed messages are published to.
pub(crate) const ENTRY: &str = "leveret.delay";
/// Where they come out, to queues or on to [`EXIT`].
pub(crate) const OUT: &str = "leveret.delay.out";
/// The exchange from which they go to exchanges, and the queue before it.
pub(crate) const EXIT: &str = "leveret.delay.exit";
/// The queue from which a client takes them, to send them to exchanges.
pub(crate) const RELAY: &str = "leveret.delay.relay";
/// How long they wait for one: that late they are if there is none. And so long a client may be away, for its broker to
/// start again, without the broker dropping what is unroutable.
const RELAYED_WITHIN: Duration = Duration::from_secs(2);
/// Where they are parked whose target is gone: exchange and queue.
pub(crate) const UNROUTABLE: &str = "leveret.delay.unroutable";

/// The headers by which they are routed. The broker does not look at names that begin with `x-`.
pub(crate) mod header {
    /// What all of them begin with.
    pub(crate) const PREFIX: &str = "leveret-delay-";
    /// Where it begins to wait.
    pub(crate) const LEVEL: &str = "leveret-delay-level";
    /// The queue that it is for.
    pub(crate) const QUEUE: &str = "leveret-delay-queue";
    /// The exchange that it is for, if the broker takes it there.
    pub(crate) const EXCHANGE: &str = "leveret-delay-exchange";
    /// The exchange that it is for, if a client may take it there.
    pub(crate) const RELAY: &str = "leveret-delay-relay";

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
    /// By the broker alone.
    Exchange(String),
    /// By a client, if there is one.
    Relayed(String),
}

impl Target {
    /// What is published to the default exchange is for a queue.
    pub(crate) fn of(exchange: &str, routing_key: &str, can_be_relayed: bool) -> Self {
        match exchange {
            "" => Target::Queue(routing_key.to_owned()),
            exchange if can_be_relayed => Target::Relayed(exchange.to_owned()),
            exchange => Target::Exchange(exchange.to_owned()),
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

    /// What lets messages out to it.
    pub(crate) fn binding(&self) -> Binding {
        let (header, name) = self.header();
        let binding = match self {
            Target::Queue(_) => Binding::to_queue(name, OUT, ""),
            Target::Exchange(_) | Target::Relayed(_) => Binding::to_exchange(name, EXIT, ""),
        };
        binding.argument(header, name.to_owned())
    }
}

/// Some levels, from the lowest, with the way in and the way out if that is among them.
pub(crate) fn topology(levels: Range<u8>, queue_type: Option<QueueType>) -> Topology {
    let ends = if levels.start == 0 { ends(queue_type) } else { Topology::new() };
    levels.fold(ends, |topology, level| topology.and(rung(level, queue_type)))
}

fn ends(queue_type: Option<QueueType>) -> Topology {
    let exit = queue(EXIT, queue_type).message_ttl(Duration::ZERO).dead_letter_to(EXIT);
    let relay = queue(RELAY, queue_type).message_ttl(RELAYED_WITHIN).dead_letter_to(EXIT);
    let with = |name, header| Binding::to_queue(name, OUT, "").argument(header, Value::Void);
    Topology::new()
        .exchange(Exchange::headers(ENTRY))
        .exchange(Exchange::headers(OUT).alternate(UNROUTABLE))
        .exchange(Exchange::headers(EXIT).alternate(UNROUTABLE))
        .exchange(Exchange::fanout(UNROUTABLE))
        .queue(queue(UNROUTABLE, queue_type).bind(UNROUTABLE, ""))
        .queue(exit)
        .queue(relay)
        .binding(with(EXIT, header::EXCHANGE))
        .binding(with(RELAY, header::RELAY))
}

fn rung(level: u8, queue_type: Option<QueueType>) -> Topology {
    let below = level.checked_sub(1).map_or(OUT.to_owned(), name);
    let (name, bit) = (name(level), header::bit(level));
    let mut queue = queue(&name, queue_type).message_ttl(steps::wait(level)).dead_letter_to(&below);
    if queue_type == Some(QueueType::Quorum) {
        queue = queue.dead_letter_at_least_once();
    }
    let enters = Binding::to_queue(&name, ENTRY, "").argument(header::LEVEL, i64::from(level));
    Topology::new()
        .exchange(Exchange::headers(&name).alternate(UNROUTABLE))
        .queue(queue)
        .binding(enters)
        .binding(Binding::to_queue(&name, &name, "").argument(&bit, true))
        .binding(Binding::to_exchange(below, &name, "").argument(&bit, false))
}

fn queue(name: &str, queue_type: Option<QueueType>) -> Queue {
    match queue_type {
        Some(queue_type) => Queue::new(name).of_type(queue_type),
        None => Queue::new(name),
    }
}
