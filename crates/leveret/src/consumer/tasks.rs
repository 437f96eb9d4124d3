//! Handlers in tasks of their own, so that they compute at the same time; but those that have had too little to do for that, lately,
//! are run where they are asked for.
//!
//! For a task of its own tokio often wakes another thread, and by the time that has begun, such a handler is done. It has taken more
//! than the handler, too.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::task::{JoinHandle, coop};
use tracing::Instrument as _;

use super::handler::BoxError;
use super::service::Contained;
use crate::retry::Failure;
use crate::trace::TraceContext;

/// What a handler may take to be run where it is asked for.
const LITTLE: Duration = Duration::from_micros(5);

/// What handlers that are not known yet are taken to have been too slow by.
const UNKNOWN: Duration = Duration::from_micros(500);

/// What a handler counts for that waits for something. It needs a task in any case.
const WAITING: Duration = Duration::from_micros(500);

/// What one counts for at most. It is made up for by 200,000 that take no time.
const LONGEST: Duration = Duration::from_secs(1);

type Outcome = Result<(), BoxError>;

/// Whether handlers have little to do: each may take [`LITTLE`] until it is done, and by how much one takes longer, others have to
/// take less before it is so again. Those that are run where they are asked for thus take no more than that on average.
#[derive(Debug)]
pub(super) struct Pace {
    /// How many nanoseconds are to be made up for.
    behind: AtomicU64,
}

impl Pace {
    pub(super) fn new() -> Self {
        Pace { behind: AtomicU64::new(nanoseconds(UNKNOWN)) }
    }

    fn is_little(&self) -> bool {
        self.behind.load(Ordering::Relaxed) == 0
    }

    /// Others may count at the same time, and one of them be missed.
    fn count(&self, took: Duration) {
        let behind = self.behind.load(Ordering::Relaxed) + nanoseconds(took.min(LONGEST));
        let behind = behind.saturating_sub(nanoseconds(LITTLE)).min(nanoseconds(LONGEST));
        self.behind.store(behind, Ordering::Relaxed);
    }

