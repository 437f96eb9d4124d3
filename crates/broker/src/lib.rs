//! An embedded AMQP 0-9-1 broker that behaves as RabbitMQ does.
//!
//! What it does is held against real nodes: 4.3 by default, and 3.10 as a [`Profile`]. For tests it can be made to misbehave
//! ([`Broker::faults`]), looked into ([`Broker::snapshot`]), and asked what happened ([`Broker::events`]). Where it differs:
//!
//! - A delivery that is kept for too long is taken away on time. RabbitMQ 3.10 looks for such only once a minute.
//! - In about one of two hundred random programs it still answers something otherwise than RabbitMQ: mostly `redelivered`
//!   after dead-lettering, consumer counts of quorum queues, and who is next when a channel closes.
//! - There are no streams, no plugins, and no management API ([`Broker::snapshot`] and [`Broker::peek`] look inside).
//! - Things happen at once that RabbitMQ does a little later: a dead letter is in its queue when the ack that follows the
//!   reject is read, and a full quorum queue refuses from the first publish on that it may refuse.
//! - What 3.10 passes round among queues for ever goes round here, too, but slower than others are served.
//! - After [`Broker::restart`] a message that was delivered before is `redelivered`, and no other, as after an orderly restart
//!   of RabbitMQ; but in 4.3 one that was nacked back to its classic queue before is not. After a crash of RabbitMQ all
//!   messages of classic queues are.
//! - What a client is told of frames and methods that cannot be decoded says more than RabbitMQ does, which hangs up without
//!   a word on methods that it does not know. A message that is too large is refused by its header, and not when all of it
//!   has come; and one whose body is longer than announced is refused by 3.10, too, which would wait for ever.
//! - RabbitMQ 3.10 breaks down over a nonsensical `x-queue-master-locator` (541); here it is ignored.

mod alarm;
mod arguments;
mod broker;
mod death;
mod erlang;
pub mod events;
mod exchange;
mod faults;
mod fields;
mod message;
mod outlet;
mod profile;
mod queue;
mod refusal;
mod session;
pub mod snapshot;
mod time;
mod users;
mod vhost;

pub use broker::{Broker, Builder};
pub use faults::Faults;
pub use profile::Profile;
pub use users::{InvalidPermission, Permissions};
