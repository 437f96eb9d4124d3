//! What was handled lately, so that it is not handled again.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::incoming::Incoming;
use super::service::catch_panic;
use crate::amqp::lock;

/// How many keys are remembered at most; beyond that the oldest is forgotten before its time.
const MOST: usize = 100_000;

/// What a message is known by.
pub(super) type KeyOf = Arc<dyn Fn(&Incoming) -> Option<Vec<u8>> + Send + Sync>;

/// The keys of messages that were handled within the last while. It is shared by all workers of a consumer.
#[derive(Clone)]
pub(super) struct Seen {
    window: Duration,
    key_of: KeyOf,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    keys: HashSet<Arc<[u8]>>,
    /// The oldest first.
    order: VecDeque<(Instant, Arc<[u8]>)>,
}

impl Seen {
    pub(super) fn new(window: Duration, key_of: KeyOf) -> Self {
        Seen { window, key_of, state: Arc::default() }
    }

    /// None if it has no key, or the function that makes it panics: then it is handled.
    pub(super) fn key_of(&self, incoming: &Incoming) -> Option<Vec<u8>> {
        catch_panic(|| (self.key_of)(incoming)).unwrap_or_else(|_| {
            tracing::error!(
                queue = incoming.queue(),
                "the key of a message could not be made: panic"
            );
            None
        })
    }

    pub(super) fn contains(&self, key: &[u8]) -> bool {
        let mut state = lock(&self.state);
        state.forget_before(Instant::now(), self.window);
        state.keys.contains(key)
    }

    /// It was handled.
    pub(super) fn add(&self, key: Vec<u8>) {
        let now = Instant::now();
        let mut state = lock(&self.state);
        state.forget_before(now, self.window);
        let key: Arc<[u8]> = key.into();
        if state.keys.insert(Arc::clone(&key)) {
            state.order.push_back((now, key));
        }
        if state.order.len() > MOST {
            state.forget_oldest();
        }
    }
}

impl State {
    fn forget_before(&mut self, now: Instant, window: Duration) {
        while self.order.front().is_some_and(|(since, _)| now.duration_since(*since) >= window) {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some((_, key)) = self.order.pop_front() {
            self.keys.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn keys_are_known_for_a_while_and_not_longer() {
        let seen = Seen::new(Duration::from_secs(10), Arc::new(|_| None));
        seen.add(b"a".to_vec());
        tokio::time::advance(Duration::from_secs(6)).await;
        seen.add(b"b".to_vec());
        // It was seen before, and that is when its time began.
        seen.add(b"a".to_vec());
        tokio::time::advance(Duration::from_secs(5)).await;
        assert!(!seen.contains(b"a") && seen.contains(b"b"));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_is_bounded() {
        let seen = Seen::new(Duration::from_secs(10), Arc::new(|_| None));
        for number in 0..=MOST {
            seen.add(number.to_be_bytes().to_vec());
        }
        assert_eq!(lock(&seen.state).keys.len(), MOST);
        assert!(!seen.contains(&0usize.to_be_bytes()) && seen.contains(&MOST.to_be_bytes()));
    }
}
