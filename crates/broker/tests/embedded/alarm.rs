//! Too many messages: publishers are stopped, and consumers are not.

use std::time::Duration;

use leveret::amqp::ConsumeOptions;
use leveret_broker::Broker;
use leveret_testkit::eventually;
use leveret_testkit::peer::Peer;
use leveret_wire::method::{basic, channel, connection, queue, tx};
use leveret_wire::{Properties, ReplyCode};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::support::{SOON, connect, get, peer, put, with_queue};

#[tokio::test]
async fn publishers_wait_while_memory_is_short_and_consumers_go_on() {
    let broker = Broker::builder().memory_limit(100_000).start().unwrap();
    let published = || broker.statistics().tally.published;
    let publisher = connect(&broker).await;
    let channel = with_queue(&publisher).await;
    let mut careless = peer(&broker).await;
    careless.send(1, &channel::Open {}).await;
    careless.expect::<channel::OpenOk>(1).await;

    let large = "x".repeat(60_000);
    let mut blocked = publisher.blocked();
    assert!(put(&channel, "q", &large).await.is_acked());
    assert!(put(&channel, "q", &large).await.is_acked());
    blocked.wait_for(|reason| reason.as_deref() == Some("low on memory")).await.unwrap();
    // One who does not care is not read from, as soon as it has published.
    let publish = basic::Publish { routing_key: "q".try_into().unwrap(), ..Default::default() };
    careless.send_content(1, &publish, &Properties::default(), "third").await;
    eventually(SOON, "the third publish", async || published() == 3).await;
    careless.send_content(1, &publish, &Properties::default(), "fourth").await;

    // Whoever does not publish is not stopped, and may do everything else.
    let other = connect(&broker).await;
    let consuming = other.open_channel().await.unwrap();
    assert_eq!(consuming.inspect_queue("q").await.unwrap().messages, 3);
    let mut consumer = consuming.consume("q", ConsumeOptions::default()).await.unwrap();
    let first = consumer.next().await.unwrap().unwrap();
    assert!(other.blocked().borrow().is_none());
    assert_eq!(published(), 3);
    first.ack().unwrap();

    blocked.wait_for(Option::is_none).await.unwrap();
    for _ in 0..3 {
        consumer.next().await.unwrap().unwrap().ack().unwrap();
    }
    assert!(put(&channel, "q", "fifth").await.is_acked());
    consumer.next().await.unwrap().unwrap().ack().unwrap();
    assert_eq!(get(&consuming, "q").await, None);
    assert_eq!((published(), broker.statistics().memory), (5, 0));
}

/// A client that has more in its hands than there may be, and is not read from any more.
async fn blocked_with_a_delivery<S>(broker: &Broker, mut peer: Peer<S>) -> Peer<S>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    peer.open_connection("/", "guest", "guest").await;
    peer.send(1, &channel::Open {}).await;
    peer.expect::<channel::OpenOk>(1).await;
    peer.send(1, &queue::Declare { queue: "q".try_into().unwrap(), ..Default::default() }).await;
    peer.expect::<queue::DeclareOk<'_>>(1).await;
    let publish = basic::Publish { routing_key: "q".try_into().unwrap(), ..Default::default() };
    let body = "x".repeat(60_000);
    peer.send_content(1, &publish, &Properties::default(), body.clone()).await;
    peer.send(1, &basic::Get { queue: "q".try_into().unwrap(), no_ack: false }).await;
    peer.expect_content::<basic::GetOk<'_>>(1).await;
    peer.send_content(1, &publish, &Properties::default(), body).await;
    eventually(SOON, "the alarm", async || broker.statistics().memory > 100_000).await;
    // Nothing of this is read.
    peer.send_content(1, &publish, &Properties::default(), "x").await;
    peer
}

/// Others get what it had.
async fn assert_all_is_back(broker: &Broker) {
    let other = connect(broker).await;
    let channel = other.open_channel().await.unwrap();
    for _ in 0..2 {
        assert_eq!(get(&channel, "q").await.map(|body| body.len()), Some(60_000));
    }
    eventually(SOON, "no memory in use", async || broker.statistics().memory == 0).await;
    let channel = channel.into_confirm().await.unwrap();
    assert!(put(&channel, "q", "room again").await.is_acked());
}

