//! Several messages with one commit.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::inbox::{Gaps, Remember, Sequence, release};
use leveret::{BatchOptions, Failure, Incoming, Message, RetryPolicy};
use leveret_sql::{Inbox, Tx};
use tokio::time::timeout;

use super::{DAY, Effect, SOON, Scene, apply, effect};
use crate::database::{Db, Lang};

const OPTIONS: BatchOptions = BatchOptions { size: 20, within: Duration::from_millis(100) };

/// Does all of them, and fails if one is called `spoilt`, after it was done.
async fn work(batch: Vec<Incoming>) -> Result<(), Failure> {
    let mut tx = Tx::<Db>::of(&batch)?;
    for incoming in &batch {
        let effect: Effect = serde_json::from_slice(incoming.body())?;
        apply(&effect, &mut tx).await?;
        if effect.name == "spoilt" {
            return Err(Failure::retry("it is spoilt"));
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_batch_is_one_transaction_and_what_spoils_it_is_alone_with_it() {
    const MESSAGES: usize = 100;
    for remember in [Remember::ids_for(DAY), Remember::high_water()] {
        let scene = Scene::new().await;
        let numbers = Sequence::fresh("sender");
        for number in 0..MESSAGES {
            let name = if number == 33 { "spoilt".to_owned() } else { number.to_string() };
            let body = serde_json::to_vec(&effect(&name)).unwrap();
            let message = numbers.stamp(body).await.unwrap();
            // Copies in the same batch, and in another.
            let times = 1 + number % 3;
            let copies = std::iter::repeat_n(("q", message), times);
            scene.publisher.publish_batch(copies).await.unwrap();
        }
        let sizes = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&sizes);
        let handler = move |batch: Vec<Incoming>| {
            noted.lock().unwrap().push(batch.len());
            work(batch)
        };
        let consumer = || scene.client.consumer("q").retry(RetryPolicy::never());
        let (one, other) = (scene.inbox(remember.clone()), scene.inbox(remember.clone()));
        let one = consumer().exactly_once(one).handle_batches(OPTIONS, handler.clone());
        let other = consumer().exactly_once(other).handle_batches(OPTIONS, handler);
        let both = async {
            tokio::join!(
                one.run_until(scene.until_empty("q")),
                other.run_until(scene.until_empty("q"))
            )
        };
        let (one, other) = timeout(SOON, both).await.unwrap();
        let (one, other) = (one.unwrap(), other.unwrap());
        assert_eq!((one.handled + other.handled) as usize, MESSAGES - 1, "{one:?} {other:?}");
        assert_eq!(one.parked + other.parked, 1, "{one:?} {other:?}");
        for number in (0..MESSAGES).filter(|number| *number != 33) {
            assert_eq!(scene.effects(&number.to_string()).await, 1, "message {number}");
        }
        assert_eq!(scene.effects("spoilt").await, 0);
        let sizes = sizes.lock().unwrap();
        assert!(sizes.iter().max() > Some(&5), "{sizes:?}");
    }
}

#[tokio::test]
async fn what_is_released_given_up_or_nameless_has_its_way_in_a_batch() {
    let scene = Scene::new().await;
    let remember = Remember::until_released(Duration::ZERO);
    let inbox = scene.inbox(remember);
    for id in ["1", "2", "1"] {
        scene.publish(id, &effect(id)).await;
    }
    let runner = |inbox: &Inbox<Db, Lang>| {
        let consumer = scene.client.consumer("q").retry(RetryPolicy::never());
        consumer.exactly_once(inbox.clone()).handle_batches(OPTIONS, work)
    };
    let first = runner(&inbox).run_until(scene.until_empty("q"));
    let summary = timeout(SOON, first).await.unwrap().unwrap();
    assert_eq!((summary.handled, summary.duplicates), (2, 1), "{summary:?}");
    scene.publisher.publish("q", release(["1"])).await.unwrap();
    let second = runner(&inbox).run_until(scene.until_empty("q"));
    assert_eq!(timeout(SOON, second).await.unwrap().unwrap().released, 1);
    assert_eq!((inbox.clean().await.unwrap(), scene.records().await), (1, 1));

    let numbers = Sequence::fresh("sender");
    let inbox = scene.inbox(Remember::high_water().gaps(Gaps::GiveUpBehind(3)));
    let mut messages = Vec::new();
    for number in 1..=9 {
        let body = serde_json::to_vec(&effect(&format!("number {number}"))).unwrap();
        messages.push(("q", numbers.stamp(body).await.unwrap()));
    }
    let late = messages.remove(1);
    scene.publisher.publish_batch(messages).await.unwrap();
    let body = serde_json::to_vec(&effect("nameless")).unwrap();
    scene.publisher.publish("q", Message::new(body)).await.unwrap();
    let third = runner(&inbox).run_until(scene.until_empty("q"));
    let summary = timeout(SOON, third).await.unwrap().unwrap();
    assert_eq!((summary.handled, summary.parked), (8, 1), "{summary:?}");
    let mark = inbox.high_water("q", numbers.sender()).await.unwrap();
    assert_eq!((mark.mark(), mark.missing()), (9, vec![]));
    scene.publisher.publish_batch([late]).await.unwrap();
    let fourth = runner(&inbox).run_until(scene.until_empty("q"));
    assert_eq!(timeout(SOON, fourth).await.unwrap().unwrap().parked, 1);
    let kinds: Vec<_> = scene.parked().await.into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(kinds, ["unidentified", "given-up"]);
}

/// Several at a time have the marks of the same senders, some of whom nobody knows yet, in different orders.
#[tokio::test]
async fn batches_of_the_same_senders_do_not_stand_in_each_others_way() {
    const SENDERS: usize = 30;
    const ROUNDS: usize = 6;
    let scene = Scene::new().await;
    let senders: Vec<Sequence> = (0..SENDERS).map(|_| Sequence::fresh("sender")).collect();
    for round in 0..ROUNDS {
        // Some join later, between those who are there.
        let present: Vec<usize> = (0..SENDERS).filter(|sender| sender % ROUNDS <= round).collect();
        let shifted = (0..present.len()).map(|place| present[(place * 7 + round) % present.len()]);
        for sender in shifted {
            let body = serde_json::to_vec(&effect(&format!("{sender} {round}"))).unwrap();
            let message = senders[sender].stamp(body).await.unwrap();
            let copies = std::iter::repeat_n(("q", message), 1 + sender % 2);
            scene.publisher.publish_batch(copies).await.unwrap();
        }
    }
    let inbox = || scene.inbox(Remember::high_water());
    let consumer = || scene.client.consumer("q").prefetch(20).retry(RetryPolicy::never());
    let runner = || consumer().exactly_once(inbox()).handle_batches(OPTIONS, work);
    let run = || runner().run_until(scene.until_empty("q"));
    let all = timeout(SOON, futures_util::future::try_join_all([run(), run(), run()]));
    let handled: u64 = all.await.unwrap().unwrap().iter().map(|summary| summary.handled).sum();
    assert_eq!(handled as i64, scene.count("effects").await);
    for (sender, sequence) in senders.iter().enumerate() {
        let mark = inbox().high_water("q", sequence.sender()).await.unwrap();
        let sent = (ROUNDS - sender % ROUNDS) as u64;
        assert_eq!((mark.mark(), mark.missing()), (sent, vec![]), "sender {sender}");
    }
    let names = "SELECT COUNT(*) FROM (SELECT DISTINCT name FROM effects) AS names";
    let names: i64 = sqlx::query_scalar(names).fetch_one(&scene.pool).await.unwrap();
    assert_eq!(names, handled as i64, "each was done once");
}
