//! What the toolkit builds on. It is no part of what is promised.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use leveret_wire::{Content, EncodeProperties, EncodedProperties, PlainProperties};

pub use crate::channel::{DIRECT_REPLIES, Tracked};
pub use crate::confirm::{ConfirmSink, ConfirmTracker, Fingerprint, Fingerprints, Likeness};
pub use crate::consumer::{DeliverySink, Pulse};
pub use crate::delivery::{Acker, DeliveryInfo};
pub use crate::error::{close_reason, next_cause};
pub use crate::handshake::deadline_in;
pub use crate::publish::Prepared;
pub use crate::range_set::RangeSet;

/// Locks, whatever a panic elsewhere left behind: what is guarded here is never half changed.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
