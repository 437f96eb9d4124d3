use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::amqp::RawProperties;
use leveret::retry::{FailedMessage, Origin, RetryProfile, RetryStep, WorkQueue};
use leveret::{
    Client, ConsumerBuilder, FromIncoming, Incoming, Message, Queue, Retry, RetryPolicy, Topology,
};
use tokio::sync::mpsc;

use crate::client::failover::Log;
use crate::{broker, client_with, depth, soon, unsettled};

fn pending() -> Retry {
    Retry::in_place(Duration::from_millis(10))
}

/// A consumer of each kind that handles so many messages at a time: in tasks of their own, or all in one.
fn consumers(client: &Client, workers: usize) -> [ConsumerBuilder; 2] {
    let consumer = client.consumer("q").workers(workers);
    [consumer.clone(), consumer.in_one_task()]
}

/// An error whose text cannot be made.
#[derive(Debug)]
struct Unspeakable;

impl std::fmt::Display for Unspeakable {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        panic!("no text")
    }
}

impl std::error::Error for Unspeakable {}

#[tokio::test(start_paused = true)]
async fn an_error_whose_text_panics_is_a_failure_and_no_end() {
    for workers in [1, 4] {
        let broker = broker();
        let client = client_with(&broker, Queue::quorum("q")).await;
        let publisher = client.publisher("").build().await.unwrap();
        for body in ["fails", "fine"] {
            publisher.publish("q", body).await.unwrap();
        }
        let handler = async |body: String| match body.as_str() {
            "fails" => Err(Unspeakable),
            _ => Ok(()),
        };
        let runner = client.consumer("q").workers(workers).retry(Retry::discard()).handle(handler);
        let stop = tokio::time::sleep(Duration::from_secs(5));
        let summary = soon("the end", runner.run_until(stop)).await.unwrap();
        assert_eq!((summary.handled, summary.failed), (1, 1), "{workers} workers");
    }
}

#[tokio::test(start_paused = true)]
async fn handlers_have_tasks_of_their_own_or_share_one() {
    for (kind, tasks) in [8, 1].into_iter().enumerate() {
        let broker = broker();
        let client = client_with(&broker, Queue::classic("q")).await;
        let publisher = client.publisher("").build().await.unwrap();
        publisher.publish_batch((0..8).map(|n| ("q", n.to_string()))).await.unwrap();
        let (sender, mut ids) = mpsc::unbounded_channel();
        let handler = move || {
            let sender = sender.clone();
            async move { sender.send(tokio::task::id()) }
        };
        let stop = async {
            let mut all = HashSet::new();
            for _ in 0..8 {
                all.insert(ids.recv().await.unwrap());
            }
            assert_eq!(all.len(), tasks);
        };
        let consumer = consumers(&client, 8)[kind].clone();
        soon("the end", consumer.handle(handler).run_until(stop)).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn after_one_that_computes_they_have_tasks_of_their_own_however_quick_they_were() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    let bodies = (0..3000).map(|_| "quick").chain(["computes"]).chain(["late"; 50]);
    publisher.publish_batch(bodies.map(|body| ("q", body))).await.unwrap();
    let (sender, mut ids) = mpsc::unbounded_channel();
    let handler = move |body: String| {
        let sender = sender.clone();
        async move {
            if body == "computes" {
                std::thread::sleep(Duration::from_millis(20));
            }
            sender.send((body, tokio::task::id()))
        }
    };
    let stop = async {
        let mut late = HashSet::new();
        for _ in 0..3051 {
            let (body, id) = ids.recv().await.unwrap();
            if body == "late" {
                late.insert(id);
            }
        }
        assert_eq!(late.len(), 50);
    };
    let consumer = consumers(&client, 8)[0].clone();
    let summary = soon("the end", consumer.handle(handler).run_until(stop)).await.unwrap();
    assert_eq!(summary.handled, 3051);
}

#[tokio::test(start_paused = true)]
async fn however_many_messages_are_there_other_tasks_have_their_turn() {
    const MESSAGES: usize = 5000;
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    for consumer in consumers(&client, 2) {
        publisher.publish_batch((0..MESSAGES).map(|_| ("q", "1"))).await.unwrap();
        let handled = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&handled);
        let handler = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            async {}
        };
        let runner = consumer.prefetch(5000).handle(handler);
        // Each of its turns comes after a few of the consumer's.
        let others = async {
            let mut last = 0;
            while last < MESSAGES {
                tokio::task::yield_now().await;
                let now = handled.load(Ordering::Relaxed);
                assert!(now - last <= 1000, "{} between two turns", now - last);
                last = now;
            }
        };
        soon("the end", runner.run_until(others)).await.unwrap();
    }
}

