//! The end of channels: whose consumers end when, and what of theirs goes back where.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use foldhash::HashMap;

use super::channel::{Mode, Unsettled};
use super::{ChannelId, ConsumerId, QueueId, Vhost};
use crate::profile::Profile;

/// What channels have to do with a queue, or with all of them.
#[derive(Debug, Default)]
struct Part {
    consumers: Vec<ConsumerId>,
    /// What is not settled, by the place of its channel among those that end.
    unsettled: BTreeMap<usize, Vec<Unsettled>>,
}

impl Part {
    fn of_channel(&mut self, at: usize) -> &mut Vec<Unsettled> {
        self.unsettled.entry(at).or_default()
    }
}

impl Vhost {
    /// A client closes a channel: what it had goes back to the queues, and its consumers end.
    pub(crate) fn close_channel(&mut self, id: ChannelId) {
        self.close_channels(&[id]);
    }

    /// A channel costs its client the connection. The classic queues that it consumed from know first; when the others do, the
    /// client gets nothing any more, even if another channel of it is next in line.
    pub(crate) fn fail_channel(&mut self, id: ChannelId) {
        self.silence(&[id]);
        self.leave_in_turn(&[id], self.classic_queues_of(&[id]));
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
            self.leave_in_turn(ids, queues);
        }
        self.leave_all(ids);
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

    /// Ends what channels have to do with these queues, one after the other.
    fn leave_in_turn(&mut self, ids: &[ChannelId], queues: Vec<QueueId>) {
        // What there is, is looked through once, and for each queue only what came since: there may be many of both.
        let mut parts: HashMap<QueueId, Part> =
            queues.iter().map(|queue| (*queue, Part::default())).collect();
        let mut last_tags = Vec::new();
        for (at, id) in ids.iter().enumerate() {
            let channel = self.channels.get_mut(*id);
            last_tags.push(channel.as_ref().map_or(0, |channel| channel.last_tag));
            let unsettled =
                channel.map(|one| one.take_unsettled_of(0, |queue| parts.contains_key(&queue)));
            for delivery in unsettled.unwrap_or_default() {
                if let Some(part) = parts.get_mut(&delivery.queue) {
                    part.of_channel(at).push(delivery);
                }
            }
        }
        for id in self.consumers_of(ids) {
            let queue = self.consumers.get(id).map(|consumer| consumer.queue);
            if let Some(part) = queue.and_then(|queue| parts.get_mut(&queue)) {
                part.consumers.push(id);
            }
        }
        for queue in queues {
            let mut part = parts.remove(&queue).unwrap_or_default();
            for (at, (id, last)) in ids.iter().zip(&last_tags).enumerate() {
                let channel = self.channels.get_mut(*id);
                if let Some(channel) = channel.filter(|channel| channel.last_tag > *last) {
                    let newer = channel.take_unsettled_of(*last, |of| of == queue);
                    part.of_channel(at).extend(newer);
                }
            }
            self.leave(part);
        }
    }

    /// Ends what channels have to do with all queues.
    fn leave_all(&mut self, ids: &[ChannelId]) {
        let mut part = Part { consumers: self.consumers_of(ids).collect(), ..Part::default() };
        for (at, id) in ids.iter().enumerate() {
            if let Some(channel) = self.channels.get_mut(*id) {
                part.of_channel(at).extend(channel.take_unsettled_of(0, |_| true));
            }
        }
        self.leave(part);
    }

    fn leave(&mut self, part: Part) {
        let Part { consumers, mut unsettled } = part;
        for deliveries in unsettled.values_mut() {
            self.put_into_order(deliveries);
        }
        // First the consumers: what goes back is not for them.
        let mut left: Vec<_> =
            consumers.into_iter().filter_map(|id| self.leave_queue(id)).collect();
        left.sort_unstable();
        left.dedup();
        for queue in &left {
            self.delete_if_left(*queue);
        }
        for deliveries in unsettled.into_values() {
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
