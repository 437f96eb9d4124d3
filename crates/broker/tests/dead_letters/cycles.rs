//! Messages that would come back without anybody's doing.

use leveret::amqp::{Connection, DeleteQueue, Properties};
use leveret_broker::Profile;

use super::letter::{Letter, death};
use super::stage::{Stage, and, dying_to, expiring, with_headers};

pub(crate) async fn an_expired_message_does_not_come_back_to_its_queue(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", dying_to("x")).await;
    stage.queue("witness", vec![]).await;
    stage.fanout("x", &["q", "witness"]).await;
    stage.put("q", expiring("1")).await;
    let deaths = vec![death("expired", "q").expiration("1")];
    let letter = Letter { exchange: "x", key: "q", deaths, ..Letter::default() };
    stage.expect("witness", &letter).await;
    stage.expect_nothing("q").await;
}

pub(crate) async fn a_message_pushed_out_does_not_come_back_to_its_queue(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", and(dying_to("x"), vec![("x-max-length", 1.into())])).await;
    stage.queue("witness", vec![]).await;
    stage.fanout("x", &["q", "witness"]).await;
    for number in 0..2 {
        stage.put("q", with_headers(vec![("n", number.into())])).await;
    }
    let (headers, deaths) = (vec![("n", "I:0")], vec![death("maxlen", "q")]);
    let letter = Letter { exchange: "x", key: "q", headers, deaths, ..Letter::default() };
    stage.expect("witness", &letter).await;
    stage.take("q").await.ack().unwrap();
    stage.expect_nothing("q").await;
}

pub(crate) async fn two_queues_do_not_pass_an_expired_message_round(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("a", dying_to("to b")).await;
    stage.queue("b", and(dying_to("to a"), vec![("x-message-ttl", 1.into())])).await;
    stage.queue("witness", vec![]).await;
    stage.fanout("to a", &["a", "witness"]).await;
    stage.fanout("to b", &["b"]).await;
    stage.put("a", expiring("1")).await;
    let deaths = vec![
        death("expired", "b").by("to b", &["a"]).sorted(),
        death("expired", "a").expiration("1"),
    ];
    let letter = Letter { exchange: "to a", key: "a", deaths, ..Letter::default() };
    stage.expect("witness", &letter).await;
    stage.expect_nothing("a").await;
}

pub(crate) async fn a_rejection_before_does_not_break_the_cycle(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("r", dying_to("to e")).await;
    stage.queue("e", and(dying_to("x"), vec![("x-message-ttl", 1.into())])).await;
    stage.queue("witness", vec![]).await;
    stage.fanout("to e", &["e"]).await;
    stage.fanout("x", &["e", "r", "witness"]).await;
    stage.put("r", Properties::default()).await;
    stage.reject("r").await;
    let deaths = vec![death("expired", "e").by("to e", &["r"]).sorted(), death("rejected", "r")];
    let letter = Letter { exchange: "x", key: "r", failed: true, deaths, ..Letter::default() };
    stage.expect("witness", &letter).await;
    // Back to where it was rejected, it may go; to where it expired, it may not, or the witness would hear of it.
    stage.expect("r", &letter).await;
    stage.expect_nothing("r").await;
    stage.expect_nothing("witness").await;
}

pub(crate) async fn a_rejection_within_breaks_the_cycle(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("e", dying_to("to r")).await;
    stage.queue("r", dying_to("to e")).await;
    stage.fanout("to r", &["r"]).await;
    stage.fanout("to e", &["e"]).await;
    stage.put("e", expiring("1")).await;
    stage.reject("r").await;
    let deaths = vec![
        death("rejected", "r").by("to r", &["e"]).sorted(),
        death("expired", "e").expiration("1"),
    ];
    let letter = Letter { exchange: "to e", key: "e", failed: true, deaths, ..Letter::default() };
    stage.expect("e", &letter).await;
}

/// It turns the order of its entries round, and so takes the one for the other when it looks for a rejection.
pub(crate) async fn three_deaths_are_enough_to_confuse_3_10(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("witness", vec![]).await;

    // a (expired) -> b (rejected) -> c (expired) -> a
    stage.queue("a", dying_to("to b")).await;
    stage.queue("b", dying_to("to c")).await;
    stage.queue("c", and(dying_to("to a"), vec![("x-message-ttl", 1.into())])).await;
    stage.fanout("to b", &["b"]).await;
    stage.fanout("to c", &["c"]).await;
    stage.fanout("to a", &["a", "witness"]).await;
    stage.put("a", expiring("1")).await;
    stage.reject("b").await;
    stage.take("witness").await.ack().unwrap();
    if !stage.is_3_10() {
        stage.take("a").await.ack().unwrap();
    }
    stage.expect_nothing("a").await;

    // d (rejected) -> e (expired) -> f (expired) -> e
    let short_lived = || vec![("x-message-ttl", 50.into())];
    stage.queue("d", dying_to("to e")).await;
    stage.queue("e", and(dying_to("to f"), short_lived())).await;
    stage.queue("f", and(dying_to("back to e"), short_lived())).await;
    stage.fanout("to e", &["e"]).await;
    stage.fanout("to f", &["f"]).await;
    stage.fanout("back to e", &["e", "witness"]).await;
    stage.put("d", Properties::default()).await;
    stage.reject("d").await;
    stage.take("witness").await.ack().unwrap();
    if stage.is_3_10() {
        // Round and round it goes.
        for _ in 0..3 {
            stage.take("witness").await.ack().unwrap();
        }
        stage.channel.delete_queue("e", DeleteQueue::default()).await.unwrap();
    } else {
        stage.expect_nothing("e").await;
    }
}
