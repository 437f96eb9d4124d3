//! Who gets messages, and who does not.

use leveret::amqp::{
    Connection, ConsumeOptions, ErrorKind, ExchangeOptions, GetOptions, Outcome, Publish,
    ReplyCode, Table,
};
use leveret_broker::Profile;
use leveret_testkit::eventually;

use super::stage::{SOON, Stage};

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
