//! The design of ACAPI, which is that of Sneakers and Kicks.

use std::time::Duration;

use leveret::amqp::RawProperties;
use leveret::retry::{FailedMessage, RetryProfile, RetryStep, WorkQueue, rejections};
use leveret::{Binding, Error, Exchange, ExchangeKind, Queue, Retry, RetryPolicy, Topology};

use crate::names::Names;
use crate::one_wait::OneWait;
use crate::{queues, routes};

mod retry_info;
mod site;

pub use site::{AcapiSite, AcapiTraffic};

/// Messages wait in a queue beside their own, and end in another one: the design of ACAPI's clients, and of the `Maxretry`
/// handler of Sneakers and Kicks, with which it can share queues.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use std::time::Duration;
/// use leveret::{Client, Queue};
/// use leveret_profiles::Acapi;
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
/// [`Retry`] lists, and `retry_info`, JSON as Kicks writes it from 2.12 on; `x-death` is taken from it, so that it
/// counts from the beginning if it is published again. `x-leveret-history` knows the last error only: the design rejects messages, and AMQP cannot
/// add anything to what is rejected. The errors before it are in the logs.
///
/// All messages wait the same: what [`Failure::retry_after`](leveret::Failure::retry_after) asks for is not heard, and a
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
    names: Names,
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
            names: Names::default(),
        }
    }

    wait_setters!();

    /// The exchanges are topics, bound with `#`: what Sneakers declares. They do the same as fanouts, but declaring one kind
    /// where there is the other is an error.
    pub fn topic(mut self) -> Self {
        self.exchanges = ExchangeKind::Topic;
        self
    }

    name_setters! {
        /// The name of the exchange to which messages are rejected, `orders-retry` by default.
        retry_exchange;
        /// The name of the queue in which messages wait, `orders-retry` by default.
        retry_queue;
        /// What that queue is bound with, `#` by default.
        retry_key;
        /// The name of the exchange by which messages come back, `orders-retry-requeue` by default.
        requeue_exchange;
        /// What the work queue is bound to it with, `#` by default: the `retry_routing_key` of Sneakers.
        requeue_key;
        /// The name of the exchange to which messages are published that are not tried again, `orders-error` by default.
        error_exchange;
        /// The name of the parking lot, `orders-error` by default.
        error_queue;
        /// What the parking lot is bound with, `#` by default.
        error_key;
    }

    /// All that there has to be for a queue, which gets the arguments it needs: the dead-letter exchange and, if it is a
    /// quorum queue, dead-lettering at least once and a delivery limit that is out of the way.
    pub fn topology(&self, queue: Queue) -> Result<Topology, Error> {
        let retry = self.name(queue.name(), RETRY);
        let queue = queues::rejecting(queue, &retry, None, self.wait.plain_arguments)?;
        self.around(&WorkQueue::from(queue.clone()), queue)
    }

    fn around(&self, work: &WorkQueue, queue: Queue) -> Result<Topology, Error> {
        self.wait.check(work)?;
        let name = work.name();
        let [retry, requeue, error, wait_queue, error_queue] =
            [RETRY, REQUEUE, ERROR, RETRY_QUEUE, ERROR_QUEUE].map(|what| self.name(name, what));
        let exchange = |name: &str| Exchange::new(name, self.exchanges.clone());
        let key = |what| self.names.or(what, EVERYTHING);
        let waiting = self.wait.wait_queue(work, wait_queue.clone(), &requeue);
        let parking = self.wait.parking_lot(work, error_queue.clone());
        let topology = Topology::new()
            .exchange(exchange(&retry))
            .exchange(exchange(&requeue))
            .exchange(exchange(&error))
            .queue(waiting.bind(&retry, key("retry_key")))
            .queue(parking.bind(&error, key("error_key")))
            .queue(queue)
            .binding(Binding::to_queue(name, &requeue, key("requeue_key")));
        let routes = [
            ("a rejected message", &*retry, None, &*wait_queue),
            ("a message that has waited", &requeue, None, name),
            ("a parked message", &error, None, &error_queue),
        ];
        routes::check(work, &topology, vec![name, &wait_queue, &error_queue], &routes)?;
        Ok(topology)
    }

    /// A name that was set, or else that of the work queue with an ending.
    fn name(&self, queue: &str, (what, ending): (&str, &str)) -> String {
        self.names.or(what, format!("{queue}{ending}"))
    }
}

const RETRY: (&str, &str) = ("retry_exchange", "-retry");
const RETRY_QUEUE: (&str, &str) = ("retry_queue", "-retry");
const REQUEUE: (&str, &str) = ("requeue_exchange", "-retry-requeue");
const ERROR: (&str, &str) = ("error_exchange", "-error");
const ERROR_QUEUE: (&str, &str) = ("error_queue", "-error");

/// The key of all bindings: of no meaning to a fanout, and everything to a topic.
const EVERYTHING: &str = "#";

impl RetryProfile for Acapi {
    fn policy(&self) -> &RetryPolicy {
        &self.wait.policy
    }

    fn topology(&self, work: &WorkQueue) -> Result<Topology, Error> {
        let queue = queues::consumed(work, &self.name(work.name(), RETRY), None)?;
        self.around(work, queue)
    }

    fn requires_queue_type(&self) -> bool {
        self.wait.queue_type.is_some()
    }

    fn counts_rejections(&self) -> bool {
        true
    }

    fn failures(&self, properties: &RawProperties, queue: &str) -> u32 {
        rejections(properties, queue)
    }

    fn retry(&self, _: &FailedMessage<'_>, _: Duration) -> RetryStep {
        RetryStep::DeadLetter
    }

    fn park(&self, failed: &FailedMessage<'_>) -> RetryStep {
        let queue = failed.queue();
        let key = failed.origin().routing_key.to_str_lossy();
        let mut message = failed.forward_to(self.name(queue, ERROR), key);
        retry_info::write(&mut message, failed);
        message.set_header(queues::RETURN, self.name(queue, REQUEUE));
        message.into()
    }
}

impl From<Acapi> for Retry {
    fn from(profile: Acapi) -> Self {
        Retry::with_profile(profile)
    }
}
