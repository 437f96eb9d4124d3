//! How a channel, a connection and what waits on them end.

use std::time::Duration;

use bytes::Bytes;
use leveret_amqp::{ConsumeOptions, ErrorKind, Options, Outcome, Publish, QueueOptions, ReplyCode};
use leveret_wire::ShortStr;
use leveret_wire::method::{basic, channel, connection, queue};
use tokio::time::timeout;

use crate::support::{
    barrier, confirming, connected, connected_with, connected_with_channels, consuming,
    open_channel,
};
use crate::{SOON, send_deliveries, tune};

fn close_channel(code: ReplyCode) -> channel::Close<'static> {
    channel::Close {
        reply_code: code,
        reply_text: ShortStr::from_static("PRECONDITION_FAILED - because"),
        class_id: 60,
        method_id: 40,
    }
}

#[tokio::test(start_paused = true)]
async fn signs_of_life_go_both_ways_and_their_absence_ends_the_connection() {
    let (connection, mut broker) = connected_with(Options::default(), tune(10)).await;
    for _ in 0..5 {
        broker.expect_heartbeat().await;
        broker.send_heartbeat().await;
    }
    // From here on the broker is silent, though its socket is open.
    let error = timeout(Duration::from_secs(60), connection.ended()).await.unwrap();
    assert_eq!(error.kind(), ErrorKind::HeartbeatLost);
    assert_eq!(connection.open_channel().await.unwrap_err().kind(), ErrorKind::HeartbeatLost);
}

