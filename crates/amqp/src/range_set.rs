//! Numbers as ranges: compact, as long as there are few gaps.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

/// Ranges in order, with a number missing between any two of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet(VecDeque<(u64, u64)>);

impl RangeSet {
    /// Ranges that were written down. None if they are out of order or touch.
    pub fn of(ranges: Vec<(u64, u64)>) -> Option<Self> {
        let apart = |pair: &[(u64, u64)]| pair[0].1.checked_add(1).is_some_and(|n| n < pair[1].0);
        let is_sound = ranges.iter().all(|(from, to)| from <= to) && ranges.windows(2).all(apart);
        is_sound.then(|| RangeSet(ranges.into()))
    }

    /// Whether no number is in it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many ranges.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The lowest range.
    pub fn first(&self) -> Option<(u64, u64)> {
        self.0.front().copied()
    }

    /// The highest range.
    pub fn last(&self) -> Option<(u64, u64)> {
        self.0.back().copied()
    }

    /// All ranges, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().copied()
    }

    /// Takes the lowest range out.
    pub fn remove_first(&mut self) {
        self.0.pop_front();
    }

    /// Whether a number is in one of them.
    pub fn contains(&self, number: u64) -> bool {
        self.contains_all(number, number)
    }

    /// Whether all numbers of a range are.
    pub fn contains_all(&self, from: u64, to: u64) -> bool {
        let range = self.0.get(self.range_from(from));
        range.is_some_and(|(start, end)| *start <= from && to <= *end)
    }

    /// Whether a number is next to one of them, so that adding it makes no new range.
    pub fn touches(&self, number: u64) -> bool {
        let next = number.saturating_add(1);
        self.contains(number.saturating_sub(1)) || self.contains(next)
    }

    /// The place of the first range that does not end before a number.
    fn range_from(&self, number: u64) -> usize {
        match self.0.back() {
            // Nearly always, numbers come in about their order.
            Some((_, end)) if *end >= number => self.0.partition_point(|(_, end)| *end < number),
            _ => self.0.len(),
        }
    }

    /// Adds all numbers of a range, which is joined with those that it touches.
    pub fn insert(&mut self, from: u64, to: u64) {
        let begin = self.range_from(from.saturating_sub(1));
        let is_touched = |(start, _): &&(u64, u64)| *start <= to.saturating_add(1);
        let end = begin + self.0.range(begin..).take_while(is_touched).count();
        if begin == end {
            return self.0.insert(begin, (from, to));
        }
        self.0[begin] = (from.min(self.0[begin].0), to.max(self.0[end - 1].1));
        self.0.drain(begin + 1..end);
    }

    /// Makes one range of the first two, with all that lies between them.
    pub fn join_first(&mut self) {
        if let (Some((from, _)), Some((_, to))) = (self.first(), self.0.get(1).copied()) {
            self.insert(from, to);
        }
    }

    /// What of a range is not among them.
    pub fn missing_in(&self, from: u64, to: u64) -> Vec<RangeInclusive<u64>> {
        let mut missing = Vec::new();
        let mut next = from;
        for (start, end) in self.iter().filter(|(_, end)| *end >= from) {
            if start > to {
                break;
            }
            if next < start {
                missing.push(next..=start - 1);
            }
            match end.checked_add(1) {
                Some(after) => next = after,
                None => return missing,
            }
        }
        if next <= to {
            missing.push(next..=to);
        }
        missing
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_agrees_with_a_set(added in prop::collection::vec((0u64..60, 0u64..4), 0..40)) {
            let (mut ranges, mut model) = (RangeSet::default(), BTreeSet::new());
            for (from, more) in added {
                ranges.insert(from, from + more);
                model.extend(from..=from + more);
                let listed: Vec<u64> = ranges.iter().flat_map(|(from, to)| from..=to).collect();
                prop_assert!(listed.iter().eq(&model), "{ranges:?}");
                prop_assert_eq!(RangeSet::of(ranges.iter().collect()), Some(ranges.clone()));
                for number in 0..65 {
                    prop_assert_eq!(ranges.contains(number), model.contains(&number));
                }
                let missing: Vec<u64> = ranges.missing_in(5, 50).into_iter().flatten().collect();
                prop_assert!(missing.into_iter().eq((5..=50).filter(|n| !model.contains(n))));
            }
        }
    }

    #[test]
    fn the_highest_number_has_none_after_it() {
        let mut ranges = RangeSet::default();
        ranges.insert(u64::MAX, u64::MAX);
        ranges.insert(0, 0);
        assert_eq!(ranges.missing_in(u64::MAX - 1, u64::MAX), [u64::MAX - 1..=u64::MAX - 1]);
        ranges.join_first();
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [(0, u64::MAX)]);
    }
}
