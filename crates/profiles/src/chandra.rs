//! The design of Chandra: one dead-letter exchange, whose routing keys tell waiting from parking.

use std::time::Duration;

use leveret::amqp::RawProperties;
use leveret::retry::{FailedMessage, RetryProfile, RetryStep, WorkQueue, rejections};
use leveret::{Binding, Error, Exchange, ExchangeKind, Queue, Retry, RetryPolicy, Topology};

use crate::names::Names;
use crate::one_wait::OneWait;
use crate::{queues, routes};

/// Messages go to a dead-letter exchange, which has a retry queue and a parking lot behind it: the design of the Chandra
/// client library.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use std::time::Duration;
/// use leveret::{Client, Exchange, Queue};
/// use leveret_profiles::Chandra;
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
/// routing key among them, and no `x-death`, so that it counts from the beginning if it is published again. `x-leveret-history` knows the
/// last error only: the design rejects messages, and AMQP cannot add anything to what is rejected. The errors before it are
/// in the logs.
///
/// All messages wait the same: what [`Failure::retry_after`](leveret::Failure::retry_after) asks for is not heard, and a
/// warning says so once. Where messages wait in quorum queues of RabbitMQ 4.0, one of higher priority goes before the others,
/// which then wait longer: only what is first expires.
///
/// Moving messages from queue to queue is the broker's business here, and safe with quorum queues alone: a classic queue may
/// lose them if the broker stops in between.
///
/// [`Incoming::routing_key`]: leveret::Incoming::routing_key
#[derive(Clone, Debug)]
#[must_use]
pub struct Chandra {
    exchange: Exchange,
    wait: OneWait,
    to_queue: bool,
    is_shared: bool,
    dead_letter_kind: ExchangeKind,
    names: Names,
}

impl Chandra {
    /// With the primary exchange: the one by which messages come back. Five retries, half a minute apart.
    pub fn new(exchange: Exchange) -> Self {
        Chandra {
            exchange,
            wait: OneWait::new(Duration::from_secs(30), 5),
            to_queue: false,
            is_shared: false,
            dead_letter_kind: ExchangeKind::Topic,
            names: Names::default(),
        }
    }

    wait_setters!();

