//! What is noted of messages, if anything is.

use super::settling::Return;
use super::{QueueId, Vhost};
use crate::events::{Discarded, Settled, What};
use crate::message::Message;
use crate::queue::Entry;

impl From<Return> for Settled {
    fn from(how: Return) -> Self {
        match how {
            Return::Nacked | Return::Rejected => Settled::Requeued,
            Return::Abandoned => Settled::Abandoned,
            Return::TimedOut => Settled::TimedOut,
        }
    }
}

impl Vhost {
    /// Notes something, which is made up only if it is wanted.
    #[inline]
    pub(super) fn note(&self, message: &Message, what: impl FnOnce(&Vhost) -> What) {
        if let Some(record) = &self.record {
            record.note(&self.name, self.now, message, what(self));
        }
    }

    pub(super) fn note_settled(&self, queue: QueueId, message: &Message, how: Settled) {
        self.note(message, |vhost| What::Settled { queue: vhost.queue_name(queue), how });
    }

    pub(super) fn note_discarded(&self, queue: &str, entries: &[Entry], why: Discarded) {
        for entry in entries {
            self.note(&entry.message, |_| What::Discarded { queue: queue.to_owned(), why });
        }
    }

    /// The name of a queue; empty if it is gone.
    pub(super) fn queue_name(&self, queue: QueueId) -> String {
        self.queues.get(queue).map(|found| found.name.to_string()).unwrap_or_default()
    }

    /// The names of those queues that are there, sorted.
    pub(super) fn queue_names_of(&self, queues: &[QueueId]) -> Vec<String> {
        let there = queues.iter().filter_map(|queue| self.queues.get(*queue));
        let mut names: Vec<_> = there.map(|queue| queue.name.to_string()).collect();
        names.sort();
        names
    }
}
