//! What is remembered, and for how long.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use leveret::inbox::{Doing, Gaps, Opened, Remember, Sequence, numbered, release};
use leveret::{BatchOptions, BoxError, ClientEvent, Failure, Incoming, Message, RetryPolicy};
use leveret_sql::{Inbox, Tx};
use leveret_testkit::eventually;
use tokio::time::timeout;

use super::{DAY, Effect, SOON, Scene, apply, effect, handle};
use crate::database::{Db, Lang};

/// Of two messages, or one if no other comes.
const TWO: BatchOptions = BatchOptions { size: 2, within: Duration::from_secs(2) };

/// A handler of batches.
async fn handle_all(batch: Vec<Incoming>) -> Result<(), Failure> {
    let mut tx = Tx::<Db>::of(&batch)?;
    for incoming in &batch {
        let effect: Effect = serde_json::from_slice(incoming.body())?;
        apply(&effect, &mut tx).await?;
    }
    Ok(())
}

fn body(name: &str) -> Vec<u8> {
    serde_json::to_vec(&effect(name)).unwrap()
}

#[tokio::test]
async fn a_mark_for_each_sender_is_all_that_numbers_need() {
    const SENDERS: usize = 5;
    const MESSAGES: usize = 40;
    let scene = Scene::new().await;
    let mut senders = Vec::new();
    let mut messages = Vec::new();
    for sender in 0..SENDERS {
        let sequence = Sequence::fresh("sender");
        for number in 0..MESSAGES {
            messages.push(sequence.stamp(body(&format!("{sender} {number}"))).await.unwrap());
        }
        senders.push(sequence);
    }
    // All of them out of order, and a third of them twice.
    let count = messages.len();
    let places = (0..count).map(|place| (place * 77) % count).chain((0..count).step_by(3));
    for place in places.clone() {
        scene.publisher.publish("q", messages[place].clone()).await.unwrap();
    }
    let inbox = scene.inbox(Remember::high_water());
    let runner = scene.client.consumer("q").workers(8).exactly_once(inbox.clone()).handle(handle);
    let summary = timeout(SOON, runner.run_until(scene.until_empty("q"))).await.unwrap().unwrap();
    assert_eq!(summary.handled as usize, count, "{summary:?}");
    assert_eq!(summary.duplicates as usize, places.count() - count, "{summary:?}");
    assert_eq!(scene.count("effects").await as usize, count);
    for sequence in &senders {
        let mark = inbox.high_water("q", sequence.sender()).await.unwrap();
        assert_eq!((mark.mark() as usize, mark.missing()), (MESSAGES, vec![]));
    }
    assert_eq!((scene.marks().await as usize, scene.records().await), (SENDERS, 0));
}

#[tokio::test]
async fn a_gap_is_waited_for_until_it_is_given_up() {
    let scene = Scene::new().await;
    let mut events = scene.client.watch();
    let numbers = Sequence::fresh("sender");
    let mut messages = Vec::new();
    for number in 1..=8 {
        messages.push(numbers.stamp(body(&number.to_string())).await.unwrap());
    }
    for number in [1, 3, 5, 8] {
        scene.publisher.publish("q", messages[number - 1].clone()).await.unwrap();
    }
    let inbox = scene.inbox(Remember::high_water().gaps(Gaps::GiveUpBehind(5)));
    let runner = scene.client.consumer("q").retry(RetryPolicy::default());
    let runner = runner.exactly_once(inbox.clone()).handle(handle);
    let stop = async {
        scene.until_empty("q").await;
        let event = loop {
            match timeout(SOON, events.next()).await.unwrap().unwrap() {
                ClientEvent::GivenUp { sender, from, to, .. } => break (sender, from, to),
                _ => continue,
            }
        };
        assert_eq!(event, (numbers.sender().to_owned(), 2, 2));
        let mark = inbox.high_water("q", numbers.sender()).await.unwrap();
        assert_eq!((mark.mark(), mark.missing()), (3, vec![4..=4, 6..=7]));
        let given_up = inbox.give_up("q", numbers.sender(), 1..=6).await.unwrap();
        assert_eq!(given_up, [4..=4, 6..=6]);
        for number in [2, 4, 7] {
            scene.publisher.publish("q", messages[number - 1].clone()).await.unwrap();
        }
        scene.until_depth("q.parked", 2).await;
        scene.until_effects("7", 1).await;
    };
    timeout(SOON, runner.run_until(stop)).await.unwrap().unwrap();
    assert_eq!(inbox.high_water("q", numbers.sender()).await.unwrap().mark(), 8);
    assert!(scene.parked().await.iter().all(|(kind, _)| kind == "given-up"));
    assert_eq!((scene.effects("2").await, scene.effects("4").await), (0, 0));
}

