//! Handlers in tasks of their own, so that they compute at the same time; but those that have had too little to do for that, lately,
//! are run where they are asked for.
//!
//! For a task of its own tokio often wakes another thread, and by the time that has begun, such a handler is done. It has taken more
//! than the handler, too.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::task::{JoinHandle, coop};
use tokio::time::timeout;
use tracing::Instrument as _;

use super::service::Contained;
use crate::error::BoxError;
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

/// How long a handler that is to end, and computes, is waited for.
const GRACE: Duration = Duration::from_secs(30);

type Outcome = Result<(), BoxError>;

/// Whether handlers have little to do: each may take [`LITTLE`] until it is done, and by how much one takes longer, others have to
/// take less before it is so again.
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

    /// Polls a handler for the first time, and counts what it has taken since it began, its arguments included.
    fn poll_first(
        &self,
        began: Instant,
        handling: &mut Contained<()>,
        context: &mut Context<'_>,
    ) -> Poll<Outcome> {
        let polled = Pin::new(handling).poll(context);
        let took = began.elapsed();
        // Tokio also makes those wait whose task has done enough for once.
        let waits = polled.is_pending() && coop::has_budget_remaining();
        self.count(if waits { took.max(WAITING) } else { took });
        polled
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A handler that is run in a task of its own, or where it is polled. It ends with who waits for it.
pub(super) enum InTask<M> {
    /// What makes it: that picks arguments, and may take as long as the handler itself.
    New(M, Arc<Pace>),
    Begun(Task),
    Ended,
}

impl<M: FnOnce() -> Contained<()> + Send + 'static> InTask<M> {
    pub(super) fn new(make: M, pace: Arc<Pace>) -> Self {
        InTask::New(make, pace)
    }

    /// Calls it here if that is wanted, and leaves it to a task unless it is done.
    fn begin(&mut self, context: &mut Context<'_>) -> Poll<Outcome> {
        let InTask::New(make, pace) = std::mem::replace(self, InTask::Ended) else {
            return Poll::Pending;
        };
        let task = if pace.is_little() {
            let began = Instant::now();
            let mut handling = make();
            match pace.poll_first(began, &mut handling, context) {
                Poll::Ready(outcome) => return Poll::Ready(outcome),
                Poll::Pending => Task::spawn(handling),
            }
        } else {
            Task::spawn(async move {
                let began = Instant::now();
                let mut handling = make();
                let mut is_first = true;
                poll_fn(|context| match std::mem::take(&mut is_first) {
                    true => pace.poll_first(began, &mut handling, context),
                    false => Pin::new(&mut handling).poll(context),
                })
                .await
            })
        };
        *self = InTask::Begun(task);
        Poll::Pending
    }
}

impl<M: FnOnce() -> Contained<()> + Send + Unpin + 'static> Future for InTask<M> {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        let this = &mut *self;
        if let InTask::New(..) = this
            && !is_over()
            && let Poll::Ready(outcome) = this.begin(context)
        {
            return Poll::Ready(outcome);
        }
        let InTask::Begun(task) = this else { return Poll::Pending };
        if is_over() {
            task.0.abort();
        }
        let Poll::Ready(ended) = Pin::new(&mut task.0).poll(context) else {
            let _ = OVER.try_with(|left| left.set(Left::Handler));
            return Poll::Pending;
        };
        *this = InTask::Ended;
        match ended {
            Ok(outcome) => {
                let _ = OVER.try_with(|left| left.set(Left::Rest));
                Poll::Ready(outcome)
            }
            // It was aborted, or taken away by a runtime that ends: who waits for it is about to be, too.
            Err(error) if error.is_cancelled() => Poll::Pending,
            Err(error) => Poll::Ready(Err(Failure::requeue(error).into())),
        }
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

tokio::task_local! {
    /// Is there while something is polled that was to end.
    static OVER: Cell<Left>;
}

/// What is left to be done of what was to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    Nothing,
    /// The handler computes, or has not noticed yet that it is to end.
    Handler,
    /// The handler was done all the same.
    Rest,
}

/// Whether who asks was to end: then nothing new is begun.
pub(super) fn is_over() -> bool {
    OVER.try_with(|_| ()).is_ok()
}

/// Ends the handling of a message, and drops it when its handler has really ended: one that computes cannot be interrupted, and its
/// message is not to go to others meanwhile. If it is done by then, the rest is done as well.
pub(super) fn end<F: Future + Send + 'static>(mut handling: Pin<Box<Option<F>>>) {
    // Without a runtime nothing is left that computes.
    let Ok(runtime) = Handle::try_current() else { return };
    let ended = poll_fn(move |context| {
        OVER.with(|left| {
            if left.get() == Left::Handler {
                left.set(Left::Nothing);
            }
        });
        match handling.as_mut().as_pin_mut().map(|handling| handling.poll(context)) {
            Some(Poll::Pending) if OVER.with(Cell::get) != Left::Nothing => Poll::Pending,
            _ => Poll::Ready(()),
        }
    });
    runtime.spawn(timeout(GRACE, OVER.scope(Cell::new(Left::Nothing), ended)));
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

    fn in_task<F: Future<Output = Outcome> + Send + 'static>(
        handling: F,
        pace: &Arc<Pace>,
    ) -> impl Future<Output = Outcome> + Send + Unpin + use<F> {
        let handling = Box::pin(handling);
        InTask::new(|| contained(|| handling), Arc::clone(pace))
    }

    /// Which task a handler is run in, and the trace that is known there.
    type Place = (task::Id, Option<TraceContext>);

    fn here() -> Place {
        (task::id(), TraceContext::current())
    }

    /// Where a handler is run before it waits, and afterwards.
    async fn places(pace: &Arc<Pace>, waits: bool) -> [Place; 2] {
        let (tell, told) = oneshot::channel();
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
        let (id, trace) = here();
        for (pace, waits, are_here) in [
            (little(), false, [true, true]),
            (little(), true, [true, false]),
            (unknown(), false, [false, false]),
            (unknown(), true, [false, false]),
        ] {
            let seen = places(&pace, waits).await;
            assert_eq!(seen.each_ref().map(|place| place.0 == id), are_here);
            assert!(seen.iter().all(|place| place.1 == trace), "{seen:?}");
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
    async fn one_that_computes_is_not_one_of_those_who_have_little_to_do() {
        let pace = little();
        let computes = async {
            std::thread::sleep(Duration::from_millis(1));
            Ok(())
        };
        in_task(computes, &pace).await.unwrap();
        assert!(!pace.is_little(), "{pace:?}");
        // Nor is one that does so before there is a future.
        let pace = little();
        let make = || {
            std::thread::sleep(Duration::from_millis(1));
            contained(|| Box::pin(std::future::ready(Ok(()))))
        };
        InTask::new(make, Arc::clone(&pace)).await.unwrap();
        assert!(!pace.is_little(), "{pace:?}");
    }

    #[tokio::test]
    async fn one_that_makes_way_for_others_by_itself_goes_on_in_a_task() {
        let pace = little();
        let (stop, mut is_stopped) = oneshot::channel::<()>();
        let handling = async move {
            while is_stopped.try_recv().is_err() {
                task::consume_budget().await;
            }
            Ok(())
        };
        let handler = task::spawn(in_task(handling, &pace));
        task::yield_now().await;
        stop.send(()).unwrap();
        tokio::time::timeout(Duration::from_secs(60), handler).await.unwrap().unwrap().unwrap();
        // It has not waited, and is as it was taken to be, but for the time that it took.
        assert!(pace.behind.load(Ordering::Relaxed) < nanoseconds(LONGEST));
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
