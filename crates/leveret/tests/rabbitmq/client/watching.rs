use leveret::{ClientEvent, Queue, Topology};
use leveret_testkit::rabbitmq;

use crate::support::client::{
    CONSUMING, client, client_with, cut, next, publisher, soon, until_event, until_healthy,
    until_unhealthy,
};

#[tokio::test]
async fn every_listener_hears_of_a_loss_and_of_the_return() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    let mut listeners = [client.watch(), client.watch()];
    let publisher = publisher(&client).await;
    cut(&vhost, &client, CONSUMING).await;
    soon("an outcome", publisher.publish("q", "1")).await.unwrap();
    next(&mut deliveries).await.ack().unwrap();
    for events in &mut listeners {
        let is_mine = |connection: &String| connection.contains(CONSUMING);
        let is_lost = |event: &ClientEvent| matches!(event, ClientEvent::Lost { connection, .. } if is_mine(connection));
        until_event(events, "the loss", is_lost).await;
        let is_back = |event: &ClientEvent| matches!(event, ClientEvent::Connected { again: true, connection, .. } if is_mine(connection));
        until_event(events, "the return", is_back).await;
        let resumed = |event: &ClientEvent| matches!(event, ClientEvent::ConsumerResumed { queue } if queue == "q");
        until_event(events, "the consumer", resumed).await;
    }
    until_healthy(&client).await;
    soon("closing", client.close()).await;
    for events in &mut listeners {
        until_event(events, "the end", |event| matches!(event, ClientEvent::Closed)).await;
    }
}

#[tokio::test]
async fn health_knows_a_consumer_that_is_gone() {
    let vhost = rabbitmq::vhost().await;
    let mine = client_with(&vhost, Queue::classic("q")).await;
    let mut deliveries = mine.consumer("q").stream().await.unwrap();
    assert!(mine.health().is_healthy());
    let mut events = mine.watch();
    client(&vhost).await.delete_queue("q", Default::default()).await.unwrap();
    // Nobody reads the stream, and still it is known.
    until_unhealthy(&mine).await;
    assert!(mine.health().connections.iter().all(|connection| connection.is_up));
    let reading = async { next(&mut deliveries).await.ack().unwrap() };
    let publishing = async {
        let lost = |event: &ClientEvent| matches!(event, ClientEvent::ConsumerLost { queue, .. } if queue == "q");
        until_event(&mut events, "the loss", lost).await;
        until_healthy(&mine).await;
        soon("an outcome", publisher(&mine).await.publish("q", "1")).await.unwrap();
    };
    tokio::join!(reading, publishing);
}

#[tokio::test]
async fn an_object_that_cannot_be_restored_is_reported_and_tried_again() {
    let vhost = rabbitmq::vhost().await;
    let mine = client_with(&vhost, Queue::classic("q")).await;
    mine.apply(&Topology::new().queue(Queue::classic("fine"))).await.unwrap();
    let theirs = client(&vhost).await;
    theirs.delete_queue("q", Default::default()).await.unwrap();
    theirs.apply(&Topology::new().queue(Queue::classic("q").max_length(5))).await.unwrap();
    let mut events = mine.watch();
    cut(&vhost, &mine, CONSUMING).await;
    let object = "queue \"q\"";
    let not = |event: &ClientEvent| matches!(event, ClientEvent::NotRestored { object: it, .. } if it == object);
    let ClientEvent::NotRestored { error, .. } = until_event(&mut events, "a report", not).await
    else {
        unreachable!("it is one")
    };
    assert_eq!(error.conflicts()[0].argument, "x-max-length");
    until_unhealthy(&mine).await;
    soon("deleting", theirs.delete_queue("q", Default::default())).await.unwrap();
    let back =
        |event: &ClientEvent| matches!(event, ClientEvent::Restored { object: it } if it == object);
    until_event(&mut events, "the queue", back).await;
    assert!(mine.inspect_queue("q").await.is_ok());
    until_healthy(&mine).await;
}

/// RabbitMQ does not count them.
#[tokio::test]
async fn checks_leave_consumers_of_streams_and_inactive_ones_alone() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let topology = Topology::new()
        .queue(Queue::stream("stream"))
        .queue(Queue::quorum("single").single_active_consumer());
    soon("the queues", client.apply(&topology)).await.unwrap();
    let mut streams = Vec::new();
    for queue in ["stream", "single"] {
        for _ in 0..2 {
            streams.push(client.consumer(queue).stream().await.unwrap());
        }
        // With each of them once, as the second one may come later than a check.
        for _ in 0..2 {
            assert!(soon("a check", client.check_health()).await.is_healthy());
        }
    }
    let publisher = publisher(&client).await;
    for queue in ["stream", "single"] {
        soon("an outcome", publisher.publish(queue, "1")).await.unwrap();
    }
    for at in [0, 1, 2] {
        let delivery = next(&mut streams[at]).await;
        assert!(!delivery.redelivered());
        delivery.ack().unwrap();
    }
}
