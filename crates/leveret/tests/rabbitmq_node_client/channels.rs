use std::num::NonZeroUsize;
use std::time::Duration;

use leveret::{Client, ClientEvent, ErrorKind, Queue, Topology};
use leveret_testkit::proxy::{Cut, Direction};
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use leveret_testkit::{FaultProxy, eventually};

use super::scene::{DURABLE, MINE, Scene};
use crate::support::client::{
    CONSUMING, SOON, client, client_with, cut, next, publisher, soon, until_event, until_healthy,
};

#[tokio::test]
async fn a_connection_that_is_cut_in_the_midst_of_a_frame_is_made_again() {
    let node = RabbitNode::start(Version::under_test()).await;
    let proxy = FaultProxy::to(node.broker().addr()).await;
    let scene = Scene::at(&proxy.url(&node.url())).await;
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
    let node = RabbitNode::start(Version::under_test()).await;
    let vhost = node.vhost().await;
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

    // After a reconnect it cannot be restored as it was; that is said, and does not stop anything.
    let mut events = scene.client.watch();
    cut(&vhost, &scene.client, CONSUMING).await;
    let not = |event: &ClientEvent| matches!(event, ClientEvent::NotRestored { object, .. } if object.contains(DURABLE));
    let ClientEvent::NotRestored { error, .. } = until_event(&mut events, "a report", not).await
    else {
        unreachable!("it is one")
    };
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    scene.works().await;
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

#[tokio::test]
async fn a_delivery_that_is_not_acked_in_time_comes_again_and_the_consumer_goes_on() {
    let version = Version::under_test();
    let node = RabbitNode::start(version).await;
    let set = "application:set_env(rabbit, consumer_timeout, 1000), \
               application:set_env(rabbit, channel_tick_interval, 500).";
    node.ctl(&["eval", set]).await;
    let vhost = node.vhost().await;
    let client = client_with(&vhost, Queue::quorum("q")).await;
    let mut events = client.watch();
    let mut deliveries = client.consumer("q").prefetch(1).stream().await.unwrap();
    let publisher = publisher(&client).await;
    soon("an outcome", publisher.publish("q", "slow")).await.unwrap();
    soon("an outcome", publisher.publish("q", "quick")).await.unwrap();
    let kept = next(&mut deliveries).await;
    let again = next(&mut deliveries).await;
    let lost = |event: &ClientEvent| matches!(event, ClientEvent::ConsumerLost { .. });
    until_event(&mut events, "the loss", lost).await;
    assert!(again.redelivered());
    assert_eq!((kept.body(), again.body()), (&"slow".into(), &"slow".into()));
    let late = kept.ack().map_err(|error| error.kind());
    if version < Version::V4_3 {
        assert_eq!(late, Err(ErrorKind::Stale));
    } else {
        // It cancels the consumer and leaves the channel alone: the ack can be sent, and is of no meaning.
        assert_eq!(late, Ok(()));
    }
    again.ack().unwrap();
    let quick = next(&mut deliveries).await;
    assert_eq!(quick.body(), "quick");
    quick.ack().unwrap();
    until_healthy(&client).await;
}