#[tokio::test]
async fn a_thousand_pending_confirms_all_resolve_when_the_channel_is_closed() {
    let (connection, mut broker) = connected().await;
    let channel = confirming(&connection, &mut broker).await;
    let mut confirmations = Vec::new();
    for _ in 0..1000 {
        let publish = Publish { routing_key: "q", ..Publish::default() };
        confirmations.push(channel.publish(&publish).await.unwrap());
    }
    for _ in 0..1000 {
        broker.expect_content::<basic::Publish<'_>>(1).await;
    }
    broker.send(1, &basic::Ack { delivery_tag: 300, multiple: true }).await;
    broker.send(1, &basic::Nack { delivery_tag: 302, ..Default::default() }).await;
    broker.send(1, &close_channel(ReplyCode::PRECONDITION_FAILED)).await;
    broker.expect::<channel::CloseOk>(1).await;
    for (index, confirmation) in confirmations.into_iter().enumerate() {
        match timeout(SOON, confirmation).await.unwrap() {
            Outcome::Acked => assert!(index < 300),
            Outcome::Nacked => assert_eq!(index, 301),
            Outcome::Lost(error) => {
                assert!(index >= 300 && index != 301);
                assert_eq!(error.reply_code(), Some(ReplyCode::PRECONDITION_FAILED));
                assert!(error.to_string().contains("in basic.publish: because"), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(channel.confirmed(SOON).await.is_err());
}

#[tokio::test]
async fn everything_that_waits_is_told_when_the_connection_dies() {
    let (connection, mut broker) = connected().await;
    let channel = confirming(&connection, &mut broker).await;
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    let confirmation = channel.publish(&Publish::default()).await.unwrap();
    let call = channel.declare_queue("x", QueueOptions::default());
    let (called, ()) = tokio::join!(call, async {
        broker.expect_content::<basic::Publish<'_>>(1).await;
        broker.expect::<queue::Declare<'_>>(1).await;
        drop(broker);
    });
    assert_eq!(called.unwrap_err().kind(), ErrorKind::ConnectionLost);
    let Outcome::Lost(error) = timeout(SOON, confirmation).await.unwrap() else { panic!() };
    assert!(error.is_connection_error());
    let ended = timeout(SOON, consumer.next()).await.unwrap().unwrap().unwrap_err();
    assert_eq!(ended.kind(), ErrorKind::ConnectionLost);
    assert!(consumer.next().await.is_none());
    assert_eq!(connection.ended().await.kind(), ErrorKind::ConnectionLost);
    connection.close().await.unwrap();
}

#[tokio::test]
async fn the_broker_closes_the_connection_and_says_why() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let close = connection::Close {
        reply_code: ReplyCode::CONNECTION_FORCED,
        reply_text: ShortStr::from_static("CONNECTION_FORCED - broker forced connection closure"),
        class_id: 0,
        method_id: 0,
    };
    broker.send(0, &close).await;
    broker.expect::<connection::CloseOk>(0).await;
    let error = timeout(SOON, connection.ended()).await.unwrap();
    assert_eq!(error.kind(), ErrorKind::ConnectionClosed(ReplyCode::CONNECTION_FORCED));
    assert_eq!(
        error.to_string(),
        "the broker closed the connection: 320 CONNECTION_FORCED: broker forced connection closure"
    );
    assert_eq!(channel.publish(&Publish::default()).await.unwrap_err().kind(), error.kind());
    broker.expect_end().await;
}

#[tokio::test(start_paused = true)]
async fn closing_never_hangs_on_a_broker_that_says_nothing() {
    let (connection, mut broker) = connected().await;
    let channel = confirming(&connection, &mut broker).await;
    let _unconfirmed = channel.publish(&Publish::default()).await.unwrap();
    let started = tokio::time::Instant::now();
    let _ = timeout(Duration::from_secs(300), connection.close()).await.expect("an end");
    assert!(started.elapsed() <= Duration::from_secs(120), "{:?}", started.elapsed());
}

#[tokio::test]
async fn dropping_everything_closes_channel_and_connection() {
    let (connection, mut broker) = connected_with_channels(1).await;
    let channel = open_channel(&connection, &mut broker).await;
    drop(channel);
    broker.expect::<channel::Close<'_>>(1).await;
    broker.send(1, &channel::CloseOk {}).await;
    barrier(&connection, &mut broker).await;
    let next = open_channel(&connection, &mut broker).await;
    assert_eq!(next.id(), 1);
    drop(connection);
    // The channel still holds it open.
    assert!(next.check_open().is_ok());
    drop(next);
    broker.expect::<channel::Close<'_>>(1).await;
    broker.expect::<connection::Close<'_>>(0).await;
    broker.send(0, &connection::CloseOk {}).await;
    broker.expect_end().await;
}

#[tokio::test]
async fn a_channel_that_both_sides_close_at_once_is_closed_once() {
    let (connection, mut broker) = connected_with_channels(1).await;
    let channel = open_channel(&connection, &mut broker).await;
    let (closed, ()) = tokio::join!(channel.close(), async {
        broker.expect::<channel::Close<'_>>(1).await;
        broker.send(1, &close_channel(ReplyCode::PRECONDITION_FAILED)).await;
        broker.expect::<channel::CloseOk>(1).await;
        broker.send(1, &channel::CloseOk {}).await;
    });
    closed.unwrap();
    assert_eq!(open_channel(&connection, &mut broker).await.id(), 1);
}

#[tokio::test]
async fn what_the_broker_still_sends_on_a_channel_it_closed_is_passed_over() {
    let (connection, mut broker) = connected_with_channels(1).await;
    let channel = open_channel(&connection, &mut broker).await;
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    broker.send(1, &close_channel(ReplyCode::PRECONDITION_FAILED)).await;
    send_deliveries(&mut broker, 1, 1..=3).await;
    broker.expect::<channel::CloseOk>(1).await;
    assert!(consumer.next().await.unwrap().is_err());
    barrier(&connection, &mut broker).await;
    // The number is used again while more is under way.
    let (again, ()) = tokio::join!(connection.open_channel(), async {
        broker.expect::<channel::Open>(1).await;
        send_deliveries(&mut broker, 1, 4..=4).await;
        broker.send(1, &channel::OpenOk {}).await;
    });
    assert_eq!(again.unwrap().id(), 1);
}

#[tokio::test]
async fn what_comes_late_for_a_closed_channel_is_not_taken_for_the_next_ones() {
    let (connection, mut broker) = connected().await;
    let channel = confirming(&connection, &mut broker).await;
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    let old = channel.publish(&Publish::default()).await.unwrap();
    broker.expect_content::<basic::Publish<'_>>(1).await;
    broker.send(1, &close_channel(ReplyCode::NOT_FOUND)).await;
    broker.expect::<channel::CloseOk>(1).await;
    assert!(matches!(old.await, Outcome::Lost(_)));
    assert!(consumer.next().await.unwrap().is_err());

    let next = confirming(&connection, &mut broker).await;
    let confirmation = next.publish(&Publish::default()).await.unwrap();
    broker.expect_content::<basic::Publish<'_>>(next.id()).await;
    // RabbitMQ writes these when the next channel is open already.
    send_deliveries(&mut broker, 1, 1..=1).await;
    broker.send(1, &basic::Ack { delivery_tag: 1, multiple: true }).await;
    barrier(&connection, &mut broker).await;
    assert!(confirmation.outcome().is_none());
    let nack = basic::Nack { delivery_tag: 1, multiple: false, requeue: false };
    broker.send(next.id(), &nack).await;
    assert!(matches!(confirmation.await, Outcome::Nacked));
}

#[tokio::test]
async fn closing_the_connection_closes_its_channels_first() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    channel.publish(&Publish::default()).await.unwrap();
    let (closed, ()) = tokio::join!(connection.close(), async {
        broker.expect_content::<basic::Publish<'_>>(1).await;
        broker.expect::<channel::Close<'_>>(1).await;
        broker.expect_silence(Duration::from_millis(20)).await;
        broker.send(1, &channel::CloseOk {}).await;
        broker.expect::<connection::Close<'_>>(0).await;
        broker.send(0, &connection::CloseOk {}).await;
    });
    closed.unwrap();
    assert_eq!(connection.ended().await.kind(), ErrorKind::ConnectionClosedHere);
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_stopped_to_read_does_not_keep_a_closed_connection_alive() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    let publish = Publish { body: Bytes::from(vec![0; 64 * 1024]), ..Publish::default() };
    while channel.publish(&publish).await.is_ok() {}
    timeout(Duration::from_secs(300), connection.close()).await.expect("an end").unwrap();
    assert!(connection.ended().await.kind() == ErrorKind::Timeout);
    assert!(consumer.next().await.unwrap().is_err());
}

#[test]
fn everything_ends_when_the_runtime_of_the_connection_is_gone() {
    let first = tokio::runtime::Runtime::new().unwrap();
    let (_broker, channel, connection) = first.block_on(async {
        let (connection, mut broker) = connected().await;
        let channel = confirming(&connection, &mut broker).await;
        (broker, channel, connection)
    });
    let confirmation = first.block_on(channel.publish(&Publish::default())).unwrap();
    first.shutdown_background();
    let second = tokio::runtime::Runtime::new().unwrap();
    second.block_on(async {
        let outcome = timeout(SOON, confirmation).await.expect("an outcome");
        assert!(matches!(outcome, Outcome::Lost(_)), "{outcome:?}");
        timeout(SOON, connection.ended()).await.expect("an end");
        assert!(channel.publish(&Publish::default()).await.is_err());
    });
}

#[tokio::test(start_paused = true)]
async fn confirms_of_so_far_do_not_wait_for_later_ones() {
    let (connection, mut broker) = connected().await;
    let channel = confirming(&connection, &mut broker).await;
    drop(channel.publish(&Publish::default()).await.unwrap());
    let (tally, ()) = tokio::join!(channel.confirmed(SOON), async {
        tokio::task::yield_now().await;
        drop(channel.publish(&Publish::default()).await.unwrap());
        broker.send(1, &basic::Ack { delivery_tag: 1, multiple: false }).await;
    });
    assert_eq!(tally.unwrap().acked, 1);
    let late = channel.confirmed(Duration::from_secs(1)).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Timeout);
}
