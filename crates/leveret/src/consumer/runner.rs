//! Running a handler: deliveries in, outcomes out, until it is told to stop.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tracing::{Instrument as _, Span};

use super::handler::BoxError;
use super::incoming::{Incoming, States};
use super::seen::Seen;
use super::service::Call;
use super::stream::Deliveries;
use super::{ConsumerBuilder, Mode};
use crate::delivery::Delivery;
use crate::error::{Error, ErrorKind};
use crate::telemetry::Consumed;
use crate::trace::TraceContext;

/// What becomes of a message whose handler failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailure {
    /// Back to its queue, after a pause in which it stays with this consumer. The default, with a pause of a second.
    Requeue {
        /// How long the pause is. Without one, a message that always fails keeps everybody busy.
        after: Duration,
    },
    /// To the dead-letter exchange of its queue, or away if that has none.
    Discard,
}

impl Default for OnFailure {
    fn default() -> Self {
        OnFailure::Requeue { after: Duration::from_secs(1) }
    }
}

/// What a consumer did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Messages whose handler succeeded.
    pub handled: u64,
    /// Messages whose handler failed, those that could not be decoded and those at which it panicked included.
    pub failed: u64,
    /// Messages that were not handled because they had been delivered before, in the mode at most once.
    pub skipped: u64,
    /// Messages that were not handled because another of the same key was, see
    /// [`deduplicate`](ConsumerBuilder::deduplicate).
    pub duplicates: u64,
    /// Messages whose handler did not end in time when the consumer was stopped. They went back to the queue.
    pub abandoned: u64,
}

impl Summary {
    pub(super) fn add(&mut self, other: Summary) {
        self.handled += other.handled;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.duplicates += other.duplicates;
        self.abandoned += other.abandoned;
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

    /// Handles messages until the client is closed.
    pub async fn run(self) -> Result<Summary, Error> {
        self.run_until(std::future::pending::<()>()).await
    }

    /// Handles messages until `stop` is done: then takes no more, lets the handlers that are at work finish within the
    /// time for draining, and returns what was done. What was not begun, or does not finish, goes back to the queue.
    ///
    /// It fails if the consumer cannot begin, or ends because its queue stays away.
    pub async fn run_until(self, stop: impl Future) -> Result<Summary, Error> {
        let Runner { builder, call } = self;
        let running = &builder.running;
        let mut pool = Vec::new();
        for _ in 0..running.subscribers {
            pool.push(builder.clone().stream().await?);
        }
        let shared = Arc::new(Shared {
            call,
            states: Arc::new(running.states.clone()),
            on_failure: running.on_failure,
            mode: running.mode,
            seen: running.seen.clone(),
            counts: Consumed::new(&builder.settings.queue),
        });
        let (stopper, stopped) = tokio::sync::watch::channel(false);
        let mut loops = JoinSet::new();
        for deliveries in pool {
            let one = Loop {
                shared: Arc::clone(&shared),
                workers: running.workers,
                drain: running.drain,
                stopped: stopped.clone(),
            };
            loops.spawn(one.run(deliveries));
        }
        let mut summary = Summary::default();
        let mut end = Ok(());
        let mut stop = std::pin::pin!(stop);
        let mut is_stopping = false;
        loop {
            tokio::select! {
                _ = &mut stop, if !is_stopping => {
                    is_stopping = true;
                    stopper.send_replace(true);
                }
                done = loops.join_next() => match done {
                    None => break,
                    Some(Ok((one, result))) => {
                        summary.add(one);
                        // One that ended by itself takes the others along.
                        stopper.send_replace(true);
                        end = end.and(result);
                    }
                    Some(Err(panic)) => {
                        stopper.send_replace(true);
                        let text = "the consumer ended";
                        end = end.and(Err(Error::caused(ErrorKind::Panicked, text, panic)));
                    }
                },
            }
        }
        match end {
            Err(error) if error.kind() != ErrorKind::Closed => Err(error),
            _ => Ok(summary),
        }
    }
}

/// What all loops of a runner share.
struct Shared {
    call: Call,
    states: Arc<States>,
    on_failure: OnFailure,
    mode: Mode,
    seen: Option<Seen>,
    counts: Consumed,
}

/// Reads one stream and has its messages handled, so many at a time.
struct Loop {
    shared: Arc<Shared>,
    workers: usize,
    drain: Duration,
    stopped: tokio::sync::watch::Receiver<bool>,
}

impl Loop {
    async fn run(self, deliveries: Deliveries) -> (Summary, Result<(), Error>) {
        if self.workers == 1 {
            self.serially(deliveries).await
        } else {
            self.at_once(deliveries).await
        }
    }

