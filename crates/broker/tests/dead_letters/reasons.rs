//! Why messages die.

use leveret::amqp::{Connection, Outcome, Properties, Refused, Value};
use leveret_broker::Profile;

use super::letter::{Letter, death};
use super::stage::{Pairs, Stage, and, dying_into, dying_to, expiring, quorum, with_headers};

pub(crate) async fn a_rejected_message(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    stage.queue("q", dying_into("end")).await;
    let letter = Letter {
        key: "end",
        failed: true,
        deaths: vec![death("rejected", "q")],
        ..Letter::default()
    };
    for properties in [Properties::default(), with_headers(vec![])] {
        stage.put("q", properties).await;
        stage.reject("q").await;
        stage.expect("end", &letter).await;
    }
    stage.put("q", Properties::default()).await;
    stage.take("q").await.nack(Refused::Discard).unwrap();
    stage.expect("end", &Letter { failed: false, ..letter }).await;

    // It is stripped and told although it is not what it died of.
    stage.put("q", expiring("60000")).await;
    stage.reject("q").await;
    let deaths = vec![death("rejected", "q").expiration("60000")];
    stage.expect("end", &Letter { key: "end", failed: true, deaths, ..Letter::default() }).await;
}

pub(crate) async fn an_expired_message(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    stage.queue("q", dying_into("end")).await;
    stage.queue("short", and(dying_into("end"), vec![("x-message-ttl", 1.into())])).await;
    let letter = |death| Letter { key: "end", deaths: vec![death], ..Letter::default() };
    for (given, told_in_4_3) in [("1", "1"), ("0", "0"), ("+001", "1")] {
        stage.put("q", expiring(given)).await;
        let told = if stage.is_3_10() { given } else { told_in_4_3 };
        stage.expect("end", &letter(death("expired", "q").expiration(told))).await;
    }
    stage.put("short", Properties::default()).await;
    stage.expect("end", &letter(death("expired", "short"))).await;
    stage.put("short", expiring("60000")).await;
    stage.expect("end", &letter(death("expired", "short").expiration("60000"))).await;
}

pub(crate) async fn a_message_pushed_out(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    for (queue, limit) in [("one", 1), ("none", 0)] {
        stage.queue(queue, and(dying_into("end"), vec![("x-max-length", limit.into())])).await;
        for number in 0..=limit {
            stage.put(queue, with_headers(vec![("n", number.into())])).await;
        }
        let (headers, deaths) = (vec![("n", "I:0")], vec![death("maxlen", queue)]);
        stage.expect("end", &Letter { key: "end", headers, deaths, ..Letter::default() }).await;
    }
}

pub(crate) async fn a_message_not_let_in(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    let limit = vec![("x-max-length", 1.into()), ("x-overflow", Value::from("reject-publish-dlx"))];
    stage.queue("q", and(dying_into("end"), limit)).await;
    stage.put("q", Properties::default()).await;
    let outcome = stage.publish("", "q", expiring("60000")).await;
    assert!(matches!(outcome, Outcome::Nacked), "{outcome:?}");
    let deaths = vec![death("maxlen", "q").expiration("60000")];
    stage.expect("end", &Letter { key: "end", deaths, ..Letter::default() }).await;
}

pub(crate) async fn a_message_out_of_a_quorum_queue(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    let arguments = and(dying_into("end"), vec![("x-max-length", 1.into())]);
    stage.queue("q", and(arguments, quorum())).await;
    let letter = |death| Letter { key: "end", deaths: vec![death], ..Letter::default() };
    stage.put("q", expiring("60000")).await;
    stage.reject("q").await;
    let rejected = letter(death("rejected", "q").expiration("60000"));
    stage.expect("end", &Letter { failed: true, ..rejected }).await;

    stage.put("q", expiring("5")).await;
    stage.expect("end", &letter(death("expired", "q").expiration("5"))).await;

    // It lets one more in than it keeps, or two.
    for _ in 0..3 {
        stage.put("q", Properties::default()).await;
    }
    stage.expect("end", &letter(death("maxlen", "q"))).await;
}

pub(crate) async fn a_message_beyond_its_delivery_limit(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    let arguments = and(dying_into("end"), vec![("x-delivery-limit", 1.into())]);
    stage.queue("q", and(arguments, quorum())).await;
    stage.put("q", expiring("60000")).await;
    stage.requeue("q").await;
    stage.requeue("q").await;
    let deaths = vec![death("delivery_limit", "q").expiration("60000")];
    stage.expect("end", &Letter { key: "end", failed: true, deaths, ..Letter::default() }).await;
}

pub(crate) async fn a_message_dead_lettered_at_least_once(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    stage.fanout("dlx", &["end"]).await;
    let safely: Pairs<'_> = vec![
        ("x-overflow", "reject-publish".into()),
        ("x-dead-letter-strategy", "at-least-once".into()),
    ];
    stage.queue("q", and(and(dying_to("dlx"), quorum()), safely)).await;
    let letter =
        |death| Letter { exchange: "dlx", key: "q", deaths: vec![death], ..Letter::default() };
    stage.put("q", expiring("60000")).await;
    stage.requeue("q").await;
    stage.reject("q").await;
    let rejected = letter(death("rejected", "q").expiration("60000"));
    stage.expect("end", &Letter { failed: true, ..rejected }).await;
    stage.put("q", expiring("5")).await;
    stage.expect("end", &letter(death("expired", "q").expiration("5"))).await;
}
