//! What the tests of the client share.

// Each test file uses a part of this.
#![allow(dead_code, unreachable_pub, unused_imports)]

pub mod books;
pub mod client;
pub mod drops;
pub mod examples;
pub mod kills;
pub mod plan;
pub mod removal;
pub mod scene;
pub mod services;

#[path = "../../../amqp/tests/support/mod.rs"]
mod engine;

pub use engine::*;
