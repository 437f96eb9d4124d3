//! Leveret beside a database: messages that are handled exactly once, and messages that are sent if, and only if, a transaction
//! is committed.
//!
//! The tables are in a [`Schema`] of their own, on PostgreSQL or SQLite, in a pool of sqlx that is the application's.
//!
//! An [`Outbox`] has messages sent if, and only if, a transaction is committed: they are written into a table with it, and a
//! [`Relay`] sends what is there. See [`Outbox`] for an example.
//!
//! An [`Inbox`] has the work for a message done once, however often it comes: the handler gets a transaction, a [`Tx`], and what it
//! changes, what it writes into an outbox, and the record that the message was handled are committed together. See [`Inbox`] for
//! an example.
//!
//! A [`Sequence`] numbers the messages of a sender, in the same transactions, so that an inbox needs to remember no more than a mark.
//!
//! # Another database
//!
//! All SQL is in a [`Dialect`]. Those of PostgreSQL and SQLite are built in; another database is one type that implements this
//! trait, given to a [`Schema`].
//!
//! # What is counted
//!
//! With the feature `metrics`, for any collector of the facade `metrics` that was installed before, of each schema:
//!
//! | name | what |
//! |---|---|
//! | `leveret_outbox_sent_total` | counter: messages that the broker has confirmed |
//! | `leveret_outbox_refused_total`, `leveret_outbox_set_aside_total` | counters: messages that the broker did not take; those that are no longer tried |
//! | `leveret_outbox_failures_total` | counter, of each side (`database`, `broker`): batches that failed because it was away |
//! | `leveret_outbox_lag_seconds` | histogram: from a message's writing to its confirmation |
//! | `leveret_outbox_batch_seconds` | histogram: how long it takes to send a batch |
//! | `leveret_outbox_waiting`, `leveret_outbox_set_aside` | gauges: messages in the table, counted every 15 s |
//!
//! # What is traced
//!
//! Each batch is a span `relay`, with the number of its messages, in which those of the publisher are. A message belongs to the
//! trace that it was written in.
//!
//! # Features
//!
//! All of them are on by default: `postgres`, `sqlite` (which is compiled in), `metrics`. Encryption on the way to PostgreSQL is
//! sqlx's: switch on one of its features, such as `tls-rustls`.

/// The version of sqlx whose pools and transactions this crate works with.
pub use sqlx;

pub mod dialect;
mod error;
mod inbox;
mod migrate;
mod outbox;
mod relay;
mod schema;
mod sequence;

pub use dialect::{BuiltIn, Dialect};
pub use error::{Error, ErrorKind};
pub use inbox::{Inbox, Tx};
pub use outbox::{Aside, Backlog, Outbox, Outgoing, SetAside};
pub use relay::{
    Order, Relay, RelayBuilder, RelayEvent, RelayEvents, RelayHealth, RelayMonitor, RelaySummary,
    Side,
};
pub use schema::Schema;
pub use sequence::Sequence;

/// A name that nothing else has, as messages get one.
fn unique_name() -> String {
    let parts = leveret::Message::default().identified().into_parts();
    let id = parts.ok().and_then(|(_, properties)| properties.message_id);
    id.map(|id| id.to_string()).unwrap_or_default()
}
