//! Parking lots whose quorum queue has not caught up: RabbitMQ's channel then holds back what it should tell it, tells it later in another
//! order, and forgets it if it is closed before.

use std::ops::ControlFlow;

use leveret::{Client, Filter, Message, ParkedMessage, Progress, Queue};
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use tokio::runtime::Handle;
use tokio::task::block_in_place;

use crate::support::client::{client, client_with, next, publisher, soon, until_depth};

/// For five seconds from now no quorum queue of the node gets anything done, though it answers: what it should do cannot be written
/// down. Whoever looks waits for a second until what was given back is there.
async fn halt(node: &RabbitNode) {
    let later = "spawn(fun() -> timer:sleep(5000), sys:resume(ra_log_wal) end)";
    node.ctl(&["eval", &format!("sys:suspend(ra_log_wal), {later}.")]).await;
}

fn number(body: &[u8]) -> u32 {
    std::str::from_utf8(body).unwrap().parse().unwrap()
}

/// The queue `q`, with the arguments of a parking lot.
fn lot() -> Queue {
    Queue::quorum("q").argument("x-delivery-limit", 1_000_000_000i64)
}

/// Puts the numbers from 0 on into `q`.
async fn fill(client: &Client, count: u32) {
    let publisher = publisher(client).await;
    let message = |n: u32| Message::new(n.to_string()).header("odd", i64::from(n % 2));
    let messages = (0..count).map(|n| ("q", message(n)));
    soon("outcomes", publisher.publish_batch(messages)).await.unwrap();
}

/// One node serves both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_slow_node_nothing_comes_again_and_no_order_changes() {
    let node = RabbitNode::start(Version::under_test()).await;
    a_look_at_many_pages_changes_no_order(&node).await;
    what_has_left_a_lot_does_not_come_again_though_the_queue_is_slow(&node).await;
}

/// More acks than the queue is told of at once: what stays is between them.
async fn what_has_left_a_lot_does_not_come_again_though_the_queue_is_slow(node: &RabbitNode) {
    const COUNT: u32 = 800;
    let vhost = node.broker().vhost().await;
    let owner = client_with(&vhost, lot()).await;
    fill(&owner, COUNT).await;
    let looker = client(&vhost).await;
    let lot = looker.parking_lot("q");
    // When all are in its hands.
    let mut is_halted = false;
    let progress = |progress: &Progress| {
        if progress.seen == u64::from(COUNT) && !is_halted {
            is_halted = true;
            block_in_place(|| Handle::current().block_on(halt(node)));
        }
    };
    let purge = lot.purge().filter(Filter::new().header("odd", 1)).progress(progress);
    let purged = soon("a purge", purge.run()).await.unwrap();
    assert_eq!(purged.done, u64::from(COUNT / 2));
    soon("the end", looker.close()).await;
    until_depth(&owner, "q", COUNT / 2).await;
    let mut deliveries = owner.consumer("q").stream().await.unwrap();
    for n in (0..COUNT).step_by(2) {
        let delivery = next(&mut deliveries).await;
        assert_eq!(number(delivery.body()), n, "they keep their order");
        delivery.ack().unwrap();
    }
    assert!(is_halted);
}

/// More pages than the queue is told of at once.
async fn a_look_at_many_pages_changes_no_order(node: &RabbitNode) {
    let count = 40_000;
    let vhost = node.broker().vhost().await;
    let owner = client_with(&vhost, lot()).await;
    fill(&owner, count).await;
    let lot = client(&vhost).await.parking_lot("q");
    for round in 0..2 {
        let mut shown: Vec<u32> = Vec::new();
        let look = |message: &ParkedMessage| {
            shown.push(number(message.body()));
            ControlFlow::Continue(())
        };
        soon("a look", lot.look(look).run()).await.unwrap();
        let in_order = shown.iter().copied().eq(0..count);
        assert!(in_order, "round {round}: {} shown, not in order", shown.len());
    }
}
