//! What a handler does, and what stays of it.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leveret::inbox::{MemoryInbox, Remember};
use leveret::{
    Attempt, BatchOptions, BatchOutcome, BoxError, Client, Delivery, ErrorKind, Failure, Incoming,
    Json, Message, RetryPolicy, State, Topology, Verdict,
};
use leveret_sql::{Inbox, Outbox, Outgoing, Tx};
use leveret_testkit::eventually;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tower::timeout::TimeoutLayer;

use super::{DAY, Effect, SOON, Scene, apply, effect, handle};
use crate::database::{Db, schema, schema_of};

fn quickly() -> RetryPolicy {
    RetryPolicy::fixed(Duration::from_millis(50)).max_retries(3)
}

#[tokio::test]
async fn what_comes_many_times_to_many_workers_and_instances_is_done_once() {
    const MESSAGES: usize = 60;
    const COPIES: usize = 4;
    let scene = Scene::new().await;
    for number in 0..MESSAGES * COPIES {
        // Copies are close to each other, so that they are at work at the same time.
        let name = format!("{}", (number / (2 * COPIES)) * 2 + number % 2);
        scene.publish(&name, &effect(&name)).await;
    }
    let mut instances = Vec::new();
    for _ in 0..2 {
        let client = Client::builder().broker(&scene.broker).connect().await.unwrap();
        let inbox =
            Inbox::in_schema(scene.database.pool().await, Remember::ids_for(DAY), &schema());
        let runner = client.consumer("q").workers(8).retry(quickly()).exactly_once(inbox);
        let (stop, stopped) = oneshot::channel::<()>();
        instances.push((stop, tokio::spawn(runner.handle(handle).run_until(stopped))));
    }
    scene.until_empty("q").await;
    let (mut handled, mut duplicates) = (0, 0);
    for (stop, instance) in instances {
        drop(stop);
        let summary = instance.await.unwrap().unwrap();
        handled += summary.handled as usize;
        duplicates += summary.duplicates as usize;
    }
    assert_eq!((handled, duplicates), (MESSAGES, MESSAGES * (COPIES - 1)));
    for number in 0..MESSAGES {
        assert_eq!(scene.effects(&number.to_string()).await, 1, "message {number}");
    }
}

#[tokio::test]
async fn of_a_handler_that_fails_panics_or_is_cut_short_nothing_stays() {
    let scene = Scene::new().await;
    for name in ["fails", "panics", "hangs", "gone", "fine"] {
        scene.publish(name, &effect(name)).await;
    }
    let handler = async |Json(effect): Json<Effect>, Attempt(attempt): Attempt, mut tx: Tx<Db>| {
        apply(&effect, &mut tx).await?;
        match effect.name.as_str() {
            "fails" if attempt < 3 => Err(Failure::retry("not yet")),
            "panics" if attempt < 3 => panic!("not yet"),
            "hangs" if attempt < 3 => std::future::pending().await,
            "gone" => Err(Failure::done("there is nothing more to do")),
            _ => Ok(()),
        }
    };
    let runner = scene.client.consumer("q").workers(2).retry(quickly());
    let runner = runner.layer(TimeoutLayer::new(Duration::from_secs(3)));
    let runner = runner.exactly_once(scene.by_id()).handle(handler);
    let stop = async {
        for name in ["fails", "panics", "hangs", "gone", "fine"] {
            scene.until_effects(name, 1).await;
        }
        scene.until_empty("q").await;
    };
    let summary = timeout(SOON, runner.run_until(stop)).await.unwrap().unwrap();
    assert_eq!((summary.handled, summary.failed, summary.parked), (5, 6, 0), "{summary:?}");
    assert_eq!(scene.count("effects").await, 5);
}

