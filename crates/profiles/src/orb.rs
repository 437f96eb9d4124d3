//! The design of Orb: rejected messages of all queues meet in one, whose consumer sends them back.

use std::time::Duration;

use leveret::amqp::RawProperties;
use leveret::retry::{FailedMessage, ForwardedMessage, RetryProfile, RetryStep, WorkQueue};
use leveret::{Client, Error, Exchange, Queue, QueueType, Retry, RetryPolicy, Runner, Topology};

use crate::{queues, routes};

mod redelivery;

/// Rejected messages of all queues go to one redelivery queue, whose service sends them back to where they came from: the
/// first time at once, then after waits that grow. The design of Orb.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use leveret::{Client, Queue};
/// use leveret_profiles::Orb;
///
/// let client = Client::embedded().await?;
/// let orb = Orb::new().max_attempts(30);
/// client.apply(&orb.topology(Queue::quorum("orb.inbox"))?).await?;
/// // Once at least in each deployment, in any process:
/// let service = tokio::spawn(orb.redelivery(&client).run());
/// let runner = client.consumer("orb.inbox").retry(orb).handle(async |body: String| {
///     println!("{body}");
/// });
/// # let _ = (runner, service.abort());
/// # Ok(())
/// # }
/// ```
///
/// There are
///
/// - `orb`, a direct exchange; each queue is bound to it with its own name;
/// - `orb.redelivery`, exchange and queue: the dead-letter exchange of all queues, which have to be declared so, with the
///   dead-letter routing key `orb.redelivery`;
/// - `orb.wait`, exchange and queue: where messages wait, each with its own `expiration`. It dead-letters to
///   `orb.redelivery`, too;
/// - `orb.parked`, a fanout exchange and a queue: the parking lot.
///
/// Handlers that fail have their message rejected. The [redelivery service](Self::redelivery) then publishes it, to its queue
/// or to where it waits, confirmed, and acks it after that. It counts in the header `orb-redelivery-count` and says in
/// `orb-queue` where the message belongs, as Orb does, so that both can work side by side. All that it adds to a message are
/// headers of text, because Orb's programs refuse a message with any that is neither text nor a list. They declare their queues
/// without a type, so a queue that is shared with them is `Queue::new(name)`: the broker would refuse them a quorum queue, and adds
/// the number `x-delivery-count` there. [Delayed](leveret::Publisher::publish_in) messages for a queue that Orb's redelivery handler
/// serves go by the exchange `orb`: those that are delayed to the queue itself have died in a delay queue first, and it would send
/// them there. Orb gives a message up that has
/// failed too often; here it is parked: by the consumer, which knows the error, or by the service, for consumers that do
/// nothing but reject. So is one whose queue is not there, or of which nobody knows where it belongs. A parked message has no
/// count, so that it begins anew if it is published again.
///
/// Messages that wait stand in one queue, and leave it in their order: one that waits for two seconds may stand behind one
/// that waits for a minute, and comes back after that. Where this matters, use `Retry::new`. How long they wait is the
/// service's business: what [`Failure::retry_after`](leveret::Failure::retry_after) asks for is not heard, and a warning says so
/// once.
#[derive(Clone, Debug)]
#[must_use]
pub struct Orb {
    exchange: String,
    redelivery: Route,
    wait: Route,
    /// Its exchange is a fanout, so that the key means nothing.
    parked: Route,
    initial: Duration,
    multiplier: f64,
    longest: Duration,
    policy: RetryPolicy,
    queue_type: Option<QueueType>,
    plain_arguments: bool,
    /// Says how often a message was sent back, as text.
    count_header: String,
    /// Says which queue it belongs to.
    queue_header: String,
}

/// A queue that all others share, and how messages get there.
#[derive(Clone, Debug, Default)]
struct Route {
    exchange: String,
    key: String,
    queue: String,
}

impl Route {
    fn named(name: impl Into<String>) -> Self {
        let name = name.into();
        Route { exchange: name.clone(), key: name.clone(), queue: name }
    }
}

impl Default for Orb {
    fn default() -> Self {
        Orb::new()
    }
}

impl Orb {
    /// 30 attempts: at once, then after 2 s, 3 s, 4.5 s and so on up to a minute, as Orb's program has it. The example in its
    /// document begins with 3 s: for that, begin with an [interval](Self::initial_interval) of 3 s.
    pub fn new() -> Self {
        Orb {
            exchange: String::new(),
            redelivery: Route::default(),
            wait: Route::default(),
            parked: Route::default(),
            initial: Duration::from_secs(2),
            multiplier: 1.5,
            longest: Duration::from_secs(60),
            policy: RetryPolicy::default().max_retries(30),
            queue_type: None,
            plain_arguments: false,
            count_header: "orb-redelivery-count".to_owned(),
            queue_header: "orb-queue".to_owned(),
        }
        .name("orb")
        .by_intervals()
    }

