//! Delayed messages on a node that fails while they wait. `LEVERET_CHAOS_MESSAGES` makes it a harsh one.

use std::collections::HashSet;
use std::time::Duration;

use leveret::{Client, Queue, QueueType, Topology};
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use tokio::time::{Instant, timeout};

use crate::support::client::{SOON, soon};

/// RabbitMQ sends a dead letter again if the next queue has not confirmed it for three minutes, as one may not that is just
/// starting.
const PATIENCE: Duration = Duration::from_secs(300);

/// Whether nodes are killed, and not just restarted: what was on its way between two queues of a killed node may come minutes
/// later, and on 3.10 a quorum queue may be left without a leader for ever.
fn is_harsh() -> bool {
    std::env::var("LEVERET_CHAOS_MESSAGES").is_ok() && Version::under_test() != Version::V3_10
}

/// A node and a client, whose delayed messages wait in queues of this type.
async fn start(queue_type: QueueType) -> (RabbitNode, Client) {
    let node = RabbitNode::start(Version::under_test()).await;
    let url = format!("{}?heartbeat=1", node.url());
    let client = soon("a client", Client::builder().endpoint(url.as_str()).unwrap().connect());
    let client = client.await.unwrap();
    client.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
    soon("a ladder", client.delays().declare(queue_type)).await.unwrap();
    (node, client)
}

async fn publish(client: &Client, delays: &[Duration]) {
    let publisher = client.publisher("").timeout(SOON).build().await.unwrap();
    let mut tickets = Vec::new();
    for delay in delays {
        let body = delay.as_millis().to_string();
        tickets.push(soon("room", publisher.send_in("q", body, *delay)).await.unwrap());
    }
    for ticket in tickets {
        soon("an outcome", ticket).await.unwrap();
    }
}

async fn fail(node: &mut RabbitNode) {
    if is_harsh() {
        node.kill().await;
        node.start_again().await;
    } else {
        node.restart().await;
    }
}

#[tokio::test]
async fn quorum_queues_lose_none_even_if_the_node_fails_while_messages_move() {
    let (mut node, client) = start(QueueType::Quorum).await;
    let delays: Vec<_> = (1..=100).map(|step| step * Duration::from_millis(50)).collect();
    let began = Instant::now();
    publish(&client, &delays).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    fail(&mut node).await;

    let mut missing: HashSet<Duration> = delays.into_iter().collect();
    let mut deliveries = soon("a consumer", client.consumer("q").stream()).await.unwrap();
    while !missing.is_empty() {
        // A message that was on its way from one queue to the next may come twice.
        let delivery = timeout(PATIENCE, deliveries.next()).await;
        let delivery = delivery.unwrap_or_else(|_| panic!("{missing:?} did not come"));
        let delivery = delivery.expect("the stream goes on").unwrap();
        let delay = std::str::from_utf8(delivery.body()).unwrap().parse().unwrap();
        let delay = Duration::from_millis(delay);
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
    let (mut node, client) = start(QueueType::Classic).await;
    let delays: Vec<_> = (0..10).map(|n| Duration::from_secs(3600 + n)).collect();
    publish(&client, &delays).await;
    fail(&mut node).await;
    let pending = timeout(PATIENCE, async {
        loop {
            match client.delays().pending().await {
                Ok(pending) => break pending,
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    });
    assert_eq!(pending.await.expect("the node is there again"), 10);
    client.close().await;
}
