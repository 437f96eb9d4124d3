use leveret::ClientEvent;
use leveret_testkit::rabbitmq::{RabbitNode, Version, Vhost};

use crate::support::client::{soon, until_event, until_healthy, until_unhealthy};
use crate::support::scene::{DURABLE, MINE, Scene};

fn url(vhost: &Vhost) -> String {
    format!("{}?heartbeat=1", vhost.url())
}

/// One node serves all of these, one after the other: to start one takes longer than most of them.
#[tokio::test]
async fn a_client_survives_whatever_happens_to_its_node() {
    let mut node = RabbitNode::start(Version::under_test()).await;
    a_memory_alarm_stops_publishers_and_not_consumers(&node).await;
    a_node_that_is_silent_is_given_up_and_found_again(&node).await;
    a_node_that_was_stopped_or_killed_is_found_again(&mut node).await;
    on_a_node_without_its_data_everything_is_declared_again(&mut node).await;
}

async fn a_node_that_was_stopped_or_killed_is_found_again(node: &mut RabbitNode) {
    let vhost = node.vhost().await;
    let scene = Scene::at(&url(&vhost)).await;
    let before = scene.client.queue_name(MINE);

    node.stop().await;
    scene.knows_that_the_broker_is_away().await;
    // What is published meanwhile waits.
    tokio::join!(scene.publish(), node.start_again());
    scene.works().await;
    assert_ne!(scene.client.queue_name(MINE), before);

    node.kill().await;
    scene.knows_that_the_broker_is_away().await;
    tokio::join!(scene.publish(), node.start_again());
    scene.works().await;
    scene.ends().await;
}

async fn on_a_node_without_its_data_everything_is_declared_again(node: &mut RabbitNode) {
    // Its virtual host is one that a node has by itself.
    let scene = Scene::at(&format!("{}?heartbeat=1", node.url())).await;
    node.kill().await;
    node.forget_data();
    tokio::join!(scene.publish(), node.start_again());
    scene.works().await;
    let info = soon("an answer", scene.client.inspect_queue(DURABLE)).await.unwrap();
    assert_eq!((info.messages, info.consumers), (0, 1));
    scene.ends().await;
}

async fn a_node_that_is_silent_is_given_up_and_found_again(node: &RabbitNode) {
    let vhost = node.vhost().await;
    let scene = Scene::at(&url(&vhost)).await;
    node.suspend().await;
    scene.knows_that_the_broker_is_away().await;
    let resuming = async { node.resume() };
    tokio::join!(scene.publish(), resuming);
    scene.works().await;
    scene.ends().await;
}

async fn a_memory_alarm_stops_publishers_and_not_consumers(node: &RabbitNode) {
    let vhost = node.vhost().await;
    let scene = Scene::at(&url(&vhost)).await;
    let waiting = scene.client.publisher("").build().await.unwrap();
    scene
        .client
        .apply(&leveret::Topology::new().queue(leveret::Queue::classic("q")))
        .await
        .unwrap();
    waiting.publish_batch((0..10).map(|n| ("q", n.to_string()))).await.unwrap();
    let mut events = scene.client.watch();

    node.raise_memory_alarm().await;
    let blocked = async {
        until_event(&mut events, "the block", |event| matches!(event, ClientEvent::Blocked { .. }))
            .await;
        until_unhealthy(&scene.client).await;
        let health = scene.client.health();
        assert!(health.connections.iter().all(|connection| connection.is_up), "{health:?}");
        assert!(health.connections.iter().any(|connection| connection.blocked.is_some()));
        assert!(health.consumers.iter().all(|consumer| consumer.is_live), "{health:?}");
        // Consumers go on.
        let mut deliveries = soon("a consumer", scene.client.consumer("q").stream()).await.unwrap();
        for _ in 0..10 {
            soon("a delivery", deliveries.next()).await.unwrap().unwrap().ack().unwrap();
        }
        drop(deliveries);
        crate::support::client::until_depth(&scene.client, "q", 0).await;
        node.clear_memory_alarm().await;
        until_event(&mut events, "the end", |event| matches!(event, ClientEvent::Unblocked { .. }))
            .await;
    };
    // RabbitMQ tells a connection when it publishes.
    tokio::join!(scene.publish(), blocked);
    until_healthy(&scene.client).await;
    scene.works().await;
    scene.ends().await;
}
