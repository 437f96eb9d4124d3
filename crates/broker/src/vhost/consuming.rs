//! From queues to consumers: consume, cancel, get, prefetch, and whose turn it is.

use std::sync::Arc;

use leveret_wire::method::basic;
use leveret_wire::{EncodedProperties, ShortStr};

use super::channel::{Channel, Unsettled};
use super::{ChannelId, Consumer, ConsumerId, QueueId, Vhost};
use crate::arguments::{ConsumerArguments, check_prefetch_for_all, words};
use crate::events::What;
use crate::outlet::Room;
use crate::queue::{Entry, Turn, Way, counted};
use crate::refusal::Refusal;
use crate::users::Right;

impl Vhost {
    pub(super) fn qos(&mut self, channel: ChannelId, qos: &basic::Qos) -> Result<(), Refusal> {
        if qos.prefetch_size != 0 {
            return Err(words::prefetch_size(qos.prefetch_size));
        }
        let Some(found) = self.channels.get_mut(channel) else { return Ok(()) };
        // 4.3 takes the one for the other, and in 3.10 a limit for each lifts that for all.
        let for_all = qos.global && !self.profile.is_at_least_4();
        if !for_all {
            found.prefetch = qos.prefetch_count;
        }
        let more = found.limit_all(if for_all { qos.prefetch_count } else { 0 });
        self.reply(channel, &basic::QosOk {});
        if more {
            self.resume_channel(channel);
        }
        Ok(())
    }

    pub(super) fn consume(
        &mut self,
        channel: ChannelId,
        consume: &basic::Consume<'_>,
    ) -> Result<(), Refusal> {
        if let Some(done) = self.consume_replies(channel, consume) {
            return done;
        }
        let name = self.named_queue(channel, &consume.queue)?;
        let tag = self.new_consumer_tag(channel, &consume.consumer_tag)?;
        self.check_access(channel, Right::Read, "queue", &name)?;
        let queue = self.usable_queue(channel, &name)?;
        let found = &mut self.queues[queue];
        let (profile, vhost, of) = (self.profile, self.name.as_str(), &found.arguments);
        let arguments = ConsumerArguments::parse(profile, vhost, &name, of, &consume.arguments)?;
        if self.channels.get(channel).is_some_and(|on| on.prefetch_for_all.is_set()) {
            check_prefetch_for_all(profile, vhost, &name, of)?;
        }
        // A quorum queue does not know what that is; where a single consumer is active, none can be alone.
        let exclusive = consume.exclusive && !of.is_quorum();
        let shared = !found.turns.is_empty() || of.single_active_consumer;
        if found.exclusive_consumer.is_some() || (exclusive && shared) {
            return Err(words::exclusive_use(&self.name, &name));
        }
        let patience = self.patience(&self.queues[queue].arguments, arguments.consumer_timeout);
        let consumer = self.new_consumer(channel, queue, &tag, consume.no_ack, patience);
        let Some(prefetch) = self.consumers.get(consumer).map(|one| one.prefetch) else {
            return Ok(());
        };
        let found = &mut self.queues[queue];
        found.exclusive_consumer = exclusive.then_some(consumer);
        found.had_consumer = true;
        found.turns.add(Turn { consumer, channel, priority: arguments.priority, prefetch });
        if !consume.nowait {
            self.reply(channel, &basic::ConsumeOk { consumer_tag: tag });
        }
        self.hand_over(queue);
        self.deliver_ready(queue);
        Ok(())
    }

