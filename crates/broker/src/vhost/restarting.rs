//! What survives a restart.

use super::Vhost;
use crate::events::Discarded;

impl Vhost {
    /// As after a restart: durable objects are there, and persistent messages in durable queues; everything else is
    /// gone. All connections must have gone before.
    pub(crate) fn restart(&mut self) {
        let transient = self.queues.iter().filter(|(_, queue)| !queue.durable);
        for queue in transient.map(|(id, _)| id).collect::<Vec<_>>() {
            self.remove_queue(queue);
        }
        let transient = self.exchanges.iter().filter(|(_, exchange)| !exchange.durable);
        for exchange in transient.map(|(id, _)| id).collect::<Vec<_>>() {
            self.remove_exchange(exchange);
        }
        for id in self.queues.keys().collect::<Vec<_>>() {
            let queue = &mut self.queues[id];
            // What is in a quorum queue is on disk, whatever its publisher thought of it.
            let keep_all = queue.arguments.is_quorum();
            let lost = queue.ready.take_unless(|one| keep_all || one.message.is_persistent());
            self.note_discarded(&self.queue_name(id), &lost, Discarded::Restarted);
            self.tally.discarded += lost.len() as u64;
            self.memory -= lost.iter().map(|entry| entry.message.size()).sum::<usize>();
        }
    }
}
