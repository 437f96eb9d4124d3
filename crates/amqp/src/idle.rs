//! Idle timer: I/O marks activity, and one coarse clock checks it. Neither a read nor a write sets a timer of its own.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// Counts the ticks of its clock since the last activity.
#[derive(Debug)]
pub(super) struct IdleTimer {
    /// The clock never ticks if this is zero.
    tick: Duration,
    /// Made at the first wait.
    clock: Option<Pin<Box<Sleep>>>,
    /// How many ticks there were since the last activity. Only ticks that happen during a wait count: a program that was
    /// suspended for an hour finds one.
    ticks: u32,
}

impl IdleTimer {
    pub(super) fn new(tick: Duration) -> Self {
        IdleTimer { tick, clock: None, ticks: 0 }
    }

    /// Something has happened.
    pub(super) fn reset(&mut self) {
        self.ticks = 0;
    }

    /// For how long nothing has happened, at least: the first tick may have come right after the last activity.
    pub(super) fn idle_for(&self) -> Duration {
        self.tick * self.ticks.saturating_sub(1)
    }

    /// Waits for an event, which is activity, or for the next tick: `None`.
    pub(super) async fn until_tick<T>(
        &mut self,
        mut event: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        poll_fn(|context| {
            if let Poll::Ready(happened) = event.as_mut().poll(context) {
                self.reset();
                return Poll::Ready(Some(happened));
            }
            if self.tick.is_zero() {
                return Poll::Pending;
            }
            let tick = self.tick;
            let clock = self.clock.get_or_insert_with(|| Box::pin(sleep(tick)));
            if clock.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            clock.as_mut().reset(Instant::now() + tick);
            self.ticks = self.ticks.saturating_add(1);
            Poll::Ready(None)
        })
        .await
    }

    /// Waits for an event. `None` after one idle tick and before two.
    pub(super) async fn within_a_tick<T>(&mut self, event: impl Future<Output = T>) -> Option<T> {
        let mut event = pin!(event);
        loop {
            match self.until_tick(event.as_mut()).await {
                Some(happened) => return Some(happened),
                None if self.ticks > 1 => {
                    self.reset();
                    return None;
                }
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::{advance, timeout};

    use super::*;

    const TICK: Duration = Duration::from_secs(2);

    #[tokio::test(start_paused = true)]
    async fn idle_time_is_never_overstated_and_understated_by_less_than_two_ticks() {
        let mut timer = IdleTimer::new(TICK);
        for before in [0, 1, 1999] {
            assert!(timer.within_a_tick(sleep(Duration::from_millis(before))).await.is_some());
            let began = Instant::now();
            for _ in 0..5 {
                assert!(timer.until_tick(pin!(pending::<()>())).await.is_none());
                let (idle, told) = (began.elapsed(), timer.idle_for());
                assert!(told <= idle && idle <= told + TICK, "{told:?} of {idle:?}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_of_a_tick_ends_before_two() {
        let mut timer = IdleTimer::new(TICK);
        for before in [0, 1, 1999] {
            assert!(timer.within_a_tick(sleep(Duration::from_millis(before))).await.is_some());
            let began = Instant::now();
            assert!(timer.within_a_tick(pending::<()>()).await.is_none());
            assert!(TICK <= began.elapsed() && began.elapsed() <= TICK * 2);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn frequent_activity_keeps_it_from_being_idle() {
        let mut timer = IdleTimer::new(TICK);
        for _ in 0..100 {
            let happens = sleep(TICK - Duration::from_millis(1));
            assert!(timer.within_a_tick(happens).await.is_some());
            assert!(timer.idle_for().is_zero());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn time_without_a_wait_does_not_count() {
        let mut timer = IdleTimer::new(TICK);
        let waiting = timer.within_a_tick(pending::<()>());
        assert!(timeout(Duration::from_secs(1), waiting).await.is_err());
        advance(TICK * 100).await;
        let happens = sleep(TICK / 2);
        assert!(timer.within_a_tick(happens).await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_tick_it_waits_for_ever() {
        let mut timer = IdleTimer::new(Duration::ZERO);
        let waiting = timer.within_a_tick(pending::<()>());
        assert!(timeout(Duration::from_secs(3600), waiting).await.is_err());
    }
}
