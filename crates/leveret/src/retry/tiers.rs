//! The default design: wait queues of one delay each, beside a work queue that stays as it is.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use crate::amqp::{RawProperties, lock};
use crate::delivery::Delivery;
use crate::error::Error;
use crate::forwarder::{ForwardedMessage, ROOM_FOR_A_DEATH};
use crate::topology::{Binding, Exchange, Queue, QueueType, Topology};

use super::failed_message::FailedMessage;
use super::policy::RetryPolicy;
use super::profile::{RetryProfile, RetryStep, WorkQueue};
use super::stamp::{self, header};
use super::traps;

/// How many wait queues there may be beside one work queue. A policy that needs more is refused; a handler that asks for
/// ever other delays gets the next longer one there is.
const MAX_TIERS: usize = 64;

/// See the documentation of [`Retry`](super::Retry).
#[derive(Debug)]
pub(crate) struct Tiers {
    policy: RetryPolicy,
    /// The type of the queues, if the application has chosen one; otherwise they are quorum queues.
    queue_type: Option<QueueType>,
    /// The waits for which there are queues, or will be before the next message goes there.
    waits: Mutex<BTreeSet<Tier>>,
}

/// What the messages of a wait queue have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Tier {
    /// Their priority, unless it is the usual one. A quorum queue of RabbitMQ 4.0 serves higher ones first, and only
    /// what is first expires: in one queue the others would wait for as long as such messages come. (In one of 4.3
    /// they do not.)
    priority: Option<u8>,
    wait: Duration,
}

/// The priority that a quorum queue takes a message for that has none.
const USUAL_PRIORITY: u8 = 4;

impl Tier {
    fn new(wait: Duration) -> Self {
        Tier { priority: None, wait: rounded(wait) }
    }

    /// The header by which the broker finds its queue.
    fn header(self) -> String {
        match self.priority {
            None => header::DELAY.to_owned(),
            Some(priority) => format!("{}-p{priority}", header::DELAY),
        }
    }

    /// `jobs.wait.1m30s`, or `jobs.wait.1m30s.9` for those of priority 9.
    fn queue(self, work: &str) -> String {
        let name = tier_name(work, self.wait);
        match self.priority {
            None => name,
            Some(priority) => format!("{name}.{priority}"),
        }
    }
}

impl Tiers {
    pub(crate) fn new(policy: RetryPolicy, queue_type: Option<QueueType>) -> Self {
        let waits = policy.all_waits(MAX_TIERS).unwrap_or_default();
        let waits = waits.into_iter().map(Tier::new).collect();
        Tiers { policy, queue_type, waits: Mutex::new(waits) }
    }

    /// The queue that comes nearest, and is not shorter unless there is no other.
    fn tier(&self, wait: Duration, priority: Option<u8>) -> Tier {
        let mut waits = lock(&self.waits);
        let wanted = Tier { priority, ..Tier::new(wait) };
        if waits.len() < MAX_TIERS {
            waits.insert(wanted);
        }
        let alike = |tier: &&Tier| tier.priority == priority;
        let longer = waits.range(wanted..).next().filter(alike);
        match longer.or_else(|| waits.iter().rfind(alike)).copied() {
            Some(tier) => tier,
            // There is room for no more: then it waits among the usual ones.
            None if priority.is_some() => {
                drop(waits);
                self.tier(wait, None)
            }
            None => wanted,
        }
    }

    /// The priority by which a message has to wait apart: in classic queues no priority counts.
    fn priority(&self, delivery: &Delivery) -> Option<u8> {
        let priority = delivery.properties().priority?;
        let is_classic = self.queue_type == Some(QueueType::Classic);
        (priority != USUAL_PRIORITY && !is_classic).then_some(priority)
    }

    /// A quorum queue unless the application has chosen a type, whatever the work queue is: a classic queue forgets an
    /// expired message before the work queue has it, and a node that is killed in that moment loses the message.
    fn queue(&self, name: String) -> Queue {
        Queue::new(name).of_type(self.queue_type.unwrap_or(QueueType::Quorum))
    }

    fn check(&self, work: &WorkQueue) -> Result<(), Error> {
        traps::check_work_queue(work, &self.policy)?;
        if self.policy.all_waits(MAX_TIERS).is_none() {
            let why = format!(
                "the policy has more than {MAX_TIERS} different waits, and each needs a queue: cap them"
            );
            return Err(traps::refusal(work.name(), why));
        }
        Ok(())
    }
}

impl RetryProfile for Tiers {
    fn policy(&self) -> &RetryPolicy {
        &self.policy
    }

    fn topology(&self, work: &WorkQueue) -> Result<Topology, Error> {
        self.check(work)?;
        let name = work.name();
        let (wait, back, parked) = (wait_name(name), return_name(name), parked_name(name));
        let mut topology = Topology::new()
            .exchange(Exchange::fanout(parked.as_str()))
            .exchange(Exchange::fanout(back.as_str()).alternate(parked.as_str()))
            .exchange(Exchange::headers(wait.as_str()))
            .queue(lasting(self.queue(parked.clone())).bind(parked, ""))
            .binding(Binding::to_queue(name, back.as_str(), ""));
        for tier in lock(&self.waits).iter() {
            let queue = self.queue(tier.queue(name));
            let queue = at_least_once(queue.message_ttl(tier.wait).dead_letter_to(&back));
            let binding = Binding::to_queue(queue.name(), wait.as_str(), "")
                .argument(tier.header(), milliseconds(tier.wait));
            topology = topology.queue(queue).binding(binding);
        }
        Ok(topology)
    }

