//! Running a handler: deliveries in, outcomes out, until it is told to stop.

use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tracing::{Instrument as _, Span};

use super::beside::Beside;
use super::drain::{Drain, Draining};
use super::failing::{Failing, identity};
use super::incoming::Incoming;
use super::seen::Seen;
use super::service::{Call, contained};
use super::stream::Deliveries;
use super::{ConsumerBuilder, Mode, tasks};
use crate::delivery::Delivery;
use crate::error::{BoxError, Error, ErrorKind};
use crate::inbox::once::Passed;
use crate::retry::Diagnosis;
use crate::rpc::Receipts;
use crate::shape::Shape;
use crate::telemetry::Consumed;
use crate::text::escape;
use crate::topology::Topology;
use crate::trace::{self, TraceContext};

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

/// What became of one message, unless it has to be settled yet.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Handled,
    Failed,
    Skipped,
    Duplicate,
    Released,
}

impl Summary {
    #[inline]
    fn count(&mut self, fate: Fate) {
        *match fate {
            Fate::Handled => &mut self.handled,
            Fate::Failed => &mut self.failed,
            Fate::Skipped => &mut self.skipped,
            Fate::Duplicate => &mut self.duplicates,
            Fate::Released => &mut self.released,
        } += 1;
    }
}

/// A consumer with its handler, ready to run.
#[derive(Debug)]
#[must_use = "a consumer does nothing until it is run"]
pub struct Runner {
    builder: ConsumerBuilder,
    call: Call,
    shape: Option<Shape>,
}

impl Runner {
    pub(super) fn new(builder: ConsumerBuilder, call: Call) -> Self {
        Runner { builder, call, shape: None }
    }

    /// With what its handler takes bodies as.
    pub(super) fn of_shape(mut self, shape: Option<Shape>) -> Self {
        self.shape = shape;
        self
    }

    /// The queue it consumes.
    pub fn queue(&self) -> &str {
        &self.builder.settings.queue
    }

    /// What the client has declared, and what this is going to declare.
    pub(crate) fn topology(&self) -> Topology {
        self.builder.client.topology().and(self.builder.needs.topology())
    }

    pub(crate) fn is_auto_ack(&self) -> bool {
        self.builder.settings.auto_ack
    }

    pub(crate) fn shape(&self) -> Option<Shape> {
        self.shape
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
        let Runner { mut builder, call, .. } = self;
        builder.check()?;
        let call = match builder.take_once() {
            Some(once) => once.around(call),
            None => call,
        };
        let mut call = builder.in_tasks(call);
        let mut stop = std::pin::pin!(stop);
        if builder.running.tells_senders {
            let starting = Receipts::start(&builder.client, &builder.settings.queue);
            let Some(receipts) = unless(&mut stop, starting).await else {
                return Ok(Summary::default());
            };
            let receipts = receipts?;
            call = receipts.around(call);
            builder = builder.on_park(receipts.on_park());
        }
        let running = &builder.running;
        let counts = Consumed::new(&builder.settings.queue);
        let starting = async {
            builder.declare().await?;
            let failing = Failing::start(&builder, counts.clone()).await?;
            let (subscriber, is_for_workers) =
                builder.clone().with_prefetch_for_handlers(&**failing.profile());
            let mut pool = Vec::new();
            for _ in 0..running.subscribers {
                pool.push(subscriber.clone().begin(failing.profile()).await?);
            }
            Ok::<_, Error>((failing, pool, is_for_workers))
        };
        let Some(started) = unless(&mut stop, starting).await else {
            return Ok(Summary::default());
        };
        let (failing, pool, leaves_held) = started?;
        let shared = Arc::new(Shared {
            observed: Observed::new(call, counts),
            failing,
            mode: running.mode,
            seen: running.seen.clone(),
        });
        let (stopper, stopped) = tokio::sync::watch::channel(false);
        let mut loops = JoinSet::new();
        for deliveries in pool {
            let one = Loop {
                shared: Arc::clone(&shared),
                workers: running.workers,
                leaves_held,
                have_tasks: running.have_tasks,
                drain: running.drain.clone(),
                stopped: stopped.clone(),
            };
            loops.spawn(one.run(deliveries));
        }
        let mut summary = Summary::default();
        let mut end = Ok(());
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

/// What comes of something that takes time, unless it is told to stop before: a broker that is away may take long to begin
/// with.
pub(crate) async fn unless<T>(stop: impl Future, starting: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        started = starting => Some(started),
        _ = stop => None,
    }
}

/// What all loops of a runner share.
struct Shared {
    observed: Observed,
    failing: Arc<Failing>,
    mode: Mode,
    seen: Option<Seen>,
}

/// A handler that is counted and traced.
pub(crate) struct Observed {
    call: Call,
    counts: Consumed,
}

/// Reads one stream and has its messages handled, so many at a time.
struct Loop {
    shared: Arc<Shared>,
    workers: usize,
    /// The prefetch is for the workers alone: messages that cannot be moved must not use it up.
    leaves_held: bool,
    have_tasks: bool,
    drain: Drain,
    stopped: tokio::sync::watch::Receiver<bool>,
}

/// How long failed messages may use up half of the prefetch: less than what cannot be moved is held for before it goes back.
const HELD: Duration = Duration::from_millis(250);

/// The number of no consumer that could be replaced.
const NO_CONSUMER: u64 = u64::MAX;

/// So many failed messages are held beside the prefetch at most.
const MAX_HELD: usize = 32;

impl Loop {
    async fn run(self, deliveries: Deliveries) -> (Summary, Result<(), Error>) {
        if self.workers == 1 {
            self.serially(deliveries).await
        } else {
            self.at_once(deliveries).await
        }
    }

