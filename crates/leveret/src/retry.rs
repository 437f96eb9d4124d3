//! Trying failed messages again, and parking what does not get better.
//!
//! When to try again is a [`RetryPolicy`]; where messages wait meanwhile, and how attempts are counted, is a [`Retry`]:
//! the default one, or a design of your own, which is a [`RetryProfile`]. The crate `leveret-profiles` has those of four other
//! systems.

use std::sync::Arc;
use std::time::Duration;

use crate::topology::QueueType;

pub(crate) mod classify;
pub(crate) mod failed_message;
mod failure;
mod iso8601;
pub(crate) mod plain;
pub(crate) mod policy;
pub(crate) mod profile;
mod rejections;
pub(crate) mod stamp;
pub(crate) mod tiers;
pub(crate) mod traps;

pub use crate::connection::ParkReason;
pub use crate::forwarder::ForwardedMessage;
pub use classify::Classification;
pub use failed_message::FailedMessage;
pub use failure::{Failure, Verdict};
pub use policy::{Decision, Facts, RetryPolicy};
pub use profile::{RetryProfile, RetryStep, WorkQueue};
pub use rejections::rejections;
pub use stamp::{Origin, first_failure};

pub(crate) use classify::Classifiers;
pub(crate) use failure::{Diagnosis, named};

/// How the messages of a queue are tried again. A [`RetryPolicy`] is one as it is:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use std::time::Duration;
/// use leveret::{Client, Queue, RetryPolicy, Topology};
///
/// let client = Client::embedded().await?;
/// client.apply(&Topology::new().queue(Queue::quorum("jobs"))).await?;
/// let policy = RetryPolicy::exponential(Duration::from_secs(2), 1.5).capped(Duration::from_secs(60));
/// let runner = client.consumer("jobs").retry(policy.max_retries(5)).handle(async |body: String| {
///     println!("{body}");
/// });
/// # let _ = runner;
/// # Ok(())
/// # }
/// ```
///
/// # Where messages wait
///
/// The work queue stays as it is. Beside a queue `jobs` there are
///
/// - `jobs.wait.2s`, `jobs.wait.3s` and so on, a queue for each wait, fed by the exchange `jobs.wait`; messages that have a
///   priority wait apart, unless the queues are classic ones: `jobs.wait.2s.9`,
/// - `jobs.return`, the exchange by which they come back to `jobs`, and to no other queue,
/// - `jobs.parked`, exchange and queue: the [parking lot](crate::ParkingLot), for what is not tried again.
///
/// They are quorum queues, whatever the work queue is, and the wait queues dead-letter at least once; see
/// [`queue_type`](Retry::queue_type). RabbitMQ has such queues from 3.10 on, with the feature flag `stream_queue`. Queues of
/// these names that exist with other arguments are used as they are, and named in a warning in the log. A message that waits was published there, confirmed, before the original is acked: it
/// may come twice if something breaks in between, and is never lost. It keeps its routing key and all properties and headers;
/// what is known of its failures is in headers that begin with `x-leveret-`. Their values are text, and the history a list of
/// tables of text, because there are clients that refuse a message with any other header. (Earlier versions wrote integers
/// and timestamps, which are still read.)
///
/// | header | what |
/// |---|---|
/// | `x-leveret-attempts` | how many deliveries failed |
/// | `x-leveret-error`, `x-leveret-error-kind` | the last error |
/// | `x-leveret-history` | the first error and the last ones: tables with `at`, `kind`, `error` |
/// | `x-leveret-first-failure`, `x-leveret-last-failure` | when: `2024-02-29T12:30:05Z` |
/// | `x-leveret-queue`, `x-leveret-exchange`, `x-leveret-routing-key` | where it came from |
/// | `x-leveret-return` | of parked messages: the exchange by which they get back to their queue under their own routing key; without it, that is the default exchange with the name of the queue |
/// | `x-leveret-reason` | of parked messages: `exhausted`, `too-old`, `permanent`, `unmovable` or `unroutable` |
/// | `x-leveret-rejected` | of designs that [count rejections](RetryProfile::counts_rejections), in republished messages: how often the consumer had rejected them before |
/// | `x-leveret-expiration`, `x-leveret-user-id`, `x-leveret-cc` | properties, and the keys of the header `CC`, that it could not keep while it waits; the keys are percent-encoded, with a space between them |
///
/// # Delivery limits
///
/// A quorum queue counts how often a message comes back, and drops it, or dead-letters it, beyond a limit: that of its
/// arguments, of a policy, or 20 by default from RabbitMQ 4.0 on. A client is not told. So no decision is carried out by
/// giving a message back where that may count: it is published to the end of its queue, confirmed, and the original is acked
/// then; and what cannot be moved yet is held and tried again. A message goes back to its place only in queues that this client
/// has declared as classic or exclusive ones, in streams, and on RabbitMQ from 4.3 on, where giving back by
/// `basic.nack` is not counted. As a new message it is not marked as redelivered, its time to live begins anew, and the user
/// needs the permission to write to the default exchange: one who may not gives it back all the same, the first time.
///
/// What counts on every version, and is not in a client's hands, is the end of a consumer that holds messages: a lost
/// connection, and before 4.3 also what a consumer that is [stopped](crate::Runner::run_until) gives back. So a **limit of 0**
/// loses messages with any client: give queues a limit of some more deliveries, and a dead-letter exchange.
///
/// # Other designs
///
/// Systems that have other queues already, and count in other ways, have a [`RetryProfile`], given to
/// [`Retry::with_profile`]. The crate `leveret-profiles` has those of ACAPI (Sneakers, Kicks), Chandra, the Cover Art Archive
/// and Orb.
#[derive(Clone, Debug)]
#[must_use]
pub struct Retry {
    how: How,
}

