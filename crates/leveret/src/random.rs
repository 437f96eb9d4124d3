//! Chance, where it need not be secret: to spread retries, and to make names that nobody else has.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that was not given out before, unlikely to be given out by another process.
pub(crate) fn number() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    // Each `RandomState` has keys of its own, from the system's randomness.
    RandomState::new().hash_one(COUNT.fetch_add(1, Ordering::Relaxed))
}

/// The same with 128 bits: an id.
pub(crate) fn id() -> u128 {
    u128::from(number()) << 64 | u128::from(number())
}

/// A number from 0 up to, but not including, 1.
pub(crate) fn unit() -> f64 {
    // The 53 bits that a float holds exactly.
    (number() >> 11) as f64 / (1u64 << 53) as f64
}