#[tokio::test]
async fn a_handler_that_keeps_its_transaction_has_failed() {
    let scene = Scene::new().await;
    scene.publish("1", &effect("kept")).await;
    let (sender, mut kept) = tokio::sync::mpsc::channel(10);
    let handler = move |Json(effect): Json<Effect>, mut tx: Tx<Db>| {
        let sender = sender.clone();
        async move {
            apply(&effect, &mut tx).await?;
            sender.send(tx).await.map_err(|_| Failure::retry("nobody keeps it"))
        }
    };
    let runner = scene.client.consumer("q").retry(RetryPolicy::never());
    let runner = runner.exactly_once(scene.by_id()).handle(handler);
    let summary = runner.run_until(scene.until_depth("q.parked", 1)).await.unwrap();
    assert_eq!((summary.handled, summary.parked), (0, 1), "{summary:?}");
    assert!(scene.parked().await[0].1.contains("kept its Tx"), "{:?}", scene.parked().await);
    drop(kept.recv().await);
    // The connection is usable again, and nothing of it is there.
    eventually(SOON, "the lock to be gone", async || {
        let insert = "INSERT INTO effects (name, amount) VALUES ('after', 1)";
        let inserted = sqlx::query(insert).execute(&scene.pool).await;
        inserted.map(drop).map_err(|error| error.to_string())
    })
    .await;
    assert_eq!((scene.effects("kept").await, scene.records().await), (0, 0));
}

/// On PostgreSQL, where a statement that fails spoils the whole transaction.
pub async fn a_handler_that_hides_the_failure_of_its_transaction_has_failed() {
    let scene = Scene::new().await;
    scene.publish("1", &effect("spoilt")).await;
    let handler = async |Json(effect): Json<Effect>, mut tx: Tx<Db>| {
        apply(&effect, &mut tx).await?;
        let _ = sqlx::query("SELECT nonsense").execute(&mut *tx).await;
        Ok::<_, Failure>(())
    };
    let runner = scene.client.consumer("q").retry(RetryPolicy::never());
    let runner = runner.exactly_once(scene.by_id()).handle(handler);
    let summary = runner.run_until(scene.until_depth("q.parked", 1)).await.unwrap();
    assert_eq!((summary.handled, summary.parked), (0, 1), "{summary:?}");
    assert_eq!(scene.effects("spoilt").await, 0);
}

/// The same for each way to remember, and for batches.
pub async fn nothing_of_a_spoilt_transaction_counts_as_done() {
    const ALONE: BatchOptions = BatchOptions { size: 1, within: Duration::ZERO };
    let numbered = leveret::inbox::Sequence::fresh("s").stamp("x").await.unwrap();
    let nameless = Remember::high_water().handle_unidentified();
    for (remember, message) in [
        (Remember::ids_for(DAY), numbered.clone()),
        (Remember::high_water(), numbered),
        (nameless, Message::new("x")),
    ] {
        let scene = Scene::new().await;
        let spoil = async |batch: Vec<Incoming>| {
            let mut tx = Tx::<Db>::of(&batch)?;
            apply(&effect("spoilt"), &mut tx).await?;
            let _ = sqlx::query("SELECT nonsense").execute(&mut *tx).await;
            Ok::<_, Failure>(())
        };
        scene.publisher.publish("q", message).await.unwrap();
        let runner = scene.client.consumer("q").retry(RetryPolicy::never());
        let runner = runner.exactly_once(scene.inbox(remember));
        let runner = runner.handle_batches(ALONE, spoil);
        let summary = timeout(SOON, runner.run_until(scene.until_depth("q.parked", 1)));
        let summary = summary.await.unwrap().unwrap();
        assert_eq!((summary.handled, summary.parked), (0, 1), "{summary:?}");
        assert_eq!((scene.effects("spoilt").await, scene.records().await), (0, 0));
    }
}

