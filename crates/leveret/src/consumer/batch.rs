//! Handling messages in batches: settled together if all went well, one by one if not.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout_at;
use tracing::{Instrument as _, Span, field};

use super::ConsumerBuilder;
use super::failure::FailureHandler;
use super::handler::{BoxFuture, IntoOutcome};
use super::incoming::Incoming;
use super::runner::{Summary, report, unless};
use super::service::CatchPanic;
use super::stream::Deliveries;
use crate::amqp::deadline_in;
use crate::delivery::Delivery;
use crate::error::{BoxError, Error, ErrorKind};
use crate::inbox::once::{Once, is_done, is_permanent, kept};
use crate::inbox::{Changes, OpenedBatch, Standing};
use crate::retry::{Classifiers, Diagnosis};
use crate::telemetry::Consumed;
use crate::text::escape;
use crate::trace::TraceContext;

/// How messages are put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchOptions {
    /// How many messages make a batch. That is also the prefetch, unless a larger one is set.
    pub size: u16,
    /// A batch that is not full is handled after this time, counted from its first message.
    pub within: Duration,
}

/// What a handler of batches may return: nothing, a `Result` for the batch as a whole, or one for each message.
#[diagnostic::on_unimplemented(
    message = "a handler of batches cannot return `{Self}`",
    label = "not an outcome of a batch",
    note = "it returns nothing, a `Result<(), E>` for the whole batch, whose error is a `Failure`, a `BoxError` or any error that is `Send + Sync`, or a \
            `BatchOutcome` with a `Result` for each message"
)]
pub trait IntoBatchOutcome {
    /// Whether the messages are done.
    fn into_batch_outcome(self) -> BatchOutcome;
}

/// What became of a batch.
#[derive(Debug)]
pub enum BatchOutcome {
    /// Of all messages alike.
    Whole(Result<(), BoxError>),
    /// Of each message, in the order of the batch. One that is missing counts as failed.
    Each(Vec<Result<(), BoxError>>),
}

impl BatchOutcome {
    fn classified(self, classifiers: &Classifiers) -> Self {
        let classify = |outcome: Result<(), BoxError>| outcome.map_err(|e| classifiers.apply(e));
        match self {
            BatchOutcome::Whole(outcome) => BatchOutcome::Whole(classify(outcome)),
            BatchOutcome::Each(outcomes) => {
                BatchOutcome::Each(outcomes.into_iter().map(classify).collect())
            }
        }
    }
}

impl<T: IntoOutcome> IntoBatchOutcome for T {
    fn into_batch_outcome(self) -> BatchOutcome {
        BatchOutcome::Whole(self.into_outcome())
    }
}

impl IntoBatchOutcome for BatchOutcome {
    fn into_batch_outcome(self) -> BatchOutcome {
        self
    }
}

/// A consumer that handles batches, ready to run.
#[must_use = "a consumer does nothing until it is run"]
pub struct BatchRunner {
    builder: ConsumerBuilder,
    options: BatchOptions,
    call: CallBatch,
}