    /// Polls a handler for the first time, and counts what it takes.
    fn begin(&self, handling: &mut Contained<()>, context: &mut Context<'_>) -> Poll<Outcome> {
        let began = Instant::now();
        let polled = Pin::new(handling).poll(context);
        let took = began.elapsed();
        self.count(if polled.is_ready() { took } else { took.max(WAITING) });
        polled
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A handler that is run in a task of its own, or where it is polled. It ends with who waits for it.
pub(super) enum InTask {
    New(Contained<()>, Arc<Pace>),
    Begun(Task),
    Ended,
}

impl InTask {
    pub(super) fn new(handling: Contained<()>, pace: Arc<Pace>) -> Self {
        InTask::New(handling, pace)
    }
}

impl Future for InTask {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        let mut task = match std::mem::replace(&mut *self, InTask::Ended) {
            InTask::New(mut handling, pace) if pace.is_little() => {
                // What it does is not held against the task that polls it, which would then have to make way for others.
                let begin = poll_fn(|context| Poll::Ready(pace.begin(&mut handling, context)));
                match Pin::new(&mut coop::unconstrained(begin)).poll(context) {
                    Poll::Ready(Poll::Ready(outcome)) => return Poll::Ready(outcome),
                    _ => Task::spawn(handling),
                }
            }
            InTask::New(mut handling, pace) => {
                let mut pace = Some(pace);
                Task::spawn(poll_fn(move |context| match pace.take() {
                    Some(pace) => pace.begin(&mut handling, context),
                    None => Pin::new(&mut handling).poll(context),
                }))
            }
            InTask::Begun(task) => task,
            InTask::Ended => return Poll::Pending,
        };
        let polled = Pin::new(&mut task.0).poll(context);
        if polled.is_pending() {
            *self = InTask::Begun(task);
        }
        // It does not panic, and only a runtime that ends takes it away.
        polled.map(|ended| ended.unwrap_or_else(|error| Err(Failure::requeue(error).into())))
    }
}

/// A task that ends with who waits for it.
pub(super) struct Task(JoinHandle<Outcome>);

impl Task {
    /// With the trace that it belongs to.
    fn spawn(handling: impl Future<Output = Outcome> + Send + 'static) -> Self {
        Task(match TraceContext::current() {
            None => tokio::spawn(handling),
            Some(context) => tokio::spawn(context.scope(handling.in_current_span())),
        })
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::task;

    use super::super::service::contained;
    use super::*;

    /// Of handlers that have little to do.
    fn little() -> Arc<Pace> {
        Arc::new(Pace { behind: AtomicU64::new(0) })
    }

    fn unknown() -> Arc<Pace> {
        Arc::new(Pace::new())
    }

    fn in_task(
        handling: impl Future<Output = Outcome> + Send + 'static,
        pace: &Arc<Pace>,
    ) -> InTask {
        InTask::new(contained(|| Box::pin(handling)), Arc::clone(pace))
    }

    /// Which task a handler is run in, before it waits and afterwards, and whether its trace is known there.
    async fn places(pace: &Arc<Pace>, waits: bool) -> [(task::Id, Option<TraceContext>); 2] {
        let (tell, told) = oneshot::channel();
        let here = || (task::id(), TraceContext::current());
        let handling = async move {
            let first = here();
            if waits {
                task::yield_now().await;
            }
            let _ = tell.send([first, here()]);
            Ok(())
        };
        in_task(handling, pace).await.unwrap();
        told.await.unwrap()
    }

    async fn each_is_run_where_it_belongs() {
        let (here, trace) = (task::id(), TraceContext::current());
        for (pace, waits, are_here) in [
            (little(), false, [true, true]),
            (little(), true, [true, false]),
            (unknown(), false, [false, false]),
            (unknown(), true, [false, false]),
        ] {
            let seen = places(&pace, waits).await;
            assert_eq!(seen.each_ref().map(|(place, _)| *place == here), are_here);
            assert!(seen.iter().all(|(_, known)| *known == trace), "{seen:?}");
            // Whoever waited has a task of its own the next time.
            assert!(!waits || !pace.is_little(), "{pace:?}");
        }
    }

    #[tokio::test]
    async fn who_has_little_to_do_is_run_here_and_who_waits_goes_on_in_a_task_of_its_own() {
        task::spawn(each_is_run_where_it_belongs()).await.unwrap();
    }

    #[tokio::test]
    async fn a_handler_keeps_its_trace_wherever_it_is_run() {
        let traced = TraceContext::root().scope(each_is_run_where_it_belongs());
        task::spawn(traced).await.unwrap();
    }

    #[tokio::test]
    async fn a_panic_is_an_error_wherever_it_happens() {
        for (pace, waits) in [(little(), false), (little(), true), (unknown(), false)] {
            let handling = async move {
                if waits {
                    task::yield_now().await;
                }
                panic!("no")
            };
            let error = in_task(handling, &pace).await.unwrap_err();
            assert!(error.to_string().contains("panicked: no"), "{error}");
        }
    }

    #[tokio::test]
    async fn whoever_no_longer_waits_for_a_handler_ends_it() {
        for pace in [little(), unknown()] {
            let (mut alive, is_alive) = oneshot::channel::<()>();
            let handling = async move {
                let _is_alive = is_alive;
                std::future::pending().await
            };
            let mut handler = in_task(handling, &pace);
            let first = poll_fn(|context| Poll::Ready(Pin::new(&mut handler).poll(context)));
            assert!(first.await.is_pending());
            task::yield_now().await;
            assert!(!alive.is_closed());
            drop(handler);
            tokio::time::timeout(Duration::from_secs(60), alive.closed()).await.unwrap();
        }
    }

    fn is_little_after(pace: &Pace, times: u32, took: Duration) -> bool {
        for _ in 0..times {
            pace.count(took);
        }
        pace.is_little()
    }

    #[test]
    fn who_took_long_is_made_up_for_by_as_many_as_that_is_worth() {
        let (nothing, micros) = (Duration::ZERO, Duration::from_micros);
        let pace = Pace::new();
        // They are not known.
        assert!(!is_little_after(&pace, 99, nothing));
        assert!(is_little_after(&pace, 1, nothing));
        assert!(is_little_after(&pace, 10_000, LITTLE));
        // What was saved is not there to be spent.
        assert!(!is_little_after(&pace, 1, micros(1005)));
        assert!(!is_little_after(&pace, 10_000, LITTLE));
        assert!(!is_little_after(&pace, 249, micros(1)));
        assert!(is_little_after(&pace, 1, micros(1)));
        // However long.
        assert!(!is_little_after(&pace, 10, Duration::MAX));
        assert!(!is_little_after(&pace, 199_999, nothing));
        assert!(is_little_after(&pace, 1, nothing));
    }
}