#[tokio::test]
async fn a_handler_that_ends_its_transaction_by_itself_has_failed() {
    const ALONE: BatchOptions = BatchOptions { size: 1, within: Duration::ZERO };
    // As after `INSERT OR ROLLBACK`, where the database itself has ended it.
    const FAILS: &str = "ROLLBACK; SELECT nonsense";
    for (remember, has_batches, ends) in [
        (Remember::ids_for(DAY), false, "ROLLBACK"),
        (Remember::ids_for(DAY), false, FAILS),
        (Remember::ids_for(DAY), true, "ROLLBACK; BEGIN"),
        (Remember::ids_for(DAY), false, "ROLLBACK; BEGIN"),
        (Remember::high_water(), false, "ROLLBACK"),
        (Remember::high_water(), true, FAILS),
        (Remember::high_water(), true, "ROLLBACK"),
        (Remember::high_water(), false, "ROLLBACK; BEGIN"),
    ] {
        let scene = Scene::new().await;
        let numbers = leveret::inbox::Sequence::fresh("s");
        let mut messages = Vec::new();
        for name in ["before", "undone", "done"] {
            let body = serde_json::to_vec(&effect(name)).unwrap();
            messages.push(numbers.stamp(body).await.unwrap());
        }
        for message in &messages[..2] {
            scene.publisher.publish("q", message.clone()).await.unwrap();
        }
        let handler = move |batch: Vec<Incoming>| async move {
            let mut tx = Tx::<Db>::of(&batch)?;
            let effect: Effect = serde_json::from_slice(batch[0].body())?;
            apply(&effect, &mut tx).await?;
            if effect.name == "undone" {
                sqlx::raw_sql(ends).execute(&mut *tx).await?;
            }
            Ok::<_, Failure>(())
        };
        // Its next transaction is on the same connection.
        let inbox = Inbox::in_schema(scene.small_pool().await, remember, &schema());
        let consumer = || scene.client.consumer("q").retry(RetryPolicy::never());
        let runner = consumer().exactly_once(inbox.clone());
        let stop = scene.until_depth("q.parked", 1);
        let summary = match has_batches {
            true => timeout(SOON, runner.handle_batches(ALONE, handler).run_until(stop)).await,
            false => {
                let handler = move |incoming: Incoming| handler(vec![incoming]);
                timeout(SOON, runner.handle(handler).run_until(stop)).await
            }
        };
        let summary = summary.unwrap().unwrap();
        assert_eq!((summary.handled, summary.parked), (1, 1), "{summary:?}");
        assert_eq!((scene.effects("before").await, scene.effects("undone").await), (1, 0));
        // Nothing of it is recorded, and the connection is as good as before.
        for message in &messages[1..] {
            scene.publisher.publish("q", message.clone()).await.unwrap();
        }
        let runner = consumer().exactly_once(inbox).handle(handle);
        let summary = timeout(SOON, runner.run_until(scene.until_empty("q"))).await;
        let summary = summary.unwrap().unwrap();
        assert_eq!((summary.handled, summary.duplicates), (2, 0), "{summary:?}");
        assert_eq!((scene.effects("undone").await, scene.effects("done").await), (1, 1));
    }
}

#[tokio::test]
async fn no_reply_is_recorded_where_a_method_has_ended_its_transaction() {
    for remember in [Remember::ids_for(DAY), Remember::high_water()] {
        for ends in ["ROLLBACK", "ROLLBACK; BEGIN"] {
            let scene = Scene::new().await;
            let method = move |Json(effect): Json<Effect>, mut tx: Tx<Db>| async move {
                apply(&effect, &mut tx).await?;
                sqlx::raw_sql(ends).execute(&mut *tx).await?;
                Ok::<_, Failure>("done")
            };
            let service = scene.client.service("s").retry(RetryPolicy::never());
            let service = service.exactly_once(scene.inbox(remember.clone())).method("m", method);
            service.declare().await.unwrap();
            let answers = Topology::new().queue(leveret::Queue::classic("answers"));
            scene.client.apply(&answers).await.unwrap();
            let body = serde_json::to_vec(&effect("undone")).unwrap();
            let request = Message::new(body).reply_to("answers").kind("m");
            let request = leveret::inbox::Sequence::fresh("asker").stamp(request).await.unwrap();
            scene.publisher.publish("s", request).await.unwrap();
            let ended = service.run_until(scene.until_empty("s"));
            let summary = timeout(SOON, ended).await.unwrap().unwrap();
            assert_eq!(summary.handled, 0, "{summary:?}");
            assert_eq!((scene.effects("undone").await, scene.records().await), (0, 0));
        }
    }
}

