//! What was delivered on a channel and is not settled.

use std::collections::VecDeque;

use super::{ConsumerId, QueueId};
use crate::queue::Entry;
use crate::sorted;
use crate::time::Moment;

/// A delivery that is not settled.
#[derive(Debug)]
pub(super) struct Unsettled {
    pub(super) tag: u64,
    pub(super) queue: QueueId,
    /// Who got it; nobody if it was by `basic.get`.
    pub(super) consumer: Option<ConsumerId>,
    pub(super) entry: Entry,
    /// When it is taken away from who has it.
    pub(super) due: Moment,
}

/// The deliveries of a channel that are not settled, in the order of their tags.
#[derive(Debug, Default)]
pub(super) struct Deliveries {
    /// One that is settled out of turn leaves its tag, since all behind it would have to move up. The first and the last are
    /// there, and at least about half of all.
    slots: VecDeque<Slot>,
    len: usize,
}

#[derive(Debug)]
enum Slot {
    There(Unsettled),
    Gone(u64),
}

impl Slot {
    #[inline]
    fn tag(&self) -> u64 {
        match self {
            Slot::There(delivery) => delivery.tag,
            Slot::Gone(tag) => *tag,
        }
    }

    fn get(&self) -> Option<&Unsettled> {
        match self {
            Slot::There(delivery) => Some(delivery),
            Slot::Gone(_) => None,
        }
    }

    fn into_delivery(self) -> Option<Unsettled> {
        match self {
            Slot::There(delivery) => Some(delivery),
            Slot::Gone(_) => None,
        }
    }
}

impl Deliveries {
    #[inline]
    pub(super) fn push(&mut self, delivery: Unsettled) {
        self.len += 1;
        self.slots.push_back(Slot::There(delivery));
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Unsettled> {
        self.slots.iter().filter_map(Slot::get)
    }

    /// Takes out the delivery with this tag.
    pub(super) fn take(&mut self, tag: u64) -> Option<Unsettled> {
        let at = match self.slots.front() {
            Some(front) if front.tag() == tag => 0,
            _ => self.slots.binary_search_by_key(&tag, Slot::tag).ok()?,
        };
        let taken = std::mem::replace(self.slots.get_mut(at)?, Slot::Gone(tag)).into_delivery()?;
        self.len -= 1;
        self.tidy();
        Some(taken)
    }

    /// Takes out all up to this tag. `None` if there is none with it.
    pub(super) fn take_through(&mut self, tag: u64) -> Option<Vec<Unsettled>> {
        let count = self.slots.partition_point(|one| one.tag() <= tag);
        let last = self.slots.get(count.checked_sub(1)?)?.get()?;
        (last.tag == tag).then(|| self.take_first(count))
    }

    /// Takes out all before this tag.
    pub(super) fn take_before(&mut self, tag: u64) -> Vec<Unsettled> {
        let count = self.slots.partition_point(|one| one.tag() < tag);
        self.take_first(count)
    }

    pub(super) fn take_all(&mut self) -> Vec<Unsettled> {
        self.take_first(self.slots.len())
    }

    fn take_first(&mut self, slots: usize) -> Vec<Unsettled> {
        let taken: Vec<_> = self.slots.drain(..slots).filter_map(Slot::into_delivery).collect();
        self.len -= taken.len();
        self.tidy();
        taken
    }

    /// Takes out all after this tag of which that is so.
    pub(super) fn take_if(
        &mut self,
        after: u64,
        is_meant: impl Fn(&Unsettled) -> bool,
    ) -> Vec<Unsettled> {
        let before = self.slots.partition_point(|one| one.tag() <= after);
        let later = self.slots.split_off(before).into_iter().filter_map(Slot::into_delivery);
        let (taken, kept): (Vec<_>, Vec<_>) = later.partition(is_meant);
        self.len -= taken.len();
        self.slots.extend(kept.into_iter().map(Slot::There));
        self.tidy();
        taken
    }

    /// Puts back what was taken out.
    pub(super) fn put_back(&mut self, deliveries: impl IntoIterator<Item = Unsettled>) {
        let mut others = Vec::new();
        for delivery in deliveries {
            self.len += 1;
            match self.slots.binary_search_by_key(&delivery.tag, Slot::tag) {
                Ok(at) => self.slots[at] = Slot::There(delivery),
                Err(_) => others.push(Slot::There(delivery)),
            }
        }
        sorted::put_back(&mut self.slots, others, Slot::tag);
    }

    #[inline]
    fn tidy(&mut self) {
        while let Some(Slot::Gone(_)) = self.slots.front() {
            self.slots.pop_front();
        }
        while let Some(Slot::Gone(_)) = self.slots.back() {
            self.slots.pop_back();
        }
        if self.slots.len() > 2 * self.len + 32 {
            self.slots.retain(|one| one.get().is_some());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use leveret_wire::{Properties, RawProperties, ShortStr};
    use proptest::prelude::*;

    use super::*;
    use crate::message::{Aside, Message, Parts, Scratch};

    fn delivery(tag: u64) -> Unsettled {
        let parts = Parts {
            exchange: &Arc::new(ShortStr::default()),
            routing_key: &ShortStr::default(),
            properties: &RawProperties::from(&Properties::default()),
            ttl: None,
            aside: Aside::default(),
            body: bytes::Bytes::new(),
        };
        let message = Message::new(&mut Scratch::default(), parts);
        let entry = Entry { message, place: tag, expires: Moment::NEVER, failures: 0, returns: 0 };
        Unsettled { tag, queue: QueueId::default(), consumer: None, entry, due: Moment::NEVER }
    }

    fn tags<'d>(deliveries: impl IntoIterator<Item = &'d Unsettled>) -> Vec<u64> {
        deliveries.into_iter().map(|one| one.tag).collect()
    }

    #[derive(Clone, Debug)]
    enum Step {
        Push,
        Take(u64),
        TakeThrough(u64),
        TakeBefore(u64),
        TakeOdd,
        PutBack,
    }

    fn steps() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => Just(Step::Push),
            6 => (0..80u64).prop_map(Step::Take),
            1 => (0..80u64).prop_map(Step::TakeThrough),
            1 => (0..80u64).prop_map(Step::TakeBefore),
            1 => Just(Step::TakeOdd),
            1 => Just(Step::PutBack),
        ]
    }

