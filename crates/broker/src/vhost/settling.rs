//! What becomes of deliveries: ack, nack, reject, recover, and transactions.

use leveret_wire::method::{basic, confirm, tx};

use super::channel::{Confirms, Mode, Settlement, Transaction, Unsettled};
use super::{ChannelId, QueueId, Vhost};
use crate::arguments::QueueArguments;
use crate::death::Reason;
use crate::events::Settled;
use crate::profile::Profile;
use crate::refusal::Refusal;

/// How a delivery comes back to its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Return {
    Nacked,
    Rejected,
    Recovered,
    /// Its channel is gone.
    Abandoned,
    /// It was kept for too long.
    TimedOut,
}

impl Return {
    /// Whether it counts towards the delivery limit of a quorum queue.
    fn is_failure(self, profile: Profile) -> bool {
        match profile {
            Profile::RabbitMq3_10 => true,
            Profile::RabbitMq4_3 => matches!(self, Return::Rejected | Return::Abandoned),
        }
    }

    /// Whether it goes behind all others: 3.10 fears for its log if a quorum queue may hand out a message any number of
    /// times.
    fn goes_last(self, profile: Profile, queue: &QueueArguments) -> bool {
        profile == Profile::RabbitMq3_10
            && queue.is_quorum()
            && queue.delivery_limit.is_none()
            && self != Return::Abandoned
    }
}

impl Vhost {
    /// A client settles a delivery, or with `multiple` all up to it.
    pub(super) fn settle(
        &mut self,
        channel: ChannelId,
        tag: u64,
        multiple: bool,
        settlement: Settlement,
    ) -> Result<(), Refusal> {
        let Some(found) = self.channels.get_mut(channel) else { return Ok(()) };
        let (overdue, others) = found.take_overdue(tag, multiple);
        let Some(deliveries) = others.or_else(|| found.take_unsettled(tag, multiple)) else {
            return Err(Refusal::precondition_failed(format!("unknown delivery tag {tag}")));
        };
        if let Mode::Transaction(transaction) = &mut found.mode {
            transaction.settled.push((deliveries, settlement));
        } else {
            self.carry_out(deliveries, settlement);
        }
        self.settle_late(overdue, settlement);
        Ok(())
    }

    fn carry_out(&mut self, deliveries: Vec<Unsettled>, settlement: Settlement) {
        match settlement {
            Settlement::Ack => self.done_with(deliveries),
            Settlement::Refuse { requeue: false, by_reject } => {
                self.let_die(deliveries, by_reject);
            }
            Settlement::Refuse { requeue: true, by_reject: true } => {
                self.requeue(deliveries, Return::Rejected);
            }
            Settlement::Refuse { requeue: true, by_reject: false } => {
                self.requeue(deliveries, Return::Nacked);
            }
        }
    }

    fn done_with(&mut self, deliveries: Vec<Unsettled>) {
        // One after another for the same queue and consumer, as a rule.
        let mut previous = None;
        self.tally.acked += deliveries.len() as u64;
        for delivery in deliveries {
            self.memory -= delivery.entry.message.size();
            let (queue, consumer) = (delivery.queue, delivery.consumer);
            self.note_settled(queue, &delivery.entry.message, Settled::Acked);
            self.out_of_hands(&delivery);
            if previous.is_some_and(|previous| previous != (queue, consumer)) {
                self.resume_after(previous);
            }
            previous = Some((queue, consumer));
        }
        self.resume_after(previous);
    }

    fn resume_after(&mut self, settled: Option<(QueueId, Option<super::ConsumerId>)>) {
        if let Some((_, Some(consumer))) = settled {
            self.resume_beside(consumer);
        }
    }

    /// A consumer may take more; and if its channel has a limit for all, so may the others on it.
    fn resume_beside(&mut self, consumer: super::ConsumerId) {
        let channel = self.consumers.get(consumer).map(|one| one.channel);
        let limited = channel
            .and_then(|channel| self.channels.get(channel))
            .is_some_and(|channel| channel.prefetch_for_all > 0);
        match channel {
            Some(channel) if limited => self.resume_channel(channel),
            _ => self.resume(consumer),
        }
    }

    /// A delivery is no longer with its consumer.
    fn out_of_hands(&mut self, delivery: &Unsettled) {
        if let Some(queue) = self.queues.get_mut(delivery.queue) {
            queue.unsettled -= 1;
            queue.got -= usize::from(delivery.consumer.is_none());
        }
        if let Some(consumer) = delivery.consumer.and_then(|id| self.consumers.get_mut(id)) {
            consumer.unsettled -= 1;
        }
    }

    fn let_die(&mut self, deliveries: Vec<Unsettled>, by_reject: bool) {
        let consumers: Vec<_> = deliveries.iter().map(|one| one.consumer).collect();
        for mut delivery in deliveries {
            self.out_of_hands(&delivery);
            delivery.entry.failures += u32::from(by_reject);
            self.note_settled(delivery.queue, &delivery.entry.message, Settled::Discarded);
            self.die(delivery.queue, delivery.entry, Reason::Rejected);
        }
        for consumer in consumers.into_iter().flatten() {
            self.resume_beside(consumer);
        }
        self.bury();
    }

    /// Deliveries of a channel that is gone go back to their queues.
    pub(super) fn put_back(&mut self, deliveries: Vec<Unsettled>) {
        self.requeue(deliveries, Return::Abandoned);
    }

