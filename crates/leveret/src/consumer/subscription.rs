//! One consumer on the broker, and the handlers that run for its messages.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::{Either, Pending, pending};
use futures_util::stream::FuturesUnordered;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::drain::Drain;
use super::handling::{Admission, Handling, Message, MessageHandler};
use super::runner::Summary;
use super::settling::SettlingTasks;
use super::stream::Deliveries;
use crate::delivery::Delivery;
use crate::error::Error;

/// How many messages are started before the subscription looks for anything else.
const BATCH: usize = 128;

/// How many are started before the task checks whether it is stopped, and spends one of the 128 units of tokio's budget. Each yield
/// wakes another thread and has acks written in small pieces: one unit per message adds a fifth to
/// `leveret-bench client --job consume --size 16`.
const STEP: usize = 3;

/// How long a message stays with a handler that computes beyond the end of its subscription, and cannot be interrupted.
const GRACE: Duration = Duration::from_secs(30);

/// Reads one stream, and has so many of its messages handled at a time.
pub(super) struct Subscription {
    workers: usize,
    drain: Drain,
    stop: CancellationToken,
    running: RunningHandlers,
    settling: SettlingTasks,
    summary: Summary,
    started: usize,
}

impl Subscription {
    pub(super) fn new(
        messages: Arc<MessageHandler>,
        settling: SettlingTasks,
        (workers, drain): (usize, Drain),
        stop: CancellationToken,
    ) -> Self {
        let running = RunningHandlers::new(messages);
        let summary = Summary::default();
        Subscription { workers, drain, stop, running, settling, summary, started: 0 }
    }

    pub(super) async fn run(mut self, mut deliveries: Deliveries) -> (Summary, Result<(), Error>) {
        let end = self.handle_all(&mut deliveries).await;
        // No more come, and those that were not started go back.
        drop(deliveries);
        (self.finish().await, end)
    }

    /// Until it is stopped, or the stream ends.
    async fn handle_all(&mut self, deliveries: &mut Deliveries) -> Result<(), Error> {
        let stop = self.stop.clone();
        let mut stopped = std::pin::pin!(stop.cancelled());
        loop {
            self.start_ready(deliveries).await;
            let (has_place, used_up) = (self.has_place(), self.settling.used_up());
            tokio::select! {
                biased;
                () = &mut stopped => return Ok(()),
                () = used_up, if has_place => {
                    if self.renew(deliveries).await.is_none() {
                        return Ok(());
                    }
                }
                handled = self.running.next() => self.settle(handled),
                Some(settled) = self.settling.next() => self.summary.add(settled),
                next = deliveries.next(), if has_place => match next {
                    Some(delivery) => self.start(delivery?),
                    None => return Ok(()),
                },
            }
        }
    }

    fn has_place(&self) -> bool {
        self.running.len() < self.workers
    }

    /// Starts messages that are here already, as far as there are workers.
    async fn start_ready(&mut self, deliveries: &mut Deliveries) {
        for _ in 0..BATCH {
            if !self.has_place() {
                return;
            }
            let Some(delivery) = deliveries.try_next() else { return };
            self.start(delivery);
            self.started = self.started.wrapping_add(1);
            if self.started.is_multiple_of(STEP) {
                tokio::task::consume_budget().await;
                if self.stop.is_cancelled() {
                    return;
                }
            }
        }
    }

    /// A handler that ends at once takes no place among those that run.
    #[inline]
    fn start(&mut self, mut delivery: Delivery) {
        let messages = &*self.running.messages;
        let mut key = match messages.admit(&mut delivery) {
            Admission::Handle(key) => key,
            Admission::Settled(disposition) => return self.summary.count(disposition),
        };
        match messages.start(&delivery) {
            Ok(outcome) => match messages.settle(&mut delivery, &mut key, outcome) {
                Ok(disposition) => self.summary.count(disposition),
                Err(diagnosis) => {
                    self.settling.start(self.settling.consumer(), delivery, *diagnosis);
                }
            },
            Err(call) => {
                let message = Message { delivery, key, consumer: self.settling.consumer() };
                let budget = messages.tasks.as_ref().map(|tasks| Arc::clone(&tasks.budget));
                self.running.push(Handling::new(message, call, budget));
            }
        }
    }

