//! The default prefetch of a consumer, which follows from how many messages it handles at a time.
//!
//! RabbitMQ hands a consumer as many messages as its prefetch allows, whether it handles them now or later. A message that
//! waits in one consumer cannot go to another one that is idle. So handlers of a shared queue take no messages beyond those
//! that they handle, and what cannot be shared is taken in large pieces.

use super::{Running, Settings};
use crate::connection::Client;
use crate::retry::RetryProfile;
use crate::topology::{Queue, QueueType};

/// Deliveries that nobody else could take: one round trip brings many.
const UNSHARED: u16 = 100;

/// The prefetch of a consumer with handlers, and whether that is for its workers alone: then failed messages that cannot be moved
/// must not use it up.
pub(super) fn for_handlers(
    client: &Client,
    settings: &Settings,
    running: &Running,
    retry: &dyn RetryProfile,
) -> (u16, bool) {
    let workers = u16::try_from(running.workers).unwrap_or(u16::MAX);
    // Failed messages that go back to the head of their queue would come again before any other. A pool shares all the same.
    let holds_failed = retry.holds_failed_messages() && running.subscribers == 1;
    match settings.prefetch {
        Some(prefetch) => (prefetch, false),
        None if holds_failed || !is_shared(client, settings, running) => {
            (workers.saturating_mul(2).max(UNSHARED), false)
        }
        None => (workers, true),
    }
}

/// The prefetch of a stream: how many deliveries its reader handles at a time is unknown.
pub(super) fn for_stream() -> u16 {
    UNSHARED
}

/// Whether other consumers may take what this one leaves in the queue.
fn is_shared(client: &Client, settings: &Settings, running: &Running) -> bool {
    let is_stream = settings.arguments.get("x-stream-offset").is_some();
    let has_one_reader = |topology: &crate::Topology| {
        let queue = topology.queues().iter().find(|queue| queue.name() == settings.queue);
        queue.is_some_and(|queue| has_one_reader(queue, running.subscribers))
    };
    !settings.exclusive && !is_stream && !client.core().remembered.look(has_one_reader)
}

/// Whether one consumer at a time gets the messages of a queue, or each consumer all of them. The subscribers of a pool
/// share an exclusive queue.
fn has_one_reader(queue: &Queue, subscribers: usize) -> bool {
    (queue.is_exclusive() && subscribers == 1)
        || queue.has_single_active_consumer()
        || queue.queue_type() == Some(QueueType::Stream)
}
