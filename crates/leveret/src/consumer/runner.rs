//! Running a handler: deliveries in, outcomes out, until it is told to stop.

use std::fmt::Display;
use std::pin::pin;
use std::sync::Arc;

use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::ConsumerBuilder;
use super::failure::FailureHandler;
use super::handling::MessageHandler;
use super::instrumented::InstrumentedHandler;
use super::service::Call;
use super::settling::SettlingTasks;
use super::subscription::Subscription;
use crate::error::{Error, ErrorKind};
use crate::inbox::once::Passed;
use crate::rpc::Receipts;
use crate::telemetry::Consumed;
use crate::topology::Topology;

/// What a consumer did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Messages whose handler succeeded.
    pub handled: u64,
    /// How often a handler failed, messages that could not be decoded and those at which it panicked included.
    pub failed: u64,
    /// How often a failed message was sent to where it waits to be tried again.
    pub retried: u64,
    /// Messages that were parked, because they are not tried again.
    pub parked: u64,
    /// Messages that were not handled because they had been delivered before, in the mode at most once.
    pub skipped: u64,
    /// Messages that were not handled because another of the same key was, see
    /// [`deduplicate`](ConsumerBuilder::deduplicate), or because it was handled [before](ConsumerBuilder::exactly_once).
    pub duplicates: u64,
    /// Messages that were for the inbox, see [`release`](crate::inbox::release).
    pub released: u64,
    /// Messages whose handler did not end in time when the consumer was stopped. They go back to the queue, once the handler has
    /// ended; one that was computing, and is done after all within half a minute, settles its message.
    pub abandoned: u64,
}

impl Summary {
    pub(crate) fn add(&mut self, other: Summary) {
        self.handled += other.handled;
        self.failed += other.failed;
        self.retried += other.retried;
        self.parked += other.parked;
        self.skipped += other.skipped;
        self.duplicates += other.duplicates;
        self.released += other.released;
        self.abandoned += other.abandoned;
    }
}

/// What became of one message, unless its handler failed and it has to be settled yet.
#[derive(Clone, Copy, Debug)]
pub(super) enum Disposition {
    Handled,
    Failed,
    Skipped,
    Duplicate,
    Released,
    Abandoned,
}

impl Summary {
    #[inline]
    pub(super) fn count(&mut self, disposition: Disposition) {
        *match disposition {
            Disposition::Handled => &mut self.handled,
            Disposition::Failed => &mut self.failed,
            Disposition::Skipped => &mut self.skipped,
            Disposition::Duplicate => &mut self.duplicates,
            Disposition::Released => &mut self.released,
            Disposition::Abandoned => &mut self.abandoned,
        } += 1;
    }
}

/// A consumer with its handler, ready to run.
#[derive(Debug)]
#[must_use = "a consumer does nothing until it is run"]
pub struct Runner {
    builder: ConsumerBuilder,
    call: Call,
}

impl Runner {
    pub(super) fn new(builder: ConsumerBuilder, call: Call) -> Self {
        Runner { builder, call }
    }

    /// The queue it consumes.
    pub fn queue(&self) -> &str {
        &self.builder.settings.queue
    }

    /// What the client has declared, and what this consumer declares when it begins.
    pub fn topology(&self) -> Topology {
        self.builder.client.topology().and(self.builder.needs.topology())
    }

    /// Whether the broker takes messages as acked once it has sent them, see [`ConsumerBuilder::auto_ack`].
    pub fn is_auto_ack(&self) -> bool {
        self.builder.settings.auto_ack
    }

    /// Handles messages until the client is closed.
    pub async fn run(self) -> Result<Summary, Error> {
        self.run_until(std::future::pending::<()>()).await
    }

