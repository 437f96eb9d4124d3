use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use leveret::{
    BatchOptions, BatchOutcome, Client, ConsumerBuilder, Headers, Incoming, IntoMessage as _, Json,
    MsgPack, Payload, Queue, Retry, State, Topology,
};
use leveret_testkit::{eventually, rabbitmq};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, mpsc};

use crate::support::client::{
    CONSUMING, SOON, builder, client_with, cut, publisher, soon, until_depth,
};

#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
struct Order {
    id: u32,
}

fn at_once() -> Retry {
    Retry::in_place(Duration::ZERO)
}

/// A consumer that handles one message at a time, one with a task for each of four, and one that handles four in its own task; each
/// with its number of workers.
fn consumers(client: &Client) -> [(ConsumerBuilder, usize); 3] {
    let four = || client.consumer("q").workers(4);
    [(client.consumer("q").workers(1), 1), (four(), 4), (four().in_one_task(), 4)]
}

#[tokio::test]
async fn arguments_are_picked_by_type() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    let message = Json(&Order { id: 1 }).into_message().unwrap().header("n", 5);
    soon("an outcome", publisher.publish("q", message)).await.unwrap();
    type Seen = (Order, Bytes, Option<i64>, String);
    let (sender, mut seen) = mpsc::channel::<Seen>(1);
    let handler = async |Json(order): Json<Order>,
                         Payload(same): Payload<Order>,
                         body: Bytes,
                         Headers(headers): Headers,
                         incoming: Incoming,
                         State(sender): State<mpsc::Sender<Seen>>| {
        assert_eq!(order, same);
        let header = headers.get("n").and_then(|value| value.as_i64());
        sender.send((order, body, header, incoming.queue().to_owned())).await
    };
    let stop = async {
        let expected = (Order { id: 1 }, Bytes::from(r#"{"id":1}"#), Some(5), "q".to_owned());
        assert_eq!(seen.recv().await.unwrap(), expected);
    };
    let runner = client.consumer("q").state(sender).handle(handler);
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!((summary.handled, summary.failed), (1, 0));
    until_depth(&client, "q", 0).await;
}

#[tokio::test]
async fn messagepack_comes_back_as_it_went_and_what_cannot_be_read_is_parked() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    soon("an outcome", publisher.publish("q", "{")).await.unwrap();
    soon("an outcome", publisher.publish("q", MsgPack(&Order { id: 7 }))).await.unwrap();
    let (sender, mut seen) = mpsc::channel(1);
    let handler = move |Payload(order): Payload<Order>| {
        let sender = sender.clone();
        async move { sender.send(order).await }
    };
    let stop = async { assert_eq!(seen.recv().await.unwrap(), Order { id: 7 }) };
    let runner = client.consumer("q").handle(handler);
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!((summary.handled, summary.failed), (1, 1));
    until_depth(&client, "q.parked", 1).await;
}

#[tokio::test]
async fn a_failed_message_comes_again_and_a_panic_fails_it_alone() {
    for kind in 0..3 {
        let vhost = rabbitmq::vhost().await;
        let client = client_with(&vhost, Queue::classic("q")).await;
        let (consumer, workers) = consumers(&client)[kind].clone();
        let publisher = publisher(&client).await;
        publisher.publish_batch(["fails", "panics", "fine"].map(|body| ("q", body))).await.unwrap();
        let (sender, mut done) = mpsc::unbounded_channel();
        let handler = move |body: String, incoming: Incoming| {
            let sender = sender.clone();
            async move {
                match body.as_str() {
                    "fails" if !incoming.redelivered() => return Err("not now"),
                    "panics" if !incoming.redelivered() => panic!("at the first sight"),
                    _ => {}
                }
                sender.send(body).map_err(|_| "nobody listens")
            }
        };
        let stop = async {
            let mut all = BTreeSet::new();
            while all.len() < 3 {
                all.insert(done.recv().await.unwrap());
            }
        };
        let runner = consumer.retry(at_once()).handle(handler);
        let summary = soon("the end", runner.run_until(stop)).await.unwrap();
        assert_eq!((summary.handled, summary.failed), (3, 2), "{workers} workers");
    }
}

