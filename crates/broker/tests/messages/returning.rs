//! Deliveries that come back to their queues: what is told of it, and in which order they go on.

use leveret::amqp::{
    Channel, Connection, ConsumeOptions, Delivery, Plain, Properties, Refused, Value,
};
use leveret_broker::Profile;

use super::stage::{Stage, body, headers, take, with_headers};

fn seen(delivery: &Delivery) -> String {
    let redelivered = if delivery.redelivered() { "again" } else { "new" };
    format!("{redelivered} {}", headers(delivery))
}

/// So that its channel still has it.
fn hold(delivery: Delivery) {
    std::mem::forget(delivery);
}

pub(crate) async fn a_quorum_queue_counts_deliveries(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", "quorum", &[]).await;
    stage.put("q", "", with_headers(&[("z", 1.into()), ("a", 2.into())])).await;
    let expect = async |channel: &Channel<Plain>, in_3_10: &str, in_4_3: &str| {
        let delivery = take(channel, "q").await;
        assert_eq!(
            seen(&delivery),
            if profile == Profile::RabbitMq3_10 { in_3_10 } else { in_4_3 }
        );
        delivery
    };
    let channel = connection.open_channel().await.unwrap();
    let first = "new a=I:2 x-delivery-count=l:0 z=I:1";
    let delivery = expect(&channel, first, "new a=I:2 z=I:1").await;
    delivery.nack(Refused::Requeue).unwrap();

    let nacked =
        ["again a=I:2 x-delivery-count=l:1 z=I:1", "again a=I:2 x-acquired-count=l:1 z=I:1"];
    let delivery = expect(&channel, nacked[0], nacked[1]).await;
    delivery.reject(Refused::Requeue).unwrap();

    let rejected = [
        "again a=I:2 x-delivery-count=l:2 z=I:1",
        "again a=I:2 x-acquired-count=l:2 x-delivery-count=l:1 z=I:1",
    ];
    hold(expect(&channel, rejected[0], rejected[1]).await);
    channel.recover().await.unwrap();

    let recovered = [
        "again a=I:2 x-delivery-count=l:3 z=I:1",
        "again a=I:2 x-acquired-count=l:3 x-delivery-count=l:1 z=I:1",
    ];
    hold(expect(&channel, recovered[0], recovered[1]).await);
    channel.close().await.unwrap();

    let channel = connection.open_channel().await.unwrap();
    let abandoned = [
        "again a=I:2 x-delivery-count=l:4 z=I:1",
        "again a=I:2 x-acquired-count=l:4 x-delivery-count=l:2 z=I:1",
    ];
    expect(&channel, abandoned[0], abandoned[1]).await.ack().unwrap();

    // A consumer of 3.10 is not told that there is nothing to tell.
    stage.put("q", "", Properties::default()).await;
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    let delivery = consumer.next().await.unwrap().unwrap();
    assert_eq!(seen(&delivery), "new none");
    delivery.ack().unwrap();
}

pub(crate) async fn counts_that_a_client_claims_are_overwritten(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", "quorum", &[]).await;
    stage.put("q", "", with_headers(&[("x-delivery-count", Value::from(7))])).await;
    let delivery = stage.take("q").await;
    let claimed =
        if stage.is_3_10() { "new x-delivery-count=l:0" } else { "new x-delivery-count=I:7" };
    assert_eq!(seen(&delivery), claimed);
    delivery.reject(Refused::Requeue).unwrap();
    let delivery = stage.take("q").await;
    assert!(headers(&delivery).ends_with("x-delivery-count=l:1"), "{delivery:?}");
    delivery.ack().unwrap();
}

/// The order of six messages after four were taken and came back, the last one first.
async fn order_after(
    stage: &Stage,
    connection: &Connection,
    queue: &str,
    come_back: impl AsyncFnOnce(&Channel<Plain>, Vec<Delivery>),
) -> String {
    stage.fill(queue, 1..=6).await;
    let channel = connection.open_channel().await.unwrap();
    let mut deliveries = Vec::new();
    for _ in 0..4 {
        deliveries.push(take(&channel, queue).await);
    }
    deliveries.reverse();
    come_back(&channel, deliveries).await;
    stage.take_all(queue, 6).await.concat()
}

async fn nacked(_: &Channel<Plain>, deliveries: Vec<Delivery>) {
    deliveries.into_iter().for_each(|one| one.nack(Refused::Requeue).unwrap());
}

async fn recovered(channel: &Channel<Plain>, deliveries: Vec<Delivery>) {
    deliveries.into_iter().for_each(hold);
    channel.recover().await.unwrap();
}

async fn abandoned(channel: &Channel<Plain>, deliveries: Vec<Delivery>) {
    deliveries.into_iter().for_each(hold);
    channel.close().await.unwrap();
}

pub(crate) async fn what_comes_back_to_a_classic_queue_goes_where_it_was(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", "classic", &[]).await;
    assert_eq!(order_after(&stage, connection, "q", nacked).await, "123456");
    assert_eq!(order_after(&stage, connection, "q", recovered).await, "123456");
    assert_eq!(order_after(&stage, connection, "q", abandoned).await, "123456");
}

/// First, and in the order of coming back; but last in 3.10 if there is no delivery limit, except from a channel that went.
pub(crate) async fn what_comes_back_to_a_quorum_queue_goes_first_or_last(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("limited", "quorum", &[("x-delivery-limit", 5.into())]).await;
    stage.queue("usual", "quorum", &[]).await;
    assert_eq!(order_after(&stage, connection, "limited", nacked).await, "432156");
    assert_eq!(order_after(&stage, connection, "limited", recovered).await, "123456");
    assert_eq!(order_after(&stage, connection, "limited", abandoned).await, "123456");
    let (back, again) = if stage.is_3_10() { ("564321", "561234") } else { ("432156", "123456") };
    assert_eq!(order_after(&stage, connection, "usual", nacked).await, back);
    assert_eq!(order_after(&stage, connection, "usual", recovered).await, again);
    assert_eq!(order_after(&stage, connection, "usual", abandoned).await, "123456");
}

pub(crate) async fn a_recover_is_answered_before_what_it_delivers_anew(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", "classic", &[]).await;
    stage.fill("q", 1..=3).await;
    let channel = connection.open_channel().await.unwrap();
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    for _ in 0..3 {
        hold(consumer.next().await.unwrap().unwrap());
    }
    channel.recover().await.unwrap();
    for number in 1..=3 {
        let delivery = consumer.next().await.unwrap().unwrap();
        assert_eq!((body(&delivery), delivery.redelivered()), (number.to_string(), true));
        // Had it come before the answer, it would count as one of those that were recovered.
        delivery.ack().unwrap();
    }
}

pub(crate) async fn a_quorum_queue_has_priorities_in_4_3(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", "quorum", &[]).await;
    let priorities = [None, Some(0), Some(9), Some(4), Some(255), Some(31), None];
    for (number, priority) in priorities.into_iter().enumerate() {
        let properties = Properties { priority, ..Properties::default() };
        stage.put("q", &number.to_string(), properties).await;
    }
    let expected = if stage.is_3_10() { "0123456" } else { "4520361" };
    assert_eq!(stage.take_all("q", 7).await.concat(), expected);
}
