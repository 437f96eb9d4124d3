//! The outbox.

use std::time::Duration;

use leveret::{Backoff, Client};
use leveret_broker::Broker;
use leveret_sql::{Outbox, Outgoing, Schema};
use leveret_testkit::postgres::{Database, database};
use leveret_testkit::proxy::{Cut, Direction};
use leveret_testkit::{FaultProxy, eventually};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

use crate::support::outbox::{self, Stage, write};

const DEADLINE: Duration = Duration::from_secs(60);

async fn pool() -> (Database, PgPool) {
    let database = database().await;
    let pool = PgPool::connect(database.url()).await.unwrap();
    (database, pool)
}

/// Its host and port.
fn address(database: &Database) -> &str {
    let address = database.url().split_once('@').and_then(|(_, url)| url.split_once('/'));
    address.expect("a host and a port").0
}

outbox::tests!();

#[tokio::test]
async fn what_was_sent_is_kept_for_as_long_as_asked() {
    let (database, pool) = pool().await;
    let count = async || database.sql("SELECT count(*) FROM leveret.outbox").await.parse().unwrap();
    outbox::what_was_sent_is_kept_for_as_long_as_asked(pool, count).await;
}

#[tokio::test]
async fn a_row_that_cannot_be_read_is_set_aside_at_once() {
    let (database, pool) = pool().await;
    let spoil =
        async || drop(database.sql(r"UPDATE leveret.outbox SET properties = '\xffff'").await);
    outbox::a_row_that_cannot_be_read_is_set_aside_at_once(pool, spoil).await;
}

/// It would look again in an hour.
#[tokio::test]
async fn a_relay_is_told_of_new_messages() {
    let (_database, pool) = pool().await;
    let stage = Stage::new(pool).await;
    let relay = stage.relay().poll_every(Duration::from_secs(3600)).build().await.unwrap();
    let monitor = relay.monitor();
    let story = async {
        let listens = || std::future::ready(monitor.health().is_listening);
        eventually(DEADLINE, "the relay to listen", listens).await;
        for text in ["1", "2", "3"] {
            stage.write([Outgoing::new("", "q", text)]).await;
            assert_eq!(stage.texts("q", 1).await, [text]);
        }
    };
    relay.run_until(story).await.unwrap();
}

/// And does not say so until a connection is there again, which may take long.
#[tokio::test]
async fn a_relay_whose_connection_is_closed_does_not_listen() {
    let database = database().await;
    let proxy = FaultProxy::to(address(&database)).await;
    let options = PgPoolOptions::new().acquire_timeout(3 * DEADLINE);
    let pool = options.connect(&proxy.url(database.url())).await.unwrap();
    let stage = Stage::new(pool).await;
    let relay = stage.relay().patience(DEADLINE).build().await.unwrap();
    let monitor = relay.monitor();
    let story = async {
        let listens = || std::future::ready(monitor.health().is_listening);
        eventually(DEADLINE, "the relay to listen", listens).await;
        proxy.stall(Direction::ToClient);
        proxy.cut(Cut::Finish);
        let is_deaf = || std::future::ready(!monitor.health().is_listening);
        eventually(DEADLINE, "the relay not to listen", is_deaf).await;
        proxy.unstall(Direction::ToClient);
        eventually(DEADLINE, "the relay to listen again", listens).await;
    };
    relay.run_until(story).await.unwrap();
}

#[tokio::test]
async fn a_relay_that_is_not_told_looks_by_itself() {
    let (_database, pool) = pool().await;
    let stage = Stage::new(pool).await;
    let relay = stage.relay().without_listening().poll_every(Duration::from_millis(20));
    let relay = relay.build().await.unwrap();
    let story = async {
        for text in ["1", "2", "3"] {
            let silent = Outbox::default().without_notify();
            write(&stage.pool, &silent, [Outgoing::new("", "q", text)]).await;
            assert_eq!(stage.texts("q", 1).await, [text]);
        }
    };
    relay.run_until(story).await.unwrap();
}

/// Another transaction holds its key's lane for as long as it lives, as a relay does that is at work.
#[tokio::test]
async fn a_lane_that_somebody_works_on_is_left_alone() {
    let (_database, pool) = pool().await;
    let stage = Stage::new(pool).await;
    stage.write([Outgoing::new("", "q", "hello")]).await;
    let mut other = stage.pool.begin().await.unwrap();
    let lock = "SELECT * FROM leveret.outbox_lanes FOR UPDATE";
    sqlx::query(lock).execute(&mut *other).await.unwrap();
    let relay = stage.relay().build().await.unwrap();
    assert_eq!(relay.drain().await.unwrap().sent, 0);
    other.rollback().await.unwrap();
    assert_eq!(relay.drain().await.unwrap().sent, 1);
}

