//! The connection engine on a real RabbitMQ.

use std::time::Duration;

use leveret::amqp::{
    Access, Channel, Connection, ConsumeOptions, DeleteQueue, ErrorKind, ExchangeOptions,
    GetOptions, Options, Outcome, Properties, Publish, QueueOptions, Refused, ReplyCode, Table,
    Tally,
};
use leveret_testkit::proxy::{Cut, Direction};
use leveret_testkit::rabbitmq;
use leveret_testkit::{FaultProxy, eventually};
use tokio::time::timeout;

use crate::support::rabbit::{SOON, connect, next, to, with_queue};

#[tokio::test]
async fn a_message_goes_through_a_queue() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    let properties =
        Properties { message_id: Some("id".try_into().unwrap()), ..Default::default() };
    let publish = Publish { properties: properties.clone(), ..to("q", "hello") };
    assert!(channel.publish(&publish).await.unwrap().await.is_acked());

    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    let delivery = next(&mut consumer).await;
    assert_eq!(delivery.body(), "hello");
    assert_eq!(delivery.properties(), properties);
    assert_eq!(
        (delivery.exchange(), delivery.routing_key()),
        ("".try_into().unwrap(), "q".try_into().unwrap())
    );
    assert!(!delivery.redelivered());
    delivery.ack().unwrap();
    consumer.cancel().await.unwrap();
    assert!(consumer.next().await.is_none());
    assert_eq!(channel.inspect_queue("q").await.unwrap().messages, 0);
    channel.close().await.unwrap();
    connection.close().await.unwrap();
    connection.close().await.unwrap();
    assert_eq!(
        connection.open_channel().await.unwrap_err().kind(),
        ErrorKind::ConnectionClosedHere
    );
}

#[tokio::test]
async fn access_is_granted_to_whoever_asks() {
    let vhost = rabbitmq::vhost().await;
    let connection = connect(&vhost).await;
    let channel = connection.open_channel().await.unwrap();
    for realm in ["/data", "no such realm"] {
        let access = Access { active: true, write: true, read: true, ..Access::default() };
        assert_eq!(channel.request_access(realm, access).await.unwrap(), 1);
    }
}

#[tokio::test]
async fn returned_messages_are_told_from_the_others_among_thousands() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    let mut confirmations = Vec::new();
    for n in 0..20_000u32 {
        let routing_key = if n % 10 == 3 { "nowhere" } else { "q" };
        let publish = Publish { routing_key, ..to("q", n.to_string()) };
        confirmations.push((n, channel.publish(&publish).await.unwrap()));
    }
    for (n, confirmation) in confirmations {
        match timeout(SOON, confirmation).await.unwrap() {
            Outcome::Acked => assert_ne!(n % 10, 3, "message {n}"),
            Outcome::Returned(returned) => {
                assert_eq!(returned.body, n.to_string());
                assert_eq!(returned.reply_code, ReplyCode::NO_ROUTE);
            }
            other => panic!("message {n}: {other:?}"),
        }
    }
    let tally = channel.confirmed(SOON).await.unwrap();
    assert_eq!(tally, Tally { acked: 18_000, returned: 2_000, ..Tally::default() });
    assert_eq!(channel.inspect_queue("q").await.unwrap().messages, 18_000);
}

#[tokio::test]
async fn a_channel_error_names_its_cause_and_leaves_the_others_alone() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    let other = connection.open_channel().await.unwrap();
    // Deliveries are under way while the channel goes.
    for _ in 0..2000 {
        drop(channel.publish(&to("q", "x")).await.unwrap());
    }
    channel.confirmed(SOON).await.unwrap();
    let options = ConsumeOptions { prefetch: 0, ..Default::default() };
    let mut consumer = channel.consume("q", options).await.unwrap();
    let lost =
        channel.publish(&Publish { exchange: "missing", ..to("q", "x") }).await.unwrap().await;
    let Outcome::Lost(error) = lost else { panic!("{lost:?}") };
    assert_eq!(error.kind(), ErrorKind::ChannelClosed(ReplyCode::NOT_FOUND));
    assert!(error.to_string().contains("no exchange \"missing\""), "{error}");

    let later = channel.publish(&to("q", "x")).await.unwrap_err();
    assert_eq!(later.reply_code(), Some(ReplyCode::NOT_FOUND));
    let ended = loop {
        if let Err(error) = timeout(SOON, consumer.next()).await.unwrap().unwrap() {
            break error;
        }
    };
    assert_eq!(ended.reply_code(), Some(ReplyCode::NOT_FOUND));
    assert!(consumer.next().await.is_none());
    let call = channel.inspect_queue("q").await.unwrap_err();
    assert_eq!(call.reply_code(), Some(ReplyCode::NOT_FOUND));

    other.inspect_queue("q").await.unwrap();
    connection.open_channel().await.unwrap();
}

