//! The design of ACAPI, which is that of Sneakers and Kicks.

use std::time::{Duration, SystemTime};

use crate::amqp::RawProperties;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::mover::Parcel;
use crate::topology::{Binding, Exchange, ExchangeKind, Queue, QueueType, Topology};

use super::one_wait::OneWait;
use super::policy::RetryPolicy;
use super::profile::{Profile, Step, WorkQueue};
use super::stamp::{Detail, Failed, Origin, header};
use super::{Retry, rejecting, retry_info, traps};

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
/// The exchanges are fanouts, or topics as Sneakers declares them, see [`topic`](Self::topic). Routing keys stay as they are.
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
/// Moving messages from queue to queue is the broker's business here, and safe with quorum queues alone: a classic queue may
/// lose them if the broker stops in between.
#[derive(Clone, Debug)]
#[must_use]
pub struct Acapi {
    wait: OneWait,
    exchanges: ExchangeKind,
}

impl Default for Acapi {
    fn default() -> Self {
        Acapi::new()
    }
}

impl Acapi {
    /// Five retries, a minute apart, as Sneakers has it.
    pub fn new() -> Self {
        Acapi { wait: OneWait::new(Duration::from_secs(60), 5), exchanges: ExchangeKind::Fanout }
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

    /// Wait queue and parking lot are of this type. Without it, they are of the type of the work queue.
    pub fn queue_type(mut self, queue_type: QueueType) -> Self {
        self.wait.queue_type = Some(queue_type);
        self
    }

    /// All that there has to be for a queue, which gets the arguments it needs: the dead-letter exchange and, if it is a
    /// quorum queue, dead-lettering at least once and a delivery limit that is out of the way.
    pub fn topology(&self, queue: Queue) -> Result<Topology, Error> {
        let retry = retry_name(queue.name());
        let queue = rejecting::described(queue, &retry, None)?;
        self.around(&WorkQueue::Known(queue.clone()), queue)
    }

    fn around(&self, work: &WorkQueue, queue: Queue) -> Result<Topology, Error> {
        self.wait.check(work)?;
        let name = work.name().to_owned();
        let (retry, requeue, error) = (retry_name(&name), requeue_name(&name), error_name(&name));
        let exchange = |name: &str| Exchange::new(name, self.exchanges.clone());
        let companion = |name: &str| self.wait.companion(work, name);
        let topology = Topology::new()
            .exchange(exchange(&retry))
            .exchange(exchange(&requeue))
            .exchange(exchange(&error))
            .queue(self.wait.wait_queue(companion(&retry), &requeue).bind(retry, EVERYTHING))
            .queue(companion(&error).bind(error, EVERYTHING))
            .queue(queue)
            .binding(Binding::to_queue(&name, requeue, EVERYTHING));
        traps::check_cycles(&name, &topology)?;
        Ok(topology)
    }
}

/// The key of all bindings: of no meaning to a fanout, and everything to a topic.
const EVERYTHING: &str = "#";

fn retry_name(queue: &str) -> String {
    format!("{queue}-retry")
}

fn requeue_name(queue: &str) -> String {
    format!("{queue}-retry-requeue")
}

fn error_name(queue: &str) -> String {
    format!("{queue}-error")
}

impl Profile for Acapi {
    fn policy(&self) -> &RetryPolicy {
        &self.wait.policy
    }

    fn topology(&self, work: &WorkQueue) -> Result<Topology, Error> {
        let queue = rejecting::work_queue(work, &retry_name(work.name()), None)?;
        self.around(work, queue)
    }

    fn asks_for_type(&self) -> bool {
        self.wait.queue_type.is_some()
    }

    fn failures(&self, properties: &RawProperties, queue: &str) -> u32 {
        rejecting::failures(properties, queue)
    }

    fn anew(&self, delivery: &Delivery, queue: &str, origin: &Origin) -> Parcel {
        rejecting::anew(delivery, queue, origin)
    }

    fn origin(&self, properties: &RawProperties, queue: &str) -> Option<Origin> {
        rejecting::origin(properties, queue)
    }

    fn first_failure(&self, properties: &RawProperties, queue: &str) -> Option<SystemTime> {
        rejecting::first_failure(properties, queue)
    }

    fn retry(&self, _: &Delivery, _: &Failed<'_>, _: Duration, _: Detail) -> Step {
        Step::DeadLetter
    }

    fn park(&self, delivery: &Delivery, failed: &Failed<'_>, detail: Detail) -> Step {
        let queue = delivery.queue();
        let mut parcel = Parcel::of(delivery, error_name(queue));
        retry_info::write(&mut parcel, failed, detail);
        rejecting::close_the_story(&mut parcel, delivery.raw_properties(), queue);
        parcel.set(header::RETURN, requeue_name(queue));
        failed.stamp(&mut parcel, detail);
        Step::Move(Box::new(parcel))
    }
}

impl From<Acapi> for Retry {
    fn from(profile: Acapi) -> Self {
        Retry::with(profile)
    }
}