    /// One after the other, in order. What failed is settled meanwhile.
    async fn serially(mut self, mut deliveries: Deliveries) -> (Summary, Result<(), Error>) {
        let mut done = Done::new(self.leaves_held.then_some(self.workers));
        let is_stopped = self.stopped.clone();
        let mut stopped = std::pin::pin!(async move {
            let _ = self.stopped.wait_for(|stopped| *stopped).await;
        });
        // The message at hand stays in its place, and what is awaited is small: moving it around would cost more than
        // handling it.
        let mut at_hand = None;
        let end = loop {
            // Asked for here, and not by waiting for it first: that would cost each message a lock.
            if is_stopped.has_changed().unwrap_or(true) {
                break Ok(());
            }
            if !done.is_settling() {
                at_hand = deliveries.take_ready();
            }
            if at_hand.is_none() {
                let used_up = done.used_up;
                let next = tokio::select! {
                    biased;
                    () = done.settled(), if done.is_settling() => continue,
                    next = deliveries.ready() => next,
                    () = &mut stopped => break Ok(()),
                    () = until(used_up) => {
                        tokio::select! {
                            biased;
                            () = &mut stopped => break Ok(()),
                            renewed = deliveries.renew() => done.leave_held(renewed),
                        }
                        continue;
                    }
                };
                match next {
                    Ok(true) => at_hand = deliveries.take_ready(),
                    Ok(false) => break Ok(()),
                    Err(error) => break Err(error),
                }
            }
            let Some(delivery) = &mut at_hand else { continue };
            // As `Shared::handle` does it.
            let key = match self.shared.admit(delivery) {
                Admitted::As(key) => key,
                Admitted::Not(fate) => {
                    at_hand = None;
                    done.summary.count(fate);
                    continue;
                }
            };
            let mut handling = std::pin::pin!(self.shared.observed.call(delivery.content()));
            tokio::select! {
                biased;
                outcome = &mut handling => {
                    let finished = self.shared.finish(delivery, key, outcome);
                    done.take(&mut at_hand, finished, &self.shared);
                }
                () = &mut stopped => {
                    drop(deliveries);
                    let mut draining = self.drain.start();
                    match draining.limit(handling).await {
                        Some(outcome) => {
                            let finished = self.shared.finish(delivery, key, outcome);
                            done.take(&mut at_hand, finished, &self.shared);
                        }
                        None => done.summary.abandoned += 1,
                    }
                    return (done.finish(draining).await, Ok(()));
                }
            }
        };
        drop(deliveries);
        (done.finish(self.drain.start()).await, end)
    }

