//! `CC` and `BCC`.

use leveret::amqp::{Array, Connection, Value};
use leveret_broker::Profile;

use super::letter::{Letter, death};
use super::stage::{Pairs, Stage, and, dying_into, dying_to, with_headers};

const KEYS: [&str; 4] = ["k", "c1", "c2", "b1"];

fn list<'a>(values: impl IntoIterator<Item = &'a str>) -> Value<'static> {
    Array::from_values(values.into_iter().map(Value::from)).unwrap().into()
}

fn copies() -> Pairs<'static> {
    vec![("CC", list(["c1", "c2"])), ("BCC", list(["b1"]))]
}

/// A queue that dies to `dlx`, which leads to a queue for each key, all of which die into `end`.
async fn set_up(connection: &Connection, profile: Profile, arguments: Pairs<'_>) -> Stage {
    let stage = Stage::new(connection, profile).await;
    stage.exchange("in", "direct", vec![]).await;
    stage.exchange("dlx", "direct", vec![]).await;
    stage.queue("q", and(dying_to("dlx"), arguments)).await;
    for key in KEYS {
        stage.bind("q", "in", key).await;
    }
    for key in KEYS.into_iter().chain(["new", ""]) {
        stage.queue(&format!("to {key}"), dying_into("end")).await;
        stage.bind(&format!("to {key}"), "dlx", key).await;
    }
    stage.queue("end", vec![]).await;
    assert!(stage.publish("in", "k", with_headers(copies())).await.is_acked());
    stage.reject("q").await;
    stage
}

pub(crate) async fn keys_of_cc_are_told_and_those_of_bcc_are_only_used(
    connection: &Connection,
    profile: Profile,
) {
    let stage = set_up(connection, profile, vec![]).await;
    let told = ["k", "c1", "c2"];
    let first = death("rejected", "q").by("in", &told);
    let cc = vec![("CC", r#"["c1", "c2"]"#)];
    for key in KEYS {
        let queue = format!("to {key}");
        let letter = Letter {
            exchange: "dlx",
            key: "k",
            failed: true,
            headers: cc.clone(),
            deaths: vec![first.clone()],
            ..Letter::default()
        };
        stage.expect_and_reject(&queue, &letter).await;

        // Now by a dead-letter routing key, which takes `CC` away in 3.10.
        let second = death("rejected", &queue).by("dlx", &told).sorted();
        let headers = if stage.is_3_10() { vec![] } else { cc.clone() };
        let deaths = vec![second, first.clone()];
        let letter = Letter { key: "end", failed: true, headers, deaths, ..Letter::default() };
        stage.expect("end", &letter).await;
    }
}

pub(crate) async fn a_dead_letter_routing_key_takes_the_place_of_all_keys(
    connection: &Connection,
    profile: Profile,
) {
    for key in ["new", ""] {
        let arguments = vec![("x-dead-letter-routing-key", key.into())];
        let stage = set_up(connection, profile, arguments).await;
        let queue = format!("to {key}");
        let first = death("rejected", "q").by("in", &["k", "c1", "c2"]);
        let headers = if stage.is_3_10() { vec![] } else { vec![("CC", r#"["c1", "c2"]"#)] };
        let letter = Letter {
            exchange: "dlx",
            key,
            failed: true,
            headers: headers.clone(),
            deaths: vec![first.clone()],
            ..Letter::default()
        };
        stage.expect_and_reject(&queue, &letter).await;
        let deaths = vec![death("rejected", &queue).by("dlx", &[key]).sorted(), first];
        let letter = Letter { key: "end", failed: true, headers, deaths, ..Letter::default() };
        stage.expect("end", &letter).await;
        for other in KEYS {
            stage.expect_nothing(&format!("to {other}")).await;
        }
        stage.channel.delete_queue("q", Default::default()).await.unwrap();
    }
}

pub(crate) async fn a_dead_letter_routing_key_that_was_a_bcc_is_not_told_in_4_3(
    connection: &Connection,
    profile: Profile,
) {
    let stage = set_up(connection, profile, vec![("x-dead-letter-routing-key", "b1".into())]).await;
    stage.reject("to b1").await;
    let told: &[&str] = if stage.is_3_10() { &["b1"] } else { &[] };
    let deaths = vec![
        death("rejected", "to b1").by("dlx", told).sorted(),
        death("rejected", "q").by("in", &["k", "c1", "c2"]),
    ];
    let headers = if stage.is_3_10() { vec![] } else { vec![("CC", r#"["c1", "c2"]"#)] };
    stage
        .expect("end", &Letter { key: "end", failed: true, headers, deaths, ..Letter::default() })
        .await;
}
