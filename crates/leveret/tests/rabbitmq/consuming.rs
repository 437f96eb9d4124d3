//! Consuming from a real RabbitMQ: who gets what, and what becomes of it.

use std::collections::BTreeSet;

use leveret::amqp::{
    Channel, ConsumeOptions, Consumer, DeleteQueue, Delivery, Error, ErrorKind, GetOptions,
    Options, Properties, Publish, Refused, ReplyCode, Table, Value,
};
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{self, Version};
use tokio::time::timeout;

use crate::support::rabbit::{
    SOON, confirm_channel, connect, connect_with, end_of, fill, next, number, polled, queue_with,
    take, to, until_queue_has, with_queue, with_queue_and_channels,
};

fn prefetch(prefetch: u16) -> ConsumeOptions {
    ConsumeOptions { prefetch, ..ConsumeOptions::default() }
}

fn numbers(deliveries: &[Delivery]) -> BTreeSet<u32> {
    deliveries.iter().map(number).collect()
}

fn ack_all(deliveries: Vec<Delivery>) {
    for delivery in deliveries {
        delivery.ack().unwrap();
    }
}

/// Nothing is on its way to this consumer, as far as a call and its reply on the same channel can tell.
async fn has_nothing(consumer: &mut Consumer) -> bool {
    polled(3, consumer.next()).await.is_none()
}

#[tokio::test]
async fn a_consumer_of_higher_priority_is_served_first() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    let ordinary = ConsumeOptions { priority: -1, ..prefetch(5) };
    let preferred = ConsumeOptions { priority: 10, ..prefetch(5) };
    let mut ordinary = channel.consume("q", ordinary).await.unwrap();
    let mut preferred = channel.consume("q", preferred).await.unwrap();
    fill(&channel, "q", 8).await;
    // The first five fill the preferred one's prefetch; only what is beyond it goes to the other.
    let first = take(&mut preferred, 5).await;
    let rest = take(&mut ordinary, 3).await;
    assert_eq!(numbers(&first), (0..5).collect());
    assert_eq!(numbers(&rest), (5..8).collect());
    ack_all(first);
    ack_all(rest);
}

#[tokio::test]
async fn an_exclusive_consumer_has_none_beside_it() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    let other = connection.open_channel().await.unwrap();
    let exclusive = || ConsumeOptions { exclusive: true, ..ConsumeOptions::default() };
    let mut alone = channel.consume("q", exclusive()).await.unwrap();

    let refused = other.consume("q", ConsumeOptions::default()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ChannelClosed(ReplyCode::ACCESS_REFUSED));
    assert!(refused.to_string().contains("'q'"), "{refused}");

    channel.publish(&to("q", "for the one")).await.unwrap().await;
    next(&mut alone).await.ack().unwrap();
    alone.cancel().await.unwrap();
    let third = connection.open_channel().await.unwrap();
    third.consume("q", exclusive()).await.unwrap();
}

#[tokio::test]
async fn consumers_of_one_queue_share_it() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    let other = connection.open_channel().await.unwrap();
    let mut consumers = Vec::new();
    for _ in 0..3 {
        consumers.push(channel.consume("q", prefetch(20)).await.unwrap());
        consumers.push(other.consume("q", prefetch(20)).await.unwrap());
    }
    fill(&channel, "q", 120).await;
    let mut seen = BTreeSet::new();
    for consumer in &mut consumers {
        // Each has its prefetch full, no more and no less, before anything is acked.
        for delivery in take(consumer, 20).await {
            assert!(!delivery.redelivered());
            assert!(seen.insert(number(&delivery)), "delivered twice: {delivery:?}");
            delivery.ack().unwrap();
        }
    }
    assert_eq!(seen, (0..120).collect());
    until_queue_has(&channel, "q", 0, 6).await;
}

#[tokio::test]
async fn a_prefetch_limits_what_is_unsettled_and_an_ack_makes_room() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    fill(&channel, "q", 10).await;
    let mut consumer = channel.consume("q", prefetch(3)).await.unwrap();
    let mut held = take(&mut consumer, 3).await;
    until_queue_has(&channel, "q", 7, 1).await;
    assert!(has_nothing(&mut consumer).await);
    held.remove(1).ack().unwrap();
    assert_eq!(number(&next(&mut consumer).await), 3);
}

