//! Leveret beside a database: messages that are sent if, and only if, a transaction is committed.
//!
//! The tables are in a [`Schema`] of their own, on PostgreSQL or SQLite, in a pool of sqlx that is the application's.
//!
//! # Features
//!
//! All of them are on by default: `postgres`, `sqlite` (which is compiled in), `metrics`. Encryption on the way to PostgreSQL is
//! sqlx's: switch on one of its features, such as `tls-rustls`.

mod backend;
mod error;
mod inbox;
mod migrate;
mod schema;

pub use backend::Backend;
pub use error::{Error, ErrorKind};
#[doc(hidden)]
pub use inbox::Records;
pub use inbox::{Inbox, Tx};
pub use schema::Schema;
