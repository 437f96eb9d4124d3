//! Which consumers there are to be, and whether the broker delivers to them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leveret::Client;
use tokio::time::{Instant, sleep, timeout};

use crate::failure::Failure;

/// How long new consumers may take until the broker delivers to all of them.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// The pause between two looks whether it does.
const READY_PAUSE: Duration = Duration::from_millis(20);

/// What is to be consumed, shared with those who ask how the service is.
#[derive(Clone, Debug, Default)]
pub(super) struct Wanted(Arc<Mutex<WantedNow>>);

#[derive(Clone, Debug, Default)]
pub(super) struct WantedNow {
    /// How many consumers each queue has, by the file.
    pub(super) consumers: BTreeMap<String, usize>,
    pub(super) is_stopping: bool,
    /// Consumers come and go: only those that the file asks for count.
    pub(super) is_reloading: bool,
}

impl Wanted {
    pub(super) fn now(&self) -> WantedNow {
        self.lock().clone()
    }

    pub(super) fn set(&self, consumers: BTreeMap<String, usize>) {
        self.lock().consumers = consumers;
    }

    pub(super) fn set_reloading(&self, is_reloading: bool) {
        self.lock().is_reloading = is_reloading;
    }

    fn lock(&self) -> MutexGuard<'_, WantedNow> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stop(&self) {
        *self.lock() = WantedNow { is_stopping: true, ..WantedNow::default() };
    }
}

/// Waits until the broker delivers to so many new consumers of each queue: those that are live since `started` at the earliest.
/// An older consumer whose workers are busy resumes only after its handler, and is not live until then.
pub(super) async fn until_ready(
    client: Client,
    wanted: BTreeMap<String, usize>,
    started: Instant,
) -> Result<(), Failure> {
    let missing_new = || {
        let mut health = client.health();
        health.consumers.retain(|consumer| consumer.since >= started);
        missing(&health, &wanted)
    };
    let polling = async {
        while !missing_new().is_empty() {
            sleep(READY_PAUSE).await;
        }
    };
    timeout(READY_WITHIN, polling).await.map_err(|_| {
        let queues: Vec<String> = missing_new().into_keys().collect();
        let queues = queues.join(", ");
        Failure::new(format_args!(
            "the broker does not deliver to new consumers of {queues} within {READY_WITHIN:?}"
        ))
    })
}

/// The queues that have too few consumers to which the broker delivers, and how many are missing.
pub(super) fn missing(
    health: &leveret::Health,
    wanted: &BTreeMap<String, usize>,
) -> BTreeMap<String, usize> {
    let live = |queue: &str| {
        health.consumers.iter().filter(|one| one.is_live && one.queue == queue).count()
    };
    let missing =
        wanted.iter().map(|(queue, wanted)| (queue.clone(), wanted.saturating_sub(live(queue))));
    missing.filter(|(_, missing)| *missing > 0).collect()
}
