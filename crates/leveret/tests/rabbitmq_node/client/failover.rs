//! The promises of docs/failover.md about a broker that falls silent, with default settings, and their reverse: one that is
//! slow is not left.

use std::time::Duration;

use leveret::{Client, ClientEvent, ClientEvents, Queue, Topology};
use leveret_broker::Broker;
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use tokio::time::{sleep, timeout};

use crate::support::client::{
    SOON, next, publisher, soon, until_depth, until_healthy, until_unhealthy,
};

/// Longer than a silent broker is believed to be alive, idle or not.
const LONG: Duration = Duration::from_secs(40);

fn standby() -> Broker {
    Broker::builder().start().unwrap()
}

async fn client(node: &RabbitNode, standby: &Broker) -> Client {
    let builder = Client::builder().endpoint(node.url()).unwrap().broker(standby);
    let client = soon("a client", builder.connect()).await.unwrap();
    client.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
    client
}

/// Waits until all is well, with all connections at the standby.
async fn until_at_standby(client: &Client) {
    eventually(SOON, "health, at the standby", async || {
        let health = client.health();
        let mut endpoints = health.connections.iter().map(|one| one.endpoint.as_deref());
        let is_at_standby = endpoints.all(|one| one == Some("the embedded broker"));
        if is_at_standby && health.is_healthy() { Ok(()) } else { Err(format!("{health:?}")) }
    })
    .await;
    soon("an answer", client.inspect_queue("q")).await.unwrap();
}

/// How many connections were lost by now.
async fn losses(events: &mut ClientEvents) -> usize {
    let mut losses = 0;
    while let Ok(Some(event)) = timeout(Duration::ZERO, events.next()).await {
        losses += usize::from(matches!(event, ClientEvent::Lost { .. }));
    }
    losses
}

#[tokio::test]
async fn a_suspended_node_costs_publishers_and_consumers_no_more_than_a_pause() {
    let (node, standby) = (RabbitNode::start(Version::under_test()).await, standby());
    let client = client(&node, &standby).await;
    let publisher = publisher(&client).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    soon("an outcome", publisher.publish("q", "to the node")).await.unwrap();
    next(&mut deliveries).await.ack().unwrap();

    node.suspend().await;
    let publishing = tokio::spawn({
        let publisher = publisher.clone();
        async move { publisher.publish("q", "to the standby").await }
    });
    until_unhealthy(&client).await;
    // Within the time that a publish has by default.
    soon("an outcome", publishing).await.unwrap().unwrap();
    let delivery = next(&mut deliveries).await;
    assert_eq!(delivery.body(), "to the standby");
    delivery.ack().unwrap();
    until_at_standby(&client).await;
    node.resume();
}

#[tokio::test]
async fn a_suspended_node_is_left_by_consumers_and_callers_alone_too() {
    let (node, standby) = (RabbitNode::start(Version::under_test()).await, standby());
    let client = client(&node, &standby).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    node.suspend().await;
    let theirs = soon("a client", Client::builder().broker(&standby).connect()).await.unwrap();
    theirs.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
    publisher(&theirs).await.publish("q", "on the standby").await.unwrap();
    let ((), delivery) = tokio::join!(
        async {
            // Within the time that an answer may take by default.
            soon("an answer", client.inspect_queue("q")).await.unwrap();
        },
        next(&mut deliveries)
    );
    assert_eq!(delivery.body(), "on the standby");
    delivery.ack().unwrap();
    until_healthy(&client).await;
    node.resume();
}

#[tokio::test]
async fn what_waits_for_the_confirms_of_a_node_that_is_killed_is_confirmed_by_the_standby() {
    let (mut node, standby) = (RabbitNode::start(Version::under_test()).await, standby());
    let client = client(&node, &standby).await;
    let publisher = publisher(&client).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    soon("an outcome", publisher.publish("q", "to the node")).await.unwrap();
    next(&mut deliveries).await.ack().unwrap();

    let_the_leader(&node, "suspend").await;
    let mut tickets = Vec::new();
    for number in 0..10 {
        tickets.push(soon("a place", publisher.send("q", number.to_string())).await.unwrap());
    }
    node.kill().await;
    for ticket in tickets {
        soon("an outcome", ticket).await.unwrap();
    }
    for number in 0..10 {
        let delivery = next(&mut deliveries).await;
        assert_eq!(delivery.body(), number.to_string().as_str());
        delivery.ack().unwrap();
    }
    until_at_standby(&client).await;
    soon("an outcome", publisher.publish("q", "the last")).await.unwrap();
    assert_eq!(next(&mut deliveries).await.body(), "the last");
}

