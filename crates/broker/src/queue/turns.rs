//! Whose turn it is among the consumers of a queue. There may be hundreds of thousands: nothing here goes through all of them for
//! the sake of one.
//!
//! ```text
//!   succession   by rank, and then as they came: the first follows a single active consumer
//!   ready        priority 5:   c -> d -> (c)          a ring for each priority; its head is next
//!                priority 0:   a -> b -> e -> (a)
//!   suspended    by channel, in the order in which they were suspended
//! ```

use std::cmp::Reverse;
use std::collections::BTreeMap;

use foldhash::HashMap;

use crate::vhost::{ChannelId, ConsumerId};

/// The consumers of a queue: all of them, and in turn those that can take a message, as far as is known.
#[derive(Debug)]
pub(crate) struct Turns {
    sharing: Sharing,
    consumers: HashMap<ConsumerId, Member>,
    succession: BTreeMap<Succession, ConsumerId>,
    /// The heads of the rings. The head had nothing for the longest time, and the one before it is the last.
    ready: BTreeMap<Reverse<i64>, ConsumerId>,
    /// Those that can take no more.
    suspended: BTreeMap<(ChannelId, u64), ConsumerId>,
    /// The one that alone gets messages, unless all do.
    active: Option<Turn>,
    /// The active one gets no more: another is to follow it as soon as it has settled what it has.
    leaving: bool,
    /// How many numbers were given, to consumers that came or were suspended.
    numbers: u64,
}

/// Rank and number of a consumer.
type Succession = (Reverse<(i64, u16)>, u64);

/// A consumer and where it is.
#[derive(Debug)]
struct Member {
    turn: Turn,
    /// In which order they came.
    number: u64,
    place: Place,
    /// Its neighbours in the ring, if it is ready.
    before: ConsumerId,
    after: ConsumerId,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// Another one is active.
    Waiting,
    Ready,
    Suspended(u64),
}

/// How consumers share a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// All get messages, in turn.
    Competing,
    /// One gets them all until it is gone; others follow it as they came.
    OneAsTheyCame,
    /// The same, but higher priorities follow first.
    OneByPriority,
    /// The same, but a higher priority does not wait until the active one is gone, and among equals the one that may have more
    /// messages at a time is first.
    OneOfHighestPriority,
}

/// A consumer as its queue knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) consumer: ConsumerId,
    pub(crate) channel: ChannelId,
    pub(crate) priority: i64,
    /// How many messages it may have at a time.
    pub(crate) prefetch: u16,
}

impl Sharing {
    /// The consumer with the highest rank follows first.
    fn rank(self, turn: &Turn) -> (i64, u16) {
        match self {
            Sharing::Competing | Sharing::OneAsTheyCame => (0, 0),
            Sharing::OneByPriority => (turn.priority, 0),
            // 0 is no limit.
            Sharing::OneOfHighestPriority => (turn.priority, turn.prefetch.wrapping_sub(1)),
        }
    }
}