    /// The name of the exchange, with which the names of the shared queues begin.
    pub fn name(self, name: impl Into<String>) -> Self {
        let exchange = name.into();
        let [redelivery, wait, parked] =
            ["redelivery", "wait", "parked"].map(|name| Route::named(format!("{exchange}.{name}")));
        Orb { exchange, redelivery, wait, parked, ..self }
    }

    /// The name of the exchange alone. Set it after [`name`](Self::name), as all that follow here.
    pub fn exchange(mut self, name: impl Into<String>) -> Self {
        self.exchange = name.into();
        self
    }

    /// The name of the redelivery queue, its exchange and its key.
    pub fn redelivery_name(mut self, name: impl Into<String>) -> Self {
        self.redelivery = Route::named(name);
        self
    }

    /// The name of the exchange to which messages are rejected.
    pub fn redelivery_exchange(mut self, name: impl Into<String>) -> Self {
        self.redelivery.exchange = name.into();
        self
    }

    /// The dead-letter routing key of all queues, with which the redelivery queue is bound.
    pub fn redelivery_key(mut self, key: impl Into<String>) -> Self {
        self.redelivery.key = key.into();
        self
    }

    /// The name of the redelivery queue alone.
    pub fn redelivery_queue(mut self, name: impl Into<String>) -> Self {
        self.redelivery.queue = name.into();
        self
    }

    /// The name of the queue in which messages wait, its exchange and its key.
    pub fn wait_name(mut self, name: impl Into<String>) -> Self {
        self.wait = Route::named(name);
        self
    }

    /// The name of the exchange of messages that wait.
    pub fn wait_exchange(mut self, name: impl Into<String>) -> Self {
        self.wait.exchange = name.into();
        self
    }

    /// The key under which messages are sent to wait, with which their queue is bound.
    pub fn wait_key(mut self, key: impl Into<String>) -> Self {
        self.wait.key = key.into();
        self
    }

    /// The name of the queue in which messages wait, alone.
    pub fn wait_queue(mut self, name: impl Into<String>) -> Self {
        self.wait.queue = name.into();
        self
    }

    /// The name of the parking lot, and its exchange.
    pub fn parked_name(mut self, name: impl Into<String>) -> Self {
        self.parked = Route::named(name);
        self
    }

    /// The name of the exchange of messages that are not tried again.
    pub fn parked_exchange(mut self, name: impl Into<String>) -> Self {
        self.parked.exchange = name.into();
        self
    }

    /// The name of the parking lot alone.
    pub fn parked_queue(mut self, name: impl Into<String>) -> Self {
        self.parked.queue = name.into();
        self
    }

    /// The header that says how often a message was sent back, `orb-redelivery-count` by default.
    pub fn count_header(mut self, name: impl Into<String>) -> Self {
        self.count_header = name.into();
        self
    }

    /// The header that says which queue a message belongs to, `orb-queue` by default.
    pub fn queue_header(mut self, name: impl Into<String>) -> Self {
        self.queue_header = name.into();
        self
    }

    /// Queues get no arguments beyond those that the design names: neither `x-dead-letter-strategy` with its `x-overflow` nor
    /// `x-delivery-limit`. For queues that other programs have declared without them. The broker may then lose a message that
    /// it moves, and drops one that comes back too often.
    pub fn plain_arguments(mut self) -> Self {
        self.plain_arguments = true;
        self
    }

    /// The first wait.
    pub fn initial_interval(mut self, interval: Duration) -> Self {
        self.initial = interval;
        self.by_intervals()
    }

    /// How much longer each wait is than the one before.
    pub fn multiplier(mut self, multiplier: f64) -> Self {
        self.multiplier = multiplier;
        self.by_intervals()
    }

    /// The longest wait.
    pub fn max_interval(mut self, interval: Duration) -> Self {
        self.longest = interval;
        self.by_intervals()
    }

