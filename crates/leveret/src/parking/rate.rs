//! Limits how many messages a task handles in a second.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, ErrorKind};

/// A lower rate than one message in this time, a year, is taken for that.
const LONGEST_INTERVAL: Duration = Duration::from_secs(365 * 86_400);

#[derive(Debug)]
pub(super) struct RateLimiter {
    interval: Option<Duration>,
    next: Instant,
}

impl RateLimiter {
    pub(super) fn new(per_second: Option<f64>) -> Result<Self, Error> {
        let interval = match per_second {
            None => None,
            Some(rate) if rate > 0.0 => {
                let interval = Duration::try_from_secs_f64(1.0 / rate).unwrap_or(LONGEST_INTERVAL);
                Some(interval.min(LONGEST_INTERVAL))
            }
            Some(rate) => {
                let text = format!("{rate} messages a second is no rate: it has to be above 0");
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        };
        Ok(RateLimiter { interval, next: Instant::now() })
    }

    /// Reserves the next slot. Returns its time unless that is now.
    pub(super) fn reserve(&mut self) -> Option<Instant> {
        let interval = self.interval?;
        let now = Instant::now();
        let at = self.next.max(now);
        self.next = at + interval;
        (at > now).then_some(at)
    }

    /// How many messages pass in a minute.
    pub(super) fn per_minute(&self) -> u64 {
        match self.interval {
            None => u64::MAX,
            Some(interval) => (60.0 / interval.as_secs_f64()).clamp(1.0, 1e9) as u64,
        }
    }
}