#[derive(Clone, Debug)]
enum How {
    Tiers { policy: RetryPolicy, queue_type: Option<QueueType> },
    Profile(Arc<dyn RetryProfile>),
}

impl Retry {
    /// By a policy, with wait queues beside the work queue.
    pub fn new(policy: RetryPolicy) -> Self {
        Retry { how: How::Tiers { policy, queue_type: None } }
    }

    /// Back to the same queue after a pause, for ever, in which the message stays with its consumer. Nothing is counted and
    /// nothing is parked; what will never go well is [discarded](Self::discard).
    ///
    /// Where the broker counts how often a message comes back, to drop it in the end, it is published to the end of its queue
    /// as a new one, and loses its place: see [above](Retry#delivery-limits). A queue that is declared with a delivery
    /// limit by this client is refused.
    pub fn in_place(pause: Duration) -> Self {
        Retry::with_profile(plain::InPlace::new(pause))
    }

    /// To the dead-letter exchange of its queue, or away if that has none.
    pub fn discard() -> Self {
        Retry::with_profile(plain::Discard::new())
    }

    /// Wait queues and parking lot are of this type. Without it, they are quorum queues.
    ///
    /// Classic wait queues **lose a message** whose wait ends while their node is killed. A broker before RabbitMQ 3.10 has no
    /// others.
    pub fn queue_type(mut self, queue_type: QueueType) -> Self {
        if let How::Tiers { queue_type: wanted, .. } = &mut self.how {
            *wanted = Some(queue_type);
        }
        self
    }

    /// By a design of your own, see [`RetryProfile`].
    pub fn with_profile(profile: impl RetryProfile + 'static) -> Self {
        Retry { how: How::Profile(Arc::new(profile)) }
    }

    pub(crate) fn profile(&self) -> Arc<dyn RetryProfile> {
        match &self.how {
            How::Profile(profile) => Arc::clone(profile),
            How::Tiers { policy, queue_type } => {
                Arc::new(tiers::Tiers::new(policy.clone(), *queue_type))
            }
        }
    }
}

impl From<RetryPolicy> for Retry {
    fn from(policy: RetryPolicy) -> Self {
        Retry::new(policy)
    }
}