/// It is locked, and its own message is not in it yet.
#[tokio::test]
async fn a_handler_may_look_at_the_mark_of_its_sender() {
    let scene = Scene::new().await;
    let inbox = scene.inbox(Remember::high_water());
    let numbers = Sequence::fresh("sender");
    let (sender, name) = (inbox.clone(), numbers.sender().to_owned());
    let look = move |number: String, _: Tx<Db>| {
        let (inbox, name) = (sender.clone(), name.clone());
        async move {
            let mark = inbox.high_water("q", &name).await?.mark();
            match number == (mark + 1).to_string() {
                true => Ok(()),
                false => Err(Failure::permanent(format!("the mark is {mark}"))),
            }
        }
    };
    for number in 1..=2 {
        let message = numbers.stamp(number.to_string()).await.unwrap();
        scene.publisher.publish("q", message).await.unwrap();
    }
    let runner = scene.client.consumer("q").retry(RetryPolicy::never());
    let runner = runner.exactly_once(inbox.clone()).handle(look);
    let summary = timeout(SOON, runner.run_until(scene.until_empty("q"))).await.unwrap().unwrap();
    assert_eq!((summary.handled, summary.parked), (2, 0), "{summary:?}");
    assert_eq!(inbox.high_water("q", numbers.sender()).await.unwrap().mark(), 2);
}

/// Counts how often it cannot be asked.
struct Counting(Inbox<Db, Lang>, Arc<AtomicUsize>);

impl leveret::inbox::Inbox for Counting {
    fn open<'a>(&'a self, incoming: &'a Incoming) -> Doing<'a, Opened> {
        let opening = leveret::inbox::Inbox::open(&self.0, incoming);
        Box::pin(async {
            let failed = |_: &BoxError| _ = self.1.fetch_add(1, Ordering::SeqCst);
            opening.await.inspect_err(failed)
        })
    }
}

/// On PostgreSQL, where several write at the same time. Both wait for a row that another has, one of them with a row that the other
/// wants next.
pub async fn two_that_release_the_same_do_not_wait_for_each_other() {
    let scene = Scene::new().await;
    let failures = Arc::<AtomicUsize>::default();
    let inbox = scene.inbox(Remember::until_released(DAY));
    let inbox = Counting(inbox, Arc::clone(&failures));
    for id in ["a", "b", "c"] {
        scene.publish(id, &effect(id)).await;
    }
    let runner = scene.client.consumer("q").workers(2).exactly_once(inbox).handle(handle);
    let stop = async {
        scene.until_empty("q").await;
        let mut other = scene.pool.begin().await.unwrap();
        let lock = "SELECT 1 FROM leveret.inbox WHERE id = $1 FOR UPDATE";
        sqlx::query(lock).bind(b"b".as_slice()).execute(&mut *other).await.unwrap();
        for (waiting, ids) in [(1, ["b", "a", "c"]), (2, ["a", "b", "c"])] {
            scene.publisher.publish("q", release(ids)).await.unwrap();
            eventually(SOON, format!("{waiting} who wait"), async || {
                let sql = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted AND pid IN \
                           (SELECT pid FROM pg_stat_activity WHERE datname = current_database())";
                let found: i64 = sqlx::query_scalar(sql).fetch_one(&scene.pool).await.unwrap();
                if found == waiting { Ok(()) } else { Err(found.to_string()) }
            })
            .await;
        }
        other.rollback().await.unwrap();
        scene.until_empty("q").await;
    };
    let summary = timeout(SOON, runner.run_until(stop)).await.unwrap().unwrap();
    assert_eq!((summary.released, failures.load(Ordering::SeqCst)), (2, 0), "{summary:?}");
}

