//! Exchanges on the way.

use leveret::amqp::{Connection, Properties, Table, Value};
use leveret_broker::Profile;

use super::letter::{Letter, death};
use super::stage::{Stage, and, dying_into, dying_to, expiring, with_headers};

pub(crate) async fn a_headers_exchange_sees_the_first_death(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.exchange("dlx", "headers", vec![]).await;
    stage.queue("q", dying_to("dlx")).await;
    let any = ("x-match", Value::from("any-with-x"));
    for (queue, wanted) in [
        ("own", ("n", 1.into())),
        ("first", ("x-first-death-queue", "q".into())),
        ("last", ("x-last-death-reason", "rejected".into())),
        ("x-death", ("x-death", Value::Void)),
    ] {
        stage.queue(queue, vec![]).await;
        let arguments = Table::from_pairs([any.clone(), wanted]).unwrap();
        stage.channel.bind_queue(queue, "dlx", "", &arguments).await.unwrap();
    }
    let of = |names: [&'static str; 3]| names;
    for (claimed, told_in_3_10, told_in_4_3) in [
        (vec![], of(["own", "first", "x-death"]), of(["own", "first", "last"])),
        // 3.10 thinks of another as the first now, and 4.3 lets the exchange see the client's own.
        (
            vec![("x-death", "mine".into())],
            of(["own", "x-death", ""]),
            of(["own", "first", "last"]),
        ),
    ] {
        let is_claimed = !claimed.is_empty();
        stage.put("q", with_headers(and(vec![("n", 1.into())], claimed))).await;
        stage.reject("q").await;
        let told = if stage.is_3_10() { told_in_3_10 } else { told_in_4_3 };
        for queue in ["own", "first", "last", "x-death"] {
            if told.contains(&queue) || (queue == "x-death" && is_claimed) {
                stage.take(queue).await.ack().unwrap();
            }
            stage.expect_nothing(queue).await;
        }
    }
}

pub(crate) async fn what_cannot_be_routed_goes_to_the_alternate_exchange(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    stage.fanout("alternate", &["end"]).await;
    stage.exchange("dlx", "direct", vec![("alternate-exchange", "alternate".into())]).await;
    stage.queue("q", dying_to("dlx")).await;
    stage.put("q", Properties::default()).await;
    stage.reject("q").await;
    let deaths = vec![death("rejected", "q")];
    let letter = Letter { exchange: "dlx", key: "q", failed: true, deaths, ..Letter::default() };
    stage.expect("end", &letter).await;
}

pub(crate) async fn a_cycle_is_not_for_the_alternate_exchange(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    stage.fanout("alternate", &["end"]).await;
    stage.exchange("dlx", "direct", vec![("alternate-exchange", "alternate".into())]).await;
    stage.queue("q", dying_to("dlx")).await;
    stage.bind("q", "dlx", "q").await;
    stage.put("q", expiring("1")).await;
    stage.until_empty("q").await;
    stage.expect_nothing("end").await;
}

pub(crate) async fn the_exchange_that_is_told_is_the_one_published_to(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    stage.queue("q", dying_into("end")).await;
    stage.fanout("alternate", &["q"]).await;
    stage.exchange("in", "direct", vec![("alternate-exchange", "alternate".into())]).await;
    assert!(stage.publish("in", "k", Properties::default()).await.is_acked());
    stage.reject("q").await;
    let deaths = vec![death("rejected", "q").by("in", &["k"])];
    stage.expect("end", &Letter { key: "end", failed: true, deaths, ..Letter::default() }).await;
}

pub(crate) async fn without_the_exchange_the_message_is_gone(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", dying_to("missing")).await;
    stage.put("q", Properties::default()).await;
    stage.reject("q").await;
    stage.expect_nothing("q").await;
    stage.channel.check_open().unwrap();
}
