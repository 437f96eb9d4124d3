//! Calls and their replies.

use std::time::Duration;

use leveret_amqp::{ConsumeOptions, ErrorKind, Options, Publish, QueueOptions};
use leveret_wire::method::{basic, channel, connection, queue};
use leveret_wire::{Properties, ShortStr, Table};

use crate::support::{
    barrier, connected, connected_with, connected_with_channels, consuming, open_channel,
};
use crate::{tune, with_limits};

#[tokio::test(start_paused = true)]
async fn a_call_without_a_reply_fails_and_costs_the_channel_but_not_the_others() {
    let (connection, mut broker) = connected_with_channels(2).await;
    let channel = open_channel(&connection, &mut broker).await;
    let other = open_channel(&connection, &mut broker).await;
    let error = channel.declare_queue("q", QueueOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("queue.declare"), "{error}");
    assert_eq!(channel.check_open().unwrap_err().kind(), ErrorKind::Timeout);
    other.check_open().unwrap();
    broker.expect::<queue::Declare<'_>>(1).await;
    broker.expect::<channel::Close<'_>>(1).await;
    // The reply comes after all: nobody minds.
    broker.send(1, &queue::DeclareOk::default()).await;
    broker.send(1, &channel::CloseOk {}).await;
    barrier(&connection, &mut broker).await;
    assert_eq!(open_channel(&connection, &mut broker).await.id(), 1);
}

#[tokio::test]
async fn replies_of_different_kinds_may_overtake_each_other() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    let (cancelled, info, ()) =
        tokio::join!(consumer.cancel(), channel.inspect_queue("q"), async {
            broker.expect::<basic::Cancel<'_>>(1).await;
            broker.expect::<queue::Declare<'_>>(1).await;
            broker.send(1, &queue::DeclareOk { message_count: 7, ..Default::default() }).await;
            broker.send(1, &basic::CancelOk { consumer_tag: ShortStr::from_static("c") }).await;
        });
    cancelled.unwrap();
    assert_eq!(info.unwrap().messages, 7);
}

#[tokio::test]
async fn the_channel_limit_is_an_error_of_its_own() {
    let limit = connection::Tune { channel_max: 2, ..tune(0) };
    let (connection, mut broker) = connected_with(Options::default(), limit).await;
    let _one = open_channel(&connection, &mut broker).await;
    let two = open_channel(&connection, &mut broker).await;
    assert_eq!(connection.open_channel().await.unwrap_err().kind(), ErrorKind::ChannelLimit);
    let (closed, ()) = tokio::join!(two.close(), async {
        broker.expect::<channel::Close<'_>>(2).await;
        broker.send(2, &channel::CloseOk {}).await;
    });
    closed.unwrap();
    assert_eq!(open_channel(&connection, &mut broker).await.id(), 2);
}

#[tokio::test]
async fn what_cannot_be_sent_is_refused_before_it_is_sent() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let long = "x".repeat(256);
    let publish = Publish { routing_key: &long, ..Publish::default() };
    assert_eq!(channel.publish(&publish).await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    let value = "x".repeat(200_000);
    let headers = Table::from_pairs([("h", value.as_str().into())]).unwrap();
    let publish = Publish {
        properties: Properties { headers: Some(headers), ..Default::default() },
        ..Publish::default()
    };
    assert_eq!(channel.publish(&publish).await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    // Nothing was sent, and the channel is as good as before.
    channel.publish(&Publish { routing_key: "fine", ..Publish::default() }).await.unwrap();
    let content = broker.expect_content::<basic::Publish<'_>>(1).await;
    assert_eq!(content.method.routing_key, "fine");
}

#[tokio::test]
async fn a_secret_is_updated() {
    let (connection, mut broker) = connected().await;
    let (updated, ()) = tokio::join!(connection.update_secret(b"new", "expiry"), async {
        let update = broker.expect::<connection::UpdateSecret<'_>>(0).await;
        assert_eq!(update.new_secret.expose(), b"new");
        broker.send(0, &connection::UpdateSecretOk {}).await;
    });
    updated.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_is_not_answered_costs_the_connection() {
    let limits = with_limits(|limits| limits.reply_timeout = Duration::from_secs(2));
    let (connection, mut broker) = connected_with(limits, tune(0)).await;
    let (updated, ()) = tokio::join!(connection.update_secret(b"new", "expiry"), async {
        broker.expect::<connection::UpdateSecret<'_>>(0).await;
        broker.expect::<connection::Close<'_>>(0).await;
        broker.send(0, &connection::CloseOk {}).await;
    });
    assert_eq!(updated.unwrap_err().kind(), ErrorKind::Timeout);
    let ended = connection.ended().await;
    assert!(ended.to_string().contains("update-secret"), "{ended}");
}
