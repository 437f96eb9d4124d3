//! Numbers that a sender takes from its database.

use std::collections::BTreeSet;

use leveret::inbox::Remember;
use leveret::{Message, RetryPolicy};
use leveret_sql::{Outbox, Outgoing, Sequence};
use tokio::time::timeout;

use super::{SOON, Scene, effect, handle};
use crate::database::schema;

fn body(name: &str) -> Vec<u8> {
    serde_json::to_vec(&effect(name)).unwrap()
}

fn number(message: &Message) -> i64 {
    let (_, properties) = message.clone().into_parts().unwrap();
    let headers = properties.headers.expect("headers");
    headers.get("leveret-sequence").and_then(|value| value.as_i64()).expect("a number")
}

#[tokio::test]
async fn numbers_that_are_taken_in_transactions_have_no_gaps_and_none_comes_twice() {
    const WRITERS: usize = 4;
    const TRANSACTIONS: usize = 15;
    let scene = Scene::new().await;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let (pool, outbox) = (scene.database.pool().await, Outbox::new(schema()));
        writers.spawn(async move {
            // Another one each time, as after a restart: all that is known is in the database.
            for transaction in 0..TRANSACTIONS {
                let sequence = Sequence::in_schema("shop", &schema());
                let mut tx = crate::database::begin(&pool).await;
                let name = format!("{writer} {transaction}");
                let message = sequence.stamp(&mut *tx, body(&name)).await.unwrap();
                outbox.publish(&mut *tx, "", "q", message).await.unwrap();
                let more = [body(&format!("{name} second")), body(&format!("{name} third"))];
                for message in sequence.stamp_all(&mut *tx, more).await.unwrap() {
                    outbox.write(&mut *tx, Outgoing::new("", "q", message)).await.unwrap();
                }
                match transaction % 3 {
                    1 => tx.rollback().await.unwrap(),
                    _ => tx.commit().await.unwrap(),
                }
            }
        });
    }
    timeout(SOON, writers.join_all()).await.unwrap();
    let relay = Outbox::new(schema()).relay(&scene.client, &scene.pool).build().await.unwrap();
    let sent = timeout(SOON, relay.drain()).await.unwrap().unwrap().sent;
    assert_eq!(sent as usize, WRITERS * TRANSACTIONS / 3 * 2 * 3);

    let inbox = scene.inbox(Remember::high_water());
    let runner = scene.client.consumer("q").retry(RetryPolicy::never());
    let runner = runner.exactly_once(inbox.clone()).handle(handle);
    let summary = timeout(SOON, runner.run_until(scene.until_empty("q"))).await.unwrap().unwrap();
    assert_eq!((summary.handled, summary.duplicates), (sent, 0), "{summary:?}");
    let mark = inbox.high_water("q", "shop").await.unwrap();
    assert_eq!((mark.mark(), mark.missing()), (sent, vec![]));
}

#[tokio::test]
async fn numbers_that_are_reserved_ahead_are_never_given_out_twice() {
    let scene = Scene::new().await;
    let mut given_out = BTreeSet::new();
    let sequence = Sequence::in_schema("shop", &schema());

    let first = sequence.ahead(&scene.pool).await.unwrap();
    assert_eq!(first.uncertain(), None);
    for _ in 0..3 {
        assert!(given_out.insert(number(&first.stamp("x").await.unwrap())));
    }
    // It is closed, and the next one goes on without a gap.
    first.close().await.unwrap();
    let second = sequence.ahead(&scene.pool).await.unwrap();
    assert_eq!(second.uncertain(), None);
    assert!(given_out.insert(number(&second.stamp("x").await.unwrap())));
    assert_eq!(given_out, BTreeSet::from([1, 2, 3, 4]));

    // It is still there when another one takes over, which goes on behind what it has reserved.
    let third = sequence.ahead(&scene.pool).await.unwrap();
    assert_eq!(third.uncertain(), Some(4..=1003));
    for _ in 0..5 {
        assert!(given_out.insert(number(&third.stamp("x").await.unwrap())));
    }
    let refused = loop {
        match second.stamp("x").await {
            Ok(message) => assert!(given_out.insert(number(&message))),
            Err(error) => break error,
        }
    };
    assert!(refused.to_string().contains("kept"), "{refused}");
    assert_eq!(given_out.len(), 1003 + 5, "up to the end of what it had reserved");
    second.close().await.unwrap_err();

    // What is taken in a transaction is behind all of that, and then nothing more can be reserved.
    let mut tx = crate::database::begin(&scene.pool).await;
    let taken = number(&sequence.stamp(&mut *tx, "x").await.unwrap());
    tx.commit().await.unwrap();
    assert_eq!(taken, 2004);
    assert!(given_out.insert(taken));
    while let Ok(message) = third.stamp("x").await {
        assert!(given_out.insert(number(&message)));
    }
    assert_eq!(given_out.into_iter().collect::<Vec<_>>(), (1..=2004).collect::<Vec<_>>());
}
