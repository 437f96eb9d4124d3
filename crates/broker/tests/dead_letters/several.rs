//! More than one death.

use std::time::{Duration, SystemTime};

use leveret::amqp::{Connection, Properties, Refused};
use leveret_broker::Profile;
use leveret_testkit::eventually;

use super::letter::{Entry, Letter, death};
use super::stage::{Stage, and, dying_into, dying_to, expiring};

fn rejected(queue: &str) -> Entry<'_> {
    death("rejected", queue)
}

pub(crate) async fn the_same_death_again_is_counted(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", dying_to("x")).await;
    stage.fanout("x", &["q"]).await;
    stage.put("q", expiring("60000")).await;
    stage.reject("q").await;
    let once = rejected("q").expiration("60000");
    let letter = Letter {
        exchange: "x",
        key: "q",
        failed: true,
        deaths: vec![once.clone()],
        ..Letter::default()
    };
    stage.expect_and_reject("q", &letter).await;
    // All but the count is of the first time, when it came by the default exchange.
    let (deaths, last_exchange) = (vec![once.times(2).sorted()], Some("x"));
    stage.expect("q", &Letter { deaths, last_exchange, ..letter }).await;
}

pub(crate) async fn the_time_is_that_of_the_first(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", dying_into("q")).await;
    stage.put("q", Properties::default()).await;
    stage.reject("q").await;
    let time = async || {
        let found = stage.take("q").await;
        let headers = found.properties().headers.unwrap().into_owned();
        found.reject(Refused::Discard).unwrap();
        let deaths = headers.get("x-death").unwrap();
        let newest = deaths.as_array().unwrap().iter().next().unwrap();
        let (count, time) = {
            let newest = newest.as_table().unwrap();
            (newest.get("count").unwrap().as_i64(), format!("{:?}", newest.get("time")))
        };
        (count.unwrap(), time)
    };
    let second = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let began = second();
    let (count, first_time) = time().await;
    assert_eq!(count, 1);
    eventually(Duration::from_secs(10), "another second", async || second() > began + 1).await;
    // One that is dated late has happened by now.
    let (_, second_time) = time().await;
    let (count, third_time) = time().await;
    assert_eq!((count, second_time, third_time), (3, first_time.clone(), first_time));
}

pub(crate) async fn a_retry_loop_has_two_entries(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("work", dying_into("wait")).await;
    stage.queue("wait", and(dying_into("work"), vec![("x-message-ttl", 1.into())])).await;
    stage.put("work", Properties::default()).await;
    stage.reject("work").await;
    for round in 1..=3 {
        let work = rejected("work").times(round);
        let work = if round == 1 { work } else { work.sorted() };
        let deaths = vec![death("expired", "wait").times(round).sorted(), work];
        let letter = Letter { key: "work", failed: true, deaths, ..Letter::default() };
        stage.expect_and_reject("work", &letter).await;
    }
}

pub(crate) async fn the_newest_comes_first(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    for (queue, next) in [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "b")] {
        stage.queue(queue, dying_into(next)).await;
    }
    stage.put("a", Properties::default()).await;
    let first = rejected("a");
    let others = |names: &[(&'static str, i64)]| {
        let entry = |(name, count): &(&'static str, i64)| match *name {
            "a" => rejected("a"),
            name => rejected(name).times(*count).sorted(),
        };
        names.iter().map(entry).collect::<Vec<_>>()
    };
    // 3.10 turns all but the newest round, each time.
    let (abc, abcd, abcde, again, and_again) = if stage.is_3_10() {
        (
            others(&[("c", 1), ("a", 1), ("b", 1)]),
            others(&[("d", 1), ("b", 1), ("a", 1), ("c", 1)]),
            others(&[("e", 1), ("c", 1), ("a", 1), ("b", 1), ("d", 1)]),
            others(&[("b", 2), ("d", 1), ("a", 1), ("c", 1), ("e", 1)]),
            others(&[("c", 2), ("e", 1), ("a", 1), ("d", 1), ("b", 2)]),
        )
    } else {
        (
            others(&[("c", 1), ("b", 1), ("a", 1)]),
            others(&[("d", 1), ("c", 1), ("b", 1), ("a", 1)]),
            others(&[("e", 1), ("d", 1), ("c", 1), ("b", 1), ("a", 1)]),
            others(&[("b", 2), ("e", 1), ("d", 1), ("c", 1), ("a", 1)]),
            others(&[("c", 2), ("b", 2), ("e", 1), ("d", 1), ("a", 1)]),
        )
    };
    stage.reject("a").await;
    for (queue, deaths) in [
        ("b", others(&[("a", 1)])),
        ("c", others(&[("b", 1), ("a", 1)])),
        ("d", abc),
        ("e", abcd),
        ("b", abcde),
        ("c", again),
        ("d", and_again),
    ] {
        let first = Some(first.clone());
        let letter = Letter { key: queue, failed: true, deaths, first, ..Letter::default() };
        stage.expect_and_reject(queue, &letter).await;
    }
}
