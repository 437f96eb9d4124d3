//! Real PostgreSQL: a database on the shared server for most tests, a server of its own for tests
//! that break it.

mod database;
mod programs;
mod server;

pub use database::{Database, database, shared_url};
pub use server::Postgres;
