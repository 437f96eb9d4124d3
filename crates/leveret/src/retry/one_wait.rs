//! What designs with one wait queue have in common: one wait, and the type of their queues.

use std::time::Duration;

use crate::error::Error;
use crate::topology::{Queue, QueueType};

use super::policy::RetryPolicy;
use super::profile::WorkQueue;
use super::tiers::lasting;
use super::traps;

/// A policy for a wait queue with one TTL.
#[derive(Clone, Debug)]
pub(crate) struct OneWait {
    pub(crate) policy: RetryPolicy,
    pub(crate) interval: Duration,
    /// The type of the queues beside the work queue, if somebody has asked for one.
    pub(crate) queue_type: Option<QueueType>,
    /// Queues get no arguments beyond those that the design names.
    pub(crate) plain_arguments: bool,
}

impl OneWait {
    pub(crate) fn new(interval: Duration, retries: u32) -> Self {
        let policy = RetryPolicy::fixed(interval).max_retries(retries);
        OneWait { policy, interval, queue_type: None, plain_arguments: false }
    }

    pub(crate) fn set_interval(&mut self, interval: Duration) {
        self.interval = interval;
        self.policy = self.policy.clone().with_wait(interval);
    }

    pub(crate) fn set_max_retries(&mut self, retries: u32) {
        self.policy = self.policy.clone().max_retries(retries);
    }

    pub(crate) fn set_policy(&mut self, policy: RetryPolicy) {
        // One that never tries again does not wait, and says nothing about the queue.
        self.interval = policy.only_wait().unwrap_or(self.interval);
        self.policy = policy;
    }

    pub(crate) fn check(&self, work: &WorkQueue) -> Result<(), Error> {
        traps::check_work_queue(work, &self.policy)?;
        let name = work.name();
        if self.interval.as_millis() == 0 {
            return Err(traps::refusal(name, "the interval has to be a millisecond at least"));
        }
        if self.policy.retries() != Some(0) && self.policy.only_wait().is_none() {
            let why = "the policy has different waits, and there is one wait queue: in it, messages would stand behind those \
                       that wait longer. Use a fixed wait, or `Retry::new`, which has a queue for each";
            return Err(traps::refusal(name, why));
        }
        Ok(())
    }

    /// A queue beside the work queue: of the type that was asked for, or else of the same.
    pub(crate) fn companion(&self, work: &WorkQueue, name: impl Into<String>) -> Queue {
        match self.queue_type {
            Some(queue_type) => Queue::new(name).of_type(queue_type),
            None => work.companion(name),
        }
    }

    /// The parking lot: no delivery limit takes its messages, unless the queue has only the arguments of the design.
    pub(crate) fn parking_lot(&self, queue: Queue) -> Queue {
        if self.plain_arguments { queue } else { lasting(queue) }
    }

    /// The queue in which messages wait, to go to this exchange then.
    pub(crate) fn wait_queue(&self, queue: Queue, exchange: &str) -> Queue {
        let queue = queue.message_ttl(self.interval).dead_letter_to(exchange);
        if self.plain_arguments { queue } else { at_least_once(queue) }
    }
}

/// Dead letters leave it only once they have arrived, if it is of a type that can.
pub(crate) fn at_least_once(queue: Queue) -> Queue {
    let overflow = queue.arguments.get("x-overflow").and_then(|value| value.as_str());
    let may = matches!(overflow, None | Some("reject-publish"));
    match queue.queue_type() {
        Some(QueueType::Quorum) if may => queue.dead_letter_at_least_once(),
        _ => queue,
    }
}