#[tokio::test]
async fn the_reply_of_a_copy_stays_where_a_method_has_ended_its_transaction() {
    let scene = Scene::new().await;
    let inbox = crate::database::table("inbox");
    let method = move |mut tx: Tx<Db>| {
        let inbox = inbox.clone();
        async move {
            let record = sqlx::AssertSqlSafe(format!("SELECT scope, id FROM {inbox}"));
            let (scope, id): (String, Vec<u8>) = sqlx::query_as(record).fetch_one(&mut *tx).await?;
            sqlx::raw_sql("ROLLBACK").execute(&mut *tx).await?;
            // As a copy would, in the meantime.
            let copy = format!(
                "INSERT INTO {inbox} (scope, id, properties, body) VALUES ($1, $2, $3, $3)"
            );
            let copy = sqlx::query(sqlx::AssertSqlSafe(copy)).bind(scope).bind(id);
            copy.bind(b"copy".to_vec()).execute(&mut *tx).await?;
            Ok::<_, Failure>("late")
        }
    };
    let service = scene.client.service("s").retry(RetryPolicy::never()).method("m", method);
    let service = service.exactly_once(scene.by_id());
    service.declare().await.unwrap();
    scene.client.apply(&Topology::new().queue(leveret::Queue::classic("answers"))).await.unwrap();
    let request = Message::new("x").message_id("1").reply_to("answers").kind("m");
    scene.publisher.publish("s", request).await.unwrap();
    let ended = service.run_until(scene.until_empty("s"));
    let summary = timeout(SOON, ended).await.unwrap().unwrap();
    assert_eq!(summary.handled, 0, "{summary:?}");
    let body = sqlx::AssertSqlSafe(format!("SELECT body FROM {}", scene.table("inbox")));
    let body: Vec<u8> = sqlx::query_scalar(body).fetch_one(&scene.pool).await.unwrap();
    assert_eq!(body, b"copy");
}

fn image(reply: &Delivery) -> (Vec<u8>, Vec<u8>) {
    (reply.raw_properties().as_bytes().to_vec(), reply.body().to_vec())
}

#[tokio::test]
async fn copies_of_a_request_get_the_same_reply_also_from_another_instance() {
    let scene = Scene::new().await;
    let answers = Topology::new().queue(leveret::Queue::classic("answers"));
    scene.client.apply(&answers).await.unwrap();
    let drawn = Arc::<AtomicU32>::default();
    let method =
        async |Json(effect): Json<Effect>, mut tx: Tx<Db>, State(drawn): State<Arc<AtomicU32>>| {
            apply(&effect, &mut tx).await?;
            let number = drawn.fetch_add(1, Ordering::SeqCst);
            match effect.name.as_str() {
                "error" => Err(Failure::permanent(format!("no. {number}")).kind("declined")),
                "gone" => Err(Failure::done(format!("gone at {number}")).kind("gone")),
                _ => Ok(Message::new(format!("{number}")).header("drawn", i64::from(number))),
            }
        };
    for remember in [Remember::ids_for(DAY), Remember::high_water()] {
        let numbers = leveret::inbox::Sequence::fresh("asker");
        let mut stream = scene.client.consumer("answers").stream().await.unwrap();
        for name in ["value", "error", "gone"] {
            let before = scene.effects(name).await;
            let body = serde_json::to_vec(&effect(name)).unwrap();
            let request = Message::new(body).reply_to("answers").kind("m").correlation_id("c");
            let request = numbers.stamp(request).await.unwrap();
            let mut replies = Vec::new();
            for _ in 0..3 {
                // Each by an instance that knows nothing but what is in the database.
                let service = scene.client.service("s").state(Arc::clone(&drawn));
                let service =
                    service.method("m", method).exactly_once(scene.inbox(remember.clone()));
                service.declare().await.unwrap();
                scene.publisher.publish("s", request.clone()).await.unwrap();
                let answered = async {
                    let reply = stream.next().await.unwrap().unwrap();
                    replies.push(image(&reply));
                    reply.ack().unwrap();
                };
                timeout(SOON, service.run_until(answered)).await.unwrap().unwrap();
            }
            assert_eq!(replies[0], replies[1]);
            assert_eq!(replies[0], replies[2]);
            let added = scene.effects(name).await - before;
            assert_eq!(added, i64::from(name != "error"), "{name}");
        }
    }
    assert_eq!(drawn.load(Ordering::SeqCst), 6);
}

