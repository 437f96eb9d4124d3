//! The connection engine against a broker that does what a test says.

mod support;

use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_core::Stream;
use leveret::amqp::{
    Channel, ConsumeOptions, Delivery, ErrorKind, GetOptions, Limits, Options, Outcome, Publish,
    QueueOptions, Refused, ReplyCode,
};
use leveret_testkit::peer::Received;
use leveret_wire::method::{basic, channel, connection, queue};
use leveret_wire::{FrameKind, Method, Properties, ShortStr, Table};
use support::{
    Broker, barrier, confirming, connected, connected_with, consuming, consuming_by_name,
    open_channel,
};
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(10);

fn tune(heartbeat: u16) -> connection::Tune {
    connection::Tune { channel_max: 2047, frame_max: 131_072, heartbeat }
}

fn with_limits(change: impl FnOnce(&mut Limits)) -> Options {
    let mut options = Options::default();
    change(&mut options.limits);
    options
}

fn deliver(tag: u64) -> basic::Deliver<'static> {
    basic::Deliver {
        consumer_tag: ShortStr::from_static("c"),
        delivery_tag: tag,
        redelivered: false,
        exchange: ShortStr::from_static("the exchange"),
        routing_key: ShortStr::from_static("the key"),
    }
}

async fn send_deliveries(broker: &mut Broker, id: u16, tags: std::ops::RangeInclusive<u64>) {
    for tag in tags {
        broker.send_content(id, &deliver(tag), &Properties::default(), tag.to_string()).await;
    }
}

fn close_channel(code: ReplyCode) -> channel::Close<'static> {
    channel::Close {
        reply_code: code,
        reply_text: ShortStr::from_static("PRECONDITION_FAILED - because"),
        class_id: 60,
        method_id: 40,
    }
}

// ---- heartbeats

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

// ---- the end of things

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
    let (connection, mut broker) = connected().await;
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
    let (connection, mut broker) = connected().await;
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
    let (connection, mut broker) = connected().await;
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

// ---- malformed and out of order

#[tokio::test]
async fn what_the_protocol_forbids_ends_the_connection_with_a_reason() {
    type Script = fn(&mut Broker) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send + '_>>;
    let scripts: &[(&str, Script)] = &[
        ("a frame that does not end", |b| {
            Box::pin(b.send_bytes(b"\x01\x00\x01\x00\x00\x00\x00\x00"))
        }),
        ("an oversize frame", |b| Box::pin(b.send_bytes(b"\x03\x00\x01\xff\xff\xff\xff"))),
        ("an unknown frame type", |b| Box::pin(b.send_bytes(b"\x07"))),
        ("an unknown method", |b| Box::pin(b.send_frame(FrameKind::Method, 1, &[0, 99, 0, 1]))),
        ("a truncated method", |b| {
            Box::pin(b.send_frame(FrameKind::Method, 1, &[0, 60, 0, 80, 1]))
        }),
        ("a header without a method", |b| Box::pin(b.send_frame(FrameKind::Header, 1, &[0; 14]))),
        ("a body without a header", |b| Box::pin(b.send_frame(FrameKind::Body, 1, b"x"))),
        ("an agreement to no close", |b| {
            Box::pin(async { b.send(0, &connection::CloseOk {}).await })
        }),
        ("a body on channel 0", |b| Box::pin(b.send_frame(FrameKind::Body, 0, b"x"))),
        ("a heartbeat on a channel", |b| Box::pin(b.send_frame(FrameKind::Heartbeat, 1, b""))),
        ("a channel that is not open", |b| Box::pin(async { b.send(9, &basic::QosOk {}).await })),
        ("a reply to no call", |b| Box::pin(async { b.send(1, &basic::QosOk {}).await })),
        ("a confirm of no publish", |b| {
            Box::pin(async { b.send(1, &basic::Ack { delivery_tag: 1, multiple: false }).await })
        }),
        ("a method on the wrong channel", |b| {
            Box::pin(async { b.send(0, &basic::QosOk {}).await })
        }),
        ("a delivery for nobody", |b| {
            Box::pin(async { b.send_content(1, &deliver(1), &Properties::default(), "x").await })
        }),
        ("a delivery tag out of the blue", |b| {
            Box::pin(async {
                let got = basic::GetOk { delivery_tag: u64::MAX, ..Default::default() };
                b.send(1, &got).await;
            })
        }),
        ("a method amid a content", |b| {
            Box::pin(async {
                let returned = basic::Return::default();
                b.send(1, &returned).await;
                b.send(1, &basic::QosOk {}).await;
            })
        }),
    ];
    for (what, script) in scripts {
        let (connection, mut broker) = connected().await;
        let _channel = confirming(&connection, &mut broker).await;
        script(&mut broker).await;
        let error = timeout(SOON, connection.ended()).await.unwrap_or_else(|_| panic!("{what}"));
        assert_eq!(error.kind(), ErrorKind::Protocol, "{what}: {error}");
        let close = broker.expect::<connection::Close<'_>>(0).await;
        assert_ne!(close.reply_code, ReplyCode::SUCCESS, "{what}");
        assert!(!close.reply_text.is_empty(), "{what}");
        broker.expect_end().await;
    }
}