/// However the consumer ends: its time is over, or it is dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_message_stays_with_a_handler_that_computes_beyond_the_end_of_its_consumer() {
    for (is_dropped, waits_at_last) in [(false, false), (false, true), (true, false), (true, true)]
    {
        let broker = broker();
        let client = client_with(&broker, Queue::classic("q")).await;
        let publisher = client.publisher("").build().await.unwrap();
        publisher.publish("q", "1").await.unwrap();
        let (begin, mut begun) = mpsc::channel(10);
        let (release, released) = std::sync::mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let handler = move || {
            let (begin, released) = (begin.clone(), Arc::clone(&released));
            async move {
                begin.send(()).await.unwrap();
                let _ = released.lock().unwrap().recv();
                if waits_at_last {
                    std::future::pending::<()>().await;
                }
            }
        };
        let consumer = client.consumer("q").workers(2).drain(Duration::ZERO).handle(handler);
        if is_dropped {
            let run = tokio::spawn(consumer.run());
            soon("the handler", begun.recv()).await.unwrap();
            run.abort();
            assert!(soon("the end", run).await.unwrap_err().is_cancelled());
        } else {
            let run = consumer.run_until(async { begun.recv().await.unwrap() });
            assert_eq!(soon("the end", run).await.unwrap().abandoned, 1);
        }
        // It would have gone back by now.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!((depth(&broker, "q"), unsettled(&broker, "q")), (Some(0), Some(1)));
        release.send(()).unwrap();
        let settled = async {
            while unsettled(&broker, "q") != Some(0) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        soon("the end of the handler", settled).await;
        assert_eq!(depth(&broker, "q"), Some(usize::from(waits_at_last)));
    }
}

/// Picking it takes long, and as long for all: they do so at the same time.
struct Slow;

static MEETING: std::sync::Barrier = std::sync::Barrier::new(2);