    /// A consumer, or one that was cancelled and is there again: what it has not settled of before is still its own.
    fn new_consumer(
        &mut self,
        channel: ChannelId,
        queue: QueueId,
        tag: &ShortStr<'static>,
        auto_ack: bool,
        patience: u64,
    ) -> ConsumerId {
        let number = self.consumers_made;
        self.consumers_made += 1;
        let quorum = self.queues[queue].arguments.is_quorum();
        let Some(on) = self.channels.get_mut(channel) else { return ConsumerId::default() };
        let prefetch = on.prefetch;
        let earlier = on.lingering.get(tag).copied();
        let earlier = earlier.and_then(|id| Some((id, self.consumers.get_mut(id)?)));
        if let Some((id, earlier)) = earlier
            && (earlier.queue, earlier.overdue) == (queue, 0)
        {
            on.lingering.remove(tag);
            on.consumers.insert(tag.clone(), id);
            earlier.counted = if quorum { earlier.unsettled as i64 } else { 0 };
            (earlier.cancelled, earlier.auto_ack, earlier.prefetch) = (false, auto_ack, prefetch);
            earlier.patience = patience;
            self.queues[queue].lingering -= 1;
            return id;
        }
        let consumer = self.consumers.insert(Consumer {
            channel,
            queue,
            tag: tag.clone(),
            auto_ack,
            prefetch,
            counted: 0,
            unsettled: 0,
            patience,
            overdue: 0,
            suspended: false,
            cancelled: false,
            quorum,
            number,
        });
        on.consumers.insert(tag.clone(), consumer);
        consumer
    }

