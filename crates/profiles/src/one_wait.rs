//! What designs with one wait queue have in common: one wait, and the type of their queues.

use std::time::Duration;

use leveret::retry::WorkQueue;
use leveret::{Error, Queue, QueueType, RetryPolicy};

use crate::queues;

/// A policy for a wait queue with one TTL.
#[derive(Clone, Debug)]
pub(crate) struct OneWait {
    pub(crate) policy: RetryPolicy,
    pub(crate) interval: Duration,
    /// The type of the queues beside the work queue, if one was asked for.
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
        work.check(&self.policy)?;
        if self.interval.as_millis() == 0 {
            return Err(work.refusal("the interval has to be a millisecond at least"));
        }
        if self.policy.retries() != Some(0) && self.policy.only_wait().is_none() {
            let why = "the policy has different waits, and there is one wait queue: in it, messages would stand behind those \
                       that wait longer. Use a fixed wait, or `Retry::new`, which has a queue for each";
            return Err(work.refusal(why));
        }
        Ok(())
    }

    /// A queue beside the work queue: of the type that was asked for, or else of the same.
    fn companion(&self, work: &WorkQueue, name: String) -> Queue {
        match self.queue_type {
            Some(queue_type) => Queue::new(name).of_type(queue_type),
            None => work.companion(name),
        }
    }

    /// The parking lot: no delivery limit takes its messages, unless the queue has only the arguments of the design.
    pub(crate) fn parking_lot(&self, work: &WorkQueue, name: String) -> Queue {
        let queue = self.companion(work, name);
        if self.plain_arguments { queue } else { queues::parking_lot(queue) }
    }

    /// The queue in which messages wait, to go to this exchange then.
    pub(crate) fn wait_queue(&self, work: &WorkQueue, name: String, exchange: &str) -> Queue {
        let queue = self.companion(work, name).message_ttl(self.interval).dead_letter_to(exchange);
        if self.plain_arguments { queue } else { queues::at_least_once(queue) }
    }
}
