//! What was done of increasing numbers, in little space.

use std::fmt;
use std::ops::RangeInclusive;

use crate::amqp::RangeSet;

/// How many gaps there may be above the mark. Each costs some octets, with each change; who has so many is missing something else.
const MOST_GAPS: usize = 10_000;

/// How many ranges of given up numbers are told apart. Beyond that the oldest two become one, and what was done between them
/// counts as given up: it is then parked if it comes again, and not silently passed over.
const MOST_GIVEN_UP: usize = 100;

/// The first octet of the form in which a mark is kept.
const FORM: u8 = 1;

/// Which numbers of a sender are done, where it counts its messages from 1 on.
///
/// All numbers up to the mark are done or given up; of those above it, the ones that are done are kept as ranges. So what
/// comes in order needs one number, however many they are, and what comes out of order one range more for each gap. The mark
/// never passes a number that is missing, unless that is [given up](Self::give_up).
///
/// ```
/// use leveret::inbox::{HighWater, Progress};
///
/// let mut done = HighWater::default();
/// for number in [1, 2, 5, 4] {
///     assert!(done.add(number));
/// }
/// assert!(!done.add(2));
/// assert_eq!((done.mark(), done.missing()), (2, vec![3..=3]));
/// assert_eq!(done.give_up(3..=3), [3..=3]);
/// assert_eq!((done.mark(), done.progress_of(3)), (5, Progress::GivenUp));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HighWater {
    mark: u64,
    /// Done or given up, and all of them beyond the number after the mark.
    above: RangeSet,
    given_up: RangeSet,
}

/// How far a number is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It was not done before.
    New,
    /// It was.
    Done,
    /// It was missing for so long that it was given up, and nobody knows whether it was done.
    GivenUp,
}

/// What becomes of numbers that are missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gaps {
    /// They are waited for. The default.
    #[default]
    Keep,
    /// They are given up when a number is done that is so much higher, and that is reported. What comes later is parked.
    GiveUpBehind(u64),
}

impl HighWater {
    /// All numbers up to this one are done or given up.
    pub fn mark(&self) -> u64 {
        self.mark
    }

    /// The highest number that is done or given up.
    pub fn highest(&self) -> u64 {
        self.above.last().map_or(self.mark, |(_, to)| to)
    }

    /// How far a number is.
    pub fn progress_of(&self, number: u64) -> Progress {
        if self.given_up.contains(number) {
            Progress::GivenUp
        } else if number <= self.mark || self.above.contains(number) {
            Progress::Done
        } else {
            Progress::New
        }
    }

    /// A number is done. False if it was before, or given up.
    pub fn add(&mut self, number: u64) -> bool {
        if self.progress_of(number) != Progress::New {
            return false;
        }
        self.insert(number, number);
        true
    }

    /// Gives up all numbers of a range that are missing, and says which those are.
    pub fn give_up(&mut self, numbers: RangeInclusive<u64>) -> Vec<RangeInclusive<u64>> {
        let Some(next) = self.mark.checked_add(1) else { return Vec::new() };
        let missing = self.above.missing_in(next.max(*numbers.start()), *numbers.end());
        for gap in &missing {
            self.given_up.insert(*gap.start(), *gap.end());
            self.insert(*gap.start(), *gap.end());
        }
        while self.given_up.len() > MOST_GIVEN_UP {
            self.given_up.join_first();
        }
        missing
    }

    /// Does with what is missing as it was decided, and says what was given up.
    pub fn settle(&mut self, gaps: Gaps) -> Vec<RangeInclusive<u64>> {
        match gaps {
            Gaps::Keep => Vec::new(),
            Gaps::GiveUpBehind(distance) => match self.highest().checked_sub(distance) {
                Some(last) => self.give_up(1..=last),
                None => Vec::new(),
            },
        }
    }

    /// The numbers below the highest that are neither done nor given up.
    pub fn missing(&self) -> Vec<RangeInclusive<u64>> {
        match self.mark.checked_add(1) {
            Some(next) => self.above.missing_in(next, self.highest()),
            None => Vec::new(),
        }
    }

    /// Whether there is room for this number: one that makes a gap more than there may be has to wait.
    pub fn has_room_for(&self, number: u64) -> bool {
        let is_next = self.mark.checked_add(1) == Some(number);
        is_next || self.above.len() < MOST_GAPS || self.above.touches(number)
    }

