//! Trying failed messages again, and parking what does not get better.
//!
//! When to try again is a [`RetryPolicy`]; where messages wait meanwhile, and how attempts are counted, is a [`Retry`].

use std::sync::Arc;
use std::time::Duration;

use crate::topology::QueueType;

mod deaths;
mod failure;
mod plain;
mod policy;
pub(crate) mod profile;
pub(crate) mod stamp;
pub(crate) mod tiers;
mod traps;

pub use deaths::{Death, Deaths};
pub use failure::{Failure, Verdict};
pub use policy::{Decision, Facts, ParkReason, RetryPolicy};

pub(crate) use failure::{Diagnosis, named};
pub(crate) use profile::Profile;

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
/// - `jobs.wait.2s`, `jobs.wait.3s` and so on, a queue for each wait, fed by the exchange `jobs.wait`,
/// - `jobs.return`, the exchange by which they come back to `jobs`, and to no other queue,
/// - `jobs.parked`, exchange and queue: the [parking lot](crate::ParkingLot), for what is not tried again.
///
/// They are of the type of the work queue, if this client has declared it, and else of the broker's default type; see
/// [`queue_type`](Retry::queue_type). A message that waits was published there, confirmed, before the original is acked: it
/// may come twice if something breaks in between, and is never lost. It keeps its routing key and all properties and headers;
/// what is known of its failures is in headers that begin with `x-leveret-`:
///
/// | header | what |
/// |---|---|
/// | `x-leveret-attempts` | how many deliveries failed |
/// | `x-leveret-error`, `x-leveret-error-kind` | the last error |
/// | `x-leveret-history` | the first error and the last ones: tables with `at`, `kind`, `error` |
/// | `x-leveret-first-failure`, `x-leveret-last-failure` | when |
/// | `x-leveret-queue`, `x-leveret-exchange`, `x-leveret-routing-key` | where it came from |
/// | `x-leveret-return` | of parked messages: the exchange by which they get back to their queue |
/// | `x-leveret-reason` | of parked messages: `exhausted`, `too-old`, `permanent` or `unmovable` |
/// | `x-leveret-expiration`, `x-leveret-user-id` | properties that it could not keep while it waits |
#[derive(Clone, Debug)]
#[must_use]
pub struct Retry {
    how: How,
}

#[derive(Clone, Debug)]
enum How {
    Tiers { policy: RetryPolicy, queue_type: Option<QueueType> },
    Profile(Arc<dyn Profile>),
}

impl Retry {
    /// By a policy, with wait queues beside the work queue.
    pub fn new(policy: RetryPolicy) -> Self {
        Retry { how: How::Tiers { policy, queue_type: None } }
    }

    /// Back to the same queue after a pause, for ever, in which the message stays with its consumer. Nothing is counted and
    /// nothing is parked; what will never go well is [discarded](Self::discard).
    pub fn in_place(pause: Duration) -> Self {
        Retry::with(plain::InPlace::new(pause))
    }

    /// To the dead-letter exchange of its queue, or away if that has none.
    pub fn discard() -> Self {
        Retry::with(plain::Discard::new())
    }

    /// Wait queues and parking lot are of this type. Without it, they are of the type of the work queue.
    pub fn queue_type(mut self, queue_type: QueueType) -> Self {
        if let How::Tiers { queue_type: wanted, .. } = &mut self.how {
            *wanted = Some(queue_type);
        }
        self
    }

    pub(crate) fn with(profile: impl Profile + 'static) -> Self {
        Retry { how: How::Profile(Arc::new(profile)) }
    }

    pub(crate) fn profile(&self) -> Arc<dyn Profile> {
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