#[tokio::test]
async fn frames_split_at_every_byte_are_understood() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    let mut frames = leveret_wire::Outbound::new();
    let max = leveret_wire::FrameMax::DEFAULT;
    let body = Bytes::from_static(b"body");
    frames.content(1, &deliver(1), &Properties::default(), &body, max).unwrap();
    let bytes = frames.copy_to_bytes(frames.remaining());
    for byte in bytes {
        broker.send_bytes(&[byte]).await;
        tokio::task::yield_now().await;
    }
    let delivery = timeout(SOON, consumer.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(
        (delivery.exchange(), delivery.routing_key()),
        (ShortStr::from_static("the exchange"), ShortStr::from_static("the key"))
    );
    assert_eq!(delivery.body(), "body");
    delivery.ack().unwrap();
    assert_eq!(broker.expect::<basic::Ack>(1).await.delivery_tag, 1);
}

/// The frames of a delivery, one after another.
fn frames_of_delivery(id: u16, body: &Bytes) -> Vec<Bytes> {
    let mut frames = leveret_wire::Outbound::new();
    let max = leveret_wire::FrameMax::DEFAULT;
    frames.content(id, &deliver(1), &Properties::default(), body, max).unwrap();
    let mut bytes = frames.copy_to_bytes(frames.remaining());
    std::iter::from_fn(|| {
        let size = u32::from_be_bytes(bytes.get(3..7)?.try_into().ok()?) as usize;
        Some(bytes.split_to(size + 8))
    })
    .collect()
}

