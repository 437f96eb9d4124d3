//! How long a delay is, in steps of an eighth of a second: a binary number, whose bits are the queues to wait in.

use std::time::Duration;

use crate::error::{Error, ErrorKind};

/// How long the shortest delay is.
pub(crate) const STEP: Duration = Duration::from_millis(125);

/// How many queues there are, each with twice the wait of the one below. The longest delay waits in all of them.
pub(crate) const LEVELS: u8 = 31;

/// From here on delays are whole seconds, which spares the messages the three lowest queues.
const COARSE_FROM: Duration = Duration::from_secs(600);

/// The longest delay: eight years and a half.
pub(crate) const LONGEST: Duration =
    Duration::from_millis((((1 << LEVELS) - 1) / PER_SECOND) * 1000);

const PER_SECOND: u64 = 8;

/// A delay of at least one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Steps(u32);

impl Steps {
    /// As many steps as it takes not to be early; `None` if there is nothing to wait for.
    pub(crate) fn of(delay: Duration) -> Result<Option<Steps>, Error> {
        if delay > LONGEST {
            let text = format!(
                "a message cannot be delayed by {delay:?}: the longest delay is {} seconds, eight years and a half",
                LONGEST.as_secs()
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let steps = if delay <= COARSE_FROM {
            delay.as_nanos().div_ceil(STEP.as_nanos())
        } else {
            delay.as_nanos().div_ceil(1_000_000_000) * u128::from(PER_SECOND)
        };
        // It fits, since it is not longer than the longest.
        let steps = u32::try_from(steps).unwrap_or(u32::MAX);
        Ok((steps > 0).then_some(Steps(steps)))
    }

    /// The level at which it begins: that of its highest bit.
    pub(crate) fn top(self) -> u8 {
        u8::try_from(self.0.ilog2()).unwrap_or(LEVELS)
    }

    /// How many levels it waits at.
    pub(crate) fn waits(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The levels below that one, from the lowest, and whether it waits there.
    pub(crate) fn below_top(self) -> impl Iterator<Item = (u8, bool)> {
        (0..self.top()).map(move |level| (level, self.0 >> level & 1 == 1))
    }
}

/// How long messages wait at a level.
pub(crate) fn wait(level: u8) -> Duration {
    STEP * (1 << level)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// How long it waits in all.
    fn waited(steps: Steps) -> Duration {
        let below = steps.below_top().filter(|(_, waits)| *waits).map(|(level, _)| wait(level));
        wait(steps.top()) + below.sum::<Duration>()
    }

    fn of(delay: Duration) -> Duration {
        Steps::of(delay).unwrap().map(waited).unwrap_or_default()
    }

    #[test]
    fn a_delay_is_rounded_up_to_the_next_step() {
        let milliseconds = |delay| of(Duration::from_millis(delay)).as_millis();
        assert_eq!(of(Duration::ZERO), Duration::ZERO);
        assert_eq!(of(Duration::from_nanos(1)), STEP);
        assert_eq!(milliseconds(125), 125);
        assert_eq!(milliseconds(126), 250);
        assert_eq!(milliseconds(1000), 1000);
        assert_eq!(milliseconds(599_876), 600_000);
        assert_eq!(milliseconds(600_000), 600_000);
        assert_eq!(milliseconds(600_001), 601_000);
    }

    #[test]
    fn a_round_delay_is_one_queue() {
        let steps = Steps::of(Duration::from_secs(16)).unwrap().unwrap();
        assert_eq!(steps.top(), 7);
        assert!(steps.below_top().all(|(_, waits)| !waits));
    }

    #[test]
    fn the_longest_delay_fits_and_the_next_one_does_not() {
        assert_eq!(of(LONGEST), LONGEST);
        assert_eq!(Steps::of(LONGEST).unwrap().unwrap().top(), LEVELS - 1);
        let error = Steps::of(LONGEST + Duration::from_nanos(1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(&LONGEST.as_secs().to_string()), "{error}");
        assert_eq!(Steps::of(Duration::MAX).unwrap_err().kind(), ErrorKind::Invalid);
    }

    proptest! {
        #[test]
        fn no_delay_is_early_or_a_step_late(
            nanos in 0..=LONGEST.as_nanos() as u64, shift in 0..63u32,
        ) {
            let delay = Duration::from_nanos(nanos >> shift);
            let waited = of(delay);
            let step = if delay <= COARSE_FROM { STEP } else { Duration::from_secs(1) };
            prop_assert!(waited >= delay && waited < delay + step, "{delay:?} became {waited:?}");
        }
    }
}