    /// One after the other, in order.
    async fn serially(mut self, mut deliveries: Deliveries) -> (Summary, Result<(), Error>) {
        let mut summary = Summary::default();
        let mut stopped = std::pin::pin!(async move {
            let _ = self.stopped.wait_for(|stopped| *stopped).await;
        });
        loop {
            let next = tokio::select! {
                biased;
                () = &mut stopped => return (summary, Ok(())),
                next = deliveries.next() => next,
            };
            let delivery = match next {
                Some(Ok(delivery)) => delivery,
                Some(Err(error)) => return (summary, Err(error)),
                None => return (summary, Ok(())),
            };
            let mut handling = std::pin::pin!(self.shared.handle(delivery));
            tokio::select! {
                biased;
                done = &mut handling => summary.add(done),
                () = &mut stopped => {
                    drop(deliveries);
                    match timeout(self.drain, handling).await {
                        Ok(done) => summary.add(done),
                        Err(_) => summary.abandoned += 1,
                    }
                    return (summary, Ok(()));
                }
            }
        }
    }

    /// Up to so many at a time, each in a task of its own.
    async fn at_once(mut self, mut deliveries: Deliveries) -> (Summary, Result<(), Error>) {
        let mut summary = Summary::default();
        let mut tasks: JoinSet<Summary> = JoinSet::new();
        let mut add = |done: Result<Summary, tokio::task::JoinError>| match done {
            Ok(done) => summary.add(done),
            Err(_) => summary.failed += 1,
        };
        let mut stopped = std::pin::pin!(async move {
            let _ = self.stopped.wait_for(|stopped| *stopped).await;
        });
        let end = loop {
            let next = tokio::select! {
                Some(done) = tasks.join_next(), if !tasks.is_empty() => {
                    add(done);
                    continue;
                }
                next = deliveries.next(), if tasks.len() < self.workers => next,
                () = &mut stopped => break Ok(()),
            };
            match next {
                Some(Ok(delivery)) => {
                    let shared = Arc::clone(&self.shared);
                    tasks.spawn(async move { shared.handle(delivery).await });
                }
                Some(Err(error)) => break Err(error),
                None => break Ok(()),
            }
        };
        // No more come, and those that were not begun go back.
        drop(deliveries);
        let drained = async {
            while let Some(done) = tasks.join_next().await {
                add(done);
            }
        };
        if timeout(self.drain, drained).await.is_err() {
            summary.abandoned += tasks.len() as u64;
        }
        (summary, end)
    }
}

impl Shared {
    /// Calls the handler, within the trace of the message if it has one.
    async fn call(&self, incoming: Incoming) -> Result<(), BoxError> {
        let in_flight = self.counts.begin(1);
        let began = Instant::now();
        let parent = TraceContext::of(incoming.raw_properties());
        let span = span_of(&incoming);
        let outcome = if span.is_disabled() && parent.is_none() {
            self.call.call(incoming).await
        } else {
            let context = TraceContext::within(parent.as_ref());
            context.record(&span, parent.as_ref());
            context.scope(self.call.call(incoming).instrument(span)).await
        };
        drop(in_flight);
        let handled = u64::from(outcome.is_ok());
        self.counts.end(began.elapsed(), handled, 1 - handled);
        outcome
    }

