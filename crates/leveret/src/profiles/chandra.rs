//! The design of Chandra: one dead-letter exchange, whose routing keys tell waiting from parking.

use std::time::{Duration, SystemTime};

use crate::amqp::RawProperties;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::forwarder::ForwardedMessage;
use crate::topology::{Binding, Exchange, ExchangeKind, Queue, QueueType, Topology};

use crate::retry::failed_message::FailedMessage;
use crate::retry::one_wait::OneWait;
use crate::retry::policy::RetryPolicy;
use crate::retry::profile::{RetryProfile, RetryStep, WorkQueue};
use crate::retry::stamp::Origin;
use crate::retry::{Retry, rejecting, traps};

/// Messages go to a dead-letter exchange, which has a retry queue and a parking lot behind it: the design of the Chandra
/// client library.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use std::time::Duration;
/// use leveret::{Chandra, Client, Exchange, Queue};
///
/// let client = Client::embedded().await?;
/// let retry = Chandra::new(Exchange::topic("orders")).interval(Duration::from_secs(10)).max_retries(3);
/// let billing = Queue::quorum("billing").bind("orders", "order.*");
/// client.apply(&retry.topology(billing)?).await?;
/// let runner = client.consumer("billing").retry(retry).handle(async |body: String| {
///     println!("{body}");
/// });
/// # let _ = runner;
/// # Ok(())
/// # }
/// ```
///
/// Beside a queue `billing` there are
///
/// - `billing.dlx`, a topic exchange: the dead-letter exchange of `billing`, which has to be declared so, with the
///   dead-letter routing key `retry.billing`;
/// - `billing.retry`, bound to it with `retry.#`: where rejected messages wait for the interval, to go back to the primary
///   exchange. `billing` is bound to that with `retry.billing`, so that they find back to it; queues that are bound with
///   wildcards get copies, and so does every queue of a fanout. [`only_to_queue`](Self::only_to_queue) sends them to
///   `billing` alone;
/// - `billing.parking_lot`, bound to the dead-letter exchange with `parking_lot`.
///
/// Each of these names and keys can be set on its own, to join a deployment that has others.
///
/// The dead-letter routing key has to be: under their own keys, messages would not get through a binding `retry.#`, and
/// one with `#` would catch those that are to be parked. It takes the place of the key a message came with; the broker
/// keeps that in `x-death`, and handlers see the message under its own, see [`Incoming::routing_key`].
///
/// A failed message is rejected; the broker moves it, and counts in `x-death`. Once its retries are used up, or its error is
/// permanent, it is published to the dead-letter exchange with the key `parking_lot`, confirmed, and only then acked: AMQP
/// cannot reject it with a header that would take it there. It then carries the headers that [`Retry`] lists, its own
/// routing key among them, and no `x-death`, so that it begins anew if it is published again. `x-leveret-history` knows the
/// last error only: the design rejects messages, and AMQP cannot add anything to what is rejected. The errors before it are
/// in the logs.
///
/// All messages wait the same: what [`Failure::retry_after`](crate::Failure::retry_after) asks for is not heard, and a
/// warning says so once. Where messages wait in quorum queues of RabbitMQ 4.0, one of higher priority goes before the others,
/// which then wait longer: only what is first expires.
///
/// PendingForward messages from queue to queue is the broker's business here, and safe with quorum queues alone: a classic queue may
/// lose them if the broker stops in between.
///
/// [`Incoming::routing_key`]: crate::Incoming::routing_key
#[derive(Clone, Debug)]
#[must_use]
pub struct Chandra {
    exchange: Exchange,
    wait: OneWait,
    to_queue: bool,
    is_shared: bool,
    dead_letter_exchange: Option<String>,
    dead_letter_kind: ExchangeKind,
    retry_queue: Option<String>,
    retry_key: Option<String>,
    retry_binding: Option<String>,
    return_key: Option<String>,
    parking_queue: Option<String>,
    parking_key: Option<String>,
    parking_binding: Option<String>,
}

