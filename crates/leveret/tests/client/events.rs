//! Events on the embedded broker: time, faults, and what is left on the broker.

use std::time::Duration;

use leveret::amqp::Value;
use leveret::{Emit, ErrorKind, Message, Queue, Topology};
use leveret_broker::Broker;

use crate::{broker, client_of, client_with, depth, soon};

/// The queues that the broker has.
fn queues(broker: &Broker) -> usize {
    broker.snapshot().virtual_host("/").map_or(0, |vhost| vhost.queues.len())
}

#[tokio::test(start_paused = true)]
async fn a_queue_of_one_who_never_listens_goes_after_five_minutes() {
    let broker = broker();
    let client = client_of(&broker).await;
    let stock = client.events("stock");
    let listening = stock.listen(["#"]);
    listening.declare().await.unwrap();
    stock.publish("a", "1").await.unwrap();
    tokio::time::sleep(Duration::from_secs(299)).await;
    assert_eq!(queues(&broker), 1);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(queues(&broker), 0);
    drop(listening);
    assert!(client.topology().queues().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_declared_listener_keeps_what_comes_before_it_begins() {
    let broker = broker();
    let client = client_of(&broker).await;
    let stock = client.events("stock");
    let listening = stock.listen(["#"]);
    listening.declare().await.unwrap();
    stock.publish("a", "1").await.unwrap();
    let mut deliveries = listening.stream().await.unwrap();
    assert_eq!(soon("an event", deliveries.next()).await.unwrap().unwrap().body(), "1");
}

#[tokio::test(start_paused = true)]
async fn a_reconnect_does_not_bring_back_whom_nobody_listens_for() {
    let broker = broker();
    let client = client_of(&broker).await;
    let stock = client.events("stock");
    drop(stock.listen(["#"]).stream().await.unwrap());
    let mut deliveries = stock.listen(["#"]).stream().await.unwrap();
    broker.faults().cut_all_connections();
    let heard = async {
        loop {
            stock.publish("a", "1").await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::select! {
        delivery = soon("an event", deliveries.next()) => delivery.unwrap().unwrap().ack().unwrap(),
        () = heard => {}
    }
    assert_eq!(queues(&broker), 1);
}

#[tokio::test(start_paused = true)]
async fn several_subscribers_of_a_temporary_queue_share_it_until_the_last_has_gone() {
    let broker = broker();
    let client = client_of(&broker).await;
    let stock = client.events("stock");
    let publishing = async {
        while queues(&broker) == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        for _ in 0..10 {
            stock.publish("a", "1").await.unwrap();
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    let runner = stock.listen(["#"]).subscribers(3).handle(async |_: String| ());
    let summary = runner.run_until(publishing).await.unwrap();
    assert_eq!(summary.handled, 10);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(client.topology().queues().is_empty() && queues(&broker) == 0);
}

#[tokio::test(start_paused = true)]
async fn no_event_is_lost_when_connections_are_cut_while_publishing_and_handling() {
    let broker = broker();
    let client = client_of(&broker).await;
    let events = client.events("events");
    let second = events.subscribe("second", ["second.#"]);
    let first = events.subscribe("first", ["first.#"]).workers(4);
    first.declare().await.unwrap();
    second.declare().await.unwrap();
    let handler = async |body: String, emit: Emit| emit.publish("second.event", body).await;
    let publishing = async {
        for number in 0..200 {
            if number % 50 == 25 {
                broker.faults().cut_all_connections();
            }
            events.publish("first.event", number.to_string()).await.unwrap();
        }
        while depth(&broker, "second").is_none_or(|depth| depth < 200)
            || depth(&broker, "first") != Some(0)
        {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let running = first.handle(handler).run_until(soon("all events", publishing));
    running.await.unwrap();
    let mut deliveries = second.stream().await.unwrap();
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < 200 {
        let delivery = soon("an event", deliveries.next()).await.unwrap().unwrap();
        seen.insert(String::from_utf8_lossy(delivery.body()).into_owned());
        delivery.ack().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_that_dies_again_and_again_loses_no_event() {
    let broker = broker();
    let publisher = client_of(&broker).await;
    let stock = publisher.events("stock");
    stock.subscribe("app", ["#"]).declare().await.unwrap();
    stock.publish("a", "1").await.unwrap();
    // More often than RabbitMQ delivers by default before it drops a message.
    for _ in 0..30 {
        let client = client_of(&broker).await;
        let mut deliveries = client.events("stock").subscribe("app", ["#"]).stream().await.unwrap();
        let delivery = soon("the event", deliveries.next()).await.unwrap().unwrap();
        client.close().await;
        drop(delivery);
    }
    assert_eq!(depth(&broker, "app"), Some(1));
}

#[tokio::test(start_paused = true)]
async fn a_consumer_that_knows_no_events_cannot_emit_and_one_that_was_given_them_can() {
    let broker = broker();
    let client = client_with(&broker, Queue::quorum("jobs")).await;
    let events = client.events("events");
    events.subscribe("done", ["job.done"]).declare().await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let handler = async |emit: Emit| emit.publish("job.done", "").await;
    publisher.publish("jobs", Message::new("1").correlation_id("one")).await.unwrap();
    let a_while = || tokio::time::sleep(Duration::from_secs(30));
    let error = client.consumer("jobs").handle(handler).run_until(a_while()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("call .state(events)"), "{error}");
    let emitting = client.service("emitting").method("emit", handler);
    assert_eq!(emitting.declare().await.unwrap_err().kind(), ErrorKind::Invalid);
    emitting.state(events.clone()).declare().await.unwrap();
    let runner = client.consumer("jobs").state(events).handle(handler);
    assert_eq!(runner.run_until(a_while()).await.unwrap().handled, 1);
    let done = client.get("done", Default::default()).await.unwrap().expect("an event");
    assert_eq!(done.properties().correlation_id.unwrap(), "one");
}

#[tokio::test(start_paused = true)]
async fn a_group_is_an_id_of_255_bytes_at_most() {
    let broker = broker();
    let client = client_of(&broker).await;
    let events = client.events("events");
    events.subscribe("q", ["#"]).declare().await.unwrap();
    let group = events.group("g".repeat(255)).unwrap();
    group.publish("in", "").await.unwrap();
    events.publish("out", "").await.unwrap();
    let error = events.group("g".repeat(256)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let mut ids = Vec::new();
    for _ in 0..2 {
        let event = client.get("q", Default::default()).await.unwrap().expect("an event");
        ids.push(event.properties().correlation_id.map(|id| id.to_string().len()));
        event.ack().unwrap();
    }
    assert_eq!(ids, [Some(255), None]);
}

#[tokio::test(start_paused = true)]
async fn a_subscription_is_a_quorum_queue_that_drops_nothing() {
    let broker = broker();
    let client = client_of(&broker).await;
    client.events("stock").subscribe("app", ["IBM.#", "KO.#"]).declare().await.unwrap();
    let topology = client.topology();
    let arguments: Vec<_> = topology.queues()[0].arguments().collect();
    let limit = Value::from(1_000_000i64);
    assert_eq!(arguments, [("x-delivery-limit", &limit), ("x-queue-type", &"quorum".into())]);
    assert!(topology.exchanges()[0].is_durable());
    assert_eq!(topology.bindings().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_consumer_declares_what_it_was_told_to() {
    let broker = broker();
    let client = client_of(&broker).await;
    let topology = Topology::new().queue(Queue::quorum("q"));
    let mut deliveries = client.consumer("q").declaring(topology).stream().await.unwrap();
    client.publisher("").build().await.unwrap().publish("q", "1").await.unwrap();
    assert_eq!(soon("a message", deliveries.next()).await.unwrap().unwrap().body(), "1");
    let error = client.consumer("other").stream().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Missing);
}

#[tokio::test(start_paused = true)]
async fn a_question_is_gone_when_its_time_is_over() {
    let broker = broker();
    let client = client_of(&broker).await;
    let events = client.events("questions");
    // Somebody who is away.
    let queue = Queue::classic("away");
    events.subscribe_queue(queue, ["ask"]).declare().await.unwrap();
    let began = tokio::time::Instant::now();
    let within = Duration::from_secs(20);
    let asking = events.gather::<String>("ask", "anybody?").within(within);
    let looking = async {
        tokio::time::sleep(Duration::from_secs(19)).await;
        assert_eq!(depth(&broker, "away"), Some(1));
    };
    let (gathered, ()) = tokio::join!(asking, looking);
    assert!(gathered.unwrap().replies.is_empty());
    assert_eq!(began.elapsed().as_secs(), 20);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(depth(&broker, "away"), Some(0));
}

#[tokio::test(start_paused = true)]
async fn a_loss_while_gathering_is_told_and_the_next_question_is_answered() {
    let broker = broker();
    let client = client_of(&broker).await;
    let events = client.events("questions");
    let method = async |body: String| match body.as_str() {
        "wait" => std::future::pending().await,
        _ => body,
    };
    let service = events.respond("app", ["ask"], method).await.unwrap();
    let asking = async {
        let cutting = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            broker.faults().cut_all_connections();
        };
        let gather = async { events.gather::<String>("ask", "wait").await };
        let (lost, ()) = tokio::join!(gather, cutting);
        assert_eq!(lost.unwrap_err().kind(), ErrorKind::Lost);
        let gather = events.gather::<String>("ask", "again").within(Duration::from_secs(600));
        let mut answers = gather.stream().await.unwrap();
        assert_eq!(answers.next().await.unwrap().unwrap(), "again");
    };
    let service = service.drain(Duration::ZERO).run_until(soon("answers", asking));
    service.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_gathering_that_wants_nothing_and_a_key_that_is_a_pattern_do_not_wait() {
    let broker = broker();
    let client = client_of(&broker).await;
    let events = client.events("questions");
    events.subscribe("q", ["#"]).declare().await.unwrap();
    let began = tokio::time::Instant::now();
    let none = events.gather::<String>("ask", "").at_most(0).await.unwrap();
    assert!(none.replies.is_empty() && began.elapsed() < Duration::from_secs(1));
    let error = events.gather::<String>("ask.*", "").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[tokio::test(start_paused = true)]
async fn a_new_group_has_an_id_of_its_own() {
    let broker = broker();
    let client = client_of(&broker).await;
    let events = client.events("events");
    let (one, other) = (events.new_group(), events.new_group());
    let id = one.correlation_id().unwrap().to_string();
    assert!(id.len() == 36 && one.correlation_id() != other.correlation_id());
    events.subscribe("q", ["#"]).declare().await.unwrap();
    one.publish("a", "").await.unwrap();
    let event = client.get("q", Default::default()).await.unwrap().expect("an event");
    assert_eq!(event.properties().correlation_id.unwrap(), *id);
}