#[tokio::test]
async fn a_consumer_without_a_prefetch_gets_no_more_than_the_bound() {
    const BOUND: u32 = 50;
    let vhost = rabbitmq::vhost().await;
    let (_publishing, publisher) = with_queue(&vhost).await;
    let connection = connect_with(&vhost, |limits| limits.consumer_buffer = BOUND as usize).await;
    let channel = connection.open_channel().await.unwrap();
    fill(&publisher, "q", 1000).await;
    let mut consumer = channel.consume("q", prefetch(0)).await.unwrap();
    // Nothing is taken, and the broker has sent what it may; the connection is not held up by it.
    until_queue_has(&channel, "q", 1000 - BOUND, 1).await;
    for expected in 0..1000 {
        let delivery = next(&mut consumer).await;
        assert_eq!(number(&delivery), expected);
        delivery.ack().unwrap();
    }
    until_queue_has(&channel, "q", 0, 1).await;
}

#[tokio::test]
async fn a_prefetch_for_all_limits_the_channel_where_the_broker_still_does_that() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    fill(&channel, "q", 20).await;
    let limited = connection.open_channel().await.unwrap();
    limited.prefetch_for_all(5).await.unwrap();
    let mut one = limited.consume("q", prefetch(4)).await.unwrap();
    let mut two = limited.consume("q", prefetch(4)).await.unwrap();
    let delivered = if Version::under_test() < Version::V4_3 { 5 } else { 8 };
    until_queue_has(&channel, "q", 20 - delivered, 2).await;
    let mut taken = BTreeSet::new();
    while taken.len() < 20 {
        let delivery = tokio::select! {
            delivery = next(&mut one) => delivery,
            delivery = next(&mut two) => delivery,
        };
        assert!(taken.insert(number(&delivery)));
        delivery.ack().unwrap();
    }
    until_queue_has(&channel, "q", 0, 2).await;
}

#[tokio::test]
async fn auto_ack_and_manual_consumers_live_on_one_channel() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    channel.declare_queue("fast", Default::default()).await.unwrap();
    let auto = ConsumeOptions { auto_ack: true, ..ConsumeOptions::default() };
    let mut fast = channel.consume("fast", auto).await.unwrap();
    let mut safe = channel.consume("q", prefetch(7)).await.unwrap();
    for round in 0..300u32 {
        drop(channel.publish(&to("fast", round.to_string())).await.unwrap());
        drop(channel.publish(&to("q", round.to_string())).await.unwrap());
    }
    // Tags of both count together: acks alone, acks of all before, and ones that send nothing must not be mixed up.
    for round in 0..300 {
        let delivery = next(&mut safe).await;
        assert_eq!(number(&delivery), round);
        if round % 7 == 6 { delivery.ack_all_before() } else { delivery.ack() }.unwrap();
        let delivery = next(&mut fast).await;
        assert_eq!(number(&delivery), round);
        match round % 3 {
            0 => delivery.ack().unwrap(),
            1 => delivery.nack(Refused::Requeue).unwrap(),
            _ => drop(delivery),
        }
    }
    channel.confirmed(SOON).await.unwrap();
    until_queue_has(&channel, "q", 0, 1).await;
    until_queue_has(&channel, "fast", 0, 1).await;
    safe.cancel().await.unwrap();
    fast.cancel().await.unwrap();
    assert!(safe.next().await.is_none() && fast.next().await.is_none());
}

