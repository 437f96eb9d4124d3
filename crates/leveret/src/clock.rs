//! The time of day.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The time of day, which passes as it does for timers: where a test has paused time and lets an hour go by, it is an hour
/// later here, too.
pub(crate) fn now() -> SystemTime {
    let timers = tokio::time::Instant::now().into_std();
    SystemTime::now() + timers.saturating_duration_since(Instant::now())
}

/// In the form of the property `timestamp`.
pub(crate) fn seconds(time: SystemTime) -> Option<u64> {
    time.duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs())
}
