//! Retrying without queues of its own: back to the queue, or away from it.

use std::time::Duration;

use crate::amqp::RawProperties;
use crate::error::Error;
use crate::topology::Topology;
use crate::topology::cycle::UNLIMITED;

use super::failed_message::FailedMessage;
use super::policy::RetryPolicy;
use super::profile::{RetryProfile, RetryStep, WorkQueue};
use super::traps;

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

impl RetryProfile for InPlace {
    fn policy(&self) -> &RetryPolicy {
        &self.policy
    }

    fn topology(&self, queue: &WorkQueue) -> Result<Topology, Error> {
        match queue.delivery_limit().filter(|limit| (0..UNLIMITED).contains(limit)) {
            None => Ok(Topology::new()),
            Some(limit) => {
                let why = format!(
                    "it is for ever, and the queue has a delivery limit of {limit}. Take that away, or use `Retry::new`, \
                     which counts by itself and parks what does not get better"
                );
                Err(traps::refusal(queue.name(), why))
            }
        }
    }

    fn holds_failed_messages(&self) -> bool {
        true
    }

    /// Nobody counts what goes back to its queue.
    fn failures(&self, _properties: &RawProperties, _queue: &str) -> u32 {
        0
    }

    fn retry(&self, _: &FailedMessage<'_>, _: Duration) -> RetryStep {
        RetryStep::Requeue(self.pause)
    }

    fn park(&self, _: &FailedMessage<'_>) -> RetryStep {
        RetryStep::DeadLetter
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

impl RetryProfile for Discard {
    fn policy(&self) -> &RetryPolicy {
        &self.policy
    }

    fn topology(&self, _: &WorkQueue) -> Result<Topology, Error> {
        Ok(Topology::new())
    }

    fn failures(&self, _properties: &RawProperties, _queue: &str) -> u32 {
        0
    }

    fn retry(&self, _: &FailedMessage<'_>, _: Duration) -> RetryStep {
        RetryStep::DeadLetter
    }

    fn park(&self, _: &FailedMessage<'_>) -> RetryStep {
        RetryStep::DeadLetter
    }
}
