//! Random numbers, without a crate for the few that are needed.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// A random number: the standard library seeds every hash map with another one.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
