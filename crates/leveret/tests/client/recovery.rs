use std::time::Duration;

use leveret::{Client, ClientEvent, ConnectLimits, ErrorKind, Queue, Topology};
use leveret_testkit::proxy::Direction;
use leveret_testkit::{FaultProxy, eventually};
use tokio::time::Instant;

use crate::{PATIENCE, broker, builder_of, client_with, soon, unsettled};

#[tokio::test(start_paused = true)]
async fn the_first_connect_gives_up_after_its_tries() {
    let limits = ConnectLimits { max_retries: 3, within: Duration::from_secs(60) };
    let began = Instant::now();
    let error = Client::builder()
        .endpoint("amqp://127.0.0.1:1")
        .unwrap()
        .connect_limits(limits)
        .connect()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(began.elapsed() > Duration::from_millis(300), "it paused between the tries");
}

#[tokio::test(start_paused = true)]
async fn a_wrong_password_is_not_tried_again() {
    let broker = broker();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    let url = format!("amqp://guest:hunter2@{address}");
    let error = Client::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(!format!("{error} {error:?}").contains("hunter2"));
}

#[tokio::test(start_paused = true)]
async fn a_dead_endpoint_is_passed_over() {
    let broker = broker();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    let client =
        Client::connect(["amqp://127.0.0.1:1".to_owned(), format!("amqp://{address}")]).await;
    let client = client.unwrap();
    assert!(
        client.health().connections[0].endpoint.as_ref().unwrap().contains(&address.to_string())
    );
}

#[tokio::test(start_paused = true)]
async fn a_standby_takes_over_with_the_topology() {
    let (first, standby) = (broker(), broker());
    let client = builder_of(&first).broker(&standby).connect().await.unwrap();
    client.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    publisher.publish("q", "1").await.unwrap();
    soon("a delivery", deliveries.next()).await.unwrap().unwrap().ack().unwrap();

    first.shutdown().await;
    soon("a publish", publisher.publish("q", "2")).await.unwrap();
    let delivery = soon("a delivery", deliveries.next()).await.unwrap().unwrap();
    assert_eq!(delivery.body(), "2");
}

/// The broker takes no new connections for a while, which only the connection that is lost then finds out.
#[tokio::test]
async fn connections_that_came_to_different_brokers_find_together_again() {
    let (first, standby) = (broker(), broker());
    let door = FaultProxy::to(first.listen("127.0.0.1:0").await.unwrap()).await;
    let standby_address = standby.listen("127.0.0.1:0").await.unwrap();
    for lost in ["test (publishing)", "test (consuming)"] {
        let urls = [format!("amqp://{}", door.addr()), format!("amqp://{standby_address}")];
        let client =
            Client::builder().endpoint(urls).unwrap().name("test").connect().await.unwrap();
        client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
        let publisher = client.publisher("").build().await.unwrap();
        let mut deliveries = client.consumer("q").stream().await.unwrap();
        let mut events = client.watch();
        door.refuse().await;
        assert_eq!(first.faults().cut_connections_named(lost), 1);
        soon("another broker", async {
            while !matches!(events.next().await.unwrap(), ClientEvent::Connected { .. }) {}
        })
        .await;
        door.accept().await;
        eventually(PATIENCE, "one broker for all", async || {
            let connections = client.health().connections;
            let home = &connections[0];
            let together = connections.iter().all(|one| one.is_up && one.endpoint == home.endpoint);
            if together { Ok(()) } else { Err(format!("{connections:?}")) }
        })
        .await;
        soon("a publish", publisher.publish("q", "hello")).await.unwrap();
        soon("a delivery", deliveries.next()).await.unwrap().unwrap().ack().unwrap();
        client.close().await;
    }
}

/// As over a slow network, or with an encryption that takes its time.
#[tokio::test]
async fn connections_find_together_again_however_slow_a_handshake_is() {
    let (first, standby) = (broker(), broker());
    let door = FaultProxy::to(first.listen("127.0.0.1:0").await.unwrap()).await;
    let standby_address = standby.listen("127.0.0.1:0").await.unwrap();
    let urls = [format!("amqp://{}", door.addr()), format!("amqp://{standby_address}")];
    let client = Client::connect(urls).await.unwrap();
    door.refuse().await;
    let _publisher = client.publisher("").build().await.unwrap();
    let together = || {
        let connections = client.health().connections;
        connections.iter().all(|one| one.is_up && one.endpoint == connections[0].endpoint)
    };
    assert!(!together());
    // Connecting and asking take five round trips.
    door.delay(Direction::ToClient, Duration::from_millis(800));
    door.accept().await;
    eventually(PATIENCE, "one broker for all", async || together()).await;
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_blocks_publishers_is_seen_and_does_not_delay_acks() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").timeout(Duration::from_secs(5)).build().await.unwrap();
    publisher.publish("q", "1").await.unwrap();
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    let delivery = soon("a delivery", deliveries.next()).await.unwrap().unwrap();

    let mut events = client.watch();
    broker.faults().block("no memory");
    // The broker tells a connection that it is blocked once that publishes.
    soon("an outcome", publisher.publish("q", "the last")).await.unwrap();
    assert!(matches!(soon("an event", events.next()).await, Some(ClientEvent::Blocked { .. })));
    let error = soon("an outcome", publisher.publish("q", "2")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert!(!client.health().is_healthy());
    delivery.ack().unwrap();
    let second = soon("a delivery", deliveries.next()).await.unwrap().unwrap();
    assert_eq!(second.body(), "the last");
    second.ack().unwrap();
    soon("the acks", async {
        while unsettled(&broker, "q") > Some(0) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;

    broker.faults().unblock();
    assert!(matches!(soon("an event", events.next()).await, Some(ClientEvent::Unblocked { .. })));
    soon("a publish", publisher.publish("q", "3")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_was_not_tried_because_another_got_no_answer_does_not_count_as_restored() {
    let broker = broker();
    let client = builder_of(&broker).connect().await.unwrap();
    let topology = Topology::new().queue(Queue::classic("a")).queue(Queue::classic("b"));
    client.apply(&topology).await.unwrap();
    let mut events = client.watch();
    // Both.
    broker.faults().refuse_declares(2);
    broker.faults().cut_all_connections();
    let mut not_restored = 0;
    while not_restored < 2 {
        let event = soon("an event", events.next()).await.unwrap();
        not_restored += u32::from(matches!(event, ClientEvent::NotRestored { .. }));
    }
    broker.faults().delay_declares(1, Duration::from_secs(3600));
    let mut restored = Vec::new();
    while restored.len() < 2 {
        let event = tokio::time::timeout(Duration::from_secs(600), events.next()).await;
        if let Some(ClientEvent::Restored { object }) = event.expect("an event") {
            restored.push(object);
        }
    }
    assert!(restored[0].contains("\"a\"") && restored[1].contains("\"b\""), "{restored:?}");
}

#[tokio::test(start_paused = true)]
async fn checking_asks_the_broker_and_finds_all_consumers_there() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let _deliveries = client.consumer("q").stream().await.unwrap();
    let health = soon("the health", client.check_health()).await;
    assert!(health.is_healthy(), "{health:?}");
}
