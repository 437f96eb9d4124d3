//! Which numbers of an increasing sequence are done: delivery tags that were settled, publishes that were confirmed.

use std::ops::RangeInclusive;

use super::range_set::RangeSet;

/// All numbers below a mark are done; of those above it, some.
///
/// Memory grows with how many are not done, and not with how far apart they are: one delivery may be held while
/// millions after it are settled.
#[derive(Debug)]
pub(super) struct Settled {
    /// The lowest number that is not done.
    lowest: u64,
    /// The done numbers above `lowest`.
    above: RangeSet,
    /// While it is not 0, all numbers count as done: it is yet to be said up to which they are, so many times.
    pauses: u32,
}

/// What [`Settled::mark`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// It was not done, and it was the lowest: all below it are done.
    InOrder,
    /// It was not done, and others below it are not either.
    Ahead,
    /// It was done before.
    Again,
}

impl Settled {
    /// Numbers begin at 1, as delivery tags do.
    pub(super) fn new() -> Self {
        Settled { lowest: 1, above: RangeSet::default(), pauses: 0 }
    }

    /// The lowest number that is not done.
    #[cfg(test)]
    pub(super) fn lowest(&self) -> u64 {
        self.lowest
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        number < self.lowest || self.above.contains(number)
    }

    /// Whether all of these are done.
    pub(super) fn contains_all(&self, numbers: RangeInclusive<u64>) -> bool {
        let (first, last) = numbers.into_inner();
        last < self.lowest || self.above.contains_all(first, last)
    }

    /// Until there was a [`Settled::resume`] for each of these, every number counts as done before.
    pub(super) fn pause(&mut self) {
        self.pauses += 1;
    }

    /// All numbers up to this one are done, and those above it are not.
    pub(super) fn resume(&mut self, number: u64) {
        let pauses = std::mem::take(&mut self.pauses);
        self.mark_through(number);
        self.pauses = pauses.saturating_sub(1);
    }

    /// One number is done.
    #[inline]
    pub(super) fn mark(&mut self, number: u64) -> Mark {
        if self.pauses > 0 || number < self.lowest {
            return Mark::Again;
        }
        if number == self.lowest {
            self.lowest += 1;
            self.pass_over_run();
            return Mark::InOrder;
        }
        if self.above.contains(number) {
            return Mark::Again;
        }
        self.above.insert(number, number);
        Mark::Ahead
    }

    /// All numbers up to this one are done. Says whether this one was not.
    pub(super) fn mark_through(&mut self, number: u64) -> bool {
        if self.pauses > 0 {
            return false;
        }
        let news = !self.contains(number);
        if number >= self.lowest {
            self.lowest = number + 1;
            while self.above.first().is_some_and(|(_, last)| last <= number) {
                self.above.remove_first();
            }
            self.pass_over_run();
        }
        news
    }

    /// The lowest number has moved on; it may have met a run.
    #[inline]
    fn pass_over_run(&mut self) {
        if let Some((first, last)) = self.above.first()
            && first <= self.lowest
        {
            self.lowest = last + 1;
            self.above.remove_first();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn one_that_is_held_costs_no_memory_for_those_after_it() {
        let mut settled = Settled::new();
        for number in 2..1_000_000 {
            assert_eq!(settled.mark(number), Mark::Ahead);
        }
        assert_eq!(settled.above.len(), 1);
        assert_eq!(settled.mark(1), Mark::InOrder);
        assert_eq!(settled.lowest(), 1_000_000);
        assert!(settled.above.is_empty());
    }

    #[test]
    fn the_mark_passes_over_runs() {
        let mut settled = Settled::new();
        assert_eq!(settled.mark(2), Mark::Ahead);
        assert_eq!(settled.mark(3), Mark::Ahead);
        assert_eq!(settled.mark(2), Mark::Again);
        assert_eq!(settled.mark(1), Mark::InOrder);
        assert_eq!(settled.lowest(), 4);
        assert_eq!(settled.mark(3), Mark::Again);
        assert!(settled.above.is_empty());
    }

    #[test]
    fn marking_through_forgets_what_is_below() {
        let mut settled = Settled::new();
        settled.mark(3);
        settled.mark(6);
        assert!(settled.mark_through(5));
        assert_eq!(settled.lowest(), 7);
        assert!(!settled.mark_through(6));
    }

    #[test]
    fn while_paused_nothing_is_settled_and_then_all_is() {
        let mut settled = Settled::new();
        settled.pause();
        assert_eq!(settled.mark(1), Mark::Again);
        assert!(!settled.mark_through(2));
        settled.pause();
        settled.resume(2);
        assert_eq!(settled.mark(3), Mark::Again);
        settled.resume(3);
        assert_eq!(settled.mark(3), Mark::Again);
        assert_eq!(settled.mark(4), Mark::InOrder);
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_set(steps in prop::collection::vec((1u64..60, any::<bool>()), 0..80)) {
            let mut settled = Settled::new();
            let mut model = BTreeSet::new();
            for (number, through) in steps {
                if through {
                    let news = !model.contains(&number);
                    model.extend(1..=number);
                    prop_assert_eq!(settled.mark_through(number), news);
                } else {
                    let lowest = (1..).find(|n| !model.contains(n)).unwrap();
                    let expected = match (model.insert(number), number == lowest) {
                        (false, _) => Mark::Again,
                        (true, true) => Mark::InOrder,
                        (true, false) => Mark::Ahead,
                    };
                    prop_assert_eq!(settled.mark(number), expected);
                }
                prop_assert_eq!(settled.lowest(), (1..).find(|n| !model.contains(n)).unwrap());
                let has_all = (number..number + 3).all(|n| model.contains(&n));
                prop_assert_eq!(settled.contains_all(number..=number + 2), has_all);
            }
        }
    }
}
