//! How a relay is.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::RelaySummary;
use super::event::{Announcer, RelayEvent, RelayEvents};
use super::telemetry::Counted;
use crate::dialect::{Refused, Settled};
use crate::error::{Error, ErrorKind};
use crate::outbox::Backlog;

/// Tells how a [`Relay`](super::Relay) is. It clones cheaply, and may outlive it.
#[derive(Clone, Debug)]
pub struct RelayMonitor {
    state: Arc<State>,
}

impl RelayMonitor {
    pub(super) fn new(state: Arc<State>) -> Self {
        RelayMonitor { state }
    }

    /// How it is now.
    pub fn health(&self) -> RelayHealth {
        self.state.health()
    }

    /// What happens to it and to its messages, from now on.
    pub fn watch(&self) -> RelayEvents {
        self.state.announcer.listen()
    }

    /// What it has done so far.
    pub fn summary(&self) -> RelaySummary {
        self.state.summary()
    }
}

/// How a relay is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RelayHealth {
    /// Whether it runs.
    pub is_running: bool,
    /// Whether the database tells it of new messages. If not, it looks for them.
    pub is_listening: bool,
    /// What the database has failed at, since it last answered.
    pub database: Option<String>,
    /// Why the broker does not take messages, since it last took some.
    pub broker: Option<String>,
    /// When messages were last sent.
    pub last_sent: Option<Instant>,
}

impl RelayHealth {
    /// Whether it runs, and both sides are there.
    pub fn is_healthy(&self) -> bool {
        self.is_running && self.database.is_none() && self.broker.is_none()
    }
}

/// One of those that a relay is between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The database that the outbox is in.
    Database,
    /// The broker that its messages go to.
    Broker,
}

#[derive(Debug)]
pub(super) struct State {
    is_running: AtomicBool,
    is_listening: AtomicBool,
    sent: AtomicU64,
    refused: AtomicU64,
    set_aside: AtomicU64,
    troubles: Mutex<Troubles>,
    counted: Counted,
    announcer: Announcer,
}

#[derive(Debug, Default)]
struct Troubles {
    database: Option<String>,
    broker: Option<String>,
    last_sent: Option<Instant>,
}

/// While this is held, the relay runs.
pub(super) struct Running<'a>(&'a AtomicBool);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl State {
    pub(super) fn new(schema: &str) -> Self {
        State {
            is_running: AtomicBool::default(),
            is_listening: AtomicBool::default(),
            sent: AtomicU64::default(),
            refused: AtomicU64::default(),
            set_aside: AtomicU64::default(),
            troubles: Mutex::default(),
            counted: Counted::new(schema),
            announcer: Announcer::new(),
        }
    }

    pub(super) fn running(&self) -> Running<'_> {
        self.is_running.store(true, Ordering::Relaxed);
        Running(&self.is_running)
    }

    pub(super) fn listens(&self, listens: bool) {
        self.is_listening.store(listens, Ordering::Relaxed);
    }

    fn troubles(&self) -> std::sync::MutexGuard<'_, Troubles> {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What fails again and again is told once.
    pub(super) fn failed(&self, error: &Error) {
        let side = match error.kind() {
            ErrorKind::Broker => Side::Broker,
            _ => Side::Database,
        };
        self.counted.failed(side);
        let text = error.to_string();
        let mut troubles = self.troubles();
        let known = match side {
            Side::Broker => troubles.broker.replace(text.clone()),
            Side::Database => troubles.database.replace(text.clone()),
        };
        drop(troubles);
        if known.is_none() {
            self.announcer.announce(RelayEvent::Interrupted { side, error: text });
        }
    }

    pub(super) fn is_well(&self, side: Side) {
        let mut troubles = self.troubles();
        let known = match side {
            Side::Broker => troubles.broker.take(),
            Side::Database => troubles.database.take(),
        };
        drop(troubles);
        if known.is_some() {
            self.announcer.announce(RelayEvent::Resumed { side });
        }
    }

    pub(super) fn settled(&self, settled: Settled, ages: &[f64], took: Duration) {
        let sent = settled.sent.len() as u64;
        let refused = settled.refused.len() as u64;
        let set_aside = settled.refused.iter().filter(|row| row.again_in.is_none()).count() as u64;
        self.sent.fetch_add(sent, Ordering::Relaxed);
        self.refused.fetch_add(refused, Ordering::Relaxed);
        self.set_aside.fetch_add(set_aside, Ordering::Relaxed);
        if sent > 0 {
            self.troubles().last_sent = Some(Instant::now());
        }
        let summary = RelaySummary { sent, refused, set_aside };
        self.counted.settled(&summary, ages, took);
        settled.refused.into_iter().for_each(|row| self.announcer.announce(row.into()));
    }

    pub(super) fn is_counted(&self) -> bool {
        self.counted.is_counted()
    }

    pub(super) fn counted(&self, backlog: Backlog) {
        self.counted.backlog(backlog);
    }

    pub(super) fn summary(&self) -> RelaySummary {
        RelaySummary {
            sent: self.sent.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            set_aside: self.set_aside.load(Ordering::Relaxed),
        }
    }

    fn health(&self) -> RelayHealth {
        let troubles = self.troubles();
        RelayHealth {
            is_running: self.is_running.load(Ordering::Relaxed),
            is_listening: self.is_listening.load(Ordering::Relaxed),
            database: troubles.database.clone(),
            broker: troubles.broker.clone(),
            last_sent: troubles.last_sent,
        }
    }
}

impl Side {
    pub(super) fn name(self) -> &'static str {
        match self {
            Side::Database => "database",
            Side::Broker => "broker",
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<Refused> for RelayEvent {
    fn from(row: Refused) -> Self {
        let Refused { id, exchange, routing_key, error, again_in } = row;
        match again_in {
            Some(_) => RelayEvent::Refused { id, exchange, routing_key, error },
            None => RelayEvent::SetAside { id, exchange, routing_key, error },
        }
    }
}