    /// Up to so many at a time. All is done in this task but what handlers do, unless they are to do it here, too.
    async fn at_once(mut self, mut deliveries: Deliveries) -> (Summary, Result<(), Error>) {
        let mut done = Done::new(self.leaves_held.then_some(self.workers));
        let mut at_work = AtWork { beside: Beside::new(), have_tasks: self.have_tasks };
        let mut stopped = std::pin::pin!(async move {
            let _ = self.stopped.wait_for(|stopped| *stopped).await;
        });
        let end = loop {
            let used_up = done.used_up;
            let next = tokio::select! {
                Some(handled) = at_work.next() => {
                    done.join(handled, &self.shared);
                    continue;
                }
                () = done.settled() => continue,
                next = deliveries.next(), if at_work.beside.len() < self.workers => next,
                () = &mut stopped => break Ok(()),
                () = until(used_up), if at_work.beside.len() < self.workers => {
                    let mut renewing = std::pin::pin!(deliveries.renew());
                    let renewed = loop {
                        tokio::select! {
                            () = &mut stopped => break None,
                            Some(handled) = at_work.next() => done.join(handled, &self.shared),
                            renewed = &mut renewing => break Some(renewed),
                        }
                    };
                    let Some(renewed) = renewed else { break Ok(()) };
                    done.leave_held(renewed);
                    continue;
                }
            };
            match next {
                Some(Ok(delivery)) => {
                    let (shared, consumer) = (Arc::clone(&self.shared), done.consumer);
                    let handling = async move { (consumer, shared.handle(delivery).await) };
                    at_work.beside.push(AssertUnwindSafe(handling).catch_unwind());
                }
                Some(Err(error)) => break Err(error),
                None => break Ok(()),
            }
        };
        // No more come, and those that were not begun go back.
        drop(deliveries);
        let mut draining = self.drain.start();
        let drained = async {
            while let Some(handled) = at_work.next().await {
                done.join(handled, &self.shared);
            }
        };
        if draining.limit(drained).await.is_none() {
            done.summary.abandoned += at_work.beside.len() as u64;
        }
        (done.finish(draining).await, end)
    }
}

/// What a handler made of a message: it is settled, or failed and has to be.
type Handled = Result<Fate, Box<(Delivery, Diagnosis)>>;

/// Something panicked that is not the handler, whose panic is an error.
struct Panicked;

/// Messages that are being handled, in this task but for what their handlers do.
struct AtWork<F: Future + Send + 'static> {
    beside: Beside<F>,
    /// Handlers have tasks of their own.
    have_tasks: bool,
}

impl<F: Future<Output = std::thread::Result<(u64, Handled)>> + Send + 'static> AtWork<F> {
    /// Waits until one more is handled, of a consumer with this number. `None` if there is none.
    async fn next(&mut self) -> Option<Result<(u64, Handled), Panicked>> {
        let handled = poll_fn(|context| self.beside.poll_next(context)).await?;
        Some(handled.map_err(|_| Panicked))
    }
}

impl<F: Future + Send + 'static> Drop for AtWork<F> {
    fn drop(&mut self) {
        if self.have_tasks {
            self.beside.take_all().for_each(tasks::end);
        }
    }
}

/// Waits until a time that may never come.
async fn until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// What was done so far, with what is still being settled. The prefetch bounds it, and [`MAX_HELD`].
struct Done {
    summary: Summary,
    /// With the consumer that each has come from.
    settling: JoinSet<(u64, Summary)>,
    /// How many consumers there were before the present one, and how many of its messages are being settled.
    consumer: u64,
    held: usize,
    /// The prefetch, if failed messages must not use it up.
    prefetch: Option<usize>,
    /// When failed messages will have used up half of the prefetch for [`HELD`]: then they are left behind.
    used_up: Option<Instant>,
}

