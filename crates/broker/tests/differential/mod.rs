//! Random programs of AMQP operations, run against two brokers whose answers must be the same.
//!
//! ```text
//!   seed --generate--> Program --run--> on one broker:  Vec<Record>  --\
//!                          |                                            compare --> Difference --shrink--> report
//!                          +-----run--> on the other:   Vec<Record>  --/
//! ```
//!
//! # What is not compared
//! Where RabbitMQ itself answers now this way and now that, a program does not ask, or the answer is put into an order
//! of its own:
//!
//! - **Between channels there is no order**, and between the consumers of a channel there is none either: each has its
//!   process, and queues deliver when they are scheduled. What a step brought is compared channel by channel and
//!   consumer by consumer. So are delivery tags: which tags a channel used is compared, not which delivery got which,
//!   and a multiple ack always covers whole steps.
//! - **Confirms** may be multiple or not and come late: what is compared is which publish got which outcome.
//! - **A cancel notice** comes from another process than the reply to the delete that caused it.
//! - **Two queues that dead-letter at the same time** do so in any order. In a program, no two of them lead to one queue,
//!   and where there are dead letters, messages are published one at a time: what dies of the first would race with the
//!   second.
//! - **A message for a quorum queue and for a classic one** that dead-letters to it may come second there. No program has both.
//! - **A message that goes back on a channel with a prefetch for all its consumers** may come after the next one: the queue puts the
//!   news that there is room before it, if it finds both at once. In a program, none goes back after such a prefetch was set.
//! - **A method during `tx.commit`** costs the connection (504) if RabbitMQ still waits for the disk, and nothing if not. No
//!   program sends one.
//! - **Deleting an exchange while it deletes itself** (auto-delete) ends a connection to 3.10 with 541. No program does it.
//! - **Short times**: a message with a short TTL has expired before the next step begins, so no step races with it; and a
//!   program has short TTLs or short-lived queues (`x-expires`), not both, since waiting for the one ages the other.
//!   Quorum queues look for `x-expires` only every few seconds, so there are none with a short one.
//! - **Accidents** that the crate's documentation lists are not asked for: lazy queues that dead-letter, classic queues whose
//!   single active consumer is cancelled, priorities of consumers of quorum queues with a single active one, consumers of
//!   quorum queues that come back by the same tag. Nor are several messages at once if a quorum queue refuses them, since
//!   publishers learn of that a little later.
//! - **Times and names that the broker makes** are replaced, names by their number of appearance.
//!
//! A program that differs is run again. Only what differs every time is a difference; the others are counted and are
//! an error if there are many.

mod arguments;
mod generate;
mod link;
mod names;
mod program;
mod random;
mod record;
mod run;
mod show;
mod shrink;
mod verdict;
pub(crate) mod versions;

pub(crate) use run::{LIMITED, LIMITED_TO, Target};
pub(crate) use verdict::{Campaign, explore};
