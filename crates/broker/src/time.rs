//! The broker's clock, as the state machine is told it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// A moment: microseconds since the broker was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

impl Moment {
    /// The moment that never comes.
    pub(crate) const NEVER: Moment = Moment(u64::MAX);

    #[cfg(test)]
    pub(crate) const START: Moment = Moment(0);

    /// How long after the broker's start.
    pub(crate) fn since_start(self) -> Duration {
        Duration::from_micros(self.0)
    }

    /// That many milliseconds later, or never if that is too far away to be counted.
    pub(crate) fn after_millis(self, millis: u64) -> Moment {
        Moment(millis.saturating_mul(1000).saturating_add(self.0))
    }
}

/// Turns tokio's time, which tests may pause, into moments and wall-clock time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    start: Instant,
    started_at: SystemTime,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Clock { start: Instant::now(), started_at: SystemTime::now() }
    }

    pub(crate) fn now(&self) -> Moment {
        Moment(self.start.elapsed().as_micros() as u64)
    }

    /// When that moment is; `None` for never.
    pub(crate) fn instant(&self, moment: Moment) -> Option<Instant> {
        match moment {
            Moment::NEVER => None,
            Moment(micros) => self.start.checked_add(Duration::from_micros(micros)),
        }
    }

    /// Seconds since the epoch at that moment: the broker's start by the wall clock, and then by tokio's time.
    pub(crate) fn unix_seconds(&self, moment: Moment) -> u64 {
        let start = self.started_at.duration_since(UNIX_EPOCH).unwrap_or_default();
        (start + Duration::from_micros(moment.0)).as_secs()
    }
}