    fn honors_retry_after(&self) -> bool {
        true
    }

    fn requires_queue_type(&self) -> bool {
        self.queue_type.is_some()
    }

    fn failures(&self, properties: &RawProperties, _queue: &str) -> u32 {
        stamp::failures(properties)
    }

    fn retry(&self, message: &FailedMessage<'_>, wait: Duration) -> RetryStep {
        let FailedMessage { delivery, failed, detail } = *message;
        let name = delivery.queue();
        let mut parcel = if wait.is_zero() {
            ForwardedMessage::of(delivery, return_name(name))
        } else {
            let tier = self.tier(wait, self.priority(delivery));
            let mut parcel = ForwardedMessage::of(delivery, wait_name(name));
            forget_wait(&mut parcel);
            parcel.set_header(&tier.header(), milliseconds(tier.wait));
            parcel.keep_expiration();
            parcel.forget_fatal_deaths(name);
            parcel.reserve = ROOM_FOR_A_DEATH;
            parcel
        };
        failed.stamp(&mut parcel, detail);
        parcel.into()
    }

    fn park(&self, message: &FailedMessage<'_>) -> RetryStep {
        let FailedMessage { delivery, failed, detail } = *message;
        let mut parcel = ForwardedMessage::of(delivery, parked_name(delivery.queue()));
        parcel.keep_expiration();
        forget_wait(&mut parcel);
        parcel.set_header(header::RETURN, return_name(delivery.queue()));
        failed.stamp(&mut parcel, detail);
        parcel.into()
    }
}

/// The delivery limit of quorum queues with parked messages: as good as none. From 4.0 on a queue that names none has one of
/// 20, and whoever has looked at a message so often has lost it. (-1, which means none there, is below zero to 3.10: it
/// drops a message that is given back once.)
pub(crate) const PARKED_DELIVERY_LIMIT: i64 = 1_000_000_000;

/// However often its messages are looked at, they stay.
pub(crate) fn lasting(queue: Queue) -> Queue {
    match queue.queue_type() {
        Some(QueueType::Quorum) => queue.argument("x-delivery-limit", PARKED_DELIVERY_LIMIT),
        _ => queue,
    }
}

/// Dead letters leave it only once they have arrived, if it is of a type that can.
pub(crate) fn at_least_once(queue: Queue) -> Queue {
    match queue.queue_type() {
        Some(QueueType::Quorum) => queue.dead_letter_at_least_once(),
        _ => queue,
    }
}

pub(crate) fn wait_name(queue: &str) -> String {
    format!("{queue}.wait")
}

pub(crate) fn return_name(queue: &str) -> String {
    format!("{queue}.return")
}

pub(crate) fn parked_name(queue: &str) -> String {
    format!("{queue}.parked")
}

/// Takes away what led it to where it waited before.
fn forget_wait(parcel: &mut ForwardedMessage) {
    parcel.remove_header(header::DELAY);
    if let Some(priority) = parcel.properties.priority {
        parcel.remove_header(&Tier { priority: Some(priority), wait: Duration::ZERO }.header());
    }
}

/// `jobs.wait.1m30s`: in the largest units that say it exactly.
fn tier_name(queue: &str, wait: Duration) -> String {
    let mut name = wait_name(queue);
    name.push('.');
    let mut rest = wait.as_millis();
    for (unit, size) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)]
    {
        if rest >= size {
            name.push_str(&format!("{}{unit}", rest / size));
            rest %= size;
        }
    }
    name
}

fn milliseconds(wait: Duration) -> String {
    wait.as_millis().to_string()
}

/// Up to whole milliseconds, at least one.
fn rounded(wait: Duration) -> Duration {
    let milliseconds = wait.as_nanos().div_ceil(1_000_000).max(1);
    Duration::from_millis(u64::try_from(milliseconds).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_queue_is_named_by_its_wait() {
        let name = |milliseconds| tier_name("jobs", Duration::from_millis(milliseconds));
        assert_eq!(name(2000), "jobs.wait.2s");
        assert_eq!(name(90_000), "jobs.wait.1m30s");
        assert_eq!(name(4500), "jobs.wait.4s500ms");
        assert_eq!(name(14_400_000), "jobs.wait.4h");
        assert_eq!(name(1), "jobs.wait.1ms");
    }

    #[test]
    fn other_waits_get_queues_of_their_own_until_there_are_too_many() {
        let tiers = Tiers::new(RetryPolicy::fixed(Duration::from_secs(10)), None);
        let tier = |wait, priority| tiers.tier(Duration::from_millis(wait), priority);
        assert_eq!(tier(10_000, Some(9)).queue("jobs"), "jobs.wait.10s.9");
        for step in 0..1000 {
            tier(step * 10, None);
        }
        assert_eq!(lock(&tiers.waits).len(), MAX_TIERS);
        assert_eq!(tier(7000, None), Tier::new(Duration::from_secs(10)));
        assert_eq!(tier(70_000, None), Tier::new(Duration::from_secs(10)));
        assert_eq!(tier(105, None), Tier::new(Duration::from_millis(110)));
        assert_eq!(tier(70_000, Some(9)).queue("jobs"), "jobs.wait.10s.9");
        assert_eq!(tier(7000, Some(5)), Tier::new(Duration::from_secs(10)));
    }
}
