//! The design of ACAPI, which is that of Sneakers and Kicks.

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
use crate::retry::stamp::{Origin, header};
use crate::retry::{Retry, rejecting, retry_info, traps};

/// Messages wait in a queue beside their own, and end in another one: the design of ACAPI's clients, and of the `Maxretry`
/// handler of Sneakers and Kicks, with which it can share queues.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use std::time::Duration;
/// use leveret::{Acapi, Client, Queue};
///
/// let client = Client::embedded().await?;
/// let retry = Acapi::new().interval(Duration::from_secs(30)).max_retries(5);
/// client.apply(&retry.topology(Queue::quorum("orders"))?).await?;
/// let runner = client.consumer("orders").retry(retry).handle(async |body: String| {
///     println!("{body}");
/// });
/// # let _ = runner;
/// # Ok(())
/// # }
/// ```
///
/// Beside a queue `orders` there are
///
/// - `orders-retry`, exchange and queue: where rejected messages wait for the interval. It is the dead-letter exchange of
///   `orders`, which has to be declared so;
/// - `orders-retry-requeue`, the exchange by which they come back to `orders`, and to no other queue;
/// - `orders-error`, exchange and queue: the parking lot.
///
/// Each of these names and keys can be set on its own. The exchanges are fanouts, or topics as Sneakers declares them, see [`topic`](Self::topic). Routing keys stay as they are.
///
/// A failed message is rejected; the broker moves it, and counts in `x-death`. Once its retries are used up, or its error is
/// permanent, it is published to `orders-error`, confirmed, and only then acked. There it carries the headers that
/// [`Retry`] lists, and `retry_info`, JSON as Kicks writes it from 2.12 on; `x-death` is taken from it, so that it begins
/// anew if it is published again. `x-leveret-history` knows the last error only: the design rejects messages, and AMQP cannot
/// add anything to what is rejected. The errors before it are in the logs.
///
/// All messages wait the same: what [`Failure::retry_after`](crate::Failure::retry_after) asks for is not heard, and a
/// warning says so once. Where messages wait in quorum queues of RabbitMQ 4.0, one of higher priority goes before the others,
/// which then wait longer: only what is first expires.
///
/// PendingForward messages from queue to queue is the broker's business here, and safe with quorum queues alone: a classic queue may
/// lose them if the broker stops in between.
#[derive(Clone, Debug)]
#[must_use]
pub struct Acapi {
    wait: OneWait,
    exchanges: ExchangeKind,
    retry_exchange: Option<String>,
    retry_queue: Option<String>,
    retry_key: Option<String>,
    requeue_exchange: Option<String>,
    requeue_key: Option<String>,
    error_exchange: Option<String>,
    error_queue: Option<String>,
    error_key: Option<String>,
}

impl Default for Acapi {
    fn default() -> Self {
        Acapi::new()
    }
}