impl BatchRunner {
    pub(super) fn new<F, Fut>(builder: ConsumerBuilder, options: BatchOptions, handler: F) -> Self
    where
        F: Fn(Vec<Incoming>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output: IntoBatchOutcome> + Send + 'static,
    {
        let call = move |batch| -> BoxFuture<BatchOutcome> {
            let handling = handler(batch);
            Box::pin(async move { handling.await.into_batch_outcome() })
        };
        BatchRunner { builder, options, call: Arc::new(call) }
    }

    /// Handles batches until `stop` is done: then takes no more, lets the batch that is at work finish within the time for
    /// draining, and returns what was done. What was not begun, or does not finish, goes back to the queue.
    ///
    /// It fails if the consumer cannot begin, or ends because its queue stays away. If `stop` is done before it has begun, it
    /// does not begin.
    pub async fn run_until(self, stop: impl Future) -> Result<Summary, Error> {
        let BatchRunner { mut builder, options, call } = self;
        builder.check()?;
        if builder.running.tells_senders {
            return Err(builder.cannot_tell("to handle batches"));
        }
        let once = builder.take_once();
        let (classifiers, drain) =
            (builder.running.classifiers.clone(), builder.running.drain.clone());
        let size = usize::from(options.size.max(1));
        builder.settings.prefetch = builder.settings.prefetch.max(Some(options.size.max(1)));
        let counts = Consumed::new(&builder.settings.queue);
        let mut stop = pin!(stop);
        let mut summary = Summary::default();
        let starting = async {
            builder.declare().await?;
            let failing = FailureHandler::start(&builder, Arc::clone(&counts)).await?;
            let deliveries = builder.begin(failing.profile()).await?;
            Ok::<_, Error>((failing, deliveries))
        };
        let Some(started) = unless(&mut stop, starting).await else { return Ok(summary) };
        let (failing, mut deliveries) = started?;
        let handling = Handling { call, classifiers, counts, failing, once };
        loop {
            let (batch, end) = tokio::select! {
                collected = collect(&mut deliveries, size, options.within) => collected,
                _ = &mut stop => return Ok(summary),
            };
            let count = batch.len() as u64;
            if count > 0 {
                let mut handling = pin!(handling.handle(batch));
                tokio::select! {
                    biased;
                    done = &mut handling => summary.add(done),
                    _ = &mut stop => {
                        drop(deliveries);
                        match drain.start().limit(handling).await {
                            Some(done) => summary.add(done),
                            None => summary.abandoned += count,
                        }
                        return Ok(summary);
                    }
                }
            }
            match end {
                None => {}
                Some(Ok(())) => return Ok(summary),
                Some(Err(error)) if error.kind() == ErrorKind::Closed => return Ok(summary),
                Some(Err(error)) => return Err(error),
            }
        }
    }
}

/// A batch: full, or as much as came in time. And the end of the stream, if it came.
async fn collect(
    deliveries: &mut Deliveries,
    size: usize,
    within: Duration,
) -> (Vec<Delivery>, Option<Result<(), Error>>) {
    let mut batch = Vec::new();
    let mut deadline = None;
    while batch.len() < size {
        let next = match deadline {
            None => deliveries.next().await,
            Some(deadline) => match timeout_at(deadline, deliveries.next()).await {
                Ok(next) => next,
                Err(_) => break,
            },
        };
        match next {
            Some(Ok(delivery)) => {
                deadline.get_or_insert_with(|| deadline_in(within));
                batch.push(delivery);
            }
            Some(Err(error)) => return (batch, Some(Err(error))),
            None => return (batch, Some(Ok(()))),
        }
    }
    (batch, None)
}

type CallBatch = Arc<dyn Fn(Vec<Incoming>) -> BoxFuture<BatchOutcome> + Send + Sync>;

struct Handling {
    call: CallBatch,
    classifiers: Classifiers,
    counts: Arc<Consumed>,
    failing: Arc<FailureHandler>,
    once: Option<Once>,
}

impl Handling {
    /// Has a batch handled, and settles it.
    async fn handle(&self, batch: Vec<Delivery>) -> Summary {
        match &self.once {
            Some(once) => self.handle_once(batch, once).await,
            None => self.handle_plainly(batch).await,
        }
    }

    async fn handle_plainly(&self, batch: Vec<Delivery>) -> Summary {
        let in_flight = self.counts.begin(batch.len());
        let outcome = self.call(contents(&batch)).await;
        let (summary, failed) = settle(batch, outcome);
        in_flight.end(summary.handled, failed.len() as u64);
        self.settle_failed(summary, failed).await
    }