impl Chandra {
    /// With the primary exchange: the one by which messages come back. Five retries, half a minute apart.
    pub fn new(exchange: Exchange) -> Self {
        Chandra {
            exchange,
            wait: OneWait::new(Duration::from_secs(30), 5),
            to_queue: false,
            is_shared: false,
            dead_letter_exchange: None,
            dead_letter_kind: ExchangeKind::Topic,
            retry_queue: None,
            retry_key: None,
            retry_binding: None,
            return_key: None,
            parking_queue: None,
            parking_key: None,
            parking_binding: None,
        }
    }

    /// How long messages wait. In whole milliseconds.
    pub fn interval(mut self, interval: Duration) -> Self {
        self.wait.set_interval(interval);
        self
    }

    /// How many times a message is tried again. `n` means `n + 1` deliveries.
    pub fn max_retries(mut self, retries: u32) -> Self {
        self.wait.set_max_retries(retries);
        self
    }

    /// A policy for what interval and number do not say. It has to wait the same each time: there is one wait queue.
    pub fn policy(mut self, policy: RetryPolicy) -> Self {
        self.wait.set_policy(policy);
        self
    }

    /// What waited comes back to its queue alone, by the default exchange, and nobody else gets a copy.
    pub fn only_to_queue(mut self) -> Self {
        self.to_queue = true;
        self
    }

    /// The name of the dead-letter exchange, `billing.dlx` by default. Keys and other names stay as they are.
    pub fn dead_letter_exchange(mut self, name: impl Into<String>) -> Self {
        self.dead_letter_exchange = Some(name.into());
        self
    }

    /// One dead-letter exchange of this name for many queues. Keys and patterns of a queue `billing` are then
    /// `retry.billing` and `parking_lot.billing` by default, so that each has its own.
    pub fn shared_dead_letter_exchange(mut self, name: impl Into<String>) -> Self {
        self.is_shared = true;
        self.dead_letter_exchange(name)
    }

    /// The kind of the dead-letter exchange, a topic by default. With any other kind, the retry queue is bound with the very
    /// [`retry_key`](Self::retry_key) by default. Fanout and headers exchanges are refused: they know no keys, so a rejected
    /// message would be parked as well.
    pub fn dead_letter_exchange_kind(mut self, kind: ExchangeKind) -> Self {
        self.dead_letter_kind = kind;
        self
    }

    /// The name of the retry queue, `billing.retry` by default.
    pub fn retry_queue(mut self, name: impl Into<String>) -> Self {
        self.retry_queue = Some(name.into());
        self
    }

    /// The dead-letter routing key of the work queue, `retry.billing` by default.
    pub fn retry_key(mut self, key: impl Into<String>) -> Self {
        self.retry_key = Some(key.into());
        self
    }

    /// What the retry queue is bound to the dead-letter exchange with. By default it is `retry.#` at a topic exchange for this queue
    /// alone, and the very [`retry_key`](Self::retry_key) where that is set, the exchange is shared or it is of another kind. A
    /// pattern that also matches the [`parking_key`](Self::parking_key) is refused.
    pub fn retry_binding(mut self, pattern: impl Into<String>) -> Self {
        self.retry_binding = Some(pattern.into());
        self
    }

    /// The key under which messages go back to the primary exchange: the dead-letter routing key of the retry queue, which has
    /// none by default. The work queue is bound with it, or else with the [`retry_key`](Self::retry_key).
    pub fn return_key(mut self, key: impl Into<String>) -> Self {
        self.return_key = Some(key.into());
        self
    }

    /// The name of the parking lot, `billing.parking_lot` by default.
    pub fn parking_queue(mut self, name: impl Into<String>) -> Self {
        self.parking_queue = Some(name.into());
        self
    }

