use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::amqp::{Array, GetOptions, Table, Value};
use leveret::{
    Attempt, Client, Delivery, ErrorKind, Failure, Message, Queue, QueueType, Retry, RetryPolicy,
    Summary, Topology,
};
use leveret_broker::{Broker, Profile};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::{broker, client_of, client_with, depth, soon};

const SECOND: Duration = Duration::from_secs(1);
/// Longer than all waits of a policy here, the default one included. Each simulated minute has its cost.
const HOUR: Duration = Duration::from_secs(3600);

/// What a handler saw: the attempt, and how long after the beginning.
type Seen = (u32, Duration);

/// Fails the message until the attempt with this number, and says when it came.
async fn run(
    client: &Client,
    retry: impl Into<Retry>,
    succeed_at: u32,
    expect: usize,
) -> Vec<Seen> {
    let began = Instant::now();
    let (sender, mut seen) = mpsc::channel::<Seen>(100);
    let handler = move |Attempt(attempt): Attempt| {
        let sender = sender.clone();
        async move {
            sender.send((attempt, began.elapsed())).await.unwrap();
            if attempt < succeed_at { Err("not yet") } else { Ok(()) }
        }
    };
    let mut all = Vec::new();
    let stop = async {
        while all.len() < expect {
            all.push(seen.recv().await.unwrap());
        }
        // What may follow has time to.
        tokio::time::sleep(HOUR).await;
        while let Ok(more) = seen.try_recv() {
            all.push(more);
        }
    };
    client.consumer("q").retry(retry).handle(handler).run_until(stop).await.unwrap();
    all
}

async fn parked(client: &Client) -> Delivery {
    client.get("q.parked", GetOptions::default()).await.unwrap().expect("a parked message")
}

fn text(delivery: &Delivery, header: &str) -> String {
    let value = delivery.header(header).unwrap_or_else(|| panic!("no header {header}"));
    value.as_str().expect("text").to_owned()
}

#[tokio::test(start_paused = true)]
async fn a_failed_message_comes_again_after_its_waits_and_counts_its_attempts() {
    for queue in [Queue::classic("q"), Queue::quorum("q")] {
        let broker = broker();
        let client = client_with(&broker, queue).await;
        let publisher = client.publisher("").build().await.unwrap();
        publisher.publish("q", "job").await.unwrap();
        let policy = RetryPolicy::exponential(2 * SECOND, 1.5).capped(4 * SECOND).max_retries(5);
        let seen = run(&client, policy, 5, 5).await;
        let waits = [0, 2000, 5000, 9000, 13_000].map(Duration::from_millis);
        for (n, (attempt, at)) in seen.iter().enumerate() {
            assert_eq!(*attempt, n as u32 + 1);
            assert!(*at >= waits[n] && *at < waits[n] + SECOND / 2, "{seen:?}");
        }
        assert_eq!(seen.len(), 5);
        assert_eq!((depth(&broker, "q"), depth(&broker, "q.parked")), (Some(0), Some(0)));
    }
}

#[tokio::test(start_paused = true)]
async fn what_an_earlier_version_has_written_into_a_message_counts() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    let message = Message::new("job")
        .header("x-leveret-attempts", 3i64)
        .header("x-leveret-first-failure", Value::Timestamp(1_700_000_000));
    publisher.publish("q", message).await.unwrap();
    let seen = run(&client, RetryPolicy::fixed(SECOND).max_retries(4), 99, 2).await;
    assert_eq!(seen.iter().map(|(attempt, _)| *attempt).collect::<Vec<_>>(), [4, 5]);
    let parked = parked(&client).await;
    assert_eq!(text(&parked, "x-leveret-attempts"), "5");
    assert_eq!(text(&parked, "x-leveret-first-failure"), "2023-11-14T22:13:20Z");
}

