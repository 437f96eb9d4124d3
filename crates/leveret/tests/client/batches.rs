use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::{BatchOptions, Incoming, Queue};

use crate::{broker, client_with, depth, soon};

const FIVE: BatchOptions = BatchOptions { size: 5, within: Duration::from_secs(1) };

#[tokio::test(start_paused = true)]
async fn full_batches_come_at_once_and_the_rest_after_a_time() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch((0..12).map(|n| ("q", n.to_string()))).await.unwrap();
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&sizes);
    let handler = move |batch: Vec<Incoming>| {
        seen.lock().unwrap().push(batch.len());
        async {}
    };
    let stop = tokio::time::sleep(Duration::from_secs(5));
    let runner = client.consumer("q").prefetch(1).handle_batches(FIVE, handler);
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!(*sizes.lock().unwrap(), [5, 5, 2]);
    assert_eq!(summary.handled, 12);
    client.close().await;
    assert_eq!(depth(&broker, "q"), Some(0));
}

#[tokio::test(start_paused = true)]
async fn a_batch_at_which_the_handler_panics_fails_as_a_whole() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch((0..5).map(|n| ("q", n.to_string()))).await.unwrap();
    let handler = |batch: Vec<Incoming>| async move {
        assert!(batch[0].attempt() > 1, "not at the first time");
    };
    let stop = tokio::time::sleep(Duration::from_secs(10));
    let runner = client.consumer("q").handle_batches(FIVE, handler);
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!((summary.handled, summary.failed), (5, 5));
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_does_not_end_goes_back() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch((0..8).map(|n| ("q", n.to_string()))).await.unwrap();
    let handler = |_: Vec<Incoming>| std::future::pending::<()>();
    let stop = tokio::time::sleep(Duration::from_secs(5));
    let runner = client.consumer("q").drain(Duration::from_secs(1)).handle_batches(FIVE, handler);
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!((summary.handled, summary.abandoned), (0, 5));
    client.close().await;
    assert_eq!(depth(&broker, "q"), Some(8));
}
