//! Which numbers of an increasing sequence are done: delivery tags that were settled, publishes that were confirmed.

use std::collections::VecDeque;

/// All numbers below a mark are done; of those above it, some.
///
/// Memory grows with the span between the lowest number that is not done and the highest that is: a byte for each.
#[derive(Debug)]
pub(super) struct Settled {
    /// The lowest number that is not done.
    lowest: u64,
    /// From `lowest` on: whether it is done. Never begins with `true`.
    above: VecDeque<bool>,
    /// All numbers count as done, until it is said up to which they are.
    paused: bool,
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
        Settled { lowest: 1, above: VecDeque::new(), paused: false }
    }

    /// The lowest number that is not done.
    pub(super) fn lowest(&self) -> u64 {
        self.lowest
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        match number.checked_sub(self.lowest) {
            None => true,
            Some(above) => self.above.get(above as usize).copied().unwrap_or(false),
        }
    }

    /// Until the next [`Settled::resume`], every number counts as done before.
    pub(super) fn pause(&mut self) {
        self.paused = true;
    }

    /// All numbers up to this one are done, and those above it are not.
    pub(super) fn resume(&mut self, number: u64) {
        self.paused = false;
        self.mark_through(number);
    }

    /// One number is done.
    #[inline]
    pub(super) fn mark(&mut self, number: u64) -> Mark {
        if self.paused {
            return Mark::Again;
        }
        if number == self.lowest {
            self.lowest += 1;
            self.above.pop_front();
            while self.above.front() == Some(&true) {
                self.above.pop_front();
                self.lowest += 1;
            }
            return Mark::InOrder;
        }
        if self.contains(number) {
            return Mark::Again;
        }
        let index = (number - self.lowest) as usize;
        if self.above.len() <= index {
            self.above.resize(index + 1, false);
        }
        self.above[index] = true;
        Mark::Ahead
    }

    /// All numbers up to this one are done. Says whether this one was not.
    pub(super) fn mark_through(&mut self, number: u64) -> bool {
        if self.paused {
            return false;
        }
        let news = !self.contains(number);
        if number >= self.lowest {
            let passed = (number + 1 - self.lowest).min(self.above.len() as u64);
            self.above.drain(..passed as usize);
            self.lowest = number + 1;
            while self.above.front() == Some(&true) {
                self.above.pop_front();
                self.lowest += 1;
            }
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

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
            }
        }
    }
}
