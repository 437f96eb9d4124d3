//! Publishes that have to wait, and how they are cut into frames.

use std::time::Duration;

use bytes::Bytes;
use leveret_amqp::{ConsumeOptions, ErrorKind, Options, Publish};
use leveret_wire::ShortStr;
use leveret_wire::method::{basic, channel, connection};

use crate::support::{confirming, connected, connected_with, consuming, open_channel};
use crate::{send_deliveries, tune, with_limits};

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
