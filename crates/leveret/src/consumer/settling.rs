//! Failed messages while they are moved, requeued or parked.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::drain::Draining;
use super::failure::FailureHandler;
use super::runner::Summary;
use crate::delivery::Delivery;
use crate::retry::Diagnosis;

/// How long failed messages may use up half of the prefetch: less than what cannot be moved is held for before it goes back.
const HELD: Duration = Duration::from_millis(250);

/// The number of no consumer that could be replaced.
const NO_CONSUMER: u64 = u64::MAX;

/// So many failed messages are held beside the prefetch at most.
const MAX_HELD: usize = 32;

/// The tasks that settle failed messages of one subscription. The prefetch bounds them, and [`MAX_HELD`].
pub(super) struct SettlingTasks {
    failures: Arc<FailureHandler>,
    /// With the consumer that each has come from.
    tasks: JoinSet<(u64, Summary)>,
    /// How many consumers there were before the present one, and how many of its messages are being settled.
    consumer: u64,
    held: usize,
    /// The prefetch, if failed messages must not use it up.
    prefetch: Option<usize>,
    /// When failed messages will have used up half of the prefetch for [`HELD`].
    used_up: Option<Instant>,
}

impl SettlingTasks {
    pub(super) fn new(failures: Arc<FailureHandler>, prefetch: Option<usize>) -> Self {
        let tasks = JoinSet::new();
        SettlingTasks { failures, tasks, consumer: 0, held: 0, prefetch, used_up: None }
    }

    /// The number of the present consumer.
    pub(super) fn consumer(&self) -> u64 {
        self.consumer
    }

    pub(super) fn start(&mut self, consumer: u64, delivery: Delivery, diagnosis: Diagnosis) {
        let failures = Arc::clone(&self.failures);
        // Another consumer of a stream would begin elsewhere.
        let is_of_stream = delivery.header("x-stream-offset").is_some();
        let consumer = if is_of_stream { NO_CONSUMER } else { consumer };
        self.tasks.spawn(async move { (consumer, failures.settle(delivery, diagnosis).await) });
        self.hold(self.held + usize::from(consumer == self.consumer));
    }

    /// Waits until one more is settled; `None` if there is none.
    pub(super) async fn next(&mut self) -> Option<Summary> {
        let settled = self.tasks.join_next().await?;
        Some(settled.map_or(Summary { failed: 1, ..Summary::default() }, |(consumer, summary)| {
            self.hold(self.held - usize::from(consumer == self.consumer));
            summary
        }))
    }

    /// So many failed messages of the present consumer are being settled. With fewer than half of the prefetch, most workers
    /// have messages, and another consumer would take more than there are free workers for.
    fn hold(&mut self, held: usize) {
        self.held = held;
        let may_leave = self.prefetch.is_some_and(|prefetch| {
            held * 2 >= prefetch && held > 0 && self.tasks.len() < prefetch + MAX_HELD
        });
        match self.used_up {
            Some(_) if may_leave => {}
            _ => self.used_up = may_leave.then(|| Instant::now() + HELD),
        }
    }

    /// Waits until failed messages have used up the prefetch for too long: then another consumer is to take more.
    pub(super) fn used_up(&self) -> impl Future<Output = ()> + use<> {
        let used_up = self.used_up;
        async move {
            match used_up {
                Some(time) => sleep_until(time).await,
                None => std::future::pending().await,
            }
        }
    }

    /// After an attempt to replace the consumer: what is being settled stays with the old one, if there is a new one.
    pub(super) fn leave_held(&mut self, is_new: bool) {
        self.used_up = None;
        if is_new {
            self.consumer += 1;
            self.held = 0;
        } else {
            self.hold(self.held);
        }
    }

    /// Waits until all is settled. What is not in time goes back to the queue.
    pub(super) async fn finish(mut self, draining: &mut Draining) -> Summary {
        let mut summary = Summary::default();
        while !self.tasks.is_empty() {
            match draining.limit(self.next()).await {
                Some(settled) => summary.add(settled.unwrap_or_default()),
                None => {
                    summary.abandoned += self.tasks.len() as u64;
                    break;
                }
            }
        }
        summary
    }
}
