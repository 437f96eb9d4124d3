//! Whose turn it is among the consumers of a queue.

use std::collections::VecDeque;

use crate::vhost::ConsumerId;

/// The consumers of a queue: all of them as they came, and in turn those that can take a message, as far as is known.
#[derive(Debug)]
pub(crate) struct Turns {
    sharing: Sharing,
    all: Vec<Turn>,
    /// Higher priorities first, and the one that had nothing for the longest time first among equals.
    ready: VecDeque<Turn>,
    /// Those that can take no more, in the order in which that was found.
    suspended: Vec<Turn>,
    /// The one that alone gets messages, unless all do.
    active: Option<Turn>,
    /// The active one gets no more: another is to follow it as soon as it has settled what it has.
    leaving: bool,
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
    pub(crate) priority: i64,
    /// How many messages it may have at a time.
    pub(crate) prefetch: u16,
}

impl Turns {
    pub(crate) fn new(sharing: Sharing) -> Self {
        Turns {
            sharing,
            all: Vec::new(),
            ready: VecDeque::new(),
            suspended: Vec::new(),
            active: None,
            leaving: false,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// How many do not merely wait until another is gone.
    pub(crate) fn active_len(&self) -> usize {
        match self.sharing {
            Sharing::Competing => self.all.len(),
            _ => usize::from(self.active.is_some()),
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = ConsumerId> + '_ {
        self.all.iter().map(|one| one.consumer)
    }

    pub(crate) fn add(&mut self, turn: Turn) {
        self.all.push(turn);
        match self.sharing {
            Sharing::Competing => self.line_up(turn),
            _ if self.active.is_none() => self.activate_next(),
            _ => {}
        }
    }

    fn line_up(&mut self, turn: Turn) {
        let at = self.ready.iter().rposition(|one| one.priority >= turn.priority);
        self.ready.insert(at.map_or(0, |at| at + 1), turn);
    }

    /// Says whether it was here.
    pub(crate) fn remove(&mut self, consumer: ConsumerId) -> bool {
        let count = self.all.len();
        self.all.retain(|one| one.consumer != consumer);
        self.ready.retain(|one| one.consumer != consumer);
        self.suspended.retain(|one| one.consumer != consumer);
        if self.active.is_some_and(|active| active.consumer == consumer) {
            self.activate_next();
        }
        self.all.len() < count
    }

    /// Whoever is to follow does.
    fn activate_next(&mut self) {
        self.leaving = false;
        self.active = self.follower();
        if let Some(turn) = self.active {
            self.line_up(turn);
        }
    }

    fn follower(&self) -> Option<Turn> {
        let first = |rank: fn(&Turn) -> (i64, u16)| {
            let best = self.all.iter().map(rank).max()?;
            self.all.iter().find(|one| rank(one) == best).copied()
        };
        match self.sharing {
            Sharing::Competing => None,
            Sharing::OneAsTheyCame => self.all.first().copied(),
            Sharing::OneByPriority => first(|one| (one.priority, 0)),
            // 0 is no limit.
            Sharing::OneOfHighestPriority => {
                first(|one| (one.priority, one.prefetch.wrapping_sub(1)))
            }
        }
    }

    /// The active one, if another is to follow it even though it is not gone.
    pub(crate) fn outranked(&self) -> Option<ConsumerId> {
        let active = self.active.filter(|_| self.sharing == Sharing::OneOfHighestPriority)?;
        let outranked = |other: Turn| other.priority > active.priority;
        (self.leaving || self.follower().is_some_and(outranked)).then_some(active.consumer)
    }

    /// The active one gets no more, and is followed once it has nothing left to settle.
    pub(crate) fn let_leave(&mut self, nothing_left: bool) {
        self.ready.clear();
        self.suspended.clear();
        self.leaving = true;
        if nothing_left {
            self.activate_next();
        }
    }

    /// The one to try.
    #[inline]
    pub(crate) fn next(&self) -> Option<ConsumerId> {
        self.ready.front().map(|one| one.consumer)
    }

    /// It got a message: the others of its priority come before it now.
    #[inline]
    pub(crate) fn served(&mut self) {
        if self.ready.len() > 1
            && let Some(turn) = self.ready.pop_front()
        {
            self.line_up(turn);
        }
    }

    /// The one to try can take no more, until [`Turns::resume`].
    pub(crate) fn suspend_next(&mut self) {
        self.suspended.extend(self.ready.pop_front());
    }

    /// This one can take no more, until [`Turns::resume`].
    pub(crate) fn suspend(&mut self, consumer: ConsumerId) {
        if let Some(at) = self.ready.iter().position(|one| one.consumer == consumer) {
            self.suspended.extend(self.ready.remove(at));
        }
    }

    /// Those for which `can` says so can take messages again.
    pub(crate) fn resume(&mut self, mut can: impl FnMut(ConsumerId) -> bool) {
        let mut at = 0;
        while let Some(turn) = self.suspended.get(at).copied() {
            if can(turn.consumer) {
                self.suspended.remove(at);
                self.line_up(turn);
            } else {
                at += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use slotmap::SlotMap;

    use super::*;

    fn consumers(count: usize) -> Vec<ConsumerId> {
        let mut map: SlotMap<ConsumerId, ()> = SlotMap::with_key();
        (0..count).map(|_| map.insert(())).collect()
    }

    fn turn(consumer: ConsumerId, priority: i64) -> Turn {
        Turn { consumer, priority, prefetch: 0 }
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
        turns.resume(|one| one == ids[3]);
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
        turns.resume(|one| one == ids[1]);
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
}
