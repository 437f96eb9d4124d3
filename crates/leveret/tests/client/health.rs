use std::time::Duration;

use bytes::Bytes;
use leveret::amqp::{self, Channel, Confirm, DeleteQueue, Publish};
use leveret::{Client, ClientEvent, Deliveries, Error, ErrorKind, Health, Next, Queue, Replies};
use leveret_broker::Broker;

use crate::{broker, builder_of, client_with, soon};

const BRIEFLY: Duration = Duration::from_secs(2);

async fn until(client: &Client, what: &str, is_so: impl Fn(&Health) -> bool) {
    soon(what, async {
        while !is_so(&client.health()) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

/// Has the broker close a channel.
async fn spoil(channel: &Channel<Confirm>) {
    let nowhere = Publish { exchange: "missing", routing_key: "q", ..Publish::default() };
    drop(channel.publish(&nowhere).await.unwrap());
    let _ = soon("the end of a channel", channel.ended()).await;
}

#[tokio::test(start_paused = true)]
async fn a_pool_tells_who_has_its_channels_and_who_waits() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let pool = client.channel_pool().size(2).build().await.unwrap();
    let numbers = || {
        let pool = &client.health().pools[0];
        (pool.size, pool.open, pool.idle, pool.borrowed, pool.waiting)
    };
    assert_eq!(numbers(), (2, 2, 2, 0, 0));
    let one = pool.borrow().await.unwrap();
    let two = pool.borrow().await.unwrap();
    let third = tokio::spawn({
        let pool = pool.clone();
        async move { pool.borrow().await.map(drop) }
    });
    until(&client, "a borrower that waits", |health| health.pools[0].waiting == 1).await;
    assert_eq!(numbers(), (2, 2, 0, 2, 1));
    spoil(&two).await;
    // What was given back last is lent first.
    drop(two);
    drop(one);
    soon("a channel", third).await.unwrap().unwrap();
    assert!(client.health().is_healthy());
    // The one that the broker has closed is opened again by itself.
    until(&client, "both channels", |_| numbers() == (2, 2, 2, 0, 0)).await;
    drop(pool);
    assert!(client.health().pools.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_cannot_be_refilled_is_not_healthy() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let pool = client.channel_pool().size(1).timeout(BRIEFLY).build().await.unwrap();
    spoil(&pool.borrow().await.unwrap()).await;
    broker.faults().freeze();
    let error = soon("an answer", pool.borrow()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    let health = client.health();
    assert!(health.pools[0].error.is_some() && !health.is_healthy(), "{health:?}");
    broker.faults().thaw();
    soon("a channel", pool.borrow()).await.unwrap();
    assert!(client.health().is_healthy(), "{:?}", client.health());
}

#[tokio::test(start_paused = true)]
async fn a_publisher_tells_since_when_it_is_held_back() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    assert!(client.health().publishers[0].is_ready());
    broker.faults().freeze();
    broker.faults().cut_connections_named("test (publishing)");
    let ticket = publisher.send("q", "1").await.unwrap();
    let held_back = |health: &Health| health.publishers[0].held_back_since.is_some();
    until(&client, "the loss", held_back).await;
    let health = client.health();
    assert_eq!((&*health.publishers[0].exchange, health.publishers[0].unconfirmed), ("", 1));
    assert!(!health.is_healthy());
    broker.faults().thaw();
    soon("an outcome", ticket).await.unwrap();
    assert!(client.health().is_healthy(), "{:?}", client.health());
    drop(publisher);
    until(&client, "its end", |health| health.publishers.is_empty()).await;
}

/// A client whose publishing connection is blocked.
async fn blocked(broker: &Broker) -> (Client, leveret::Publisher) {
    let client = client_with(broker, Queue::classic("q")).await;
    let publisher = client.publisher("").timeout(BRIEFLY).build().await.unwrap();
    let mut events = client.watch();
    broker.faults().block("low on memory");
    // The broker tells a connection that it is blocked once that publishes.
    soon("an outcome", publisher.publish("q", "the last")).await.unwrap();
    assert!(matches!(soon("an event", events.next()).await, Some(ClientEvent::Blocked { .. })));
    (client, publisher)
}

#[track_caller]
fn says_why<T>(outcome: Result<T, Error>) {
    let Err(error) = outcome else { panic!("a broker that blocks takes nothing") };
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.blocked_by_broker(), Some("low on memory"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn what_waits_for_a_broker_that_blocks_says_so() {
    let broker = broker();
    let (client, publisher) = blocked(&broker).await;
    let health = client.health();
    assert_eq!(health.publishers[0].blocked.as_deref(), Some("low on memory"));
    assert!(health.publishers[0].held_back_since.is_some() && !health.is_healthy());
    says_why(soon("an outcome", publisher.publish("q", "2")).await);
    says_why(soon("an outcome", publisher.send("q", "3")).await);
    says_why(soon("an answer", client.publisher("").timeout(BRIEFLY).build()).await);
    says_why(soon("an answer", client.publisher("").timeout(BRIEFLY).build_unconfirmed()).await);
    says_why(soon("an answer", client.channel_pool().timeout(BRIEFLY).build()).await);
    broker.faults().unblock();
    soon("an outcome", publisher.publish("q", "4")).await.unwrap();
    until(&client, "health", Health::is_healthy).await;
}

#[tokio::test(start_paused = true)]
async fn a_consumer_that_the_broker_has_forgotten_is_found_and_begins_anew() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let mut streams = [
        client.consumer("q").prefetch(1).stream().await.unwrap(),
        client.consumer("q").prefetch(1).stream().await.unwrap(),
    ];
    assert!(soon("a check", client.check_health()).await.is_healthy());
    assert_eq!(broker.faults().forget_consumers("/", "q"), 2);
    let publisher = client.publisher("").build().await.unwrap();
    for body in ["1", "2"] {
        soon("an outcome", publisher.publish("q", body)).await.unwrap();
    }
    for stream in &mut streams {
        assert!(matches!(stream.next_within(Duration::from_secs(1)).await, Next::TimedOut));
    }
    let health = soon("a check", client.check_health()).await;
    assert!(health.consumers.iter().all(|consumer| !consumer.is_live), "{health:?}");
    let mut kept = Vec::new();
    for stream in &mut streams {
        kept.push(soon("a delivery", stream.next()).await.unwrap().unwrap());
    }
    until(&client, "health", Health::is_healthy).await;
}

#[tokio::test(start_paused = true)]
async fn the_broker_is_asked_by_itself() {
    let broker = broker();
    let every = Duration::from_secs(5);
    let client = builder_of(&broker).check_every(every).connect().await.unwrap();
    client.apply(&leveret::Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    assert!(matches!(deliveries.next_within(2 * every).await, Next::TimedOut));
    broker.faults().forget_consumers("/", "q");
    client.publisher("").build().await.unwrap().publish("q", "1").await.unwrap();
    let delivery = soon("a delivery", deliveries.next()).await.unwrap().unwrap();
    assert!(!delivery.redelivered());
    delivery.ack().unwrap();
}

/// Has the broker forget the consumers of a queue, and waits until a message is delivered all the same.
async fn is_forgotten_and_found(broker: &Broker, client: &Client, deliveries: &mut Deliveries) {
    assert_eq!(broker.faults().forget_consumers("/", "q"), 1);
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("q", "1").await.unwrap();
    soon("a delivery", deliveries.next()).await.unwrap().unwrap().ack().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_consumer_that_is_forgotten_at_once_is_found_by_the_first_check() {
    let broker = broker();
    for every in [None, Some(Duration::from_secs(1)), Some(Duration::from_millis(1))] {
        let builder = Client::builder().broker(&broker);
        let builder = every.into_iter().fold(builder, leveret::ClientBuilder::check_every);
        let client = builder.connect().await.unwrap();
        client.apply(&leveret::Topology::new().queue(Queue::classic("q"))).await.unwrap();
        let mut deliveries = client.consumer("q").stream().await.unwrap();
        for _ in 0..3 {
            // Just long enough for the broker to have been asked once.
            tokio::time::sleep(Duration::from_millis(50)).await;
            is_forgotten_and_found(&broker, &client, &mut deliveries).await;
        }
        client.close().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_consumer_that_is_forgotten_right_after_a_reconnect_is_found() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    for _ in 0..3 {
        // The ack of the round before is there by then.
        tokio::time::sleep(Duration::from_secs(1)).await;
        broker.faults().cut_all_connections();
        assert!(matches!(deliveries.next_within(Duration::from_secs(1)).await, Next::TimedOut));
        is_forgotten_and_found(&broker, &client, &mut deliveries).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_check_finds_a_consumer_that_was_forgotten_before_any_other_check() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let _deliveries = client.consumer("q").stream().await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    broker.faults().forget_consumers("/", "q");
    let health = soon("a check", client.check_health()).await;
    assert!(!health.is_healthy(), "{health:?}");
}

/// Has the broker forget the one consumer of a queue, and another begin there before the broker is asked again.
async fn forgotten_and_joined(broker: &Broker, client: &Client) -> [Deliveries; 2] {
    let one_at_a_time = || client.consumer("q").prefetch(1);
    let forgotten = one_at_a_time().stream().await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(broker.faults().forget_consumers("/", "q"), 1);
    [forgotten, one_at_a_time().stream().await.unwrap()]
}

/// Each gets one of two messages, and all is well then.
async fn each_gets_one(client: &Client, [one, two]: &mut [Deliveries; 2]) {
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch([("q", "1"), ("q", "2")]).await.unwrap();
    let both = async { tokio::join!(one.next(), two.next()) };
    let (first, second) = soon("two deliveries", both).await;
    for delivery in [first, second] {
        delivery.unwrap().unwrap().ack().unwrap();
    }
    // A stream begins anew while it is read.
    tokio::select! {
        delivery = one.next() => panic!("{delivery:?}"),
        delivery = two.next() => panic!("{delivery:?}"),
        () = until(client, "health", Health::is_healthy) => {}
    }
    assert!(soon("a check", client.check_health()).await.is_healthy());
    assert_eq!(client.inspect_queue("q").await.unwrap().consumers, 2);
}

#[tokio::test(start_paused = true)]
async fn a_consumer_that_is_forgotten_before_another_one_begins_is_found() {
    let broker = broker();
    for queue in [Queue::classic("q"), Queue::quorum("q")] {
        let client = client_with(&broker, queue).await;
        let mut streams = forgotten_and_joined(&broker, &client).await;
        each_gets_one(&client, &mut streams).await;
        client.delete_queue("q", DeleteQueue::default()).await.unwrap();
        client.close().await;
    }
}

#[tokio::test(start_paused = true)]
async fn on_a_queue_of_others_it_is_found_once_both_have_had_a_delivery() {
    let broker = broker();
    let theirs = client_with(&broker, Queue::classic("q")).await;
    let publisher = theirs.publisher("").build().await.unwrap();
    let client = crate::client_of(&broker).await;
    let mut forgotten = client.consumer("q").prefetch(1).stream().await.unwrap();
    publisher.publish("q", "before").await.unwrap();
    soon("a delivery", forgotten.next()).await.unwrap().unwrap().ack().unwrap();
    assert_eq!(broker.faults().forget_consumers("/", "q"), 1);
    let mut other = client.consumer("q").prefetch(1).stream().await.unwrap();
    publisher.publish("q", "after").await.unwrap();
    soon("a delivery", other.next()).await.unwrap().unwrap().ack().unwrap();
    each_gets_one(&client, &mut [forgotten, other]).await;
}

#[tokio::test(start_paused = true)]
async fn a_consumer_that_the_broker_does_not_count_at_first_is_asked_about_again() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    // The first answer about it comes too late.
    broker.faults().delay_declares(1, Duration::from_secs(3600));
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    tokio::time::sleep(Duration::from_secs(10)).await;
    is_forgotten_and_found(&broker, &client, &mut deliveries).await;
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_does_not_answer_delays_no_other() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    client.apply(&leveret::Topology::new().queue(Queue::classic("another"))).await.unwrap();
    broker.faults().delay_declares(1, Duration::from_secs(3600));
    let _another = client.consumer("another").stream().await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    is_forgotten_and_found(&broker, &client, &mut deliveries).await;
}

/// A consumer of another program, which takes one message and keeps it.
async fn other_consumer(broker: &Broker) -> amqp::Consumer {
    let options = amqp::Options::default();
    let connection = amqp::Connection::open_over(broker.connect(), &options).await.unwrap();
    let channel = connection.open_channel().await.unwrap();
    let one_at_a_time = amqp::ConsumeOptions { prefetch: 1, ..Default::default() };
    channel.consume("q", one_at_a_time).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_consumer_that_is_forgotten_beside_those_of_other_programs_is_found() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    let mut other = other_consumer(&broker).await;
    assert!(soon("a check", client.check_health()).await.is_healthy());
    assert_eq!(broker.faults().forget_consumers("/", "q"), 2);
    drop(other);
    other = other_consumer(&broker).await;
    let publisher = client.publisher("").build().await.unwrap();
    for body in ["for the other one", "for whom there is room"] {
        publisher.publish("q", body).await.unwrap();
    }
    let kept = soon("a delivery", other.next()).await.unwrap().unwrap();
    let delivery = soon("a delivery", deliveries.next()).await.unwrap().unwrap();
    assert_eq!(delivery.body(), "for whom there is room");
    drop(kept);
}

#[tokio::test(start_paused = true)]
async fn other_programs_come_and_go_without_an_alarm() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let mut deliveries = client.consumer("q").prefetch(1).stream().await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let mut events = client.watch();
    for round in 0..20 {
        let other = other_consumer(&broker).await;
        assert!(soon("a check", client.check_health()).await.is_healthy());
        drop(other);
        assert!(soon("a check", client.check_health()).await.is_healthy());
        // It works at one, and the next ones wait for it; or it has nothing to do.
        if round % 2 == 0 {
            for body in ["1", "2"] {
                publisher.publish("q", body).await.unwrap();
            }
            let first = soon("a delivery", deliveries.next()).await.unwrap().unwrap();
            assert!(soon("a check", client.check_health()).await.is_healthy());
            first.ack().unwrap();
            soon("a delivery", deliveries.next()).await.unwrap().unwrap().ack().unwrap();
        }
    }
    let event = tokio::time::timeout(Duration::ZERO, events.next()).await;
    assert!(event.is_err(), "{event:?}");
}

/// The other one keeps the message that it has, and more wait. Then a third one goes.
async fn waits_without_an_alarm(broker: &Broker, client: &Client, mut other: amqp::Consumer) {
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    let third = other_consumer(broker).await;
    let publisher = client.publisher("").build().await.unwrap();
    for body in ["1", "2", "3"] {
        publisher.publish("q", body).await.unwrap();
    }
    let kept = soon("a delivery", other.next()).await.unwrap().unwrap();
    let mut events = client.watch();
    assert!(matches!(deliveries.next_within(Duration::from_secs(40)).await, Next::TimedOut));
    drop(third);
    assert!(matches!(deliveries.next_within(Duration::from_secs(120)).await, Next::TimedOut));
    assert!(client.health().is_healthy(), "{:?}", client.health());
    let event = tokio::time::timeout(Duration::ZERO, events.next()).await;
    assert!(event.is_err(), "{event:?}");
    // It takes over all the same.
    drop(kept);
    drop(other);
    soon("a delivery", deliveries.next()).await.unwrap().unwrap().ack().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_standby_of_a_single_active_consumer_is_not_taken_for_forgotten() {
    let queue = || Queue::classic("q").single_active_consumer();
    let broker = broker();
    let client = client_with(&broker, queue()).await;
    waits_without_an_alarm(&broker, &client, other_consumer(&broker).await).await;
    client.close().await;
    // The next one knows nothing of the queue.
    let client = crate::client_of(&broker).await;
    waits_without_an_alarm(&broker, &client, other_consumer(&broker).await).await;
}

#[tokio::test(start_paused = true)]
async fn standbys_that_a_quorum_queue_does_not_count_alarm_nobody() {
    let broker = broker();
    let theirs = client_with(&broker, Queue::quorum("q").single_active_consumer()).await;
    let publisher = theirs.publisher("").build().await.unwrap();
    // The other one knows nothing of the queue.
    for client in [theirs.clone(), crate::client_of(&broker).await] {
        let mut events = client.watch();
        let mut active = client.consumer("q").stream().await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        let mut standbys = Vec::new();
        for _ in 0..2 {
            standbys.push(client.consumer("q").stream().await.unwrap());
        }
        for _ in 0..10 {
            publisher.publish("q", "job").await.unwrap();
            soon("a delivery", active.next()).await.unwrap().unwrap().ack().unwrap();
            let nothing = active.next_within(Duration::from_secs(60)).await;
            assert!(matches!(nothing, Next::TimedOut), "{nothing:?}");
        }
        assert_eq!(client.inspect_queue("q").await.unwrap().consumers, 1);
        assert!(soon("a check", client.check_health()).await.is_healthy());
        let event = tokio::time::timeout(Duration::ZERO, events.next()).await;
        assert!(event.is_err(), "{event:?}");
        drop((active, standbys));
    }
}

#[tokio::test(start_paused = true)]
async fn a_count_that_never_was_right_alarms_nobody() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    // As on a stream, whose consumers RabbitMQ does not count.
    broker.faults().forget_consumers("/", "q");
    for _ in 0..3 {
        assert!(soon("a check", client.check_health()).await.is_healthy());
    }
    assert!(matches!(deliveries.next_within(BRIEFLY).await, Next::TimedOut));
}

#[tokio::test(start_paused = true)]
async fn a_caller_tells_why_the_broker_did_not_let_it_call() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("numbers")).await;
    let rpc = client.rpc("numbers").replies(Replies::Queue).timeout(BRIEFLY).build().await.unwrap();
    let caller = || client.health().callers[0].clone();
    assert_eq!((caller().what.as_str(), caller().in_flight), ("calling service \"numbers\"", 0));
    broker.faults().refuse_declares(usize::MAX);
    soon("an outcome", rpc.call::<Bytes>("add", "1")).await.unwrap_err();
    broker.faults().refuse_declares(0);
    assert_eq!(caller().error.unwrap().kind(), ErrorKind::Broker);
    // Nobody serves, so it waits for its reply until it is late.
    let late = tokio::spawn({
        let rpc = rpc.clone();
        async move { rpc.call::<Bytes>("add", "1").await }
    });
    until(&client, "a call", |health| health.callers[0].in_flight == 1).await;
    assert!(caller().error.is_none());
    let error = soon("an outcome", late).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(caller().in_flight, 0);
    drop(rpc);
    until(&client, "its end", |health| health.callers.is_empty()).await;
}

#[tokio::test(start_paused = true)]
async fn health_is_json_for_an_endpoint() {
    let client = client_with(&broker(), Queue::classic("q")).await;
    let _publisher = client.publisher("").build().await.unwrap();
    let _deliveries = client.consumer("q").stream().await.unwrap();
    let health = serde_json::to_value(client.health()).unwrap();
    assert_eq!(health["healthy"], true);
    assert_eq!(health["connections"][0]["up"], true);
    assert_eq!(health["connections"][0]["error"], serde_json::Value::Null);
    assert_eq!(health["consumers"][0]["queue"], "q");
    assert_eq!(health["consumers"][0]["live"], true);
    assert_eq!(health["publishers"][0]["unconfirmed"], 0);
    client.close().await;
    assert_eq!(serde_json::to_value(client.health()).unwrap()["healthy"], false);
}
