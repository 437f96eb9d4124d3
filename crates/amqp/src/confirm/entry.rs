//! Where outcomes are put and awaited.
//!
//! Publishes share segments of memory, and segments that nobody holds any longer are used again: no publish costs an
//! allocation.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use super::Outcome;
use crate::lock;

/// How many publishes share one piece of memory. One confirmation that is kept keeps as many entries.
const SEGMENT: usize = 64;

/// How many segments wait to be used again: enough for 2,000 confirmations that are answered and not looked at yet.
/// Further segments are freed with their last confirmation.
const KEEP_SPENT: usize = 32;

/// The place of one publish's outcome.
#[derive(Debug)]
pub(crate) struct Entry {
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
    Done(Outcome),
}

impl Segment {
    fn new() -> Arc<Segment> {
        Arc::new(Segment { slots: Mutex::new([const { Slot::Pending }; SEGMENT]) })
    }

    /// Whether it holds no message that came back and no error: memory that is not kept for the sake of the segment.
    fn is_light(&self) -> bool {
        let is_heavy =
            |slot: &Slot| matches!(slot, Slot::Done(Outcome::Returned(_) | Outcome::Lost(_)));
        !lock(&self.slots).iter().any(is_heavy)
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

    /// Another handle to the same outcome.
    #[inline]
    pub(super) fn share(&self) -> Self {
        Entry { segment: Arc::clone(&self.segment), slot: self.slot }
    }

    /// Puts the outcome in. Gives the waker of the task that awaits it.
    #[inline]
    pub(super) fn resolve(&self, outcome: Outcome) -> Option<Waker> {
        let slot = &mut lock(&self.segment.slots)[self.slot];
        match std::mem::replace(slot, Slot::Done(outcome)) {
            Slot::Awaited(waker) => Some(waker),
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
}

/// Makes entries. Publishes share segments of memory, which are used again: no publish costs an allocation.
#[derive(Debug, Default)]
pub(super) struct Entries {
    /// The segment of the next entry, and how many entries it has.
    current: Option<(Arc<Segment>, usize)>,
    /// Full segments, the oldest first, to be used again once nobody holds them.
    spent: VecDeque<Arc<Segment>>,
}

impl Entries {
    /// The entry of the next publish.
    #[inline]
    pub(super) fn next(&mut self) -> Entry {
        let (segment, used) = match self.current.take() {
            Some(current) => current,
            None => (self.spare_segment().unwrap_or_else(Segment::new), 0),
        };
        let entry = Entry { segment: Arc::clone(&segment), slot: used };
        self.current = (used + 1 < SEGMENT).then_some((segment, used + 1));
        entry
    }

    /// The publish of this entry has its outcome. The last outcome of a segment releases the segment for reuse. Outcomes that hold a
    /// returned message or an error are not light: their segment is freed with its last confirmation.
    #[inline]
    pub(super) fn resolved(&mut self, entry: Entry, is_light: bool) {
        if !is_light {
            self.spent.retain(|segment| !Arc::ptr_eq(segment, &entry.segment));
        } else if entry.slot + 1 == SEGMENT && entry.segment.is_light() {
            if self.spent.len() == KEEP_SPENT {
                self.spent.pop_front();
            }
            self.spent.push_back(entry.segment);
        }
    }

    fn spare_segment(&mut self) -> Option<Arc<Segment>> {
        let slots = &mut Arc::get_mut(self.spent.front_mut()?)?.slots;
        let slots = slots.get_mut().unwrap_or_else(PoisonError::into_inner);
        slots.fill_with(Slot::default);
        self.spent.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment_of(entry: &Entry) -> *const Segment {
        Arc::as_ptr(&entry.segment)
    }

    /// Entries for a whole segment, all with this outcome.
    fn resolved(entries: &mut Entries, outcome: &Outcome) -> Vec<Entry> {
        let all: Vec<_> = std::iter::repeat_with(|| entries.next()).take(SEGMENT).collect();
        for entry in &all {
            assert!(entry.resolve(outcome.clone()).is_none());
            entries.resolved(entry.share(), outcome.is_acked());
        }
        all
    }

    fn acked(entries: &mut Entries) -> Vec<Entry> {
        resolved(entries, &Outcome::Acked)
    }

    #[test]
    fn a_segment_is_used_again_once_nobody_holds_it() {
        let mut entries = Entries::default();
        let first = acked(&mut entries);
        let memory = segment_of(&first[0]);
        let second = acked(&mut entries);
        assert_ne!(segment_of(&second[0]), memory, "the first is still held");
        assert!(first.iter().all(|entry| entry.outcome().is_some()));
        drop((first, second));
        let third = entries.next();
        assert_eq!(segment_of(&third), memory);
        assert!(third.outcome().is_none());
    }

    #[test]
    fn one_confirmation_that_is_kept_does_not_stop_the_others_from_being_used_again() {
        let mut entries = Entries::default();
        let mut kept = acked(&mut entries);
        kept.truncate(1);
        for _ in 0..2 * KEEP_SPENT {
            drop(acked(&mut entries));
        }
        assert_eq!(Arc::strong_count(&kept[0].segment), 1);
        assert!(kept[0].outcome().is_some());
        assert_eq!(entries.spent.len(), KEEP_SPENT);
        assert!(entries.spare_segment().is_some());
    }

    #[test]
    fn returned_messages_are_not_kept_for_the_sake_of_their_memory() {
        let mut entries = Entries::default();
        let error = crate::Error::timeout("a test", std::time::Duration::ZERO);
        drop(resolved(&mut entries, &Outcome::Lost(error)));
        assert!(entries.spent.is_empty() && entries.current.is_none());
    }
}
