//! Who gets messages, and who does not.

use leveret::amqp::{
    Connection, ConsumeOptions, Consumer, Delivery, ErrorKind, ExchangeOptions, GetOptions,
    Outcome, Publish, Refused, ReplyCode, Table,
};
use leveret_broker::Profile;
use leveret_testkit::eventually;
use tokio::time::timeout;

use super::stage::{SOON, Stage, body};

async fn next(consumer: &mut Consumer) -> Delivery {
    let delivery = timeout(SOON, consumer.next()).await.expect("a delivery in time");
    delivery.expect("a consumer that is there").unwrap()
}

fn options(prefetch: u16, priority: i32) -> ConsumeOptions {
    ConsumeOptions { prefetch, priority, ..ConsumeOptions::default() }
}

pub(crate) async fn a_prefetch_for_all_stops_consumers_in_3_10_alone(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", "classic", &[]).await;
    stage.fill("q", 1..=10).await;
    let channel = connection.open_channel().await.unwrap();
    let unlimited = || ConsumeOptions { prefetch: 0, ..ConsumeOptions::default() };
    let _one = channel.consume("q", unlimited()).await.unwrap();
    eventually(SOON, "all to be delivered", async || {
        stage.channel.inspect_queue("q").await.unwrap().messages == 0
    })
    .await;
    channel.prefetch_for_all(3).await.unwrap();
    stage.fill("q", 11..=12).await;
    // Who consumes already goes on in 4.3, where it is for those to come, and has too much in 3.10.
    let left = if stage.is_3_10() { 2 } else { 0 };
    eventually(SOON, format!("{left} to be left"), async || {
        stage.channel.inspect_queue("q").await.unwrap().messages == left
    })
    .await;
}

pub(crate) async fn a_quorum_queue_with_a_single_active_consumer_is_not_to_get_from(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    for kind in ["classic", "quorum"] {
        stage.queue(kind, kind, &[("x-single-active-consumer", true.into())]).await;
        let got = stage.channel.get(kind, GetOptions::default()).await;
        if kind == "classic" {
            assert!(got.unwrap().is_none());
            continue;
        }
        let error = got.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ChannelClosed(ReplyCode::RESOURCE_LOCKED));
        let quorum = if stage.is_3_10() { "quorum" } else { "<<\"quorum\">>" };
        let words = format!(
            "basic.get operations are not supported by {quorum} queues with single active consumer"
        );
        assert!(error.to_string().ends_with(&words), "{error}");
    }
}

pub(crate) async fn the_default_exchange_is_no_alternate(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", "classic", &[]).await;
    let arguments = Table::from_pairs([("alternate-exchange", "".into())]).unwrap();
    let options = ExchangeOptions { arguments, ..ExchangeOptions::default() };
    stage.channel.declare_exchange("x", "fanout", options).await.unwrap();
    let publish =
        Publish { exchange: "x", routing_key: "q", mandatory: true, ..Publish::default() };
    let outcome = stage.channel.publish(&publish).await.unwrap().await;
    assert!(matches!(outcome, Outcome::Returned(_)), "{outcome:?}");
}

pub(crate) async fn a_dead_letter_that_is_handed_on_at_once_is_new(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    let to = [("x-dead-letter-exchange", "".into()), ("x-dead-letter-routing-key", "to".into())];
    stage.queue("from", "classic", &to).await;
    stage.queue("to", "classic", &[]).await;
    let mut consumer = stage.channel.consume("to", options(10, 0)).await.unwrap();
    stage.fill("from", 1..=1).await;
    stage.take("from").await.reject(Refused::Requeue).unwrap();
    stage.take("from").await.reject(Refused::Discard).unwrap();
    assert!(!next(&mut consumer).await.redelivered());
}

pub(crate) async fn who_has_something_of_a_quorum_queue_counts_as_a_consumer(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    let consumers = async |count: u32| {
        eventually(SOON, format!("{count} consumers"), async || {
            stage.channel.inspect_queue("q").await.unwrap().consumers == count
        })
        .await;
    };
    stage.queue("q", "quorum", &[]).await;
    stage.fill("q", 1..=2).await;
    let got = stage.take("q").await;
    consumers(1).await;
    let mut consumer = stage.channel.consume("q", options(1, 0)).await.unwrap();
    consumers(2).await;
    let delivery = next(&mut consumer).await;
    consumer.cancel().await.unwrap();
    got.ack().unwrap();
    consumers(1).await;
    delivery.ack().unwrap();
    consumers(0).await;
}

pub(crate) async fn who_follows_a_single_active_consumer(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    for (kind, follower) in [("classic", 2), ("quorum", if stage.is_3_10() { 1 } else { 2 })] {
        stage.queue(kind, kind, &[("x-single-active-consumer", true.into())]).await;
        let mut consumers = Vec::new();
        for priority in [0, 0, 5] {
            consumers.push(stage.channel.consume(kind, options(10, priority)).await.unwrap());
        }
        consumers[0].cancel().await.unwrap();
        stage.fill(kind, 1..=1).await;
        next(&mut consumers[follower]).await.ack().unwrap();
    }
}

pub(crate) async fn who_has_settled_is_last_in_line_of_a_quorum_queue(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    for (kind, fourth) in [("classic", 0), ("quorum", 1)] {
        stage.queue(kind, kind, &[]).await;
        let mut consumers = Vec::new();
        for prefetch in [1, 1, 10] {
            consumers.push(stage.channel.consume(kind, options(prefetch, 0)).await.unwrap());
        }
        stage.fill(kind, 1..=2).await;
        let first = next(&mut consumers[0]).await;
        let second = next(&mut consumers[1]).await;
        second.ack().unwrap();
        first.ack().unwrap();
        // A classic queue has not noticed that they could take no more, and keeps them in line.
        stage.fill(kind, 3..=4).await;
        assert_eq!(body(&next(&mut consumers[2]).await), "3", "{kind}");
        assert_eq!(body(&next(&mut consumers[fourth]).await), "4", "{kind}");
    }
}

pub(crate) async fn who_gave_a_message_back_too_often_gets_the_next(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", "quorum", &[("x-delivery-limit", 0.into())]).await;
    stage.fill("q", 1..=2).await;
    let mut consumer = stage.channel.consume("q", options(1, 0)).await.unwrap();
    next(&mut consumer).await.reject(Refused::Requeue).unwrap();
    assert_eq!(body(&next(&mut consumer).await), "2");
}