    proptest! {
        #[test]
        fn it_is_a_set_of_tags_in_order(steps in prop::collection::vec(steps(), 0..150)) {
            let (mut deliveries, mut model) = (Deliveries::default(), BTreeSet::new());
            let (mut last, mut taken) = (0, Vec::new());
            for step in steps {
                let (found, expected) = match step {
                    Step::Push => {
                        last += 1;
                        model.insert(last);
                        deliveries.push(delivery(last));
                        (Vec::new(), Vec::new())
                    }
                    Step::Take(tag) => {
                        let expected = model.take(&tag);
                        (deliveries.take(tag).into_iter().collect(), expected.into_iter().collect())
                    }
                    Step::TakeThrough(tag) => {
                        let expected = match model.contains(&tag) {
                            true => model.extract_if(..=tag, |_| true).collect(),
                            false => Vec::new(),
                        };
                        (deliveries.take_through(tag).unwrap_or_default(), expected)
                    }
                    Step::TakeBefore(tag) => {
                        (deliveries.take_before(tag), model.extract_if(..tag, |_| true).collect())
                    }
                    Step::TakeOdd => (
                        deliveries.take_if(10, |one| one.tag % 2 == 1),
                        model.extract_if(11.., |tag| *tag % 2 == 1).collect(),
                    ),
                    Step::PutBack => {
                        model.extend(tags(&taken));
                        deliveries.put_back(std::mem::take(&mut taken));
                        (Vec::new(), Vec::new())
                    }
                };
                prop_assert_eq!(tags(&found), expected);
                taken.extend(found);
                prop_assert_eq!(deliveries.len(), model.len());
                prop_assert_eq!(tags(deliveries.iter()), model.iter().copied().collect::<Vec<_>>());
                prop_assert!(deliveries.slots.len() <= 2 * deliveries.len() + 32);
            }
        }
    }
}