    /// The key under which messages are parked, `parking_lot` by default.
    pub fn parking_key(mut self, key: impl Into<String>) -> Self {
        self.parking_key = Some(key.into());
        self
    }

    /// What the parking lot is bound to the dead-letter exchange with, the [`parking_key`](Self::parking_key) by default. A
    /// pattern that also matches the [`retry_key`](Self::retry_key) is refused.
    pub fn parking_binding(mut self, pattern: impl Into<String>) -> Self {
        self.parking_binding = Some(pattern.into());
        self
    }

    /// Queues get no arguments beyond those that the design names: neither `x-dead-letter-strategy` with its `x-overflow` nor
    /// `x-delivery-limit`. For queues that other programs have declared without them. The broker may then lose a message that
    /// it moves, and drops one that comes back too often.
    pub fn plain_arguments(mut self) -> Self {
        self.wait.plain_arguments = true;
        self
    }

    /// Retry queue and parking lot are of this type. Without it, they are of the type of the work queue.
    pub fn queue_type(mut self, queue_type: QueueType) -> Self {
        self.wait.queue_type = Some(queue_type);
        self
    }

    /// All that there has to be for a queue, which gets the arguments it needs: the dead-letter exchange with its key and, if
    /// it is a quorum queue, dead-lettering at least once and a delivery limit that is out of the way.
    pub fn topology(&self, queue: Queue) -> Result<Topology, Error> {
        let (exchange, key) = (self.dlx(queue.name()), self.key_of_retry(queue.name()));
        let arguments = rejecting::Arguments::plain_if(self.wait.plain_arguments);
        let queue = rejecting::described(queue, &exchange, Some(&key), arguments)?;
        self.around(&WorkQueue::from(queue.clone()), queue)
    }

    fn around(&self, work: &WorkQueue, queue: Queue) -> Result<Topology, Error> {
        let name = work.name();
        self.check(work)?;
        let dlx = self.dlx(name);
        let named = |given: &Option<String>, suffix: &str| {
            let name = given.clone().unwrap_or_else(|| format!("{name}.{suffix}"));
            self.wait.companion(work, name)
        };
        let retry = named(&self.retry_queue, "retry");
        let waiting = match (self.to_queue, &self.return_key) {
            (true, _) => self.wait.wait_queue(retry, "").dead_letter_key(name),
            (false, None) => self.wait.wait_queue(retry, self.exchange.name()),
            (false, Some(key)) => {
                self.wait.wait_queue(retry, self.exchange.name()).dead_letter_key(key)
            }
        };
        let parking_key = self.key_of_parking(name);
        let parking_binding = self.parking_binding.as_ref().unwrap_or(&parking_key);
        let key = self.key_of_retry(name);
        let return_key = self.return_key.as_ref().unwrap_or(&key);
        let parking = self.wait.parking_lot(named(&self.parking_queue, "parking_lot"));
        let [wait_name, parking_name] = [&waiting, &parking].map(|queue| queue.name().to_owned());
        let mut topology = Topology::new()
            .exchange(self.exchange.clone())
            .exchange(Exchange::new(dlx.as_str(), self.dead_letter_kind.clone()))
            .queue(waiting.bind(dlx.as_str(), self.pattern_of_retry(name)))
            .queue(parking.bind(&dlx, parking_binding))
            .queue(queue);
        let mut routes = vec![
            ("a rejected message", &*dlx, Some(&*key), &*wait_name),
            ("a parked message", &dlx, Some(&parking_key), &parking_name),
        ];
        if !self.to_queue {
            topology = topology.binding(Binding::to_queue(name, self.exchange.name(), return_key));
            routes.push((
                "a message that has waited",
                self.exchange.name(),
                Some(return_key),
                name,
            ));
        }
        traps::check_routes(name, &topology, vec![name, &wait_name, &parking_name], &routes)?;
        Ok(topology)
    }

