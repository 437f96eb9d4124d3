//! Notices silence, without a timer for each thing that breaks it: a clock ticks anyway, and what happens only says so.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// Counts the ticks since it was broken.
#[derive(Debug)]
pub(super) struct Silence {
    /// How long a tick is; it never comes if this is zero.
    period: Duration,
    /// Beyond so many, somebody has to know.
    most: u32,
    /// Made when somebody waits for the first time.
    clock: Option<Pin<Box<Sleep>>>,
    ticks: u32,
}

impl Silence {
    /// One that is noticed after this time, never if that is zero. A tick may come right after something happened, so there has to
    /// be one more than make up the time: it is noticed late by up to a tick, and never early.
    pub(super) fn of(time: Duration, ticks: u32) -> Self {
        Silence { period: time / ticks, most: ticks, clock: None, ticks: 0 }
    }

    /// Something has happened.
    pub(super) fn broken(&mut self) {
        self.ticks = 0;
    }

    /// Waits for something that breaks it. `None` if that takes too long; only the time in which somebody waits here counts.
    pub(super) async fn until<T>(&mut self, event: impl Future<Output = T>) -> Option<T> {
        let mut event = pin!(event);
        poll_fn(|context| {
            if let Poll::Ready(happened) = event.as_mut().poll(context) {
                self.broken();
                return Poll::Ready(Some(happened));
            }
            if self.period.is_zero() {
                return Poll::Pending;
            }
            let period = self.period;
            let clock = self.clock.get_or_insert_with(|| Box::pin(sleep(period)));
            while clock.as_mut().poll(context).is_ready() {
                clock.as_mut().reset(Instant::now() + period);
                self.ticks += 1;
                if self.ticks > self.most {
                    self.broken();
                    return Poll::Ready(None);
                }
            }
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::{advance, timeout};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(8);

    #[tokio::test(start_paused = true)]
    async fn it_is_noticed_after_the_patience_and_within_one_tick_more() {
        let mut silence = Silence::of(PATIENCE, 4);
        for before in [0, 1, 1999] {
            assert!(silence.until(sleep(Duration::from_millis(before))).await.is_some());
            let began = Instant::now();
            assert!(silence.until(pending::<()>()).await.is_none());
            let silent = began.elapsed();
            assert!(PATIENCE <= silent && silent <= PATIENCE * 5 / 4, "{silent:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_happens_often_enough_breaks_it() {
        let mut silence = Silence::of(PATIENCE, 4);
        for _ in 0..100 {
            let happens = sleep(PATIENCE - Duration::from_millis(1));
            assert!(silence.until(happens).await.is_some());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_nobody_waits_does_not_count() {
        let mut silence = Silence::of(PATIENCE, 4);
        assert!(timeout(Duration::from_secs(1), silence.until(pending::<()>())).await.is_err());
        advance(PATIENCE * 10).await;
        let happens = sleep(PATIENCE / 2);
        assert!(silence.until(happens).await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_time_it_waits_for_ever() {
        let mut silence = Silence::of(Duration::ZERO, 4);
        let waiting = silence.until(pending::<()>());
        assert!(timeout(Duration::from_secs(3600), waiting).await.is_err());
    }
}
