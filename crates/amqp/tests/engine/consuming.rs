//! Deliveries: settled, recovered, waiting in the client, given back.

use std::collections::vec_deque::Drain;
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::time::Duration;

use futures_core::Stream;
use leveret_amqp::seam::{Content, DeliveryInfo, DeliverySink, lock};
use leveret_amqp::{
    Channel, ConsumeOptions, Delivery, ErrorKind, GetOptions, Options, Refused, ReplyCode, Table,
};
use leveret_testkit::peer::Received;
use leveret_wire::method::{basic, channel, connection, queue};
use leveret_wire::{Method, Properties, ShortStr};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::support::{
    barrier, connected, connected_with, consuming, consuming_by_name, open_channel, pipe,
};
use crate::{SOON, deliver, send_deliveries, tune, with_limits};

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

/// Takes deliveries: keeps their tags, and has `woken` woken after each read.
#[derive(Debug, Default)]
struct Tags {
    tags: Mutex<Vec<u64>>,
    woken: Arc<Woken>,
}

#[derive(Debug, Default)]
struct Woken(Notify);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

impl DeliverySink for Tags {
    fn delivered(&self, deliveries: Drain<'_, Content<DeliveryInfo>>, wakers: &mut Vec<Waker>) {
        lock(&self.tags).extend(deliveries.map(|delivery| delivery.method.delivery_tag()));
        wakers.push(Waker::from(Arc::clone(&self.woken)));
    }
}

#[tokio::test]
async fn a_sink_gets_the_deliveries_and_the_consumer_its_end() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let options = ConsumeOptions { auto_ack: true, ..ConsumeOptions::default() };
    let mut consumer = consuming(&channel, options, &mut broker).await;
    let tags = Arc::new(Tags::default());
    consumer.set_sink(Arc::clone(&tags) as _);
    // More than may wait for a consumer.
    send_deliveries(&mut broker, 1, 1..=5000).await;
    let all = async {
        while lock(&tags.tags).len() < 5000 {
            tags.woken.0.notified().await;
        }
    };
    timeout(SOON, all).await.unwrap();
    assert!(lock(&tags.tags).iter().copied().eq(1..=5000));
    let close = channel::Close {
        reply_code: ReplyCode::PRECONDITION_FAILED,
        reply_text: ShortStr::from_static("enough"),
        class_id: 0,
        method_id: 0,
    };
    broker.send(1, &close).await;
    let end = timeout(SOON, consumer.next()).await.unwrap().unwrap().unwrap_err();
    assert_eq!(end.kind(), ErrorKind::ChannelClosed(ReplyCode::PRECONDITION_FAILED));
    assert!(consumer.next().await.is_none());
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

/// RabbitMQ counts what goes back with its channel against the delivery limit, and from 4.3 on does not count what is refused.
#[tokio::test]
async fn what_is_under_way_when_everything_is_dropped_is_given_back_before_the_channel_closes() {
    for (version, gives_back) in [("3.10.8", false), ("4.3.6", true)] {
        let (mut broker, connecting) = pipe(Options::default());
        let properties =
            Table::from_pairs([("product", "RabbitMQ".into()), ("version", version.into())]);
        let tune = connection::Tune { channel_max: 2047, frame_max: 131_072, heartbeat: 0 };
        let accepting = broker.accept_connection_with(tune, properties.unwrap());
        let (connection, _) = tokio::join!(connecting, accepting);
        let channel = open_channel(&connection.unwrap(), &mut broker).await;
        let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
        send_deliveries(&mut broker, 1, 1..=1).await;
        let delivery = consumer.next().await.unwrap().unwrap();
        drop((channel, consumer));
        broker.expect::<basic::Cancel<'_>>(1).await;
        // It is held, so the channel is.
        drop(delivery);
        assert_eq!(broker.expect::<basic::Nack>(1).await.delivery_tag, 1);
        if gives_back {
            let all = basic::Nack { delivery_tag: 0, multiple: true, requeue: true };
            assert_eq!(broker.expect::<basic::Nack>(1).await, all);
        }
        broker.expect::<channel::Close<'_>>(1).await;
    }
}