    /// Handles messages until `stop` is done: then takes no more, lets the handlers that are at work finish within the
    /// time for draining, and returns what was done. What was not begun, or does not finish, goes back to the queue (see
    /// [`abandoned`](Summary::abandoned)): a quorum queue counts that before RabbitMQ 4.3, so its
    /// [delivery limit](crate::Retry#delivery-limits) should allow for it.
    ///
    /// It fails if the consumer cannot begin, or ends because its queue stays away. If `stop` is done before it has begun, it
    /// does not begin.
    pub async fn run_until(self, stop: impl Future) -> Result<Summary, Error> {
        let Runner { mut builder, call } = self;
        builder.check()?;
        let call = match builder.take_once() {
            Some(once) => once.around(call),
            None => call,
        };
        let mut call = builder.until_abandoned(call);
        let mut stop = pin!(stop);
        if builder.running.tells_senders {
            let starting = Receipts::start(&builder.client, &builder.settings.queue);
            let Some(receipts) = unless(&mut stop, starting).await else {
                return Ok(Summary::default());
            };
            let receipts = receipts?;
            call = receipts.around(call);
            builder = builder.on_park(receipts.on_park());
        }
        let Some(subscriptions) = unless(&mut stop, Subscriptions::start(builder, call)).await
        else {
            return Ok(Summary::default());
        };
        subscriptions?.run_until(stop).await
    }
}

/// The subscriptions of a runner. Dropped, all of them end.
struct Subscriptions {
    stop: CancellationToken,
    /// Ends handlers in tasks that are still waiting when all subscriptions have ended.
    _abandon: Option<DropGuard>,
    tasks: JoinSet<(Summary, Result<(), Error>)>,
}

impl Subscriptions {
    async fn start(builder: ConsumerBuilder, call: Call) -> Result<Self, Error> {
        builder.declare().await?;
        let counts = Consumed::new(&builder.settings.queue);
        let failures = FailureHandler::start(&builder, Arc::clone(&counts)).await?;
        let (builder, leaves_held) = builder.with_prefetch_for_handlers(&**failures.profile());
        let running = builder.running.clone();
        let mut streams = Vec::new();
        for _ in 0..running.subscribers {
            streams.push(builder.clone().begin(failures.profile()).await?);
        }
        let messages = Arc::new(MessageHandler {
            handler: Arc::new(InstrumentedHandler::new(call, counts)),
            mode: running.mode,
            seen: running.seen,
            tasks: running.tasks.clone(),
        });
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        for deliveries in streams {
            let prefetch = leaves_held.then_some(running.workers);
            let settling = SettlingTasks::new(Arc::clone(&failures), prefetch);
            let limits = (running.workers, running.drain.clone());
            let one = Subscription::new(Arc::clone(&messages), settling, limits, stop.clone());
            tasks.spawn(one.run(deliveries));
        }
        let _abandon = running.tasks.map(|tasks| tasks.abandoned.drop_guard());
        Ok(Subscriptions { stop, _abandon, tasks })
    }

    async fn run_until(mut self, stop: impl Future) -> Result<Summary, Error> {
        let mut stop = pin!(stop);
        let (mut summary, mut end) = (Summary::default(), Ok(()));
        let mut is_told_to_stop = false;
        loop {
            let ended = tokio::select! {
                _ = &mut stop, if !is_told_to_stop => {
                    is_told_to_stop = true;
                    None
                }
                ended = self.tasks.join_next() => match ended {
                    None => break,
                    ended => ended,
                },
            };
            // One that ended by itself takes the others along.
            self.stop.cancel();
            match ended {
                None => {}
                Some(Ok((one, result))) => {
                    summary.add(one);
                    end = end.and(result);
                }
                Some(Err(panic)) => {
                    let text = "the consumer ended";
                    end = end.and(Err(Error::caused(ErrorKind::Panicked, text, panic)));
                }
            }
        }
        match end {
            Err(error) if error.kind() != ErrorKind::Closed => Err(error),
            _ => Ok(summary),
        }
    }
}

/// What comes of something that takes time, unless it is told to stop before: a broker that is away may take long to begin
/// with.
pub(crate) async fn unless<T>(stop: impl Future, starting: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        started = starting => Some(started),
        _ = stop => None,
    }
}

impl From<Passed> for Disposition {
    fn from(passed: Passed) -> Self {
        match passed {
            Passed::Duplicate => Disposition::Duplicate,
            Passed::Release => Disposition::Released,
        }
    }
}

/// Logs that a delivery can no longer be settled: the broker delivers it again.
#[inline]
pub(crate) fn report(settled: Result<(), impl Display>) {
    if let Err(error) = settled {
        tracing::debug!("{error}");
    }
}
