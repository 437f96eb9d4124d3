//! How long handlers may take to finish once their consumer is stopped.

use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::Shared;
use tokio::time::sleep_until;

use super::handler::BoxFuture;
use crate::amqp::deadline_in;

#[derive(Clone)]
pub(crate) enum Drain {
    For(Duration),
    /// First polled when the consumer is stopped.
    Until(Shared<BoxFuture<()>>),
}

impl Drain {
    pub(super) fn until(end: impl Future<Output = ()> + Send + 'static) -> Self {
        let end: BoxFuture<()> = Box::pin(end);
        Drain::Until(end.shared())
    }

    /// Starts the time.
    pub(crate) fn start(&self) -> Draining {
        let end: BoxFuture<()> = match self {
            Drain::For(time) => Box::pin(sleep_until(deadline_in(*time))),
            Drain::Until(end) => Box::pin(end.clone()),
        };
        Draining { end, is_over: false }
    }
}

/// The time for draining, while it runs.
pub(crate) struct Draining {
    end: BoxFuture<()>,
    is_over: bool,
}

impl Draining {
    /// Awaits some work. `None` if the time is over before; work that is done already counts even then.
    pub(crate) async fn limit<F: Future>(&mut self, work: F) -> Option<F::Output> {
        if self.is_over {
            return work.now_or_never();
        }
        tokio::select! {
            biased;
            done = work => Some(done),
            () = &mut self.end => {
                self.is_over = true;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn finished_work_counts_even_when_the_time_is_over() {
        let time = Duration::from_secs(30);
        for drain in [Drain::For(time), Drain::until(sleep(time))] {
            for _ in 0..2 {
                let mut draining = drain.start();
                assert_eq!(draining.limit(ready(1)).await, Some(1));
                assert_eq!(draining.limit(pending::<()>()).await, None);
                assert_eq!(draining.limit(ready(2)).await, Some(2));
                assert_eq!(draining.limit(pending::<()>()).await, None);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_time_begins_when_draining_does() {
        let drain = Drain::For(Duration::from_secs(30));
        sleep(Duration::from_secs(60)).await;
        let before = Instant::now();
        assert_eq!(drain.start().limit(pending::<()>()).await, None);
        assert_eq!(before.elapsed(), Duration::from_secs(30));
    }
}
