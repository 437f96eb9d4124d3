//! The client on a cluster whose nodes fail one at a time.

use leveret::Queue;
use leveret_testkit::rabbitmq::{RabbitCluster, RabbitNode, Version};

use crate::support::books::{Business, Size};
use crate::support::rabbit::Dice;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_confirmed_is_consumed_while_nodes_of_a_cluster_fail() {
    let size = Size::from_environment(Size { messages: 20_000, faults: 2 });
    let mut dice = Dice::seeded();
    let mut cluster = RabbitCluster::start(Version::under_test()).await;
    let vhost = cluster.vhost().await;
    let urls: Vec<String> =
        cluster.urls_for(vhost.name()).iter().map(|url| format!("{url}?heartbeat=2")).collect();
    // Each client begins with another node.
    let rotated = |number: usize| {
        let mut rotated = urls.clone();
        rotated.rotate_left(number % urls.len());
        rotated
    };
    let business = Business::open(size, Queue::quorum("q"), rotated).await;
    for number in 0..size.faults {
        business.time_for_fault(number).await;
        let index = dice.below(cluster.nodes().len());
        if dice.one_in(2) {
            cluster.node_mut(index).kill().await;
        } else {
            cluster.node_mut(index).stop().await;
        }
        cluster.node_mut(index).start_again().await;
        cluster.await_running(cluster.nodes().len()).await;
    }
    let confessions = || cluster.nodes().iter().map(RabbitNode::confessions).collect();
    business.close("three nodes", &format!("{} nodes failed", size.faults), confessions).await;
}
