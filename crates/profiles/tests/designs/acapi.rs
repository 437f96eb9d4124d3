use leveret::amqp::{Array, Table, Value};
use leveret::{
    Attempt, Exchange, Failure, Message, Payload, Queue, QueueType, RetryPolicy, Topology,
};
use leveret_profiles::Acapi;

use crate::embedded::{broker, client_of, depth};
use crate::*;

/// Steps 1 to 7 of "Configuration" in the document, for a queue `Q` and an interval of 30 s.
const DOCUMENT: &str = "
    exchange Q-retry fanout
    queue Q x-dead-letter-exchange=Q-retry
    exchange Q-retry-requeue fanout
    queue Q-retry x-dead-letter-exchange=Q-retry-requeue x-message-ttl=30000
    binding Q-retry -> Q-retry [#]
    binding Q-retry-requeue -> Q [#]
    exchange Q-error fanout
    queue Q-error
    binding Q-error -> Q-error [#]
";

#[test]
fn it_declares_what_the_document_says() {
    let profile = Acapi::new().interval(30 * SECOND);
    assert_eq!(lines(&profile.topology(Queue::new("Q")).unwrap()), listed(DOCUMENT));
    let topics = profile.clone().topic().topology(Queue::new("Q")).unwrap();
    assert_eq!(lines(&topics), listed(&DOCUMENT.replace("fanout", "topic")));
    let quorum = "
        exchange Q-retry fanout
        exchange Q-retry-requeue fanout
        exchange Q-error fanout
        queue Q x-dead-letter-exchange=Q-retry x-dead-letter-strategy=at-least-once x-delivery-limit=1000000 x-overflow=reject-publish x-queue-type=quorum
        queue Q-retry x-dead-letter-exchange=Q-retry-requeue x-dead-letter-strategy=at-least-once x-message-ttl=30000 x-overflow=reject-publish x-queue-type=quorum
        queue Q-error x-delivery-limit=1000000000 x-queue-type=quorum
        binding Q-retry -> Q-retry [#]
        binding Q-retry-requeue -> Q [#]
        binding Q-error -> Q-error [#]
        binding orders -> Q [order.*]
    ";
    let queue = Queue::quorum("Q").bind("orders", "order.*");
    assert_eq!(lines(&profile.topology(queue).unwrap()), listed(quorum));
    let mixed = profile.queue_type(QueueType::Quorum).topology(Queue::classic("Q")).unwrap();
    assert!(
        lines(&mixed).contains("queue Q-error x-delivery-limit=1000000000 x-queue-type=quorum")
    );
}

#[tokio::test(start_paused = true)]
async fn a_consumer_of_a_queue_that_nobody_has_declared_declares_it_all() {
    let broker = broker();
    let client = client_of(&broker).await;
    consume(&client, "Q", Acapi::new().interval(30 * SECOND), SECOND, always).await;
    assert_eq!(lines(&client.topology()), listed(DOCUMENT));
}

/// A client with a queue `Q` behind a topic exchange `orders`, and a message in it.
async fn scene(
    profile: &Acapi,
    queue: Queue,
    message: Message,
) -> (leveret_broker::Broker, Client) {
    let broker = broker();
    let client = client_of(&broker).await;
    let exchange = Topology::new().exchange(Exchange::topic("orders"));
    let topology = profile.topology(queue.bind("orders", "order.*")).unwrap();
    client.apply(&exchange.and(topology)).await.unwrap();
    let publisher = client.publisher("orders").build().await.unwrap();
    publisher.publish("order.paid", message).await.unwrap();
    (broker, client)
}

#[tokio::test(start_paused = true)]
async fn it_waits_the_same_each_time_and_is_parked_after_its_retries() {
    let queues = [Queue::new("Q"), Queue::classic("Q"), Queue::quorum("Q")];
    for (profile, queue) in [Acapi::new(), Acapi::new().topic(), Acapi::new()].iter().zip(queues) {
        let profile = profile.clone().interval(30 * SECOND).max_retries(3);
        let message = Message::new("job").message_id("7").header("tenant", "acme");
        let (broker, client) = scene(&profile, queue, message).await;
        let (seen, summary) = consume(&client, "Q", profile, LATER, always).await;
        assert_eq!(times(&seen, 30 * SECOND), [(1, 0), (2, 1), (3, 2), (4, 3)]);
        assert_eq!((summary.failed, summary.retried, summary.parked), (4, 3, 1));
        for seen in &seen {
            let place =
                (seen.incoming.exchange().to_string(), seen.incoming.routing_key().to_string());
            assert_eq!(place, ("orders".to_owned(), "order.paid".to_owned()));
            assert_eq!(seen.incoming.header("tenant"), Some("acme".into()));
        }
        assert_eq!((depth(&broker, "Q"), depth(&broker, "Q-retry")), (Some(0), Some(0)));
        let parked = take(&client, "Q-error").await;
        assert_eq!(
            (parked.body().as_ref(), parked.routing_key().as_bytes()),
            (&b"job"[..], &b"order.paid"[..])
        );
        assert_eq!(parked.properties().message_id.unwrap(), "7");
        assert_eq!(text(&parked, "tenant"), "acme");
        check_stamp(
            &parked,
            &Stamp {
                attempts: 4,
                error: "not yet",
                kind: "early",
                reason: "exhausted",
                queue: "Q",
                exchange: "orders",
                routing_key: "order.paid",
                back: Some("Q-retry-requeue"),
            },
        );
        parked.ack().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn errors_decide_and_requeueing_does_not_count() {
    let profile = Acapi::new().interval(SECOND).max_retries(1);
    let (broker, client) = scene(&profile, Queue::quorum("Q"), Message::new("requeue")).await;
    let publisher = client.publisher("").build().await.unwrap();
    for body in ["permanent", "done", "retry"] {
        publisher.publish("Q", body).await.unwrap();
    }
    let requeued = std::sync::atomic::AtomicU32::new(0);
    let fate = move |seen: &Seen| match (seen.body.as_str(), seen.attempt) {
        ("permanent", _) => Err(Failure::permanent("never").kind("bad")),
        ("done", _) => Err(Failure::done("it was there already")),
        ("requeue", 1) if requeued.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 50 => {
            Err(Failure::requeue("not here"))
        }
        ("retry", 1) => Err(Failure::retry("not now")),
        _ => Ok(()),
    };
    let (seen, summary) = consume(&client, "Q", profile, LATER, fate).await;
    let count = |body: &str| seen.iter().filter(|seen| seen.body == body).count();
    assert_eq!(
        (count("requeue"), count("permanent"), count("done"), count("retry")),
        (51, 1, 1, 2)
    );
    assert_eq!((summary.handled, summary.retried, summary.parked), (3, 1, 1));
    assert_eq!(text(&take(&client, "Q-error").await, "x-leveret-reason"), "permanent");
    assert_eq!(depth(&broker, "Q"), Some(0));
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_decoded_is_parked_at_once() {
    let profile = Acapi::new();
    let (_broker, client) = scene(&profile, Queue::quorum("Q"), Message::new("{")).await;
    let handler = async |Payload(_): Payload<u32>, Attempt(_): Attempt| ();
    let runner = client.consumer("Q").retry(profile).handle(handler);
    let summary = runner.run_until(tokio::time::sleep(SECOND)).await.unwrap();
    assert_eq!((summary.failed, summary.parked), (1, 1));
    assert_eq!(text(&take(&client, "Q-error").await, "x-leveret-error-kind"), "undecodable");
}

#[tokio::test(start_paused = true)]
async fn a_parked_message_says_what_the_maxretry_handler_of_kicks_says() {
    let profile = Acapi::new().interval(SECOND).max_retries(2);
    let message = Message::new("job").message_id("7").header("tenant", "acme");
    let (_broker, client) = scene(&profile, Queue::new("Q"), message).await;
    consume(&client, "Q", profile, LATER, always).await;
    let info: serde_json::Value =
        serde_json::from_str(&text(&take(&client, "Q-error").await, "retry_info")).unwrap();
    assert_eq!(info["error"], "not yet");
    assert_eq!(info["error_class"], "early");
    assert_eq!(info["error_message"], "not yet");
    assert_eq!(info["num_attempts"], 3);
    let failed_at = info["failed_at"].as_str().unwrap();
    assert!(failed_at.len() == 20 && failed_at.ends_with('Z') && &failed_at[10..11] == "T");
    assert_eq!(info["properties"]["message_id"], "7");
    assert_eq!(info["properties"]["headers"]["tenant"], "acme");
    let deaths = info["properties"]["headers"]["x-death"].as_array().unwrap();
    let rejected = deaths.iter().find(|death| death["queue"] == "Q").unwrap();
    assert_eq!((&rejected["reason"], &rejected["count"]), (&"rejected".into(), &2.into()));
}

/// What Kicks publishes to the error exchange when it gives a message up; somebody has moved it back to its queue.
fn given_up_by_kicks() -> Message {
    let info = r#"{"error":"boom","num_attempts":6,"failed_at":"2024-05-01T10:00:00+02:00",
        "properties":{"content_type":"application/octet-stream","delivery_mode":2,"priority":0,
        "headers":{"x-death":[{"count":5,"reason":"rejected","queue":"Q","time":"2024-05-01 09:55:00 +0200",
        "exchange":"orders","routing-keys":["order.paid"]}]}},
        "error_class":"RuntimeError","error_message":"boom","backtrace":["worker.rb:7:in `work'"]}"#;
    Message::new("job").header("retry_info", info)
}

#[tokio::test(start_paused = true)]
async fn what_kicks_gave_up_begins_anew_and_keeps_its_story() {
    let profile = Acapi::new().interval(SECOND).max_retries(1);
    let (_broker, client) = scene(&profile, Queue::new("Q"), given_up_by_kicks()).await;
    let (seen, _) = consume(&client, "Q", profile.clone(), LATER, always).await;
    assert_eq!(seen.len(), 2);
    let parked = take(&client, "Q-error").await;
    let info = |parked: &Delivery| {
        serde_json::from_str::<serde_json::Value>(&text(parked, "retry_info")).unwrap()
    };
    let list = info(&parked);
    assert_eq!(list.as_array().unwrap().len(), 2);
    assert_eq!((&list[0]["error"], &list[0]["num_attempts"]), (&"not yet".into(), &2.into()));
    assert_eq!((&list[1]["error"], &list[1]["num_attempts"]), (&"boom".into(), &6.into()));
    assert_eq!(list[0]["properties"]["headers"].get("retry_info"), None, "no nesting");
    // And once more: the list grows at its front.
    let again = Message::new("job").header("retry_info", list.to_string());
    let publisher = client.publisher("orders").build().await.unwrap();
    publisher.publish("order.paid", again).await.unwrap();
    parked.ack().unwrap();
    consume(&client, "Q", profile, LATER, always).await;
    assert_eq!(info(&take(&client, "Q-error").await).as_array().unwrap().len(), 3);
}

/// The story that a broker tells of a message that Sneakers' workers have rejected.
fn rejected_by_sneakers(count: Option<i64>, entries: usize) -> Message {
    let mut deaths = Array::new();
    for (queue, reason) in [("Q-retry", "expired"), ("Q", "rejected")] {
        for _ in 0..entries {
            let mut death = Table::new();
            death.insert("queue", queue).unwrap();
            death.insert("reason", reason).unwrap();
            death.insert("time", Value::Timestamp(1_700_000_000)).unwrap();
            death.insert("exchange", "orders").unwrap();
            let keys = Array::from_values([Value::from("order.paid")]).unwrap();
            death.insert("routing-keys", Value::Array(keys)).unwrap();
            if let Some(count) = count {
                death.insert("count", count).unwrap();
            }
            deaths.push(Value::Table(death)).unwrap();
        }
    }
    Message::new("job").header("x-death", Value::Array(deaths))
}

#[tokio::test(start_paused = true)]
async fn what_sneakers_has_rejected_counts() {
    // With counts, and as brokers before 3.5 have it.
    for (message, attempt) in
        [(rejected_by_sneakers(Some(3), 1), 4), (rejected_by_sneakers(None, 2), 3)]
    {
        let profile = Acapi::new().interval(SECOND).max_retries(attempt - 1);
        let (_broker, client) = scene(&profile, Queue::new("Q"), message).await;
        let (seen, summary) = consume(&client, "Q", profile, LATER, always).await;
        assert_eq!((seen.len(), seen[0].attempt, summary.parked), (1, attempt, 1));
        let parked = take(&client, "Q-error").await;
        assert_eq!(number(&parked, "x-leveret-attempts"), i64::from(attempt));
        assert_eq!(text(&parked, "x-leveret-first-failure"), "2023-11-14T22:13:20Z");
    }
}

#[tokio::test(start_paused = true)]
async fn the_age_of_a_message_is_counted_from_its_first_rejection() {
    let policy = RetryPolicy::fixed(SECOND).max_age(HOUR);
    let profile = Acapi::new().policy(policy);
    // It was rejected in 2023.
    let (_broker, client) =
        scene(&profile, Queue::new("Q"), rejected_by_sneakers(Some(1), 1)).await;
    let (seen, summary) = consume(&client, "Q", profile, LATER, always).await;
    assert_eq!((seen.len(), summary.parked), (1, 1));
    assert_eq!(text(&take(&client, "Q-error").await, "x-leveret-reason"), "too-old");
}

#[tokio::test(start_paused = true)]
async fn a_parked_message_that_is_published_again_begins_anew() {
    let profile = Acapi::new().interval(SECOND).max_retries(1);
    let (_broker, client) = scene(&profile, Queue::quorum("Q"), Message::new("job")).await;
    consume(&client, "Q", profile.clone(), LATER, always).await;
    let parked = take(&client, "Q-error").await;
    let back = text(&parked, "x-leveret-return");
    let again = Message::with_properties("job", parked.properties().into_owned());
    let publisher = client.publisher(back).build().await.unwrap();
    publisher.publish(&parked.routing_key().to_string(), again).await.unwrap();
    parked.ack().unwrap();
    let (seen, _) = consume(&client, "Q", profile, LATER, always).await;
    assert_eq!(times(&seen, SECOND), [(1, 0), (2, 1)]);
}

#[tokio::test(start_paused = true)]
async fn a_parking_that_fails_leaves_the_message_in_its_queue() {
    let profile = Acapi::new().max_retries(0);
    let (broker, client) = scene(&profile, Queue::quorum("Q"), Message::new("job")).await;
    let faults = broker.clone();
    let fate = move |_: &Seen| {
        faults.faults().nack_publishes(1);
        Err(Failure::retry("no"))
    };
    let (seen, summary) = consume(&client, "Q", profile, SECOND / 2, fate).await;
    assert_eq!((seen.len(), summary.parked), (1, 0));
    assert_eq!((depth(&broker, "Q"), depth(&broker, "Q-error")), (Some(1), Some(0)));
}

/// Queues of a deployment that has them with the arguments of the design alone, or by an earlier version.
#[tokio::test(start_paused = true)]
async fn queues_that_exist_without_our_arguments_are_used_as_they_are() {
    let broker = broker();
    let client = client_of(&broker).await;
    let plain = Acapi::new().plain_arguments();
    client.apply(&plain.topology(Queue::quorum("Q")).unwrap()).await.unwrap();
    client.publisher("").build().await.unwrap().publish("Q", "job").await.unwrap();
    let never = |_: &Seen| Err(Failure::permanent("never"));
    let (_, summary) = consume(&client, "Q", Acapi::new(), LATER, never).await;
    assert_eq!((summary.parked, depth(&broker, "Q-error")), (1, Some(1)));
}