#[tokio::test(start_paused = true)]
async fn the_error_decides_what_becomes_of_the_message() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    let counts = Arc::new(Mutex::new(HashMap::<String, u32>::new()));
    let handler = {
        let counts = Arc::clone(&counts);
        move |body: String| {
            let mut counts = counts.lock().unwrap();
            let count = counts.entry(body.clone()).or_default();
            *count += 1;
            let outcome = match (body.as_str(), *count) {
                ("permanent", _) => Err(Failure::permanent("never").kind("bad")),
                ("done", _) => Err(Failure::done("it was there already")),
                ("requeue", 1..=50) => Err(Failure::requeue("not here")),
                ("retry", 1) => Err(Failure::retry("not now")),
                _ => Ok(()),
            };
            async move { outcome }
        }
    };
    for body in ["permanent", "done", "requeue", "retry"] {
        publisher.publish("q", body).await.unwrap();
    }
    let runner =
        client.consumer("q").retry(RetryPolicy::fixed(SECOND).max_retries(1)).handle(handler);
    let summary = runner.run_until(tokio::time::sleep(HOUR)).await.unwrap();
    let expected = [("permanent", 1), ("done", 1), ("requeue", 51), ("retry", 2)];
    for (body, count) in expected {
        assert_eq!(counts.lock().unwrap()[body], count, "{body}");
    }
    assert_eq!((summary.handled, summary.retried, summary.parked), (3, 1, 1));
    let parked = parked(&client).await;
    assert_eq!(parked.body(), "permanent");
    assert_eq!(text(&parked, "x-leveret-reason"), "permanent");
    assert_eq!(text(&parked, "x-leveret-error-kind"), "bad");
    parked.ack().unwrap();
}

#[tokio::test(start_paused = true)]
async fn queues_that_somebody_has_deleted_are_declared_again() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    let other = client_of(&broker).await;
    publisher.publish("q", "job").await.unwrap();
    let deleting = async {
        tokio::time::sleep(SECOND / 2).await;
        assert_eq!(depth(&broker, "q.wait.1s"), Some(1));
        tokio::time::sleep(SECOND / 4).await;
        for queue in ["q.wait.2s", "q.parked"] {
            other.delete_queue(queue, Default::default()).await.unwrap();
        }
        other.delete_exchange("q.wait", Default::default()).await.unwrap();
        tokio::time::sleep(HOUR).await;
    };
    let policy = RetryPolicy::linear(SECOND).max_retries(2);
    let runner = client.consumer("q").retry(policy).handle(async || Err::<(), _>("no"));
    let summary = runner.run_until(deleting).await.unwrap();
    assert_eq!((summary.retried, summary.parked), (2, 1));
    assert_eq!(parked(&client).await.body(), "job");
}

#[tokio::test(start_paused = true)]
async fn without_a_policy_messages_are_tried_again_and_parked_and_nothing_is_declared_before() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    let (sender, mut began) = mpsc::channel(100);
    let handler = move |body: String| {
        let sender = sender.clone();
        async move {
            sender.send(body.clone()).await.unwrap();
            if body == "bad" { Err("no") } else { Ok(()) }
        }
    };
    let stop = async {
        publisher.publish("q", "good").await.unwrap();
        began.recv().await.unwrap();
        assert_eq!(depth(&broker, "q.parked"), None);
        publisher.publish("q", "bad").await.unwrap();
        tokio::time::sleep(HOUR).await;
    };
    let summary = client.consumer("q").handle(handler).run_until(stop).await.unwrap();
    let Summary { handled, failed, retried, parked, .. } = summary;
    assert_eq!((handled, failed, retried, parked), (1, 11, 10, 1));
}