#[tokio::test]
async fn deliveries_are_settled_in_every_way() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    for n in 0..6 {
        channel.publish(&to("q", n.to_string())).await.unwrap().await;
    }
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    let mut deliveries = Vec::new();
    for _ in 0..6 {
        deliveries.push(next(&mut consumer).await);
    }
    let mut deliveries = deliveries.into_iter();
    let mut take = || deliveries.next().unwrap();
    let (zero, one, two, three, four, five) = (take(), take(), take(), take(), take(), take());
    // Out of order, all before it, refused, rejected, dropped: none of them may cost the channel.
    one.ack().unwrap();
    two.ack_all_before().unwrap();
    assert_eq!(zero.ack().unwrap_err().kind(), ErrorKind::Stale);
    three.nack(Refused::Discard).unwrap();
    four.reject(Refused::Requeue).unwrap();
    let again = next(&mut consumer).await;
    assert!(again.redelivered());
    assert_eq!(again.body(), "4");
    drop(five);
    let dropped = next(&mut consumer).await;
    assert_eq!(dropped.body(), "5");
    again.ack().unwrap();
    dropped.ack().unwrap();
    drop(consumer);
    assert_eq!(channel.inspect_queue("q").await.unwrap().messages, 0);
}

#[tokio::test]
async fn what_a_dropped_consumer_had_goes_back() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    for n in 0..100 {
        drop(channel.publish(&to("q", n.to_string())).await.unwrap());
    }
    channel.confirmed(SOON).await.unwrap();
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    next(&mut consumer).await.ack().unwrap();
    drop(consumer);
    let info = channel.inspect_queue("q").await.unwrap();
    assert_eq!(info.consumers, 0);
    let mut second = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    for _ in 0..99 {
        next(&mut second).await.ack().unwrap();
    }
}

#[tokio::test]
async fn get_takes_one_message_if_there_is_one() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    assert!(channel.get("q", GetOptions::default()).await.unwrap().is_none());
    for body in ["one", "two"] {
        channel.publish(&to("q", body)).await.unwrap().await;
    }
    let one = channel.get("q", GetOptions::default()).await.unwrap().unwrap();
    let two = channel.get("q", GetOptions { auto_ack: true }).await.unwrap().unwrap();
    assert_eq!((one.body().as_ref(), two.body().as_ref()), (&b"one"[..], &b"two"[..]));
    assert_eq!(one.routing_key(), "q");
    two.ack().unwrap();
    one.ack().unwrap();
    assert!(channel.get("q", GetOptions::default()).await.unwrap().is_none());
}

#[tokio::test]
async fn a_deleted_queue_ends_its_consumer_with_a_reason() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    channel.delete_queue("q", DeleteQueue::default()).await.unwrap();
    let ended = timeout(SOON, consumer.next()).await.unwrap().unwrap().unwrap_err();
    assert_eq!(ended.kind(), ErrorKind::ConsumerCancelled);
    assert!(consumer.next().await.is_none());
    channel.check_open().unwrap();
}

#[tokio::test]
async fn a_transaction_happens_when_it_is_committed() {
    let vhost = rabbitmq::vhost().await;
    let (connection, reader) = with_queue(&vhost).await;
    let channel = connection.open_channel().await.unwrap().into_tx().await.unwrap();
    channel.publish(&to("q", "rolled back")).await.unwrap();
    channel.rollback().await.unwrap();
    channel.publish(&to("q", "committed")).await.unwrap();
    assert!(reader.get("q", GetOptions::default()).await.unwrap().is_none());
    channel.commit().await.unwrap();
    let got = reader.get("q", GetOptions::default()).await.unwrap().unwrap();
    assert_eq!(got.body(), "committed");
    got.ack().unwrap();
}