    fn insert(&mut self, from: u64, to: u64) {
        self.above.insert(from, to);
        // The lowest range has reached the mark.
        if let Some((from, to)) = self.above.first()
            && self.mark.checked_add(1) == Some(from)
        {
            self.mark = to;
            self.above.remove_first();
        }
    }

    /// The form in which it is kept: a few octets, where there are few gaps.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![FORM];
        put(&mut bytes, self.mark);
        for ranges in [&self.above, &self.given_up] {
            put(&mut bytes, ranges.len() as u64);
            let mut before = 0;
            for (from, to) in ranges.iter() {
                put(&mut bytes, from - before);
                put(&mut bytes, to - from);
                before = to;
            }
        }
        bytes
    }

    /// From the form in which it is kept.
    pub fn decode(bytes: &[u8]) -> Result<Self, InvalidHighWater> {
        HighWater::read(bytes).ok_or(InvalidHighWater)
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (form, mut rest) = bytes.split_first()?;
        if *form != FORM {
            return None;
        }
        let mark = take(&mut rest)?;
        let (above, given_up) = (take_ranges(&mut rest)?, take_ranges(&mut rest)?);
        let begins_beyond = above.first().is_none_or(|(from, _)| from - 1 > mark);
        let read = HighWater { mark, above, given_up };
        let is_within = read.given_up.last().is_none_or(|(_, to)| to <= read.highest());
        (rest.is_empty() && begins_beyond && is_within).then_some(read)
    }
}

/// Writes a number in groups of seven bits, the lowest first.
fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..u64::BITS).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if (bits << shift) >> shift != bits {
            return None;
        }
        number |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

fn take_ranges(bytes: &mut &[u8]) -> Option<RangeSet> {
    let count = take(bytes)?;
    let mut ranges = Vec::new();
    let mut before = 0u64;
    for _ in 0..count {
        let from = before.checked_add(take(bytes)?)?;
        let to = from.checked_add(take(bytes)?)?;
        if from == 0 {
            return None;
        }
        ranges.push((from, to));
        before = to;
    }
    RangeSet::of(ranges)
}

/// Octets that are no [`HighWater`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidHighWater;

impl fmt::Display for InvalidHighWater {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a high-water mark, or one of another version")
    }
}

