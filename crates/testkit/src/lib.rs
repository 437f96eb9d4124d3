//! What Leveret is tested with: real servers that start, break and end on command, and the means to
//! wait for what they do.
//!
//! - [`rabbitmq::vhost`]: a fresh virtual host on the RabbitMQ that serves the whole test run. Most
//!   tests need no more.
//! - [`RabbitNode`](rabbitmq::RabbitNode), [`RabbitCluster`](rabbitmq::RabbitCluster): nodes of a
//!   test's own, to be stopped, killed, suspended and started again.
//! - [`postgres::database`], [`Postgres`](postgres::Postgres): the same for PostgreSQL.
//! - [`peer::Peer`]: the other side of an AMQP connection, played by the test frame by frame.
//! - [`certificates::Authority`]: certificates for TLS.
//! - [`web`]: HTTP, and TLS before what has none.
//! - [`FaultProxy`]: a TCP proxy that cuts, stalls, delays, splits and corrupts.
//! - [`eventually`], [`soon`]: polling and waiting with a deadline that says what was awaited.
//!
//! A server that is needed and cannot be had is a panic that says what to do, never a skipped test.
//! Whatever is started here ends with the test process, even when that one is killed (see
//! [`process`]).

pub mod certificates;
mod eventually;
mod guardian;
mod log;
mod name;
pub mod peer;
mod port;
pub mod postgres;
pub mod process;
pub mod proxy;
pub mod rabbitmq;
mod random;
mod scratch;
pub mod web;

pub use eventually::{Answer, SOON, eventually, soon};
pub use proxy::FaultProxy;
pub use scratch::ScratchFolder;
