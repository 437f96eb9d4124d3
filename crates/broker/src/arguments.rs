//! What may be declared, what it means, and whether it is what was declared before: as RabbitMQ has it, in its words.
//!
//! Which of several faults a client is told depends on the order in which RabbitMQ looks. It is this:
//!
//! | request | looks at |
//! |---|---|
//! | `queue.declare`, passive | missing, also if it has no name; here no name does not mean the last one ([`words::no_queue`]); another connection's ([`words::owned_by_another`]) |
//! | `queue.declare`, of a queue that exists | another connection's; [`same_queue`]. Values are compared, and not checked again |
//! | `queue.declare`, of a new one | [`check_queue_name`] if there is a name, [`check_server_named`] if not; [`QueueArguments::parse`] |
//! | `exchange.declare`, passive | the default exchange ([`words::default_exchange`]); missing ([`words::no_exchange`]) |
//! | `exchange.declare` | [`exchange_kind`]; the default exchange; if it exists [`same_exchange`], else [`check_exchange_name`], [`alternate_exchange`] |
//! | `exchange.delete` | the default exchange; [`check_exchange_deletion`]; in use ([`words::exchange_in_use`]). One that is missing is no fault |
//! | `queue.delete` | another connection's; [`check_queue_deletion`]; in use, not empty. One that is missing is no fault |
//! | `queue.bind`, `exchange.bind` | the default exchange on either side; source missing; destination missing; arguments of a headers exchange; another connection's queue |
//! | `queue.unbind`, `exchange.unbind` | the default exchange on either side; if there is such a binding, another connection's queue. What is missing is no fault |
//! | `basic.consume` | the tag ([`words::tag_in_use`]), which that of a consumer of direct replies does not count as; missing; another connection's; [`ConsumerArguments::parse`]; prefetch for all ([`check_prefetch_for_all`]); in exclusive use ([`words::exclusive_use`]); a quorum queue never is, and a classic one with a single active consumer always is to one that wants it for itself |
//!
//! A name that is not UTF-8 is a fault of the frame, in every method but `basic.publish` ([`words::not_utf8`]). Line breaks
//! are taken out of the names of queues and exchanges by declare, delete, bind and unbind alone ([`declared_name`]), after
//! it was found out whether there is a name at all.
//!
//! Three answers are not RabbitMQ's: streams and the exchange types `x-local-random` and `x-modulus-hash` of 4.3 are
//! refused, the latter as unknown, because they are not implemented here.

mod check;
mod consumer;
mod equivalence;
mod exchange;
mod names;
mod queue;
pub(crate) mod words;

#[cfg(test)]
mod tests;

pub(crate) use consumer::{ConsumerArguments, check_prefetch_for_all};
pub(crate) use equivalence::{ExchangeDeclared, QueueDeclared, same_exchange, same_queue};
pub(crate) use exchange::{alternate_exchange, exchange_kind};
pub(crate) use names::{
    check_exchange_deletion, check_exchange_name, check_queue_name, declared_name,
};
pub(crate) use queue::{Overflow, QueueArguments, check_queue_deletion, check_server_named};
