//! What is counted of a relay.

use std::time::Duration;

use leveret_sql::Outgoing;
use leveret_testkit::eventually;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};

use super::outbox::pool;
use crate::support::outbox::Stage;

/// Everything that counts the outbox, by name. A gauge is what it was last set to.
fn counts(snapshotter: &Snapshotter) -> Vec<(String, u64)> {
    let number = |value: DebugValue| match value {
        DebugValue::Counter(count) => count,
        DebugValue::Gauge(level) => level.into_inner() as u64,
        DebugValue::Histogram(samples) => samples.len() as u64,
    };
    let all = snapshotter.snapshot().into_vec().into_iter();
    let all = all.map(|(key, _, _, value)| (key.key().name().to_owned(), number(value)));
    all.filter(|(name, _)| name.starts_with("leveret_outbox")).collect()
}

#[tokio::test]
async fn what_is_sent_refused_and_set_aside_is_counted() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    // Of this thread alone: other tests count, too.
    let _guard = metrics::set_default_local_recorder(&recorder);
    let (_folder, pool) = pool().await;
    let stage = Stage::new(pool).await;
    stage.write((0..5).map(|number: i32| Outgoing::new("", "q", number.to_string()))).await;
    stage.write([Outgoing::new("", "nowhere", "lost")]).await;
    let relay = stage.relay().attempts(2).poll_every(Duration::from_millis(10)).build();
    let relay = relay.await.unwrap();
    let monitor = relay.monitor();
    let aside = || std::future::ready(monitor.summary().set_aside == 1);
    let all_done = eventually(Duration::from_secs(20), "a message to be set aside", aside);
    relay.run_until(all_done).await.unwrap();
    let found = counts(&snapshotter);
    for (name, expected) in [
        ("leveret_outbox_sent_total", 5),
        ("leveret_outbox_refused_total", 2),
        ("leveret_outbox_set_aside_total", 1),
        ("leveret_outbox_lag_seconds", 5),
    ] {
        assert!(found.contains(&(name.to_owned(), expected)), "{name} in {found:?}");
    }
    let levels = ["leveret_outbox_waiting", "leveret_outbox_set_aside"];
    assert!(levels.iter().all(|name| found.iter().any(|(found, _)| found == name)), "{found:?}");
}
