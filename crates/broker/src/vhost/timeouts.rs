//! Deliveries that a client keeps for too long.
//!
//! | | 3.10 | 4.3 |
//! |---|---|---|
//! | which | from every queue | from quorum queues |
//! | how long | what the broker is set to | what the consumer asked for, else its queue, else the broker |
//! | what becomes of them | go back with all others of their channel, which is closed | go back, those alone |
//! | what the client is told | that its channel is closed | that its consumer is cancelled; or, if it cannot be told that or has no consumer, that its channel is closed |
//!
//! In 4.3 the consumer is still there: it gets nothing until all that was taken away from it is acked, which settles nothing
//! any more, and it ends when the client says that it has heard. RabbitMQ 3.10 looks once a minute; here it happens in time.

use std::time::Duration;

use foldhash::{HashSet, HashSetExt};
use leveret_wire::ReplyCode;
use leveret_wire::method::{basic, channel};

use super::channel::{Settlement, Unsettled};
use super::deadlines::Deadline;
use super::settling::Return;
use super::{ChannelId, ConnectionId, ConsumerId, Vhost};
use crate::arguments::QueueArguments;
use crate::profile::Profile;
use crate::queue::Queue;
use crate::refusal::Refusal;
use crate::time::Moment;

/// How long a delivery may be kept, in milliseconds, where there is no limit.
const FOR_EVER: u64 = u64::MAX;

/// RabbitMQ's words. In 4.3 it does not know which timeout it was.
fn timed_out(number: u16, timeout: &str) -> Refusal {
    Refusal::precondition_failed(format!(
        "delivery acknowledgement on channel {number} timed out. Timeout value used: {timeout} ms. \
         This timeout value can be configured, see consumers doc guide to learn more"
    ))
}

impl Vhost {
    /// How long a delivery from such a queue may be kept, in milliseconds, by a consumer that asked for as much.
    pub(super) fn patience(&self, queue: &QueueArguments, asked: Option<u64>) -> u64 {
        match self.profile {
            Profile::RabbitMq3_10 => self.consumer_timeout,
            Profile::RabbitMq4_3 if queue.is_quorum() => {
                asked.or(queue.consumer_timeout).unwrap_or(self.consumer_timeout)
            }
            Profile::RabbitMq4_3 => FOR_EVER,
        }
    }

    /// Why a connection is to end that has not been read from for so long, because memory is short: it has what it alone could
    /// give back, if it were read from. Only that makes room.
    pub(crate) fn kept_while_blocked(
        &self,
        connection: ConnectionId,
        blocked: Duration,
    ) -> Option<Refusal> {
        let timeout = self.consumer_timeout;
        if blocked.as_millis() < u128::from(timeout) || !self.holds_messages(connection) {
            return None;
        }
        let text = format!(
            "low on memory: this connection is blocked and has had deliveries, a transaction or messages in an exclusive \
             queue for {timeout} ms. Publish and consume on different connections, and commit smaller transactions"
        );
        Some(Refusal::new(ReplyCode::RESOURCE_ERROR, text))
    }

    /// Whether it has deliveries that it could ack, a transaction that it could commit, or messages in a queue that is closed to
    /// others.
    fn holds_messages(&self, connection: ConnectionId) -> bool {
        let Some(found) = self.connections.get(connection) else { return false };
        let holds = |id| self.channels.get(id).is_some_and(|one| one.holds_messages());
        let holds_queue = |one: &Queue| one.owner == Some(connection) && !one.ready.is_empty();
        found.channels.iter().copied().any(holds) || self.queues.values().any(holds_queue)
    }

    /// Sees to it that what is due then is looked at in time. As a rule it is later than what was delivered before.
    #[inline]
    pub(super) fn await_settling(&mut self, due: Moment) {
        if due < self.next_timeout {
            self.next_timeout = due;
            self.set_deadline(due, Deadline::Deliveries);
        }
    }

