//! Numbers as ranges: compact, as long as there are few gaps.

use std::ops::RangeInclusive;

/// Ranges in order, with a number missing between any two of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn first(&self) -> Option<(u64, u64)> {
        self.0.first().copied()
    }

    pub(super) fn last(&self) -> Option<(u64, u64)> {
        self.0.last().copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().copied()
    }

    pub(super) fn remove_first(&mut self) {
        self.0.remove(0);
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        let at = self.0.partition_point(|(_, to)| *to < number);
        self.0.get(at).is_some_and(|(from, _)| *from <= number)
    }

    /// Whether a number is next to one of them, so that adding it makes no new range.
    pub(super) fn touches(&self, number: u64) -> bool {
        let next = number.saturating_add(1);
        self.contains(number.saturating_sub(1)) || self.contains(next)
    }

    /// Adds all numbers of a range, which is joined with those that it touches.
    pub(super) fn insert(&mut self, mut from: u64, mut to: u64) {
        let begin = self.0.partition_point(|(_, end)| end.saturating_add(1) < from);
        let end = self.0.partition_point(|(start, _)| *start <= to.saturating_add(1));
        if begin < end {
            from = from.min(self.0[begin].0);
            to = to.max(self.0[end - 1].1);
        }
        self.0.splice(begin..end, [(from, to)]);
    }

    /// Makes one range of the first two, with all that lies between them.
    pub(super) fn join_first(&mut self) {
        if let [(from, _), (_, to), ..] = self.0[..] {
            self.insert(from, to);
        }
    }

    /// What of a range is not among them.
    pub(super) fn missing_in(&self, from: u64, to: u64) -> Vec<RangeInclusive<u64>> {
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

    /// Ranges that were written down. None if they are out of order or touch.
    pub(super) fn of(ranges: Vec<(u64, u64)>) -> Option<Self> {
        let apart = |pair: &[(u64, u64)]| pair[0].1.checked_add(1).is_some_and(|n| n < pair[1].0);
        let is_sound = ranges.iter().all(|(from, to)| from <= to) && ranges.windows(2).all(apart);
        is_sound.then_some(Ranges(ranges))
    }
}