/// Those that wait for it begin when it is undone, and find out at their end that another was faster: no failure that counts.
#[tokio::test]
async fn copies_of_a_request_that_fails_at_the_same_time_all_get_the_same_error() {
    const REQUESTS: usize = 20;
    const COPIES: usize = 4;
    let scene = Scene::new().await;
    let queue = leveret::Queue::quorum("s");
    let queues = Topology::new().queue(queue.clone()).queue(leveret::Queue::classic("answers"));
    scene.client.apply(&queues).await.unwrap();
    for number in 0..REQUESTS * COPIES {
        let id = (number / COPIES).to_string();
        let body = serde_json::to_vec(&effect("undone")).unwrap();
        let request = Message::new(body).message_id(id).reply_to("answers").kind("m");
        scene.publisher.publish("s", request).await.unwrap();
    }
    let method = async |Json(effect): Json<Effect>, mut tx: Tx<Db>| {
        apply(&effect, &mut tx).await?;
        Err::<(), _>(Failure::permanent("no"))
    };
    let service = scene.client.service("s").queue(queue).workers(8).retry(RetryPolicy::never());
    let service = service.exactly_once(scene.by_id()).method("m", method);
    let stop = scene.until_depth("answers", REQUESTS * COPIES);
    let summary = timeout(SOON, service.run_until(stop)).await.unwrap().unwrap();
    assert_eq!((summary.handled as usize, summary.parked), (REQUESTS, 0), "{summary:?}");
    assert_eq!(scene.effects("undone").await, 0);
}

#[tokio::test]
async fn a_transaction_can_be_asked_for_once() {
    let scene = Scene::new().await;
    scene.publish("1", &effect("x")).await;
    let twice = async |_one: Tx<Db>, _two: Tx<Db>| {};
    let runner = scene.client.consumer("q").retry(RetryPolicy::never());
    let runner = runner.exactly_once(scene.by_id()).handle(twice);
    runner.run_until(scene.until_depth("q.parked", 1)).await.unwrap();
    let parked = scene.parked().await;
    assert!(parked[0].1.contains("twice"), "{parked:?}");
}

#[tokio::test]
async fn what_a_handler_writes_into_an_outbox_is_sent_once_and_only_if_it_succeeds() {
    let scene = Scene::new().await;
    let told = Topology::new().queue(leveret::Queue::classic("told"));
    scene.client.apply(&told).await.unwrap();
    for _ in 0..3 {
        scene.publish("fine", &effect("fine")).await;
    }
    scene.publish("fails", &effect("fails")).await;
    let handler = async |Json(effect): Json<Effect>, mut tx: Tx<Db>| {
        let outgoing = Outgoing::new("", "told", format!("{} is done", effect.name));
        Outbox::new(schema()).write(&mut *tx, outgoing).await?;
        match effect.name.as_str() {
            "fails" => Err(Failure::permanent("no")),
            _ => Ok(()),
        }
    };
    let runner = scene.client.consumer("q").exactly_once(scene.by_id()).handle(handler);
    let relay = Outbox::new(schema()).relay(&scene.client, &scene.pool).build().await.unwrap();
    let stop = async {
        scene.until_empty("q").await;
        scene.until_depth("told", 1).await;
    };
    let runner = timeout(SOON, runner.run_until(stop));
    let relay = relay.run_until(async { runner.await.unwrap().unwrap() });
    assert_eq!(timeout(SOON, relay).await.unwrap().unwrap().sent, 1);
    let told = scene.broker.peek("/", "told", 10).unwrap();
    assert_eq!(told.len(), 1);
}

