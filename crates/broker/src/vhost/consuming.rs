//! From queues to consumers: consume, cancel, get, prefetch, and whose turn it is.

use std::sync::Arc;

use leveret_wire::method::basic;
use leveret_wire::{EncodedProperties, ShortStr};

use super::channel::{Channel, Unsettled};
use super::{ChannelId, Consumer, ConsumerId, QueueId, Vhost};
use crate::arguments::{ConsumerArguments, check_prefetch_for_all, words};
use crate::events::What;
use crate::outlet::Room;
use crate::queue::{Entry, Way, counted};
use crate::refusal::Refusal;
use crate::users::Right;

impl Vhost {
    pub(super) fn qos(&mut self, channel: ChannelId, qos: &basic::Qos) -> Result<(), Refusal> {
        if qos.prefetch_size != 0 {
            return Err(words::prefetch_size(qos.prefetch_size));
        }
        let Some(found) = self.channels.get_mut(channel) else { return Ok(()) };
        // 4.3 takes the one for the other.
        if qos.global && !self.profile.is_at_least_4() {
            found.prefetch_for_all = qos.prefetch_count;
        } else {
            found.prefetch = qos.prefetch_count;
        }
        self.reply(channel, &basic::QosOk {});
        self.resume_channel(channel);
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
        self.check_access(channel, Right::Read, "queue", &name)?;
        let tag = self.new_consumer_tag(channel, &consume.consumer_tag)?;
        let queue = self.usable_queue(channel, &name)?;
        let found = &mut self.queues[queue];
        let (profile, vhost, of) = (self.profile, self.name.as_str(), &found.arguments);
        let arguments = ConsumerArguments::parse(profile, vhost, &name, of, &consume.arguments)?;
        if self.channels.get(channel).is_some_and(|on| on.prefetch_for_all > 0) {
            check_prefetch_for_all(profile, vhost, &name, of)?;
        }
        // A quorum queue does not know what that is; where a single consumer is active, none can be alone.
        let exclusive = consume.exclusive && !of.is_quorum();
        let shared = !found.turns.is_empty() || of.single_active_consumer;
        if found.exclusive_consumer.is_some() || (exclusive && shared) {
            return Err(words::exclusive_use(&self.name, &name));
        }
        let patience = self.patience(&self.queues[queue].arguments, arguments.consumer_timeout);
        let found = &mut self.queues[queue];
        let Some(on) = self.channels.get_mut(channel) else { return Ok(()) };
        let consumer = self.consumers.insert(Consumer {
            channel,
            queue,
            tag: tag.clone(),
            auto_ack: consume.no_ack,
            prefetch: on.prefetch,
            unsettled: 0,
            patience,
            overdue: 0,
            suspended: false,
        });
        on.consumers.insert(tag.clone(), consumer);
        found.exclusive_consumer = exclusive.then_some(consumer);
        found.had_consumer = true;
        found.turns.add(consumer, arguments.priority);
        if !consume.nowait {
            self.reply(channel, &basic::ConsumeOk { consumer_tag: tag });
        }
        self.deliver_ready(queue);
        Ok(())
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
        let consumer = found.consumers.remove(tag.as_bytes());
        if let Some(replies) = found.replies.take_if(|replies| replies.tag == *tag) {
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
        let ended = self.consumers.remove(consumer)?;
        let queue = self.queues.get_mut(ended.queue)?;
        queue.turns.remove(consumer);
        if queue.exclusive_consumer == Some(consumer) {
            queue.exclusive_consumer = None;
        }
        if queue.turns.is_empty() {
            self.used(ended.queue);
        } else {
            // It may have been the active one.
            self.deliver_ready(ended.queue);
        }
        Some(ended.queue)
    }

    pub(super) fn get(&mut self, channel: ChannelId, get: &basic::Get<'_>) -> Result<(), Refusal> {
        let name = self.named_queue(channel, &get.queue)?;
        self.check_access(channel, Right::Read, "queue", &name)?;
        let id = self.usable_queue(channel, &name)?;
        let arguments = &self.queues[id].arguments;
        if arguments.is_quorum() && arguments.single_active_consumer {
            return Err(words::not_to_get_from(self.profile, &self.name, &name));
        }
        self.used(id);
        self.expire(id);
        let Some(entry) = self.queues[id].ready.pop() else {
            self.bury();
            self.reply(channel, &basic::GetEmpty {});
            return Ok(());
        };
        // Those that come to the front now and are due do not count.
        self.expire(id);
        let due = self.now.after_millis(self.patience(&self.queues[id].arguments, None));
        let queue = &mut self.queues[id];
        let message_count = queue.ready.len() as u32;
        let Some(on) = self.channels.get_mut(channel) else { return Ok(()) };
        let message = &entry.message;
        let got = basic::GetOk {
            delivery_tag: on.next_tag(),
            redelivered: entry.is_redelivered(),
            exchange: message.exchange().borrowed(),
            routing_key: message.routing_key(),
            message_count,
        };
        let quorum = queue.arguments.is_quorum();
        let counted = quorum.then(|| counted(self.profile, Way::Get, &entry)).flatten();
        let properties =
            counted.as_ref().map_or(message.encoded_properties(), |raw| raw.as_bytes());
        let properties = EncodedProperties::new(properties);
        let put = on.outlet.put(|outbound, max| {
            outbound.content(on.number, &got, &properties, message.body(), max)
        });
        if put {
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
        if get.no_ack {
            self.tally.delivered_settled += 1;
            self.memory -= entry.message.size();
        } else {
            queue.unsettled += 1;
            queue.got += 1;
            let (tag, consumer) = (got.delivery_tag, None);
            on.keep(Unsettled { tag, queue: id, consumer, entry, due });
            self.await_settling(due);
        }
        self.bury();
        self.look_after(id);
        Ok(())
    }

    /// A channel may take more than before.
    pub(super) fn resume_channel(&mut self, channel: ChannelId) {
        let Some(found) = self.channels.get(channel) else { return };
        let consumers: Vec<_> = found.consumers.values().copied().collect();
        for consumer in consumers {
            self.resume(consumer);
        }
    }

    /// A consumer may take more than before.
    pub(super) fn resume(&mut self, id: ConsumerId) {
        let Some(consumer) = self.consumers.get_mut(id) else { return };
        if std::mem::take(&mut consumer.suspended) {
            let queue = consumer.queue;
            if let Some(found) = self.queues.get_mut(queue) {
                found.turns.resume(id);
            }
            self.deliver_ready(queue);
        }
    }

    /// Whether a consumer can take a message now.
    #[inline]
    fn can_take(&self, consumer: &Consumer, channel: &Channel) -> bool {
        let full = self.connections.get(channel.connection).is_none_or(|one| one.full);
        if full || consumer.auto_ack {
            return !full;
        }
        if consumer.overdue > 0 {
            return false;
        }
        let (own, all) = (usize::from(consumer.prefetch), usize::from(channel.prefetch_for_all));
        (own == 0 || consumer.unsettled < own) && (all == 0 || channel.with_consumers < all)
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
            self.queues.get_mut(queue)?.turns.suspend();
        }
    }

    /// Hands out what a queue has to those who can take it.
    pub(super) fn deliver_ready(&mut self, queue: QueueId) {
        let mut expired = false;
        while self.queues.get(queue).is_some_and(|one| !one.ready.is_empty()) {
            let Some(consumer) = self.next_consumer(queue) else { break };
            let now = self.now;
            let Some(found) = self.queues.get_mut(queue) else { break };
            // Not more often than the clock has it: what is due dies before it is handed out.
            if !std::mem::replace(&mut expired, true) && found.ready.next_expiry() <= now {
                self.expire(queue);
                continue;
            }
            let Some(entry) = found.ready.pop() else { break };
            if entry.expires <= now {
                self.die(queue, entry, crate::death::Reason::Expired);
                continue;
            }
            self.deliver(queue, consumer, entry);
        }
        // Another one may be at the front now.
        self.look_after(queue);
    }

    /// Hands a message to a consumer that can take it.
    #[inline]
    pub(super) fn deliver(&mut self, queue: QueueId, id: ConsumerId, entry: Entry) {
        let Some(found) = self.queues.get_mut(queue) else { return };
        let Some(consumer) = self.consumers.get_mut(id) else { return };
        let Some(channel) = self.channels.get_mut(consumer.channel) else { return };
        found.turns.served();
        let message = &entry.message;
        let deliver = basic::Deliver {
            consumer_tag: consumer.tag.borrowed(),
            delivery_tag: channel.next_tag(),
            redelivered: entry.is_redelivered(),
            exchange: message.exchange().borrowed(),
            routing_key: message.routing_key(),
        };
        let quorum = found.arguments.is_quorum();
        let counted = quorum.then(|| counted(self.profile, Way::Consume, &entry)).flatten();
        let properties =
            counted.as_ref().map_or(message.encoded_properties(), |raw| raw.as_bytes());
        let properties = EncodedProperties::new(properties);
        let (wake, room) = channel.outlet.deliver(|outbound, max| {
            outbound.content(channel.number, &deliver, &properties, message.body(), max)
        });
        if wake {
            self.wakes.push(Arc::clone(&channel.outlet));
        }
        if room == Room::None
            && let Some(connection) = self.connections.get_mut(channel.connection)
        {
            connection.full = true;
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
        if consumer.auto_ack {
            self.tally.delivered_settled += 1;
            self.memory -= entry.message.size();
        } else {
            found.unsettled += 1;
            consumer.unsettled += 1;
            let due = self.now.after_millis(consumer.patience);
            let (tag, consumer) = (deliver.delivery_tag, Some(id));
            channel.keep(Unsettled { tag, queue, consumer, entry, due });
            self.await_settling(due);
        }
    }

    /// The broker ends a consumer: its queue is gone.
    pub(super) fn cancel_by_broker(&mut self, id: ConsumerId) {
        let Some(consumer) = self.consumers.remove(id) else { return };
        if let Some(channel) = self.channels.get_mut(consumer.channel) {
            channel.consumers.remove(&consumer.tag);
        }
        let channel = self.channels.get(consumer.channel);
        let connection = channel.and_then(|found| self.connections.get(found.connection));
        if connection.is_some_and(|found| found.hears_of_cancels) {
            let cancel = basic::Cancel { consumer_tag: consumer.tag, nowait: true };
            self.reply(consumer.channel, &cancel);
        }
    }
}
