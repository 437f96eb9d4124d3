//! The end of channels: whose consumers end when, and what of theirs goes back where.

use std::cmp::Reverse;

use super::channel::{Mode, Unsettled};
use super::{ChannelId, ConsumerId, QueueId, Vhost};
use crate::profile::Profile;

impl Vhost {
    /// A client closes a channel: what it had goes back to the queues, and its consumers end.
    pub(crate) fn close_channel(&mut self, id: ChannelId) {
        self.close_channels(&[id]);
    }

    /// A channel costs its client the connection. The classic queues that it consumed from know first; when the others do, the
    /// client gets nothing any more, even if another channel of it is next in line.
    pub(crate) fn fail_channel(&mut self, id: ChannelId) {
        self.silence(&[id]);
        for queue in self.classic_queues_of(&[id]) {
            self.leave(&[id], Some(queue));
        }
        let connection = self.channels.get(id).map(|channel| channel.connection);
        let connection = connection.and_then(|id| self.connections.get(id));
        self.silence(&connection.map(|one| one.channels.clone()).unwrap_or_default());
        self.close_channels(&[id]);
    }

    /// Channels end with their connection.
    pub(super) fn end_channels(&mut self, ids: &[ChannelId]) {
        self.silence(ids);
        self.close_channels(ids);
    }

    /// Nothing more is sent on these channels, and nothing will be committed.
    fn silence(&mut self, ids: &[ChannelId]) {
        for id in ids {
            if let Some(channel) = self.channels.get_mut(*id) {
                channel.silent = true;
                channel.forget_settlements();
            }
        }
    }

    /// Channels are gone. Classic queues that they consumed from are told one after the other, the newest first, so that what
    /// dies in one of them may still reach a consumer of theirs in the next. All others find out later.
    fn close_channels(&mut self, ids: &[ChannelId]) {
        for id in ids {
            if let Some(channel) = self.channels.get_mut(*id) {
                channel.forget_settlements();
            }
        }
        let queues = self.classic_queues_of(ids);
        // It takes its time, and who is told when makes no difference unless something dies.
        if queues.iter().any(|id| self.dead_letters(*id)) {
            for queue in queues {
                self.leave(ids, Some(queue));
            }
        }
        self.leave(ids, None);
        for id in ids {
            self.remove_channel(*id);
        }
    }

    fn consumers_of(&self, ids: &[ChannelId]) -> impl Iterator<Item = ConsumerId> {
        let channels = ids.iter().filter_map(|id| self.channels.get(*id));
        channels.flat_map(|channel| channel.consumers.values().copied())
    }

    fn classic_queues_of(&self, ids: &[ChannelId]) -> Vec<QueueId> {
        let consumers = self.consumers_of(ids).filter_map(|id| self.consumers.get(id));
        let mut queues: Vec<_> = consumers.filter(|one| !one.quorum).map(|one| one.queue).collect();
        queues.sort_by_key(|id| Reverse(self.queues.get(*id).map(|queue| queue.number)));
        queues.dedup();
        queues
    }

    fn dead_letters(&self, id: QueueId) -> bool {
        self.queues.get(id).is_some_and(|queue| queue.arguments.dead_letter_exchange.is_some())
    }

    /// Ends what channels have to do with a queue, or with all of them.
    fn leave(&mut self, ids: &[ChannelId], of: Option<QueueId>) {
        let is_of = |queue: QueueId| of.is_none_or(|of| of == queue);
        let mut unsettled = Vec::new();
        for id in ids {
            if let Some(channel) = self.channels.get_mut(*id) {
                unsettled.push(channel.take_unsettled_of(is_of));
            }
        }
        for deliveries in &mut unsettled {
            self.put_into_order(deliveries);
        }
        // First the consumers: what goes back is not for them.
        let consumers: Vec<_> = self.consumers_of(ids).collect();
        let mut left = Vec::new();
        for id in consumers {
            if self.consumers.get(id).is_some_and(|one| is_of(one.queue)) {
                left.extend(self.leave_queue(id));
            }
        }
        left.sort_unstable();
        left.dedup();
        for queue in &left {
            self.delete_if_left(*queue);
        }
        for deliveries in unsettled {
            self.put_back(deliveries);
        }
        for queue in left {
            self.hand_over(queue);
            self.deliver_ready(queue);
        }
    }

    fn leave_queue(&mut self, id: ConsumerId) -> Option<QueueId> {
        let consumer = self.consumers.get(id)?;
        if let Some(channel) = self.channels.get_mut(consumer.channel) {
            channel.consumers.remove(&consumer.tag);
        }
        self.remove_consumer(id)
    }

    /// The order in which quorum queues take deliveries back. Classic ones have an order of their own.
    fn put_into_order(&self, deliveries: &mut [Unsettled]) {
        match self.profile {
            Profile::RabbitMq3_10 => {
                deliveries.sort_by(|a, b| self.by_tag(a).cmp(&self.by_tag(b)));
            }
            Profile::RabbitMq4_3 => {
                let number = |id| self.consumers.get(id).map_or(0, |one| one.number);
                deliveries.sort_by_key(|one| (one.consumer.is_none(), one.consumer.map(number)));
            }
        }
    }

    fn remove_channel(&mut self, id: ChannelId) {
        self.flush_confirms(id);
        let Some(channel) = self.channels.remove(id) else { return };
        if let Some(replies) = channel.replies {
            self.askers.remove(&replies.address);
        }
        if let Mode::Transaction(transaction) = channel.mode {
            self.memory -= transaction.size();
        }
        if let Some(found) = self.connections.get_mut(channel.connection) {
            found.channels.retain(|one| *one != id);
        }
    }
}