    pub(super) fn requeue(&mut self, deliveries: Vec<Unsettled>, how: Return) {
        let profile = self.profile;
        let mut queues: Vec<QueueId> = Vec::new();
        let consumers: Vec<_> = deliveries.iter().map(|one| one.consumer).collect();
        for delivery in deliveries {
            self.out_of_hands(&delivery);
            let Unsettled { queue: id, mut entry, .. } = delivery;
            self.note_settled(id, &entry.message, how.into());
            let Some(queue) = self.queues.get_mut(id) else {
                self.memory -= entry.message.size();
                continue;
            };
            entry.returns += 1;
            entry.failures += u32::from(how.is_failure(profile));
            let limit = queue.arguments.delivery_limit;
            if limit.is_some_and(|limit| u64::from(entry.failures) > limit) {
                self.die(id, entry, Reason::DeliveryLimit);
                continue;
            }
            if how.goes_last(profile, &queue.arguments) {
                queue.ready.push(entry);
            } else {
                queue.ready.put_back(entry);
            }
            self.tally.requeued += 1;
            if !queues.contains(&id) {
                queues.push(id);
            }
        }
        for queue in &queues {
            self.make_room(*queue);
        }
        for consumer in consumers.into_iter().flatten() {
            self.resume_beside(consumer);
        }
        for queue in queues {
            self.deliver_ready(queue);
            self.expire(queue);
        }
        self.bury();
    }

    /// All that a channel has not settled goes back.
    pub(super) fn recover(&mut self, channel: ChannelId) {
        let taken = self.channels.get_mut(channel).and_then(|one| one.take_unsettled(0, true));
        self.requeue(taken.unwrap_or_default(), Return::Recovered);
    }

    // ---- modes

    pub(super) fn confirm_select(
        &mut self,
        channel: ChannelId,
        select: &confirm::Select,
    ) -> Result<(), Refusal> {
        let Some(found) = self.channels.get_mut(channel) else { return Ok(()) };
        match found.mode {
            Mode::Plain => found.mode = Mode::Confirm(Confirms::default()),
            Mode::Confirm(_) => {}
            Mode::Transaction(_) => {
                return Err(Refusal::precondition_failed("cannot switch from tx to confirm mode"));
            }
        }
        if !select.nowait {
            self.reply(channel, &confirm::SelectOk {});
        }
        Ok(())
    }

    pub(super) fn tx_select(&mut self, channel: ChannelId) -> Result<(), Refusal> {
        let Some(found) = self.channels.get_mut(channel) else { return Ok(()) };
        match found.mode {
            Mode::Plain => found.mode = Mode::Transaction(Transaction::default()),
            Mode::Transaction(_) => {}
            Mode::Confirm(_) => {
                return Err(Refusal::precondition_failed("cannot switch from confirm to tx mode"));
            }
        }
        self.reply(channel, &tx::SelectOk {});
        Ok(())
    }

    pub(super) fn commit(&mut self, channel: ChannelId) -> Result<(), Refusal> {
        let Transaction { published, settled } = self.transaction(channel)?;
        let mut all_taken = true;
        for published in published {
            all_taken &= self.accept(channel, published);
        }
        for (deliveries, settlement) in settled {
            self.carry_out(deliveries, settlement);
        }
        if !all_taken {
            return Err(Refusal::precondition_failed("partial tx completion"));
        }
        self.reply(channel, &tx::CommitOk {});
        Ok(())
    }

    pub(super) fn roll_back(&mut self, channel: ChannelId) -> Result<(), Refusal> {
        let Transaction { settled, .. } = self.transaction(channel)?;
        if let Some(found) = self.channels.get_mut(channel) {
            found.take_back(settled);
        }
        self.reply(channel, &tx::RollbackOk {});
        Ok(())
    }

    /// What waits for a commit, taken out.
    fn transaction(&mut self, channel: ChannelId) -> Result<Transaction, Refusal> {
        match self.channels.get_mut(channel).map(|found| &mut found.mode) {
            Some(Mode::Transaction(transaction)) => {
                let transaction = std::mem::take(transaction);
                self.memory -= transaction.size();
                Ok(transaction)
            }
            _ => Err(Refusal::precondition_failed("channel is not transactional")),
        }
    }

    /// Tells a client which of its publishes are done.
    pub(super) fn flush_confirms(&mut self, channel: ChannelId) {
        let Some(found) = self.channels.get_mut(channel) else { return };
        let Mode::Confirm(confirms) = &mut found.mode else { return };
        let (published, told) = (confirms.published, confirms.told);
        if published > told {
            confirms.told = published;
            let multiple = published - told > 1;
            self.reply(channel, &basic::Ack { delivery_tag: published, multiple });
        }
    }

    /// Whether a publish is taken; if it is not, its client is told at once.
    pub(super) fn confirm(&mut self, channel: ChannelId, taken: bool) {
        let Some(found) = self.channels.get_mut(channel) else { return };
        let Mode::Confirm(confirms) = &mut found.mode else { return };
        if taken {
            if confirms.published == confirms.told {
                self.unconfirmed.push(channel);
            }
            confirms.published += 1;
        } else {
            self.flush_confirms(channel);
            let Some(Mode::Confirm(confirms)) =
                self.channels.get_mut(channel).map(|found| &mut found.mode)
            else {
                return;
            };
            confirms.published += 1;
            confirms.told += 1;
            let delivery_tag = confirms.published;
            let nack = basic::Nack { delivery_tag, multiple: false, requeue: false };
            self.reply(channel, &nack);
        }
    }
}
