//! Whose turn it is among the consumers of a queue.

use std::collections::VecDeque;

use crate::vhost::ConsumerId;

/// The consumers of a queue: all of them as they came, and in turn those that can take a message, as far as is known.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    all: Vec<Turn>,
    /// Higher priorities first, and the one that had nothing for the longest time first among equals.
    ready: VecDeque<Turn>,
    single_active: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turn {
    consumer: ConsumerId,
    priority: i64,
}

impl Turns {
    /// With `single_active`, the first consumer alone gets messages, until it is gone.
    pub(crate) fn new(single_active: bool) -> Self {
        Turns { single_active, ..Turns::default() }
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = ConsumerId> + '_ {
        self.all.iter().map(|one| one.consumer)
    }

    pub(crate) fn add(&mut self, consumer: ConsumerId, priority: i64) {
        let turn = Turn { consumer, priority };
        self.all.push(turn);
        if !self.single_active || self.all.len() == 1 {
            self.line_up(turn);
        }
    }

    fn line_up(&mut self, turn: Turn) {
        let at = self.ready.iter().rposition(|one| one.priority >= turn.priority);
        self.ready.insert(at.map_or(0, |at| at + 1), turn);
    }

    /// Says whether it was here.
    pub(crate) fn remove(&mut self, consumer: ConsumerId) -> bool {
        self.ready.retain(|one| one.consumer != consumer);
        let Some(at) = self.all.iter().position(|one| one.consumer == consumer) else {
            return false;
        };
        self.all.remove(at);
        if self.single_active && at == 0 {
            // The next one takes over.
            if let Some(next) = self.all.first().copied()
                && !self.ready.contains(&next)
            {
                self.line_up(next);
            }
        }
        true
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

    /// It can take no more, until [`Turns::resume`].
    pub(crate) fn suspend(&mut self) {
        self.ready.pop_front();
    }

    /// It can take messages again.
    pub(crate) fn resume(&mut self, consumer: ConsumerId) {
        let Some(at) = self.all.iter().position(|one| one.consumer == consumer) else { return };
        let turn = self.all[at];
        if (!self.single_active || at == 0) && !self.ready.contains(&turn) {
            self.line_up(turn);
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
        let mut turns = Turns::new(false);
        for (id, priority) in ids.iter().zip([0, 0, 5, 5]) {
            turns.add(*id, priority);
        }
        assert_eq!(serve(&mut turns, 4), [ids[2], ids[3], ids[2], ids[3]]);
        turns.suspend();
        turns.suspend();
        assert_eq!(serve(&mut turns, 3), [ids[0], ids[1], ids[0]]);
        turns.resume(ids[3]);
        assert_eq!(serve(&mut turns, 2), [ids[3], ids[3]]);
    }

    #[test]
    fn a_single_active_consumer_is_followed_by_the_next() {
        let ids = consumers(3);
        let mut turns = Turns::new(true);
        for id in &ids {
            turns.add(*id, 0);
        }
        assert_eq!(serve(&mut turns, 2), [ids[0], ids[0]]);
        turns.suspend();
        assert_eq!(turns.next(), None);
        turns.resume(ids[1]);
        assert_eq!(turns.next(), None);
        assert!(turns.remove(ids[0]));
        assert_eq!(serve(&mut turns, 2), [ids[1], ids[1]]);
        assert!(!turns.remove(ids[0]));
    }
}