#[tokio::test]
async fn topology_is_declared_bound_and_deleted() {
    let vhost = rabbitmq::vhost().await;
    let connection = connect(&vhost).await;
    let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
    let none = Table::new();
    channel.declare_exchange("in", "fanout", ExchangeOptions::default()).await.unwrap();
    channel.declare_exchange("out", "topic", ExchangeOptions::default()).await.unwrap();
    channel.bind_exchange("out", "in", "", &none).await.unwrap();
    let named = channel
        .declare_queue("", QueueOptions { exclusive: true, ..Default::default() })
        .await
        .unwrap();
    assert!(named.name.starts_with("amq.gen-"));
    channel.bind_queue(&named.name, "out", "a.*", &none).await.unwrap();
    let publish =
        Publish { exchange: "in", routing_key: "a.b", mandatory: true, ..Publish::default() };
    assert!(channel.publish(&publish).await.unwrap().await.is_acked());
    channel.unbind_queue(&named.name, "out", "a.*", &none).await.unwrap();
    assert!(matches!(channel.publish(&publish).await.unwrap().await, Outcome::Returned(_)));
    channel.unbind_exchange("out", "in", "", &none).await.unwrap();
    channel.inspect_exchange("out").await.unwrap();
    channel.delete_exchange("out", Default::default()).await.unwrap();
    assert_eq!(channel.purge_queue(&named.name).await.unwrap(), 1);
    let missing = channel.inspect_exchange("out").await.unwrap_err();
    assert_eq!(missing.reply_code(), Some(ReplyCode::NOT_FOUND));
}

#[tokio::test]
async fn a_wrong_password_and_a_wrong_virtual_host_are_told_apart() {
    let vhost = rabbitmq::vhost().await;
    let mut options = Options::from_uri(&vhost.url()).unwrap();
    options.auth = leveret::amqp::Auth::plain("guest", "hunter2");
    let error = Connection::open(&options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Authentication, "{error}");
    assert!(!format!("{error} {error:?}").contains("hunter2"));

    let mut options = Options::from_uri(&vhost.url()).unwrap();
    options.virtual_host = "missing".to_owned();
    let error = Connection::open(&options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::VirtualHost, "{error}");

    let options = Options::from_uri("amqp://127.0.0.1:1").unwrap();
    let error = Connection::open(&options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Dial, "{error}");
}

#[tokio::test]
async fn large_messages_go_through() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    for size in [0, 1, 131_064, 131_065, 16 * 1024 * 1024] {
        let body: bytes::Bytes = (0..size).map(|n| (n % 253) as u8).collect();
        assert!(channel.publish(&to("q", body.clone())).await.unwrap().await.is_acked());
        let delivery = next(&mut consumer).await;
        assert!(delivery.body() == &body, "{size} bytes");
        delivery.ack().unwrap();
    }
}

#[tokio::test]
async fn two_thousand_channels_open_and_close() {
    let vhost = rabbitmq::vhost().await;
    let connection = connect(&vhost).await;
    let opening = (0..2000).map(|_| connection.open_channel());
    let mut channels = Vec::new();
    for opened in all_at_once(opening).await {
        channels.push(opened.unwrap());
    }
    let mut ids: Vec<u16> = channels.iter().map(Channel::id).collect();
    ids.sort_unstable();
    assert_eq!(ids, (1..=2000).collect::<Vec<u16>>());
    let closed = channels.split_off(1000);
    for channel in closed {
        channel.close().await.unwrap();
    }
    assert_eq!(connection.open_channel().await.unwrap().id(), 1001);
}

