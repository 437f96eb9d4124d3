//! What happens by itself when its time has come.

use std::cmp::Reverse;

use super::{QueueId, Vhost};
use crate::death::Reason;
use crate::queue::Queue;
use crate::time::Moment;

/// What a deadline is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Deadline {
    /// A message at the front of a queue dies.
    Message(QueueId),
    /// A queue was not used for as long as it lives without.
    Unused(QueueId),
    /// An answer was held back for long enough.
    Reply(u64),
    /// There were more dead letters than one call sends on.
    Burial,
    /// There are dead letters that did not get everywhere.
    Retry,
    /// Somebody has kept a delivery for too long.
    Deliveries,
}

/// From how many deadlines on those are looked for that nothing is there for any more.
const SWEEP_FROM: usize = 1024;

impl Vhost {
    /// When [`Vhost::meet_deadlines`] is to be called next.
    pub(crate) fn next_deadline(&self) -> Moment {
        self.deadlines.peek().map_or(Moment::NEVER, |Reverse((moment, _))| *moment)
    }

    pub(super) fn set_deadline(&mut self, moment: Moment, deadline: Deadline) {
        if moment < Moment::NEVER {
            self.deadlines.push(Reverse((moment, deadline)));
            if self.deadlines.len() > self.sweep_above {
                self.sweep_deadlines();
            }
        }
    }

    /// Forgets the deadlines of queues that are gone, or have an earlier one: clients decide how many there are, and when they
    /// are due.
    #[cold]
    fn sweep_deadlines(&mut self) {
        let queues = &self.queues;
        self.deadlines.retain(|Reverse((moment, deadline))| match deadline {
            Deadline::Message(id) => queues.get(*id).is_some_and(|one| one.next_look == *moment),
            Deadline::Unused(id) => queues.contains_key(*id),
            _ => true,
        });
        self.sweep_above = SWEEP_FROM.max(2 * self.deadlines.len());
        self.deadlines.shrink_to(self.sweep_above);
    }

    /// Does what is due.
    pub(crate) fn meet_deadlines(&mut self) {
        while self.next_deadline() <= self.now {
            let Some(Reverse((_, deadline))) = self.deadlines.pop() else { return };
            match deadline {
                Deadline::Message(queue) => {
                    if let Some(found) = self.queues.get_mut(queue) {
                        found.next_look = Moment::NEVER;
                    }
                    self.expire(queue);
                    self.bury();
                }
                Deadline::Unused(queue) => self.delete_if_unused(queue),
                Deadline::Burial => self.go_on_burying(),
                Deadline::Retry => self.retry_burials(),
                Deadline::Deliveries => self.time_out_deliveries(),
                Deadline::Reply(number) => {
                    if let Some((channel, method)) = self.late.remove(&number) {
                        self.reply(channel, &method);
                    }
                }
            }
        }
    }

    /// Takes out the messages of a queue whose time is up, and sees to it that the next ones are taken out in time.
    pub(super) fn expire(&mut self, id: QueueId) {
        let now = self.now;
        while let Some(dead) = self.queues.get_mut(id).and_then(|one| one.ready.pop_expired(now)) {
            self.die(id, dead, Reason::Expired);
        }
        self.look_after(id);
    }

    /// The same, as far as a queue would look by itself by now. A classic queue does not unless it asked to be looked after:
    /// what it then finds due is still alive.
    pub(super) fn expire_in_time(&mut self, id: QueueId) {
        let now = self.now;
        let looks = |one: &Queue| one.arguments.is_quorum() || one.next_look <= now;
        if self.queues.get(id).is_some_and(looks) {
            self.expire(id);
        }
    }

    /// Messages have left a queue: sees to it that the next one to die does so in time, and that publishers know of the room.
    #[inline]
    pub(super) fn look_after(&mut self, id: QueueId) {
        let Some(queue) = self.queues.get_mut(id) else { return };
        queue.tell_publishers();
        let next = queue.ready.next_expiry();
        if next < queue.next_look {
            queue.next_look = next;
            self.set_deadline(next, Deadline::Message(id));
        }
    }

    /// A queue was used: it lives for another while.
    pub(super) fn used(&mut self, id: QueueId) {
        let now = self.now;
        let Some(queue) = self.queues.get_mut(id) else { return };
        let first = queue.last_used == Moment::NEVER;
        queue.last_used = now;
        if let Some(expires) = queue.arguments.expires
            && first
        {
            self.set_deadline(now.after_millis(expires), Deadline::Unused(id));
        }
    }

    fn delete_if_unused(&mut self, id: QueueId) {
        let now = self.now;
        let Some(queue) = self.queues.get_mut(id) else { return };
        let Some(expires) = queue.arguments.expires else { return };
        let end = queue.last_used.after_millis(expires);
        if queue.consumer_count() > 0 {
            // In use for as long as it has consumers; it is looked after again when the last has gone.
            queue.last_used = Moment::NEVER;
        } else if end <= now {
            self.remove_queue(id);
        } else {
            self.set_deadline(end, Deadline::Unused(id));
        }
    }
}