#[tokio::test]
async fn large_bodies_of_two_channels_come_whole_however_their_frames_are_mixed_and_cut() {
    let (connection, mut broker) = connected().await;
    let first = open_channel(&connection, &mut broker).await;
    let second = open_channel(&connection, &mut broker).await;
    let mut consumers = [
        consuming(&first, ConsumeOptions::default(), &mut broker).await,
        consuming(&second, ConsumeOptions::default(), &mut broker).await,
    ];
    let bodies = [1_000_003, 700_001].map(|size: u32| -> Bytes {
        (0..size).map(|place| (place.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    });
    let (one, other) = (frames_of_delivery(1, &bodies[0]), frames_of_delivery(2, &bodies[1]));
    let heartbeat = Bytes::from_static(b"\x08\x00\x00\x00\x00\x00\x00\xce");
    let mut mixed = Vec::new();
    for place in 0..one.len() {
        mixed.extend(one.get(place).cloned());
        mixed.extend(other.get(place).cloned());
        mixed.push(heartbeat.clone());
    }
    for piece in mixed.concat().chunks(50_021) {
        broker.send_bytes(piece).await;
    }
    for (consumer, body) in consumers.iter_mut().zip(&bodies) {
        let delivery = timeout(SOON, consumer.next()).await.unwrap().unwrap().unwrap();
        assert!(delivery.body() == body);
        delivery.ack().unwrap();
    }
}

#[tokio::test]
async fn a_channel_that_is_closed_amid_a_large_body_costs_the_others_nothing() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let other = open_channel(&connection, &mut broker).await;
    let consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    let bytes = frames_of_delivery(1, &vec![7; 1_000_000].into()).concat();
    let (begin, rest) = bytes.split_at(400_000);
    broker.send_bytes(begin).await;
    tokio::task::yield_now().await;
    drop(consumer);
    let (closed, ()) = tokio::join!(channel.close(), async {
        broker.expect::<basic::Cancel<'_>>(1).await;
        broker.expect::<channel::Close<'_>>(1).await;
        broker.send_bytes(rest).await;
        broker.send(1, &channel::CloseOk {}).await;
    });
    closed.unwrap();
    other.check_open().unwrap();
    barrier(&connection, &mut broker).await;
}

// ---- calls

#[tokio::test(start_paused = true)]
async fn a_call_without_a_reply_fails_and_costs_the_channel_but_not_the_others() {
    let (connection, mut broker) = connected().await;
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

// ---- publishing

#[tokio::test(start_paused = true)]
async fn a_blocked_connection_stops_publishes_and_nothing_else() {
    let (connection, mut broker) = connected().await;
    let channel = confirming(&connection, &mut broker).await;
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    send_deliveries(&mut broker, 1, 1..=1).await;
    let delivery = consumer.next().await.unwrap().unwrap();
    broker.send(0, &connection::Blocked { reason: ShortStr::from_static("low on memory") }).await;
    let mut blocked = connection.blocked();
    blocked.wait_for(Option::is_some).await.unwrap();

    delivery.ack().unwrap();
    assert_eq!(broker.expect::<basic::Ack>(1).await.delivery_tag, 1);
    let error = channel.publish(&Publish::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("low on memory"), "{error}");

    let publish = Publish::default();
    let (published, ()) = tokio::join!(channel.publish(&publish), async {
        broker.expect_silence(Duration::from_secs(1)).await;
        broker.send(0, &connection::Unblocked {}).await;
    });
    let confirmation = published.unwrap();
    broker.expect_content::<basic::Publish<'_>>(1).await;
    broker.send(1, &basic::Ack { delivery_tag: 1, multiple: false }).await;
    assert!(confirmation.await.is_acked());
}

#[tokio::test(start_paused = true)]
async fn a_channel_that_the_broker_pauses_stops_its_publishes_and_no_others() {
    let (connection, mut broker) = connected().await;
    let paused = open_channel(&connection, &mut broker).await;
    let other = open_channel(&connection, &mut broker).await;
    broker.send(1, &channel::Flow { active: false }).await;
    assert!(!broker.expect::<channel::FlowOk>(1).await.active);
    other.publish(&Publish::default()).await.unwrap();
    broker.expect_content::<basic::Publish<'_>>(2).await;
    let error = paused.publish(&Publish::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("pauses the channel"), "{error}");

    let publish = Publish::default();
    let (published, ()) = tokio::join!(paused.publish(&publish), async {
        broker.expect_silence(Duration::from_secs(1)).await;
        broker.send(1, &channel::Flow { active: true }).await;
        assert!(broker.expect::<channel::FlowOk>(1).await.active);
    });
    published.unwrap();
    broker.expect_content::<basic::Publish<'_>>(1).await;
}

#[tokio::test(start_paused = true)]
async fn a_publish_waits_no_longer_than_its_timeout_whatever_it_waits_for() {
    let limits = with_limits(|limits| limits.max_unconfirmed = 1);
    let patience = limits.limits.publish_timeout;
    let (connection, mut broker) = connected_with(limits, tune(0)).await;
    let channel = confirming(&connection, &mut broker).await;
    drop(channel.publish(&Publish::default()).await.unwrap());
    let began = tokio::time::Instant::now();
    let publish = Publish::default();
    let (published, ()) = tokio::join!(channel.publish(&publish), async {
        // Half of the time for the confirm, and then the broker blocks.
        tokio::time::sleep(patience / 2).await;
        broker.send(0, &connection::Blocked { reason: ShortStr::from_static("disk") }).await;
        broker.send(1, &basic::Ack { delivery_tag: 1, multiple: false }).await;
    });
    assert_eq!(published.unwrap_err().kind(), ErrorKind::Timeout);
    // Paused time: not a measurement.
    assert_eq!(began.elapsed().as_secs(), patience.as_secs());
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_does_not_read_makes_publishers_wait_and_memory_stays_bounded() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let body = Bytes::from(vec![0; 1024]);
    let mut sent = 0u64;
    let error = loop {
        let publish = Publish { body: body.clone(), ..Publish::default() };
        match channel.publish(&publish).await {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Timeout);
    // The pipe holds 4 MiB, and there is one buffer on either side of the swap.
    assert!(sent < 7 * 1024, "{sent} messages were taken");
    for _ in 0..sent {
        broker.expect_content::<basic::Publish<'_>>(1).await;
    }
    channel.publish(&Publish::default()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn too_many_unconfirmed_publishes_make_the_next_one_wait() {
    let (connection, mut broker) =
        connected_with(with_limits(|limits| limits.max_unconfirmed = 10), tune(0)).await;
    let channel = confirming(&connection, &mut broker).await;
    for _ in 0..10 {
        drop(channel.publish(&Publish::default()).await.unwrap());
    }
    let error = channel.publish(&Publish::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    broker.send(1, &basic::Ack { delivery_tag: 3, multiple: true }).await;
    drop(channel.publish(&Publish::default()).await.unwrap());
}

#[tokio::test]
async fn bodies_are_split_at_the_agreed_frame_size() {
    let small = connection::Tune { frame_max: 4096, ..tune(0) };
    let (connection, mut broker) = connected_with(Options::default(), small).await;
    let channel = open_channel(&connection, &mut broker).await;
    for size in [0, 1, 4088, 4089, 100_000] {
        let body: Bytes = (0..size).map(|n| (n % 251) as u8).collect();
        channel.publish(&Publish { body: body.clone(), ..Publish::default() }).await.unwrap();
        let content = broker.expect_content::<basic::Publish<'_>>(1).await;
        assert!(content.body == body, "{size} bytes");
    }
}

// ---- consuming

#[tokio::test]
async fn acks_in_order_become_one_and_others_do_not() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    send_deliveries(&mut broker, 1, 1..=8).await;
    let mut deliveries = Vec::new();
    for _ in 0..8 {
        deliveries.push(consumer.next().await.unwrap().unwrap());
    }
    // No await in between, so the writer cannot run.
    for delivery in deliveries.drain(..4) {
        delivery.ack().unwrap();
    }
    let eight = deliveries.pop().unwrap();
    eight.ack().unwrap();
    let seven = deliveries.pop().unwrap();
    seven.nack(Refused::Discard).unwrap();
    for delivery in deliveries {
        delivery.ack().unwrap();
    }
    assert_eq!(
        broker.expect::<basic::Ack>(1).await,
        basic::Ack { delivery_tag: 4, multiple: true }
    );
    assert_eq!(
        broker.expect::<basic::Ack>(1).await,
        basic::Ack { delivery_tag: 8, multiple: false }
    );
    assert_eq!(broker.expect::<basic::Nack>(1).await.delivery_tag, 7);
    // 5 and 6: all below are settled, so one ack for both.
    assert_eq!(
        broker.expect::<basic::Ack>(1).await,
        basic::Ack { delivery_tag: 6, multiple: true }
    );
}

#[tokio::test]
async fn deliveries_of_before_a_recover_send_nothing() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    send_deliveries(&mut broker, 1, 1..=3).await;
    let one = consumer.next().await.unwrap().unwrap();
    let between = consumer.next().await.unwrap().unwrap();
    let (recovered, ()) = tokio::join!(channel.recover(), async {
        broker.expect::<basic::Recover>(1).await;
        assert_eq!(between.ack().unwrap_err().kind(), ErrorKind::Stale);
        broker.send(1, &basic::RecoverOk {}).await;
        send_deliveries(&mut broker, 1, 4..=4).await;
    });
    recovered.unwrap();
    assert_eq!(one.ack().unwrap_err().kind(), ErrorKind::Stale);
    // The third is not handed out any more.
    let four = consumer.next().await.unwrap().unwrap();
    assert_eq!(four.delivery_tag(), 4);
    four.ack().unwrap();
    assert_eq!(broker.expect::<basic::Ack>(1).await.delivery_tag, 4);
}

#[tokio::test]
async fn a_recover_that_nothing_answers_tells_old_deliveries_from_new_ones_all_the_same() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    send_deliveries(&mut broker, 1, 1..=2).await;
    let one = consumer.next().await.unwrap().unwrap();
    // It waits for nothing.
    channel.recover_async().await.unwrap();
    assert_eq!(one.ack().unwrap_err().kind(), ErrorKind::Stale);
    assert!(broker.expect::<basic::RecoverAsync>(1).await.requeue);
    assert!(broker.expect::<basic::Recover>(1).await.requeue);
    // This one was on its way. Nobody can know, so it must not be settled.
    send_deliveries(&mut broker, 1, 3..=3).await;
    let mut old = Vec::new();
    while old.last().is_none_or(|last: &Delivery| last.delivery_tag() < 3) {
        old.push(consumer.next().await.unwrap().unwrap());
    }
    for delivery in old {
        assert_eq!(delivery.nack(Refused::Requeue).unwrap_err().kind(), ErrorKind::Stale);
    }
    broker.send(1, &basic::RecoverOk {}).await;
    send_deliveries(&mut broker, 1, 4..=4).await;
    consumer.next().await.unwrap().unwrap().ack().unwrap();
    assert_eq!(broker.expect::<basic::Ack>(1).await.delivery_tag, 4);
}

#[tokio::test]
async fn a_recover_that_nothing_answers_is_refused_on_a_closed_channel() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let close = channel::Close { reply_code: ReplyCode::NOT_FOUND, ..Default::default() };
    broker.send(1, &close).await;
    broker.expect::<channel::CloseOk>(1).await;
    let refused = channel.recover_async().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ChannelClosed(ReplyCode::NOT_FOUND));
}

#[tokio::test(start_paused = true)]
async fn a_consumer_that_takes_nothing_is_ended_and_the_others_go_on() {
    let limits = with_limits(|limits| {
        limits.consumer_buffer = 10;
        limits.slow_consumer_timeout = Duration::from_secs(1);
    });
    let (connection, mut broker) = connected_with(limits, tune(0)).await;
    let slow_channel = open_channel(&connection, &mut broker).await;
    let options = ConsumeOptions { auto_ack: true, ..Default::default() };
    let mut slow = consuming(&slow_channel, options, &mut broker).await;
    let other = open_channel(&connection, &mut broker).await;
    send_deliveries(&mut broker, 1, 1..=11).await;
    let (info, cancel) = tokio::join!(other.inspect_queue("q"), async {
        // The broker answers at once; the reader gets to it after the slow consumer's time is up.
        let declare = broker.receive().await;
        assert!(matches!(declare, Received::Method(2, Method::QueueDeclare(_))), "{declare:?}");
        broker.send(2, &queue::DeclareOk::default()).await;
        broker.expect::<basic::Cancel<'_>>(1).await
    });
    info.unwrap();
    assert_eq!(cancel.consumer_tag, "c");
    for tag in 1..=11u64 {
        assert_eq!(slow.next().await.unwrap().unwrap().body(), tag.to_string().as_bytes());
    }
    assert_eq!(slow.next().await.unwrap().unwrap_err().kind(), ErrorKind::ConsumerTooSlow);
    assert!(slow.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn bodies_count_towards_what_a_consumer_may_have_waiting() {
    let limits = with_limits(|limits| {
        limits.consumer_buffer_bytes = 1000;
        limits.slow_consumer_timeout = Duration::from_secs(1);
    });
    let (connection, mut broker) = connected_with(limits, tune(0)).await;
    let channel = open_channel(&connection, &mut broker).await;
    let options = ConsumeOptions { auto_ack: true, ..Default::default() };
    let mut slow = consuming(&channel, options, &mut broker).await;
    broker.send_content(1, &deliver(1), &Properties::default(), vec![0; 1001]).await;
    broker.expect::<basic::Cancel<'_>>(1).await;
    drop(slow.next().await.unwrap().unwrap());
    assert_eq!(slow.next().await.unwrap().unwrap_err().kind(), ErrorKind::ConsumerTooSlow);
}

#[tokio::test]
async fn without_a_prefetch_the_broker_is_asked_for_no_more_than_the_bound() {
    let limits = with_limits(|limits| limits.consumer_buffer = 77);
    let (connection, mut broker) = connected_with(limits, tune(0)).await;
    let channel = open_channel(&connection, &mut broker).await;
    let options = ConsumeOptions { prefetch: 0, ..Default::default() };
    let (consumer, prefetch) = tokio::join!(channel.consume("q", options), async {
        let qos = broker.expect::<basic::Qos>(1).await;
        broker.send(1, &basic::QosOk {}).await;
        let consume = broker.expect::<basic::Consume<'_>>(1).await;
        broker.send(1, &basic::ConsumeOk { consumer_tag: consume.consumer_tag }).await;
        qos.prefetch_count
    });
    consumer.unwrap();
    assert_eq!(prefetch, 77);
}

#[tokio::test]
async fn settling_what_was_settled_with_a_later_one_is_reported_and_sends_nothing() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    send_deliveries(&mut broker, 1, 1..=4).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(consumer.next().await.unwrap().unwrap());
    }
    held.pop().unwrap().ack_all_before().unwrap();
    assert_eq!(
        broker.expect::<basic::Ack>(1).await,
        basic::Ack { delivery_tag: 4, multiple: true }
    );
    let stale = [
        held.pop().unwrap().ack(),
        held.pop().unwrap().reject(Refused::Requeue),
        held.pop().unwrap().nack_all_before(Refused::Discard),
    ];
    for settled in stale {
        assert_eq!(settled.unwrap_err().kind(), ErrorKind::Stale);
    }
    barrier(&connection, &mut broker).await;
}

#[tokio::test]
async fn a_consumer_is_a_stream() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    send_deliveries(&mut broker, 1, 1..=1).await;
    let mut stream = std::pin::pin!(consumer);
    let next = std::future::poll_fn(|context| Stream::poll_next(stream.as_mut(), context));
    assert_eq!(next.await.unwrap().unwrap().body(), "1");
}