impl Done {
    fn new(prefetch: Option<usize>) -> Self {
        Done {
            summary: Summary::default(),
            settling: JoinSet::new(),
            consumer: 0,
            held: 0,
            prefetch,
            used_up: None,
        }
    }

    /// The message at hand is finished, and leaves its place.
    #[inline]
    fn take(
        &mut self,
        at_hand: &mut Option<Delivery>,
        finished: Result<Fate, Box<Diagnosis>>,
        shared: &Shared,
    ) {
        match finished {
            Ok(fate) => {
                *at_hand = None;
                self.summary.count(fate);
            }
            Err(diagnosis) => {
                if let Some(delivery) = at_hand.take() {
                    self.settle(self.consumer, delivery, *diagnosis, shared);
                }
            }
        }
    }

    fn join(&mut self, handled: Result<(u64, Handled), Panicked>, shared: &Shared) {
        match handled {
            Ok((_, Ok(fate))) => self.summary.count(fate),
            Ok((consumer, Err(failed))) => self.settle(consumer, failed.0, failed.1, shared),
            Err(_) => self.summary.failed += 1,
        }
    }

    fn settle(&mut self, consumer: u64, delivery: Delivery, diagnosis: Diagnosis, shared: &Shared) {
        let failing = Arc::clone(&shared.failing);
        // Another consumer of a stream would begin elsewhere.
        let is_of_stream = delivery.header("x-stream-offset").is_some();
        let consumer = if is_of_stream { NO_CONSUMER } else { consumer };
        self.settling.spawn(async move { (consumer, failing.settle(delivery, diagnosis).await) });
        self.hold(self.held + usize::from(consumer == self.consumer));
    }

    /// So many failed messages of the present consumer are being settled. With fewer than half of the prefetch, most workers
    /// have messages, and another consumer would take more than there are free workers for.
    fn hold(&mut self, held: usize) {
        self.held = held;
        let may_leave = self.prefetch.is_some_and(|prefetch| {
            held * 2 >= prefetch && held > 0 && self.settling.len() < prefetch + MAX_HELD
        });
        match self.used_up {
            Some(_) if may_leave => {}
            _ => self.used_up = may_leave.then(|| Instant::now() + HELD),
        }
    }

    /// What is being settled stays with a consumer that is no more, if there is a new one.
    fn leave_held(&mut self, is_new: bool) {
        self.used_up = None;
        if is_new {
            self.consumer += 1;
            self.held = 0;
        } else {
            self.hold(self.held);
        }
    }

    fn is_settling(&self) -> bool {
        !self.settling.is_empty()
    }

    /// Waits until one more is settled; for ever if there is none.
    async fn settled(&mut self) {
        match self.settling.join_next().await {
            Some(Ok((consumer, summary))) => {
                self.hold(self.held - usize::from(consumer == self.consumer));
                self.summary.add(summary);
            }
            Some(Err(_)) => self.summary.failed += 1,
            None => std::future::pending().await,
        }
    }

    /// Waits until all is settled. What is not in time goes back to the queue.
    async fn finish(mut self, mut draining: Draining) -> Summary {
        while !self.settling.is_empty() {
            if draining.limit(self.settled()).await.is_none() {
                self.summary.abandoned += self.settling.len() as u64;
                break;
            }
        }
        self.summary
    }
}

impl Observed {
    pub(crate) fn new(call: Call, counts: Consumed) -> Self {
        Observed { call, counts }
    }

    /// Calls the handler, within the trace of the message if it has one. What is awaited is small: it is part of every task.
    pub(crate) fn call<'a>(
        &'a self,
        incoming: &Incoming,
    ) -> impl Future<Output = Result<(), BoxError>> + use<'a> {
        let in_flight = self.counts.begin(1);
        let parent = TraceContext::of(incoming.raw_properties());
        let span = span_of(incoming);
        let handling = if span.is_disabled() && parent.is_none() {
            self.call.call(incoming)
        } else {
            let context = TraceContext::within(parent.as_ref());
            context.record(&span, parent.as_ref());
            let (call, incoming) = (self.call.clone(), incoming.clone());
            let handling = async move { call.call(&incoming).await };
            contained(|| Box::pin(context.scope(handling.instrument(span))))
        };
        async move {
            let outcome = handling.await;
            let handled = u64::from(match &outcome {
                Ok(()) => true,
                Err(error) => Passed::of(error).is_some(),
            });
            in_flight.end(handled, 1 - handled);
            outcome
        }
    }
}