#[tokio::test]
async fn as_many_are_handled_at_once_as_there_are_workers_and_no_more() {
    const WORKERS: usize = 8;
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    let consumer = client.consumer("q").workers(WORKERS);
    for consumer in [consumer.clone(), consumer.in_one_task()] {
        publisher.publish_batch((0..100).map(|n| ("q", n.to_string()))).await.unwrap();
        #[derive(Default)]
        struct Crowd {
            now: AtomicUsize,
            most: AtomicUsize,
            done: AtomicUsize,
        }
        let crowd = Arc::new(Crowd::default());
        let handler = |State(crowd): State<Arc<Crowd>>| async move {
            let now = crowd.now.fetch_add(1, Ordering::SeqCst) + 1;
            crowd.most.fetch_max(now, Ordering::SeqCst);
            // The first ones wait for each other; nobody has to be quick.
            let full = async || crowd.most.load(Ordering::SeqCst) >= WORKERS;
            eventually(SOON, "all workers to be busy", full).await;
            crowd.now.fetch_sub(1, Ordering::SeqCst);
            crowd.done.fetch_add(1, Ordering::SeqCst);
        };
        let all = Arc::clone(&crowd);
        let stop =
            eventually(SOON, "all to be handled", async || all.done.load(Ordering::SeqCst) == 100);
        let runner = consumer.state(Arc::clone(&crowd)).handle(handler);
        let summary = soon("the end", runner.run_until(stop)).await.unwrap();
        assert_eq!((summary.handled, crowd.most.load(Ordering::SeqCst)), (100, WORKERS));
    }
}

#[tokio::test]
async fn a_pool_of_subscribers_shares_the_queue_and_goes_on_after_a_cut() {
    let vhost = rabbitmq::vhost().await;
    let client = builder(&vhost).max_subscriptions(3).connect().await.unwrap();
    client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let publisher = publisher(&client).await;
    type Seen = Arc<Mutex<BTreeSet<String>>>;
    let seen = Seen::default();
    let handler = |body: String, State(seen): State<Seen>| async move {
        seen.lock().unwrap().insert(body);
    };
    let until_seen = async |count| {
        eventually(SOON, "all to be handled", async || seen.lock().unwrap().len() == count).await
    };
    let stop = async {
        eventually(SOON, "five consumers on three connections", async || {
            let health = client.health();
            (health.consumers.len(), health.connections.len()) == (5, 3)
        })
        .await;
        publisher.publish_batch((0..100).map(|n| ("q", n.to_string()))).await.unwrap();
        until_seen(100).await;
        cut(&vhost, &client, CONSUMING).await;
        publisher.publish_batch((100..200).map(|n| ("q", n.to_string()))).await.unwrap();
        until_seen(200).await;
    };
    let runner = client.consumer("q").subscribers(5).prefetch(1).state(Arc::clone(&seen));
    let summary = soon("the end", runner.handle(handler).run_until(stop)).await.unwrap();
    assert!(summary.handled >= 200, "{summary:?}");
    assert!(client.health().consumers.is_empty());
}

#[tokio::test]
async fn stopping_lets_handlers_finish_and_gives_the_rest_back() {
    for kind in 0..3 {
        let vhost = rabbitmq::vhost().await;
        let client = client_with(&vhost, Queue::classic("q")).await;
        let (consumer, workers) = consumers(&client)[kind].clone();
        let publisher = publisher(&client).await;
        publisher.publish_batch((0..50).map(|n| ("q", n.to_string()))).await.unwrap();
        let (begun, go_on) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let state = (Arc::clone(&begun), Arc::clone(&go_on));
        let handler = |State((begun, go_on)): State<(Arc<AtomicUsize>, Arc<Notify>)>| async move {
            begun.fetch_add(1, Ordering::SeqCst);
            go_on.notified().await;
        };
        let stop =
            eventually(SOON, "busy workers", async || begun.load(Ordering::SeqCst) == workers);
        // They go on once what was not begun is back, that is, after the stop.
        let releasing = async {
            until_depth(&client, "q", 50 - workers as u32).await;
            (0..workers).for_each(|_| go_on.notify_one());
        };
        let runner = consumer.prefetch(20).state(state).handle(handler);
        let running = soon("the end", runner.run_until(stop));
        let (summary, ()) = tokio::join!(running, releasing);
        assert_eq!(summary.unwrap().handled, workers as u64);
        client.close().await;
        let other = crate::support::client::client(&vhost).await;
        until_depth(&other, "q", 50 - workers as u32).await;
    }
}

