//! The tasks of a relay: workers, who is told of new messages, and who cleans up.

use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt as _;
use leveret::{Backoff, ErrorKind as Kind};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::Instrument as _;

use super::Shared;
use super::batch::{self, Sent};
use super::health::Side;
use crate::dialect::Maintained;
use crate::error::Error;
use crate::outbox::store::ClaimedRows;

/// How often to see whether the broker is back, and how much there is to do.
const GLANCE: Duration = Duration::from_millis(50);
const SURVEY: Duration = Duration::from_secs(15);

/// A listener that lasts this long was no failure.
const STEADY: Duration = Duration::from_secs(10);

/// Claims, publishes and settles, one batch after the other.
pub(super) struct Worker {
    shared: Arc<Shared>,
    stopped: watch::Receiver<bool>,
}

impl Shared {
    pub(super) fn is_connected(&self) -> bool {
        let health = self.client.health();
        health.connections.iter().all(|line| line.is_up && line.blocked.is_none())
    }

    fn what(&self) -> String {
        format!("outbox {:?}", self.store.schema())
    }

    /// A statement that does not answer is given up.
    async fn in_time<T>(
        &self,
        what: &str,
        work: impl Future<Output = sqlx::Result<T>>,
    ) -> Result<T, Error> {
        let what = || format!("{what} of {}", self.what());
        match timeout(self.settings.patience, work).await {
            Ok(done) => done.map_err(|error| Error::database(what(), error)),
            Err(_) => Err(Error::late(what(), self.settings.patience)),
        }
    }
}

impl Shared {
    /// Puts back lanes: tests that empty all tables empty that of the lanes too. Deletes some of what was kept for longer than this.
    /// Returns whether there may be more to delete.
    pub(super) async fn maintain(&self, keep: Option<Duration>) -> Result<bool, Error> {
        let done = self.store.maintain(keep);
        let Maintained { restored, deleted } = self.in_time("cleaning up messages", done).await?;
        if restored > 0 {
            tracing::warn!("{restored} lanes of {} were missing, and are back", self.what());
        }
        Ok(deleted > 0)
    }
}

impl Worker {
    pub(super) fn new(shared: &Arc<Shared>, stopped: watch::Receiver<bool>) -> Self {
        Worker { shared: Arc::clone(shared), stopped }
    }

    /// Until the relay is stopped, or the client or the pool has ended.
    pub(super) async fn run(self, mut bell: watch::Receiver<()>) -> Result<(), Error> {
        let backoff = Backoff::default();
        let mut failures = 0;
        while !*self.stopped.borrow() {
            // What rings from here on is not missed.
            bell.mark_unchanged();
            let pause = match self.step().await {
                Ok(0) => self.shared.poll(),
                Ok(_) => {
                    failures = 0;
                    continue;
                }
                Err(error) if has_ended(&self.shared, &error) => return Err(error),
                Err(_) => {
                    failures += 1;
                    self.broker_is_back().await;
                    self.pause(backoff.pause(failures)).await;
                    continue;
                }
            };
            failures = 0;
            tokio::select! {
                _ = bell.changed() => {}
                () = self.pause(pause) => {}
                // The next look finds out.
                () = self.shared.store.closed() => {}
            }
        }
        Ok(())
    }

    async fn pause(&self, time: Duration) {
        let mut stopped = self.stopped.clone();
        let _ = timeout(time, stopped.wait_for(|stopped| *stopped)).await;
    }

    /// Waits for the broker, so that nobody else waits for lanes that nothing can be sent from. Not for ever: what else may be
    /// wrong with the client is its own affair.
    async fn broker_is_back(&self) {
        let deadline = Instant::now() + self.shared.settings.patience;
        while !self.shared.is_connected() && !*self.stopped.borrow() && Instant::now() < deadline {
            sleep(GLANCE).await;
        }
    }

