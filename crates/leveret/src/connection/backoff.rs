//! How long to wait before trying again.

use std::time::Duration;

/// Pauses that grow: each is the one before times a factor, up to a longest, and shortened at random by up to half, so
/// that many clients of one broker do not come back all at once.
#[derive(Clone, Debug, PartialEq)]
pub struct Backoff {
    /// The first pause. 100 ms by default.
    pub initial: Duration,
    /// What each pause is multiplied with. 2 by default.
    pub multiplier: f64,
    /// The longest pause. 10 s by default.
    pub max: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff {
            initial: Duration::from_millis(100),
            multiplier: 2.0,
            max: Duration::from_secs(10),
        }
    }
}

impl Backoff {
    /// The longest that the pause before try `n` may be, counted from 0.
    pub fn longest(&self, n: u32) -> Duration {
        let factor = self.multiplier.max(1.0).powi(n.min(1_000) as i32);
        let pause = self.initial.as_secs_f64() * factor;
        if pause < self.max.as_secs_f64() { Duration::from_secs_f64(pause) } else { self.max }
    }

    /// The pause before try `n`, shortened at random.
    pub fn pause(&self, n: u32) -> Duration {
        self.longest(n).mul_f64(0.5 + 0.5 * crate::random::unit())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_the_longest() {
        let backoff = Backoff::default();
        let longest = |n| backoff.longest(n).as_millis();
        assert_eq!([longest(0), longest(1), longest(6), longest(7)], [100, 200, 6400, 10_000]);
        assert_eq!(longest(u32::MAX), 10_000);
    }

    #[test]
    fn a_pause_is_shortened_by_half_at_most() {
        let backoff = Backoff::default();
        for n in 0..100 {
            let (pause, longest) = (backoff.pause(n), backoff.longest(n));
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?} of {longest:?}");
        }
    }
}
