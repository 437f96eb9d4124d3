//! Retrying without queues of its own: back to the queue, or away from it.

use std::time::Duration;

use crate::amqp::RawProperties;
use crate::delivery::Delivery;
use crate::error::{Error, ErrorKind};
use crate::topology::Topology;

use super::policy::RetryPolicy;
use super::profile::{Profile, Step, WorkQueue};
use super::stamp::{Detail, Failed};

/// Back to its queue after a pause, for ever.
#[derive(Debug)]
pub(crate) struct InPlace {
    policy: RetryPolicy,
    pause: Duration,
}

impl InPlace {
    pub(crate) fn new(pause: Duration) -> Self {
        InPlace { policy: RetryPolicy::fixed(pause).unlimited_retries(), pause }
    }
}

impl Profile for InPlace {
    fn policy(&self) -> &RetryPolicy {
        &self.policy
    }

    fn topology(&self, queue: &WorkQueue) -> Result<Topology, Error> {
        if let WorkQueue::Known(known) = queue
            && let Some(trap) = super::traps::of(known, &self.policy)
        {
            let text = format!("messages of queue {:?} cannot be requeued: {trap}", queue.name());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(Topology::new())
    }

    /// Nobody counts what goes back to its queue.
    fn failures(&self, _properties: &RawProperties, _queue: &str) -> u32 {
        0
    }

    fn retry(&self, _: &Delivery, _: &Failed<'_>, _: Duration, _: Detail) -> Step {
        Step::Requeue(self.pause)
    }

    fn park(&self, _: &Delivery, _: &Failed<'_>, _: Detail) -> Step {
        Step::DeadLetter
    }
}

/// To the dead-letter exchange of its queue, or away.
#[derive(Debug)]
pub(crate) struct Discard {
    policy: RetryPolicy,
}

impl Discard {
    pub(crate) fn new() -> Self {
        Discard { policy: RetryPolicy::never() }
    }
}

impl Profile for Discard {
    fn policy(&self) -> &RetryPolicy {
        &self.policy
    }

    fn topology(&self, _: &WorkQueue) -> Result<Topology, Error> {
        Ok(Topology::new())
    }

    fn failures(&self, _properties: &RawProperties, _queue: &str) -> u32 {
        0
    }

    fn retry(&self, _: &Delivery, _: &Failed<'_>, _: Duration, _: Detail) -> Step {
        Step::DeadLetter
    }

    fn park(&self, _: &Delivery, _: &Failed<'_>, _: Detail) -> Step {
        Step::DeadLetter
    }
}
