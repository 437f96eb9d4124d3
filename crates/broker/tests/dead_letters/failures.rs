//! Failed deliveries, which 4.3 counts on from queue to queue, whatever their types.

use leveret::amqp::{Connection, Properties, Refused};
use leveret_broker::Profile;

use super::stage::{Stage, and, dying_into, dying_to, quorum};

/// `redelivered`, `x-delivery-count` and `x-acquired-count` of the next message in a queue, which is then rejected or
/// nacked into the same queue again.
async fn counts(
    stage: &Stage,
    queue: &str,
    refuse: impl FnOnce(leveret::amqp::Delivery),
) -> String {
    let found = stage.take(queue).await;
    let headers = found.properties().headers.unwrap_or_default().into_owned();
    let count = |name: &str| {
        headers.get(name).map_or("none".to_owned(), |value| super::letter::in_words(&value))
    };
    let redelivered = if found.redelivered() { "redelivered" } else { "new" };
    let counts =
        format!("{redelivered} {} {}", count("x-delivery-count"), count("x-acquired-count"));
    refuse(found);
    counts
}

fn rejects(delivery: leveret::amqp::Delivery) {
    delivery.reject(Refused::Requeue).unwrap();
}

fn nacks(delivery: leveret::amqp::Delivery) {
    delivery.nack(Refused::Requeue).unwrap();
}

fn acks(delivery: leveret::amqp::Delivery) {
    delivery.ack().unwrap();
}

/// A queue of each type that dies to an exchange with a queue of each type behind it.
async fn set_up(connection: &Connection, profile: Profile) -> Stage {
    let stage = Stage::new(connection, profile).await;
    stage.queue("classic", dying_to("dlx")).await;
    stage.queue("quorum", and(dying_to("dlx"), quorum())).await;
    stage.queue("to classic", vec![]).await;
    stage.queue("to quorum", quorum()).await;
    stage.fanout("dlx", &["to classic", "to quorum"]).await;
    stage
}

pub(crate) async fn rejections_are_carried_on_in_4_3(connection: &Connection, profile: Profile) {
    let stage = set_up(connection, profile).await;
    for queue in ["classic", "quorum"] {
        stage.put(queue, Properties::default()).await;
        stage.requeue(queue).await;
        stage.reject(queue).await;
        let classic = counts(&stage, "to classic", acks).await;
        let first = counts(&stage, "to quorum", nacks).await;
        let second = counts(&stage, "to quorum", rejects).await;
        let third = counts(&stage, "to quorum", acks).await;
        if stage.is_3_10() {
            assert_eq!(classic, "new none none");
            assert_eq!(first, "new l:0 none");
            assert_eq!(second, "redelivered l:1 none");
            assert_eq!(third, "redelivered l:2 none");
        } else {
            assert_eq!(classic, "redelivered none none");
            assert_eq!(first, "redelivered l:2 l:2");
            // From here on it says how often this queue gave it out.
            assert_eq!(second, "redelivered l:2 l:1");
            assert_eq!(third, "redelivered l:3 l:2");
        }
    }
}

pub(crate) async fn nacks_are_not(connection: &Connection, profile: Profile) {
    let stage = set_up(connection, profile).await;
    for queue in ["classic", "quorum"] {
        stage.put(queue, Properties::default()).await;
        stage.take(queue).await.nack(Refused::Requeue).unwrap();
        stage.take(queue).await.nack(Refused::Discard).unwrap();
        assert_eq!(counts(&stage, "to classic", acks).await, "new none none");
        let expected = if stage.is_3_10() { "new l:0 none" } else { "new none none" };
        assert_eq!(counts(&stage, "to quorum", acks).await, expected);
    }
}

pub(crate) async fn carried_failures_count_for_the_delivery_limit(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    stage.queue("q", dying_into("limited")).await;
    let arguments = and(dying_into("end"), vec![("x-delivery-limit", 1.into())]);
    stage.queue("limited", and(arguments, quorum())).await;
    stage.put("q", Properties::default()).await;
    stage.requeue("q").await;
    stage.reject("q").await;
    // It failed twice already, but is looked at when it comes back to its queue and not before. A nack is enough.
    if stage.is_3_10() {
        assert_eq!(counts(&stage, "limited", nacks).await, "new l:0 none");
        assert_eq!(counts(&stage, "limited", nacks).await, "redelivered l:1 none");
        assert_eq!(counts(&stage, "end", acks).await, "new none none");
    } else {
        assert_eq!(counts(&stage, "limited", nacks).await, "redelivered l:2 l:2");
        assert_eq!(counts(&stage, "end", acks).await, "redelivered none none");
    }
}
