//! The unconfirmed publishes of one channel, by delivery tag: the number by which the broker confirms them.

use std::collections::VecDeque;
use std::ops::Range;

use super::fingerprint::Likeness;
use crate::error::Error;

/// The unconfirmed publishes of one channel, each with a record of its owner, in the order of publishing.
///
/// Memory grows with the span from the oldest unconfirmed publish on: [`ConfirmTracker::span`] is what a window bounds.
#[derive(Debug)]
#[doc(hidden)]
pub struct ConfirmTracker<T> {
    /// The delivery tag of the first slot.
    first: u64,
    /// `None` is a publish that was answered before an older one.
    slots: VecDeque<Option<T>>,
    unconfirmed: usize,
}

impl<T> ConfirmTracker<T> {
    /// That of a channel on which nothing was published. Delivery tags begin at 1.
    #[doc(hidden)]
    pub fn new() -> Self {
        ConfirmTracker { first: 1, slots: VecDeque::new(), unconfirmed: 0 }
    }

    /// Adds the record of the message that was published last, and gives its delivery tag.
    #[inline]
    #[doc(hidden)]
    pub fn add(&mut self, record: T) -> u64 {
        let tag = self.tags().end;
        self.slots.push_back(Some(record));
        self.unconfirmed += 1;
        tag
    }

    /// From the oldest unconfirmed delivery tag to the next one.
    #[inline]
    #[doc(hidden)]
    pub fn tags(&self) -> Range<u64> {
        self.first..self.first + self.slots.len() as u64
    }

    /// How many publishes there are from the oldest unconfirmed one on.
    #[inline]
    #[doc(hidden)]
    pub fn span(&self) -> usize {
        self.slots.len()
    }

    /// How many publishes are unconfirmed.
    #[doc(hidden)]
    pub fn unconfirmed(&self) -> usize {
        self.unconfirmed
    }

    /// The oldest unconfirmed publish.
    #[inline]
    #[doc(hidden)]
    pub fn oldest(&self) -> Option<&T> {
        self.slots.front().and_then(Option::as_ref)
    }