    fn check(&self, work: &WorkQueue) -> Result<(), Error> {
        self.wait.check(work)?;
        if !self.to_queue && *self.exchange.kind() == ExchangeKind::Headers {
            let why = "the primary exchange looks at headers, and could not tell what comes back to this queue. Use \
                       `only_to_queue`";
            return Err(traps::refusal(work.name(), why));
        }
        if self.exchange.name().is_empty() {
            let why = "the default exchange cannot be declared or bound to. Name another, and use `only_to_queue`";
            return Err(traps::refusal(work.name(), why));
        }
        Ok(())
    }

    fn dlx(&self, queue: &str) -> String {
        self.dead_letter_exchange.clone().unwrap_or_else(|| format!("{queue}.dlx"))
    }

    fn key_of_retry(&self, queue: &str) -> String {
        self.retry_key.clone().unwrap_or_else(|| format!("retry.{queue}"))
    }

    fn pattern_of_retry(&self, queue: &str) -> String {
        if let Some(pattern) = &self.retry_binding {
            return pattern.clone();
        }
        let takes_patterns = self.dead_letter_kind == ExchangeKind::Topic;
        match takes_patterns && !self.is_shared && self.retry_key.is_none() {
            true => "retry.#".to_owned(),
            false => self.key_of_retry(queue),
        }
    }

    fn key_of_parking(&self, queue: &str) -> String {
        match &self.parking_key {
            Some(key) => key.clone(),
            None if self.is_shared => format!("parking_lot.{queue}"),
            None => "parking_lot".to_owned(),
        }
    }
}

impl RetryProfile for Chandra {
    fn policy(&self) -> &RetryPolicy {
        &self.wait.policy
    }

    fn topology(&self, work: &WorkQueue) -> Result<Topology, Error> {
        let (exchange, key) = (self.dlx(work.name()), self.key_of_retry(work.name()));
        let queue = rejecting::work_queue(work, &exchange, Some(&key))?;
        self.around(work, queue)
    }

    fn belongings(&self, work: &WorkQueue) -> Result<Topology, Error> {
        let mut topology = RetryProfile::topology(self, work)?;
        topology.remove_exchange(self.exchange.name());
        if self.is_shared {
            topology.remove_exchange(&self.dlx(work.name()));
        }
        Ok(topology)
    }

    fn requires_queue_type(&self) -> bool {
        self.wait.queue_type.is_some()
    }

    fn failures(&self, properties: &RawProperties, queue: &str) -> u32 {
        rejecting::failures(properties, queue)
    }

    fn republish(&self, delivery: &Delivery, queue: &str, origin: &Origin) -> ForwardedMessage {
        rejecting::republish(delivery, queue, origin)
    }

    fn origin(&self, properties: &RawProperties, queue: &str) -> Option<Origin> {
        rejecting::origin(properties, queue)
    }

    fn first_failure(&self, properties: &RawProperties, queue: &str) -> Option<SystemTime> {
        rejecting::first_failure(properties, queue)
    }

    fn retry(&self, _: &FailedMessage<'_>, _: Duration) -> RetryStep {
        RetryStep::DeadLetter
    }

    /// No exchange leads from here to the queue alone under any key, so nothing is said about the way back: that is the
    /// default exchange.
    fn park(&self, message: &FailedMessage<'_>) -> RetryStep {
        let FailedMessage { delivery, failed, detail } = *message;
        let queue = delivery.queue();
        let mut parcel = ForwardedMessage::of(delivery, self.dlx(queue));
        parcel.routing_key = self.key_of_parking(queue);
        // Another key in it might lead to the retry queue.
        parcel.keep_copies();
        rejecting::close_the_story(&mut parcel, delivery.raw_properties(), queue);
        failed.stamp(&mut parcel, detail);
        parcel.into()
    }
}

impl From<Chandra> for Retry {
    fn from(profile: Chandra) -> Self {
        Retry::with_profile(profile)
    }
}