    /// What waited comes back to its queue alone, by the default exchange, and nobody else gets a copy.
    pub fn only_to_queue(mut self) -> Self {
        self.to_queue = true;
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

    name_setters! {
        /// The name of the dead-letter exchange, `billing.dlx` by default. Keys and other names stay as they are.
        dead_letter_exchange;
        /// The name of the retry queue, `billing.retry` by default.
        retry_queue;
        /// The dead-letter routing key of the work queue, `retry.billing` by default.
        retry_key;
        /// What the retry queue is bound to the dead-letter exchange with. By default it is `retry.#` at a topic exchange for this queue
        /// alone, and the very [`retry_key`](Self::retry_key) where that is set, the exchange is shared or it is of another kind. A
        /// pattern that also matches the [`parking_key`](Self::parking_key) is refused.
        retry_binding;
        /// The key under which messages go back to the primary exchange: the dead-letter routing key of the retry queue, which has
        /// none by default. The work queue is bound with it, or else with the [`retry_key`](Self::retry_key).
        return_key;
        /// The name of the parking lot, `billing.parking_lot` by default.
        parking_queue;
        /// The key under which messages are parked, `parking_lot` by default.
        parking_key;
        /// What the parking lot is bound to the dead-letter exchange with, the [`parking_key`](Self::parking_key) by default. A
        /// pattern that also matches the [`retry_key`](Self::retry_key) is refused.
        parking_binding;
    }

    /// All that there has to be for a queue, which gets the arguments it needs: the dead-letter exchange with its key and, if
    /// it is a quorum queue, dead-lettering at least once and a delivery limit that is out of the way.
    pub fn topology(&self, queue: Queue) -> Result<Topology, Error> {
        let (dlx, key) = (self.dlx(queue.name()), self.key_of_retry(queue.name()));
        let queue = queues::rejecting(queue, &dlx, Some(&key), self.wait.plain_arguments)?;
        self.around(&WorkQueue::from(queue.clone()), queue)
    }

    fn around(&self, work: &WorkQueue, queue: Queue) -> Result<Topology, Error> {
        let name = work.name();
        self.check(work)?;
        let (dlx, primary) = (self.dlx(name), self.exchange.name());
        let wait_queue = self.names.or("retry_queue", format!("{name}.retry"));
        let waiting = match (self.to_queue, self.names.get("return_key")) {
            (true, _) => self.wait.wait_queue(work, wait_queue.clone(), "").dead_letter_key(name),
            (false, None) => self.wait.wait_queue(work, wait_queue.clone(), primary),
            (false, Some(key)) => {
                self.wait.wait_queue(work, wait_queue.clone(), primary).dead_letter_key(key)
            }
        };
        let lot = self.names.or("parking_queue", format!("{name}.parking_lot"));
        let parking = self.wait.parking_lot(work, lot.clone());
        let (key, parking_key) = (self.key_of_retry(name), self.key_of_parking(name));
        let mut topology = Topology::new()
            .exchange(self.exchange.clone())
            .exchange(Exchange::new(dlx.as_str(), self.dead_letter_kind.clone()))
            .queue(waiting.bind(dlx.as_str(), self.pattern_of_retry(name)))
            .queue(parking.bind(&dlx, self.names.or("parking_binding", &*parking_key)))
            .queue(queue);
        let mut routes = vec![
            ("a rejected message", &*dlx, Some(&*key), &*wait_queue),
            ("a parked message", &dlx, Some(&parking_key), &lot),
        ];
        let return_key = self.names.or("return_key", &*key);
        if !self.to_queue {
            topology = topology.binding(Binding::to_queue(name, primary, &return_key));
            routes.push(("a message that has waited", primary, Some(&return_key), name));
        }
        routes::check(work, &topology, vec![name, &wait_queue, &lot], &routes)?;
        Ok(topology)
    }

    fn check(&self, work: &WorkQueue) -> Result<(), Error> {
        self.wait.check(work)?;
        if !self.to_queue && *self.exchange.kind() == ExchangeKind::Headers {
            let why = "the primary exchange looks at headers, and could not tell what comes back to this queue. Use \
                       `only_to_queue`";
            return Err(work.refusal(why));
        }
        if self.exchange.name().is_empty() {
            let why = "the default exchange cannot be declared or bound to. Name another, and use `only_to_queue`";
            return Err(work.refusal(why));
        }
        Ok(())
    }

    fn dlx(&self, queue: &str) -> String {
        self.names.or("dead_letter_exchange", format!("{queue}.dlx"))
    }

    fn key_of_retry(&self, queue: &str) -> String {
        self.names.or("retry_key", format!("retry.{queue}"))
    }

    fn pattern_of_retry(&self, queue: &str) -> String {
        let takes_patterns = self.dead_letter_kind == ExchangeKind::Topic;
        let is_alone = !self.is_shared && self.names.get("retry_key").is_none();
        let default = match takes_patterns && is_alone {
            true => "retry.#".to_owned(),
            false => self.key_of_retry(queue),
        };
        self.names.or("retry_binding", default)
    }

    fn key_of_parking(&self, queue: &str) -> String {
        let default = match self.is_shared {
            true => format!("parking_lot.{queue}"),
            false => "parking_lot".to_owned(),
        };
        self.names.or("parking_key", default)
    }
}

impl RetryProfile for Chandra {
    fn policy(&self) -> &RetryPolicy {
        &self.wait.policy
    }

    fn topology(&self, work: &WorkQueue) -> Result<Topology, Error> {
        let (dlx, key) = (self.dlx(work.name()), self.key_of_retry(work.name()));
        let queue = queues::consumed(work, &dlx, Some(&key))?;
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

    fn counts_rejections(&self) -> bool {
        true
    }

    fn failures(&self, properties: &RawProperties, queue: &str) -> u32 {
        rejections(properties, queue)
    }

    fn retry(&self, _: &FailedMessage<'_>, _: Duration) -> RetryStep {
        RetryStep::DeadLetter
    }

    /// No exchange leads from here to the queue alone under any key, so nothing is said about the way back: that is the
    /// default exchange.
    fn park(&self, failed: &FailedMessage<'_>) -> RetryStep {
        let queue = failed.queue();
        failed.forward_to(self.dlx(queue), self.key_of_parking(queue)).into()
    }
}

impl From<Chandra> for Retry {
    fn from(profile: Chandra) -> Self {
        Retry::with_profile(profile)
    }
}