    /// One batch. Says how many rows have changed: none, if there is nothing to do.
    pub(super) async fn step(&self) -> Result<usize, Error> {
        let claimed = self.claim().await.inspect_err(|error| self.shared.state.failed(error))?;
        let Some(claimed) = claimed else { return Ok(0) };
        let span = tracing::info_span!(target: "leveret", "relay", messages = claimed.rows.len());
        let settled = self.settle(claimed).instrument(span).await;
        settled.inspect_err(|error| self.shared.state.failed(error))
    }

    async fn claim(&self) -> Result<Option<ClaimedRows>, Error> {
        let options = self.shared.claim_options();
        let claimed =
            self.shared.in_time("reading messages", self.shared.store.claim(&options)).await?;
        self.shared.state.is_well(Side::Database);
        Ok(claimed)
    }

    async fn settle(&self, claimed: ClaimedRows) -> Result<usize, Error> {
        let ClaimedRows { rows, claim } = claimed;
        let (count, began) = (rows.len(), Instant::now());
        let sent = batch::publish(&self.shared, rows, &self.stopped).await;
        let Sent { settled, ages, broker } = sent;
        self.shared.in_time("noting what was sent", claim.settle(&settled)).await?;
        let changed = settled.sent.len() + settled.refused.len();
        self.shared.state.settled(settled, &ages, began.elapsed());
        match broker {
            Some(error) => {
                let text = format!("sending {count} messages of {}", self.shared.what());
                Err(Error::broker(text, error))
            }
            None => {
                self.shared.state.is_well(Side::Broker);
                Ok(changed)
            }
        }
    }
}

/// Whether nothing will ever be sent again: the client was closed, or has given up, or the pool was closed.
fn has_ended(shared: &Shared, error: &Error) -> bool {
    if matches!(error.sql(), Some(sqlx::Error::PoolClosed)) {
        return true;
    }
    match error.leveret().map(leveret::Error::kind) {
        Some(Kind::Closed | Kind::Unreachable) => true,
        Some(Kind::Refused) => !shared.is_connected(),
        _ => false,
    }
}

/// Has the workers look when the database tells of new messages.
pub(super) struct Listener {
    shared: Arc<Shared>,
}

impl Listener {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Listener { shared: Arc::clone(shared) }
    }

    /// Until it is dropped, or at once if the database tells nothing.
    pub(super) async fn run(self, ringer: watch::Sender<()>) {
        let backoff = Backoff::default();
        let mut failures = 0;
        loop {
            let listen = self.shared.in_time("listening for messages", self.shared.store.listen());
            let mut notifications = match listen.await {
                Ok(Some(notifications)) => notifications,
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!("{error}; meanwhile they are looked for");
                    sleep(backoff.pause(failures)).await;
                    failures += 1;
                    continue;
                }
            };
            let began = Instant::now();
            self.shared.state.listens(true);
            // What came before is not told.
            ringer.send_replace(());
            while let Ok(Some(())) = notifications.try_next().await {
                ringer.send_replace(());
            }
            self.shared.state.listens(false);
            // One that is gone as soon as it is there is no better than none.
            if began.elapsed() >= STEADY {
                failures = 0;
            }
            sleep(backoff.pause(failures)).await;
            failures += 1;
        }
    }
}

/// Deletes what was kept for long enough, and looks from time to time how much there is.
pub(super) struct Sweeper {
    shared: Arc<Shared>,
}

impl Sweeper {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Sweeper { shared: Arc::clone(shared) }
    }

    /// Until it is dropped.
    pub(super) async fn run(self) {
        let keep = self.shared.settings.keep.unwrap_or_default();
        let pause = if keep.is_zero() { SURVEY } else { keep.clamp(GLANCE, SURVEY) };
        loop {
            if let Err(error) = self.sweep().await {
                tracing::warn!("{error}");
            }
            sleep(pause).await;
        }
    }

    async fn sweep(&self) -> Result<(), Error> {
        let Shared { store, state, .. } = &*self.shared;
        // Even if nothing is kept: there may be something that was kept before.
        let keep = Some(self.shared.settings.keep.unwrap_or_default());
        while self.shared.maintain(keep).await? {}
        if state.is_counted() {
            state.counted(self.shared.in_time("counting messages", store.backlog()).await?);
        }
        Ok(())
    }
}