#[tokio::test]
async fn a_consume_that_is_abandoned_is_cancelled() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let options = ConsumeOptions { tag: "c".to_owned(), auto_ack: true, ..Default::default() };
    let abandoned = timeout(Duration::from_millis(50), channel.consume("q", options)).await;
    assert!(abandoned.is_err());
    broker.expect::<basic::Consume<'_>>(1).await;
    // Not before its answer: RabbitMQ would not answer at all.
    broker.expect_silence(Duration::from_millis(20)).await;
    broker.send(1, &basic::ConsumeOk { consumer_tag: ShortStr::from_static("c") }).await;
    send_deliveries(&mut broker, 1, 1..=1).await;
    broker.expect::<basic::Cancel<'_>>(1).await;
    broker.send(1, &basic::CancelOk { consumer_tag: ShortStr::from_static("c") }).await;
    // One more was under way.
    send_deliveries(&mut broker, 1, 2..=2).await;
    let (info, ()) = tokio::join!(channel.inspect_queue("q"), async {
        broker.expect::<queue::Declare<'_>>(1).await;
        broker.send(1, &queue::DeclareOk::default()).await;
    });
    info.unwrap();
}

#[tokio::test]
async fn however_many_consumers_ended_what_was_under_way_to_one_costs_nothing() {
    for auto_ack in [true, false] {
        let (connection, mut broker) = connected().await;
        let channel = open_channel(&connection, &mut broker).await;
        for number in 0..300 {
            let tag = if number == 0 { "c".to_owned() } else { number.to_string() };
            let options = ConsumeOptions { tag, auto_ack, ..Default::default() };
            drop(consuming_by_name(&channel, options, &mut broker).await);
            let cancel = broker.expect::<basic::Cancel<'_>>(1).await;
            broker.send(1, &basic::CancelOk { consumer_tag: cancel.consumer_tag }).await;
        }
        send_deliveries(&mut broker, 1, 1..=1).await;
        if !auto_ack {
            let nack = broker.expect::<basic::Nack>(1).await;
            assert!(nack.delivery_tag == 1 && nack.requeue, "{nack:?}");
        }
        // And what comes for those that are there is delivered.
        let options = ConsumeOptions { auto_ack, ..Default::default() };
        let mut consumer = consuming(&channel, options, &mut broker).await;
        send_deliveries(&mut broker, 1, 2..=2).await;
        let delivery = timeout(SOON, consumer.next()).await.unwrap().unwrap().unwrap();
        assert_eq!(delivery.body(), "2");
    }
}

#[tokio::test]
async fn the_broker_cancels_a_consumer() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    send_deliveries(&mut broker, 1, 1..=1).await;
    broker
        .send(1, &basic::Cancel { consumer_tag: ShortStr::from_static("c"), nowait: false })
        .await;
    broker.expect::<basic::CancelOk<'_>>(1).await;
    consumer.next().await.unwrap().unwrap().ack().unwrap();
    let error = consumer.next().await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConsumerCancelled);
    // What was delivered before can still be settled.
    assert_eq!(broker.expect::<basic::Ack>(1).await.delivery_tag, 1);
}

#[tokio::test]
async fn a_get_that_is_abandoned_gives_its_message_back() {
    let (connection, mut broker) = connected().await;
    let channel: Channel = open_channel(&connection, &mut broker).await;
    let get = channel.get("q", GetOptions::default());
    assert!(timeout(Duration::from_millis(50), get).await.is_err());
    broker.expect::<basic::Get<'_>>(1).await;
    let got = basic::GetOk { delivery_tag: 1, ..Default::default() };
    broker.send_content(1, &got, &Properties::default(), "x").await;
    let nack = broker.expect::<basic::Nack>(1).await;
    assert!(nack.requeue);
}