#[tokio::test]
async fn a_handler_that_does_not_end_is_abandoned_and_its_message_goes_back() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    soon("an outcome", publisher(&client).await.publish("q", "1")).await.unwrap();
    for (consumer, workers) in consumers(&client) {
        let begun = Arc::new(Notify::new());
        let handler = |State(begun): State<Arc<Notify>>| async move {
            begun.notify_one();
            std::future::pending::<()>().await;
        };
        let drain = Duration::from_millis(100);
        let runner = consumer.drain(drain).state(Arc::clone(&begun)).handle(handler);
        let summary = soon("the end", runner.run_until(begun.notified())).await.unwrap();
        assert_eq!((summary.handled, summary.abandoned), (0, 1), "{workers} workers");
        until_depth(&client, "q", 1).await;
    }
}

#[tokio::test]
async fn at_most_once_skips_what_was_delivered_before() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    soon("an outcome", publisher.publish("q", "1")).await.unwrap();
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    crate::support::client::next(&mut deliveries).await.requeue().unwrap();
    // Nobody takes the second, and the first is back before it.
    deliveries.cancel().await.unwrap();
    drop(deliveries);
    until_depth(&client, "q", 1).await;
    soon("an outcome", publisher.publish("q", "2")).await.unwrap();
    let called = Arc::new(Notify::new());
    let handler = |State(called): State<Arc<Notify>>| async move {
        called.notify_one();
        Err::<(), _>("it does not matter")
    };
    let runner = client.consumer("q").at_most_once().state(Arc::clone(&called)).handle(handler);
    let summary = soon("the end", runner.run_until(called.notified())).await.unwrap();
    assert_eq!((summary.skipped, summary.failed, summary.handled), (1, 1, 0));
    until_depth(&client, "q", 0).await;
}

#[tokio::test]
async fn batches_are_full_or_come_after_a_time_and_are_acked_as_a_whole() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    publisher.publish_batch((0..12).map(|n| ("q", n.to_string()))).await.unwrap();
    let (sender, mut sizes) = mpsc::unbounded_channel();
    let handler = move |batch: Vec<Incoming>| {
        let sent = sender.send(batch.len());
        async move { sent.map_err(|_| "nobody listens") }
    };
    let options = BatchOptions { size: 5, within: Duration::from_millis(200) };
    let stop = async {
        let mut all = Vec::new();
        while all.iter().sum::<usize>() < 12 {
            all.push(sizes.recv().await.unwrap());
        }
        assert!(all.iter().all(|size| *size <= 5), "{all:?}");
    };
    let runner = client.consumer("q").prefetch(1).handle_batches(options, handler);
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!(summary.handled, 12);
    client.close().await;
    let info = crate::support::client::client(&vhost).await.inspect_queue("q").await.unwrap();
    assert_eq!(info.messages, 0);
}

#[tokio::test]
async fn of_a_batch_that_failed_in_part_only_that_part_comes_again() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    publisher.publish_batch((0..5).map(|n| ("q", n.to_string()))).await.unwrap();
    let (sender, mut bodies) = mpsc::unbounded_channel();
    let handler = move |batch: Vec<Incoming>| {
        let each = |one: &Incoming| match one.redelivered() || one.body() == "0" {
            true => Ok(()),
            false => Err("not yet".into()),
        };
        for one in &batch {
            let _ = sender.send(String::from_utf8_lossy(one.body()).into_owned());
        }
        let outcome = BatchOutcome::Each(batch.iter().map(each).collect());
        async move { outcome }
    };
    let options = BatchOptions { size: 5, within: Duration::from_secs(1) };
    let mut all = Vec::new();
    let stop = async {
        while all.len() < 9 {
            all.push(bodies.recv().await.unwrap());
        }
    };
    let runner = client.consumer("q").retry(at_once()).handle_batches(options, handler);
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!((summary.handled, summary.failed), (5, 4));
    all.sort();
    assert_eq!(all, ["0", "1", "1", "2", "2", "3", "3", "4", "4"]);
}
