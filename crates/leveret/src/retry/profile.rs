//! A design of retrying: which objects it needs, how it counts, and what it does with a failed message.

use std::fmt::Debug;
use std::time::{Duration, SystemTime};

use crate::amqp::RawProperties;
use crate::deaths::Deaths;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::forwarder::ForwardedMessage;
use crate::topology::{Queue, QueueType, Topology};

use super::failed_message::FailedMessage;
use super::policy::{Decision, Facts, RetryPolicy};
use super::stamp::{self, Origin, header};
use super::{iso8601, rejections, traps};

/// What a [design](RetryProfile) does with a failed message.
#[derive(Debug)]
#[non_exhaustive]
pub enum RetryStep {
    /// Back to its queue, after a pause in which it stays with the consumer.
    Requeue(Duration),
    /// Rejected: to the dead-letter exchange of its queue, or away if that has none.
    DeadLetter,
    /// Published elsewhere, and acked once the broker has confirmed that.
    Move(Box<ForwardedMessage>),
    /// The same; but if no queue takes it, although all that the design needs is declared, it is parked as
    /// [`ParkReason::Unroutable`](super::ParkReason::Unroutable), and not held until a queue does.
    MoveOrPark(Box<ForwardedMessage>),
}

impl From<ForwardedMessage> for RetryStep {
    fn from(message: ForwardedMessage) -> Self {
        RetryStep::Move(Box::new(message))
    }
}

/// A design of retrying: where failed messages wait, where they end, and how their failures are counted. For systems that
/// have queues of their own design; [`Retry::new`](super::Retry::new) has one that suits others.
///
/// The consumer carries out what the design says: it declares the [`topology`](Self::topology), publishes what moves, and
/// acks the original after the confirm. If an exchange or queue is missing, it declares the topology again; if a message
/// cannot move, it is held or goes back to its queue. A design does no I/O, and may be called from many tasks at once.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::BoxError> {
/// use std::time::Duration;
/// use leveret::amqp::RawProperties;
/// use leveret::prelude::*;
/// use leveret::retry::{FailedMessage, RetryProfile, RetryStep, WorkQueue};
///
/// /// Failed messages of `jobs` wait in `jobs.pause`, and end in `jobs.dead`.
/// #[derive(Debug)]
/// struct Pause {
///     policy: RetryPolicy,
///     pause: Duration,
/// }
///
/// impl RetryProfile for Pause {
///     fn policy(&self) -> &RetryPolicy {
///         &self.policy
///     }
///
///     fn topology(&self, work: &WorkQueue) -> Result<Topology, Error> {
///         work.check(&self.policy)?;
///         let waiting = Queue::quorum(format!("{}.pause", work.name()))
///             .message_ttl(self.pause)
///             .dead_letter_to("") // the default exchange: back to the work queue
///             .dead_letter_key(work.name())
///             .dead_letter_at_least_once();
///         let parking = Queue::quorum(format!("{}.dead", work.name()));
///         Ok(Topology::new().queue(waiting).queue(parking))
///     }
///
///     fn failures(&self, properties: &RawProperties, _queue: &str) -> u32 {
///         let tries = properties.header("tries");
///         tries.and_then(|tries| tries.as_str()?.parse().ok()).unwrap_or(0)
///     }
///
///     fn retry(&self, failed: &FailedMessage<'_>, _wait: Duration) -> RetryStep {
///         let mut message = failed.forward_to("", format!("{}.pause", failed.queue()));
///         message.set_header("tries", failed.failures().to_string());
///         message.into()
///     }
///
///     fn park(&self, failed: &FailedMessage<'_>) -> RetryStep {
///         let mut message = failed.forward_to("", format!("{}.dead", failed.queue()));
///         message.remove_header("tries"); // it begins at zero if it is replayed
///         message.into()
///     }
/// }
///
/// let client = Client::embedded().await?;
/// client.apply(&Topology::new().queue(Queue::quorum("jobs"))).await?;
/// let pause = Duration::from_secs(10);
/// let design = Pause { policy: RetryPolicy::fixed(pause).max_retries(3), pause };
/// let runner = client.consumer("jobs").retry(Retry::with_profile(design)).handle(async |body: String| {
///     println!("{body}");
/// });
/// # let _ = runner;
/// # Ok(())
/// # }
/// ```
pub trait RetryProfile: Debug + Send + Sync {
    /// When to try again, and how often.
    fn policy(&self) -> &RetryPolicy;