impl std::error::Error for InvalidHighWater {}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// What happens to a mark.
    #[derive(Clone, Debug)]
    enum Step {
        Add(u64),
        GiveUp(u64, u64),
        Settle(Gaps),
        /// It is written down and read again.
        Restart,
    }

    fn step() -> impl Strategy<Value = Step> {
        let number = 1..60u64;
        prop_oneof![
            12 => number.clone().prop_map(Step::Add),
            1 => (number.clone(), 0..6u64).prop_map(|(from, more)| Step::GiveUp(from, from + more)),
            1 => (0..50u64).prop_map(|distance| Step::Settle(Gaps::GiveUpBehind(distance))),
            1 => Just(Step::Settle(Gaps::Keep)),
            2 => Just(Step::Restart),
        ]
    }

    /// The same, as a list of all numbers.
    #[derive(Debug, Default)]
    struct Model(BTreeMap<u64, Progress>);

    impl Model {
        fn progress_of(&self, number: u64) -> Progress {
            self.0.get(&number).copied().unwrap_or(Progress::New)
        }

        fn highest(&self) -> u64 {
            self.0.last_key_value().map_or(0, |(number, _)| *number)
        }

        fn mark(&self) -> u64 {
            (1..).find(|number| !self.0.contains_key(number)).unwrap_or(1) - 1
        }

        fn give_up(&mut self, from: u64, to: u64) -> Vec<u64> {
            let missing: Vec<_> = (from..=to).filter(|n| !self.0.contains_key(n)).collect();
            self.0.extend(missing.iter().map(|number| (*number, Progress::GivenUp)));
            missing
        }
    }

    fn flat(ranges: Vec<RangeInclusive<u64>>) -> Vec<u64> {
        ranges.into_iter().flatten().collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn it_knows_what_a_list_of_all_numbers_knows(steps in prop::collection::vec(step(), 0..120)) {
            let (mut done, mut model) = (HighWater::default(), Model::default());
            for step in steps {
                match step {
                    Step::Add(number) => {
                        let is_new = model.progress_of(number) == Progress::New;
                        prop_assert!(done.has_room_for(number));
                        prop_assert_eq!(done.add(number), is_new);
                        model.0.entry(number).or_insert(Progress::Done);
                    }
                    Step::GiveUp(from, to) => {
                        prop_assert_eq!(flat(done.give_up(from..=to)), model.give_up(from, to));
                    }
                    Step::Settle(gaps) => {
                        let missing = match gaps {
                            Gaps::Keep => Vec::new(),
                            Gaps::GiveUpBehind(distance) => {
                                model.give_up(1, model.highest().saturating_sub(distance))
                            }
                        };
                        prop_assert_eq!(flat(done.settle(gaps)), missing);
                    }
                    Step::Restart => {
                        done = HighWater::decode(&done.encode()).unwrap();
                    }
                }
                for number in 1..70 {
                    prop_assert_eq!(done.progress_of(number), model.progress_of(number));
                }
                prop_assert_eq!((done.mark(), done.highest()), (model.mark(), model.highest()));
                let missing = (1..model.highest()).filter(|n| !model.0.contains_key(n));
                prop_assert_eq!(flat(done.missing()), missing.collect::<Vec<_>>());
            }
        }

        #[test]
        fn any_order_ends_with_one_number(order in Just((1..=300u64).collect::<Vec<_>>()).prop_shuffle()) {
            let mut done = HighWater::default();
            for number in order {
                prop_assert!(done.add(number));
            }
            prop_assert_eq!(done.mark(), 300);
            prop_assert_eq!(done.encode().len(), 5);
        }

        #[test]
        fn what_was_not_written_by_it_is_refused_or_read_in_a_sound_form(bytes in prop::collection::vec(any::<u8>(), 0..30)) {
            if let Ok(read) = HighWater::decode(&bytes) {
                prop_assert_eq!(HighWater::decode(&read.encode()), Ok(read));
            }
        }
    }

    #[test]
    fn ten_million_in_order_are_one_number() {
        let mut done = HighWater::default();
        for number in 1..=10_000_000 {
            assert!(done.add(number));
        }
        assert_eq!((done.mark(), done.encode().len()), (10_000_000, 7));
    }

    #[test]
    fn beyond_so_many_gaps_only_what_makes_no_new_one_has_room() {
        let mut done = HighWater::default();
        for number in 1..=MOST_GAPS as u64 {
            assert!(done.has_room_for(2 * number));
            done.add(2 * number);
        }
        let last = 2 * MOST_GAPS as u64;
        assert!(done.has_room_for(1) && done.has_room_for(3) && done.has_room_for(last + 1));
        assert!(!done.has_room_for(last + 2));
        done.add(1);
        assert!(done.has_room_for(last + 2));
    }

    #[test]
    fn of_too_many_that_were_given_up_the_oldest_are_told_apart_no_longer() {
        let mut done = HighWater::default();
        for number in 1..=MOST_GIVEN_UP as u64 + 1 {
            done.add(3 * number);
            done.give_up(1..=3 * number);
        }
        assert_eq!(done.given_up.len(), MOST_GIVEN_UP);
        assert_eq!(done.progress_of(3), Progress::GivenUp, "it is between the oldest two");
        assert_eq!(done.progress_of(6), Progress::Done);
        assert_eq!(done.progress_of(7), Progress::GivenUp);
    }

    #[test]
    fn the_largest_numbers_do_no_harm() {
        let mut done = HighWater::default();
        assert!(done.add(u64::MAX) && !done.add(u64::MAX));
        assert_eq!(done.missing(), [1..=u64::MAX - 1]);
        assert_eq!(HighWater::decode(&done.encode()), Ok(done.clone()));
        assert_eq!(done.give_up(1..=u64::MAX), [1..=u64::MAX - 1]);
        assert_eq!((done.mark(), done.missing()), (u64::MAX, Vec::new()));
        assert!(done.give_up(1..=u64::MAX).is_empty() && !done.add(7));
        assert_eq!(HighWater::decode(&done.encode()), Ok(done));
    }
}
