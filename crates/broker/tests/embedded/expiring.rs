//! Messages and queues whose time is up, under paused time.

use std::time::Duration;

use leveret::amqp::{ConsumeOptions, GetOptions, Properties, QueueOptions, Table};
use tokio::time::{Instant, sleep};

use crate::support::{broker, connect, put, put_with, with_queue};

fn expiring(milliseconds: &str) -> Properties<'_> {
    Properties { expiration: Some(milliseconds.try_into().unwrap()), ..Properties::default() }
}

#[tokio::test(start_paused = true)]
async fn what_has_come_to_the_front_dies_in_time() {
    let broker = broker();
    let connection = connect(&broker).await;
    let channel = with_queue(&connection).await;
    put(&channel, "q", "held").await;
    put_with(&channel, "q", "dying", expiring("5000")).await;
    let one = ConsumeOptions { prefetch: 1, ..ConsumeOptions::default() };
    let mut consumer = channel.consume("q", one).await.unwrap();
    let held = consumer.next().await.unwrap().unwrap();
    sleep(Duration::from_millis(4900)).await;
    assert_eq!(broker.statistics().tally.expired, 0);
    sleep(Duration::from_millis(200)).await;
    assert_eq!(broker.statistics().tally.expired, 1);
    held.ack().unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_is_behind_others_is_not_looked_at() {
    let broker = broker();
    let connection = connect(&broker).await;
    let channel = with_queue(&connection).await;
    put(&channel, "q", "first").await;
    put_with(&channel, "q", "dying", expiring("10")).await;
    sleep(Duration::from_secs(60)).await;
    assert_eq!(channel.inspect_queue("q").await.unwrap().messages, 2);
    assert_eq!(broker.statistics().tally.expired, 0);
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_nobody_uses_is_deleted() {
    let broker = broker();
    let channel = connect(&broker).await.open_channel().await.unwrap();
    let arguments = Table::from_pairs([("x-expires", 60_000.into())]).unwrap();
    let options = QueueOptions { arguments, ..QueueOptions::default() };
    channel.declare_queue("q", options).await.unwrap();
    let exists = || broker.snapshot().virtual_host("/").unwrap().queue("q").is_some();
    sleep(Duration::from_secs(50)).await;
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    sleep(Duration::from_secs(3600)).await;
    assert!(exists());
    let began = Instant::now();
    consumer.cancel().await.unwrap();
    while exists() {
        sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(began.elapsed().as_secs(), 61);
}

#[tokio::test(start_paused = true)]
async fn a_quorum_queue_is_in_use_while_something_of_it_is_unsettled() {
    let broker = broker();
    let channel =
        connect(&broker).await.open_channel().await.unwrap().into_confirm().await.unwrap();
    let arguments = [("x-expires", 60_000.into()), ("x-queue-type", "quorum".into())];
    let arguments = Table::from_pairs(arguments).unwrap();
    let options = QueueOptions { arguments, ..QueueOptions::default() };
    channel.declare_queue("q", options.clone()).await.unwrap();
    put(&channel, "q", "one").await;
    let exists = || broker.snapshot().virtual_host("/").unwrap().queue("q").is_some();
    let got = channel.get("q", GetOptions::default()).await.unwrap().unwrap();
    // For as long as it may be kept.
    sleep(Duration::from_secs(29 * 60)).await;
    assert!(exists());
    got.ack().unwrap();
    sleep(Duration::from_secs(40)).await;
    // That is no use of it.
    channel.declare_queue("q", options).await.unwrap();
    sleep(Duration::from_secs(30)).await;
    assert!(!exists());
}