/// Runs all futures at once and gives back what they gave, in order.
async fn all_at_once<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        let mut pending = false;
        for (future, output) in &mut futures {
            if output.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(value) => *output = Some(value),
                    std::task::Poll::Pending => pending = true,
                }
            }
        }
        if pending { std::task::Poll::Pending } else { std::task::Poll::Ready(()) }
    })
    .await;
    futures.into_iter().map(|(_, output)| output.expect("a value")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_very_many_messages_each_is_confirmed_and_delivered_once() {
    let count = match std::env::var("LEVERET_MANY_MESSAGES") {
        Ok(text) => text.parse().expect("LEVERET_MANY_MESSAGES is a number"),
        Err(_) => 100_000_u64,
    };
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    let reader = connection.open_channel().await.unwrap();
    let options = ConsumeOptions { prefetch: 2000, ..Default::default() };
    let mut consumer = reader.consume("q", options).await.unwrap();
    let consuming = tokio::spawn(async move {
        for expected in 0..count {
            let delivery = next(&mut consumer).await;
            let number = u64::from_be_bytes(delivery.body().as_ref().try_into().unwrap());
            assert_eq!(number, expected);
            delivery.ack().unwrap();
        }
        consumer.cancel().await.unwrap();
        assert!(consumer.next().await.is_none(), "one delivery too many");
    });
    let mut window = std::collections::VecDeque::new();
    for number in 0..count {
        let publish = to("q", bytes::Bytes::copy_from_slice(&number.to_be_bytes()));
        window.push_back(channel.publish(&publish).await.unwrap());
        if window.len() == 1000 {
            let outcome = timeout(SOON, window.pop_front().unwrap()).await.unwrap();
            assert!(outcome.is_acked(), "{outcome:?}");
        }
    }
    let tally = channel.confirmed(SOON).await.unwrap();
    assert_eq!(tally, Tally { acked: count, ..Tally::default() });
    timeout(Duration::from_secs(60), consuming).await.unwrap().unwrap();
    assert_eq!(channel.inspect_queue("q").await.unwrap().messages, 0);
}

/// What lapin gets wrong, and address and body alone cannot tell: routing by header.
#[tokio::test]
async fn alike_messages_that_differ_in_a_header_are_told_apart() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    channel.declare_exchange("h", "headers", ExchangeOptions::default()).await.unwrap();
    let route = Table::from_pairs([("x-match", "all".into()), ("way", "in".into())]).unwrap();
    channel.bind_queue("q", "h", "", &route).await.unwrap();
    let mut confirmations = Vec::new();
    for n in 0..400 {
        let way = if n % 2 == 0 { "in" } else { "out" };
        let headers = Table::from_pairs([("z", 1.into()), ("way", way.into())]).unwrap();
        let properties = Properties { headers: Some(headers), ..Default::default() };
        let publish = Publish { exchange: "h", routing_key: "", properties, ..to("q", "same") };
        confirmations.push((way, channel.publish(&publish).await.unwrap()));
    }
    for (way, confirmation) in confirmations {
        let outcome = timeout(SOON, confirmation).await.unwrap();
        assert_eq!(outcome.is_acked(), way == "in", "{way}: {outcome:?}");
    }
}

#[tokio::test]
async fn a_rolled_back_ack_is_not_covered_by_a_later_one() {
    let vhost = rabbitmq::vhost().await;
    let (connection, publisher) = with_queue(&vhost).await;
    for body in ["one", "two", "three"] {
        publisher.publish(&to("q", body)).await.unwrap().await;
    }
    let channel = connection.open_channel().await.unwrap().into_tx().await.unwrap();
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    let (one, two, three) =
        (next(&mut consumer).await, next(&mut consumer).await, next(&mut consumer).await);
    one.ack().unwrap();
    channel.rollback().await.unwrap();
    two.ack().unwrap();
    three.ack().unwrap();
    channel.commit().await.unwrap();
    channel.close().await.unwrap();
    let back = publisher.get("q", GetOptions { auto_ack: true }).await.unwrap().unwrap();
    assert_eq!(back.body(), "one");
    assert!(publisher.get("q", GetOptions::default()).await.unwrap().is_none());
}