    /// The tag of a new consumer. That of the channel's consumer of direct replies is not taken by it.
    pub(super) fn new_consumer_tag(
        &mut self,
        channel: ChannelId,
        wanted: &ShortStr<'_>,
    ) -> Result<ShortStr<'static>, Refusal> {
        if wanted.is_empty() {
            return Ok(self.make_name("amq.ctag-"));
        }
        let found = self.channels.get(channel);
        if found.is_some_and(|found| found.consumers.contains_key(wanted.as_bytes())) {
            return Err(words::tag_in_use(wanted));
        }
        Ok(wanted.borrowed().into_owned())
    }

    pub(super) fn cancel(&mut self, channel: ChannelId, cancel: &basic::Cancel<'_>) {
        let Some(found) = self.channels.get_mut(channel) else { return };
        let tag = &cancel.consumer_tag;
        let replies = found.replies.take_if(|replies| replies.tag == *tag);
        // One of direct replies hides another of the same tag.
        let consumer = match &replies {
            Some(_) => None,
            None => found.consumers.remove(tag.as_bytes()),
        };
        if let Some(replies) = replies {
            self.askers.remove(&replies.address);
        }
        let left = consumer.and_then(|consumer| self.end_consumer(consumer));
        if !cancel.nowait {
            self.reply(channel, &basic::CancelOk { consumer_tag: tag.borrowed() });
        }
        if let Some(queue) = left {
            self.delete_if_left(queue);
        }
    }

    /// Takes a consumer off its queue, and gives the queue if it was there. What was delivered to it stays with its
    /// channel.
    pub(super) fn end_consumer(&mut self, consumer: ConsumerId) -> Option<QueueId> {
        let queue = self.remove_consumer(consumer)?;
        // It may have been the active one.
        self.hand_over(queue);
        self.deliver_ready(queue);
        Some(queue)
    }

    /// The same, without anybody getting anything because of it.
    pub(super) fn remove_consumer(&mut self, id: ConsumerId) -> Option<QueueId> {
        let consumer = self.consumers.get_mut(id)?;
        let queue = consumer.queue;
        (consumer.cancelled, consumer.suspended) = (true, false);
        let lingers = consumer.unsettled > 0;
        if lingers && let Some(channel) = self.channels.get_mut(consumer.channel) {
            channel.lingering.insert(consumer.tag.clone(), id);
        }
        if !lingers {
            self.consumers.remove(id);
        }
        let found = self.queues.get_mut(queue)?;
        found.lingering += usize::from(lingers);
        found.turns.remove(id);
        found.exclusive_consumer.take_if(|exclusive| *exclusive == id);
        if found.turns.is_empty() {
            self.used(queue);
        }
        Some(queue)
    }

    /// Of a queue with a single active consumer: another may be to follow it. Says whether it did.
    pub(super) fn hand_over(&mut self, queue: QueueId) -> bool {
        let Some(found) = self.queues.get_mut(queue) else { return false };
        let Some(active) = found.turns.outranked() else { return false };
        let active = self.consumers.get_mut(active);
        let nothing_left = active.as_ref().is_none_or(|one| one.unsettled == 0);
        if let Some(active) = active {
            active.suspended = false;
        }
        found.turns.let_leave(nothing_left);
        nothing_left
    }

    pub(super) fn get(&mut self, channel: ChannelId, get: &basic::Get<'_>) -> Result<(), Refusal> {
        let name = self.named_queue(channel, &get.queue)?;
        self.check_access(channel, Right::Read, "queue", &name)?;
        let id = self.usable_queue(channel, &name)?;
        let arguments = &self.queues[id].arguments;
        if arguments.is_quorum() && arguments.single_active_consumer {
            return Err(words::not_to_get_from(self.profile, &self.name, &name));
        }
        let quorum = arguments.is_quorum();
        self.used(id);
        self.expire_in_time(id);
        let Some(entry) = self.queues[id].ready.pop() else {
            self.bury();
            self.reply(channel, &basic::GetEmpty {});
            return Ok(());
        };
        // Those that come to the front now and are due do not count, unless a quorum queue has not looked yet.
        let before = self.queues[id].ready.len();
        self.expire(id);
        let due = self.now.after_millis(self.patience(&self.queues[id].arguments, None));
        let queue = &mut self.queues[id];
        let counts_all = quorum && !get.no_ack;
        let message_count = if counts_all { before } else { queue.ready.len() } as u32;
        let Some(on) = self.channels.get_mut(channel) else { return Ok(()) };
        let message = &entry.message;
        let got = basic::GetOk {
            delivery_tag: on.next_tag(),
            redelivered: entry.is_redelivered(),
            exchange: message.exchange().borrowed(),
            routing_key: message.routing_key(),
            message_count,
        };
        let counted = quorum.then(|| counted(self.profile, Way::Get, &entry)).flatten();
        let properties =
            counted.as_ref().map_or(message.encoded_properties(), |raw| raw.as_bytes());
        let properties = EncodedProperties::new(properties);
        let (wake, room) = on.outlet.deliver(|outbound, max| {
            outbound.relayed_content(on.number, &got, &properties, message.body(), max)
        });
        if wake {
            self.wakes.push(Arc::clone(&on.outlet));
        }
        self.tally.delivered += 1;
        if let Some(record) = &self.record {
            let what = What::Delivered {
                queue: queue.name.to_string(),
                consumer: None,
                redelivered: got.redelivered,
                auto_ack: get.no_ack,
            };
            record.note(&self.name, self.now, message, what);
        }
        let (connection, size) = (on.connection, message.size());
        if get.no_ack {
            self.tally.delivered_settled += 1;
            self.memory -= size;
        } else {
            queue.unsettled += 1;
            queue.got += 1;
            let (tag, consumer) = (got.delivery_tag, None);
            on.keep(Unsettled { tag, queue: id, consumer, entry, due });
            self.await_settling(due);
        }
        if room == Room::None {
            self.count_unread(connection, size);
        }
        self.bury();
        self.look_after(id);
        Ok(())
    }

    /// A channel may take more than before.
    pub(super) fn resume_channel(&mut self, channel: ChannelId) {
        let Some(found) = self.channels.get(channel) else { return };
        let consumers = found.consumers.values().filter_map(|id| self.consumers.get(*id));
        let mut queues: Vec<_> = consumers.map(|consumer| consumer.queue).collect();
        queues.sort_unstable();
        queues.dedup();
        // RabbitMQ begins with any of them; here the queue after the last one that had its turn does.
        let next = queues.partition_point(|queue| *queue <= found.prefetch_for_all.last_filled);
        let count = queues.len().max(1);
        queues.rotate_left(next % count);
        let mut was_full = false;
        for queue in queues {
            self.resume_in(queue, channel);
            self.deliver_ready(queue);
            let Some(found) = self.channels.get_mut(channel) else { return };
            let is_full = found.prefetch_for_all.is_full();
            if is_full && !was_full {
                found.prefetch_for_all.last_filled = queue;
            }
            was_full = is_full;
        }
    }

    /// A consumer may take more than before. Says whether it had to wait for that.
    pub(super) fn resume(&mut self, id: ConsumerId) -> bool {
        let consumer = self.consumers.get(id).filter(|one| one.suspended);
        let Some(consumer) = consumer else { return false };
        // If its channel or connection has no room, it lines up with the others there as soon as there is some.
        let channel = self.channels.get(consumer.channel);
        if !channel.is_some_and(|channel| self.can_take(consumer, channel)) {
            return false;
        }
        let queue = consumer.queue;
        if let Some(consumer) = self.consumers.get_mut(id) {
            consumer.suspended = false;
        }
        if let Some(found) = self.queues.get_mut(queue) {
            found.turns.resume(id);
        }
        true
    }

    /// The consumers that a channel has of a queue line up again, unless they may have no more.
    fn resume_in(&mut self, queue: QueueId, channel: ChannelId) {
        let Some(found) = self.queues.get_mut(queue) else { return };
        let consumers = &mut self.consumers;
        found.turns.resume_of(channel, |id| {
            let Some(consumer) = consumers.get_mut(id) else { return false };
            let can = consumer.has_room();
            consumer.suspended &= !can;
            can
        });
    }

    /// Whether a consumer can take a message now.
    #[inline]
    fn can_take(&self, consumer: &Consumer, channel: &Channel) -> bool {
        let full = self.connections.get(channel.connection).is_none_or(|one| one.full);
        let all_full = !consumer.quorum && channel.prefetch_for_all.is_full();
        !full && !all_full && consumer.has_room()
    }

    /// The consumer whose turn it is and who can take a message. Those who cannot are taken out of the line.
    #[inline]
    pub(super) fn next_consumer(&mut self, queue: QueueId) -> Option<ConsumerId> {
        loop {
            let id = self.queues.get(queue)?.turns.next()?;
            let can = self.consumers.get(id).is_some_and(|consumer| {
                let channel = self.channels.get(consumer.channel);
                channel.is_some_and(|channel| self.can_take(consumer, channel))
            });
            if can {
                return Some(id);
            }
            if let Some(consumer) = self.consumers.get_mut(id) {
                consumer.suspended = true;
            }
            self.queues.get_mut(queue)?.turns.suspend_next();
        }
    }

    /// Hands out what a queue has to those who can take it.
    pub(super) fn deliver_ready(&mut self, queue: QueueId) {
        let mut delivered = self.hand_out(queue);
        while self.ack_for_consumers() {
            delivered |= self.hand_out(queue);
        }
        // A classic queue does not look at who is at its front unless another was there before.
        if delivered || self.queues.get(queue).is_some_and(|one| one.arguments.is_quorum()) {
            self.look_after(queue);
        }
        self.bury();
    }

    /// Says whether there was anything to hand out.
    fn hand_out(&mut self, queue: QueueId) -> bool {
        let mut delivered = false;
        while self.queues.get(queue).is_some_and(|one| !one.ready.is_empty()) {
            let Some(consumer) = self.next_consumer(queue) else { break };
            if !delivered {
                self.expire_in_time(queue);
            }
            let now = self.now;
            let Some(found) = self.queues.get_mut(queue) else { break };
            let Some(entry) = found.ready.pop() else { break };
            let next_is_due = found.ready.next_expiry() <= now;
            let redelivered = entry.is_redelivered();
            self.deliver(queue, consumer, entry, redelivered);
            delivered = true;
            if next_is_due {
                self.expire(queue);
            }
        }
        delivered
    }

    /// What quorum queues have just delivered and needs no ack is acked. Says whether anybody had to wait for that.
    pub(super) fn ack_for_consumers(&mut self) -> bool {
        let mut waited = false;
        while let Some(id) = self.to_be_acked.pop_front() {
            if let Some(consumer) = self.consumers.get_mut(id) {
                consumer.counted -= 1;
                waited |= self.resume(id);
            }
        }
        waited
    }

    /// Hands a message to a consumer that can take it.
    #[inline]
    pub(super) fn deliver(
        &mut self,
        queue: QueueId,
        id: ConsumerId,
        entry: Entry,
        redelivered: bool,
    ) {
        let Some(found) = self.queues.get_mut(queue) else { return };
        let Some(consumer) = self.consumers.get_mut(id) else { return };
        let Some(channel) = self.channels.get_mut(consumer.channel) else { return };
        found.turns.served();
        let message = &entry.message;
        let deliver = basic::Deliver {
            consumer_tag: consumer.tag.borrowed(),
            delivery_tag: channel.next_tag(),
            redelivered,
            exchange: message.exchange().borrowed(),
            routing_key: message.routing_key(),
        };
        let quorum = found.arguments.is_quorum();
        let counted = quorum.then(|| counted(self.profile, Way::Consume, &entry)).flatten();
        let properties =
            counted.as_ref().map_or(message.encoded_properties(), |raw| raw.as_bytes());
        let properties = EncodedProperties::new(properties);
        let mut unread = None;
        if !channel.silent {
            let (wake, room) = channel.outlet.deliver(|outbound, max| {
                outbound.relayed_content(channel.number, &deliver, &properties, message.body(), max)
            });
            if wake {
                self.wakes.push(Arc::clone(&channel.outlet));
            }
            unread = (room == Room::None).then(|| (channel.connection, message.size()));
        }
        self.tally.delivered += 1;
        if let Some(record) = &self.record {
            let what = What::Delivered {
                queue: found.name.to_string(),
                consumer: Some(consumer.tag.to_string()),
                redelivered: deliver.redelivered,
                auto_ack: consumer.auto_ack,
            };
            record.note(&self.name, self.now, message, what);
        }
        let acked_later = quorum && consumer.auto_ack && consumer.prefetch > 0;
        if acked_later || !consumer.auto_ack {
            consumer.counted += 1;
        }
        if quorum && !consumer.has_room() {
            // A quorum queue knows at once.
            consumer.suspended = true;
            found.turns.suspend(id);
        }
        if consumer.auto_ack {
            self.tally.delivered_settled += 1;
            self.memory -= entry.message.size();
            if acked_later {
                self.to_be_acked.push_back(id);
            }
        } else {
            found.unsettled += 1;
            consumer.unsettled += 1;
            if !quorum {
                channel.prefetch_for_all.delivered();
            }
            let due = self.now.after_millis(consumer.patience);
            let (tag, consumer) = (deliver.delivery_tag, Some(id));
            channel.keep(Unsettled { tag, queue, consumer, entry, due });
            self.await_settling(due);
        }
        if let Some((connection, size)) = unread {
            self.count_unread(connection, size);
        }
    }

    /// The broker ends a consumer: its queue is gone.
    pub(super) fn cancel_by_broker(&mut self, id: ConsumerId) {
        let Some(consumer) = self.drop_consumer(id) else { return };
        let channel = self.channels.get(consumer.channel);
        let connection = channel.and_then(|found| self.connections.get(found.connection));
        if connection.is_some_and(|found| found.hears_of_cancels) {
            let cancel = basic::Cancel { consumer_tag: consumer.tag, nowait: true };
            self.reply(consumer.channel, &cancel);
        }
    }

    /// Says nothing of it to its client.
    pub(super) fn drop_consumer(&mut self, id: ConsumerId) -> Option<Consumer> {
        let consumer = self.consumers.remove(id)?;
        if let Some(channel) = self.channels.get_mut(consumer.channel) {
            channel.consumers.remove(&consumer.tag);
        }
        Some(consumer)
    }
}
