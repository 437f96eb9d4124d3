//! An embedded AMQP 0-9-1 broker that behaves as RabbitMQ does.
//!
//! What it does is held against real nodes: 4.3 by default, and 3.10 as a [`Profile`]. Where it differs:
//!
//! - A consumer may keep a delivery for as long as it likes: `x-consumer-timeout` is read and not acted on.
//! - Dead-lettering at least once is done at most once.
//! - There are no streams, no plugins, and no management API ([`Broker::snapshot`] and [`Broker::peek`] look inside).
//! - Things happen at once that RabbitMQ does a little later: a dead letter is in its queue when the ack that follows the
//!   reject is read, publishers of a full quorum queue are refused from the next publish on, and a quorum queue that nobody
//!   uses is deleted on time.
//! - Where RabbitMQ depends on chance, this does not: which queue goes on first when a channel has room again, and whether the
//!   channels of one connection get each other's messages when it closes (they do not).
//! - What 3.10 passes round among queues for ever goes round here, too, but slower than others are served.
//! - After [`Broker::restart`] a message that was delivered before is `redelivered`. In 4.3 one that had come back to its
//!   classic queue before the restart is not.
//! - RabbitMQ 3.10 breaks down over a nonsensical `x-queue-master-locator` (541); here it is ignored.
//! - RabbitMQ 3.10 loses the messages of a classic queue if its single active consumer is cancelled while others wait; here the
//!   next one gets them.
//! - RabbitMQ 3.10 breaks down (541) over a consumer of a quorum queue that is cancelled and comes back by the same tag before
//!   it has settled what it had; here it goes on.
//! - RabbitMQ 3.10 forgets the `original-expiration` of dead letters of lazy queues; here it is there.
//! - RabbitMQ 4.3 keeps what a single active consumer of a quorum queue had for ever, if it goes together with one of a higher
//!   priority that waited for it; here it goes back.

mod alarm;
mod arguments;
mod broker;
mod death;
mod erlang;
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
