//! What clients say about deaths.

use leveret::amqp::{Array, Connection, Table, Value};
use leveret_broker::Profile;

use super::letter::{Letter, death, in_words};
use super::stage::{Pairs, Stage, and, dying_into, dying_to, with_headers};

fn list(values: impl IntoIterator<Item = Value<'static>>) -> Value<'static> {
    Array::from_values(values).unwrap().into()
}

fn entry(queue: &'static str, reason: &'static str, more: Pairs<'static>) -> Value<'static> {
    let fields = vec![("queue", queue.into()), ("reason", reason.into())];
    Table::from_pairs(and(fields, more)).unwrap().into()
}

fn rejected_here<'a>(first_is_untold_in_3_10: bool) -> Letter<'a> {
    let deaths = vec![death("rejected", "q")];
    Letter { key: "end", failed: true, deaths, first_is_untold_in_3_10, ..Letter::default() }
}

/// A stage with a queue `q` that dies into `end`.
async fn set_up(connection: &Connection, profile: Profile) -> Stage {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    stage.queue("q", dying_into("end")).await;
    stage
}

pub(crate) async fn an_x_death_that_is_none_is_written_anew(
    connection: &Connection,
    profile: Profile,
) {
    let stage = set_up(connection, profile).await;
    let empty = || Value::Table(Table::new());
    for claimed in ["mine".into(), Value::Void, empty(), 5.into()] {
        stage.put("q", with_headers(vec![("x-death", claimed)])).await;
        stage.reject("q").await;
        stage.expect("end", &rejected_here(true)).await;
    }
    if stage.is_3_10() {
        // Its queue does not get over the next ones, and is not followed there.
        return;
    }
    let odd_count = |count| list([entry("q", "rejected", vec![("count", count)])]);
    for claimed in [
        list(["mine".into()]),
        list([empty(), "mine".into()]),
        odd_count("5".into()),
        odd_count(5.5.into()),
        odd_count(true.into()),
    ] {
        stage.put("q", with_headers(vec![("x-death", claimed)])).await;
        stage.reject("q").await;
        stage.expect("end", &rejected_here(true)).await;
    }
}

pub(crate) async fn deaths_that_a_client_claims_count_in_3_10(
    connection: &Connection,
    profile: Profile,
) {
    const NEW: &str = r#"{count: l:1, exchange: "", queue: "q", reason: "rejected", routing-keys: ["q"], time: now}"#;
    let stage = set_up(connection, profile).await;
    let ours = |more| entry("q", "rejected", more);
    let other = |queue| entry(queue, "expired", vec![]);
    let empty = || Value::Table(Table::new());
    for (claimed, expected) in [
        (list([]), format!("[{NEW}]")),
        (list([empty()]), format!("[{NEW}, {{}}]")),
        (list([empty(), empty()]), format!("[{NEW}, {{count: l:2}}]")),
        (list([other("a")]), format!(r#"[{NEW}, {{queue: "a", reason: "expired"}}]"#)),
        (
            list([other("a"), other("b"), other("a"), other("c")]),
            format!(
                r#"[{NEW}, {{count: l:1, queue: "c", reason: "expired"}}, {{count: l:1, queue: "b", reason: "expired"}}, {{count: l:2, queue: "a", reason: "expired"}}]"#
            ),
        ),
        (
            list([ours(vec![("z", 1.into()), ("b", 2.into())])]),
            r#"[{b: I:2, count: l:1, queue: "q", reason: "rejected", z: I:1}]"#.to_owned(),
        ),
        (
            list([other("a"), ours(vec![("count", 2.into())]), other("b")]),
            r#"[{count: l:3, queue: "q", reason: "rejected"}, {count: l:1, queue: "b", reason: "expired"}, {count: l:1, queue: "a", reason: "expired"}]"#.to_owned(),
        ),
        (
            list([ours(vec![("n", 1.into())]), ours(vec![("n", 2.into())])]),
            r#"[{count: l:3, n: I:1, queue: "q", reason: "rejected"}]"#.to_owned(),
        ),
        (
            list([ours(vec![("count", 3.into())]), ours(vec![("count", 9.into())])]),
            r#"[{count: l:4, queue: "q", reason: "rejected"}]"#.to_owned(),
        ),
        (
            list([ours(vec![("count", 5u8.into())])]),
            r#"[{count: l:6, queue: "q", reason: "rejected"}]"#.to_owned(),
        ),
        (
            list([ours(vec![("count", i64::MAX.into())])]),
            format!(r#"[{{count: l:{}, queue: "q", reason: "rejected"}}]"#, i64::MIN),
        ),
        (
            list([ours(vec![("count", Value::Void)])]),
            r#"[{count: l:1, count: V:void, queue: "q", reason: "rejected"}]"#.to_owned(),
        ),
        (
            list([ours(vec![("count", Value::Timestamp(5))])]),
            r#"[{count: l:6, queue: "q", reason: "rejected"}]"#.to_owned(),
        ),
    ] {
        let in_words_claimed = in_words(&claimed);
        stage.put("q", with_headers(vec![("x-death", claimed)])).await;
        stage.reject("q").await;
        if stage.is_3_10() {
            let found = stage.take("end").await;
            let headers = found.properties().headers.unwrap().into_owned();
            found.ack().unwrap();
            let x_death = in_words(&headers.get("x-death").unwrap());
            assert_eq!((x_death, headers.len()), (expected, 1), "claimed: {in_words_claimed}");
        } else {
            stage.expect("end", &rejected_here(true)).await;
        }
    }
}

pub(crate) async fn first_and_last_death_of_a_client_are_overwritten(
    connection: &Connection,
    profile: Profile,
) {
    let stage = set_up(connection, profile).await;
    let claimed = || {
        vec![
            ("x-first-death-queue", 5.into()),
            ("x-first-death-other", 6.into()),
            ("x-last-death-queue", 7.into()),
        ]
    };
    stage.put("q", with_headers(claimed())).await;
    stage.reject("q").await;
    let mut headers = vec![("x-first-death-other", "I:6")];
    if stage.is_3_10() {
        headers.push(("x-last-death-queue", "I:7"));
    }
    stage.expect("end", &Letter { headers: headers.clone(), ..rejected_here(false) }).await;

    // With an `x-death` it is not the first, to 3.10.
    stage.put("q", with_headers(and(claimed(), vec![("x-death", "mine".into())]))).await;
    stage.reject("q").await;
    if stage.is_3_10() {
        headers.push(("x-first-death-queue", "I:5"));
    }
    stage.expect("end", &Letter { headers, ..rejected_here(true) }).await;
}

pub(crate) async fn a_cycle_that_a_client_claims_counts_in_3_10(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", and(dying_to("x"), vec![("x-message-ttl", 1.into())])).await;
    for queue in ["been here", "witness"] {
        stage.queue(queue, vec![]).await;
    }
    stage.fanout("x", &["been here", "witness"]).await;
    for (reason, may_come) in [("expired", false), ("rejected", true), ("anything", false)] {
        let claimed = list([entry("been here", reason, vec![("count", 1.into())])]);
        stage.put("q", with_headers(vec![("x-death", claimed)])).await;
        stage.take("witness").await.ack().unwrap();
        if may_come || !stage.is_3_10() {
            stage.take("been here").await.ack().unwrap();
        }
        stage.expect_nothing("been here").await;
    }
}