    /// Has the new ones among a batch handled, commits, and settles all of them. If it fails, each is handled again on its own,
    /// so that one that cannot be handled is no harm to the others.
    async fn handle_once(&self, batch: Vec<Delivery>, once: &Once) -> Summary {
        let incoming = contents(&batch);
        let opened = match once.open_batch(&incoming).await {
            Ok(opened) => opened,
            Err(error) if batch.len() > 1 && is_permanent(&error) => {
                return self.handle_each(batch, once, &error).await;
            }
            Err(error) => return self.fail(batch, &error).await,
        };
        let standings = match self.commit_once(incoming, opened, once).await {
            Ok(standings) => standings,
            Err(error) if batch.len() == 1 => return self.fail(batch, &error).await,
            Err(error) => return self.handle_each(batch, once, &error).await,
        };
        let (mut summary, mut failed) = (Summary::default(), Vec::new());
        for (delivery, standing) in batch.into_iter().zip(standings) {
            match standing {
                Standing::New => summary.handled += 1,
                Standing::Done => {
                    once.count_duplicate();
                    summary.duplicates += 1;
                }
                Standing::Released => summary.released += 1,
                Standing::Unknown(unknown) => {
                    failed.push((delivery, Diagnosis::of(&unknown.failure().into())));
                    continue;
                }
            }
            report(delivery.ack());
        }
        self.settle_failed(summary, failed).await
    }

    async fn handle_each(&self, batch: Vec<Delivery>, once: &Once, error: &BoxError) -> Summary {
        tracing::debug!("a batch is handled one by one: {}", escape(&error.to_string()));
        let mut summary = Summary::default();
        for delivery in batch {
            summary.add(Box::pin(self.handle_once(vec![delivery], once)).await);
        }
        summary
    }

    /// Has the new ones among a batch handled and commits, and says what each of them is.
    async fn commit_once(
        &self,
        incoming: Vec<Incoming>,
        opened: OpenedBatch,
        once: &Once,
    ) -> Result<Vec<Standing>, BoxError> {
        let OpenedBatch { mut work, messages } = opened;
        let is_new = |(incoming, standing): (Incoming, &Standing)| {
            (*standing == Standing::New).then_some(incoming)
        };
        let mut new: Vec<_> = incoming.into_iter().zip(&messages).filter_map(is_new).collect();
        let count = new.len() as u64;
        if count == 0 {
            return Ok(messages);
        }
        new.iter_mut().for_each(|incoming| work.lend(incoming));
        let in_flight = self.counts.begin(new.len());
        let handled = whole(self.call(new).await, count);
        let committed = match kept(&handled) {
            // What is refused for one of several must not undo the work for the others: each is handled on its own then.
            Some(_) if count > 1 => once.commit(work, Changes::Keep, None).await,
            Some(changes) => once.commit(work, changes, None).await,
            None => handled,
        };
        let handled = if committed.is_ok() { count } else { 0 };
        in_flight.end(handled, count - handled);
        committed.map(|()| messages)
    }

    /// All of them have failed.
    async fn fail(&self, batch: Vec<Delivery>, error: &BoxError) -> Summary {
        let seen = Diagnosis::of(error);
        let failed = batch.into_iter().map(|delivery| (delivery, seen.clone())).collect();
        self.settle_failed(Summary::default(), failed).await
    }

    async fn settle_failed(
        &self,
        mut summary: Summary,
        failed: Vec<(Delivery, Diagnosis)>,
    ) -> Summary {
        let mut settling = JoinSet::new();
        for (delivery, diagnosis) in failed {
            let failing = Arc::clone(&self.failing);
            settling.spawn(async move { failing.settle(delivery, diagnosis).await });
        }
        while let Some(settled) = settling.join_next().await {
            match settled {
                Ok(settled) => summary.add(settled),
                Err(_) => summary.failed += 1,
            }
        }
        summary
    }

