//! What looking into parking lots leaves behind on a node.

use leveret::{ErrorKind, Filter, Queue, Topology};
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{RabbitNode, Version};

use crate::support::client::{SOON, client, client_with, publisher, soon};

/// How many channels the node has closed for a mistake so far, by its log. `mark` is one more such mistake, after which all
/// before are logged.
async fn mistakes(node: &RabbitNode, client: &leveret::Client, mark: &str) -> usize {
    let missing = soon("an answer", client.inspect_queue(mark)).await.unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Missing);
    eventually(SOON, "the node's log", async || node.log_tail().contains(mark)).await;
    let log = node.log_tail();
    log.lines().filter(|line| line.contains("caused a channel exception")).count()
}

/// What kind of queue it is can only be asked by a mistake.
#[tokio::test]
async fn only_the_first_look_fills_the_log() {
    let node = RabbitNode::start(Version::under_test()).await;
    let vhost = node.broker().vhost().await;
    let owner = client_with(&vhost, Queue::quorum("quorum").delivery_limit(5)).await;
    let classic = Queue::classic("classic").max_length(1000).max_priority(3);
    soon("a queue", owner.apply(&Topology::new().queue(classic))).await.unwrap();
    let publisher = publisher(&owner).await;
    let looker = client(&vhost).await;
    for queue in ["quorum", "classic"] {
        soon("an outcome", publisher.publish(queue, "job")).await.unwrap();
        let lot = looker.parking_lot(queue);
        let mut before = 0;
        for round in 0..5 {
            assert_eq!(soon("a list", lot.list(&Filter::new(), 10)).await.unwrap().len(), 1);
            let found = mistakes(&node, &owner, &format!("no-{queue}-{round}")).await;
            match round {
                0 => assert!(found > 1, "it has asked"),
                _ => assert_eq!(found, before + 1, "{queue}: {}", node.log_tail()),
            }
            before = found;
        }
    }
}
