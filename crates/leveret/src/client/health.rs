//! How a client is: the truth of the moment about its connections and consumers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::time::Instant;

use super::line::{Line, State};
use crate::amqp::{self, Pulse, lock};
use crate::error::Error;

/// What [`Client::health`](super::Client::health) found.
#[derive(Clone, Debug)]
pub struct Health {
    /// The client's connections.
    pub connections: Vec<ConnectionHealth>,
    /// The consumers that were begun and not stopped.
    pub consumers: Vec<ConsumerHealth>,
}

impl Health {
    /// Whether all connections are up, none is blocked, and all consumers get messages.
    pub fn is_healthy(&self) -> bool {
        let up = |connection: &ConnectionHealth| connection.is_up && connection.blocked.is_none();
        self.connections.iter().all(up) && self.consumers.iter().all(|consumer| consumer.is_live)
    }
}

/// One connection.
#[derive(Clone, Debug)]
pub struct ConnectionHealth {
    /// Its name, as the broker's management pages show it.
    pub name: String,
    /// Whether it is there, with its topology.
    pub is_up: bool,
    /// The broker it is connected to.
    pub endpoint: Option<String>,
    /// Why the broker takes no publishes on it, while it does not.
    pub blocked: Option<String>,
    /// Why it is not there.
    pub error: Option<Error>,
}

/// One consumer.
#[derive(Clone, Debug)]
pub struct ConsumerHealth {
    /// The queue it consumes.
    pub queue: String,
    /// Whether the broker delivers to it.
    pub is_live: bool,
    /// Since when it has been so.
    pub since: Instant,
    /// Why not.
    pub error: Option<Error>,
}

pub(crate) fn of_line(line: &Line) -> ConnectionHealth {
    let mut health = ConnectionHealth {
        name: line.name.clone(),
        is_up: false,
        endpoint: None,
        blocked: None,
        error: None,
    };
    match line.state() {
        State::Up(up) => {
            health.is_up = !up.connection.is_closed();
            health.endpoint = Some(up.endpoint.to_string());
            health.blocked = up.connection.blocked().borrow().clone();
        }
        State::Down(error) => health.error = error,
        State::Ended(error) => health.error = Some(error),
    }
    health
}

/// The consumers of a client.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    consumers: Mutex<BTreeMap<u64, Known>>,
    next: AtomicU64,
}

/// What is known of a consumer.
#[derive(Debug)]
struct Known {
    health: ConsumerHealth,
    /// Tells whether it still is as it was when it was begun: its owner may not have noticed yet.
    pulse: Option<Pulse>,
}

impl Known {
    fn health(&self) -> ConsumerHealth {
        let mut health = self.health.clone();
        health.is_live &= self.pulse.as_ref().is_some_and(Pulse::is_alive);
        health
    }
}

impl Registry {
    /// The queues that are consumed, as far as this side knows.
    pub(crate) fn consumed(&self) -> BTreeSet<String> {
        let consumers = lock(&self.consumers);
        let live = consumers.values().filter(|known| known.health().is_live);
        live.map(|known| known.health.queue.clone()).collect()
    }

    /// The broker has no consumers on this queue: those that believe to be are to begin anew.
    pub(crate) fn stop_consumers(&self, queue: &str) {
        for known in lock(&self.consumers).values().filter(|known| known.health.queue == queue) {
            if let Some(pulse) = &known.pulse {
                pulse.stop(amqp::Error::unknown_consumer());
            }
        }
    }

    pub(crate) fn consumers(&self) -> Vec<ConsumerHealth> {
        lock(&self.consumers).values().map(Known::health).collect()
    }
}

/// A consumer's own entry, which goes with it.
#[derive(Debug)]
pub(crate) struct Entry {
    core: Arc<super::core::Core>,
    id: u64,
}

impl Entry {
    /// Not live yet.
    pub(crate) fn new(core: &Arc<super::core::Core>, queue: &str) -> Entry {
        let id = core.health.next.fetch_add(1, Ordering::Relaxed);
        let health = ConsumerHealth {
            queue: queue.to_owned(),
            is_live: false,
            since: Instant::now(),
            error: None,
        };
        lock(&core.health.consumers).insert(id, Known { health, pulse: None });
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
            known.pulse = pulse;
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.core.health.consumers).remove(&self.id);
    }
}