#[tokio::test]
async fn ids_and_replies_are_deleted_when_they_have_expired() {
    let scene = Scene::new().await;
    // Ids stay a minute longer than they are asked for, so this is long past.
    let sql = "INSERT INTO inbox_table (scope, id, expires_at) VALUES ($1, $2, $3)";
    let sql = sql.replace("inbox_table", &scene.table("inbox"));
    for number in 0..2500i64 {
        let insert = sqlx::query(sqlx::AssertSqlSafe(sql.clone()))
            .bind("q")
            .bind(number.to_be_bytes().to_vec());
        insert.bind((number < 2400).then_some(1i64)).execute(&scene.pool).await.unwrap();
    }
    let inbox = scene.by_id();
    assert_eq!(inbox.clean().await.unwrap(), 2400);
    assert_eq!((inbox.clean().await.unwrap(), scene.records().await), (0, 100));
}

#[tokio::test]
async fn what_its_sender_has_released_is_forgotten_after_a_while() {
    let scene = Scene::new().await;
    let inbox = scene.inbox(Remember::until_released(Duration::from_millis(300)));
    let runner = scene.client.consumer("q").exactly_once(inbox.clone()).handle(handle);
    let stop = async {
        for id in ["1", "2", "3", "1"] {
            scene.publish(id, &effect(id)).await;
        }
        scene.until_empty("q").await;
        assert_eq!((inbox.clean().await.unwrap(), scene.records().await), (0, 3));
        scene.publisher.publish("q", release(["1", "2", "unknown"])).await.unwrap();
        scene.until_empty("q").await;
        eventually(SOON, "one record", async || {
            inbox.clean().await.unwrap();
            scene.records().await == 1
        })
        .await;
    };
    let summary = timeout(SOON, runner.run_until(stop)).await.unwrap().unwrap();
    assert_eq!((summary.handled, summary.duplicates, summary.released), (3, 1, 1), "{summary:?}");
}

#[tokio::test]
async fn what_has_nothing_to_be_known_by_is_parked_or_handled_as_it_comes() {
    let scene = Scene::new().await;
    let nameless = || Remember::high_water();
    scene.publisher.publish("q", Message::new(body("nameless"))).await.unwrap();
    let runner = scene.client.consumer("q").exactly_once(scene.inbox(nameless())).handle(handle);
    runner.run_until(scene.until_depth("q.parked", 1)).await.unwrap();
    assert_eq!(scene.parked().await[0].0, "unidentified");
    let inbox = scene.inbox(nameless().handle_unidentified());
    for _ in 0..2 {
        scene.publisher.publish("q", Message::new(body("nameless"))).await.unwrap();
    }
    let runner = scene.client.consumer("q").exactly_once(inbox).handle(handle);
    runner.run_until(scene.until_effects("nameless", 2)).await.unwrap();
}

#[tokio::test]
async fn a_message_whose_mark_cannot_be_read_is_parked_and_holds_up_no_others() {
    for has_batches in [false, true] {
        let scene = Scene::new().await;
        let sql = "INSERT INTO marks (scope, sender, mark) VALUES ('q', 'later', $1)";
        let sql = sqlx::AssertSqlSafe(sql.replace("marks", &scene.table("inbox_marks")));
        sqlx::query(sql).bind(vec![2u8, 1]).execute(&scene.pool).await.unwrap();
        let odd = numbered(Message::new(body("odd")), "later", 1).unwrap();
        let fine = Sequence::fresh("fine").stamp(body("fine")).await.unwrap();
        for message in [odd, fine] {
            scene.publisher.publish("q", message).await.unwrap();
        }
        let runner = scene.client.consumer("q").exactly_once(scene.inbox(Remember::high_water()));
        let stop = async {
            scene.until_depth("q.parked", 1).await;
            scene.until_empty("q").await;
        };
        let running = async {
            match has_batches {
                true => runner.handle_batches(TWO, handle_all).run_until(stop).await,
                false => runner.handle(handle).run_until(stop).await,
            }
        };
        let summary = timeout(SOON, running).await.unwrap().unwrap();
        assert_eq!((summary.handled, summary.parked), (1, 1), "{summary:?}");
        assert_eq!((scene.effects("fine").await, scene.parked().await[0].0.as_str()), (1, "inbox"));
    }
}

