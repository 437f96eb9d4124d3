//! Delayed messages on a node that is killed while they wait. `LEVERET_CHAOS_MESSAGES` is how many.

use std::collections::HashSet;
use std::time::Duration;

use leveret::{Binding, Exchange, Queue, QueueType, Topology};
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use tokio::time::{Instant, sleep, timeout};

use crate::support::client::soon;
use crate::support::kills::{PATIENCE, connect, count, kill_and_restart, unstick};

/// A node that is killed while thousands of messages move from queue to queue, with default settings: the delays are spread over
/// ten seconds. Every second one is for an exchange, to which the client takes it when its time has come.
#[tokio::test]
async fn a_killed_node_loses_no_delayed_message() {
    let mut node = RabbitNode::start(Version::under_test()).await;
    let client = connect(&node).await;
    let topology = Topology::new()
        .exchange(Exchange::topic("events"))
        .queue(Queue::quorum("q"))
        .binding(Binding::to_queue("q", "events", "q"));
    client.apply(&topology).await.unwrap();
    let to_queue = client.publisher("").build().await.unwrap();
    let to_exchange = client.publisher("events").build().await.unwrap();
    let began = Instant::now();
    let delays: Vec<_> = (0..count(3000))
        .map(|n| Duration::from_secs(2) + Duration::from_micros(n * 10_000_000 / count(3000)))
        .collect();
    let mut tickets = Vec::new();
    for (number, delay) in delays.iter().enumerate() {
        let body = delay.as_micros().to_string();
        let publisher = if number % 2 == 0 { &to_queue } else { &to_exchange };
        tickets.push(soon("room", publisher.send_in("q", body, *delay)).await.unwrap());
    }
    for ticket in tickets {
        soon("a confirm", ticket).await.unwrap();
    }
    // Nothing waits for this time but the test: it has messages moving.
    sleep(Duration::from_secs(6).saturating_sub(began.elapsed())).await;
    kill_and_restart(&mut node).await;

    let mut missing: HashSet<Duration> = delays.into_iter().collect();
    let mut deliveries = soon("a consumer", client.consumer("q").stream()).await.unwrap();
    while !missing.is_empty() {
        // A message that was on its way from one queue to the next may come twice, and minutes late.
        let delivery = match timeout(PATIENCE, deliveries.next()).await {
            Ok(delivery) => delivery.expect("the stream goes on").unwrap(),
            Err(_) => {
                unstick(&mut node, &format!("{} messages did not come", missing.len())).await;
                continue;
            }
        };
        let delay = std::str::from_utf8(delivery.body()).unwrap().parse().unwrap();
        let delay = Duration::from_micros(delay);
        assert!(began.elapsed() >= delay, "{delay:?} is early");
        missing.remove(&delay);
        delivery.ack().unwrap();
    }
    client.close().await;
}

/// Classic queues do not wait for the next one to have a message, and may lose one that moves while the node fails. Of
/// these, none moves for an hour.
#[tokio::test]
async fn classic_queues_keep_what_waits() {
    let mut node = RabbitNode::start(Version::under_test()).await;
    let client = connect(&node).await;
    client.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
    soon("a ladder", client.delays().declare(QueueType::Classic)).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    for n in 0..10 {
        let delay = Duration::from_secs(3600 + n);
        soon("an outcome", publisher.publish_in("q", "later", delay)).await.unwrap();
    }
    kill_and_restart(&mut node).await;
    let pending = timeout(PATIENCE, async {
        loop {
            match client.delays().pending().await {
                Ok(pending) => break pending,
                Err(_) => sleep(Duration::from_millis(100)).await,
            }
        }
    });
    assert_eq!(pending.await.expect("the node is there again"), 10);
    client.close().await;
}
