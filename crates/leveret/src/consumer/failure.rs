//! What a consumer does with messages whose handler failed: decides, and carries the decision out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::ConsumerBuilder;
use super::handler::BoxFuture;
use super::runner::{Summary, report};
use crate::amqp::RawProperties;
use crate::clock;
use crate::connection::managed::State;
use crate::connection::{Client, ClientEvent, ParkReason, version};
use crate::deaths::Deaths;
use crate::delivery::Delivery;
use crate::error::{Error, ErrorKind};
use crate::forwarder::{ForwardedMessage, Forwarder};
use crate::random;
use crate::retry::profile::republished;
use crate::retry::stamp::{Detail, Failed};
use crate::retry::{
    Decision, Diagnosis, Facts, FailedMessage, Origin, Retry, RetryPolicy, RetryProfile, RetryStep,
    Verdict, WorkQueue,
};
use crate::telemetry::Consumed;
use crate::text::escape;
use crate::topology;

/// How long a message that cannot be moved now stays with its consumer before it goes back to its queue: whatever the
/// trouble is, asking again at once would add to it.
const PAUSE: Duration = Duration::from_secs(1);

/// What all loops of a runner share to settle what failed.
#[derive(Debug)]
pub(super) struct FailureHandler {
    client: Client,
    queue: String,
    profile: Arc<dyn RetryProfile>,
    /// Whether the broker may count how often a message comes back to the queue.
    may_count: bool,
    /// Whether it was said that a handler asks for waits that there are not.
    has_warned: AtomicBool,
    mover: Forwarder,
    counts: Arc<Consumed>,
    /// Which declaration of the profile's objects is in force; 0 if there is none. It is made anew when one turns out to
    /// be missing.
    declared: tokio::sync::Mutex<u64>,
    epoch: AtomicU64,
    on_park: Option<OnPark>,
}

/// What is to be done when a message is not tried again, before it is settled.
#[derive(Clone)]
pub(crate) struct OnPark(
    pub(crate) Arc<dyn Fn(RawProperties, Diagnosis) -> BoxFuture<()> + Send + Sync>,
);

impl std::fmt::Debug for OnPark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OnPark")
    }
}

impl FailureHandler {
    /// With what the consumer was told, or else what suits its queue.
    pub(super) async fn start(
        builder: &ConsumerBuilder,
        counts: Arc<Consumed>,
    ) -> Result<Arc<Self>, Error> {
        let (client, queue) = (&builder.client, &builder.settings.queue);
        let retry = builder.running.retry.as_ref();
        let profile = match retry {
            Some(retry) => retry.profile(),
            // What is settled already cannot be given back.
            None if builder.settings.auto_ack => Retry::discard().profile(),
            None => by_default(client, queue),
        };
        let failing = FailureHandler {
            client: client.clone(),
            queue: queue.clone(),
            profile,
            may_count: work_queue(client, queue).may_count_deliveries(),
            has_warned: AtomicBool::new(false),
            mover: Forwarder::new(client, "moving a failed message"),
            counts,
            declared: tokio::sync::Mutex::new(0),
            epoch: AtomicU64::new(0),
            on_park: builder.running.on_park.clone(),
        };
        if retry.is_some() {
            // What does not work shows at the start, and not with the first failure.
            failing.declare(0).await?;
        }
        Ok(Arc::new(failing))
    }

    pub(super) fn profile(&self) -> &Arc<dyn RetryProfile> {
        &self.profile
    }

    /// Declares what the profile needs, unless somebody has since `seen`.
    async fn declare(&self, seen: u64) -> Result<u64, Error> {
        // Each declaring has its deadline, but many may be before this one.
        let patience = self.client.core().options.timeout;
        let late = |_| Error::timed_out("declaring what retrying needs", patience);
        let mut declared = timeout(patience, self.declared.lock()).await.map_err(late)?;
        if *declared > seen {
            return Ok(*declared);
        }
        let topology = self.profile.topology(&work_queue(&self.client, &self.queue))?;
        if !topology.is_empty() {
            let (_, failed) = self.client.apply_each(&topology).await?;
            if let Some((_, error)) =
                failed.iter().find(|(_, error)| !self.is_compatible_type(error))
            {
                return Err(error.clone());
            }
            self.warn_of_others(&failed);
        }
        *declared += 1;
        self.epoch.store(*declared, Ordering::Relaxed);
        Ok(*declared)
    }