    /// The objects on the broker that the design needs for this queue. The work queue itself belongs to them only if it needs
    /// certain arguments or bindings. The consumer declares them when it begins, and again when one turns out to be missing.
    ///
    /// An error says that messages of this queue cannot be tried again like this: [`WorkQueue::refusal`] makes one.
    /// [`WorkQueue::check`] finds the common reasons, [`Topology::queues_for`] where messages go, and
    /// [`Topology::dropping_cycle`] circles in which the broker drops them.
    fn topology(&self, queue: &WorkQueue) -> Result<Topology, Error>;

    /// How many deliveries of a message failed before the present one, by its headers. Called once per delivery at most, together
    /// with [`origin`](Self::origin): when its handler asks for its attempt or its address, or when it fails. A message without
    /// headers has not failed: neither is called for it.
    ///
    /// A header of the message is the safe place to count. A design that rejects messages counts
    /// [`rejections`](super::rejections()), and says so by [`counts_rejections`](Self::counts_rejections).
    fn failures(&self, properties: &RawProperties, queue: &str) -> u32;

    /// Has a message tried again after `wait`, as [`decide`](Self::decide) said. A design with one wait may ignore that.
    ///
    /// Called again for the same message if its headers do not fit into a frame, or if it could not be moved:
    /// [`forward_to`](FailedMessage::forward_to) then adds less.
    fn retry(&self, message: &FailedMessage<'_>, wait: Duration) -> RetryStep;

    /// Takes a message out of the way that is not tried again, for [`reason`](FailedMessage::reason). Called again like
    /// [`retry`](Self::retry).
    ///
    /// A header `x-leveret-return` with the name of an exchange says that it leads to the work queue alone, under the key that
    /// the message was published with: [`ParkingLot::replay`](crate::ParkingLot::replay) goes by it. Otherwise a replay goes by
    /// the default exchange.
    fn park(&self, message: &FailedMessage<'_>) -> RetryStep;

    /// What should happen to a message that failed. By default, what the [`policy`](Self::policy) decides.
    fn decide(&self, facts: &Facts<'_>) -> Decision {
        self.policy().decide(facts)
    }

    /// Where a message was published to, if it failed before and now comes another way: handlers see this address as theirs.
    /// By default, what [`forward_to`](FailedMessage::forward_to) wrote into its headers, or else, if the design
    /// [counts rejections](Self::counts_rejections), what the broker has noted.
    fn origin(&self, properties: &RawProperties, queue: &str) -> Option<Origin> {
        let noted = || self.counts_rejections().then(|| rejections::origin(properties, queue));
        Origin::of(properties).or_else(|| noted()?)
    }

    /// When a message failed first, if it failed before: [`RetryPolicy::max_age`] counts from then on. By default as
    /// [`origin`](Self::origin).
    fn first_failure(&self, properties: &RawProperties, queue: &str) -> Option<SystemTime> {
        let noted = || self.counts_rejections().then(|| rejections::first(properties, queue));
        stamp::first_failure(properties).or_else(|| noted()?)
    }

    /// Whether [`failures`](Self::failures) are the [`rejections`](super::rejections()) of a message. By default they are not.
    ///
    /// Where the broker may count returns, a requeued message is published as a new one, and RabbitMQ from 4.0 on begins to
    /// count at one then. With this, the consumer notes in a header how often the message was rejected before.
    fn counts_rejections(&self) -> bool {
        false
    }

    /// The part of the topology that [`QueueRemoval`](crate::QueueRemoval) deletes with the queue. By default all of it: a design
    /// whose queues share an exchange or a queue has to leave that out.
    fn belongings(&self, queue: &WorkQueue) -> Result<Topology, Error> {
        self.topology(queue)
    }

    /// Whether [`retry`](Self::retry) keeps to any `wait`, and so to
    /// [`Failure::retry_after`](crate::Failure::retry_after). By default it does not: the policy's wait is used instead, and a
    /// warning says so once.
    fn honors_retry_after(&self) -> bool {
        false
    }

    /// Whether queues that exist with another type than that of the [`topology`](Self::topology) are an error. By default
    /// they are used as they are, and a warning names them.
    fn requires_queue_type(&self) -> bool {
        false
    }

    /// Whether failed messages wait at their consumer, by [`RetryStep::Requeue`], and take up its prefetch meanwhile: the
    /// default prefetch is then larger. By default they do not.
    fn holds_failed_messages(&self) -> bool {
        false
    }
}

/// A message for the end of its queue, as a new one. It comes by the default exchange under the name of the queue, with all its
/// headers, and says where it had come from and how often it was rejected, if that is what its design counts.
pub(crate) fn republished(
    profile: &dyn RetryProfile,
    delivery: &Delivery,
    queue: &str,
    origin: &Origin,
) -> ForwardedMessage {
    let mut message = ForwardedMessage::of(delivery, "");
    message.routing_key = queue.to_owned();
    message.keep_copies();
    origin.stamp(&mut message);
    let (properties, queue) = (delivery.raw_properties(), delivery.queue());
    let rejected = rejections::rejections(properties, queue);
    if profile.counts_rejections() && rejected > 0 {
        message.set_header(header::REJECTED, rejected.to_string());
        if let Some(first) = profile.first_failure(properties, queue) {
            message.set_header(header::FIRST, iso8601::format(first));
        }
        if let Some(death) = Deaths::of(properties).rejection(queue) {
            message.note_death(death);
        }
        message.remove_deaths();
    }
    message
}

/// The queue whose messages are tried again, as far as the client knows it. One made from a [`Queue`] is known:
///
/// ```
/// use leveret::Queue;
/// use leveret::retry::WorkQueue;
///
/// let work = WorkQueue::from(Queue::quorum("jobs"));
/// assert_eq!(work.companion("jobs.dead"), Queue::quorum("jobs.dead"));
/// ```
#[derive(Clone, Debug)]
pub struct WorkQueue {
    queue: Queue,
    is_declared: bool,
}

impl From<Queue> for WorkQueue {
    fn from(queue: Queue) -> Self {
        WorkQueue { queue, is_declared: true }
    }
}

impl WorkQueue {
    /// Another program has declared it.
    pub(crate) fn undeclared(name: impl Into<String>) -> Self {
        WorkQueue { queue: Queue::new(name), is_declared: false }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.queue.name()
    }

    /// The queue as this client has declared it; otherwise its name alone, with no arguments. See
    /// [`declared`](Self::declared).
    pub fn queue(&self) -> Queue {
        self.queue.clone()
    }

    /// The queue, if this client has declared it: its type and arguments are known then.
    pub fn declared(&self) -> Option<&Queue> {
        self.is_declared.then_some(&self.queue)
    }

    /// A queue of the same type, for messages that wait or are parked; of the broker's default type, which is mostly classic, if
    /// the type is unknown. A classic wait queue loses a message whose wait ends while its node is killed: use
    /// [`Queue::quorum`] unless other programs declare it as well.
    pub fn companion(&self, name: impl Into<String>) -> Queue {
        match self.queue.queue_type() {
            Some(queue_type) => Queue::new(name).of_type(queue_type),
            None => Queue::new(name),
        }
    }

    /// Checks that messages of the queue can be sent elsewhere and come back, by this policy. An error for policies that
    /// contradict themselves, for streams, for queues that go with their connection, and for a delivery limit below the number
    /// of retries where the broker would drop the message.
    pub fn check(&self, policy: &RetryPolicy) -> Result<(), Error> {
        traps::check_work_queue(self, policy)
    }

    /// An error that says why messages of this queue cannot be tried again like this.
    pub fn refusal(&self, why: impl AsRef<str>) -> Error {
        traps::refusal(self.name(), why)
    }

    /// How often the broker delivers a message of it before it drops it or dead-letters it, if that is known.
    pub(crate) fn delivery_limit(&self) -> Option<i64> {
        self.queue.arguments.get("x-delivery-limit")?.as_i64()
    }

    /// Whether it may be one in which the broker counts deliveries, to drop a message in the end: a quorum queue, as
    /// one of which nothing else is known may be by default.
    pub(crate) fn may_count_deliveries(&self) -> bool {
        let Some(queue) = self.declared() else { return true };
        let may_be = matches!(queue.queue_type(), None | Some(QueueType::Quorum));
        may_be && !queue.is_exclusive() && !queue.is_named_by_broker()
    }
}
