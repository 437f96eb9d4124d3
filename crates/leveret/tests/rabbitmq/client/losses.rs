//! What a client at work does when a connection or a queue is lost.

use std::num::NonZeroUsize;
use std::time::Duration;

use leveret::{Client, ClientEvent, ErrorKind, Queue, Topology};
use leveret_testkit::proxy::{Cut, Direction};
use leveret_testkit::{FaultProxy, eventually, rabbitmq};

use crate::support::client::{
    CONSUMING, SOON, client, client_with, cut, next, publisher, soon, until_depth, until_event,
    until_healthy,
};
use crate::support::scene::{DURABLE, MINE, Scene};

#[tokio::test]
async fn a_connection_that_is_cut_in_the_midst_of_a_frame_is_made_again() {
    let vhost = rabbitmq::vhost().await;
    if vhost.broker().is_embedded() {
        return;
    }
    let proxy = FaultProxy::to(vhost.broker().addr()).await;
    let scene = Scene::at(&proxy.url(&vhost.url())).await;
    for (how, direction) in [(Cut::Reset, Direction::ToServer), (Cut::Finish, Direction::ToClient)]
    {
        // Five octets at a time, and none is quick: a frame has more.
        proxy.split(direction, NonZeroUsize::new(5).unwrap());
        proxy.delay(direction, Duration::from_millis(10));
        let mut events = scene.client.watch();
        let before = proxy.seen();
        let cutting = async {
            eventually(SOON, "bytes on their way", async || {
                let seen = proxy.seen();
                seen.to_server > before.to_server && seen.to_client > before.to_client
            })
            .await;
            proxy.cut(how);
            proxy.heal().await;
        };
        tokio::join!(scene.publish(), cutting);
        let lost = |event: &ClientEvent| matches!(event, ClientEvent::Lost { .. });
        until_event(&mut events, "the loss", lost).await;
        scene.works().await;
    }
    scene.ends().await;
}

#[tokio::test]
async fn a_queue_that_is_deleted_or_declared_otherwise_under_its_consumer() {
    let vhost = rabbitmq::vhost().await;
    // There the consumer is always back before anybody else.
    if vhost.broker().is_embedded() {
        return;
    }
    let scene = Scene::at(&vhost.url()).await;
    let other = client(&vhost).await;

    let mut events = scene.client.watch();
    other.delete_queue(DURABLE, Default::default()).await.unwrap();
    let lost = |event: &ClientEvent| matches!(event, ClientEvent::ConsumerLost { queue, .. } if queue == DURABLE);
    until_event(&mut events, "the loss", lost).await;
    until_healthy(&scene.client).await;
    scene.works().await;

    // A queue that the broker named is deleted by nobody but its owner; this one has another connection and may not.
    let name = scene.client.queue_name(MINE);
    let error = soon("an answer", other.delete_queue(&name, Default::default())).await.unwrap_err();
    assert_eq!(error.reply_code(), Some(leveret::amqp::ReplyCode::RESOURCE_LOCKED), "{error}");

    // Somebody deletes the queue, and declares it with other arguments before the consumer is back.
    let theirs = Queue::classic(DURABLE).max_length(1_000_000).bind("orders", "#");
    let mut events = scene.client.watch();
    replace(&other, theirs).await;
    until_event(&mut events, "the loss", lost).await;
    until_healthy(&scene.client).await;
    scene.works().await;
    let info = soon("an answer", other.inspect_queue(DURABLE)).await.unwrap();
    assert_eq!(info.consumers, 1);

    // After a reconnect it cannot be restored as it was: health and an event say so, and messages go on.
    let mut events = scene.client.watch();
    cut(&vhost, &scene.client, CONSUMING).await;
    let not = |event: &ClientEvent| matches!(event, ClientEvent::NotRestored { object, .. } if object.contains(DURABLE));
    let ClientEvent::NotRestored { error, .. } = until_event(&mut events, "a report", not).await
    else {
        unreachable!("it is one")
    };
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    scene.publish().await;
    assert!(!scene.client.health().is_healthy(), "{:?}", scene.client.health());
    scene.ends().await;
}

/// Deletes a queue and declares another one of its name. Its consumer may be quicker and declare it as it was; then
/// again.
async fn replace(client: &Client, queue: Queue) {
    eventually(SOON, "another queue of this name", async || {
        let _ = client.delete_queue(queue.name(), Default::default()).await;
        client.apply(&Topology::new().queue(queue.clone())).await
    })
    .await;
}

/// The whole program stands still, as by a handler that blocks its only thread: the broker hears no heartbeat.
#[tokio::test]
async fn a_program_that_stands_still_loses_its_connections_and_goes_on() {
    let vhost = rabbitmq::vhost().await;
    // It would stand still, too.
    if vhost.broker().is_embedded() {
        return;
    }
    let client = client_with(&vhost, Queue::quorum("q")).await;
    let publisher = publisher(&client).await;
    let mut deliveries = soon("a consumer", client.consumer("q").stream()).await.unwrap();
    let mut events = client.watch();
    std::thread::sleep(Duration::from_secs(45));
    let lost = |event: &ClientEvent| matches!(event, ClientEvent::Lost { .. });
    until_event(&mut events, "the loss of one connection", lost).await;
    until_event(&mut events, "the loss of the other", lost).await;
    soon("an outcome", publisher.publish("q", "after")).await.unwrap();
    let delivery = next(&mut deliveries).await;
    assert_eq!(delivery.body(), "after");
    delivery.ack().unwrap();
    until_healthy(&client).await;
}

#[tokio::test]
async fn each_lost_connection_counts_for_the_delivery_limit_of_a_quorum_queue() {
    let vhost = rabbitmq::vhost().await;
    let limited =
        Queue::quorum("q").delivery_limit(2).dead_letter_to("").dead_letter_key("dropped");
    let client = client_with(&vhost, limited).await;
    let topology = Topology::new().queue(Queue::classic("dropped"));
    soon("a queue", client.apply(&topology)).await.unwrap();
    let mut deliveries = soon("a consumer", client.consumer("q").stream()).await.unwrap();
    soon("an outcome", publisher(&client).await.publish("q", "x")).await.unwrap();
    for losses in 0..3 {
        let delivery = next(&mut deliveries).await;
        let counted = delivery.header("x-delivery-count").and_then(|count| count.as_i64());
        assert_eq!(counted.unwrap_or(0), losses);
        cut(&vhost, &client, CONSUMING).await;
    }
    until_depth(&client, "dropped", 1).await;
}