impl Acapi {
    /// Five retries, a minute apart, as Sneakers has it.
    pub fn new() -> Self {
        Acapi {
            wait: OneWait::new(Duration::from_secs(60), 5),
            exchanges: ExchangeKind::Fanout,
            retry_exchange: None,
            retry_queue: None,
            retry_key: None,
            requeue_exchange: None,
            requeue_key: None,
            error_exchange: None,
            error_queue: None,
            error_key: None,
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

    /// The exchanges are topics, bound with `#`: what Sneakers declares. They do the same as fanouts, but declaring one kind
    /// where there is the other is an error.
    pub fn topic(mut self) -> Self {
        self.exchanges = ExchangeKind::Topic;
        self
    }

    /// The name of the exchange to which messages are rejected, `orders-retry` by default.
    pub fn retry_exchange(mut self, name: impl Into<String>) -> Self {
        self.retry_exchange = Some(name.into());
        self
    }

    /// The name of the queue in which messages wait, `orders-retry` by default.
    pub fn retry_queue(mut self, name: impl Into<String>) -> Self {
        self.retry_queue = Some(name.into());
        self
    }

    /// What that queue is bound with, `#` by default.
    pub fn retry_key(mut self, key: impl Into<String>) -> Self {
        self.retry_key = Some(key.into());
        self
    }

    /// The name of the exchange by which messages come back, `orders-retry-requeue` by default.
    pub fn requeue_exchange(mut self, name: impl Into<String>) -> Self {
        self.requeue_exchange = Some(name.into());
        self
    }

    /// What the work queue is bound to it with, `#` by default: the `retry_routing_key` of Sneakers.
    pub fn requeue_key(mut self, key: impl Into<String>) -> Self {
        self.requeue_key = Some(key.into());
        self
    }

    /// The name of the exchange to which messages are published that are not tried again, `orders-error` by default.
    pub fn error_exchange(mut self, name: impl Into<String>) -> Self {
        self.error_exchange = Some(name.into());
        self
    }

    /// The name of the parking lot, `orders-error` by default.
    pub fn error_queue(mut self, name: impl Into<String>) -> Self {
        self.error_queue = Some(name.into());
        self
    }

    /// What the parking lot is bound with, `#` by default.
    pub fn error_key(mut self, key: impl Into<String>) -> Self {
        self.error_key = Some(key.into());
        self
    }

    /// Queues get no arguments beyond those that the design names: neither `x-dead-letter-strategy` with its `x-overflow` nor
    /// `x-delivery-limit`. For queues that other programs have declared without them. The broker may then lose a message that
    /// it moves, and drops one that comes back too often.
    pub fn plain_arguments(mut self) -> Self {
        self.wait.plain_arguments = true;
        self
    }

    /// Wait queue and parking lot are of this type. Without it, they are of the type of the work queue.
    pub fn queue_type(mut self, queue_type: QueueType) -> Self {
        self.wait.queue_type = Some(queue_type);
        self
    }

    /// All that there has to be for a queue, which gets the arguments it needs: the dead-letter exchange and, if it is a
    /// quorum queue, dead-lettering at least once and a delivery limit that is out of the way.
    pub fn topology(&self, queue: Queue) -> Result<Topology, Error> {
        let retry = self.name_of_retry(queue.name());
        let arguments = rejecting::Arguments::plain_if(self.wait.plain_arguments);
        let queue = rejecting::described(queue, &retry, None, arguments)?;
        self.around(&WorkQueue::from(queue.clone()), queue)
    }

    fn around(&self, work: &WorkQueue, queue: Queue) -> Result<Topology, Error> {
        self.wait.check(work)?;
        let name = work.name();
        let (retry, requeue, error) =
            (self.name_of_retry(name), self.name_of_requeue(name), self.name_of_error(name));
        let exchange = |name: &str| Exchange::new(name, self.exchanges.clone());
        let named = |given: &Option<String>, suffix: &str| {
            let name = given.clone().unwrap_or_else(|| format!("{name}-{suffix}"));
            self.wait.companion(work, name)
        };
        let key = |given: &Option<String>| given.clone().unwrap_or_else(|| EVERYTHING.to_owned());
        let waiting = self.wait.wait_queue(named(&self.retry_queue, "retry"), &requeue);
        let parking = self.wait.parking_lot(named(&self.error_queue, "error"));
        let [wait_name, parking_name] = [&waiting, &parking].map(|queue| queue.name().to_owned());
        let topology = Topology::new()
            .exchange(exchange(&retry))
            .exchange(exchange(&requeue))
            .exchange(exchange(&error))
            .queue(waiting.bind(&retry, key(&self.retry_key)))
            .queue(parking.bind(&error, key(&self.error_key)))
            .queue(queue)
            .binding(Binding::to_queue(name, &requeue, key(&self.requeue_key)));
        let routes = [
            ("a rejected message", &*retry, None, &*wait_name),
            ("a message that has waited", &requeue, None, name),
            ("a parked message", &error, None, &parking_name),
        ];
        traps::check_routes(name, &topology, vec![name, &wait_name, &parking_name], &routes)?;
        Ok(topology)
    }

    fn name_of_retry(&self, queue: &str) -> String {
        self.retry_exchange.clone().unwrap_or_else(|| format!("{queue}-retry"))
    }

    fn name_of_requeue(&self, queue: &str) -> String {
        self.requeue_exchange.clone().unwrap_or_else(|| format!("{queue}-retry-requeue"))
    }

    fn name_of_error(&self, queue: &str) -> String {
        self.error_exchange.clone().unwrap_or_else(|| format!("{queue}-error"))
    }
}

/// The key of all bindings: of no meaning to a fanout, and everything to a topic.
const EVERYTHING: &str = "#";

impl RetryProfile for Acapi {
    fn policy(&self) -> &RetryPolicy {
        &self.wait.policy
    }

    fn topology(&self, work: &WorkQueue) -> Result<Topology, Error> {
        let queue = rejecting::work_queue(work, &self.name_of_retry(work.name()), None)?;
        self.around(work, queue)
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

    fn park(&self, message: &FailedMessage<'_>) -> RetryStep {
        let FailedMessage { delivery, failed, detail } = *message;
        let queue = delivery.queue();
        let mut parcel = ForwardedMessage::of(delivery, self.name_of_error(queue));
        retry_info::write(&mut parcel, failed, detail);
        rejecting::close_the_story(&mut parcel, delivery.raw_properties(), queue);
        parcel.set_header(header::RETURN, self.name_of_requeue(queue));
        failed.stamp(&mut parcel, detail);
        parcel.into()
    }
}

impl From<Acapi> for Retry {
    fn from(profile: Acapi) -> Self {
        Retry::with_profile(profile)
    }
}