    /// Has a message handled, and settles it.
    async fn handle(&self, delivery: Delivery) -> Summary {
        if self.mode == Mode::AtMostOnce && delivery.redelivered() {
            report(delivery.ack());
            return Summary { skipped: 1, ..Summary::default() };
        }
        let incoming = Incoming::new(&delivery, &self.states);
        let key = self.seen.as_ref().and_then(|seen| Some((seen, seen.key_of(&incoming)?)));
        if let Some((seen, key)) = &key
            && seen.contains(key)
        {
            report(delivery.ack());
            return Summary { duplicates: 1, ..Summary::default() };
        }
        match self.mode {
            Mode::AtLeastOnce => match self.call(incoming).await {
                Ok(()) => {
                    if let Some((seen, key)) = key {
                        seen.add(key);
                    }
                    report(delivery.ack());
                    Summary { handled: 1, ..Summary::default() }
                }
                Err(error) => {
                    refuse(vec![(delivery, error)], self.on_failure).await;
                    Summary { failed: 1, ..Summary::default() }
                }
            },
            Mode::AtMostOnce => {
                // Settled before it is begun: it cannot come again.
                report(delivery.ack());
                match self.call(incoming).await {
                    Ok(()) => Summary { handled: 1, ..Summary::default() },
                    Err(error) => {
                        tracing::error!("a message that is not tried again failed: {error}");
                        Summary { failed: 1, ..Summary::default() }
                    }
                }
            }
        }
    }
}

/// By the conventions of OpenTelemetry for messaging.
fn span_of(incoming: &Incoming) -> Span {
    let span = tracing::info_span!(
        target: "leveret",
        "process",
        otel.name = tracing::field::Empty,
        otel.kind = "consumer",
        messaging.system = "rabbitmq",
        messaging.operation.name = "process",
        messaging.operation.type = "process",
        messaging.destination.name = tracing::field::Empty,
        messaging.rabbitmq.destination.routing_key = tracing::field::Empty,
        messaging.rabbitmq.message.delivery_tag = incoming.delivery_tag(),
        messaging.message.id = tracing::field::Empty,
        messaging.message.conversation_id = tracing::field::Empty,
        trace_id = tracing::field::Empty,
        span_id = tracing::field::Empty,
        parent_id = tracing::field::Empty,
    );
    if span.is_disabled() {
        return span;
    }
    let (exchange, key) = (incoming.exchange(), incoming.routing_key());
    let destination = format!("{exchange}:{key}:{}", incoming.queue());
    span.record("otel.name", format!("process {}", incoming.queue()));
    span.record("messaging.destination.name", destination);
    span.record("messaging.rabbitmq.destination.routing_key", key.to_string());
    let properties = incoming.properties();
    if let Some(id) = properties.message_id {
        span.record("messaging.message.id", id.to_string());
    }
    if let Some(id) = properties.correlation_id {
        span.record("messaging.message.conversation_id", id.to_string());
    }
    span
}

/// Settles messages whose handler failed.
pub(super) async fn refuse(failed: Vec<(Delivery, BoxError)>, on_failure: OnFailure) {
    let mut requeued = Vec::new();
    for (delivery, error) in failed {
        let (queue, tag) = (delivery.queue(), delivery.delivery_tag());
        tracing::warn!(queue, tag, "a message failed: {error}");
        // What cannot be decoded now cannot be decoded later.
        if on_failure == OnFailure::Discard || is_undecodable(&error) {
            report(delivery.discard());
        } else {
            requeued.push(delivery);
        }
    }
    if let OnFailure::Requeue { after } = on_failure
        && !requeued.is_empty()
    {
        sleep(after).await;
        requeued.into_iter().for_each(|delivery| report(delivery.requeue()));
    }
}

fn is_undecodable(error: &BoxError) -> bool {
    error.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::Payload)
}

/// A delivery that can no longer be settled is delivered again, which is all that can be said.
pub(super) fn report(settled: Result<(), Error>) {
    if let Err(error) = settled {
        tracing::debug!("{error}");
    }
}
