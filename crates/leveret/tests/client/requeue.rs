//! Messages that go back to their queue, where the broker counts how often.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leveret::amqp::Array;
use leveret::{
    Client, Exchange, Failure, Incoming, Message, Queue, QueueType, Retry, RetryPolicy, Summary,
    Topology,
};
use leveret_broker::{Broker, Permissions, Profile};
use tokio::sync::mpsc;

use crate::{client_of, client_of_user, client_with, depth, soon};

const SECOND: Duration = Duration::from_secs(1);
/// Longer than all waits of the default policy.
const HOUR: Duration = Duration::from_secs(3600);

/// A broker that counts all deliveries that come back.
fn counting() -> Broker {
    Broker::builder().profile(Profile::RabbitMq3_10).start().unwrap()
}

/// Consumes queue `q`, and lets its only message fail so often. Says under which routing keys it came.
async fn fails(
    client: &Client,
    retry: Option<Retry>,
    times: u32,
    failure: fn(&'static str) -> Failure,
) -> (Vec<String>, Summary) {
    let (sender, mut seen) = mpsc::channel(100);
    let count = Arc::new(AtomicU32::new(0));
    let handler = move |incoming: Incoming| {
        let (sender, count) = (sender.clone(), Arc::clone(&count));
        async move {
            sender.send(incoming.routing_key().to_string()).await.unwrap();
            if count.fetch_add(1, Ordering::Relaxed) < times { Err(failure("no")) } else { Ok(()) }
        }
    };
    let mut keys = Vec::new();
    let stop = async {
        while keys.len() <= times as usize {
            keys.push(soon("a delivery", seen.recv()).await.unwrap());
        }
        tokio::time::sleep(HOUR).await;
    };
    let mut consumer = client.consumer("q");
    if let Some(retry) = retry {
        consumer = consumer.retry(retry);
    }
    let summary = consumer.handle(handler).run_until(stop).await.unwrap();
    (keys, summary)
}

fn requeue(text: &'static str) -> Failure {
    Failure::requeue(text)
}

fn retry(text: &'static str) -> Failure {
    Failure::retry(text)
}

/// What a message is that comes by an exchange, with a copy for another queue.
fn message() -> Message {
    let copies = Array::from_values(["other".into()]).unwrap();
    Message::new("job").header("CC", copies).header("tenant", "acme")
}

fn topology(queue: Queue) -> Topology {
    Topology::new()
        .exchange(Exchange::direct("jobs"))
        .queue(queue.bind("jobs", "new"))
        .queue(Queue::classic("other").bind("jobs", "other"))
}

#[tokio::test(start_paused = true)]
async fn what_is_requeued_often_is_not_lost_to_a_delivery_limit() {
    // Known to the consumer, or to somebody else alone.
    for is_known in [true, false] {
        for limit in [0, 1, 3] {
            let broker = counting();
            let other = client_of(&broker).await;
            let queue = Queue::quorum("q").delivery_limit(limit).dead_letter_to("");
            other.apply(&topology(queue)).await.unwrap();
            let client = if is_known { other.clone() } else { client_of(&broker).await };
            let publisher = client.publisher("jobs").build().await.unwrap();
            publisher.publish("new", message()).await.unwrap();
            let (keys, summary) = fails(&client, None, 12, requeue).await;
            assert_eq!(keys, ["new"; 13], "{is_known} {limit}");
            assert_eq!((summary.handled, summary.failed), (1, 12));
            assert_eq!((depth(&broker, "q"), depth(&broker, "other")), (Some(0), Some(1)));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn in_place_it_is_tried_for_ever_in_spite_of_a_limit_that_nobody_knows_of() {
    let broker = counting();
    let other = client_of(&broker).await;
    other.apply(&topology(Queue::quorum("q").delivery_limit(0))).await.unwrap();
    let client = client_of(&broker).await;
    let publisher = client.publisher("jobs").build().await.unwrap();
    publisher.publish("new", message()).await.unwrap();
    let (keys, summary) = fails(&client, Some(Retry::in_place(SECOND)), 12, retry).await;
    assert_eq!(keys, ["new"; 13]);
    assert_eq!((summary.handled, summary.failed), (1, 12));
}

/// What is put into its queue anew goes to the end. Where nobody counts, it need not.
#[tokio::test(start_paused = true)]
async fn what_nobody_counts_keeps_its_place() {
    let ordered = [
        (Profile::RabbitMq3_10, Queue::classic("q")),
        (Profile::RabbitMq4_3, Queue::quorum("q").delivery_limit(1).dead_letter_to("")),
    ];
    for (profile, queue) in ordered {
        let broker = Broker::builder().profile(profile).start().unwrap();
        let client = client_with(&broker, queue).await;
        let publisher = client.publisher("").build().await.unwrap();
        for body in ["one", "two"] {
            publisher.publish("q", body).await.unwrap();
        }
        let (sender, mut seen) = mpsc::channel(100);
        let handler = move |body: String, incoming: Incoming| {
            let sender = sender.clone();
            async move {
                sender.send(body).await.unwrap();
                if incoming.redelivered() { Ok(()) } else { Err(Failure::requeue("no")) }
            }
        };
        let mut bodies = Vec::new();
        let stop = async {
            while bodies.len() < 4 {
                bodies.push(soon("a delivery", seen.recv()).await.unwrap());
            }
            tokio::time::sleep(SECOND).await;
        };
        let consumer = client.consumer("q").prefetch(1);
        let summary = consumer.handle(handler).run_until(stop).await.unwrap();
        assert_eq!(bodies, ["one", "one", "two", "two"]);
        assert_eq!(summary.handled, 2);
    }
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_put_in_anew_yet_is_held() {
    let broker = counting();
    let client = client_with(&broker, Queue::quorum("q").delivery_limit(1)).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("q", "job").await.unwrap();
    broker.faults().nack_publishes(5);
    let (keys, _) = fails(&client, None, 3, requeue).await;
    assert_eq!(keys, ["q"; 4]);
    assert_eq!(depth(&broker, "q"), Some(0));
}

/// Each retry is a new message to the queue: its deliveries are counted from the beginning.
#[tokio::test(start_paused = true)]
async fn a_limit_below_the_retries_takes_none_away_if_there_is_a_dead_letter_exchange() {
    for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
        let broker = Broker::builder().profile(profile).start().unwrap();
        let client = client_of(&broker).await;
        let queue = Queue::quorum("q").delivery_limit(1).dead_letter_to("dead");
        let dead = Topology::new()
            .exchange(Exchange::fanout("dead"))
            .queue(Queue::classic("dead").bind("dead", ""));
        client.apply(&topology(queue).and(dead)).await.unwrap();
        let publisher = client.publisher("jobs").build().await.unwrap();
        publisher.publish("new", message()).await.unwrap();
        let policy = RetryPolicy::fixed(SECOND).max_retries(5);
        let (_, summary) = fails(&client, Some(policy.into()), 5, retry).await;
        assert_eq!((summary.retried, summary.handled, summary.parked), (5, 1, 0));
        assert_eq!(depth(&broker, "dead"), Some(0));
    }
}

#[tokio::test(start_paused = true)]
async fn by_default_there_are_no_more_retries_than_the_queue_has_deliveries() {
    let broker = counting();
    let client = client_with(&broker, Queue::quorum("q").delivery_limit(3)).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("q", "job").await.unwrap();
    let (_, summary) = fails(&client, None, 3, retry).await;
    assert_eq!((summary.retried, summary.handled, summary.parked), (3, 1, 0));
    publisher.publish("q", "job").await.unwrap();
    let runner = client.consumer("q").handle(async || Err::<(), _>("no"));
    let summary = runner.run_until(tokio::time::sleep(HOUR)).await.unwrap();
    assert_eq!((summary.retried, summary.parked), (3, 1));
    assert_eq!(depth(&broker, "q.parked"), Some(1));
}

#[tokio::test(start_paused = true)]
async fn queues_that_somebody_has_made_of_another_type_serve_as_well() {
    let broker = counting();
    let first = client_with(&broker, Queue::quorum("q")).await;
    let publisher = first.publisher("").build().await.unwrap();
    publisher.publish("q", "one").await.unwrap();
    let (_, summary) = fails(&first, None, 1, retry).await;
    assert_eq!(summary.retried, 1);
    // This one does not know that the queue is a quorum queue, and its own would be classic ones.
    let second = client_of(&broker).await;
    publisher.publish("q", "two").await.unwrap();
    let (_, summary) = fails(&second, None, 1, retry).await;
    assert_eq!((summary.retried, summary.handled), (1, 1));
    // Whoever asks for a type is told.
    let classic = Retry::new(RetryPolicy::default()).queue_type(QueueType::Classic);
    let runner = second.consumer("q").retry(classic).handle(async || ());
    let error = soon("a refusal", runner.run()).await.unwrap_err();
    assert_eq!(error.kind(), leveret::ErrorKind::Conflict, "{error}");
}

/// Where returns may be counted, what is requeued is published anew. This user may not.
#[tokio::test]
async fn who_may_not_publish_can_requeue_all_the_same() {
    let permissions = Permissions { write: "^none$".to_owned(), ..Permissions::all() };
    let broker = Broker::builder()
        .profile(Profile::RabbitMq3_10)
        .user("all", "all")
        .user("limited", "limited")
        .permissions("limited", "/", permissions)
        .start()
        .unwrap();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    let all = client_of_user(address, "all").await;
    all.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    all.publisher("").build().await.unwrap().publish("q", "1").await.unwrap();
    let limited = client_of_user(address, "limited").await;
    let (sender, mut attempts) = mpsc::channel(2);
    let handler = move || {
        let _ = sender.try_send(());
        async { Err::<(), _>(Failure::requeue("another may be luckier")) }
    };
    let twice = async {
        attempts.recv().await;
        attempts.recv().await;
    };
    let runner = limited.consumer("q").handle(handler);
    soon("to be requeued", runner.run_until(twice)).await.unwrap();
}
