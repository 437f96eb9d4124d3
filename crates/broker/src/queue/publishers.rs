//! The publishers of a quorum queue that refuses messages: it tells them to stop when it is full, and to go on when there is
//! room again. Until then they publish, whether it is full or not.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use crate::vhost::{ChannelId, QueueId};

/// Who publishes and wants to know what becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Publisher {
    Client(ChannelId),
    /// A queue that keeps its dead letters until they have arrived.
    DeadLetters(QueueId),
}

/// How full a queue is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// At most four fifths of what it may have.
    Low,
    High,
    /// More than it may have.
    Full,
}

#[derive(Debug)]
pub(crate) struct Publishers {
    /// Whether they were told to stop.
    stopped: HashMap<Publisher, bool, RandomState>,
    level: Level,
}

impl Publishers {
    pub(crate) fn new() -> Self {
        Publishers { stopped: HashMap::default(), level: Level::Low }
    }

    /// Whether a publisher was told to stop. A new one is, if the queue is full.
    pub(crate) fn is_stopped(&mut self, publisher: Publisher) -> bool {
        let full = self.level == Level::Full;
        *self.stopped.entry(publisher).or_insert(full)
    }

    pub(crate) fn knows(&self, publisher: Publisher) -> bool {
        self.stopped.contains_key(&publisher)
    }

    /// Forgets those that are gone.
    pub(crate) fn retain(&mut self, is_there: impl Fn(Publisher) -> bool) {
        self.stopped.retain(|publisher, _| is_there(*publisher));
    }

    /// The queue has so much now.
    pub(crate) fn tell(&mut self, level: Level) {
        let before = std::mem::replace(&mut self.level, level);
        match (before, level) {
            (_, Level::Full) => self.stopped.values_mut().for_each(|stopped| *stopped = true),
            (Level::High | Level::Full, Level::Low) => {
                self.stopped.values_mut().for_each(|stopped| *stopped = false);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use slotmap::SlotMap;

    use super::*;

    #[test]
    fn who_was_stopped_goes_on_when_there_is_plenty_of_room() {
        let mut channels: SlotMap<ChannelId, ()> = SlotMap::with_key();
        let mut publisher = || Publisher::Client(channels.insert(()));
        let (one, other) = (publisher(), publisher());
        let mut publishers = Publishers::new();
        assert!(!publishers.is_stopped(one));
        publishers.tell(Level::High);
        assert!(!publishers.is_stopped(one));
        publishers.tell(Level::Full);
        publishers.tell(Level::High);
        assert!(publishers.is_stopped(one));
        assert!(!publishers.is_stopped(other));
        publishers.tell(Level::Low);
        assert!(!publishers.is_stopped(one));
        publishers.tell(Level::Full);
        publishers.retain(|publisher| publisher == one);
        assert!(publishers.is_stopped(one) && !publishers.knows(other));
        assert!(publishers.is_stopped(other));
    }
}
