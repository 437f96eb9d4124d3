//! An embedded AMQP 0-9-1 broker that behaves as RabbitMQ does.
//!
//! What it does is held against real nodes: 4.3 by default, and 3.10 as a [`Profile`]. For tests it can be made to misbehave
//! ([`Broker::faults`]), looked into ([`Broker::snapshot`]), and asked what happened ([`Broker::events`]). Where it differs:
//!
//! - A delivery that is kept for too long is taken away on time. RabbitMQ 3.10 looks for such only once a minute.
//! - There are no streams, no plugins, and no management API ([`Broker::snapshot`] and [`Broker::peek`] look inside).
//! - Things happen at once that RabbitMQ does a little later: a dead letter is in its queue when the ack that follows the
//!   reject is read, publishers of a full quorum queue are refused from the next publish on, and a quorum queue that nobody
//!   uses is deleted on time.
//! - Where RabbitMQ depends on chance, this does not: which queue goes on first when a channel has room again, and whether the
//!   channels of one connection get each other's messages when it closes (they do not).
//! - What 3.10 passes round among queues for ever goes round here, too, but slower than others are served.
//! - After [`Broker::restart`] a message that was delivered before is `redelivered`, and no other, as after an orderly restart
//!   of RabbitMQ; but in 4.3 one that was nacked back to its classic queue before is not. After a crash of RabbitMQ all
//!   messages of classic queues are.
//! - What a client is told of frames, methods and properties that cannot be decoded says more than RabbitMQ does, which hangs up
//!   without a word on methods that it does not know and on what is too large for a handshake. Tables in properties that are
//!   nested more than 64 deep are taken and passed on as they came, without a look at what is in them. A message that is too large is refused by its header, and not when all of it
//!   has come; and one whose body is longer than announced is refused by 3.10, too, which would wait for ever.
//! - Messages that are still being received count as memory ([`Builder::memory_limit`]). Clients that send too much of them lose
//!   their connection (506), where RabbitMQ takes all of it or stops reading.
//! - Messages count as memory until the client has read them, acked or not, if it leaves a mebibyte and more unread. One that reads
//!   nothing for a minute is cut off while memory is short, and gets no more direct replies once it has left 64 MiB of them unread.
//!   RabbitMQ keeps all of it.
//! - A client that is blocked for want of memory gets heartbeats, whether or not it has asked for any, so that the broker notices
//!   when it is gone. If it has deliveries, or something in a transaction, its connection is closed (506) after the consumer timeout.
//! - If a queue is gone at the commit that something was published to in the transaction, RabbitMQ 4.3 closes the connection
//!   (506), and so does this; but RabbitMQ loses the message if it was a quorum queue that the same channel had a consumer of.
//! - RabbitMQ 3.10 breaks down over a nonsensical `x-queue-master-locator` (541); here it is ignored.
//! - RabbitMQ 3.10 loses the messages of a classic queue if its single active consumer is cancelled while others wait; here the
//!   next one gets them.
//! - RabbitMQ 3.10 breaks down (541) over a consumer of a quorum queue that is cancelled and comes back by the same tag before
//!   it has settled what it had; here it goes on.
//! - RabbitMQ 3.10 forgets the `original-expiration` of dead letters of lazy queues; here it is there.
//! - If several messages come back to a quorum queue that is full at once, RabbitMQ 3.10 dead-letters those it has no room for the
//!   newest first; here the oldest is first, as in 4.3.
//! - RabbitMQ 4.3 keeps what a single active consumer of a quorum queue had for ever, if it goes together with one of a higher
//!   priority that waited for it; here it goes back.

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
mod sorted;
mod time;
mod users;
mod vhost;

pub use broker::{Broker, Builder};
pub use faults::Faults;
pub use profile::Profile;
pub use users::{InvalidPermission, Permissions};