    fn settle(&mut self, handled: Handled) {
        let Some((Message { mut delivery, mut key, consumer }, outcome)) = handled else { return };
        match self.running.messages.settle(&mut delivery, &mut key, outcome) {
            Ok(disposition) => self.summary.count(disposition),
            Err(diagnosis) => self.settling.start(consumer, delivery, *diagnosis),
        }
    }

    /// Begins another consumer, with a prefetch that failed messages have not used up; `None` if it is stopped meanwhile.
    async fn renew(&mut self, deliveries: &mut Deliveries) -> Option<()> {
        let stop = self.stop.clone();
        let mut stopped = std::pin::pin!(stop.cancelled());
        let mut renewing = std::pin::pin!(deliveries.renew());
        loop {
            tokio::select! {
                () = &mut stopped => return None,
                handled = self.running.next() => self.settle(handled),
                renewed = &mut renewing => {
                    self.settling.leave_held(renewed);
                    return Some(());
                }
            }
        }
    }

    /// Lets handlers and the settling of failed messages finish, within the time for draining.
    async fn finish(mut self) -> Summary {
        let mut draining = self.drain.start();
        let drained = async {
            while self.running.len() > 0 {
                let handled = self.running.next().await;
                self.settle(handled);
            }
        };
        if draining.limit(drained).await.is_none() {
            self.summary.abandoned += self.running.len() as u64;
        }
        let Subscription { running: _running, settling, mut summary, .. } = self;
        summary.add(settling.finish(&mut draining).await);
        summary
    }
}

type Handled = <Handling as Future>::Output;

/// The messages of a subscription whose handlers run.
struct RunningHandlers {
    messages: Arc<MessageHandler>,
    /// With a future that is never done: `FuturesUnordered` wakes its own task whenever it has polled all of its futures, which
    /// costs a quarter of `leveret-bench rpc --in-flight 1`.
    set: FuturesUnordered<Either<Handling, Pending<Handled>>>,
}

impl RunningHandlers {
    fn new(messages: Arc<MessageHandler>) -> Self {
        RunningHandlers { messages, set: FuturesUnordered::from_iter([Either::Right(pending())]) }
    }

    fn len(&self) -> usize {
        self.set.len() - 1
    }

    fn push(&mut self, handling: Handling) {
        self.set.push(Either::Left(handling));
    }

    /// Waits until one more has ended.
    async fn next(&mut self) -> Handled {
        self.set.next().await.flatten()
    }
}

/// A handler that computes in a task cannot be interrupted, and its message must not go to another handler meanwhile. So the
/// calls in tasks have [`GRACE`] to end: those that wait end at once, as the runner abandons them. All others end here.
impl Drop for RunningHandlers {
    fn drop(&mut self) {
        let set = std::mem::take(&mut self.set).into_iter();
        let mut ending: FuturesUnordered<_> = set.filter_map(in_task).collect();
        // Without a runtime nothing computes any more.
        if let (false, Ok(runtime)) = (ending.is_empty(), Handle::try_current()) {
            let messages = Arc::clone(&self.messages);
            runtime.spawn(timeout(GRACE, async move {
                while let Some(handled) = ending.next().await {
                    if let Some((Message { mut delivery, mut key, .. }, outcome)) = handled {
                        // A failed message goes back to its queue.
                        let _ = messages.settle(&mut delivery, &mut key, outcome);
                    }
                }
            }));
        }
    }
}

fn in_task(one: Either<Handling, Pending<Handled>>) -> Option<Handling> {
    match one {
        Either::Left(handling) => handling.is_in_task().then_some(handling),
        Either::Right(_) => None,
    }
}