#[tokio::test]
async fn acking_all_before_settles_those_of_other_consumers_and_none_twice() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    let mut one = channel.consume("q", prefetch(50)).await.unwrap();
    let mut two = channel.consume("q", prefetch(50)).await.unwrap();
    fill(&channel, "q", 100).await;
    let mut deliveries = take(&mut one, 50).await;
    deliveries.extend(take(&mut two, 50).await);
    deliveries.sort_by_key(Delivery::delivery_tag);
    let after = deliveries.split_off(60);
    let last = deliveries.pop().unwrap();
    last.ack_all_before().unwrap();
    // They are settled already: whatever is done to them sends nothing, and the channel lives.
    for (n, delivery) in deliveries.into_iter().enumerate() {
        match n % 3 {
            0 => drop(delivery.ack()),
            1 => drop(delivery.nack(Refused::Requeue)),
            _ => drop(delivery),
        }
    }
    for delivery in after {
        delivery.nack(Refused::Requeue).unwrap();
    }
    let mut again = BTreeSet::new();
    while again.len() < 40 {
        let delivery = tokio::select! {
            delivery = next(&mut one) => delivery,
            delivery = next(&mut two) => delivery,
        };
        assert!(delivery.redelivered());
        assert!(again.insert(number(&delivery)));
        delivery.ack().unwrap();
    }
    until_queue_has(&channel, "q", 0, 2).await;
}

#[tokio::test]
async fn refusing_all_before_sends_them_where_they_were_meant_to_go() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    let dead = [("x-dead-letter-exchange", "".into()), ("x-dead-letter-routing-key", "q".into())];
    channel.declare_queue("work", queue_with(dead)).await.unwrap();
    fill(&channel, "work", 30).await;
    let mut consumer = channel.consume("work", ConsumeOptions::default()).await.unwrap();
    let mut held = take(&mut consumer, 30).await;
    let rest = held.split_off(20);
    held.pop().unwrap().nack_all_before(Refused::Discard).unwrap();
    drop(held);
    until_queue_has(&channel, "q", 20, 0).await;
    drop(rest);
    let again = take(&mut consumer, 10).await;
    assert_eq!(numbers(&again), (20..30).collect());
    ack_all(again);
}

#[tokio::test]
async fn recovering_redelivers_what_every_consumer_holds_under_new_tags() {
    redelivered_under_new_tags(async |channel| channel.recover().await).await;
}

#[tokio::test]
async fn recovering_without_an_answer_redelivers_as_well() {
    redelivered_under_new_tags(async |channel| channel.recover_async().await).await;
}

async fn redelivered_under_new_tags(recover: impl AsyncFnOnce(&Channel) -> Result<(), Error>) {
    let vhost = rabbitmq::vhost().await;
    let (connection, publisher) = with_queue(&vhost).await;
    let channel = connection.open_channel().await.unwrap();
    let mut one = channel.consume("q", prefetch(20)).await.unwrap();
    let mut two = channel.consume("q", prefetch(20)).await.unwrap();
    fill(&publisher, "q", 40).await;
    let mut old = take(&mut one, 20).await;
    old.extend(take(&mut two, 20).await);
    let settled = old.split_off(35);
    let settled_numbers = numbers(&settled);
    ack_all(settled);
    recover(&channel).await.unwrap();
    let highest = old.iter().map(Delivery::delivery_tag).max().unwrap();

    let mut again = BTreeSet::new();
    while again.len() < 35 {
        let delivery = tokio::select! {
            delivery = next(&mut one) => delivery,
            delivery = next(&mut two) => delivery,
        };
        assert!(delivery.redelivered(), "{delivery:?}");
        assert!(delivery.delivery_tag() > highest, "{delivery:?}");
        let number = number(&delivery);
        // Without an answer that was awaited, one may come that is to be delivered once more.
        if delivery.ack().is_ok() {
            assert!(again.insert(number), "settled twice: {number}");
        }
    }
    assert!(again.is_disjoint(&settled_numbers));
    // The old ones are of no use, and do no harm.
    for (n, delivery) in old.into_iter().enumerate() {
        match n % 3 {
            0 => drop(delivery.ack()),
            1 => drop(delivery.ack_all_before()),
            _ => drop(delivery),
        }
    }
    until_queue_has(&channel, "q", 0, 2).await;
}

