//! The design of Chandra: one dead-letter exchange, whose routing keys tell waiting from parking.

use std::time::{Duration, SystemTime};

use crate::amqp::RawProperties;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::mover::Parcel;
use crate::topology::{Binding, Exchange, ExchangeKind, Queue, QueueType, Topology};

use super::one_wait::OneWait;
use super::policy::RetryPolicy;
use super::profile::{Profile, Step, WorkQueue};
use super::stamp::{Detail, Failed, Origin};
use super::{Retry, rejecting, traps};

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
/// Moving messages from queue to queue is the broker's business here, and safe with quorum queues alone: a classic queue may
/// lose them if the broker stops in between.
///
/// [`Incoming::routing_key`]: crate::Incoming::routing_key
#[derive(Clone, Debug)]
#[must_use]
pub struct Chandra {
    exchange: Exchange,
    wait: OneWait,
    shared: Option<String>,
    to_queue: bool,
}

impl Chandra {
    /// With the primary exchange: the one by which messages come back. Five retries, half a minute apart.
    pub fn new(exchange: Exchange) -> Self {
        Chandra {
            exchange,
            wait: OneWait::new(Duration::from_secs(30), 5),
            shared: None,
            to_queue: false,
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

    /// One dead-letter exchange for many queues. The keys of a queue `billing` are then `retry.billing` and
    /// `parking_lot.billing`, so that each has its own.
    pub fn dead_letter_exchange(mut self, name: impl Into<String>) -> Self {
        self.shared = Some(name.into());
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
        let (exchange, key) = (self.dlx(queue.name()), retry_key(queue.name()));
        let queue = rejecting::described(queue, &exchange, Some(&key))?;
        self.around(&WorkQueue::Known(queue.clone()), queue)
    }

    fn around(&self, work: &WorkQueue, queue: Queue) -> Result<Topology, Error> {
        let name = work.name();
        self.check(work)?;
        let dlx = self.dlx(name);
        let (retry, parking) = (retry_key(name), self.parking_key(name));
        let pattern = if self.shared.is_some() { retry.as_str() } else { "retry.#" };
        let companion = |suffix: &str| self.wait.companion(work, format!("{name}.{suffix}"));
        let waiting = if self.to_queue {
            self.wait.wait_queue(companion("retry"), "").dead_letter_key(name)
        } else {
            self.wait.wait_queue(companion("retry"), self.exchange.name())
        };
        let mut topology = Topology::new()
            .exchange(self.exchange.clone())
            .exchange(Exchange::topic(dlx.as_str()))
            .queue(waiting.bind(dlx.as_str(), pattern))
            .queue(companion("parking_lot").bind(dlx.as_str(), parking))
            .queue(queue);
        if !self.to_queue {
            topology = topology.binding(Binding::to_queue(name, self.exchange.name(), retry));
        }
        traps::check_cycles(name, &topology)?;
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
        self.shared.clone().unwrap_or_else(|| format!("{queue}.dlx"))
    }

    fn parking_key(&self, queue: &str) -> String {
        match self.shared {
            Some(_) => format!("parking_lot.{queue}"),
            None => "parking_lot".to_owned(),
        }
    }
}

fn retry_key(queue: &str) -> String {
    format!("retry.{queue}")
}

impl Profile for Chandra {
    fn policy(&self) -> &RetryPolicy {
        &self.wait.policy
    }

    fn topology(&self, work: &WorkQueue) -> Result<Topology, Error> {
        let (exchange, key) = (self.dlx(work.name()), retry_key(work.name()));
        let queue = rejecting::work_queue(work, &exchange, Some(&key))?;
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

    /// No exchange leads from here to the queue alone under any key, so nothing is said about the way back: that is the
    /// default exchange.
    fn park(&self, delivery: &Delivery, failed: &Failed<'_>, detail: Detail) -> Step {
        let queue = delivery.queue();
        let mut parcel = Parcel::of(delivery, self.dlx(queue));
        parcel.routing_key = self.parking_key(queue);
        // Another key in it might lead to the retry queue.
        parcel.keep_copies();
        rejecting::close_the_story(&mut parcel, delivery.raw_properties(), queue);
        failed.stamp(&mut parcel, detail);
        Step::Move(Box::new(parcel))
    }
}

impl From<Chandra> for Retry {
    fn from(profile: Chandra) -> Self {
        Retry::with(profile)
    }
}
