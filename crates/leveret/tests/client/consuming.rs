use std::time::Duration;

use leveret::{ErrorKind, Exchange, Next, Queue, Topology};
use leveret_testkit::eventually;
use tokio::time::sleep;

use crate::{PATIENCE, broker, client_of, client_with, depth, soon};

#[tokio::test(start_paused = true)]
async fn a_stream_goes_on_after_the_connection_was_cut() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    for round in 0..5 {
        publisher.publish("q", format!("{round}")).await.unwrap();
        loop {
            let delivery = soon("a delivery", deliveries.next()).await.unwrap().unwrap();
            let body = delivery.body().clone();
            delivery.ack().unwrap();
            if body == format!("{round}") {
                break;
            }
            // The ack of the round before may have been cut off.
        }
        broker.faults().cut_all_connections();
    }
}

#[tokio::test(start_paused = true)]
async fn an_ack_after_the_connection_was_lost_is_stale_and_the_message_comes_again() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    client.publisher("").build().await.unwrap().publish("q", "1").await.unwrap();
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    let first = soon("a delivery", deliveries.next()).await.unwrap().unwrap();
    broker.faults().cut_all_connections();
    let second = soon("a delivery", deliveries.next()).await.unwrap().unwrap();
    assert!(second.redelivered());
    assert_eq!(first.ack().unwrap_err().kind(), ErrorKind::Stale);
    second.ack().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_queue_of_the_topology_that_is_deleted_is_declared_again() {
    let broker = broker();
    let client = client_of(&broker).await;
    let topology = Topology::new()
        .exchange(Exchange::topic("orders"))
        .queue(Queue::classic("q").bind("orders", "#"));
    client.apply(&topology).await.unwrap();
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    let other = client_of(&broker).await;
    other.delete_queue("q", Default::default()).await.unwrap();

    let next = tokio::spawn(async move { deliveries.next().await });
    let publisher = client.publisher("orders").build().await.unwrap();
    soon("the queue", async {
        while publisher.publish("a", "1").await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let delivery = soon("a delivery", next).await.unwrap().unwrap().unwrap();
    assert_eq!(delivery.body(), "1");
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_nobody_declares_again_ends_the_stream() {
    let broker = broker();
    let owner = client_with(&broker, Queue::classic("q")).await;
    let client = client_of(&broker).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    owner.delete_queue("q", Default::default()).await.unwrap();
    let error = tokio::time::timeout(Duration::from_secs(120), deliveries.next())
        .await
        .expect("an end")
        .unwrap()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Missing, "{error}");
    assert!(deliveries.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_consumer_of_a_queue_named_by_the_broker_follows_its_name() {
    let broker = broker();
    let client = client_of(&broker).await;
    let mine = Queue::temporary("mine").bind("amq.topic", "x");
    client.apply(&Topology::new().queue(mine)).await.unwrap();
    let mut deliveries = client.consumer("mine").stream().await.unwrap();
    broker.restart().await;
    let next = tokio::spawn(async move { deliveries.next().await });
    let publisher = client.publisher("amq.topic").build().await.unwrap();
    soon("a publish", async {
        while publisher.publish("x", "1").await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let delivery = soon("a delivery", next).await.unwrap().unwrap().unwrap();
    assert_eq!(delivery.body(), "1");
}

#[tokio::test(start_paused = true)]
async fn next_within_tells_item_timeout_and_end_apart() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    let second = Duration::from_secs(1);
    assert!(matches!(deliveries.next_within(second).await, Next::TimedOut));
    client.publisher("").build().await.unwrap().publish("q", "1").await.unwrap();
    let Next::Delivery(delivery) = deliveries.next_within(second).await else {
        panic!("no delivery")
    };
    delivery.ack().unwrap();
    deliveries.cancel().await.unwrap();
    assert!(matches!(deliveries.next_within(second).await, Next::Ended(None)));
}

#[tokio::test(start_paused = true)]
async fn the_next_consumer_beyond_the_limit_gets_a_connection_of_its_own() {
    let broker = broker();
    let client = crate::builder_of(&broker).max_subscriptions(2).connect().await.unwrap();
    client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let mut streams = Vec::new();
    for _ in 0..5 {
        streams.push(client.consumer("q").stream().await.unwrap());
    }
    assert_eq!(client.health().connections.len(), 3);
    assert!(client.health().is_healthy());
}

#[tokio::test(start_paused = true)]
async fn a_further_connection_ends_with_the_last_delivery_of_its_last_consumer() {
    let broker = broker();
    let client = crate::builder_of(&broker).max_subscriptions(2).connect().await.unwrap();
    client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let connections = || broker.snapshot().virtual_host("/").unwrap().connections.len();
    let until = async |count: usize| {
        let found = async || {
            let found = connections();
            if found == count { Ok(()) } else { Err(found.to_string()) }
        };
        eventually(PATIENCE, format!("{count} connections"), found).await;
    };
    let mut streams = Vec::new();
    for _ in 0..5 {
        streams.push(client.consumer("q").stream().await.unwrap());
    }
    until(4).await;
    // The last one alone consumes, and takes a message.
    let mut last = streams.pop().unwrap();
    drop(streams);
    until(3).await;
    publisher.publish("q", "late").await.unwrap();
    let delivery = soon("a delivery", last.next()).await.unwrap().unwrap();
    drop(last);
    assert_eq!(client.health().connections.len(), 2);
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(connections(), 3, "a delivery is not acked yet");
    delivery.ack().unwrap();
    until(2).await;
    assert_eq!(depth(&broker, "q"), Some(0));
    assert!(client.health().is_healthy());
    // Those that begin later have connections again, which the end of the client closes.
    for _ in 0..5 {
        streams_go_on(&client).await;
    }
    let streams = [client.consumer("q").stream().await, client.consumer("q").stream().await];
    let further = client.consumer("q").stream().await.unwrap();
    until(3).await;
    drop((streams, further));
    client.close().await;
    until(0).await;
}

/// Three consumers begin, get a message, and end.
async fn streams_go_on(client: &leveret::Client) {
    let publisher = client.publisher("").build().await.unwrap();
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(client.consumer("q").stream().await.unwrap());
    }
    drop(streams.drain(..2));
    publisher.publish("q", "again").await.unwrap();
    let delivery = soon("a delivery", streams[0].next()).await.unwrap().unwrap();
    delivery.ack().unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_a_dropped_stream_had_goes_back() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch((0..10).map(|n| ("q", n.to_string()))).await.unwrap();
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    drop(soon("a delivery", deliveries.next()).await);
    drop(deliveries);
    soon("the messages", async {
        while depth(&broker, "q") != Some(10) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_when_the_client_is_closed() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    client.close().await;
    let error = soon("an end", deliveries.next()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}
