//! A rate that is kept.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, ErrorKind};

/// A rate that is lower than one message in this time, a year, is taken for that.
const LONGEST_PACE: Duration = Duration::from_secs(365 * 86_400);

/// When the next message may go.
#[derive(Debug)]
pub(super) struct Pace {
    every: Option<Duration>,
    next: Instant,
}

impl Pace {
    pub(super) fn new(rate: Option<f64>) -> Result<Self, Error> {
        let every = match rate {
            None => None,
            Some(rate) if rate > 0.0 => {
                let every = Duration::try_from_secs_f64(1.0 / rate).unwrap_or(LONGEST_PACE);
                Some(every.min(LONGEST_PACE))
            }
            Some(rate) => {
                let text = format!("{rate} messages a second is no rate: it has to be above 0");
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        };
        Ok(Pace { every, next: Instant::now() })
    }

    /// When the next message may go, if that is not now.
    pub(super) fn next(&mut self) -> Option<Instant> {
        let every = self.every?;
        let now = Instant::now();
        let at = self.next.max(now);
        self.next = at + every;
        (at > now).then_some(at)
    }

    /// How many messages go in a minute.
    pub(super) fn in_a_minute(&self) -> u64 {
        match self.every {
            None => u64::MAX,
            Some(every) => (60.0 / every.as_secs_f64()).clamp(1.0, 1e9) as u64,
        }
    }
}
