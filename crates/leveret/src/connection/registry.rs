//! What lives on a client, so that its health can be told.

use std::collections::BTreeMap;
use std::fmt;
use std::future::ready;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::core::Core;
use super::health::{CallerHealth, ConsumerHealth, PoolHealth, PublisherHealth};
use crate::amqp::{Pulse, lock};
use crate::error::Error;

/// The consumers, publishers, callers and pools of a client.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    consumers: Mutex<BTreeMap<u64, Known>>,
    next: AtomicU64,
    /// A consumer has begun.
    pub(super) began: Notify,
    pub(crate) publishers: Members<dyn ReportHealth<PublisherHealth>>,
    pub(crate) callers: Members<dyn ReportHealth<CallerHealth>>,
    pub(crate) pools: Members<dyn ReportHealth<PoolHealth>>,
}

/// A publisher, caller or pool that says how it is.
pub(crate) trait ReportHealth<H>: fmt::Debug + Send + Sync {
    fn health(&self) -> H;

    /// Mends at once what it would mend later, before its health is asked for.
    fn repair(self: Arc<Self>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(ready(()))
    }
}

/// Those that are still used by somebody.
#[derive(Debug)]
pub(crate) struct Members<T: ?Sized>(Mutex<Vec<Weak<T>>>);

impl<T: ?Sized> Default for Members<T> {
    fn default() -> Self {
        Members(Mutex::default())
    }
}

impl<T: ?Sized> Members<T> {
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
    kind: SeatKind,
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
    pub(super) began: Instant,
    /// The broker is being asked whether it counts it, or has been.
    is_being_counted: AtomicBool,
    kind: SeatKind,
    company: Mutex<Company>,
}

/// The consumers of a queue, those of other programs included, as one of them has seen their number.
#[derive(Debug, Default)]
struct Company {
    most: usize,
    /// They are fewer now. When that was noticed, this consumer had so many deliveries.
    fewer_at: Option<u64>,
}

/// Whose consumer it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SeatKind {
    /// The application's.
    Usual,
    /// The application's; consumers of other priorities may get all messages.
    WithPriority,
    /// The client's own, for the replies to its calls. Its channel must not wait for answers: they wait while the connection is
    /// blocked.
    Replies,
}

impl Seat {
    pub(super) fn is_of_replies(&self) -> bool {
        self.kind == SeatKind::Replies
    }

    fn new(pulse: Pulse, kind: SeatKind) -> Arc<Seat> {
        Arc::new(Seat {
            pulse,
            was_counted: AtomicBool::new(false),
            began: Instant::now(),
            is_being_counted: AtomicBool::new(false),
            kind,
            company: Mutex::default(),
        })
    }

    /// Whether it may get no message although its queue has some. `single_active`: whether the queue gives its messages to one
    /// consumer at a time, if that is known. If not, a consumer that has had no delivery may be a standby.
    pub(super) fn may_have_to_wait(&self, single_active: Option<bool>) -> bool {
        self.kind == SeatKind::WithPriority
            || single_active.unwrap_or_else(|| self.pulse.delivered() == 0)
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

    /// The same of those queues whose consumers have begun since this was called last.
    pub(super) fn seats_to_count(&self) -> BTreeMap<String, Vec<Arc<Seat>>> {
        let mut seats = self.seats();
        let is_new = |seat: &Arc<Seat>| !seat.is_being_counted.swap(true, Ordering::Relaxed);
        seats.retain(|_, seats| seats.iter().filter(|seat| is_new(seat)).count() > 0);
        seats
    }

    /// The same of one queue.
    pub(super) fn seats_of(&self, queue: &str) -> Vec<Arc<Seat>> {
        let consumers = lock(&self.consumers);
        let of_queue = consumers.values().filter(|known| known.health.queue == queue);
        let seats = of_queue.filter_map(|known| known.seat.as_ref());
        seats.filter(|seat| seat.pulse.is_alive()).cloned().collect()
    }

    pub(crate) fn consumers(&self) -> Vec<ConsumerHealth> {
        let consumers = lock(&self.consumers);
        consumers
            .values()
            .filter(|known| known.kind != SeatKind::Replies)
            .map(Known::health)
            .collect()
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
    pub(crate) fn new(core: &Arc<Core>, queue: &str, kind: SeatKind) -> Entry {
        let id = core.health.next.fetch_add(1, Ordering::Relaxed);
        let health = ConsumerHealth {
            queue: queue.to_owned(),
            is_live: false,
            since: Instant::now(),
            error: None,
        };
        lock(&core.health.consumers).insert(id, Known { health, kind, seat: None });
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
            known.seat = pulse.map(|pulse| Seat::new(pulse, known.kind));
        }
        self.core.health.began.notify_one();
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.core.health.consumers).remove(&self.id);
    }
}
