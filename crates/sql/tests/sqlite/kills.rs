//! Relays that are killed.

use std::time::Duration;

use leveret_testkit::ScratchFolder;
use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode};

use crate::support::kills::{self, Scene};

#[tokio::test]
#[ignore = "a relay, for the other test to kill"]
async fn relay() {
    kills::be_a_relay().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_when_relays_are_killed_and_the_broker_restarted() {
    let folder = ScratchFolder::new();
    let file = folder.path().join("database");
    let options = SqliteConnectOptions::new()
        .filename(&file)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .busy_timeout(Duration::from_secs(30));
    let broker = leveret_broker::Broker::builder().start().unwrap();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    let scene = Scene {
        pool: SqlitePool::connect_with(options).await.unwrap(),
        database_url: format!("sqlite://{}", file.display()),
        broker_url: format!("amqp://{address}"),
        relay_test: "sqlite::kills::relay",
    };
    let restart = async || broker.restart().await;
    kills::nothing_is_lost(scene, restart, async || broker.restart().await).await;
}