    /// Calls the handler. The batch is a trace of its own, with links to those of its messages.
    async fn call(&self, incoming: Vec<Incoming>) -> BatchOutcome {
        let span = span_of(&incoming);
        let call = Arc::clone(&self.call);
        let call = CatchPanic::new(|| Box::pin(async move { Ok(call(incoming).await) }));
        let outcome = if span.is_disabled() {
            call.await
        } else {
            let context = TraceContext::root();
            context.record(&span, None);
            context.scope(call.instrument(span)).await
        };
        let outcome = outcome.unwrap_or_else(|panic| BatchOutcome::Whole(Err(panic)));
        outcome.classified(&self.classifiers)
    }
}

/// So many messages of a batch are linked to at most, as the conventions of OpenTelemetry have it.
const MAX_LINKS: usize = 128;

/// By the conventions of OpenTelemetry for messaging.
fn span_of(batch: &[Incoming]) -> Span {
    let span = tracing::info_span!(
        target: "leveret",
        "process",
        otel.name = field::Empty,
        otel.kind = "consumer",
        messaging.system = "rabbitmq",
        messaging.operation.name = "process",
        messaging.operation.type = "process",
        messaging.destination.name = field::Empty,
        messaging.batch.message_count = batch.len(),
        links = field::Empty,
        trace_id = field::Empty,
        span_id = field::Empty,
        parent_id = field::Empty,
    );
    if span.is_disabled() {
        return span;
    }
    if let Some(first) = batch.first() {
        span.record("otel.name", format!("process {}", first.queue()));
        span.record("messaging.destination.name", first.queue());
    }
    let contexts = batch.iter().filter_map(|one| TraceContext::of(one.raw_properties()));
    let links: Vec<_> = contexts.take(MAX_LINKS).map(|context| context.to_string()).collect();
    if !links.is_empty() {
        span.record("links", links.join(" "));
    }
    span
}

/// The outcome of a batch that is committed as a whole: the first error is that of all.
fn whole(outcome: BatchOutcome, count: u64) -> Result<(), BoxError> {
    match outcome {
        BatchOutcome::Whole(outcome) => outcome,
        BatchOutcome::Each(outcomes) => {
            if outcomes.len() as u64 != count {
                return Err("the handler did not say what became of each message".into());
            }
            outcomes.into_iter().filter(|one| count == 1 || !is_done(one)).collect()
        }
    }
}

/// Settles what is done, and gives the rest, with the reasons.
fn settle(batch: Vec<Delivery>, outcome: BatchOutcome) -> (Summary, Vec<(Delivery, Diagnosis)>) {
    let mut summary = Summary::default();
    let mut outcomes = match outcome {
        BatchOutcome::Whole(Ok(())) => {
            summary.handled = batch.len() as u64;
            settle_all(batch);
            return (summary, Vec::new());
        }
        BatchOutcome::Whole(Err(error)) => {
            let seen = Diagnosis::of(&error);
            vec![Err(seen); batch.len()].into_iter()
        }
        BatchOutcome::Each(outcomes) => {
            let each = outcomes.into_iter().map(|outcome| outcome.map_err(|e| Diagnosis::of(&e)));
            each.collect::<Vec<_>>().into_iter()
        }
    };
    let mut failed = Vec::new();
    for delivery in batch {
        match outcomes.next() {
            Some(Ok(())) => {
                summary.handled += 1;
                report(delivery.ack());
            }
            Some(Err(diagnosis)) => failed.push((delivery, diagnosis)),
            None => {
                let said_nothing = "the handler did not say what became of it".into();
                failed.push((delivery, Diagnosis::of(&said_nothing)));
            }
        }
    }
    (summary, failed)
}

/// One ack for all: the consumer has its channel for itself, so what is before the last belongs to the batch, or was
/// settled before. Should the channel have been lost in the midst of the batch, those from before it are stale, and come
/// again.
fn settle_all(mut batch: Vec<Delivery>) {
    if let Some(last) = batch.pop() {
        report(last.ack_all_before());
    }
    // For the others nothing is sent any more.
    drop(batch);
}

/// The messages, as a handler sees them.
fn contents(batch: &[Delivery]) -> Vec<Incoming> {
    batch.iter().map(|delivery| delivery.incoming().clone()).collect()
}
