//! Where outcomes are put and awaited.
//!
//! Publishes share segments of memory, and segments that nobody holds any longer are used again: no publish costs an
//! allocation.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use super::Outcome;
use crate::amqp::lock;

/// How many publishes share one piece of memory. One confirmation that is kept keeps as many entries.
const SEGMENT: usize = 64;

/// How many segments wait to be used again: enough for 2,000 confirmations that are answered and not looked at yet.
/// What is beyond is left to those who hold it.
const KEEP_SPENT: usize = 32;

/// The place of one publish's outcome.
#[derive(Debug)]
pub(in crate::amqp) struct Entry {
    segment: Arc<Segment>,
    slot: usize,
}

#[derive(Debug)]
struct Segment {
    slots: Mutex<[Slot; SEGMENT]>,
}

#[derive(Debug, Default)]
enum Slot {
    #[default]
    Pending,
    Awaited(Waker),
    /// By somebody whom only bad news concerns.
    Feared(Waker),
    Done(Outcome),
}

impl Segment {
    fn new() -> Arc<Segment> {
        Arc::new(Segment { slots: Mutex::new([const { Slot::Pending }; SEGMENT]) })
    }

    /// Whether it holds nothing but itself: no message that came back, no error.
    fn is_light(&self) -> bool {
        let light = |slot: &Slot| matches!(slot, Slot::Done(Outcome::Acked | Outcome::Nacked));
        lock(&self.slots).iter().all(light)
    }
}

impl Entry {
    /// One that has its outcome from the start.
    pub(super) fn done(outcome: Outcome) -> Self {
        let segment = Segment::new();
        lock(&segment.slots)[0] = Slot::Done(outcome);
        Entry { segment, slot: 0 }
    }

    /// The outcome, if there is one yet.
    #[inline]
    pub(super) fn outcome(&self) -> Option<Outcome> {
        match &lock(&self.segment.slots)[self.slot] {
            Slot::Done(Outcome::Acked) => Some(Outcome::Acked),
            Slot::Done(outcome) => Some(outcome.clone()),
            _ => None,
        }
    }

    #[inline]
    pub(super) fn poll(&self, context: &mut Context<'_>) -> Poll<Outcome> {
        let slot = &mut lock(&self.segment.slots)[self.slot];
        match slot {
            Slot::Done(Outcome::Acked) => return Poll::Ready(Outcome::Acked),
            Slot::Done(outcome) => return Poll::Ready(outcome.clone()),
            Slot::Awaited(waker) if waker.will_wake(context.waker()) => {}
            _ => *slot = Slot::Awaited(context.waker().clone()),
        }
        Poll::Pending
    }

    /// The outcome if it is bad. Whoever asks is woken by a bad one, and by no other.
    #[inline]
    pub(super) fn poll_failure(&self, context: &mut Context<'_>) -> Poll<Outcome> {
        let slot = &mut lock(&self.segment.slots)[self.slot];
        match slot {
            Slot::Done(Outcome::Acked) => {}
            Slot::Done(outcome) => return Poll::Ready(outcome.clone()),
            Slot::Feared(waker) if waker.will_wake(context.waker()) => {}
            _ => *slot = Slot::Feared(context.waker().clone()),
        }
        Poll::Pending
    }
}

/// The entries of all numbers from the oldest without an outcome on.
#[derive(Debug, Default)]
pub(super) struct Entries {
    /// The entries from number `first * SEGMENT + 1` on.
    segments: VecDeque<Arc<Segment>>,
    first: u64,
    /// Segments that have all their outcomes, the oldest first, to be used again once nobody holds them.
    spent: VecDeque<Arc<Segment>>,
}

impl Entries {
    /// The entry of a number. Numbers count up by one, from 1 on.
    #[inline]
    pub(super) fn add(&mut self, number: u64) -> Entry {
        let slot = ((number - 1) % SEGMENT as u64) as usize;
        if slot == 0 {
            let segment = self.spare_segment().unwrap_or_else(Segment::new);
            self.segments.push_back(segment);
        }
        // There is a last segment: the first slot makes one, and it stays until it is full.
        let segment = Arc::clone(self.segments.back().expect("a segment for the entry"));
        Entry { segment, slot }
    }

    fn spare_segment(&mut self) -> Option<Arc<Segment>> {
        let slots = &mut Arc::get_mut(self.spent.front_mut()?)?.slots;
        let slots = slots.get_mut().unwrap_or_else(PoisonError::into_inner);
        slots.fill_with(Slot::default);
        self.spent.pop_front()
    }