#[tokio::test]
async fn recovering_while_deliveries_wait_here_holds_nobody_up() {
    let vhost = rabbitmq::vhost().await;
    let (connection, publisher) = with_queue(&vhost).await;
    let channel = connection.open_channel().await.unwrap();
    fill(&publisher, "q", 10).await;
    let mut consumer = channel.consume("q", prefetch(10)).await.unwrap();
    until_queue_has(&publisher, "q", 0, 1).await;
    // Ten wait in the consumer, and each recover makes ten more. Nobody takes them meanwhile.
    for _ in 0..5 {
        timeout(SOON / 4, channel.recover()).await.expect("a recover is answered at once").unwrap();
    }
    let mut again = BTreeSet::new();
    while again.len() < 10 {
        let delivery = next(&mut consumer).await;
        let number = number(&delivery);
        // One of before the last recover cannot be settled.
        if delivery.ack().is_ok() {
            again.insert(number);
        }
    }
    consumer.cancel().await.unwrap();
    assert!(end_of(&mut consumer).await.is_none());
    until_queue_has(&channel, "q", 0, 0).await;
}

#[tokio::test]
async fn recovers_at_the_same_time_as_acks_do_not_cost_the_channel() {
    let vhost = rabbitmq::vhost().await;
    let (connection, publisher) = with_queue(&vhost).await;
    let channel = connection.open_channel().await.unwrap();
    fill(&publisher, "q", 2000).await;
    let mut consumer = channel.consume("q", prefetch(20)).await.unwrap();
    let recovering = async {
        for _ in 0..50 {
            let (one, two, three) =
                tokio::join!(channel.recover(), channel.recover_async(), channel.recover());
            one.and(two).and(three).unwrap();
            channel.recover_async().await.unwrap();
        }
    };
    let acking = async {
        let mut done = BTreeSet::new();
        while done.len() < 2000 {
            let delivery = next(&mut consumer).await;
            let number = number(&delivery);
            if delivery.ack().is_ok() {
                done.insert(number);
            }
        }
    };
    timeout(SOON * 2, async { tokio::join!(recovering, acking) }).await.expect("no standstill");
    channel.check_open().unwrap();
    until_queue_has(&channel, "q", 0, 1).await;
}

#[tokio::test]
async fn a_queue_that_is_deleted_under_held_deliveries_costs_its_consumer_only() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    let deleter = connection.open_channel().await.unwrap();
    for kind in ["classic", "quorum"] {
        let queue = format!("doomed-{kind}");
        let options = queue_with([("x-queue-type", kind.into())]);
        channel.declare_queue(&queue, options).await.unwrap();
        fill(&channel, &queue, 500).await;
        let mut doomed = channel.consume(&queue, prefetch(200)).await.unwrap();
        let mut other = channel.consume("q", prefetch(10)).await.unwrap();
        let mut held = take(&mut doomed, 100).await;
        let acking = async {
            for delivery in held.drain(..50) {
                delivery.ack().unwrap();
                tokio::task::yield_now().await;
            }
        };
        let (deleted, ()) =
            tokio::join!(deleter.delete_queue(&queue, DeleteQueue::default()), acking);
        deleted.unwrap();
        let ended = end_of(&mut doomed).await.expect("a reason");
        assert_eq!(ended.kind(), ErrorKind::ConsumerCancelled, "{kind}");
        assert!(doomed.next().await.is_none());
        // What is still held can be settled in any way without harm.
        for (n, delivery) in held.into_iter().enumerate() {
            match n % 4 {
                0 => drop(delivery.ack()),
                1 => drop(delivery.nack(Refused::Requeue)),
                2 => drop(delivery.reject(Refused::Discard)),
                _ => drop(delivery),
            }
        }
        channel.publish(&to("q", "1")).await.unwrap().await;
        next(&mut other).await.ack().unwrap();
        channel.check_open().unwrap();
    }
}