impl Turns {
    pub(crate) fn new(sharing: Sharing) -> Self {
        Turns {
            sharing,
            consumers: HashMap::default(),
            succession: BTreeMap::new(),
            ready: BTreeMap::new(),
            suspended: BTreeMap::new(),
            active: None,
            leaving: false,
            numbers: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.consumers.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.consumers.is_empty()
    }

    /// How many do not merely wait until another is gone.
    pub(crate) fn active_len(&self) -> usize {
        match self.sharing {
            Sharing::Competing => self.consumers.len(),
            _ => usize::from(self.active.is_some()),
        }
    }

    /// All of them, as they came.
    pub(crate) fn iter(&self) -> impl Iterator<Item = ConsumerId> + use<> {
        let mut all: Vec<_> =
            self.consumers.iter().map(|(id, member)| (member.number, *id)).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, id)| id)
    }

    pub(crate) fn add(&mut self, turn: Turn) {
        let (consumer, number) = (turn.consumer, self.next_number());
        let (before, after) = (consumer, consumer);
        self.succession.insert((Reverse(self.sharing.rank(&turn)), number), consumer);
        let member = Member { turn, number, place: Place::Waiting, before, after };
        self.consumers.insert(consumer, member);
        match self.sharing {
            Sharing::Competing => self.line_up(consumer),
            _ if self.active.is_none() => self.activate_next(),
            _ => {}
        }
    }

    fn next_number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// It is ready, and the last of its priority.
    fn line_up(&mut self, consumer: ConsumerId) {
        let Some(member) = self.consumers.get_mut(&consumer) else { return };
        member.place = Place::Ready;
        let head = *self.ready.entry(Reverse(member.turn.priority)).or_insert(consumer);
        let last = match self.consumers.get(&head) {
            Some(found) if head != consumer => found.before,
            _ => consumer,
        };
        self.link(last, consumer);
        self.link(consumer, head);
    }

    fn link(&mut self, before: ConsumerId, after: ConsumerId) {
        if let Some(member) = self.consumers.get_mut(&before) {
            member.after = after;
        }
        if let Some(member) = self.consumers.get_mut(&after) {
            member.before = before;
        }
    }

    /// It is neither ready nor suspended any more.
    fn take_out(&mut self, consumer: ConsumerId) {
        let Some(member) = self.consumers.get_mut(&consumer) else { return };
        let Member { turn, before, after, .. } = *member;
        match std::mem::replace(&mut member.place, Place::Waiting) {
            Place::Waiting => {}
            Place::Suspended(number) => {
                self.suspended.remove(&(turn.channel, number));
            }
            Place::Ready => {
                let priority = Reverse(turn.priority);
                if after == consumer {
                    self.ready.remove(&priority);
                } else if let Some(head) = self.ready.get_mut(&priority)
                    && *head == consumer
                {
                    *head = after;
                }
                self.link(before, after);
            }
        }
    }

    /// Says whether it was here.
    pub(crate) fn remove(&mut self, consumer: ConsumerId) -> bool {
        self.take_out(consumer);
        let Some(Member { turn, number, .. }) = self.consumers.remove(&consumer) else {
            return false;
        };
        self.succession.remove(&(Reverse(self.sharing.rank(&turn)), number));
        if self.active.is_some_and(|active| active.consumer == consumer) {
            self.activate_next();
        }
        true
    }

    /// Whoever is to follow does.
    fn activate_next(&mut self) {
        self.leaving = false;
        self.active = self.follower();
        if let Some(turn) = self.active {
            self.line_up(turn.consumer);
        }
    }

    fn follower(&self) -> Option<Turn> {
        if self.sharing == Sharing::Competing {
            return None;
        }
        let (_, first) = self.succession.first_key_value()?;
        self.consumers.get(first).map(|member| member.turn)
    }

    /// The active one, if another is to follow it even though it is not gone.
    pub(crate) fn outranked(&self) -> Option<ConsumerId> {
        let active = self.active.filter(|_| self.sharing == Sharing::OneOfHighestPriority)?;
        let outranked = |other: Turn| other.priority > active.priority;
        (self.leaving || self.follower().is_some_and(outranked)).then_some(active.consumer)
    }

    /// The active one gets no more, and is followed once it has nothing left to settle.
    pub(crate) fn let_leave(&mut self, nothing_left: bool) {
        if let Some(active) = self.active {
            self.take_out(active.consumer);
        }
        self.leaving = true;
        if nothing_left {
            self.activate_next();
        }
    }

    /// The one to try.
    #[inline]
    pub(crate) fn next(&self) -> Option<ConsumerId> {
        self.ready.first_key_value().map(|(_, head)| *head)
    }

    /// It got a message: the others of its priority come before it now.
    #[inline]
    pub(crate) fn served(&mut self) {
        if self.consumers.len() > 1
            && let Some(mut head) = self.ready.first_entry()
            && let Some(member) = self.consumers.get(head.get())
        {
            head.insert(member.after);
        }
    }

    /// The one to try can take no more, until [`Turns::resume`].
    pub(crate) fn suspend_next(&mut self) {
        if let Some(next) = self.next() {
            self.suspend(next);
        }
    }

    /// This one can take no more, until [`Turns::resume`].
    pub(crate) fn suspend(&mut self, consumer: ConsumerId) {
        let number = self.next_number();
        let Some(member) = self.consumers.get(&consumer) else { return };
        if let Place::Ready = member.place {
            let channel = member.turn.channel;
            self.take_out(consumer);
            self.suspended.insert((channel, number), consumer);
            if let Some(member) = self.consumers.get_mut(&consumer) {
                member.place = Place::Suspended(number);
            }
        }
    }

    /// This one can take messages again.
    pub(crate) fn resume(&mut self, consumer: ConsumerId) {
        if let Some(Member { place: Place::Suspended(_), .. }) = self.consumers.get(&consumer) {
            self.take_out(consumer);
            self.line_up(consumer);
        }
    }

    /// Those of a channel for which `can` says so can take messages again.
    pub(crate) fn resume_of(
        &mut self,
        channel: ChannelId,
        mut can: impl FnMut(ConsumerId) -> bool,
    ) {
        let of_channel = (channel, 0)..=(channel, u64::MAX);
        let again: Vec<_> = self.suspended.range(of_channel).map(|(_, id)| *id).collect();
        for consumer in again {
            if can(consumer) {
                self.resume(consumer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use slotmap::SlotMap;

    use super::*;

    fn consumers(count: usize) -> Vec<ConsumerId> {
        let mut map: SlotMap<ConsumerId, ()> = SlotMap::with_key();
        (0..count).map(|_| map.insert(())).collect()
    }

    fn turn(consumer: ConsumerId, priority: i64) -> Turn {
        Turn { consumer, channel: ChannelId::default(), priority, prefetch: 0 }
    }

    fn serve(turns: &mut Turns, count: usize) -> Vec<ConsumerId> {
        let mut served = Vec::new();
        for _ in 0..count {
            served.extend(turns.next());
            turns.served();
        }
        served
    }

    #[test]
    fn equals_take_turns_and_higher_priorities_come_first() {
        let ids = consumers(4);
        let mut turns = Turns::new(Sharing::Competing);
        for (id, priority) in ids.iter().zip([0, 0, 5, 5]) {
            turns.add(turn(*id, priority));
        }
        assert_eq!(serve(&mut turns, 4), [ids[2], ids[3], ids[2], ids[3]]);
        turns.suspend_next();
        turns.suspend_next();
        assert_eq!(serve(&mut turns, 3), [ids[0], ids[1], ids[0]]);
        turns.resume_of(ChannelId::default(), |one| one == ids[3]);
        assert_eq!(serve(&mut turns, 2), [ids[3], ids[3]]);
    }

    #[test]
    fn a_single_active_consumer_is_followed_by_the_next() {
        let ids = consumers(3);
        let mut turns = Turns::new(Sharing::OneAsTheyCame);
        for id in &ids {
            turns.add(turn(*id, 0));
        }
        assert_eq!(serve(&mut turns, 2), [ids[0], ids[0]]);
        turns.suspend_next();
        assert_eq!(turns.next(), None);
        turns.resume_of(ChannelId::default(), |one| one == ids[1]);
        assert_eq!(turns.next(), None);
        assert!(turns.remove(ids[0]));
        assert_eq!(serve(&mut turns, 2), [ids[1], ids[1]]);
        assert!(!turns.remove(ids[0]));
    }

    #[test]
    fn higher_priorities_follow_first_or_do_not_wait() {
        for (sharing, first, next) in [
            (Sharing::OneAsTheyCame, 0, 1),
            (Sharing::OneByPriority, 0, 2),
            (Sharing::OneOfHighestPriority, 2, 1),
        ] {
            let ids = consumers(3);
            let mut turns = Turns::new(sharing);
            for (id, priority) in ids.iter().zip([0, 1, 2]) {
                turns.add(turn(*id, priority));
                if turns.outranked().is_some() {
                    turns.let_leave(true);
                }
            }
            assert_eq!(turns.active_len(), 1);
            assert_eq!(turns.next(), Some(ids[first]), "{sharing:?}");
            turns.remove(ids[first]);
            assert_eq!(turns.next(), Some(ids[next]), "{sharing:?}");
        }
    }

    #[test]
    fn who_has_something_left_to_settle_is_followed_later() {
        let ids = consumers(2);
        let mut turns = Turns::new(Sharing::OneOfHighestPriority);
        turns.add(turn(ids[0], 0));
        turns.add(turn(ids[1], 1));
        assert_eq!(turns.outranked(), Some(ids[0]));
        turns.let_leave(false);
        assert_eq!(turns.next(), None);
        assert_eq!(turns.outranked(), Some(ids[0]));
        turns.let_leave(true);
        assert_eq!((turns.next(), turns.outranked()), (Some(ids[1]), None));
    }

    /// The same with lists, which are gone through: those that are ready, and those that are suspended.
    #[derive(Debug, Default)]
    struct Lists {
        ready: Vec<Turn>,
        suspended: Vec<Turn>,
    }

    impl Lists {
        fn line_up(&mut self, turn: Turn) {
            let at = self.ready.iter().rposition(|one| one.priority >= turn.priority);
            self.ready.insert(at.map_or(0, |at| at + 1), turn);
        }

        fn suspend(&mut self, which: impl Fn(&Turn) -> bool) {
            self.suspended.extend(self.ready.extract_if(.., |turn| which(turn)));
        }

        fn resume(&mut self, which: impl Fn(&Turn) -> bool) {
            let again: Vec<_> = self.suspended.extract_if(.., |turn| which(turn)).collect();
            again.into_iter().for_each(|turn| self.line_up(turn));
        }
    }

    proptest! {
        #[test]
        fn those_that_can_take_messages_are_served_in_turn(
            steps in prop::collection::vec((0..8, 0..10usize), 0..200),
        ) {
            let ids = consumers(10);
            let mut channels: SlotMap<ChannelId, ()> = SlotMap::with_key();
            let channels = [channels.insert(()), channels.insert(())];
            let turn = |of: usize| Turn { channel: channels[of % 2], ..turn(ids[of], of as i64 / 4) };
            let (mut turns, mut lists) = (Turns::new(Sharing::Competing), Lists::default());
            for (step, of) in steps {
                let (id, channel) = (ids[of], channels[of % 2]);
                let is_it = |one: &Turn| one.consumer == id;
                let is_here = lists.ready.iter().chain(&lists.suspended).any(is_it);
                match step {
                    0 if !is_here => {
                        turns.add(turn(of));
                        lists.line_up(turn(of));
                    }
                    1 => {
                        prop_assert_eq!(turns.remove(id), is_here);
                        lists.ready.retain(|one| !is_it(one));
                        lists.suspended.retain(|one| !is_it(one));
                    }
                    2 => {
                        turns.suspend(id);
                        lists.suspend(is_it);
                    }
                    3 => {
                        turns.suspend_next();
                        let next = lists.ready.first().copied();
                        lists.suspend(|one| Some(*one) == next);
                    }
                    4 => {
                        turns.resume(id);
                        lists.resume(is_it);
                    }
                    5 => {
                        turns.resume_of(channel, |one| one != id);
                        lists.resume(|one| one.channel == channel && !is_it(one));
                    }
                    _ if !lists.ready.is_empty() => {
                        turns.served();
                        let served = lists.ready.remove(0);
                        lists.line_up(served);
                    }
                    _ => {}
                }
                prop_assert_eq!(turns.next(), lists.ready.first().map(|one| one.consumer));
                prop_assert_eq!(turns.len(), lists.ready.len() + lists.suspended.len());
            }
        }
    }
}