#[tokio::test]
async fn a_client_that_goes_while_it_is_blocked_gives_back_what_it_had() {
    let broker = Broker::builder().memory_limit(100_000).start().unwrap();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    let peer = blocked_with_a_delivery(&broker, Peer::connect(address).await).await;
    drop(peer);
    eventually(SOON, "it to be noticed", async || broker.statistics().connections == 0).await;
    assert_all_is_back(&broker).await;

    let peer = blocked_with_a_delivery(&broker, Peer::over(broker.connect())).await;
    drop(peer);
    eventually(SOON, "it to be noticed", async || broker.statistics().connections == 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_blocked_client_keeps_deliveries_no_longer_than_a_consumer_may() {
    let timeout = Duration::from_secs(3600);
    let builder = Broker::builder().memory_limit(100_000).consumer_timeout(timeout);
    let broker = builder.start().unwrap();
    let mut peer = blocked_with_a_delivery(&broker, Peer::over(broker.connect())).await;
    peer.expect::<connection::Blocked<'_>>(0).await;
    tokio::time::sleep(timeout - Duration::from_secs(60)).await;
    assert_eq!(broker.statistics().connections, 1);
    tokio::time::sleep(Duration::from_secs(55)).await;
    let close = peer.expect::<connection::Close<'_>>(0).await;
    assert_eq!(close.reply_code, ReplyCode::RESOURCE_ERROR, "{}", close.reply_text);
    peer.send(0, &connection::CloseOk {}).await;
    peer.expect_end().await;
    assert_all_is_back(&broker).await;
}

/// What it has published waits for a commit that is not read any more.
#[tokio::test(start_paused = true)]
async fn a_blocked_client_keeps_a_transaction_no_longer_than_a_consumer_may_keep_a_delivery() {
    let timeout = Duration::from_secs(3600);
    let builder = Broker::builder().memory_limit(100_000).consumer_timeout(timeout);
    for acks in [false, true] {
        let broker = builder.clone().start().unwrap();
        let mut peer = peer(&broker).await;
        peer.send(1, &channel::Open {}).await;
        peer.expect::<channel::OpenOk>(1).await;
        peer.send(1, &queue::Declare { queue: "q".try_into().unwrap(), ..Default::default() })
            .await;
        peer.expect::<queue::DeclareOk<'_>>(1).await;
        let publish = basic::Publish { routing_key: "q".try_into().unwrap(), ..Default::default() };
        let body = "x".repeat(60_000);
        if acks {
            // Nor is the ack done that waits for the commit.
            peer.send_content(1, &publish, &Properties::default(), body.clone()).await;
            peer.send(1, &tx::Select {}).await;
            peer.expect::<tx::SelectOk>(1).await;
            peer.send(1, &basic::Get { queue: "q".try_into().unwrap(), no_ack: false }).await;
            let got = peer.expect_content::<basic::GetOk<'_>>(1).await;
            let delivery_tag = got.method.delivery_tag;
            peer.send(1, &basic::Ack { delivery_tag, multiple: false }).await;
        } else {
            peer.send(1, &tx::Select {}).await;
            peer.expect::<tx::SelectOk>(1).await;
        }
        if acks {
            // Another one publishes too much, and this one a little more: all that it holds is settled, but not committed.
            let other = connect(&broker).await;
            let channel = other.open_channel().await.unwrap().into_confirm().await.unwrap();
            assert!(put(&channel, "q", &body).await.is_acked());
            peer.send_content(1, &publish, &Properties::default(), "x").await;
        } else {
            for _ in 0..2 {
                peer.send_content(1, &publish, &Properties::default(), body.clone()).await;
            }
        }
        peer.expect::<connection::Blocked<'_>>(0).await;
        peer.send(1, &tx::Commit {}).await;
        tokio::time::sleep(timeout - Duration::from_secs(5)).await;
        let close = peer.expect::<connection::Close<'_>>(0).await;
        assert_eq!(close.reply_code, ReplyCode::RESOURCE_ERROR, "{}", close.reply_text);
        peer.send(0, &connection::CloseOk {}).await;
        peer.expect_end().await;
        let left = if acks { 120_000 } else { 0 };
        eventually(SOON, "what was not committed to be gone", async || {
            broker.statistics().memory.abs_diff(left) < 1000
        })
        .await;
    }
}