#[tokio::test]
async fn a_release_that_comes_with_its_message_in_one_batch_is_heeded() {
    let scene = Scene::new().await;
    let inbox = scene.inbox(Remember::until_released(Duration::ZERO));
    scene.publish("1", &effect("x")).await;
    scene.publisher.publish("q", release(["1"])).await.unwrap();
    let runner = scene.client.consumer("q").exactly_once(inbox.clone());
    let runner = runner.handle_batches(TWO, handle_all).run_until(scene.until_empty("q"));
    let summary = timeout(SOON, runner).await.unwrap().unwrap();
    assert_eq!((summary.handled, summary.released), (1, 1), "{summary:?}");
    eventually(SOON, "no record", async || {
        inbox.clean().await.unwrap();
        scene.records().await == 0
    })
    .await;
}

#[tokio::test]
async fn a_copy_that_is_old_is_a_duplicate_as_long_as_it_is_remembered() {
    for has_batches in [false, true] {
        let scene = Scene::new().await;
        let of_age = |id: &str, minutes: u64| {
            let age = Duration::from_secs(60 * minutes);
            Message::new(body(id)).message_id(id).timestamp(SystemTime::now() - age)
        };
        // It has waited for most of the hour, and its ack was lost.
        for message in [of_age("1", 50), of_age("1", 70), of_age("2", 70)] {
            scene.publisher.publish("q", message).await.unwrap();
        }
        let inbox = scene.inbox(Remember::ids_for(Duration::from_secs(3600)));
        let runner = scene.client.consumer("q").exactly_once(inbox);
        let stop = async {
            scene.until_depth("q.parked", 1).await;
            scene.until_empty("q").await;
        };
        let running = async {
            match has_batches {
                true => runner.handle_batches(TWO, handle_all).run_until(stop).await,
                false => runner.handle(handle).run_until(stop).await,
            }
        };
        let summary = timeout(SOON, running).await.unwrap().unwrap();
        let counts = (summary.handled, summary.duplicates, summary.parked);
        assert_eq!(counts, (1, 1, 1), "{summary:?}");
        assert_eq!(scene.parked().await[0].0, "forgotten");
    }
}

/// Text that does not compress, so that it is as long in an index.
fn noise(length: usize) -> String {
    let mut state = 88_172_645_463_325_252u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        char::from(b'a' + (state >> 33) as u8 % 26)
    };
    (0..length).map(|_| next()).collect()
}

#[tokio::test]
async fn what_a_message_is_known_by_may_be_of_any_length() {
    let scene = Scene::new().await;
    let long = noise(6000);
    for name in [format!("{long}1"), format!("{long}2"), format!("{long}1")] {
        scene.publisher.publish("q", body(&name)).await.unwrap();
    }
    let remember =
        Remember::ids_for(super::DAY).known_by(|incoming| Some(incoming.body().to_vec()));
    let runner = scene.client.consumer("q").exactly_once(scene.inbox(remember)).handle(handle);
    let summary = timeout(SOON, runner.run_until(scene.until_empty("q"))).await.unwrap().unwrap();
    assert_eq!((summary.handled, summary.duplicates), (2, 1), "{summary:?}");
}

#[tokio::test]
async fn tables_of_a_later_version_are_not_touched() {
    let scene = Scene::new().await;
    let sql = "INSERT INTO made (version, name) VALUES (1000, 'later')";
    let sql = sqlx::AssertSqlSafe(sql.replace("made", &scene.table("migrations")));
    sqlx::query(sql).execute(&scene.pool).await.unwrap();
    scene.publish("1", &effect("x")).await;
    let (sender, mut taken) = tokio::sync::mpsc::channel(1);
    let take = move |incoming: Incoming| {
        let sender = sender.clone();
        async move { sender.send(incoming).await }
    };
    let runner = scene.client.consumer("q").handle(take).run_until(scene.until_empty("q"));
    timeout(SOON, runner).await.unwrap().unwrap();
    let incoming = taken.recv().await.unwrap();
    let inbox = scene.by_id();
    let error = leveret::inbox::Inbox::open(&inbox, &incoming).await.unwrap_err();
    let kind = error.downcast_ref::<leveret_sql::Error>().map(leveret_sql::Error::kind);
    assert_eq!(kind, Some(leveret_sql::ErrorKind::NewerSchema));
    assert_eq!(scene.records().await, 0);
}
