//! The relay: sends what is in an outbox.
//!
//! ```text
//!  Listener --rings--> Worker: claim lanes and rows --> Batch: waves of messages --> settle: rows gone, lanes given back
//!                        ^                                 |
//!                        +------ poll, backoff ------------+--> refused: later again, and at last set aside
//! ```
//!
//! **Order.** All rows of an ordering key are in one lane, and whoever has a lane sends its rows from the first on, each once
//! the one before it was confirmed. So even if two relays should ever have the same lane, because one of them was cut off from
//! the database and does not know it, each of them sends a run without gaps that begins with what was never confirmed: a
//! message may come twice, but never for the first time after a later one.

mod batch;
mod event;
mod health;
mod publishers;
mod telemetry;
mod waves;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use leveret::{Backoff, Client};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

pub use event::{RelayEvent, RelayEvents};
pub use health::{RelayHealth, RelayMonitor, Side};

use crate::dialect::ClaimOptions;
use crate::error::Error;
use crate::outbox::store::SharedStore;
use health::State;
use publishers::Publishers;
use worker::{Listener, Sweeper, Worker};

/// When the next message of an ordering key is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Once the one before it was confirmed. The default.
    #[default]
    Strict,
    /// At once, on the same channel. Far faster where there are few keys; but if the broker refuses a message (a queue is full, or
    /// not bound yet) and takes the next one, that comes first.
    Pipelined,
}

#[derive(Clone, Debug)]
struct Settings {
    workers: usize,
    batch: usize,
    poll: Option<Duration>,
    listen: bool,
    patience: Duration,
    attempts: u32,
    backoff: Backoff,
    order: Order,
    hold_keys: bool,
    keep: Option<Duration>,
}

/// How to make a [`Relay`]. See [`Outbox::relay`](crate::Outbox::relay).
#[derive(Clone, Debug)]
#[must_use]
pub struct RelayBuilder {
    client: Client,
    store: SharedStore,
    settings: Settings,
}

impl RelayBuilder {
    pub(crate) fn new(client: Client, store: SharedStore) -> Self {
        let (initial, max) = (Duration::from_secs(1), Duration::from_secs(300));
        let settings = Settings {
            workers: 2,
            batch: 1000,
            poll: None,
            listen: true,
            patience: Duration::from_secs(10),
            attempts: 10,
            backoff: Backoff { initial, multiplier: 2.0, max },
            order: Order::default(),
            hold_keys: false,
            keep: None,
        };
        RelayBuilder { client, store, settings }
    }

    /// How many batches are under way at once, so that one is published while another is read or settled. 2 by default. Each
    /// takes a connection of the pool while it works; on PostgreSQL the relay has one more, to be told of new messages.
    pub fn workers(mut self, workers: usize) -> Self {
        self.settings.workers = workers.max(1);
        self
    }

    /// How many messages a batch has at most. 1000 by default; 16 MiB of bodies, if that is less.
    pub fn batch(mut self, messages: usize) -> Self {
        self.settings.batch = messages.max(1);
        self
    }

    /// How often to look for new messages when nobody tells of them: once a second on PostgreSQL, which does, and ten times a
    /// second on SQLite, by default.
    pub fn poll_every(mut self, time: Duration) -> Self {
        self.settings.poll = Some(time);
        self
    }

    /// New messages are only looked for. For a PostgreSQL behind a pooler of transactions, where one cannot listen.
    pub fn without_listening(mut self) -> Self {
        self.settings.listen = false;
        self
    }

    /// How long publishing a batch, or a statement to the database, may take before it is given up and tried again. 10 s by default.
    /// On SQLite the messages that a killed relay was at work on wait twice as long, and on PostgreSQL those of one whose
    /// machine is gone, four times.
    pub fn patience(mut self, time: Duration) -> Self {
        self.settings.patience = time;
        self
    }

