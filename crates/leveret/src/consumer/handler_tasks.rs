//! Handlers of several workers: which of them run in tasks of their own, and how those end with their consumer.
//!
//! Handlers compute on several cores in tasks of their own. But for each such task tokio may wake another thread, which takes
//! longer than many handlers do: without this budget, `leveret-bench rpc --handlers tasks` costs the server three times as much.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use tokio_util::sync::CancellationToken;

use super::service::Call;

/// What each handler adds to the budget: it may compute for so long.
const SHARE: Duration = Duration::from_micros(5);

/// What is in the budget of handlers that are not known yet: the first hundred have tasks.
const UNKNOWN: Duration = Duration::from_micros(500);

/// What may be saved, and what one handler may overdraw. 200,000 handlers that take no time make up for that.
const MOST: (Duration, Duration) = (Duration::from_micros(100), Duration::from_secs(1));

/// What the tasks of a runner's handlers share.
#[derive(Clone, Debug, Default)]
pub(crate) struct HandlerTasks {
    /// Cancelled when the runner has ended.
    pub(super) abandoned: CancellationToken,
    pub(super) budget: Arc<InlineBudget>,
}

impl HandlerTasks {
    /// A handler whose time is taken out of the budget, and that ends as [`Abandoned`] with the runner. If it computes then, it
    /// goes on to its end, or until it waits for something.
    pub(super) fn around(&self, call: Call) -> Call {
        let HandlerTasks { abandoned, budget } = self.clone();
        Call::plain(move |incoming| {
            // With the arguments: to pick them may take as long as the handler.
            let mut began = Some(Instant::now());
            let (mut handling, budget) = (call.call(&incoming), Arc::clone(&budget));
            let handling = poll_fn(move |context| {
                let began = began.take().unwrap_or_else(Instant::now);
                let polled = handling.poll_unpin(context);
                budget.take(began.elapsed());
                polled
            });
            let ended = abandoned.clone().run_until_cancelled_owned(handling);
            Box::pin(async move { ended.await.unwrap_or_else(|| Err(Abandoned.into())) })
        })
    }
}

/// A handler was ended with its consumer: its message goes back to its queue, and no reply says so.
#[derive(Debug)]
pub(crate) struct Abandoned;

impl fmt::Display for Abandoned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the consumer ended before the handler")
    }
}

impl std::error::Error for Abandoned {}

/// The time that handlers may still compute in the task of their subscription. Once it is overdrawn, handlers have tasks of their
/// own until enough of them took less than their share.
#[derive(Debug)]
pub(super) struct InlineBudget {
    nanoseconds: AtomicI64,
}

impl Default for InlineBudget {
    fn default() -> Self {
        InlineBudget { nanoseconds: AtomicI64::new(-nanoseconds(UNKNOWN)) }
    }
}

impl InlineBudget {
    /// Whether the next handler may run in the task of its subscription.
    pub(super) fn allows(&self) -> bool {
        self.nanoseconds.load(Ordering::Relaxed) >= 0
    }

    /// One more handler begins.
    pub(super) fn add_share(&self) {
        self.add(nanoseconds(SHARE));
    }

    /// A handler has computed for so long.
    fn take(&self, time: Duration) {
        self.add(-nanoseconds(time.min(MOST.1)));
    }

    /// Other threads may add something at the same time, and one of them be missed.
    fn add(&self, time: i64) {
        let sum = self.nanoseconds.load(Ordering::Relaxed) + time;
        let sum = sum.clamp(-nanoseconds(MOST.1), nanoseconds(MOST.0));
        self.nanoseconds.store(sum, Ordering::Relaxed);
    }
}

fn nanoseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows_after(budget: &InlineBudget, times: u32, time: Duration) -> bool {
        for _ in 0..times {
            budget.add_share();
            budget.take(time);
        }
        budget.allows()
    }

    #[test]
    fn handlers_that_took_long_are_made_up_for_by_as_many_as_that_is_worth() {
        let (nothing, micros) = (Duration::ZERO, Duration::from_micros);
        let budget = InlineBudget::default();
        // They are not known.
        assert!(!allows_after(&budget, 99, nothing));
        assert!(allows_after(&budget, 1, nothing));
        assert!(allows_after(&budget, 10_000, SHARE));
        assert!(!allows_after(&budget, 1, micros(1005)));
        assert!(!allows_after(&budget, 10_000, SHARE));
        assert!(!allows_after(&budget, 249, micros(1)));
        assert!(allows_after(&budget, 1, micros(1)));
        // However long.
        assert!(!allows_after(&budget, 10, Duration::MAX));
        assert!(!allows_after(&budget, 199_999, nothing));
        assert!(allows_after(&budget, 1, nothing));
    }

    #[test]
    fn what_quick_handlers_save_is_bounded() {
        let budget = InlineBudget::default();
        assert!(allows_after(&budget, 10_000, Duration::ZERO));
        assert!(allows_after(&budget, 19, 2 * SHARE));
        assert!(!allows_after(&budget, 1, 2 * SHARE));
    }
}
