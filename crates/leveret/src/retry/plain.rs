//! Retrying without queues of its own: back to the queue, or away from it.

use std::time::Duration;

use crate::amqp::RawProperties;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::forwarder::ForwardedMessage;
use crate::topology::Topology;
use crate::topology::cycle::UNLIMITED;

use super::failed_message::FailedMessage;
use super::policy::RetryPolicy;
use super::profile::{RetryProfile, RetryStep, WorkQueue, to_queue};
use super::stamp::Origin;
use super::traps;

/// Back to its queue after a pause, for ever.
#[derive(Debug)]
pub(crate) struct InPlace {
    policy: RetryPolicy,
    pause: Duration,
    /// Exchange and key by which messages come to the queue, and nowhere else.
    by: Option<(String, String)>,
}

impl InPlace {
    pub(crate) fn new(pause: Duration) -> Self {
        InPlace { policy: RetryPolicy::fixed(pause).unlimited_retries(), pause, by: None }
    }

    /// For a queue that has its messages by this exchange and key alone: what is put there anew has nothing to say about
    /// where it had come from.
    pub(crate) fn by(mut self, exchange: &str, routing_key: &str) -> Self {
        self.by = Some((exchange.to_owned(), routing_key.to_owned()));
        self
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

    fn republish(&self, delivery: &Delivery, queue: &str, origin: &Origin) -> ForwardedMessage {
        match &self.by {
            Some((exchange, routing_key)) => {
                let mut parcel = ForwardedMessage::of(delivery, exchange);
                parcel.routing_key.clone_from(routing_key);
                parcel
            }
            None => to_queue(delivery, queue, origin),
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
