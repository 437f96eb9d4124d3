use std::time::Duration;

use leveret::{Client, ErrorKind, Next, Queue};
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{RabbitNode, Version, Vhost};
use tokio::time::timeout;

use crate::support::client::{
    SOON, client, client_with, next, publisher, soon, until_consumed, until_healthy,
    until_unhealthy,
};

const BRIEFLY: Duration = Duration::from_secs(2);

/// Has a quorum queue forget its consumers; their channels are not told.
async fn forget_consumers(node: &RabbitNode, vhost: &Vhost, queue: &str) {
    let forget = format!(
        "{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"{}\">>, queue, <<\"{queue}\">>)), \
         [ra:process_command(amqqueue:get_pid(Q), \
          {{checkout, {{element(2, C), element(1, C)}}, cancel, #{{}}}}) \
          || C <- rabbit_amqqueue:consumers(Q)], ok.",
        vhost.name()
    );
    node.ctl(&["eval", &forget]).await;
}

/// One node serves all of these, each in a virtual host of its own. The last three mostly wait.
#[tokio::test]
async fn consumers_that_the_broker_forgets_are_found_and_others_alarm_nobody() {
    let node = RabbitNode::start(Version::under_test()).await;
    a_consumer_that_the_broker_has_forgotten_is_found_and_begins_anew(&node).await;
    tokio::join!(
        a_consumer_that_is_forgotten_right_after_a_reconnect_is_found_without_being_asked_for(
            &node
        ),
        a_consumer_that_is_forgotten_before_another_one_begins_is_found(&node),
        standbys_that_a_quorum_queue_does_not_count_alarm_nobody(&node),
    );
}

async fn a_consumer_that_the_broker_has_forgotten_is_found_and_begins_anew(node: &RabbitNode) {
    let vhost = node.vhost().await;
    let client = client_with(&vhost, Queue::quorum("q")).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    // No check has gone before: the broker was asked as soon as the consumer had begun.
    forget_consumers(node, &vhost, "q").await;
    soon("an outcome", publisher(&client).await.publish("q", "1")).await.unwrap();
    assert!(matches!(deliveries.next_within(BRIEFLY).await, Next::TimedOut));
    assert!(client.health().is_healthy(), "it does not know yet");
    let health = soon("a check", client.check_health()).await;
    assert!(!health.consumers[0].is_live, "{health:?}");
    next(&mut deliveries).await.ack().unwrap();
    until_healthy(&client).await;
}

/// With default settings, and nothing that asks for health.
async fn a_consumer_that_is_forgotten_right_after_a_reconnect_is_found_without_being_asked_for(
    node: &RabbitNode,
) {
    let vhost = node.vhost().await;
    let client = client_with(&vhost, Queue::quorum("q")).await;
    let publisher = publisher(&client).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    node.ctl(&["close_all_connections", "--vhost", vhost.name(), "a reconnect"]).await;
    soon("an outcome", publisher.publish("q", "1")).await.unwrap();
    next(&mut deliveries).await.ack().unwrap();
    forget_consumers(node, &vhost, "q").await;
    soon("an outcome", publisher.publish("q", "2")).await.unwrap();
    assert!(matches!(deliveries.next_within(BRIEFLY).await, Next::TimedOut));
    let delivery = next(&mut deliveries).await;
    assert_eq!(delivery.body(), "2");
    delivery.ack().unwrap();
}

/// With default settings, and nothing that asks for health.
async fn a_consumer_that_is_forgotten_before_another_one_begins_is_found(node: &RabbitNode) {
    let vhost = node.vhost().await;
    let client = client_with(&vhost, Queue::quorum("q")).await;
    let publisher = publisher(&client).await;
    let mut forgotten = client.consumer("q").prefetch(1).stream().await.unwrap();
    until_consumed(&client, "q").await;
    forget_consumers(node, &vhost, "q").await;
    let mut other = client.consumer("q").prefetch(1).stream().await.unwrap();
    soon("outcomes", publisher.publish_batch([("q", "1"), ("q", "2")])).await.unwrap();
    let (first, second) = tokio::join!(next(&mut forgotten), next(&mut other));
    for delivery in [first, second] {
        delivery.ack().unwrap();
    }
    let both = async {
        until_healthy(&client).await;
        eventually(SOON, "two consumers", async || {
            soon("an answer", client.inspect_queue("q")).await.unwrap().consumers == 2
        })
        .await;
    };
    // A stream begins anew while it is read.
    tokio::select! {
        delivery = forgotten.next() => panic!("{delivery:?}"),
        delivery = other.next() => panic!("{delivery:?}"),
        () = both => {}
    }
}

/// With default settings, for longer than it takes to find one that was forgotten.
async fn standbys_that_a_quorum_queue_does_not_count_alarm_nobody(node: &RabbitNode) {
    let vhost = node.vhost().await;
    let theirs = client_with(&vhost, Queue::quorum("q").single_active_consumer()).await;
    let publisher = publisher(&theirs).await;
    // The other one knows nothing of the queue.
    let clients = [theirs, client(&vhost).await];
    let mut events = clients.each_ref().map(Client::watch);
    let mut streams = Vec::new();
    for client in [&clients[0], &clients[0], &clients[1], &clients[1]] {
        streams.push(client.consumer("q").stream().await.unwrap());
        until_consumed(client, "q").await;
    }
    soon("an outcome", publisher.publish("q", "1")).await.unwrap();
    next(&mut streams[0]).await.ack().unwrap();
    let nothing = streams[0].next_within(Duration::from_secs(40)).await;
    assert!(matches!(nothing, Next::TimedOut), "{nothing:?}");
    for (client, events) in clients.iter().zip(&mut events) {
        assert!(soon("a check", client.check_health()).await.is_healthy());
        let event = timeout(Duration::ZERO, events.next()).await;
        assert!(event.is_err(), "{event:?}");
    }
}

#[tokio::test]
async fn what_waits_for_a_broker_that_is_low_on_memory_says_so() {
    let node = RabbitNode::start(Version::under_test()).await;
    let vhost = node.vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = client.publisher("").timeout(BRIEFLY).build().await.unwrap();
    node.raise_memory_alarm().await;
    // The broker tells a connection that it is blocked once that publishes. It may confirm that one, or not.
    let _ = soon("an outcome", publisher.publish("q", "the last")).await;
    until_unhealthy(&client).await;
    let health = client.health();
    assert_eq!(health.publishers[0].blocked.as_deref(), Some("low on memory"), "{health:?}");
    let published = soon("an outcome", publisher.publish("q", "2")).await;
    let built = soon("an answer", client.publisher("").timeout(BRIEFLY).build()).await;
    for error in [published.unwrap_err(), built.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert_eq!(error.blocked_by_broker(), Some("low on memory"), "{error}");
    }
    node.clear_memory_alarm().await;
    until_healthy(&client).await;
    soon("an outcome", publisher.publish("q", "3")).await.unwrap();
}
