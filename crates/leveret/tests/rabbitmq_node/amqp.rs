//! The connection engine on RabbitMQ nodes that fail.

use std::time::Duration;

use leveret::amqp::{
    Channel, Confirm, Connection, ConsumeOptions, ErrorKind, Options, Outcome, QueueOptions,
};
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use tokio::time::timeout;

use crate::support::rabbit::{SOON, confirm_channel, to};

/// A channel with confirms, and an empty queue `q`.
async fn confirming(connection: &Connection) -> Channel<Confirm> {
    let channel = confirm_channel(connection).await;
    channel.declare_queue("q", QueueOptions::default()).await.unwrap();
    channel
}

fn options(url: &str, heartbeat: u64) -> Options {
    let mut options = Options::from_uri(url).unwrap();
    options.heartbeat = Some(Duration::from_secs(heartbeat));
    options
}

/// One node serves all of these, one after the other: to start one takes longer than they do.
#[tokio::test]
async fn a_connection_tells_what_happens_to_its_node() {
    let mut node = RabbitNode::start(Version::under_test()).await;
    a_memory_alarm_blocks_publishes_until_it_is_over(&node).await;
    a_suspended_node_is_found_out_by_its_silence(&node).await;
    every_publish_resolves_when_the_node_is_killed(&mut node).await;
}

async fn every_publish_resolves_when_the_node_is_killed(node: &mut RabbitNode) {
    let vhost = node.vhost().await;
    let connection = Connection::open(&options(&vhost.url(), 2)).await.unwrap();
    let channel = confirming(&connection).await;
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    let publishing = async {
        let mut confirmations = Vec::new();
        while let Ok(confirmation) = channel.publish(&to("q", vec![0; 200])).await {
            confirmations.push(confirmation);
            if confirmations.len() % 100 == 0 {
                tokio::task::yield_now().await;
            }
        }
        confirmations
    };
    let killing = async {
        for _ in 0..500 {
            consumer.next().await.unwrap().unwrap().ack().unwrap();
        }
        node.kill().await;
    };
    let (confirmations, ()) =
        timeout(SOON, async { tokio::join!(publishing, killing) }).await.unwrap();
    let (mut acked, mut lost) = (0, 0);
    for confirmation in confirmations {
        match timeout(SOON, confirmation).await.expect("an outcome for every publish") {
            Outcome::Acked => acked += 1,
            Outcome::Lost(error) => {
                assert!(error.is_connection_error(), "{error}");
                lost += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(acked >= 500 && lost > 0, "{acked} acked, {lost} lost");
    let ended = async { while let Some(Ok(_)) = consumer.next().await {} };
    timeout(SOON, ended).await.expect("the consumer to end");
}

async fn a_suspended_node_is_found_out_by_its_silence(node: &RabbitNode) {
    let vhost = node.vhost().await;
    let connection = Connection::open(&options(&vhost.url(), 1)).await.unwrap();
    let channel = confirming(&connection).await;
    node.suspend().await;
    let confirmation = channel.publish(&to("q", "into the void")).await.unwrap();
    let outcome = timeout(SOON, confirmation).await.unwrap();
    assert!(matches!(&outcome, Outcome::Lost(error) if error.kind() == ErrorKind::HeartbeatLost));
    node.resume();
}

async fn a_memory_alarm_blocks_publishes_until_it_is_over(node: &RabbitNode) {
    let vhost = node.vhost().await;
    let connection = Connection::open(&options(&vhost.url(), 10)).await.unwrap();
    let channel = confirming(&connection).await;
    assert!(channel.publish(&to("q", "before")).await.unwrap().await.is_acked());
    node.raise_memory_alarm().await;
    // RabbitMQ tells a connection when it publishes.
    let stuck = channel.publish(&to("q", "the first one blocked")).await.unwrap();
    let mut blocked = connection.blocked();
    timeout(SOON, blocked.wait_for(Option::is_some)).await.unwrap().unwrap();
    let publish = to("q", "waits");
    let mut waiting = std::pin::pin!(channel.publish(&publish));
    assert!(timeout(Duration::from_millis(300), &mut waiting).await.is_err());
    node.clear_memory_alarm().await;
    assert!(timeout(SOON, stuck).await.unwrap().is_acked());
    assert!(timeout(SOON, waiting).await.unwrap().unwrap().await.is_acked());
    assert_eq!(*connection.blocked().borrow(), None);
}