    /// How many times a message is tried again. `n` means `n + 1` deliveries.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.policy = self.policy.max_retries(attempts);
        self
    }

    /// A policy for what intervals and number do not say.
    pub fn policy(mut self, policy: RetryPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// The shared queues are of this type. Without it, they are of the broker's default type, and not of that of a work queue:
    /// they belong to many.
    pub fn queue_type(mut self, queue_type: QueueType) -> Self {
        self.queue_type = Some(queue_type);
        self
    }

    /// All that there has to be for a queue, which gets the arguments it needs and is bound to the exchange by its name.
    pub fn topology(&self, queue: Queue) -> Result<Topology, Error> {
        let Route { exchange, key, .. } = &self.redelivery;
        let queue = queues::rejecting(queue, exchange, Some(key), self.plain_arguments)?;
        self.around(&WorkQueue::from(queue.clone()), queue)
    }

    /// The service that sends messages back, ready to run. There has to be one at least, in any process; more share the work.
    ///
    /// It is a consumer of the redelivery queue, whose messages have failed elsewhere. Of what it did,
    /// [`retried`](leveret::Summary::retried) counts how often a message was sent back or made to wait, and
    /// [`parked`](leveret::Summary::parked) the messages that it parked.
    pub fn redelivery(&self, client: &Client) -> Runner {
        redelivery::service(self, client)
    }

    fn by_intervals(mut self) -> Self {
        let retries = self.policy.retries();
        self.policy = RetryPolicy::exponential(self.initial, self.multiplier)
            .capped(self.longest)
            .immediate_first();
        self.policy = match retries {
            Some(retries) => self.policy.max_retries(retries),
            None => self.policy.unlimited_retries(),
        };
        self
    }

    fn around(&self, work: &WorkQueue, queue: Queue) -> Result<Topology, Error> {
        work.check(&self.policy)?;
        let name = work.name();
        let topology = self.shared().queue(queue.bind(self.exchange.as_str(), name));
        let back = ("a message that is sent back", &*self.exchange, Some(name), name);
        self.check(work, &topology, Some(back))?;
        Ok(topology)
    }

    /// Checks that names and keys lead each message to one queue, with the way back if it is known.
    fn check(
        &self,
        work: &WorkQueue,
        topology: &Topology,
        back: Option<routes::Route<'_>>,
    ) -> Result<(), Error> {
        let (redelivery, wait, parked) = (&self.redelivery, &self.wait, &self.parked);
        let (rejected, waits) = (Some(&*redelivery.key), Some(&*wait.key));
        let mut queues = vec![&*redelivery.queue, &wait.queue, &parked.queue];
        let mut routes = vec![
            ("a rejected message", &*redelivery.exchange, rejected, &*redelivery.queue),
            ("a message that has to wait", &wait.exchange, waits, &wait.queue),
            ("a parked message", &parked.exchange, None, &parked.queue),
        ];
        if let Some(back) = back {
            queues.push(work.name());
            routes.push(back);
        }
        routes::check(work, topology, queues, &routes)
    }

    /// What all queues share.
    fn shared(&self) -> Topology {
        let queue = |name: &str| match self.queue_type {
            Some(queue_type) => Queue::new(name).of_type(queue_type),
            None => Queue::new(name),
        };
        let (redelivery, wait, parked) = (&self.redelivery, &self.wait, &self.parked);
        let mut redelivered = queue(&redelivery.queue).bind(&redelivery.exchange, &redelivery.key);
        if self.queue_type == Some(QueueType::Quorum) && !self.plain_arguments {
            // What cannot be moved for a while goes back to it again and again.
            redelivered = queues::unlimited(redelivered);
        }
        let mut lot = queue(&parked.queue);
        let mut waiting = queue(&wait.queue)
            .dead_letter_to(&redelivery.exchange)
            .dead_letter_key(&redelivery.key);
        if !self.plain_arguments {
            waiting = queues::at_least_once(waiting);
            lot = queues::parking_lot(lot);
        }
        Topology::new()
            .exchange(Exchange::direct(self.exchange.as_str()))
            .exchange(Exchange::direct(&redelivery.exchange))
            .exchange(Exchange::direct(&wait.exchange))
            .exchange(Exchange::fanout(&parked.exchange))
            .queue(redelivered)
            .queue(waiting.bind(&wait.exchange, &wait.key))
            .queue(lot.bind(&parked.exchange, ""))
    }

    /// How often a message was sent back, if it says so.
    fn count(&self, properties: &RawProperties) -> Option<u32> {
        queues::count(properties, &self.count_header)
    }

    /// The message for the parking lot, of this queue.
    fn parked(&self, failed: &FailedMessage<'_>, queue: &str) -> ForwardedMessage {
        let key = failed.origin().routing_key.to_str_lossy();
        let mut message = failed.forward_to(&self.parked.exchange, &*key);
        for name in [&self.count_header, &self.queue_header] {
            message.remove_header(name);
        }
        // Under any other key it would not get back that way, and with further ones not alone.
        if key == queue && !queues::has_copies(&message) {
            message.set_header(queues::RETURN, self.exchange.as_str());
        }
        message
    }
}

impl RetryProfile for Orb {
    fn policy(&self) -> &RetryPolicy {
        &self.policy
    }

    fn topology(&self, work: &WorkQueue) -> Result<Topology, Error> {
        let Route { exchange, key, .. } = &self.redelivery;
        let queue = queues::consumed(work, exchange, Some(key))?;
        self.around(work, queue)
    }

    /// All other objects serve several queues.
    fn belongings(&self, _: &WorkQueue) -> Result<Topology, Error> {
        Ok(Topology::new())
    }

    fn requires_queue_type(&self) -> bool {
        self.queue_type.is_some()
    }

    fn failures(&self, properties: &RawProperties, _queue: &str) -> u32 {
        self.count(properties).unwrap_or(0)
    }

    fn retry(&self, _: &FailedMessage<'_>, _: Duration) -> RetryStep {
        RetryStep::DeadLetter
    }

    fn park(&self, failed: &FailedMessage<'_>) -> RetryStep {
        self.parked(failed, failed.queue()).into()
    }
}

impl From<Orb> for Retry {
    fn from(profile: Orb) -> Self {
        Retry::with_profile(profile)
    }
}
