//! What looking into parking lots leaves behind on a node.

use leveret::{ErrorKind, Filter, Queue, QueueType, Topology};
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

/// The client finds out about a queue by declaring it as a parking lot. The broker logs it if that is refused.
#[tokio::test]
async fn a_look_into_a_lot_or_a_queue_of_known_type_fills_no_log() {
    let node = RabbitNode::start(Version::under_test()).await;
    let vhost = node.broker().vhost().await;
    let lot = Queue::quorum("lot").argument("x-delivery-limit", 1_000_000_000i64);
    let owner = client_with(&vhost, lot).await;
    let other = Queue::quorum("other").delivery_limit(5);
    soon("a queue", owner.apply(&Topology::new().queue(other))).await.unwrap();
    let publisher = publisher(&owner).await;
    let looker = client(&vhost).await;
    let other = looker.parking_lot("other").queue_type(QueueType::Quorum).allow_counted_returns();
    let mut before = mistakes(&node, &owner, "before").await;
    for (name, lot) in [("lot", looker.parking_lot("lot")), ("other", other)] {
        soon("an outcome", publisher.publish(name, "job")).await.unwrap();
        for round in 0..3 {
            assert_eq!(soon("a list", lot.list(&Filter::new(), 10)).await.unwrap().len(), 1);
            let found = mistakes(&node, &owner, &format!("no-{name}-{round}")).await;
            assert_eq!(found, before + 1, "{name}: {}", node.log_tail());
            before = found;
        }
    }
}