#[tokio::test]
async fn a_delivery_that_is_held_for_long_hinders_nobody_on_its_channel() {
    const OTHERS: u32 = 70_000;
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    channel.declare_queue("slow", Default::default()).await.unwrap();
    let publisher = confirm_channel(&connection).await;
    fill(&channel, "slow", 2).await;
    let mut slow = channel.consume("slow", prefetch(1)).await.unwrap();
    let held = next(&mut slow).await;
    let mut quick = channel.consume("q", prefetch(500)).await.unwrap();
    let publishing = fill(&publisher, "q", OTHERS);
    let consuming = async {
        for expected in 0..OTHERS {
            let delivery = next(&mut quick).await;
            assert_eq!(number(&delivery), expected);
            delivery.ack().unwrap();
        }
    };
    tokio::join!(publishing, consuming);
    assert!(has_nothing(&mut slow).await);
    assert_eq!(number(&held), 0);
    held.ack().unwrap();
    let second = next(&mut slow).await;
    assert_eq!((number(&second), second.redelivered()), (1, false));
    second.ack().unwrap();
    until_queue_has(&channel, "q", 0, 1).await;
    until_queue_has(&channel, "slow", 0, 1).await;
}

#[tokio::test]
async fn a_message_over_the_limit_ends_the_connection_with_a_clear_reason() {
    let vhost = rabbitmq::vhost().await;
    let (_publishing, publisher) = with_queue(&vhost).await;
    let connection = connect_with(&vhost, |limits| limits.max_message_size = 10_000).await;
    let channel = connection.open_channel().await.unwrap();
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    publisher.publish(&to("q", vec![0; 10_000])).await.unwrap().await;
    let largest = next(&mut consumer).await;
    assert_eq!(largest.body().len(), 10_000);
    largest.ack().unwrap();
    publisher.publish(&to("q", vec![0; 10_001])).await.unwrap().await;
    let error = end_of(&mut consumer).await.expect("a reason");
    let text = error.to_string();
    assert!(text.contains("10001") && text.contains("10000"), "{text}");
    timeout(SOON, connection.ended()).await.expect("the connection has ended");
    // It is not lost: whoever takes larger ones gets it.
    until_queue_has(&publisher, "q", 1, 0).await;
    let taken = publisher.get("q", GetOptions::default()).await.unwrap().unwrap();
    assert_eq!(taken.body().len(), 10_001);
    taken.ack().unwrap();
}

#[tokio::test]
async fn a_quorum_queue_counts_deliveries_and_gives_up_at_its_limit() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    let options = queue_with([
        ("x-queue-type", "quorum".into()),
        ("x-delivery-limit", 2.into()),
        ("x-dead-letter-exchange", "".into()),
        ("x-dead-letter-routing-key", "q".into()),
    ]);
    channel.declare_queue("work", options).await.unwrap();
    fill(&channel, "work", 1).await;
    let mut consumer = channel.consume("work", prefetch(10)).await.unwrap();
    for attempt in 0..3 {
        let delivery = next(&mut consumer).await;
        assert_eq!(delivery.redelivered(), attempt > 0);
        let properties = delivery.properties();
        let headers = properties.headers.as_ref();
        let count = headers.and_then(|headers| headers.get("x-delivery-count"));
        assert_eq!(count.and_then(|count| count.as_i64()).unwrap_or(0), attempt);
        delivery.reject(Refused::Requeue).unwrap();
    }
    let mut dead = channel.consume("q", prefetch(10)).await.unwrap();
    let delivery = next(&mut dead).await;
    assert_eq!(number(&delivery), 0);
    delivery.ack().unwrap();
}

#[tokio::test]
async fn a_quorum_queue_delivers_to_many_and_takes_back_what_is_dropped() {
    let vhost = rabbitmq::vhost().await;
    let connection = connect(&vhost).await;
    let channel = confirm_channel(&connection).await;
    let quorum = queue_with([("x-queue-type", "quorum".into()), ("x-delivery-limit", 100.into())]);
    channel.declare_queue("work", quorum).await.unwrap();
    fill(&channel, "work", 2000).await;
    let mut one = channel.consume("work", prefetch(50)).await.unwrap();
    let mut two = channel.consume("work", prefetch(50)).await.unwrap();
    let mut dropped = BTreeSet::new();
    let mut done = BTreeSet::new();
    while done.len() < 2000 {
        let delivery = tokio::select! {
            delivery = next(&mut one) => delivery,
            delivery = next(&mut two) => delivery,
        };
        let number = number(&delivery);
        if number.is_multiple_of(5) && dropped.insert(number) {
            drop(delivery);
            continue;
        }
        assert_eq!(delivery.redelivered(), number.is_multiple_of(5));
        assert!(done.insert(number));
        delivery.ack().unwrap();
    }
    drop((one, two));
    until_queue_has(&channel, "work", 0, 0).await;
}

