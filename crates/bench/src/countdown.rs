//! Counts messages until all are done.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// Its clones count together.
#[derive(Clone)]
pub(crate) struct Countdown(Arc<Counted>);

struct Counted {
    expected: u64,
    count: AtomicU64,
    done: Notify,
}

impl Countdown {
    pub(crate) fn new(expected: u64) -> Countdown {
        Countdown(Arc::new(Counted { expected, count: AtomicU64::new(0), done: Notify::new() }))
    }

    pub(crate) fn add(&self, messages: u64) {
        let before = self.0.count.fetch_add(messages, Ordering::Relaxed);
        if before < self.0.expected && before + messages >= self.0.expected {
            self.0.done.notify_one();
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.count.load(Ordering::Relaxed)
    }

    /// Waits until as many were counted as are expected. One task may wait.
    pub(crate) async fn done(&self) {
        self.0.done.notified().await;
    }
}