#[tokio::test]
async fn what_was_published_before_a_close_arrives() {
    let vhost = rabbitmq::vhost().await;
    let (_reader, channel) = with_queue(&vhost).await;
    for round in 1..=5u32 {
        let connection = connect(&vhost).await;
        let plain = connection.open_channel().await.unwrap();
        drop(
            plain
                .consume("q", ConsumeOptions { prefetch: 1000, ..Default::default() })
                .await
                .unwrap(),
        );
        for _ in 0..2000 {
            plain.publish(&to("q", "x")).await.unwrap();
        }
        connection.close().await.unwrap();
        let messages = eventually(SOON, "all messages", async || {
            let messages = channel.inspect_queue("q").await.unwrap().messages;
            (messages == round * 2000).then_some(messages)
        })
        .await;
        assert_eq!(messages, round * 2000);
    }
}

#[tokio::test]
async fn abandoned_consumers_and_cancels_cost_nobody_anything() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    for _ in 0..500 {
        drop(channel.publish(&to("q", "x")).await.unwrap());
    }
    channel.confirmed(SOON).await.unwrap();
    for round in 0..150u64 {
        let consuming = channel.consume("q", ConsumeOptions::default());
        let patience = Duration::from_micros(100 + round * 10);
        if let Ok(consumer) = timeout(patience, consuming).await {
            let mut consumer = consumer.unwrap();
            let _ = timeout(Duration::from_micros(round), consumer.cancel()).await;
            drop(consumer);
        }
    }
    eventually(SOON, "all messages to be back", async || {
        let info = channel.inspect_queue("q").await.unwrap();
        (info.messages, info.consumers) == (500, 0)
    })
    .await;
    connection.close().await.unwrap();
}

#[tokio::test]
async fn a_return_of_before_confirms_is_nobodys_outcome() {
    let vhost = rabbitmq::vhost().await;
    let connection = connect(&vhost).await;
    let plain = connection.open_channel().await.unwrap();
    plain.publish(&Publish { routing_key: "nowhere", ..to("q", "early") }).await.unwrap();
    let channel = plain.into_confirm().await.unwrap();
    assert_eq!(channel.take_returned()[0].body, "early");
    let outcome =
        channel.publish(&Publish { routing_key: "nowhere", ..to("q", "late") }).await.unwrap();
    assert!(matches!(outcome.await, Outcome::Returned(returned) if returned.body == "late"));
}

#[tokio::test]
async fn a_consumer_name_that_is_taken_is_refused_here() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    let named = || ConsumeOptions { tag: "me".to_owned(), ..Default::default() };
    let mut first = channel.consume("q", named()).await.unwrap();
    let error = channel.consume("q", named()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    first.cancel().await.unwrap();
    let mut second = channel.consume("q", named()).await.unwrap();
    drop(first);
    channel.publish(&to("q", "for the second")).await.unwrap().await;
    next(&mut second).await.ack().unwrap();
}

#[tokio::test]
async fn a_stalled_network_is_found_out_and_a_cut_one_at_once() {
    let vhost = rabbitmq::vhost().await;
    if vhost.broker().is_embedded() {
        return;
    }
    let proxy = FaultProxy::to(vhost.broker().addr()).await;
    let with_heartbeat = |seconds| {
        let mut options = Options::from_uri(&proxy.url(&vhost.url())).unwrap();
        options.heartbeat = Some(Duration::from_secs(seconds));
        options
    };
    let connection = Connection::open(&with_heartbeat(1)).await.unwrap();
    proxy.stall(Direction::ToClient);
    let error = timeout(SOON, connection.ended()).await.unwrap();
    assert_eq!(error.kind(), ErrorKind::HeartbeatLost);

    proxy.heal().await;
    let connection = Connection::open(&with_heartbeat(60)).await.unwrap();
    proxy.cut(Cut::Reset);
    let error = timeout(SOON, connection.ended()).await.unwrap();
    assert_eq!(error.kind(), ErrorKind::ConnectionLost);
}

#[tokio::test]
async fn dropped_handles_leave_no_connection_behind() {
    let vhost = rabbitmq::vhost().await;
    if vhost.broker().is_embedded() {
        return;
    }
    let (connection, channel) = with_queue(&vhost).await;
    let consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    eventually(SOON, "the connection to be listed", async || {
        vhost.connections().await.is_ok_and(|list| list.len() == 1)
    })
    .await;
    drop((connection, channel, consumer));
    eventually(SOON, "the connection to be gone", async || {
        vhost.connections().await.is_ok_and(|list| list.is_empty())
    })
    .await;
}