/// Nobody closes its connections, so the database does not hear that it is gone.
#[tokio::test]
async fn lanes_of_a_relay_whose_network_is_gone_are_free_after_a_while() {
    let (database, pool) = pool().await;
    let stage = Stage::new(pool).await;
    let proxy = FaultProxy::to(address(&database)).await;
    let broker = Broker::builder().start().unwrap();
    let client = Client::builder().broker(&broker).connect().await.unwrap();
    let far = PgPool::connect(&proxy.url(database.url())).await.unwrap();
    let relay = stage.outbox.relay(&client, &far).patience(Duration::from_secs(2));
    let relay = relay.workers(1).build().await.unwrap();
    broker.faults().freeze();
    stage.write([Outgoing::new("", "q", "hello")]).await;
    let lost = tokio::spawn(relay.run());
    let free = "SELECT count(*) FROM (SELECT FROM leveret.outbox_lanes FOR UPDATE SKIP LOCKED) l";
    eventually(DEADLINE, "the batch to begin", async || database.sql(free).await != "64").await;
    proxy.stall(Direction::ToServer);
    let relay = stage.relay().poll_every(Duration::from_millis(50)).build().await.unwrap();
    relay.run_until(stage.texts("q", 1)).await.unwrap();
    lost.abort();
}

/// And not when its batch was begun, which may be long ago: the broker does not answer for a while.
#[tokio::test]
async fn the_wait_of_a_refused_message_begins_when_it_is_refused() {
    let (database, pool) = pool().await;
    let broker = Broker::builder().start().unwrap();
    let client = Client::builder().broker(&broker).connect().await.unwrap();
    let stage = Stage::with(pool, client).await;
    stage.write([Outgoing::new("", "nowhere", "lost")]).await;
    let hour = Duration::from_secs(3600);
    let backoff = Backoff { initial: hour, multiplier: 1.0, max: hour };
    let relay = stage.relay().backoff(backoff).build().await.unwrap();
    let seconds = async |sql: &str| database.sql(sql).await.parse::<f64>().unwrap();
    broker.faults().freeze();
    let answer = async {
        let free =
            "SELECT count(*) FROM (SELECT FROM leveret.outbox_lanes FOR UPDATE SKIP LOCKED) l";
        eventually(DEADLINE, "the batch to begin", async || database.sql(free).await != "64").await;
        let before = seconds("SELECT extract(epoch FROM clock_timestamp())").await;
        broker.faults().thaw();
        before
    };
    let (drained, before) = tokio::join!(relay.drain(), answer);
    assert_eq!(drained.unwrap().refused, 1);
    let due = seconds("SELECT extract(epoch FROM due_at) FROM leveret.outbox").await;
    assert!(due >= before + hour.as_secs_f64(), "{due} is less than an hour after {before}");
}

/// Where transactions would otherwise not see what happened after their begin.
#[tokio::test]
async fn the_default_isolation_of_the_database_does_not_matter() {
    let database = database().await;
    let serializable = "SET default_transaction_isolation = 'serializable'";
    database.sql(&format!("ALTER DATABASE {} {serializable}", database.name())).await;
    let pool = PgPool::connect(database.url()).await.unwrap();
    outbox::several_relays_send_each_once_and_in_order_of_its_key(pool).await;
}

#[tokio::test]
async fn an_outbox_may_be_in_any_schema() {
    let (database, pool) = pool().await;
    let mut stage = Stage::new(pool).await;
    let schema = Schema::new("Billing").unwrap();
    schema.migrate(&stage.pool).await.unwrap();
    stage.outbox = Outbox::new(schema);
    let relay = stage.relay().poll_every(Duration::from_secs(3600)).build().await.unwrap();
    let monitor = relay.monitor();
    let story = async {
        let listens = || std::future::ready(monitor.health().is_listening);
        eventually(DEADLINE, "the relay to listen", listens).await;
        stage.write([Outgoing::new("", "q", "hello")]).await;
        assert_eq!(stage.texts("q", 1).await, ["hello"]);
    };
    relay.run_until(story).await.unwrap();
    let ever = database.sql("SELECT is_called FROM leveret.outbox_id_seq").await;
    assert_eq!(ever, "f", "something was written into the other schema");
}