#[tokio::test]
async fn without_tables_messages_wait() {
    let scene = Scene::new().await;
    let other = schema_of("other");
    let inbox = Inbox::in_schema(scene.pool.clone(), Remember::ids_for(DAY), &other);
    scene.publish("1", &effect("late")).await;
    let runner = scene.client.consumer("q").retry(RetryPolicy::never());
    let runner = runner.exactly_once(inbox).handle(handle);
    let stop = async {
        sleep(Duration::from_millis(300)).await;
        assert_eq!(scene.effects("late").await, 0);
        other.migrate(&scene.pool).await.unwrap();
        scene.until_effects("late", 1).await;
        scene.until_empty("q").await;
    };
    let summary = timeout(SOON, runner.run_until(stop)).await.unwrap().unwrap();
    assert_eq!((summary.handled, summary.failed), (1, 0), "{summary:?}");
}

/// On PostgreSQL, where the inbox itself waits for copies for some seconds.
pub async fn handlers_wait_for_locks_as_the_application_has_it() {
    let scene = Scene::new().await;
    let set = "ALTER ROLE postgres IN DATABASE name SET lock_timeout = '7654ms'";
    let name: String =
        sqlx::query_scalar("SELECT CURRENT_DATABASE()").fetch_one(&scene.pool).await.unwrap();
    let set_lock_timeout = set.replace("name", &format!("\"{name}\""));
    sqlx::query(sqlx::AssertSqlSafe(set_lock_timeout.clone())).execute(&scene.pool).await.unwrap();
    let pool = scene.database.pool().await;
    let (sender, mut seen) = tokio::sync::mpsc::channel::<String>(10);
    let handler = move |mut tx: Tx<Db>| {
        let sender = sender.clone();
        async move {
            let timeout: String =
                sqlx::query_scalar("SHOW lock_timeout").fetch_one(&mut *tx).await?;
            sender.send(timeout).await?;
            Ok::<_, Failure>(())
        }
    };
    let nameless = Remember::high_water().handle_unidentified();
    for remember in [Remember::ids_for(DAY), Remember::high_water(), nameless.clone()] {
        let message = leveret::inbox::Sequence::fresh("s").stamp("x").await.unwrap();
        scene.publisher.publish("q", message).await.unwrap();
        let inbox = Inbox::in_schema(pool.clone(), remember, &schema());
        let runner = scene.client.consumer("q").exactly_once(inbox).handle(handler.clone());
        let told = async { assert_eq!(seen.recv().await.unwrap(), "7654ms") };
        timeout(SOON, runner.run_until(told)).await.unwrap().unwrap();
    }
    for (limit, expected) in [("7654ms", "7654ms"), ("5min", "10s"), ("0", "10s")] {
        let set = set_lock_timeout.replace("7654ms", limit);
        sqlx::query(sqlx::AssertSqlSafe(set)).execute(&scene.pool).await.unwrap();
        scene.publisher.publish("q", "x").await.unwrap();
        let pool = scene.database.pool().await;
        let inbox = Inbox::in_schema(pool, nameless.clone(), &schema());
        let runner = scene.client.consumer("q").exactly_once(inbox).handle(handler.clone());
        let told = async { assert_eq!(seen.recv().await.unwrap(), expected) };
        timeout(SOON, runner.run_until(told)).await.unwrap().unwrap();
    }
}