    /// How often a message is tried that the broker refuses, because it reaches no queue, a queue is full, or the exchange is not
    /// there. After that it is set aside: see [`Outbox::aside`](crate::Outbox::aside). 10 times by default.
    ///
    /// A broker that is away, or does not answer, is waited for.
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.settings.attempts = attempts.max(1);
        self
    }

    /// How long to wait between the attempts: from a second on, twice as long each time, up to five minutes, by default. The later
    /// messages of its key wait with it.
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.settings.backoff = backoff;
        self
    }

    /// When the next message of an ordering key is sent.
    pub fn order(mut self, order: Order) -> Self {
        self.settings.order = order;
        self
    }

    /// A message that was set aside holds back the later ones of its key until somebody has it sent again, or discards it. By
    /// default they are sent. All relays of an outbox should agree on this.
    pub fn hold_keys(mut self) -> Self {
        self.settings.hold_keys = true;
        self
    }

    /// Messages that were sent stay in the table for so long, for whoever wants to look at them. By default they are deleted. All
    /// relays of an outbox should agree on this.
    pub fn keep_sent(mut self, time: Duration) -> Self {
        self.settings.keep = Some(time);
        self
    }

    /// The relay. It fails if the tables are not there, or not those of this version.
    pub async fn build(self) -> Result<Relay, Error> {
        let RelayBuilder { client, store, settings } = self;
        let patience = settings.patience;
        let checked = timeout(patience, store.check()).await;
        checked.unwrap_or_else(|_| Err(Error::late("looking at the outbox", patience)))?;
        let state = Arc::new(State::new(store.schema()));
        let window = settings.batch.saturating_mul(settings.workers);
        let publishers = Publishers::new(client.clone(), window, settings.patience);
        let shared = Shared { client, store, settings, publishers, state };
        shared.maintain(None).await?;
        Ok(Relay { shared: Arc::new(shared) })
    }
}

/// What the tasks of a relay share.
#[derive(Debug)]
struct Shared {
    client: Client,
    store: SharedStore,
    settings: Settings,
    publishers: Publishers,
    state: Arc<State>,
}

impl Shared {
    fn claim_options(&self) -> ClaimOptions {
        ClaimOptions {
            rows: self.settings.batch,
            hold_keys: self.settings.hold_keys,
            // Sending takes as long as it may, and settling after it.
            lease: self.settings.patience.saturating_mul(2),
            holder: crate::unique_name(),
        }
    }

    fn poll(&self) -> Duration {
        self.settings.poll.unwrap_or_else(|| self.store.poll_every())
    }
}

/// Sends what is in an [`Outbox`](crate::Outbox).
///
/// There may be as many of them as there are instances of a program: each message is sent by one. It waits for a broker or
/// database that is away. What it was at work on when it died is sent again, by whoever is there.
#[derive(Debug)]
#[must_use = "it sends nothing unless it runs"]
pub struct Relay {
    shared: Arc<Shared>,
}

/// What a relay did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RelaySummary {
    /// Messages that the broker has confirmed.
    pub sent: u64,
    /// How often the broker has refused one.
    pub refused: u64,
    /// Messages that were set aside.
    pub set_aside: u64,
}

impl Relay {
    /// Tells how the relay is, also while it runs.
    pub fn monitor(&self) -> RelayMonitor {
        RelayMonitor::new(Arc::clone(&self.shared.state))
    }

    /// Sends messages until the client or the pool is closed.
    pub async fn run(self) -> Result<RelaySummary, Error> {
        self.run_until(std::future::pending::<()>()).await
    }

    /// Sends messages until `stop` is done: then finishes the batches that are under way, and returns what was done.
    ///
    /// It fails if the client is closed before, or has given up its broker, and if the pool is closed.
    pub async fn run_until(self, stop: impl Future) -> Result<RelaySummary, Error> {
        let (stopper, stopped) = watch::channel(false);
        let (ringer, bell) = watch::channel(());
        // Both end with this function, whatever happens to it.
        let mut workers = JoinSet::new();
        let mut others = JoinSet::new();
        for _ in 0..self.shared.settings.workers {
            let worker = Worker::new(&self.shared, stopped.clone());
            workers.spawn(worker.run(bell.clone()));
        }
        if self.shared.settings.listen {
            others.spawn(Listener::new(&self.shared).run(ringer.clone()));
        }
        others.spawn(Sweeper::new(&self.shared).run());
        let _running = self.shared.state.running();
        let mut end = tokio::select! {
            _ = stop => Ok(()),
            Some(ended) = workers.join_next() => ended.unwrap_or_else(resume),
        };
        stopper.send_replace(true);
        while let Some(ended) = workers.join_next().await {
            end = end.and(ended.unwrap_or_else(resume));
        }
        end.map(|()| self.shared.state.summary())
    }

    /// Sends all that is to be sent now, and returns what was done. What was refused before and waits to be tried again,
    /// and what another relay is at work on, is left.
    ///
    /// It fails if database or broker fail meanwhile.
    pub async fn drain(&self) -> Result<RelaySummary, Error> {
        let (_stopper, stopped) = watch::channel(false);
        let before = self.shared.state.summary();
        let worker = Worker::new(&self.shared, stopped);
        while worker.step().await? > 0 {}
        let after = self.shared.state.summary();
        Ok(RelaySummary {
            sent: after.sent - before.sent,
            refused: after.refused - before.refused,
            set_aside: after.set_aside - before.set_aside,
        })
    }
}

/// A worker ends by itself unless it panics, and that is the caller's panic.
fn resume(error: tokio::task::JoinError) -> Result<(), Error> {
    std::panic::resume_unwind(error.into_panic())
}
