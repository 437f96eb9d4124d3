//! What becomes of deliveries: ack, nack, reject, recover, and transactions.

use foldhash::{HashSet, HashSetExt};
use leveret_wire::method::{basic, confirm, tx};

use super::channel::{Confirms, Mode, Settlement, Transaction, Unsettled};
use super::{ChannelId, Consumer, ConsumerId, QueueId, Vhost};
use crate::arguments::QueueArguments;
use crate::death::Reason;
use crate::events::Settled;
use crate::profile::Profile;
use crate::queue::Entry;
use crate::refusal::Refusal;

/// How a delivery comes back to its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Return {
    Nacked,
    Rejected,
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

fn of_same_consumer(one: &Unsettled, other: &Unsettled) -> bool {
    one.queue == other.queue && one.consumer.is_some() && one.consumer == other.consumer
}

fn of_one_consumer(deliveries: &[Unsettled]) -> bool {
    deliveries.windows(2).all(|two| of_same_consumer(&two[0], &two[1]))
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
            // What is settled alike is settled together.
            match transaction.settled.last_mut() {
                Some((last, alike)) if *alike == settlement => last.extend(deliveries),
                _ => transaction.settled.push((deliveries, settlement)),
            }
        } else {
            self.carry_out(channel, deliveries, settlement);
        }
        self.settle_late(overdue, settlement);
        Ok(())
    }

    fn carry_out(
        &mut self,
        channel: ChannelId,
        deliveries: Vec<Unsettled>,
        settlement: Settlement,
    ) {
        let consumed = deliveries.iter().filter(|one| one.consumer.is_some()).count();
        if of_one_consumer(&deliveries) {
            self.carry_out_for_one(deliveries, settlement);
        } else {
            for deliveries in self.by_consumer(deliveries) {
                self.carry_out_for_one(deliveries, settlement);
            }
        }
        // Not before: the queue that it was of would always be the first to go on.
        let on = self.channels.get_mut(channel);
        if on.is_some_and(|on| on.prefetch_for_all.settled(consumed)) {
            self.resume_channel(channel);
        }
    }

    /// Settles deliveries of one queue to one consumer.
    fn carry_out_for_one(&mut self, deliveries: Vec<Unsettled>, settlement: Settlement) {
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

    /// RabbitMQ tells one queue after the other, by their names, and each first of what was got and then of one consumer after
    /// the other, by their tags.
    fn by_consumer(&self, mut deliveries: Vec<Unsettled>) -> Vec<Vec<Unsettled>> {
        let queue = |one: &Unsettled| self.queues.get(one.queue).map(|queue| queue.name.as_bytes());
        deliveries.sort_by(|a, b| {
            queue(a).cmp(&queue(b)).then_with(|| self.by_tag(a).cmp(&self.by_tag(b)))
        });
        let mut groups: Vec<Vec<Unsettled>> = Vec::new();
        for delivery in deliveries {
            match groups.last_mut() {
                Some(last) if of_same_consumer(&last[0], &delivery) => last.push(delivery),
                _ => groups.push(vec![delivery]),
            }
        }
        groups
    }

    /// The order in which RabbitMQ goes through a queue's deliveries.
    pub(super) fn by_tag(&self, delivery: &Unsettled) -> (Option<&[u8]>, u64) {
        match delivery.consumer {
            None => (None, delivery.tag),
            Some(id) => (self.consumers.get(id).map(|one| one.tag.as_bytes()), 0),
        }
    }

    fn done_with(&mut self, deliveries: Vec<Unsettled>) {
        let Some(Unsettled { queue, consumer, .. }) = deliveries.first() else { return };
        let (queue, consumer) = (*queue, *consumer);
        self.tally.acked += deliveries.len() as u64;
        for delivery in deliveries {
            self.memory -= delivery.entry.message.size();
            self.note_settled(queue, &delivery.entry.message, Settled::Acked);
            self.out_of_hands(&delivery);
        }
        self.go_on(queue, consumer);
    }

    /// A consumer has settled something: it may get more, or another may have waited for that.
    pub(super) fn go_on(&mut self, queue: QueueId, consumer: Option<ConsumerId>) {
        let handed_over = self.hand_over(queue);
        if consumer.is_some_and(|consumer| self.resume(consumer)) || handed_over {
            self.deliver_ready(queue);
        }
    }

    /// A delivery is no longer with its consumer.
    fn out_of_hands(&mut self, delivery: &Unsettled) {
        if let Some(queue) = self.queues.get_mut(delivery.queue) {
            queue.unsettled -= 1;
            queue.got -= usize::from(delivery.consumer.is_none());
        }
        let Some(id) = delivery.consumer else {
            return self.used_by_quorum(delivery.queue);
        };
        let Some(consumer) = self.consumers.get_mut(id) else { return };
        consumer.unsettled -= 1;
        consumer.counted -= 1;
        if consumer.cancelled && consumer.unsettled == 0 {
            self.forget_consumer(id);
        }
    }

    /// A consumer that was cancelled has settled all it had.
    fn forget_consumer(&mut self, id: ConsumerId) {
        let Some(Consumer { queue, channel, tag, .. }) = self.consumers.remove(id) else { return };
        if let Some(found) = self.queues.get_mut(queue) {
            found.lingering -= 1;
            self.used_by_quorum(queue);
        }
        if let Some(channel) = self.channels.get_mut(channel)
            && channel.lingering.get(&tag) == Some(&id)
        {
            channel.lingering.remove(&tag);
        }
    }

    /// A quorum queue is in use until what was got from it, or was delivered to a consumer that is gone, is settled.
    fn used_by_quorum(&mut self, queue: QueueId) {
        if self.queues.get(queue).is_some_and(|one| one.arguments.is_quorum()) {
            self.used(queue);
        }
    }

    fn let_die(&mut self, deliveries: Vec<Unsettled>, by_reject: bool) {
        let Some(Unsettled { queue, consumer, .. }) = deliveries.first() else { return };
        let (queue, consumer) = (*queue, *consumer);
        for mut delivery in deliveries {
            self.out_of_hands(&delivery);
            delivery.entry.failures += u32::from(by_reject);
            self.note_settled(delivery.queue, &delivery.entry.message, Settled::Discarded);
            self.die(delivery.queue, delivery.entry, Reason::Rejected);
        }
        self.go_on(queue, consumer);
        self.bury();
    }

    /// Deliveries of a channel that is gone go back to their queues.
    pub(super) fn put_back(&mut self, deliveries: Vec<Unsettled>) {
        self.requeue(deliveries, Return::Abandoned);
    }

    pub(super) fn requeue(&mut self, deliveries: Vec<Unsettled>, how: Return) {
        let profile = self.profile;
        let mut queues: Vec<QueueId> = Vec::new();
        let mut in_place: Vec<(QueueId, Entry)> = Vec::new();
        let consumers: Vec<_> = deliveries.iter().map(|one| one.consumer).collect();
        let alone = deliveries.len() == 1;
        for delivery in deliveries {
            self.out_of_hands(&delivery);
            let Unsettled { queue: id, mut entry, .. } = delivery;
            self.note_settled(id, &entry.message, how.into());
            let Some(queue) = self.queues.get_mut(id) else {
                self.memory -= entry.message.size();
                continue;
            };
            if queues.last() != Some(&id) {
                queues.push(id);
            }
            entry.returns += 1;
            entry.failures += u32::from(how.is_failure(profile));
            let limit = queue.arguments.delivery_limit;
            if limit.is_some_and(|limit| u64::from(entry.failures) > limit) {
                self.die(id, entry, Reason::DeliveryLimit);
                continue;
            }
            if how.goes_last(profile, &queue.arguments) {
                queue.ready.push(entry);
            } else if alone || queue.arguments.is_quorum() {
                queue.ready.put_back(entry);
            } else {
                in_place.push((id, entry));
            }
            self.tally.requeued += 1;
        }
        self.put_in_place(in_place);
        if queues.len() > 1 {
            let mut seen = HashSet::new();
            queues.retain(|id| seen.insert(*id));
        }
        for consumer in consumers.into_iter().flatten() {
            self.resume(consumer);
        }
        for queue in queues {
            self.see_to_returned(queue);
        }
        self.bury();
    }

    /// Messages of classic queues go where they were, all of a queue at once.
    fn put_in_place(&mut self, mut entries: Vec<(QueueId, Entry)>) {
        entries.sort_by_key(|(id, _)| *id);
        let mut entries = entries.into_iter().peekable();
        while let Some((id, first)) = entries.next() {
            let mut of_queue = vec![first];
            while let Some((_, next)) = entries.next_if(|(next, _)| *next == id) {
                of_queue.push(next);
            }
            if let Some(queue) = self.queues.get_mut(id) {
                queue.ready.put_all_back(of_queue);
            }
        }
    }

    /// Messages have come back to a queue.
    fn see_to_returned(&mut self, id: QueueId) {
        let Some(queue) = self.queues.get(id) else { return };
        if queue.arguments.is_quorum() {
            self.hand_over(id);
            self.deliver_ready(id);
            self.make_room(id);
            self.expire(id);
        } else {
            self.make_room(id);
            self.expire(id);
            self.deliver_ready(id);
        }
    }

    /// All that a channel has not settled goes back.
    pub(super) fn recover(&mut self, channel: ChannelId) {
        let taken = self.channels.get_mut(channel).and_then(|one| one.take_unsettled(0, true));
        let settlement = Settlement::Refuse { requeue: true, by_reject: false };
        self.carry_out(channel, taken.unwrap_or_default(), settlement);
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
            match self.accept(channel, published) {
                Ok(taken) => all_taken &= taken,
                Err(refusal) => {
                    // The end of the channel puts them back into their queues.
                    self.take_back(channel, settled);
                    return Err(refusal);
                }
            }
        }
        for (mut deliveries, settlement) in settled {
            deliveries.sort_by_key(|one| one.tag);
            self.carry_out(channel, deliveries, settlement);
        }
        if !all_taken {
            return Err(Refusal::precondition_failed("partial tx completion"));
        }
        self.reply(channel, &tx::CommitOk {});
        Ok(())
    }

    pub(super) fn roll_back(&mut self, channel: ChannelId) -> Result<(), Refusal> {
        let Transaction { settled, .. } = self.transaction(channel)?;
        self.take_back(channel, settled);
        self.reply(channel, &tx::RollbackOk {});
        Ok(())
    }

    /// Deliveries are unsettled again whose settling was not committed.
    fn take_back(&mut self, channel: ChannelId, settled: Vec<(Vec<Unsettled>, Settlement)>) {
        if let Some(found) = self.channels.get_mut(channel) {
            found.take_back(settled);
        }
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
    pub(crate) fn flush_confirms(&mut self, channel: ChannelId) {
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
