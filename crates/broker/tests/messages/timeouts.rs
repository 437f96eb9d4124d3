//! Deliveries that are kept for too long, as far as clients can say how long that is: in 4.3.

use leveret::amqp::{Channel, Connection, ConsumeOptions, ErrorKind, GetOptions, ReplyCode, Value};
use leveret_broker::Profile;
use leveret_testkit::eventually;
use tokio::time::timeout;

use super::stage::{SOON, Stage, headers};

const A_SECOND: (&str, Value<'static>) = ("x-consumer-timeout", Value::I64(1000));

pub(crate) async fn a_consumer_of_a_quorum_queue_that_keeps_a_message_is_cancelled(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    if stage.is_3_10() {
        return;
    }
    stage.queue("q", "quorum", &[A_SECOND]).await;
    stage.fill("q", 1..=1).await;
    let channel = connection.open_channel().await.unwrap();
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    let kept = consumer.next().await.unwrap().unwrap();
    let end = timeout(SOON, consumer.next()).await.expect("an end of the consumer");
    assert!(
        matches!(&end, Some(Err(error)) if error.kind() == ErrorKind::ConsumerCancelled),
        "{end:?}"
    );
    let again = stage.take("q").await;
    assert!(again.redelivered());
    assert_eq!(headers(&again), "x-acquired-count=l:1");
    // Too late, but the channel lives.
    kept.ack().unwrap();
    assert!(channel.get("q", GetOptions::default()).await.unwrap().is_none());
}

pub(crate) async fn a_message_that_was_got_from_a_quorum_queue_and_kept_costs_the_channel(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    if stage.is_3_10() {
        return;
    }
    stage.queue("q", "quorum", &[A_SECOND]).await;
    stage.fill("q", 1..=1).await;
    let channel = connection.open_channel().await.unwrap();
    let _kept = channel.get("q", GetOptions::default()).await.unwrap().unwrap();
    expect_timeout(&channel).await;
}

pub(crate) async fn a_message_that_a_cancelled_consumer_keeps_costs_the_channel(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    if stage.is_3_10() {
        return;
    }
    stage.queue("q", "quorum", &[A_SECOND]).await;
    stage.fill("q", 1..=1).await;
    let channel = connection.open_channel().await.unwrap();
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    let _kept = consumer.next().await.unwrap().unwrap();
    consumer.cancel().await.unwrap();
    expect_timeout(&channel).await;
    assert!(stage.take("q").await.redelivered());
}

async fn expect_timeout(channel: &Channel) {
    let error = eventually(SOON, "the channel to be closed", async || {
        channel.inspect_queue("q").await.err()
    })
    .await;
    assert_eq!(error.kind(), ErrorKind::ChannelClosed(ReplyCode::PRECONDITION_FAILED), "{error}");
    assert!(error.to_string().contains("Timeout value used: -1 ms."), "{error}");
}