impl FromIncoming for Slow {
    fn from_incoming(_: &Incoming) -> Result<Self, leveret::Error> {
        MEETING.wait();
        Ok(Slow)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn arguments_are_picked_at_the_same_time() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch([("q", "1"), ("q", "2")]).await.unwrap();
    let (sender, mut done) = mpsc::channel(2);
    let handler = move |_: Slow| {
        let sender = sender.clone();
        async move { sender.send(()).await }
    };
    let stop = async {
        done.recv().await.unwrap();
        done.recv().await.unwrap();
    };
    let runner = client.consumer("q").workers(2).handle(handler);
    assert_eq!(soon("the end", runner.run_until(stop)).await.unwrap().handled, 2);
}

#[tokio::test(start_paused = true)]
async fn a_layer_times_a_handler_out() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    client.publisher("").build().await.unwrap().publish("q", "1").await.unwrap();
    let handler = |incoming: Incoming| async move {
        if !incoming.redelivered() {
            std::future::pending::<()>().await;
        }
    };
    let runner = client
        .consumer("q")
        .retry(pending())
        .layer(tower::timeout::TimeoutLayer::new(Duration::from_secs(1)))
        .layer(tower::limit::ConcurrencyLimitLayer::new(2))
        .handle(handler);
    let stop = tokio::time::sleep(Duration::from_secs(5));
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!((summary.handled, summary.failed), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_message_that_fails_at_most_once_is_named_on_one_line_of_the_log() {
    let log = Log::default();
    let _logging = log.collect();
    let client = client_with(&broker(), Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("q", Message::new("1").message_id("17")).await.unwrap();
    let handler = async || Err::<(), _>("one\nforged");
    let runner = client.consumer("q").at_most_once().handle(handler);
    let stop = tokio::time::sleep(Duration::from_secs(5));
    soon("the end", runner.run_until(stop)).await.unwrap();
    let logged = log.text();
    let line = logged.lines().find(|line| line.contains("not tried again")).expect(&logged);
    for part in ["queue=\"q\"", "routing_key=\"q\"", "message_id=\"17\"", "one\\nforged"] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_handled_a_while_ago_is_not_handled_again() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    for (id, body) in [("a", "1"), ("a", "2"), ("b", "3")] {
        publisher.publish("q", Message::new(body).message_id(id)).await.unwrap();
    }
    let runner = client.consumer("q").deduplicate(Duration::from_secs(10)).handle(async || {});
    let stop = async {
        tokio::time::sleep(Duration::from_secs(20)).await;
        publisher.publish("q", Message::new("4").message_id("a")).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!((summary.handled, summary.duplicates), (3, 1));
    assert_eq!(depth(&broker, "q"), Some(0));
}

#[tokio::test(start_paused = true)]
async fn what_failed_is_no_duplicate() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    client.publisher("").build().await.unwrap().publish("q", "1").await.unwrap();
    let handler = |incoming: Incoming| async move {
        if incoming.attempt() > 1 { Ok(()) } else { Err("not yet") }
    };
    let runner = client.consumer("q").deduplicate(Duration::from_secs(60)).handle(handler);
    let stop = tokio::time::sleep(Duration::from_secs(10));
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!((summary.handled, summary.failed, summary.duplicates), (1, 1, 0));
}

/// Publishes failed messages to their queue at once, and counts what it is asked.
#[derive(Debug)]
struct CountingProfile {
    policy: RetryPolicy,
    failures: Arc<AtomicUsize>,
    origins: Arc<AtomicUsize>,
}

impl RetryProfile for CountingProfile {
    fn policy(&self) -> &RetryPolicy {
        &self.policy
    }

    fn topology(&self, _: &WorkQueue) -> Result<Topology, leveret::Error> {
        Ok(Topology::new())
    }

    fn failures(&self, properties: &RawProperties, _: &str) -> u32 {
        self.failures.fetch_add(1, Ordering::Relaxed);
        properties.header("tries").and_then(|tries| tries.as_str()?.parse().ok()).unwrap_or(0)
    }

    fn origin(&self, properties: &RawProperties, _: &str) -> Option<Origin> {
        self.origins.fetch_add(1, Ordering::Relaxed);
        properties.header("tries")?;
        let (exchange, routing_key) = ("orders".try_into().ok()?, "order.placed".try_into().ok()?);
        Some(Origin { exchange, routing_key })
    }

    fn retry(&self, failed: &FailedMessage<'_>, _: Duration) -> RetryStep {
        let mut message = failed.forward_to("", failed.queue());
        message.set_header("tries", failed.failures().to_string());
        message.into()
    }

    fn park(&self, _: &FailedMessage<'_>) -> RetryStep {
        RetryStep::DeadLetter
    }
}

#[tokio::test(start_paused = true)]
async fn a_profile_resolves_address_and_attempt_once_per_delivery_and_only_if_there_are_headers() {
    for place in 0..2 {
        let broker = broker();
        let client = client_with(&broker, Queue::classic("q")).await;
        client.publisher("").build().await.unwrap().publish("q", "job").await.unwrap();
        let (failures, origins) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let profile = CountingProfile {
            policy: RetryPolicy::fixed(Duration::from_secs(1)).max_retries(5),
            failures: Arc::clone(&failures),
            origins: Arc::clone(&origins),
        };
        let (sender, mut seen) = mpsc::channel(10);
        let handler = move |incoming: Incoming, other: Incoming| {
            let sender = sender.clone();
            async move {
                for incoming in [&incoming, &other, &incoming.clone()] {
                    let (exchange, key) = (incoming.exchange(), incoming.routing_key());
                    let address = format!("{exchange}/{key}");
                    sender.send((incoming.attempt(), address)).await.unwrap();
                }
                if incoming.attempt() < 3 { Err("not yet") } else { Ok(()) }
            }
        };
        let consumer = consumers(&client, 2)[place].clone().retry(Retry::with_profile(profile));
        let stop = async {
            for attempt in 1..=3 {
                let address = if attempt == 1 { "/q" } else { "orders/order.placed" };
                for _ in 0..3 {
                    let seen = soon("the handler", seen.recv()).await.unwrap();
                    assert_eq!(seen, (attempt, address.to_owned()));
                }
            }
        };
        let summary = soon("the end", consumer.handle(handler).run_until(stop)).await.unwrap();
        assert_eq!((summary.handled, summary.retried), (1, 2));
        // The first delivery has no headers, and failing it asks nothing either.
        let asked = [failures, origins].map(|asked| asked.load(Ordering::Relaxed));
        assert_eq!(asked, [2, 2]);
    }
}