#[tokio::test]
async fn a_stream_is_read_from_an_offset_by_any_number_of_consumers() {
    let vhost = rabbitmq::vhost().await;
    let connection = connect(&vhost).await;
    let channel = confirm_channel(&connection).await;
    channel.declare_queue("log", queue_with([("x-queue-type", "stream".into())])).await.unwrap();
    fill(&channel, "log", 500).await;
    let from = |offset: Value<'static>| ConsumeOptions {
        arguments: Table::from_pairs([("x-stream-offset", offset)]).unwrap(),
        ..prefetch(100)
    };
    let mut all = channel.consume("log", from("first".into())).await.unwrap();
    let mut late = channel.consume("log", from(450i64.into())).await.unwrap();
    for expected in 0..500 {
        let delivery = next(&mut all).await;
        assert_eq!(number(&delivery), expected);
        let properties = delivery.properties();
        let offset = properties.headers.as_ref().and_then(|headers| headers.get("x-stream-offset"));
        assert_eq!(offset.and_then(|offset| offset.as_i64()), Some(i64::from(expected)));
        delivery.ack().unwrap();
    }
    for expected in 450..500 {
        let delivery = next(&mut late).await;
        assert_eq!(number(&delivery), expected);
        delivery.ack().unwrap();
    }
    // Reading removes nothing; and a consumer that names no prefetch has one all the same, which a stream demands.
    let unlimited = ConsumeOptions { prefetch: 0, ..from("first".into()) };
    let mut again = channel.consume("log", unlimited).await.unwrap();
    for expected in 0..500 {
        let delivery = next(&mut again).await;
        assert_eq!(number(&delivery), expected);
        delivery.ack().unwrap();
    }
    all.cancel().await.unwrap();
    assert!(all.next().await.is_none());
    drop(late);
    channel.delete_queue("log", DeleteQueue::default()).await.unwrap();
    let ended = end_of(&mut again).await.expect("a reason");
    assert_eq!(ended.kind(), ErrorKind::ConsumerCancelled);
}

#[tokio::test]
async fn what_a_stream_cannot_do_is_refused_with_a_reason() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    channel.declare_queue("log", queue_with([("x-queue-type", "stream".into())])).await.unwrap();
    let other = connection.open_channel().await.unwrap();
    let auto = ConsumeOptions { auto_ack: true, ..ConsumeOptions::default() };
    let error = channel.consume("log", auto).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ChannelClosed(ReplyCode::PRECONDITION_FAILED), "{error}");
    other.check_open().unwrap();

    let error = other.get("log", GetOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionClosed(ReplyCode::NOT_IMPLEMENTED), "{error}");
    assert!(error.to_string().contains("basic.get"), "{error}");
    assert_eq!(connection.ended().await.reply_code(), Some(ReplyCode::NOT_IMPLEMENTED));
}

