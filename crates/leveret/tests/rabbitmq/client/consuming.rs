use std::time::Duration;

use leveret::{ClientEvent, ErrorKind, Exchange, Next, Queue, Topology};
use leveret_testkit::{eventually, rabbitmq};

use crate::support::client::{
    CONSUMING, SOON, builder, client, client_with, cut, next, publisher, soon, until_depth,
};

#[tokio::test]
async fn consuming_goes_on_after_a_cut() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    for round in 0..3 {
        soon("an outcome", publisher.publish("q", round.to_string())).await.unwrap();
        loop {
            let delivery = next(&mut deliveries).await;
            let is_it = delivery.body() == &round.to_string();
            delivery.ack().unwrap();
            // The ack of the round before may have been cut off.
            if is_it {
                break;
            }
        }
        cut(&vhost, &client, CONSUMING).await;
    }
}

#[tokio::test]
async fn an_ack_after_the_connection_was_lost_is_stale_and_the_message_comes_again() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    soon("an outcome", publisher(&client).await.publish("q", "1")).await.unwrap();
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    let first = next(&mut deliveries).await;
    cut(&vhost, &client, CONSUMING).await;
    let second = next(&mut deliveries).await;
    assert!(second.redelivered());
    assert_eq!(first.ack().unwrap_err().kind(), ErrorKind::Stale);
    second.ack().unwrap();
    drop(deliveries);
    until_depth(&client, "q", 0).await;
}

#[tokio::test]
async fn a_queue_of_the_topology_that_is_deleted_is_declared_again() {
    let vhost = rabbitmq::vhost().await;
    let mine = client(&vhost).await;
    let topology = Topology::new()
        .exchange(Exchange::topic("orders"))
        .queue(Queue::classic("q").bind("orders", "#"));
    mine.apply(&topology).await.unwrap();
    let mut deliveries = mine.consumer("q").stream().await.unwrap();
    client(&vhost).await.delete_queue("q", Default::default()).await.unwrap();

    let reading = tokio::spawn(async move { next(&mut deliveries).await.body().clone() });
    let publisher = mine.publisher("orders").build().await.unwrap();
    eventually(SOON, "the queue to be back", async || publisher.publish("a", "1").await).await;
    assert_eq!(soon("a delivery", reading).await.unwrap(), "1");
}

#[tokio::test]
async fn a_queue_that_nobody_declares_again_ends_the_deliveries() {
    let vhost = rabbitmq::vhost().await;
    let owner = client_with(&vhost, Queue::classic("q")).await;
    let client = client(&vhost).await;
    let missing_for = Duration::from_millis(500);
    let mut deliveries = client.consumer("q").missing_for(missing_for).stream().await.unwrap();
    owner.delete_queue("q", Default::default()).await.unwrap();
    let error = soon("an end", deliveries.next()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Missing, "{error}");
    assert!(soon("the end", deliveries.next()).await.is_none());
    assert!(!client.health().is_healthy(), "it is gone, and not by the application's wish");
    drop(deliveries);
    assert!(client.health().is_healthy());
}

#[tokio::test]
async fn a_queue_that_is_not_there_is_an_error_at_once() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let error = soon("an answer", client.consumer("q").stream()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Missing, "{error}");
    assert!(client.health().is_healthy(), "{:?}", client.health());
}

#[tokio::test]
async fn next_within_tells_item_timeout_and_end_apart() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    let briefly = Duration::from_millis(50);
    assert!(matches!(deliveries.next_within(briefly).await, Next::TimedOut));
    soon("an outcome", publisher(&client).await.publish("q", "1")).await.unwrap();
    let Next::Delivery(delivery) = deliveries.next_within(SOON).await else {
        panic!("no delivery")
    };
    delivery.ack().unwrap();
    soon("cancelling", deliveries.cancel()).await.unwrap();
    assert!(matches!(deliveries.next_within(SOON).await, Next::Ended(None)));
}

#[tokio::test]
async fn the_next_consumer_beyond_the_limit_gets_a_connection_of_its_own() {
    let vhost = rabbitmq::vhost().await;
    let client = builder(&vhost).max_subscriptions(2).connect().await.unwrap();
    client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let mut streams = Vec::new();
    for _ in 0..5 {
        streams.push(client.consumer("q").stream().await.unwrap());
    }
    assert_eq!(client.health().connections.len(), 3);
    assert!(client.health().is_healthy());
    assert_eq!(client.inspect_queue("q").await.unwrap().consumers, 5);
    // A place that is given back is used again.
    streams.pop();
    streams.push(client.consumer("q").stream().await.unwrap());
    assert_eq!(client.health().connections.len(), 3);
}

#[tokio::test]
async fn what_was_dropped_or_not_handed_out_goes_back_when_the_consumer_is_dropped() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let batch = publisher(&client).await;
    batch.publish_batch((0..10).map(|n| ("q", n.to_string()))).await.unwrap();
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    let kept = next(&mut deliveries).await;
    drop(next(&mut deliveries).await);
    drop(deliveries);
    until_depth(&client, "q", 9).await;
    kept.ack().unwrap();
    until_depth(&client, "q", 9).await;
}

#[tokio::test]
async fn a_consumer_of_a_temporary_queue_follows_its_name() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let mine = Queue::temporary("mine").bind("amq.topic", "x");
    client.apply(&Topology::new().queue(mine)).await.unwrap();
    let publisher = client.publisher("amq.topic").build().await.unwrap();
    let mut deliveries = client.consumer("mine").stream().await.unwrap();
    let before = client.queue_name("mine");
    cut(&vhost, &client, CONSUMING).await;
    eventually(SOON, "another name", async || client.queue_name("mine") != before).await;
    soon("an outcome", publisher.publish("x", "1")).await.unwrap();
    assert_eq!(next(&mut deliveries).await.body(), "1");
}

#[tokio::test]
async fn deliveries_end_when_the_client_is_closed() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    soon("closing", client.close()).await;
    let error = soon("an end", deliveries.next()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(soon("the end", deliveries.next()).await.is_none());
}

/// Nothing goes back to a stream, and 3.10 closes the connection of who tries.
#[tokio::test]
async fn a_dropped_consumer_of_a_stream_costs_nobody_the_connection() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::stream("log")).await;
    let mut events = client.watch();
    let publisher = publisher(&client).await;
    soon("outcomes", publisher.publish_batch((0..300).map(|n| ("log", n.to_string()))))
        .await
        .unwrap();
    for _ in 0..3 {
        let consumer = client.consumer("log").argument("x-stream-offset", "first");
        let mut deliveries = soon("a consumer", consumer.stream()).await.unwrap();
        let first = next(&mut deliveries).await;
        assert_eq!(first.body(), "0");
        first.ack().unwrap();
        drop(next(&mut deliveries).await);
    }
    // What the broker thinks of it has come by then.
    client.inspect_queue("log").await.unwrap();
    client.close().await;
    loop {
        match soon("an event", events.next()).await.expect("the end") {
            ClientEvent::Closed => break,
            event => assert!(!matches!(event, ClientEvent::Lost { .. }), "{event:?}"),
        }
    }
}
