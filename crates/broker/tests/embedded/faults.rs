//! Each fault does what it says, and is over when it says so.

use std::time::Duration;

use leveret::amqp::{
    Connection, ConsumeOptions, ErrorKind, ExchangeOptions, Options, Outcome, QueueOptions,
    ReplyCode,
};
use leveret_testkit::eventually;
use tokio::time::Instant;

use crate::support::{SOON, broker, connect, get, put, with_queue};

#[tokio::test]
async fn connections_are_cut_by_name_or_all() {
    let broker = broker();
    let mut named = Options::default();
    named.connection_name = Some("victim".to_owned());
    let victim = Connection::open_over(broker.connect(), &named).await.unwrap();
    let other = connect(&broker).await;
    assert_eq!(broker.faults().cut_connections_named("nobody"), 0);
    assert_eq!(broker.faults().cut_connections_named("victim"), 1);
    assert_eq!(victim.ended().await.kind(), ErrorKind::ConnectionLost);
    other.open_channel().await.unwrap();
    broker.faults().cut_all_connections();
    assert_eq!(other.ended().await.kind(), ErrorKind::ConnectionLost);
    eventually(SOON, "the broker to forget them", async || broker.statistics().connections == 0)
        .await;
    connect(&broker).await.open_channel().await.unwrap();
}

#[tokio::test]
async fn declares_are_refused_as_often_as_asked_for() {
    let broker = broker();
    let connection = connect(&broker).await;
    broker.faults().refuse_declares(2);
    let refused = ErrorKind::ChannelClosed(ReplyCode::PRECONDITION_FAILED);
    let channel = connection.open_channel().await.unwrap();
    let error = channel.declare_queue("q", QueueOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), refused);
    let channel = connection.open_channel().await.unwrap();
    let error = channel.declare_exchange("x", "fanout", ExchangeOptions::default()).await;
    assert_eq!(error.unwrap_err().kind(), refused);
    let channel = connection.open_channel().await.unwrap();
    channel.declare_queue("q", QueueOptions::default()).await.unwrap();
    assert!(broker.snapshot().virtual_host("/").unwrap().exchanges.iter().all(|x| x.name != "x"));
}

#[tokio::test(start_paused = true)]
async fn declares_are_answered_late_as_often_as_asked_for() {
    let broker = broker();
    let channel = connect(&broker).await.open_channel().await.unwrap();
    let delay = Duration::from_secs(7);
    broker.faults().delay_declares(1, delay);
    let began = Instant::now();
    channel.declare_queue("q", QueueOptions::default()).await.unwrap();
    assert_eq!(began.elapsed().as_secs(), 7);
    channel.declare_queue("q", QueueOptions::default()).await.unwrap();
    assert_eq!(began.elapsed().as_secs(), 7);
}

#[tokio::test]
async fn publishes_are_nacked_and_returned_as_often_as_asked_for() {
    let broker = broker();
    let connection = connect(&broker).await;
    let channel = with_queue(&connection).await;
    broker.faults().nack_publishes(2);
    for _ in 0..2 {
        assert!(matches!(put(&channel, "q", "nacked").await, Outcome::Nacked));
    }
    broker.faults().return_publishes(1);
    assert!(matches!(put(&channel, "q", "returned").await, Outcome::Returned(_)));
    assert!(put(&channel, "q", "taken").await.is_acked());
    assert_eq!(get(&channel, "q").await.as_deref(), Some("taken"));
    assert_eq!(get(&channel, "q").await, None);
    let tally = broker.statistics().tally;
    assert_eq!((tally.published, tally.nacked, tally.returned, tally.enqueued), (4, 2, 1, 1));
}

#[tokio::test]
async fn publishers_are_blocked_until_they_are_not() {
    let broker = broker();
    let connection = connect(&broker).await;
    let channel = with_queue(&connection).await;
    broker.faults().block("for a test");
    let mut blocked = connection.blocked();
    assert!(put(&channel, "q", "the one that is noticed").await.is_acked());
    blocked.wait_for(|reason| reason.as_deref() == Some("for a test")).await.unwrap();
    broker.faults().unblock();
    blocked.wait_for(Option::is_none).await.unwrap();
    assert!(put(&channel, "q", "another").await.is_acked());
}

#[tokio::test]
async fn consumers_are_cancelled() {
    let broker = broker();
    let connection = connect(&broker).await;
    let channel = with_queue(&connection).await;
    let mut one = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    let mut two = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    assert_eq!(broker.faults().cancel_consumers("/", "missing"), 0);
    assert_eq!(broker.faults().cancel_consumers("/", "q"), 2);
    for consumer in [&mut one, &mut two] {
        let error = consumer.next().await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConsumerCancelled);
    }
    // The queue is still there, and can be consumed.
    assert!(put(&channel, "q", "x").await.is_acked());
    let mut three = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    three.next().await.unwrap().unwrap().ack().unwrap();
}

#[tokio::test(start_paused = true)]
async fn consumers_are_forgotten_without_a_word() {
    let broker = broker();
    let connection = connect(&broker).await;
    let channel = with_queue(&connection).await;
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    assert_eq!(broker.faults().forget_consumers("/", "q"), 1);
    assert_eq!(channel.inspect_queue("q").await.unwrap().consumers, 0);
    assert!(put(&channel, "q", "x").await.is_acked());
    tokio::time::timeout(Duration::from_secs(5), consumer.next()).await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn a_frozen_broker_says_nothing_until_it_is_thawed() {
    let broker = broker();
    let connection = connect(&broker).await;
    let channel = with_queue(&connection).await;
    broker.faults().freeze();
    let asked = tokio::spawn(async move { channel.inspect_queue("q").await });
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!asked.is_finished());
    broker.faults().thaw();
    asked.await.unwrap().unwrap();
}