#[tokio::test]
async fn replies_come_straight_to_the_channel_that_asked() {
    let vhost = rabbitmq::vhost().await;
    let (connection, asker) = with_queue(&vhost).await;
    asker.declare_queue("other work", Default::default()).await.unwrap();
    let auto = ConsumeOptions { auto_ack: true, ..ConsumeOptions::default() };
    let mut replies = asker.consume("amq.rabbitmq.reply-to", auto).await.unwrap();
    // Replies have no delivery tags of their own before RabbitMQ 4.2: those of other consumers must not be mixed up.
    let mut work = asker.consume("other work", prefetch(5)).await.unwrap();
    let server = confirm_channel(&connection).await;
    let mut requests = server.consume("q", ConsumeOptions::default()).await.unwrap();
    fill(&server, "other work", 100).await;
    let mut held = None;
    for question in 0..100u32 {
        let reply_to = Some("amq.rabbitmq.reply-to".try_into().unwrap());
        let properties = Properties { reply_to, ..Properties::default() };
        let publish = Publish { properties, ..to("q", question.to_string()) };
        drop(asker.publish(&publish).await.unwrap());
        let request = next(&mut requests).await;
        let to_whom = request.properties().reply_to.unwrap().to_string();
        let answer = (number(&request) * 2).to_string();
        // RabbitMQ 3.10 sends a mandatory one back, although it delivers it.
        let reply = Publish { mandatory: false, ..to(&to_whom, answer) };
        assert!(server.publish(&reply).await.unwrap().await.is_acked());
        request.ack().unwrap();
        assert_eq!(number(&next(&mut replies).await), question * 2);
        // Now in order, now not.
        let delivery = next(&mut work).await;
        assert_eq!(number(&delivery), question);
        if question % 3 == 0 {
            held = Some(delivery);
        } else {
            delivery.ack().unwrap();
            held.take().map_or(Ok(()), Delivery::ack).unwrap();
        }
    }
    held.map_or(Ok(()), Delivery::ack).unwrap();
    work.cancel().await.unwrap();
    until_queue_has(&server, "other work", 0, 0).await;
    asker.close().await.unwrap();
    until_queue_has(&server, "other work", 0, 0).await;
}

#[tokio::test]
async fn a_single_active_consumer_is_followed_by_the_next() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    channel
        .declare_queue("one", queue_with([("x-single-active-consumer", true.into())]))
        .await
        .unwrap();
    let other = connection.open_channel().await.unwrap();
    let mut active = channel.consume("one", prefetch(10)).await.unwrap();
    let mut standby = other.consume("one", prefetch(10)).await.unwrap();
    fill(&channel, "one", 20).await;
    let held = take(&mut active, 10).await;
    until_queue_has(&channel, "one", 10, 2).await;
    assert!(has_nothing(&mut standby).await);
    drop(active);
    drop(held);
    let rest = take(&mut standby, 10).await;
    ack_all(rest);
    ack_all(take(&mut standby, 10).await);
    until_queue_has(&channel, "one", 0, 1).await;
}

#[tokio::test]
async fn a_consumer_goes_on_while_its_channel_handle_is_dropped() {
    let vhost = rabbitmq::vhost().await;
    let (connection, publisher) = with_queue_and_channels(&vhost, 2).await;
    let channel = connection.open_channel().await.unwrap();
    let mut consumer = channel.consume("q", prefetch(10)).await.unwrap();
    drop(channel);
    fill(&publisher, "q", 100).await;
    let mut last = None;
    for expected in 0..100 {
        let delivery = next(&mut consumer).await;
        assert_eq!(number(&delivery), expected);
        if let Some(delivery) = last.replace(delivery) {
            delivery.ack().unwrap();
        }
    }
    drop(consumer);
    // The last delivery alone holds the channel, and can still be settled.
    last.unwrap().ack().unwrap();
    until_queue_has(&publisher, "q", 0, 0).await;
    eventually(SOON, "the channel's number to be free", async || {
        connection.open_channel().await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_frame_size_of_the_least_carries_everything() {
    let vhost = rabbitmq::vhost().await;
    let mut options = Options::from_uri(&vhost.url()).unwrap();
    // RabbitMQ 4 asks for 8192 at least.
    options.frame_max = if Version::under_test() < Version::V4_0 { 4096 } else { 8192 };
    let connection = leveret::amqp::Connection::open(&options).await.unwrap();
    let channel = confirm_channel(&connection).await;
    channel.declare_queue("q", Default::default()).await.unwrap();
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    let payload = options.frame_max as usize - 8;
    for size in [0, 1, payload - 1, payload, payload + 1, 2 * payload, 10 * payload + 1, 1_000_000]
    {
        let body: bytes::Bytes = (0..size).map(|n| (n % 251) as u8).collect();
        assert!(channel.publish(&to("q", body.clone())).await.unwrap().await.is_acked());
        let delivery = next(&mut consumer).await;
        assert!(delivery.body() == &body, "{size} bytes");
        delivery.ack().unwrap();
    }
}
