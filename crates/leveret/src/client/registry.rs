//! What lives on a client, so that its health can be told.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use tokio::time::Instant;

use super::core::Core;
use super::health::ConsumerHealth;
use crate::amqp::{Pulse, lock};
use crate::error::Error;
use crate::{pool, publisher, rpc};

/// The consumers, publishers, callers and pools of a client.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    consumers: Mutex<BTreeMap<u64, Known>>,
    next: AtomicU64,
    pub(crate) publishers: Members<publisher::Shared>,
    pub(crate) callers: Members<rpc::Calling>,
    pub(crate) pools: Members<pool::Pool>,
}

/// Those that are still used by somebody.
#[derive(Debug)]
pub(crate) struct Members<T>(Mutex<Vec<Weak<T>>>);

impl<T> Default for Members<T> {
    fn default() -> Self {
        Members(Mutex::default())
    }
}

impl<T> Members<T> {
    pub(crate) fn add(&self, member: &Arc<T>) {
        let mut members = lock(&self.0);
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(member));
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        lock(&self.0).iter().filter_map(Weak::upgrade).collect()
    }
}

/// What is known of a consumer.
#[derive(Debug)]
struct Known {
    health: ConsumerHealth,
    /// Its place on the broker, while it has one.
    seat: Option<Arc<Seat>>,
}

/// A consumer's place on the broker: the next time it begins, it gets another.
#[derive(Debug)]
pub(super) struct Seat {
    /// Tells whether the broker still delivers: the consumer's owner may not have noticed yet that it does not.
    pub(super) pulse: Pulse,
    /// The broker has once counted it among the consumers of its queue.
    pub(super) was_counted: AtomicBool,
}

impl Known {
    fn health(&self) -> ConsumerHealth {
        let mut health = self.health.clone();
        health.is_live &= self.seat.as_ref().is_some_and(|seat| seat.pulse.is_alive());
        health
    }
}

impl Registry {
    /// The consumers to which the broker delivers as far as this side knows, by their queues.
    pub(super) fn seats(&self) -> BTreeMap<String, Vec<Arc<Seat>>> {
        let mut seats: BTreeMap<String, Vec<Arc<Seat>>> = BTreeMap::new();
        for known in lock(&self.consumers).values() {
            if let Some(seat) = known.seat.as_ref().filter(|seat| seat.pulse.is_alive()) {
                seats.entry(known.health.queue.clone()).or_default().push(Arc::clone(seat));
            }
        }
        seats
    }

    pub(crate) fn consumers(&self) -> Vec<ConsumerHealth> {
        lock(&self.consumers).values().map(Known::health).collect()
    }
}

/// A consumer's own entry, which goes with it.
#[derive(Debug)]
pub(crate) struct Entry {
    core: Arc<Core>,
    id: u64,
}

impl Entry {
    /// Not live yet.
    pub(crate) fn new(core: &Arc<Core>, queue: &str) -> Entry {
        let id = core.health.next.fetch_add(1, Ordering::Relaxed);
        let health = ConsumerHealth {
            queue: queue.to_owned(),
            is_live: false,
            since: Instant::now(),
            error: None,
        };
        lock(&core.health.consumers).insert(id, Known { health, seat: None });
        Entry { core: Arc::clone(core), id }
    }

    pub(crate) fn live(&self, pulse: Pulse) {
        self.set(None, Some(pulse));
    }

    pub(crate) fn lost(&self, error: Error) {
        self.set(Some(error), None);
    }

    fn set(&self, error: Option<Error>, pulse: Option<Pulse>) {
        if let Some(known) = lock(&self.core.health.consumers).get_mut(&self.id) {
            let health = &mut known.health;
            if health.is_live != pulse.is_some() {
                health.since = Instant::now();
            }
            (health.is_live, health.error) = (pulse.is_some(), error);
            let was_counted = AtomicBool::new(false);
            known.seat = pulse.map(|pulse| Arc::new(Seat { pulse, was_counted }));
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.core.health.consumers).remove(&self.id);
    }
}
