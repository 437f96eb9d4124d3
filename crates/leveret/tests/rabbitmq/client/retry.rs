use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leveret::amqp::{Array, DeleteQueue, GetOptions, Properties, Table, Value};
use leveret::{
    Attempt, Client, ClientEvent, Delivery, Exchange, Failure, Incoming, Message, Queue, Retry,
    RetryPolicy, Topology,
};
use leveret_testkit::rabbitmq::Version;
use leveret_testkit::{eventually, rabbitmq};
use tokio::sync::mpsc;

use crate::support::client::{
    CONSUMING, PUBLISHING, SOON, client, client_with, cut, publisher, soon, until_depth,
    until_event,
};
use crate::support::plan::Planned;

const SHORT: Duration = Duration::from_millis(150);

fn types() -> [Queue; 2] {
    [Queue::classic("q"), Queue::quorum("q")]
}

/// The only message of a queue, as soon as it is there.
async fn the_message(client: &Client, queue: &str) -> Delivery {
    let found = async {
        loop {
            if let Ok(Some(message)) = client.get(queue, GetOptions::default()).await {
                return message;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon("a message", found).await
}

/// What a message may have, in the order in which RabbitMQ 4 keeps headers.
fn properties() -> Properties<'static> {
    let text = |text: &'static str| Some(text.try_into().unwrap());
    let copies = Array::from_values([Value::from("other")]).unwrap();
    let headers = [("CC", Value::Array(copies)), ("n", 5.into()), ("tenant", "acme".into())];
    Properties {
        content_type: text("application/json"),
        content_encoding: text("gzip"),
        headers: Some(Table::from_pairs(headers).unwrap()),
        delivery_mode: Some(2),
        priority: Some(3),
        correlation_id: text("c"),
        reply_to: text("r"),
        expiration: text("3000000"),
        message_id: text("m"),
        timestamp: Some(7),
        kind: text("order"),
        user_id: text("guest"),
        app_id: text("shop"),
        cluster_id: text("x"),
    }
}

/// Without what was added on the way.
fn own(properties: &Properties<'_>) -> Properties<'static> {
    let mut own = properties.clone().into_owned();
    let headers = own.headers.take().unwrap_or_default();
    let mut kept = Table::new();
    for (name, value) in headers.iter() {
        let text = name.to_str_lossy();
        if !text.starts_with("x-") && !text.starts_with("leveret-") {
            kept.insert(text.as_ref(), value).unwrap();
        }
    }
    own.headers = Some(kept);
    own
}

#[tokio::test]
async fn a_failed_message_comes_again_with_all_it_had_and_is_parked_in_the_end() {
    for queue in types() {
        let vhost = rabbitmq::vhost().await;
        let client = client(&vhost).await;
        let topology = Topology::new()
            .exchange(Exchange::topic("orders"))
            .queue(queue.bind("orders", "order.#"))
            .queue(Queue::classic("other").bind("orders", "other"));
        client.apply(&topology).await.unwrap();
        let mut events = client.watch();
        let publisher = soon("a publisher", client.publisher("orders").build()).await.unwrap();
        // A wait queue would let the message expire, so its time goes into a header.
        let moved = Properties { expiration: None, ..properties() };
        let message = Message::with_properties("job", properties());
        soon("an outcome", publisher.publish("order.paid", message)).await.unwrap();
        until_depth(&client, "other", 1).await;
        let (sender, mut seen) = mpsc::channel(10);
        let handler = move |incoming: Incoming, Attempt(attempt): Attempt| {
            let sender = sender.clone();
            async move {
                sender.send((incoming, attempt)).await.unwrap();
                Err::<(), _>("no")
            }
        };
        let policy = RetryPolicy::fixed(SHORT).max_retries(2);
        let stop = async {
            for expected in 1..=3 {
                let (incoming, attempt) = soon("an attempt", seen.recv()).await.unwrap();
                assert_eq!(attempt, expected);
                if attempt == 1 {
                    assert_eq!(own(&incoming.properties()), properties());
                } else {
                    assert_eq!(own(&incoming.properties()), moved);
                    let expiration = incoming.header("x-leveret-expiration").unwrap();
                    assert_eq!(expiration.as_str(), Some("3000000"));
                }
                assert_eq!(incoming.routing_key(), "order.paid");
                assert_eq!(incoming.exchange(), "orders");
            }
            until_depth(&client, "q.parked", 1).await;
        };
        let runner = client.consumer("q").retry(policy).handle(handler);
        let summary = soon("the end", runner.run_until(stop)).await.unwrap();
        assert_eq!((summary.retried, summary.parked), (2, 1));
        until_depth(&client, "other", 1).await;
        let parked = the_message(&client, "q.parked").await;
        assert_eq!(parked.body(), "job");
        assert_eq!(own(&parked.properties()), moved);
        assert_eq!(parked.routing_key(), "order.paid");
        let text = |name: &str| {
            let value = parked.header(name).unwrap_or_else(|| panic!("no header {name}"));
            value.as_str().expect("text").to_owned()
        };
        assert_eq!(text("x-leveret-attempts"), "3");
        assert_eq!(text("x-leveret-error"), "no");
        assert_eq!(text("x-leveret-error-kind"), "error");
        assert_eq!(text("x-leveret-reason"), "exhausted");
        assert_eq!(text("x-leveret-queue"), "q");
        assert_eq!(text("x-leveret-exchange"), "orders");
        assert_eq!(text("x-leveret-routing-key"), "order.paid");
        for time in ["x-leveret-first-failure", "x-leveret-last-failure"] {
            assert!(text(time).as_str() > "2023-11-14T22:13:20Z", "{time}");
        }
        let history = parked.header("x-leveret-history").unwrap().into_owned();
        assert_eq!(history.as_array().unwrap().iter().count(), 3);
        parked.ack().unwrap();
        let is_parked = |event: &ClientEvent| matches!(event, ClientEvent::Parked { queue, .. } if queue == "q");
        until_event(&mut events, "the parked message", is_parked).await;
    }
}

#[tokio::test]
async fn a_short_wait_does_not_stand_behind_a_long_one() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    let (sender, mut done) = mpsc::channel(10);
    let handler = move |body: String, Attempt(attempt): Attempt| {
        let sender = sender.clone();
        async move {
            match (body.as_str(), attempt) {
                ("long", 1) => Err(Failure::retry_after(Duration::from_secs(3600), "busy")),
                ("short", 1) => Err(Failure::retry_after(Duration::from_secs(1), "busy")),
                _ => {
                    sender.send(body).await.unwrap();
                    Ok(())
                }
            }
        }
    };
    for body in ["long", "short"] {
        soon("an outcome", publisher.publish("q", body)).await.unwrap();
    }
    let stop = async { assert_eq!(soon("the short one", done.recv()).await.unwrap(), "short") };
    let runner = client.consumer("q").retry(RetryPolicy::default()).handle(handler);
    soon("the end", runner.run_until(stop)).await.unwrap();
    until_depth(&client, "q.wait.1h", 1).await;
}

#[tokio::test]
async fn what_waits_for_a_queue_that_is_gone_is_parked() {
    let waits_in_vain = async |queue: Queue| {
        let vhost = rabbitmq::vhost().await;
        let client = client_with(&vhost, queue).await;
        let publisher = publisher(&client).await;
        soon("an outcome", publisher.publish("q", "job")).await.unwrap();
        // Long enough for the queue to be deleted before it is over.
        let policy = RetryPolicy::fixed(Duration::from_secs(8));
        let runner = client.consumer("q").retry(policy).handle(async || Err::<(), _>("no"));
        let stop = until_depth(&client, "q.wait.8s", 1);
        soon("the end", runner.run_until(stop)).await.unwrap();
        client.delete_queue("q", Default::default()).await.unwrap();
        let parked = the_message(&client, "q.parked").await;
        assert_eq!(parked.body(), "job");
        parked.ack().unwrap();
    };
    let [classic, quorum] = types();
    tokio::join!(waits_in_vain(classic), waits_in_vain(quorum));
}

/// The broker refuses a name that is not the publisher's own, and closes the channel.
#[tokio::test]
async fn what_was_published_by_somebody_else_can_be_tried_again() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    if vhost.broker().is_embedded() {
        return;
    }
    let body = serde_json::json!({ "password": "elf", "tags": "" });
    let management = vhost.broker().management();
    management.put(&["users", "rudolf"], body).await.unwrap();
    let allowed = serde_json::json!({ "configure": ".*", "write": ".*", "read": ".*" });
    management.put(&["permissions", vhost.name(), "rudolf"], allowed).await.unwrap();
    let url = vhost.url().replacen("guest:guest@", "rudolf:elf@", 1);
    let rudolf = soon("a client", Client::connect(url)).await.unwrap();
    let user_id = Some("rudolf".try_into().unwrap());
    let message = Message::with_properties("job", Properties { user_id, ..Properties::default() });
    soon("an outcome", publisher(&rudolf).await.publish("q", message)).await.unwrap();
    let policy = RetryPolicy::fixed(SHORT).max_retries(1);
    let runner = client.consumer("q").retry(policy).handle(async || Err::<(), _>("no"));
    let stop = async {
        eventually(SOON, "a parked message", async || {
            client.inspect_queue("q.parked").await.is_ok_and(|queue| queue.messages == 1)
        })
        .await;
    };
    soon("the end", runner.run_until(stop)).await.unwrap();
    let parked = the_message(&client, "q.parked").await;
    assert_eq!(parked.properties().user_id, None);
    assert_eq!(parked.header("x-leveret-user-id").unwrap().as_str(), Some("rudolf"));
    parked.ack().unwrap();
    management.delete(&["users", "rudolf"]).await.unwrap();
}

#[tokio::test]
async fn a_message_whose_headers_leave_no_room_is_parked_as_it_is() {
    let vhost = rabbitmq::vhost().await;
    let url = format!("{}?frame_max=8192", vhost.url());
    let client = soon("a client", Client::connect(url)).await.unwrap();
    client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let publisher = publisher(&client).await;
    let large = Message::new("large").header("large", "x".repeat(7600));
    let full = Message::new("full").header("full", "x".repeat(8120));
    for message in [large, full] {
        soon("an outcome", publisher.publish("q", message)).await.unwrap();
    }
    let policy = RetryPolicy::fixed(SHORT).max_retries(1);
    let error = "y".repeat(5000);
    let handler = move || {
        let error = error.clone();
        async move { Err::<(), _>(error) }
    };
    let runner = client.consumer("q").retry(policy).handle(handler);
    let stop = until_depth_of_a_queue_to_come(&client, "q.parked", 2);
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!(summary.parked, 2, "{summary:?}");
}

async fn until_depth_of_a_queue_to_come(client: &Client, queue: &str, messages: u32) {
    eventually(SOON, format!("{messages} messages in {queue}"), async || {
        client.inspect_queue(queue).await.is_ok_and(|found| found.messages == messages)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_end_where_their_plans_say_while_connections_are_cut() {
    for (queue, messages) in [(Queue::classic("q"), 800), (Queue::quorum("q"), 800)] {
        let vhost = rabbitmq::vhost().await;
        let client = client(&vhost).await;
        let planned = Planned::begin(client.clone(), queue, messages, SHORT).await;
        if !vhost.broker().is_embedded() {
            planned.progress(20).await;
            cut(&vhost, &client, CONSUMING).await;
            planned.progress(40).await;
            cut(&vhost, &client, PUBLISHING).await;
        }
        planned.end("q").await;
    }
}

/// What a message may say of its deaths that no broker says, or not of one that is on its way.
fn odd_deaths() -> Vec<Value<'static>> {
    let entry = |count: Value<'static>, queue: &'static str| {
        let fields = [("queue", queue.into()), ("reason", "expired".into()), ("count", count)];
        Value::Table(Table::from_pairs(fields).unwrap())
    };
    let list = |entry: Value<'static>| Value::Array(Array::from_values([entry]).unwrap());
    vec![
        list(entry(Value::I64(1), "q")),
        list(entry("many".into(), "q.wait.150ms")),
        list(entry(Value::I64(i64::MAX), "q.wait.150ms")),
        list("nothing".into()),
        list(Value::Table(Table::new())),
        "nothing".into(),
    ]
}

#[tokio::test]
async fn whatever_a_message_says_of_its_deaths_it_is_tried_again_and_parked() {
    for queue in types() {
        let vhost = rabbitmq::vhost().await;
        let client = client_with(&vhost, queue).await;
        let publisher = publisher(&client).await;
        let all = odd_deaths();
        for deaths in &all {
            let message = Message::new("job").header("x-death", deaths.clone());
            publisher.publish("q", message).await.unwrap();
        }
        let policy = RetryPolicy::fixed(SHORT).max_retries(1);
        let runner = client.consumer("q").retry(policy).handle(async || Err::<(), _>("no"));
        let stop = until_depth(&client, "q.parked", all.len() as u32);
        let summary = runner.run_until(stop).await.unwrap();
        assert_eq!(summary.parked, all.len() as u64, "{summary:?}");
    }
}

#[tokio::test]
async fn what_cannot_be_moved_for_long_is_not_given_back_until_the_broker_drops_it() {
    let vhost = rabbitmq::vhost().await;
    let queue = Queue::quorum("q").argument("x-delivery-limit", 10);
    let client = client_with(&vhost, queue).await;
    // The parking lot's exchange is a fanout.
    let in_the_way = Topology::new().exchange(Exchange::direct("q.parked"));
    let other = crate::support::client::client(&vhost).await;
    other.apply(&in_the_way).await.unwrap();
    publisher(&client).await.publish("q", "job").await.unwrap();
    let (sender, mut succeeded) = mpsc::channel(10);
    let handler = move |Attempt(attempt): Attempt| {
        let sender = sender.clone();
        async move {
            if attempt == 1 {
                return Err("no");
            }
            sender.send(()).await.unwrap();
            Ok(())
        }
    };
    let stop = async {
        // Once a second it would be given back.
        tokio::time::sleep(Duration::from_secs(13)).await;
        other.delete_exchange("q.parked", Default::default()).await.unwrap();
        soon("the message", succeeded.recv()).await;
    };
    let summary = client.consumer("q").handle(handler).run_until(stop).await.unwrap();
    assert_eq!((summary.retried, summary.handled), (1, 1), "{summary:?}");
}

/// RabbitMQ 4.0 has a delivery limit of 20 for quorum queues that name none.
#[tokio::test]
async fn what_goes_back_to_its_queue_often_is_not_lost() {
    let requeue = || Failure::requeue("no");
    let retry = || Failure::retry("no");
    type Way = (Option<Retry>, fn() -> Failure);
    let ways: [Way; 2] =
        [(None, requeue), (Some(Retry::in_place(Duration::from_millis(1))), retry)];
    for (way, failure) in ways {
        let vhost = rabbitmq::vhost().await;
        let client = client(&vhost).await;
        let topology = Topology::new()
            .exchange(Exchange::direct("jobs"))
            .queue(Queue::quorum("q").bind("jobs", "new"));
        client.apply(&topology).await.unwrap();
        let publisher = soon("a publisher", client.publisher("jobs").build()).await.unwrap();
        soon("an outcome", publisher.publish("new", "job")).await.unwrap();
        let (sender, mut seen) = mpsc::channel(100);
        let handler = move |incoming: Incoming| {
            let sender = sender.clone();
            async move {
                let (answer, answered) = tokio::sync::oneshot::channel();
                sender.send((incoming.routing_key().to_string(), answer)).await.unwrap();
                if answered.await.unwrap() { Ok(()) } else { Err(failure()) }
            }
        };
        let stop = async {
            for n in 0..30 {
                let (key, answer) = soon("a delivery", seen.recv()).await.unwrap();
                assert_eq!(key, "new");
                answer.send(n == 29).unwrap();
            }
        };
        let mut consumer = client.consumer("q");
        if let Some(way) = way {
            consumer = consumer.retry(way);
        }
        let summary = soon("the end", consumer.handle(handler).run_until(stop)).await.unwrap();
        assert_eq!((summary.handled, summary.failed), (1, 29));
        until_depth(&client, "q", 0).await;
    }
}

/// A limit of which the consumer knows nothing: somebody else has declared the queue, or a policy says so.
#[tokio::test]
async fn what_is_requeued_is_not_lost_to_a_delivery_limit_of_zero_that_nobody_knows_of() {
    for is_policy in [false, true] {
        let vhost = rabbitmq::vhost().await;
        let queue = match is_policy {
            true => Queue::quorum("q"),
            false => Queue::quorum("q").delivery_limit(0),
        };
        if is_policy {
            if vhost.broker().is_embedded() {
                continue;
            }
            let definition = serde_json::json!({ "delivery-limit": 0 });
            let policy = serde_json::json!({ "pattern": "^q$", "definition": definition });
            let path = ["policies", vhost.name(), "limit"];
            vhost.broker().management().put(&path, policy).await.unwrap();
        }
        let other = client_with(&vhost, queue.clone()).await;
        type Way = (Option<Retry>, fn() -> Failure);
        let ways: [Way; 2] = [
            (None, || Failure::requeue("no")),
            (Some(Retry::in_place(Duration::from_millis(1))), || Failure::retry("no")),
        ];
        for (way, failure) in ways {
            // It knows the queue, but not its policy.
            let client = match is_policy {
                true => client_with(&vhost, queue.clone()).await,
                false => client(&vhost).await,
            };
            soon("an outcome", publisher(&other).await.publish("q", "job")).await.unwrap();
            let (sender, mut succeeded) = mpsc::channel(10);
            let failed = Arc::new(AtomicU32::new(0));
            let handler = move || {
                let (sender, fails) = (sender.clone(), failed.fetch_add(1, Ordering::Relaxed) < 5);
                async move {
                    if fails {
                        return Err(failure());
                    }
                    sender.send(()).await.unwrap();
                    Ok(())
                }
            };
            let mut consumer = client.consumer("q");
            if let Some(way) = way {
                consumer = consumer.retry(way);
            }
            let stop = soon("the message", succeeded.recv());
            let summary = consumer.handle(handler).run_until(stop).await.unwrap();
            assert_eq!((summary.handled, summary.failed), (1, 5), "{is_policy}");
            until_depth(&client, "q", 0).await;
        }
    }
}

/// Before 4.3 the broker counts it, and drops them.
#[tokio::test]
async fn from_4_3_on_a_consumer_that_is_stopped_loses_nothing_to_a_delivery_limit_of_zero() {
    if Version::under_test() != Version::V4_3 {
        return;
    }
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::quorum("q").delivery_limit(0)).await;
    let publisher = publisher(&client).await;
    for n in 0..50 {
        soon("an outcome", publisher.publish("q", n.to_string())).await.unwrap();
    }
    for _ in 0..3 {
        let (sender, mut begun) = mpsc::channel(100);
        let handler = move || {
            let sender = sender.clone();
            async move {
                sender.send(()).await.unwrap();
                std::future::pending::<()>().await;
            }
        };
        let consumer = client.consumer("q").prefetch(20).workers(4).drain(Duration::ZERO);
        let stop = async {
            for _ in 0..4 {
                soon("a delivery", begun.recv()).await.unwrap();
            }
        };
        let summary = consumer.handle(handler).run_until(stop).await.unwrap();
        assert_eq!(summary.abandoned, 4);
        until_depth(&client, "q", 50).await;
    }
}

/// Lets a message of one priority fail, and while that one waits, in this queue, one of another; and says which of them came
/// again first.
async fn first_again(first: Message, waits_in: &str, second: Message) -> String {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::quorum("q")).await;
    let publisher = publisher(&client).await;
    let (sender, mut seen) = mpsc::channel(10);
    let handler = move |body: String, Attempt(attempt): Attempt, incoming: Incoming| {
        let sender = sender.clone();
        async move {
            let priority = incoming.properties().priority;
            sender.send((body, attempt, priority)).await.unwrap();
            if attempt == 1 { Err("no") } else { Ok(()) }
        }
    };
    let mut again = Vec::new();
    let stop = async {
        soon("an outcome", publisher.publish("q", first)).await.unwrap();
        let (_, _, of_first) = soon("a delivery", seen.recv()).await.unwrap();
        until_depth(&client, waits_in, 1).await;
        // They wait in different queues: their times are to be apart.
        tokio::time::sleep(Duration::from_secs(2)).await;
        soon("an outcome", publisher.publish("q", second)).await.unwrap();
        while again.len() < 2 {
            let (body, attempt, priority) = soon("a delivery", seen.recv()).await.unwrap();
            if attempt > 1 {
                again.push(body);
            }
            if again == ["first"] {
                assert_eq!(priority, of_first, "it keeps its priority");
            }
        }
    };
    let policy = RetryPolicy::fixed(Duration::from_secs(5));
    client.consumer("q").retry(policy).handle(handler).run_until(stop).await.unwrap();
    again.swap_remove(0)
}

#[tokio::test]
async fn in_wait_queues_a_message_of_higher_priority_holds_up_nobody() {
    let (high, low) = (Message::new("second").priority(9), Message::new("first").priority(0));
    let again = tokio::join!(
        first_again(Message::new("first"), "q.wait.5s", high),
        first_again(low, "q.wait.5s.0", Message::new("second")),
    );
    assert_eq!((again.0.as_str(), again.1.as_str()), ("first", "first"));
}

#[tokio::test]
async fn failed_messages_of_a_queue_that_others_delete_and_declare_again_come_back_to_it() {
    for queue in types() {
        let vhost = rabbitmq::vhost().await;
        let theirs = client_with(&vhost, queue.clone()).await;
        let client = client(&vhost).await;
        let publisher = publisher(&client).await;
        let (sender, mut seen) = mpsc::channel(10);
        let handler = move |body: String, Attempt(attempt): Attempt| {
            let sender = sender.clone();
            async move {
                sender.send((body, attempt)).await.unwrap();
                if attempt == 1 { Err("not yet") } else { Ok(()) }
            }
        };
        let stop = async {
            let mut events = client.watch();
            soon("an outcome", publisher.publish("q", "before")).await.unwrap();
            let expect = [("before", 1), ("before", 2), ("after", 1), ("after", 2)];
            for (body, attempt) in expect {
                if (body, attempt) == ("after", 1) {
                    theirs.delete_queue("q", DeleteQueue::default()).await.unwrap();
                    // RabbitMQ 3.10 does not cancel the consumer of a quorum queue that is back at once.
                    let loses =
                        |event: &ClientEvent| matches!(event, ClientEvent::ConsumerLost { .. });
                    until_event(&mut events, "the loss of the consumer", loses).await;
                    theirs.apply(&Topology::new().queue(queue.clone())).await.unwrap();
                    let resumes =
                        |event: &ClientEvent| matches!(event, ClientEvent::ConsumerResumed { .. });
                    until_event(&mut events, "a consumer of the new queue", resumes).await;
                    soon("an outcome", publisher.publish("q", "after")).await.unwrap();
                }
                let attempted = soon("an attempt", seen.recv()).await.unwrap();
                assert_eq!(attempted, (body.to_owned(), attempt));
            }
        };
        let runner = client.consumer("q").retry(RetryPolicy::fixed(SHORT)).handle(handler);
        let summary = soon("the end", runner.run_until(stop)).await.unwrap();
        assert_eq!((summary.retried, summary.parked), (2, 0));
    }
}
