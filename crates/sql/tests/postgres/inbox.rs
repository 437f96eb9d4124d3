//! The inbox on PostgreSQL.

use std::sync::Arc;

use leveret::inbox::Remember;
use leveret::{Failure, Message, Queue, RetryPolicy, Topology};
use leveret_sql::{BuiltIn, Dialect, Inbox, Tx};
use leveret_testkit::eventually;
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgPool, Transaction};
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::database::{Db, schema};
use crate::inbox::{DAY, SOON, Scene, handling, remembering};

#[tokio::test]
async fn handlers_wait_for_locks_as_the_application_has_it() {
    handling::handlers_wait_for_locks_as_the_application_has_it().await;
}

#[tokio::test]
async fn who_calls_a_method_that_is_cut_short_does_not_wait_for_its_statement() {
    handling::who_calls_a_method_that_is_cut_short_does_not_wait_for_its_statement().await;
}

#[tokio::test]
async fn two_that_release_the_same_do_not_wait_for_each_other() {
    remembering::two_that_release_the_same_do_not_wait_for_each_other().await;
}

#[tokio::test]
async fn a_handler_that_hides_the_failure_of_its_transaction_has_failed() {
    handling::a_handler_that_hides_the_failure_of_its_transaction_has_failed().await;
}

#[tokio::test]
async fn nothing_of_a_spoilt_transaction_counts_as_done() {
    handling::nothing_of_a_spoilt_transaction_counts_as_done().await;
}

#[tokio::test]
async fn a_commit_that_finds_no_database_is_no_failure_of_the_message() {
    handling::a_commit_that_finds_no_database_is_no_failure_of_the_message().await;
}

/// One connection, for which beginning a transaction of the inbox does this as well.
async fn pool_that_begins_with(scene: &Scene, what: &str) -> PgPool {
    let function = format!(
        "CREATE FUNCTION public.set_config(text, text, boolean) RETURNS text LANGUAGE plpgsql AS \
         $$ BEGIN {what}; RETURN ''; END $$"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(function)).execute(&scene.pool).await.unwrap();
    let options = (*scene.pool.connect_options()).clone();
    let options = options.options([("search_path", "public,pg_catalog")]);
    PgPoolOptions::new().max_connections(1).connect_with(options).await.unwrap()
}

/// A savepoint is an error, then.
async fn assert_in_no_transaction(pool: &PgPool) {
    let outside = sqlx::raw_sql("SAVEPOINT outside").execute(pool).await.unwrap_err();
    let code = outside.as_database_error().and_then(|error| error.code());
    assert_eq!(code.as_deref(), Some("25P01"), "{outside}");
}

#[tokio::test]
async fn a_begin_that_fails_leaves_a_usable_connection() {
    let scene = Scene::new().await;
    let pool = pool_that_begins_with(&scene, "RAISE EXCEPTION 'no'").await;
    let begun = Dialect::<Db>::begin(&BuiltIn, &pool).await;
    assert!(begun.unwrap_err().to_string().contains("no"));
    assert_in_no_transaction(&pool).await;
}

#[tokio::test]
async fn a_begin_that_is_cancelled_leaves_no_transaction() {
    const WAITING: &str = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND objid = 77 \
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))";
    let scene = Scene::new().await;
    let pool = pool_that_begins_with(&scene, "PERFORM pg_advisory_xact_lock(77)").await;
    let mut other = crate::database::begin(&scene.pool).await;
    sqlx::query("SELECT pg_advisory_xact_lock(77)").execute(&mut *other).await.unwrap();
    let is_under_way = eventually(SOON, "the begin to wait", async || {
        sqlx::query_scalar::<_, bool>(WAITING).fetch_one(&scene.pool).await.unwrap()
    });
    tokio::select! {
        begun = Dialect::<Db>::begin(&BuiltIn, &pool) => panic!("{begun:?}"),
        _ = is_under_way => {}
    }
    other.rollback().await.unwrap();
    assert_in_no_transaction(&pool).await;
}

/// Since when a transaction waits for another one.
async fn waits_since(pool: &PgPool) -> Option<String> {
    let sql = "SELECT min(query_start)::text FROM pg_stat_activity \
        WHERE wait_event_type = 'Lock' AND datname = current_database()";
    sqlx::query_scalar(sql).fetch_one(pool).await.unwrap()
}

#[tokio::test]
async fn a_failed_call_that_meets_a_copy_at_work_counts_as_no_failure() {
    let scene = Scene::new().await;
    let options = (*scene.pool.connect_options()).clone().options([("lock_timeout", "200ms")]);
    let pool = PgPoolOptions::new().connect_with(options).await.unwrap();
    let copy = Arc::<Mutex<Option<Transaction<'static, Db>>>>::default();
    // The copy records the message after the changes of the failed call are undone, and before that is recorded.
    let method = {
        let (scene_pool, copy) = (scene.pool.clone(), Arc::clone(&copy));
        move |mut tx: Tx<Db>| {
            let (scene_pool, copy) = (scene_pool.clone(), Arc::clone(&copy));
            async move {
                let record = sqlx::query_as("SELECT scope, id FROM leveret.inbox");
                let (scope, id): (String, Vec<u8>) = record.fetch_one(&mut *tx).await?;
                sqlx::raw_sql("ROLLBACK").execute(&mut *tx).await?;
                let mut begun = crate::database::begin(&scene_pool).await;
                let record = sqlx::query("INSERT INTO leveret.inbox (scope, id) VALUES ($1, $2)");
                record.bind(scope).bind(id).execute(&mut *begun).await?;
                *copy.lock().await = Some(begun);
                Err::<(), _>(Failure::permanent("no"))
            }
        }
    };
    let inbox = Inbox::in_schema(pool, Remember::ids_for(DAY), &schema());
    let service = scene.client.service("s").retry(RetryPolicy::never());
    let service = service.method("m", method).exactly_once(inbox);
    service.declare().await.unwrap();
    scene.client.apply(&Topology::new().queue(Queue::classic("answers"))).await.unwrap();
    let request = Message::new("x").message_id("1").reply_to("answers").kind("m");
    scene.publisher.publish("s", request).await.unwrap();
    let answered = async {
        let wait = async || waits_since(&scene.pool).await.ok_or("no wait");
        let first = eventually(SOON, "the failed call to wait for its copy", wait).await;
        let again = async || waits_since(&scene.pool).await.is_some_and(|since| since != first);
        eventually(SOON, "it to be delivered again", again).await;
        copy.lock().await.take().unwrap().commit().await.unwrap();
        scene.until_empty("s").await;
    };
    let summary = timeout(SOON, service.run_until(answered)).await.unwrap().unwrap();
    // What is counted is parked by this policy.
    assert_eq!((summary.duplicates, summary.parked), (1, 0), "{summary:?}");
}