#[tokio::test(start_paused = true)]
async fn what_cannot_work_is_refused_at_the_start_with_the_reason() {
    let broker = broker();
    let client = client_of(&broker).await;
    let topology = Topology::new()
        .queue(Queue::quorum("limited").delivery_limit(3))
        .queue(Queue::temporary("mine"))
        .queue(Queue::classic("q"));
    client.apply(&topology).await.unwrap();
    let policy = || RetryPolicy::fixed(SECOND);
    let table = [
        ("limited", Retry::from(policy().max_retries(5)), "delivery limit is 3"),
        ("limited", Retry::in_place(SECOND), "delivery limit of 3"),
        ("mine", policy().into(), "gone with its connection"),
        ("q", RetryPolicy::linear(SECOND).max_retries(1000).into(), "cap them"),
        ("q", RetryPolicy::exponential(SECOND, 0.0).into(), "multiplier"),
    ];
    for (queue, retry, word) in table {
        let runner = client.consumer(queue).retry(retry).handle(async || ());
        let error = soon("a refusal", runner.run()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    for builder in [client.consumer("q").auto_ack(), client.consumer("q").at_most_once()] {
        let error = builder.retry(policy()).handle(async || ()).run().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_queue_of_another_type_can_be_asked_for() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let retry = Retry::new(RetryPolicy::fixed(SECOND)).queue_type(QueueType::Quorum);
    let runner = client.consumer("q").retry(retry).handle(async || ());
    runner.run_until(tokio::time::sleep(SECOND)).await.unwrap();
    let topology = client.topology();
    for name in ["q.wait.1s", "q.parked"] {
        let queue = topology.queues().iter().find(|queue| queue.name() == name).unwrap();
        assert_eq!(queue.queue_type(), Some(QueueType::Quorum));
    }
}

/// The broker does this to what is published next, so that a step of moving fails.
type Fault = fn(&Broker);

#[tokio::test(start_paused = true)]
async fn a_step_that_fails_may_double_a_message_and_never_loses_it() {
    let faults: [(&str, Fault); 2] = [
        ("a nack", |broker| broker.faults().nack_publishes(1)),
        ("a cut", |broker| {
            broker.faults().cut_all_connections();
        }),
    ];
    for (what, fault) in faults {
        let broker = broker();
        let client = client_with(&broker, Queue::classic("q")).await;
        let publisher = client.publisher("").build().await.unwrap();
        publisher.publish("q", "job").await.unwrap();
        let broken = Arc::new(Mutex::new(Some((broker.clone(), fault))));
        let handler = move || {
            if let Some((broker, fault)) = broken.lock().unwrap().take() {
                fault(&broker);
            }
            async { Err::<(), _>("no") }
        };
        let policy = RetryPolicy::fixed(SECOND).max_retries(1);
        let runner = client.consumer("q").retry(policy).handle(handler);
        let summary = runner.run_until(tokio::time::sleep(HOUR)).await.unwrap();
        assert!(summary.parked >= 1, "after {what}: {summary:?}");
        assert_eq!(parked(&client).await.body(), "job", "after {what}");
    }
}

/// A death as a broker notes it.
fn death(queue: &'static str, reason: &'static str) -> Value<'static> {
    let fields = [("queue", queue.into()), ("reason", reason.into()), ("count", Value::I64(1))];
    let entry = Value::Table(Table::from_pairs(fields).unwrap());
    Value::Array(Array::from_values([entry]).unwrap())
}

#[tokio::test(start_paused = true)]
async fn what_died_in_its_queue_before_is_tried_again_like_any_other() {
    for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
        let broker = Broker::builder().profile(profile).start().unwrap();
        let client = client_with(&broker, Queue::classic("q")).await;
        let publisher = client.publisher("").build().await.unwrap();
        for reason in ["expired", "rejected"] {
            let message = Message::new("job").header("x-death", death("q", reason));
            publisher.publish("q", message).await.unwrap();
            let seen = run(&client, RetryPolicy::fixed(SECOND).max_retries(3), 99, 4).await;
            assert_eq!(seen.len(), 4, "{profile:?}, {reason}");
            parked(&client).await.ack().unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_moved_for_long_is_not_given_back_until_the_broker_drops_it() {
    // This version counts whatever comes back to a quorum queue.
    let broker = Broker::builder().profile(Profile::RabbitMq3_10).start().unwrap();
    let queue = Queue::quorum("q").argument("x-delivery-limit", 20);
    let client = client_with(&broker, queue).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("q", "job").await.unwrap();
    broker.faults().refuse_declares(usize::MAX);
    let handler =
        |Attempt(attempt): Attempt| async move { if attempt > 1 { Ok(()) } else { Err("no") } };
    let stop = async {
        tokio::time::sleep(100 * SECOND).await;
        broker.faults().refuse_declares(0);
        tokio::time::sleep(100 * SECOND).await;
    };
    let summary = client.consumer("q").handle(handler).run_until(stop).await.unwrap();
    assert_eq!((summary.retried, summary.handled), (1, 1), "{summary:?}");
}

#[tokio::test(start_paused = true)]
async fn a_rule_that_panics_is_passed_over() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("q", "job").await.unwrap();
    let policy = RetryPolicy::fixed(SECOND).max_retries(2).rule(|_| panic!("a bad rule"));
    let seen = run(&client, policy, 99, 3).await;
    assert_eq!(seen.len(), 3);
    assert_eq!(parked(&client).await.body(), "job");
}

#[tokio::test(start_paused = true)]
async fn waits_of_less_than_a_millisecond_have_a_queue_of_one() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let policy = RetryPolicy::fixed(Duration::from_micros(100)).max_retries(2);
    let runner = client.consumer("q").retry(policy).handle(async || {});
    runner.run_until(tokio::time::sleep(SECOND)).await.unwrap();
    let topology = client.topology();
    let mut names: Vec<_> = topology.queues().iter().map(Queue::name).collect();
    names.sort_unstable();
    assert_eq!(names, ["q", "q.parked", "q.wait.1ms"]);
}

#[tokio::test(start_paused = true)]
async fn what_the_broker_delivers_again_anyway_is_not_doubled_by_moving_it() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    for _ in 0..20 {
        publisher.publish("q", "job").await.unwrap();
    }
    let is_cut = Arc::new(Mutex::new(false));
    let breaking = broker.clone();
    let handler = move || {
        if !std::mem::replace(&mut *is_cut.lock().unwrap(), true) {
            breaking.faults().cut_all_connections();
        }
        async {
            // By then the connection is known to be gone.
            tokio::time::sleep(SECOND).await;
            Err::<(), _>("no")
        }
    };
    let policy = RetryPolicy::fixed(SECOND).max_retries(2);
    let runner = client.consumer("q").workers(8).retry(policy).handle(handler);
    let summary = runner.run_until(tokio::time::sleep(HOUR)).await.unwrap();
    assert_eq!((summary.retried, summary.parked), (40, 20), "{summary:?}");
}

/// A classic wait queue may lose a message when a node is killed, whatever the work queue is.
#[tokio::test(start_paused = true)]
async fn failed_messages_wait_in_quorum_queues_that_dead_letter_at_least_once() {
    for declared_by_this_client in [true, false] {
        let broker = broker();
        let owner = client_with(&broker, Queue::classic("q")).await;
        let client = if declared_by_this_client { owner.clone() } else { client_of(&broker).await };
        owner.publisher("").build().await.unwrap().publish("q", "job").await.unwrap();
        run(&client, RetryPolicy::default(), 2, 2).await;

        let snapshot = broker.snapshot();
        let host = snapshot.virtual_host("/").unwrap();
        let waiting = host.queues.iter().filter(|queue| queue.name.starts_with("q.wait"));
        let strategies = waiting.map(|queue| {
            assert_eq!(queue.kind, "quorum", "{}", queue.name);
            queue.arguments.get("x-dead-letter-strategy")
        });
        let strategies: Vec<_> = strategies.collect();
        assert_eq!(strategies, vec![Some("at-least-once".into()); 10]);
        assert_eq!(host.queue("q.parked").unwrap().kind, "quorum");
    }
}

/// With a classic wait queue the broker would drop it.
#[tokio::test(start_paused = true)]
async fn a_failed_message_whose_queue_is_full_comes_back_when_there_is_room() {
    for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
        let broker = Broker::builder().profile(profile).start().unwrap();
        let full = Queue::classic("q").max_length(1).argument("x-overflow", "reject-publish");
        let client = client_with(&broker, full).await;
        let publisher = client.publisher("").build().await.unwrap();
        publisher.publish("q", "job").await.unwrap();
        let waits = async {
            while depth(&broker, "q.wait.1h") != Some(1) {
                tokio::time::sleep(SECOND).await;
            }
        };
        let consumer = client.consumer("q").retry(RetryPolicy::fixed(HOUR));
        consumer.handle(async || Err::<(), _>("not yet")).run_until(waits).await.unwrap();
        publisher.publish("q", "in its way").await.unwrap();
        tokio::time::sleep(HOUR).await;
        client.purge_queue("q").await.unwrap();
        tokio::time::sleep(200 * SECOND).await;
        assert_eq!(depth(&broker, "q"), Some(1), "{profile}");
    }
}
