//! Which numbers of an increasing sequence are done: delivery tags that were settled, publishes that were confirmed.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

/// All numbers below a mark are done; of those above it, some.
///
/// Memory grows with how many are not done, and not with how far apart they are: one delivery may be held while
/// millions after it are settled.
#[derive(Debug)]
pub(super) struct Settled {
    /// The lowest number that is not done.
    lowest: u64,
    /// Runs of done numbers above `lowest`, in order, with at least one that is not done between two of them.
    runs: VecDeque<RangeInclusive<u64>>,
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
        Settled { lowest: 1, runs: VecDeque::new(), pauses: 0 }
    }

    /// The lowest number that is not done.
    #[cfg(test)]
    pub(super) fn lowest(&self) -> u64 {
        self.lowest
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        number < self.lowest
            || self.runs.get(self.run_from(number)).is_some_and(|run| run.contains(&number))
    }

    /// Whether all of these are done.
    pub(super) fn contains_all(&self, numbers: RangeInclusive<u64>) -> bool {
        let (first, last) = numbers.into_inner();
        let is_in_run = || {
            let run = self.runs.get(self.run_from(first));
            run.is_some_and(|run| run.contains(&first) && run.contains(&last))
        };
        last < self.lowest || is_in_run()
    }

    /// The place of the first run that does not end before this number.
    fn run_from(&self, number: u64) -> usize {
        match self.runs.back() {
            // Nearly always, numbers become done in about their order.
            Some(last) if *last.end() >= number => {
                self.runs.partition_point(|run| *run.end() < number)
            }
            _ => self.runs.len(),
        }
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
        self.mark_ahead(number)
    }

    fn mark_ahead(&mut self, number: u64) -> Mark {
        let place = self.run_from(number);
        if self.runs.get(place).is_some_and(|run| run.contains(&number)) {
            return Mark::Again;
        }
        let before = place.checked_sub(1).filter(|at| self.runs[*at].end() + 1 == number);
        let after = self.runs.get(place).filter(|run| *run.start() == number + 1);
        match (before, after.map(|run| *run.end())) {
            (Some(before), Some(end)) => {
                self.runs[before] = *self.runs[before].start()..=end;
                self.runs.remove(place);
            }
            (Some(before), None) => self.runs[before] = *self.runs[before].start()..=number,
            (None, Some(end)) => self.runs[place] = number..=end,
            (None, None) => self.runs.insert(place, number..=number),
        }
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
            while self.runs.front().is_some_and(|run| *run.end() <= number) {
                self.runs.pop_front();
            }
            self.pass_over_run();
        }
        news
    }

    /// The lowest number has moved on; it may have met a run.
    #[inline]
    fn pass_over_run(&mut self) {
        if let Some(run) = self.runs.front()
            && *run.start() <= self.lowest
        {
            self.lowest = run.end() + 1;
            self.runs.pop_front();
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
        assert_eq!(settled.runs.len(), 1);
        assert_eq!(settled.mark(1), Mark::InOrder);
        assert_eq!(settled.lowest(), 1_000_000);
        assert!(settled.runs.is_empty());
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
        assert!(settled.runs.is_empty());
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