/// On PostgreSQL, where a statement that is given up goes on: here it waits for a row, until the caller has its answer.
pub async fn who_calls_a_method_that_is_cut_short_does_not_wait_for_its_statement() {
    const CHANGE: &str = "UPDATE effects SET amount = amount + 1";
    let scene = Scene::new().await;
    sqlx::query("INSERT INTO effects VALUES ('x', 1)").execute(&scene.pool).await.unwrap();
    let mut other = crate::database::begin(&scene.pool).await;
    sqlx::query(CHANGE).execute(&mut *other).await.unwrap();
    let method = async |mut tx: Tx<Db>| sqlx::query(CHANGE).execute(&mut *tx).await.map(drop);
    let service = scene.client.service("s").method("m", method);
    let service = service.layer(TimeoutLayer::new(Duration::from_millis(300)));
    let service = service.exactly_once(scene.by_id());
    service.declare().await.unwrap();
    let rpc = scene.client.rpc("s").build().await.unwrap();
    let answered = async {
        let call = rpc.call::<()>("m", "x").timeout(SOON).await;
        assert_eq!(call.expect_err("it was cut short").kind(), leveret::ErrorKind::Remote);
        other.rollback().await.unwrap();
        scene.until_empty("s").await;
    };
    timeout(SOON, service.run_until(answered)).await.unwrap().unwrap();
    assert_eq!(scene.records().await, 0);
}

async fn insert(effect: Effect, tx: &mut Tx<Db>) -> Result<(), Failure> {
    apply(&effect, tx).await.map_err(|_| Failure::done("it is there already"))
}

/// One that is there already is noticed by the database's own error, which spoils the transaction on PostgreSQL.
#[tokio::test]
async fn what_was_done_before_is_recorded_though_the_database_has_refused_it() {
    const ALONE: BatchOptions = BatchOptions { size: 1, within: Duration::ZERO };
    const SEVERAL: BatchOptions = BatchOptions { size: 2, within: SOON };
    for remember in [Remember::ids_for(DAY), Remember::high_water()] {
        let scene = Scene::new().await;
        let unique = "CREATE UNIQUE INDEX one ON effects (name)";
        sqlx::query(unique).execute(&scene.pool).await.unwrap();
        sqlx::query("INSERT INTO effects VALUES ('there', 1)").execute(&scene.pool).await.unwrap();
        let numbers = leveret::inbox::Sequence::fresh("s");
        let publish = async |name: &str| {
            let body = serde_json::to_vec(&effect(name)).unwrap();
            let message = numbers.stamp(body).await.unwrap();
            for _ in 0..2 {
                scene.publisher.publish("q", message.clone()).await.unwrap();
            }
        };
        let one =
            async move |Json(effect): Json<Effect>, mut tx: Tx<Db>| insert(effect, &mut tx).await;
        let several = async move |batch: Vec<Incoming>| {
            let mut tx = Tx::<Db>::of(&batch).unwrap();
            let mut outcomes = Vec::new();
            for incoming in &batch {
                let effect = serde_json::from_slice(incoming.body()).unwrap();
                outcomes.push(insert(effect, &mut tx).await.map_err(BoxError::from));
            }
            BatchOutcome::Each(outcomes)
        };
        let runner = || {
            let runner = scene.client.consumer("q").retry(RetryPolicy::never());
            runner.exactly_once(scene.inbox(remember.clone()))
        };
        publish("there").await;
        let done = runner().handle(one).run_until(scene.until_empty("q"));
        let alone = timeout(SOON, done).await.unwrap().unwrap();
        publish("there").await;
        let done = runner().handle_batches(ALONE, several).run_until(scene.until_empty("q"));
        let batch_of_one = timeout(SOON, done).await.unwrap().unwrap();
        for summary in [alone, batch_of_one] {
            assert_eq!((summary.handled, summary.duplicates), (1, 1), "{summary:?}");
        }
        // The work for the other one of a batch is not lost.
        for name in ["there", "new"] {
            let message = numbers.stamp(serde_json::to_vec(&effect(name)).unwrap()).await.unwrap();
            scene.publisher.publish("q", message).await.unwrap();
        }
        let done = runner().handle_batches(SEVERAL, several).run_until(scene.until_empty("q"));
        let summary = timeout(SOON, done).await.unwrap().unwrap();
        assert_eq!((summary.handled, summary.parked), (2, 0), "{summary:?}");
        assert_eq!((scene.effects("there").await, scene.effects("new").await), (1, 1));
    }
}