    /// Takes deliveries away from those who have kept them for too long.
    pub(super) fn time_out_deliveries(&mut self) {
        self.next_timeout = Moment::NEVER;
        let late = self.channels.iter().filter(|(_, channel)| channel.next_due() <= self.now);
        for channel in late.map(|(id, _)| id).collect::<Vec<_>>() {
            match self.profile {
                Profile::RabbitMq3_10 => {
                    let timeout = self.consumer_timeout.to_string();
                    self.close_timed_out(channel, &timeout);
                }
                Profile::RabbitMq4_3 => self.take_away(channel),
            }
        }
        let next = self.channels.values().map(|channel| channel.next_due()).min();
        self.await_settling(next.unwrap_or(Moment::NEVER));
    }

    fn take_away(&mut self, id: ChannelId) {
        let Some(channel) = self.channels.get_mut(id) else { return };
        let overdue = channel.take_due(self.now);
        let connection = self.connections.get(channel.connection);
        let mut can_be_told = connection.is_some_and(|one| one.hears_of_cancels);
        let (mut consumers, mut seen) = (Vec::new(), HashSet::new());
        for Unsettled { tag, consumer, .. } in &overdue {
            let found = consumer.and_then(|id| Some((id, self.consumers.get_mut(id)?)));
            let Some((consumer, found)) = found.filter(|(_, one)| !one.cancelled) else {
                can_be_told = false;
                continue;
            };
            channel.remember_overdue(*tag, consumer);
            found.overdue += 1;
            if seen.insert(consumer) {
                consumers.push(consumer);
            }
        }
        self.requeue(overdue, Return::TimedOut);
        if !can_be_told {
            return self.close_timed_out(id, "-1");
        }
        for consumer in consumers {
            let Some(found) = self.consumers.get(consumer) else { continue };
            let cancel = basic::Cancel { consumer_tag: found.tag.clone(), nowait: true };
            self.reply(id, &cancel);
        }
    }

    /// Closes a channel without having been asked to. Its session finds out by [`Vhost::closed_channels`].
    fn close_timed_out(&mut self, id: ChannelId, timeout: &str) {
        let Some((number, connection)) =
            self.channels.get(id).map(|found| (found.number, found.connection))
        else {
            return;
        };
        let refusal = timed_out(number, timeout);
        let Some(connection) = self.connections.get_mut(connection) else { return };
        connection.closed.push(number);
        let close = channel::Close {
            reply_code: refusal.code,
            reply_text: refusal.reply_text(),
            class_id: 0,
            method_id: 0,
        };
        if connection.outlet.put(|outbound, max| outbound.method(number, &close, max)) {
            self.wakes.push(std::sync::Arc::clone(&connection.outlet));
        }
        // What it still gets comes after that.
        self.close_channel(id);
    }

    /// The numbers of the channels of a connection that were closed from here since this was asked last.
    pub(crate) fn closed_channels(&mut self, connection: ConnectionId) -> Vec<u16> {
        let connection = self.connections.get_mut(connection);
        connection.map(|found| std::mem::take(&mut found.closed)).unwrap_or_default()
    }

    /// A client settles what was taken away from it. Once all of it is acked, its consumer gets messages again.
    pub(super) fn settle_late(&mut self, late: Vec<ConsumerId>, settlement: Settlement) {
        if settlement != Settlement::Ack {
            return;
        }
        for consumer in late {
            let Some(found) = self.consumers.get_mut(consumer) else { continue };
            found.overdue -= 1;
            if found.overdue == 0 {
                let queue = found.queue;
                self.go_on(queue, Some(consumer));
            }
        }
    }

    /// A client has heard that a consumer is cancelled. One that was not gone already goes now.
    pub(super) fn cancel_heard(&mut self, channel: ChannelId, heard: &basic::CancelOk<'_>) {
        let Some(found) = self.channels.get_mut(channel) else { return };
        let tag = heard.consumer_tag.as_bytes();
        let Some(consumer) = found.consumers.get(tag).copied() else { return };
        if self.consumers.get(consumer).is_some_and(|one| one.overdue > 0) {
            found.consumers.remove(tag);
            if let Some(queue) = self.end_consumer(consumer) {
                self.delete_if_left(queue);
            }
        }
    }
}