    /// The unconfirmed publishes, the oldest first.
    #[doc(hidden)]
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().flatten()
    }

    /// The slot so many places after the oldest unconfirmed publish.
    #[inline]
    #[doc(hidden)]
    pub fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.slots.get_mut(index)?.as_mut()
    }

    /// The oldest unconfirmed publish that a returned message is most like.
    #[doc(hidden)]
    pub fn most_like(&mut self, is_like: impl Fn(&T, Likeness) -> bool) -> Option<&mut T> {
        let index = Likeness::ALL.into_iter().find_map(|likeness| {
            let is_it = |slot: &Option<T>| slot.as_ref().is_some_and(|one| is_like(one, likeness));
            self.slots.iter().position(is_it)
        })?;
        self.get_mut(index)
    }

    /// Removes the records that are no longer of interest, and gives each to `resolve`.
    #[doc(hidden)]
    pub fn remove_if(&mut self, is_it: impl Fn(&T) -> bool, mut resolve: impl FnMut(T)) {
        for slot in &mut self.slots {
            if let Some(record) = slot.take_if(|record| is_it(record)) {
                self.unconfirmed -= 1;
                resolve(record);
            }
        }
        self.pass_answered();
    }

    /// The broker has confirmed a delivery tag, or all up to it: gives the records of those that were unconfirmed to `resolve`,
    /// the oldest first. A tag that was never published is a violation of the protocol.
    #[doc(hidden)]
    pub fn answered(
        &mut self,
        tag: u64,
        multiple: bool,
        mut resolve: impl FnMut(T),
    ) -> Result<(), Error> {
        let next = self.tags().end;
        let last = if tag == 0 && multiple { next - 1 } else { tag };
        if last == 0 && multiple {
            return Ok(());
        }
        if last == 0 || last >= next {
            return Err(Error::protocol(format!(
                "the broker confirmed publish {last}, and {} were sent",
                next - 1
            )));
        }
        let Some(index) = last.checked_sub(self.first) else { return Ok(()) };
        if multiple {
            for record in self.slots.drain(..=index as usize).flatten() {
                self.unconfirmed -= 1;
                resolve(record);
            }
            self.first = last + 1;
        } else if let Some(record) = self.slots[index as usize].take() {
            self.unconfirmed -= 1;
            resolve(record);
        }
        self.pass_answered();
        Ok(())
    }

    /// The channel is gone: removes the records of what was not confirmed, the oldest first.
    #[doc(hidden)]
    pub fn drain(&mut self) -> impl DoubleEndedIterator<Item = T> {
        self.first = self.tags().end;
        self.unconfirmed = 0;
        self.slots.drain(..).flatten()
    }

    #[inline]
    fn pass_answered(&mut self) {
        while let Some(None) = self.slots.front() {
            self.slots.pop_front();
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn answered(tracker: &mut ConfirmTracker<u64>, tag: u64, multiple: bool) -> Vec<u64> {
        let mut answered = Vec::new();
        tracker.answered(tag, multiple, |record| answered.push(record)).unwrap();
        answered
    }

    fn of(publishes: u64) -> ConfirmTracker<u64> {
        let mut tracker = ConfirmTracker::new();
        for tag in 1..=publishes {
            assert_eq!(tracker.add(tag), tag);
        }
        tracker
    }

    #[test]
    fn a_multiple_confirm_covers_what_single_ones_have_left() {
        let mut tracker = of(5);
        assert_eq!(answered(&mut tracker, 2, false), [2]);
        assert_eq!((tracker.tags(), tracker.unconfirmed()), (1..6, 4));
        assert_eq!(answered(&mut tracker, 4, true), [1, 3, 4]);
        assert_eq!((tracker.tags(), tracker.oldest()), (5..6, Some(&5)));
        assert_eq!(answered(&mut tracker, 3, false), [0; 0]);
        assert_eq!(answered(&mut tracker, 0, true), [5]);
        assert_eq!((tracker.span(), tracker.unconfirmed()), (0, 0));
    }

    #[test]
    fn a_tag_that_was_never_published_is_an_error() {
        let mut tracker = of(0);
        assert_eq!(answered(&mut tracker, 0, true), [0; 0]);
        for (tag, multiple) in [(1, false), (1, true), (0, false)] {
            assert!(tracker.answered(tag, multiple, |_| ()).is_err());
        }
        let mut tracker = of(1);
        assert!(tracker.answered(2, true, |_| ()).is_err());
    }

    #[test]
    fn after_a_drain_the_tags_go_on() {
        let mut tracker = of(3);
        assert_eq!(answered(&mut tracker, 2, false), [2]);
        assert_eq!(tracker.drain().collect::<Vec<_>>(), [1, 3]);
        assert_eq!((tracker.tags(), tracker.unconfirmed()), (4..4, 0));
        assert_eq!(tracker.add(4), 4);
    }

    proptest! {
        #[test]
        fn each_record_is_resolved_once(
            steps in prop::collection::vec((0u64..40, any::<bool>(), any::<bool>()), 0..80),
        ) {
            let mut tracker = of(40);
            let mut open: std::collections::BTreeSet<u64> = (1..=40).collect();
            for (tag, multiple, removes) in steps {
                let expected: Vec<u64> = open
                    .iter()
                    .copied()
                    .filter(|one| match multiple {
                        _ if removes => *one == tag,
                        true => *one <= if tag == 0 { 40 } else { tag },
                        false => *one == tag,
                    })
                    .collect();
                if removes {
                    let mut removed = Vec::new();
                    tracker.remove_if(|record| *record == tag, |record| removed.push(record));
                    prop_assert_eq!(&removed, &expected);
                } else if tag > 0 || multiple {
                    prop_assert_eq!(&answered(&mut tracker, tag, multiple), &expected);
                } else {
                    continue;
                }
                expected.iter().for_each(|tag| assert!(open.remove(tag)));
                prop_assert_eq!(tracker.oldest(), open.first());
                prop_assert_eq!(tracker.unconfirmed(), open.len());
                prop_assert_eq!(tracker.tags(), open.first().copied().unwrap_or(41)..41);
            }
        }
    }
}