/// On PostgreSQL, where there is a connection to lose between the handler's last statement and the commit.
pub async fn a_commit_that_finds_no_database_is_no_failure_of_the_message() {
    let scene = Scene::new().await;
    scene.publish("1", &effect("once")).await;
    let (pool, tries) = (scene.pool.clone(), Arc::<AtomicU32>::default());
    let handler = move |Json(effect): Json<Effect>, mut tx: Tx<Db>| {
        let (pool, tries) = (pool.clone(), Arc::clone(&tries));
        async move {
            apply(&effect, &mut tx).await?;
            let backend = "SELECT pg_backend_pid()";
            let backend: i32 = sqlx::query_scalar(backend).fetch_one(&mut *tx).await?;
            if tries.fetch_add(1, Ordering::SeqCst) == 0 {
                let end = sqlx::query("SELECT pg_terminate_backend($1, 60000)").bind(backend);
                end.execute(&pool).await?;
            }
            Ok::<_, Failure>(())
        }
    };
    let runner = scene.client.consumer("q").retry(RetryPolicy::never());
    let runner = runner.exactly_once(scene.by_id()).handle(handler);
    let summary = timeout(SOON, runner.run_until(scene.until_empty("q"))).await.unwrap().unwrap();
    assert_eq!((summary.handled, summary.parked), (1, 0), "{summary:?}");
    assert_eq!(scene.effects("once").await, 1);
}

#[tokio::test]
async fn a_handler_whose_transaction_nobody_begins_is_refused_before_it_begins() {
    let scene = Scene::new().await;
    let needs = async |_: Tx<Db>| {};
    let in_memory = MemoryInbox::new(Remember::ids_for(DAY));
    let consumer = || scene.client.consumer("q");
    for runner in [consumer().handle(needs), consumer().exactly_once(in_memory).handle(needs)] {
        let error = timeout(SOON, runner.run()).await.expect("a refusal").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("call .exactly_once(inbox)"), "{error}");
    }
    let service = scene.client.service("s").method("m", needs);
    assert_eq!(service.declare().await.unwrap_err().kind(), ErrorKind::Invalid);
    service.exactly_once(scene.by_id()).declare().await.unwrap();
}

#[tokio::test]
async fn an_error_of_the_database_is_classified_behind_one_of_this_crate() {
    let scene = Scene::new().await;
    // There are no tables in this schema.
    let schema = schema_of("missing");
    let inbox = Inbox::in_schema(scene.pool.clone(), Remember::ids_for(DAY), &schema);
    let error = inbox.clean().await.unwrap_err();
    assert!(error.sql().is_some() && error.source().is_none(), "{error}");
    let runner = scene
        .client
        .consumer("q")
        .classify(|_: &sqlx::Error| Verdict::Permanent.kind("sql"))
        .handle(move || {
            let inbox = inbox.clone();
            async move { inbox.clean().await.map(|_| ()) }
        });
    scene.publish("1", &effect("1")).await;
    let is_parked = scene.until_depth("q.parked", 1);
    timeout(SOON, runner.run_until(is_parked)).await.expect("an end").unwrap();
    assert_eq!(scene.parked().await[0].0, "sql");
}
