//! What lives on a client, so that its health can be told.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use tokio::sync::Notify;
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
    /// A consumer has begun.
    pub(super) began: Notify,
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
    /// The broker was asked whether it counts it, when it had just begun.
    pub(super) was_asked_about: AtomicBool,
    company: Mutex<Company>,
}

/// The consumers of a queue, those of other programs included, as one of them has seen their number.
#[derive(Debug, Default)]
struct Company {
    most: usize,
    /// They are fewer now. When that was noticed, this consumer had so many deliveries.
    fewer_at: Option<u64>,
}

impl Seat {
    fn new(pulse: Pulse) -> Arc<Seat> {
        let (was_counted, was_asked_about) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Seat { pulse, was_counted, was_asked_about, company: Mutex::default() })
    }

    /// Notes how many consumers the queue has. Says whether this one may be among those that went: there are fewer than
    /// before, and it has had no delivery since that was noticed.
    pub(super) fn may_be_gone(&self, counted: usize) -> bool {
        let delivered = self.pulse.delivered();
        let mut company = lock(&self.company);
        let at = match company.fewer_at {
            _ if counted >= company.most => None,
            Some(at) if delivered > at => None,
            at => Some(at.unwrap_or(delivered)),
        };
        company.fewer_at = at;
        if at.is_none() {
            company.most = counted;
        }
        at.is_some()
    }
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
            known.seat = pulse.map(Seat::new);
        }
        self.core.health.began.notify_one();
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.core.health.consumers).remove(&self.id);
    }
}
