//! What comes malformed, out of order or in pieces.

use bytes::{Buf, Bytes};
use leveret_amqp::{ConsumeOptions, ErrorKind, ReplyCode};
use leveret_wire::method::{basic, channel, connection};
use leveret_wire::{FrameKind, Properties, ShortStr};
use tokio::time::timeout;

use crate::support::{Broker, barrier, confirming, connected, consuming, open_channel};
use crate::{SOON, deliver};

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