    /// What of a verdict the profile can carry out. Those that have one wait for all messages hear no other, which is said
    /// once.
    fn effective_verdict(&self, verdict: Verdict) -> Verdict {
        let Verdict::RetryAfter(wait) = verdict else { return verdict };
        if self.profile.honors_retry_after() {
            return verdict;
        }
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            let queue = self.queue.as_str();
            tracing::warn!(
                queue,
                "a handler asks for a message to be tried again after {wait:?}, and this design has its own waits: it waits \
                 as all others do. This is said once"
            );
        }
        Verdict::Retry
    }

    /// Queues that exist with other arguments are used as they are: the broker never changes a queue.
    fn warn_of_others(&self, failed: &[topology::Failed]) {
        if failed.is_empty() {
            return;
        }
        let names: Vec<&str> = failed.iter().map(|(name, _)| name.as_str()).collect();
        tracing::warn!(
            queue = self.queue,
            "failed messages wait in queues that exist with other arguments: {}. A classic queue, or a quorum queue without \
             at-least-once dead-lettering, loses messages whose wait ends while a node is killed. Once these queues are \
             empty, delete them: the next failed message declares them again",
            names.join(", ")
        );
    }

    /// Whether a queue was refused only because it is there with another type, that nobody has asked for. Of the work queue
    /// itself the type tells more than that: how it dead-letters.
    fn is_compatible_type(&self, error: &Error) -> bool {
        let work = format!("queue {:?}", self.queue);
        error.is_of_other_type()
            && !self.profile.requires_queue_type()
            && error.conflicts().iter().all(|conflict| conflict.object != work)
    }

    /// Settles a message whose handler failed.
    pub(super) async fn settle(&self, delivery: Delivery, seen: Diagnosis) -> Summary {
        let now = clock::now();
        let properties = delivery.raw_properties();
        let queue = delivery.queue().to_owned();
        let failures = delivery.incoming().failures().saturating_add(1);
        let first = self.profile.first_failure(properties, &queue).unwrap_or(now);
        let facts = Facts {
            failures,
            verdict: self.effective_verdict(seen.verdict),
            kind: &seen.kind,
            error: &seen.text,
            age: now.duration_since(first).unwrap_or_default(),
            headers: properties.get().headers.unwrap_or_default(),
            deaths: Deaths::of(properties),
            chance: random::unit(),
        };
        let decision = self.profile.decide(&facts);
        let mut failed = Failed {
            failures,
            kind: &seen.kind,
            error: &seen.text,
            first,
            at: now,
            queue: &queue,
            origin: delivery.incoming().origin().cloned().unwrap_or_else(|| Origin {
                exchange: delivery.exchange().into_owned(),
                routing_key: delivery.routing_key().into_owned(),
            }),
            reason: match decision {
                Decision::Park(reason) => Some(reason),
                _ => None,
            },
        };
        let moves = matches!(decision, Decision::RetryAfter(_) | Decision::Park(_));
        if moves && !delivery.is_held() {
            tracing::debug!(
                queue = &*queue,
                "a failed message is delivered again: its channel is gone"
            );
            return Summary { failed: 1, ..Summary::default() };
        }
        self.tell(&delivery, &failed, decision);
        match decision {
            Decision::Ack => {
                report(delivery.ack());
                Summary { handled: 1, ..Summary::default() }
            }
            Decision::Requeue => {
                self.requeue(delivery, &failed.origin).await;
                Summary { failed: 1, ..Summary::default() }
            }
            Decision::RetryAfter(wait) => {
                let step = |detail| {
                    let (delivery, failed) = (&delivery, &failed);
                    self.profile.retry(&FailedMessage { delivery, failed, detail }, wait)
                };
                match self.carry_out(&delivery, step).await {
                    Ok(settle) => {
                        self.apply(settle, delivery, &failed.origin).await;
                        self.counts.retried();
                        Summary { failed: 1, retried: 1, ..Summary::default() }
                    }
                    Err(Unmoved::ForGood(reason, _)) => {
                        failed.reason = Some(reason);
                        self.park(delivery, &failed).await
                    }
                    Err(Unmoved::ForNow(error)) => {
                        self.give_back(delivery, &failed.origin, &error).await
                    }
                }
            }
            Decision::Park(_) => self.park(delivery, &failed).await,
        }
    }

    async fn park(&self, delivery: Delivery, failed: &Failed<'_>) -> Summary {
        let step =
            |detail| self.profile.park(&FailedMessage { delivery: &delivery, failed, detail });
        let mut carried_out = self.carry_out(&delivery, step).await;
        if matches!(carried_out, Err(Unmoved::ForGood(..))) {
            // There is no room for a word about it: it is parked as it came.
            let bare = |detail| bare(&delivery, step(detail));
            carried_out = self.carry_out_with(Detail::Needed, bare).await;
        }
        match carried_out {
            Ok(settle) => {
                let is_parked = matches!(settle, Settle::Ack);
                let identity = identity(&delivery);
                self.tell_of_park(&delivery, &settle, failed).await;
                self.apply(settle, delivery, &failed.origin).await;
                if is_parked {
                    self.counts.parked();
                    let (routing_key, message_id) = identity;
                    self.client.core().announce(ClientEvent::Parked {
                        queue: self.queue.clone(),
                        routing_key,
                        message_id,
                        reason: failed.reason.unwrap_or(ParkReason::Permanent),
                        error: failed.error.to_owned(),
                    });
                }
                Summary { failed: 1, parked: u64::from(is_parked), ..Summary::default() }
            }
            Err(Unmoved::ForNow(error) | Unmoved::ForGood(_, error)) => {
                self.give_back(delivery, &failed.origin, &error).await
            }
        }
    }

    /// Settles the original, when all else is done.
    async fn apply(&self, settle: Settle, delivery: Delivery, origin: &Origin) {
        match settle {
            Settle::Ack => report(delivery.ack()),
            Settle::DeadLetter => report(delivery.discard()),
            Settle::Requeue(pause) => {
                sleep(pause).await;
                self.requeue(delivery, origin).await;
            }
        }
    }

    /// What cannot be moved now is not lost: it goes back to its queue, and comes again.
    async fn give_back(&self, delivery: Delivery, origin: &Origin, error: &Error) -> Summary {
        let queue = delivery.queue();
        let (routing_key, message_id) = identity(&delivery);
        tracing::error!(
            queue,
            routing_key,
            message_id,
            "a failed message goes back to its queue, because it cannot be moved: {}",
            escape(&error.to_string())
        );
        sleep(PAUSE).await;
        self.requeue(delivery, origin).await;
        Summary { failed: 1, ..Summary::default() }
    }

    /// Back to its queue, to be delivered again; as a new message, where the broker would count how often.
    async fn requeue(&self, delivery: Delivery, origin: &Origin) {
        if !self.is_counted(&delivery) || !delivery.is_held() {
            return report(delivery.requeue());
        }
        let queue = self.client.queue_name(delivery.queue());
        let mut parcel = republished(&*self.profile, &delivery, &queue, origin);
        while let Err(error) = self.mover.deliver(parcel.clone()).await {
            if error.kind() == ErrorKind::Closed || !delivery.is_held() {
                return report(delivery.requeue());
            }
            let (routing_key, message_id) = identity(&delivery);
            let text = escape(&error.to_string());
            if is_for_good(&error, &delivery) {
                tracing::warn!(
                    queue,
                    routing_key,
                    message_id,
                    "a message is requeued, which may be counted: {text}"
                );
                return report(delivery.requeue());
            }
            if error.kind() == ErrorKind::Invalid {
                // There is no room for where it had come from.
                let expiration = parcel.properties.expiration.take();
                unmark(&mut parcel, &delivery);
                parcel.properties.expiration = expiration;
            }
            tracing::error!(
                queue,
                routing_key,
                message_id,
                "a message cannot be put into its queue anew yet: {text}"
            );
            sleep(PAUSE).await;
        }
        report(delivery.ack());
    }

    /// Whether the broker counts it if a message goes back to its queue. It then drops it beyond a limit, and the first time
    /// may be the last one: limits are set by whoever declares the queue, by policies and by default, and nobody is told.
    fn is_counted(&self, delivery: &Delivery) -> bool {
        let is_of_stream = || delivery.header("x-stream-offset").is_some();
        self.may_count && !is_of_stream() && !nack_is_free(&self.client)
    }

    async fn tell_of_park(&self, delivery: &Delivery, settle: &Settle, failed: &Failed<'_>) {
        let Some(OnPark(tell)) = &self.on_park else { return };
        if !matches!(settle, Settle::Requeue(_)) {
            let (kind, text) = (failed.kind.to_owned(), failed.error.to_owned());
            let seen = Diagnosis { verdict: Verdict::Permanent, kind, text };
            tell(delivery.raw_properties().clone(), seen).await;
        }
    }

    /// Does all of a step but settling the original: that has to be the last thing. What cannot be given back, because that
    /// is counted, is held until it can be moved.
    async fn carry_out(
        &self,
        delivery: &Delivery,
        step: impl Fn(Detail) -> RetryStep,
    ) -> Result<Settle, Unmoved> {
        loop {
            match self.carry_out_with(Detail::Full, &step).await {
                Err(Unmoved::ForNow(error))
                    if self.is_counted(delivery)
                        && error.kind() != ErrorKind::Closed
                        && !is_for_good(&error, delivery)
                        && delivery.is_held() =>
                {
                    let queue = delivery.queue();
                    let (routing_key, message_id) = identity(delivery);
                    tracing::error!(
                        queue,
                        routing_key,
                        message_id,
                        "a failed message cannot be moved yet: {}",
                        escape(&error.to_string())
                    );
                    sleep(PAUSE).await;
                }
                other => return other,
            }
        }
    }

    async fn carry_out_with(
        &self,
        mut detail: Detail,
        step: impl Fn(Detail) -> RetryStep,
    ) -> Result<Settle, Unmoved> {
        let mut is_declared_anew = false;
        loop {
            let (parcel, may_park) = match step(detail) {
                RetryStep::Requeue(pause) => return Ok(Settle::Requeue(pause)),
                RetryStep::DeadLetter => return Ok(Settle::DeadLetter),
                RetryStep::Move(parcel) => (parcel, false),
                RetryStep::MoveOrPark(parcel) => (parcel, true),
            };
            let mut epoch = self.epoch.load(Ordering::Relaxed);
            if epoch == 0 {
                epoch = self.declare(0).await?;
            }
            match self.mover.deliver(*parcel).await {
                Ok(()) => return Ok(Settle::Ack),
                // Headers have to fit into a frame.
                Err(error) if error.kind() == ErrorKind::Invalid && detail == Detail::Full => {
                    detail = Detail::Needed;
                }
                // A wait queue that this policy did not know of before, or that somebody has deleted.
                Err(error) if is_missing(&error) && !is_declared_anew => {
                    is_declared_anew = true;
                    self.declare(epoch).await?;
                }
                Err(error) if may_park && error.kind() == ErrorKind::Unroutable => {
                    return Err(Unmoved::ForGood(ParkReason::Unroutable, error));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn tell(&self, delivery: &Delivery, failed: &Failed<'_>, decision: Decision) {
        let (queue, tag) = (delivery.queue(), delivery.delivery_tag());
        let (attempt, error) = (failed.failures, failed.error);
        let (routing_key, message_id) = identity(delivery);
        let message_id = message_id.as_deref();
        match decision {
            Decision::Ack => tracing::debug!(queue, tag, "nothing left to do: {}", escape(error)),
            Decision::Requeue => {
                tracing::warn!(queue, tag, routing_key, message_id, "requeued: {}", escape(error));
            }
            Decision::RetryAfter(wait) => tracing::warn!(
                queue,
                tag,
                routing_key,
                message_id,
                attempt,
                ?wait,
                "a message failed: {}",
                escape(error)
            ),
            // Told when it has happened.
            Decision::Park(_) => {}
        }
    }
}

/// By what a person finds a message again: its routing key and its id.
pub(super) fn identity(delivery: &Delivery) -> (String, Option<String>) {
    let id = delivery.properties().message_id.as_ref().map(|id| id.to_str_lossy().into_owned());
    (delivery.routing_key().to_str_lossy().into_owned(), id)
}

/// The same step, with nothing added to the message.
fn bare(delivery: &Delivery, mut step: RetryStep) -> RetryStep {
    if let RetryStep::Move(parcel) | RetryStep::MoveOrPark(parcel) = &mut step {
        unmark(parcel, delivery);
    }
    step
}

/// Takes away all that was added to a message. What was taken from it stays away: it counts, makes copies, or lets it
/// expire.
fn unmark(parcel: &mut ForwardedMessage, delivery: &Delivery) {
    let left = parcel.properties.headers.take().unwrap_or_default();
    let mut properties = delivery.properties().into_owned();
    properties.expiration = None;
    if let Some(headers) = &mut properties.headers {
        let names = headers.iter().map(|(name, _)| name.as_bytes().to_vec());
        let taken: Vec<_> = names.filter(|name| left.get(name).is_none()).collect();
        for name in taken {
            headers.remove(name);
        }
    }
    parcel.properties = properties;
}

/// How the original is settled, when all else is done.
enum Settle {
    Ack,
    DeadLetter,
    Requeue(Duration),
}

/// Why a message could not be moved.
enum Unmoved {
    /// It may go well later.
    ForNow(Error),
    /// It would be tried again for ever.
    ForGood(ParkReason, Error),
}

impl From<Error> for Unmoved {
    fn from(error: Error) -> Self {
        match error.kind() {
            // There is no room for what has to be said about it.
            ErrorKind::Invalid => Unmoved::ForGood(ParkReason::Unmovable, error),
            _ => Unmoved::ForNow(error),
        }
    }
}

/// Whether the broker counts no nack: RabbitMQ from 4.3 on.
fn nack_is_free(client: &Client) -> bool {
    match client.core().home().state() {
        State::Up(up) => version(up.connection.server_properties()) >= (4, 3),
        State::Down(_) | State::Ended(_) => false,
    }
}

/// Whether this user may not publish what is to be moved, and the message can be given back all the same: the broker has not
/// begun to count, and a queue may have no limit. Holding it for ever would keep it from those who may.
fn is_for_good(error: &Error, delivery: &Delivery) -> bool {
    let count = delivery.header("x-delivery-count").and_then(|count| count.as_i64());
    error.kind() == ErrorKind::Refused && count.unwrap_or_default() == 0
}

/// Whether an exchange or queue of the profile is not there.
fn is_missing(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unroutable | ErrorKind::Missing)
}

fn work_queue(client: &Client, name: &str) -> WorkQueue {
    let topology = client.topology();
    let known = topology.queues().iter().find(|queue| queue.name() == name);
    known.map_or_else(|| WorkQueue::undeclared(name), |queue| WorkQueue::from(queue.clone()))
}

/// The default policy, where it can be carried out, with no more retries than the queue has deliveries; queues that are gone
/// with their connection, and streams, have no place for messages that wait.
fn by_default(client: &Client, queue: &str) -> Arc<dyn RetryProfile> {
    let work = work_queue(client, queue);
    let mut policy = RetryPolicy::default();
    let limit = work.delivery_limit().and_then(|limit| u32::try_from(limit).ok());
    if let (Some(limit), Some(retries)) = (limit, policy.retries()) {
        policy = policy.max_retries(retries.min(limit));
    }
    let tiers = Retry::new(policy).profile();
    match tiers.topology(&work) {
        Ok(_) => tiers,
        Err(_) => Retry::in_place(PAUSE).profile(),
    }
}
