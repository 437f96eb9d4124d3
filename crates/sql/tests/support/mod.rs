//! What is true on either database.

// Each test file uses a part of this.
#![allow(dead_code, unreachable_pub)]

pub mod kills;
pub mod migrating;
pub mod outbox;