#[tokio::test]
async fn a_node_that_is_killed_while_messages_flow_costs_no_more_than_a_pause() {
    let (mut node, standby) = (RabbitNode::start(Version::under_test()).await, standby());
    let client = client(&node, &standby).await;
    let publisher = publisher(&client).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let publishing = tokio::spawn(async move {
        while !*stopped.borrow() {
            soon("an outcome", publisher.publish("q", "on and on")).await.unwrap();
        }
        soon("an outcome", publisher.publish("q", "the last")).await.unwrap();
    });
    for _ in 0..100 {
        next(&mut deliveries).await.ack().unwrap();
    }
    node.kill().await;
    let switching = async {
        until_at_standby(&client).await;
        stop.send_replace(true);
    };
    let consuming = async {
        loop {
            let delivery = next(&mut deliveries).await;
            let is_last = delivery.body() == "the last";
            // What came from the node can no longer be acked.
            let _ = delivery.ack();
            if is_last {
                break;
            }
        }
    };
    tokio::join!(switching, consuming);
    soon("the end", publishing).await.unwrap();
}

#[tokio::test]
async fn a_node_whose_memory_is_low_for_long_is_not_left() {
    let (node, standby) = (RabbitNode::start(Version::under_test()).await, standby());
    let client = client(&node, &standby).await;
    let publisher = publisher(&client).await;
    let mut events = client.watch();
    node.raise_memory_alarm().await;
    let waiting: Vec<_> = ["1", "2", "3"]
        .map(|body| {
            let publisher = publisher.clone();
            tokio::spawn(async move { publisher.publish("q", body).await })
        })
        .into();
    sleep(LONG).await;
    assert!(!client.health().is_healthy());
    // Other connections go on.
    soon("an answer", client.inspect_queue("q")).await.unwrap();
    for waiting in waiting {
        // The first may be confirmed before the broker blocks; those after it say why they were not.
        if let Err(error) = waiting.await.unwrap() {
            assert_eq!(error.blocked_by_broker(), Some("low on memory"), "{error}");
        }
    }
    node.clear_memory_alarm().await;
    until_healthy(&client).await;
    soon("an outcome", publisher.publish("q", "4")).await.unwrap();
    assert_eq!(losses(&mut events).await, 0);
}

/// Stops the process that leads a quorum queue, and lets it go on: everything else of the node works.
async fn let_the_leader(node: &RabbitNode, what: &str) {
    let stop = format!(
        "{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"/\">>, queue, <<\"q\">>)), \
         sys:{what}(amqqueue:get_pid(Q), infinity), ok."
    );
    node.ctl(&["eval", &stop]).await;
}

#[tokio::test]
async fn a_node_whose_queue_does_not_confirm_is_not_left() {
    let (node, standby) = (RabbitNode::start(Version::under_test()).await, standby());
    let client = client(&node, &standby).await;
    let publisher = publisher(&client).await;
    soon("an outcome", publisher.publish("q", "before")).await.unwrap();
    let mut events = client.watch();
    let_the_leader(&node, "suspend").await;
    // So many that the broker slows the connection down, by not reading from it.
    let mut tickets = Vec::new();
    for number in 0..2000 {
        tickets.push(soon("a place", publisher.send("q", number.to_string())).await.unwrap());
    }
    sleep(Duration::from_secs(20)).await;
    let health = client.health();
    assert!(
        health.connections.iter().all(|connection| connection.endpoint.is_some()),
        "{health:?}"
    );
    assert!(!health.publishers[0].is_ready(), "a publish has waited for long: {health:?}");
    let_the_leader(&node, "resume").await;
    for ticket in tickets {
        soon("an outcome", ticket).await.unwrap();
    }
    assert_eq!(losses(&mut events).await, 0);
    until_depth(&client, "q", 2001).await;
    until_healthy(&client).await;
}
