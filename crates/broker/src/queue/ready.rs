//! The messages of a queue that wait to be delivered.

use std::collections::VecDeque;

use crate::message::Message;
use crate::profile::Profile;
use crate::sorted;
use crate::time::Moment;

/// A message in a queue.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) message: Message,
    /// Its place: what is put back goes where it was.
    pub(crate) place: u64,
    /// When it dies if it is still here.
    pub(crate) expires: Moment,
    /// How often it failed: came back in a way that counts.
    pub(crate) failures: u32,
    /// How often it came back to this queue in whichever way.
    pub(crate) returns: u32,
}

impl Entry {
    /// Whether somebody may have seen it before.
    pub(crate) fn is_redelivered(&self) -> bool {
        self.returns > 0 || self.failures > 0
    }
}

/// In which order a queue hands out its messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Higher priorities first, up to this one. What comes back goes where it was.
    Classic { max_priority: u8 },
    /// What comes back goes before all others, in the order in which it does. 4.3 has priorities, too.
    Quorum(Profile),
}

/// The highest priority of a quorum queue in 4.3, and that of a message without one.
const QUORUM_MAX_PRIORITY: u8 = 31;
const QUORUM_USUAL_PRIORITY: u8 = 4;

impl Order {
    /// How many lanes there are: one for each priority, and for a quorum queue one above them for what came back.
    fn lanes(self) -> usize {
        match self {
            Order::Classic { max_priority } => usize::from(max_priority) + 1,
            Order::Quorum(Profile::RabbitMq3_10) => 2,
            Order::Quorum(Profile::RabbitMq4_3) => usize::from(QUORUM_MAX_PRIORITY) + 2,
        }
    }

    /// The lane of a message that is new.
    fn lane_of(self, message: &Message) -> usize {
        let (usual, max) = match self {
            Order::Classic { max_priority: 0 } | Order::Quorum(Profile::RabbitMq3_10) => return 0,
            Order::Classic { max_priority } => (0, max_priority),
            Order::Quorum(Profile::RabbitMq4_3) => (QUORUM_USUAL_PRIORITY, QUORUM_MAX_PRIORITY),
        };
        usize::from(message.properties().priority.unwrap_or(usual).min(max))
    }

    /// What a limit in bytes counts: the body, and in quorum queues of 4.3 the properties, too.
    fn bytes_of(self, message: &Message) -> usize {
        match self {
            Order::Quorum(Profile::RabbitMq4_3) => {
                message.body_len() + message.published_properties().len()
            }
            _ => message.body_len(),
        }
    }
}

/// The ready messages.
#[derive(Debug)]
pub(crate) struct Ready {
    order: Order,
    /// The highest is served first. One alone if a classic queue has no priorities.
    lanes: Vec<VecDeque<Entry>>,
    len: usize,
    bytes: usize,
}

impl Ready {
    pub(crate) fn new(order: Order) -> Self {
        let lanes = (0..order.lanes()).map(|_| VecDeque::new()).collect();
        Ready { order, lanes, len: 0, bytes: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What limits in bytes count.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// What limits in bytes count of a message.
    pub(crate) fn bytes_of(&self, message: &Message) -> usize {
        self.order.bytes_of(message)
    }

    fn count_in(&mut self, entry: &Entry) {
        self.len += 1;
        self.bytes += self.order.bytes_of(&entry.message);
    }

    fn count_out(&mut self, entry: &Entry) {
        self.len -= 1;
        self.bytes -= self.order.bytes_of(&entry.message);
    }

    /// Adds a message behind the others of its priority.
    #[inline]
    pub(crate) fn push(&mut self, entry: Entry) {
        self.count_in(&entry);
        let lane = self.order.lane_of(&entry.message);
        self.lanes[lane].push_back(entry);
    }

    /// Puts a message back that was taken out.
    pub(crate) fn put_back(&mut self, entry: Entry) {
        self.count_in(&entry);
        if let Order::Quorum(_) = self.order {
            let returned = self.lanes.len() - 1;
            return self.lanes[returned].push_back(entry);
        }
        let lane = self.order.lane_of(&entry.message);
        sorted::insert(&mut self.lanes[lane], entry, |one| one.place);
    }

    /// Puts messages back that were taken out, in whatever order.
    pub(crate) fn put_all_back(&mut self, entries: Vec<Entry>) {
        if let Order::Quorum(_) = self.order {
            return entries.into_iter().for_each(|entry| self.put_back(entry));
        }
        let mut by_lane: Vec<Vec<Entry>> = self.lanes.iter().map(|_| Vec::new()).collect();
        for entry in entries {
            self.count_in(&entry);
            by_lane[self.order.lane_of(&entry.message)].push(entry);
        }
        for (lane, entries) in self.lanes.iter_mut().zip(by_lane) {
            sorted::put_back(lane, entries, |one| one.place);
        }
    }

    /// Takes the message whose turn it is.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Entry> {
        let entry = self.lanes.iter_mut().rev().find_map(VecDeque::pop_front)?;
        self.count_out(&entry);
        Some(entry)
    }

    /// The lanes, the highest first, at whose fronts messages die: the one whose turn it is, but in a quorum queue of 4.3 all of
    /// them.
    fn mortal_lanes(&self) -> impl Iterator<Item = (usize, &Entry)> {
        let fronts = self.lanes.iter().enumerate().rev();
        let fronts = fronts.filter_map(|(at, lane)| Some((at, lane.front()?)));
        let count = match self.order {
            Order::Quorum(Profile::RabbitMq4_3) => usize::MAX,
            _ => 1,
        };
        fronts.take(count)
    }

    /// Takes a message out whose time is up, if it is where it can be seen.
    pub(crate) fn pop_expired(&mut self, now: Moment) -> Option<Entry> {
        let (at, _) = self.mortal_lanes().find(|(_, one)| one.expires <= now)?;
        let entry = self.lanes[at].pop_front()?;
        self.count_out(&entry);
        Some(entry)
    }

    /// When the next message dies of those that [`Ready::pop_expired`] looks at.
    pub(crate) fn next_expiry(&self) -> Moment {
        self.mortal_lanes().map(|(_, one)| one.expires).min().unwrap_or(Moment::NEVER)
    }

    /// All messages, in the order in which they would be delivered.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.lanes.iter().rev().flatten()
    }