    /// Puts the outcome of a number that has none into its entry. Whoever awaits it is to be woken.
    pub(super) fn resolve(&self, number: u64, outcome: Outcome) -> Option<Waker> {
        let place = number - 1;
        let segment = (place / SEGMENT as u64 - self.first) as usize;
        let mut slots = lock(&self.segments[segment].slots);
        let slot = &mut slots[(place % SEGMENT as u64) as usize];
        let is_bad = !outcome.is_acked();
        match std::mem::replace(slot, Slot::Done(outcome)) {
            Slot::Awaited(waker) => Some(waker),
            Slot::Feared(waker) if is_bad => Some(waker),
            _ => None,
        }
    }

    /// All numbers below this one have their outcomes: lets go of them.
    pub(super) fn forget_before(&mut self, lowest: u64) {
        while (self.first + 1) * (SEGMENT as u64) < lowest {
            self.first += 1;
            let Some(segment) = self.segments.pop_front() else { continue };
            if segment.is_light() {
                if self.spent.len() == KEEP_SPENT {
                    self.spent.pop_front();
                }
                self.spent.push_back(segment);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn segments(&self) -> usize {
        self.segments.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds entries for a whole segment, the next after `number`.
    fn fill(entries: &mut Entries, number: &mut u64) -> Vec<Entry> {
        let next = || {
            *number += 1;
            entries.add(*number)
        };
        std::iter::repeat_with(next).take(SEGMENT).collect()
    }

    fn resolve(entries: &mut Entries, numbers: std::ops::RangeInclusive<u64>) {
        let end = *numbers.end();
        for number in numbers {
            assert!(entries.resolve(number, Outcome::Acked).is_none());
        }
        entries.forget_before(end + 1);
    }

    #[test]
    fn a_segment_is_used_again_once_nobody_holds_it() {
        let (mut entries, mut number) = (Entries::default(), 0);
        let first = fill(&mut entries, &mut number);
        let memory = Arc::as_ptr(&first[0].segment);
        let second = fill(&mut entries, &mut number);
        resolve(&mut entries, 1..=number);
        // Still held: the third must be another one.
        let third = fill(&mut entries, &mut number);
        assert!(first.iter().all(|entry| entry.outcome().is_some()));
        assert!(third.iter().all(|entry| entry.outcome().is_none()));
        assert_ne!(Arc::as_ptr(&third[0].segment), memory);
        drop((first, second));
        let fourth = fill(&mut entries, &mut number);
        assert_eq!(Arc::as_ptr(&fourth[0].segment), memory);
        assert!(fourth.iter().all(|entry| entry.outcome().is_none()));
    }

    #[test]
    fn one_confirmation_that_is_kept_does_not_stop_the_others_from_being_used_again() {
        let (mut entries, mut number) = (Entries::default(), 0);
        let mut kept = fill(&mut entries, &mut number);
        kept.truncate(1);
        resolve(&mut entries, 1..=number);
        for _ in 0..2 * KEEP_SPENT {
            let first = number + 1;
            drop(fill(&mut entries, &mut number));
            resolve(&mut entries, first..=number);
        }
        assert_eq!(Arc::strong_count(&kept[0].segment), 1);
        assert!(kept[0].outcome().is_some());
        assert_eq!(entries.spent.len(), KEEP_SPENT);
        assert!(entries.spare_segment().is_some());
    }

    #[test]
    fn who_fears_an_outcome_is_woken_by_a_bad_one_only() {
        let mut entries = Entries::default();
        let (good, bad) = (entries.add(1), entries.add(2));
        let mut context = Context::from_waker(Waker::noop());
        assert!(good.poll_failure(&mut context).is_pending());
        assert!(bad.poll_failure(&mut context).is_pending());
        assert!(entries.resolve(1, Outcome::Acked).is_none());
        assert!(entries.resolve(2, Outcome::Nacked).is_some());
        assert!(good.poll_failure(&mut context).is_pending());
        assert!(matches!(bad.poll_failure(&mut context), Poll::Ready(Outcome::Nacked)));
    }

    #[test]
    fn what_came_back_is_not_kept_for_the_sake_of_its_memory() {
        let (mut entries, mut number) = (Entries::default(), 0);
        let error = crate::amqp::Error::timeout("a test", std::time::Duration::ZERO);
        drop(fill(&mut entries, &mut number));
        assert!(entries.resolve(1, Outcome::Lost(error)).is_none());
        resolve(&mut entries, 2..=number);
        assert!(entries.spent.is_empty());
    }
}