impl Shared {
    /// Has a message handled, and settles it unless it failed.
    async fn handle(&self, mut delivery: Delivery) -> Handled {
        // After so many of them, the task makes way for others.
        tokio::task::consume_budget().await;
        if tasks::is_over() {
            // What was not begun goes back.
            std::future::pending::<()>().await;
        }
        match self.admit(&mut delivery) {
            Admitted::As(key) => {
                let outcome = self.observed.call(delivery.content()).await;
                let finished = self.finish(&mut delivery, key, outcome);
                finished.map_err(|diagnosis| Box::new((delivery, *diagnosis)))
            }
            Admitted::Not(fate) => Ok(fate),
        }
    }

    /// Whether it is to be handled at all. If not, it is settled.
    #[inline(always)]
    fn admit(&self, delivery: &mut Delivery) -> Admitted {
        match self.mode == Mode::AtMostOnce || self.seen.is_some() {
            true => self.look_at(delivery),
            false => Admitted::As(None),
        }
    }

    fn look_at(&self, delivery: &mut Delivery) -> Admitted {
        if self.mode == Mode::AtMostOnce && delivery.redelivered() {
            report(delivery.ack_early());
            return Admitted::Not(Fate::Skipped);
        }
        let key = self.seen.as_ref().and_then(|seen| seen.key_of(delivery.content()));
        if let (Some(seen), Some(key)) = (&self.seen, &key)
            && seen.contains(key)
        {
            report(delivery.ack_early());
            return Admitted::Not(Fate::Duplicate);
        }
        if self.mode == Mode::AtMostOnce {
            // Settled before it is begun: it cannot come again.
            report(delivery.ack_early());
        }
        Admitted::As(key)
    }

    /// Its handler has ended: settles it unless it failed.
    #[inline]
    fn finish(
        &self,
        delivery: &mut Delivery,
        key: Option<Vec<u8>>,
        outcome: Result<(), BoxError>,
    ) -> Result<Fate, Box<Diagnosis>> {
        match outcome {
            Ok(()) => {
                if let (Some(seen), Some(key)) = (&self.seen, key) {
                    seen.add(key);
                }
                report(delivery.ack_early());
                Ok(Fate::Handled)
            }
            Err(error) if self.mode == Mode::AtMostOnce => {
                let (routing_key, message_id) = identity(delivery);
                tracing::error!(
                    queue = delivery.queue(),
                    routing_key,
                    message_id,
                    "a message that is not tried again failed: {}",
                    escape(&error.to_string())
                );
                Ok(Fate::Failed)
            }
            Err(error) => match Passed::of(&error) {
                Some(passed) => {
                    report(delivery.ack_early());
                    Ok(passed.into())
                }
                None => Err(Box::new(Diagnosis::of(&error))),
            },
        }
    }
}

/// Whether a message is handled.
enum Admitted {
    /// It is, and known by this key afterwards, if it has one.
    As(Option<Vec<u8>>),
    Not(Fate),
}

impl From<Passed> for Fate {
    fn from(passed: Passed) -> Self {
        match passed {
            Passed::Duplicate => Fate::Duplicate,
            Passed::Release => Fate::Released,
        }
    }
}

/// By the conventions of OpenTelemetry for messaging.
fn span_of(incoming: &Incoming) -> Span {
    if !trace::are_spans_wanted() {
        return Span::none();
    }
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

/// A delivery that can no longer be settled is delivered again, which is all that can be said.
#[inline]
pub(crate) fn report(settled: Result<(), Error>) {
    if let Err(error) = settled {
        tracing::debug!("{error}");
    }
}