    /// Takes out the messages that are not to be kept.
    pub(crate) fn take_unless(&mut self, keep: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        let mut taken = Vec::new();
        for lane in &mut self.lanes {
            let (kept, others) = std::mem::take(lane).into_iter().partition(&keep);
            *lane = kept;
            taken.extend::<VecDeque<_>>(others);
        }
        taken.iter().for_each(|entry| self.count_out(entry));
        taken
    }

    /// Takes all messages out, in the order in which they would be delivered.
    pub(crate) fn drain(&mut self) -> Vec<Entry> {
        self.len = 0;
        self.bytes = 0;
        self.lanes.iter_mut().rev().flat_map(std::mem::take).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use leveret_wire::{Properties, RawProperties, ShortStr};

    use super::*;
    use crate::message::{Aside, Parts, Scratch};

    fn entry(place: u64, priority: Option<u8>) -> Entry {
        let properties = Properties { priority, ..Properties::default() };
        let parts = Parts {
            exchange: &Arc::new(ShortStr::default()),
            routing_key: &ShortStr::default(),
            properties: &RawProperties::from(&properties),
            ttl: None,
            aside: Aside::default(),
            body: bytes::Bytes::from_static(b"four"),
        };
        let message = Message::new(&mut Scratch::default(), parts);
        Entry { message, place, expires: Moment::NEVER, failures: 0, returns: 0 }
    }

    fn classic(max_priority: u8) -> Ready {
        Ready::new(Order::Classic { max_priority })
    }

    fn places(ready: &mut Ready) -> Vec<u64> {
        std::iter::from_fn(|| ready.pop()).map(|entry| entry.place).collect()
    }

    #[test]
    fn what_is_put_back_goes_where_it_was() {
        let mut ready = classic(0);
        for place in 1..=5 {
            ready.push(entry(place, None));
        }
        let taken: Vec<_> = (0..3).map(|_| ready.pop().unwrap()).collect();
        assert_eq!((ready.len(), ready.bytes()), (2, 8));
        for entry in taken.into_iter().rev().step_by(2) {
            ready.put_back(entry);
        }
        assert_eq!(places(&mut ready), [1, 3, 4, 5]);
        assert_eq!((ready.len(), ready.bytes()), (0, 0));
    }

    #[test]
    fn higher_priorities_come_first_and_too_high_ones_count_as_the_highest() {
        let mut ready = classic(5);
        for (place, priority) in [(1, None), (2, Some(5)), (3, Some(1)), (4, Some(200))] {
            ready.push(entry(place, priority));
        }
        assert_eq!(ready.iter().map(|one| one.place).collect::<Vec<_>>(), [2, 4, 3, 1]);
        assert_eq!(places(&mut ready), [2, 4, 3, 1]);
    }

    #[test]
    fn what_comes_back_to_a_quorum_queue_is_next_in_the_order_of_coming_back() {
        for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
            let mut ready = Ready::new(Order::Quorum(profile));
            for place in 1..=4 {
                ready.push(entry(place, None));
            }
            let taken: Vec<_> = (0..3).map(|_| ready.pop().unwrap()).collect();
            for entry in taken.into_iter().rev() {
                ready.put_back(entry);
            }
            assert_eq!(places(&mut ready), [3, 2, 1, 4]);
        }
    }

    #[test]
    fn a_quorum_queue_has_priorities_in_4_3() {
        let priorities = [None, Some(0), Some(9), Some(4), Some(255), Some(31), None];
        for (profile, order) in [
            (Profile::RabbitMq3_10, [0, 1, 2, 3, 4, 5, 6]),
            (Profile::RabbitMq4_3, [4, 5, 2, 0, 3, 6, 1]),
        ] {
            let mut ready = Ready::new(Order::Quorum(profile));
            for (place, priority) in priorities.into_iter().enumerate() {
                ready.push(entry(place as u64, priority));
            }
            assert_eq!(places(&mut ready), order);
        }
    }

    #[test]
    fn only_what_is_at_the_front_of_its_priority_expires() {
        let mut ready = classic(1);
        let soon = Moment::START.after_millis(1);
        ready.push(entry(1, None));
        ready.push(Entry { expires: soon, ..entry(2, None) });
        ready.push(Entry { expires: soon, ..entry(3, Some(1)) });
        assert_eq!(ready.next_expiry(), soon);
        assert_eq!(ready.pop_expired(soon).unwrap().place, 3);
        assert!(ready.pop_expired(soon).is_none());
        assert_eq!(ready.next_expiry(), Moment::NEVER);
    }

    #[test]
    fn what_came_back_keeps_others_of_a_quorum_queue_alive_in_3_10() {
        for (profile, alive) in [(Profile::RabbitMq3_10, true), (Profile::RabbitMq4_3, false)] {
            let mut ready = Ready::new(Order::Quorum(profile));
            let soon = Moment::START.after_millis(1);
            ready.push(Entry { expires: soon, ..entry(1, None) });
            ready.put_back(entry(2, None));
            assert_eq!(ready.pop_expired(soon).is_none(), alive);
            assert_eq!(ready.pop().unwrap().place, 2);
            assert_eq!(ready.pop_expired(soon).is_some(), alive);
        }
    }
}
