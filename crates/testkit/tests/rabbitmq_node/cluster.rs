//! A cluster: what a quorum queue promises holds.

use std::time::Duration;

use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{RabbitCluster, Version};

use crate::support::{declare, publish, take};

/// Electing a leader on two busy cores takes some seconds.
const ELECTION: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_quorum_queue_survives_the_loss_of_its_leader() {
    let mut cluster = RabbitCluster::start(Version::under_test()).await;
    let vhost = cluster.vhost().await;
    declare(cluster.node(0).management(), vhost.name(), "ledger", "quorum").await.unwrap();
    let queue = eventually(ELECTION, "the queue to have a member on each node", || async {
        let queue =
            cluster.node(0).management().get(&["queues", vhost.name(), "ledger"]).await.ok()?;
        let members = queue["online"].as_array()?.len();
        (members == cluster.nodes().len()).then_some(queue)
    })
    .await;
    assert_eq!(queue["type"], "quorum");
    assert!(publish(cluster.node(0).management(), vhost.name(), "ledger", "first").await.unwrap());

    // The node that leads the queue is the one whose loss is felt.
    let leader = queue["leader"].as_str().unwrap();
    let lost = cluster.nodes().iter().position(|node| node.name() == leader).unwrap();
    cluster.node_mut(lost).kill().await;
    let survivor = cluster.node((lost + 1) % cluster.nodes().len());
    let message = eventually(ELECTION, "the queue to go on without its leader", || async {
        take(survivor.management(), vhost.name(), "ledger").await.ok()?
    })
    .await;
    assert_eq!(message, "first");
    assert!(publish(survivor.management(), vhost.name(), "ledger", "second").await.unwrap());

    cluster.node_mut(lost).start_again().await;
    cluster.await_running(3).await;
    let message = eventually(ELECTION, "the node that was lost to serve the queue", || async {
        take(cluster.node(lost).management(), vhost.name(), "ledger").await.ok()?
    })
    .await;
    assert_eq!(message, "second");
}
