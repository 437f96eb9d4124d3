//! The outbox.

use std::time::Duration;

use leveret_sql::Outgoing;
use leveret_testkit::ScratchFolder;
use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode};

use crate::support::outbox::{self, Stage};

pub(super) async fn pool() -> (ScratchFolder, SqlitePool) {
    let folder = ScratchFolder::new();
    let options = SqliteConnectOptions::new()
        .filename(folder.path().join("database"))
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .busy_timeout(Duration::from_secs(30));
    let pool = SqlitePool::connect_with(options).await.unwrap();
    (folder, pool)
}

outbox::tests!();

async fn count(pool: &SqlitePool) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM leveret_outbox").fetch_one(pool).await.unwrap()
}

#[tokio::test]
async fn what_was_sent_is_kept_for_as_long_as_asked() {
    let (_folder, pool) = pool().await;
    let count = async || count(&pool).await;
    outbox::what_was_sent_is_kept_for_as_long_as_asked(pool.clone(), count).await;
}

#[tokio::test]
async fn a_row_that_cannot_be_read_is_set_aside_at_once() {
    let (_folder, pool) = pool().await;
    let spoil = async || {
        sqlx::query("UPDATE leveret_outbox SET properties = x'ffff'").execute(&pool).await.unwrap();
    };
    outbox::a_row_that_cannot_be_read_is_set_aside_at_once(pool.clone(), spoil).await;
}

#[tokio::test]
async fn lanes_of_a_relay_that_died_are_free_when_its_lease_has_run_out() {
    let (_folder, pool) = pool().await;
    let stage = Stage::new(pool).await;
    stage.write([Outgoing::new("", "q", "hello")]).await;
    let sql = "UPDATE leveret_outbox_lanes SET holder = 'dead', held_until = unixepoch('subsec') * 1000 + ?";
    sqlx::query(sql).bind(3_600_000).execute(&stage.pool).await.unwrap();
    let relay = stage.relay().build().await.unwrap();
    assert_eq!(relay.drain().await.unwrap().sent, 0);
    sqlx::query(sql).bind(300).execute(&stage.pool).await.unwrap();
    let summary = relay.run_until(stage.texts("q", 1)).await.unwrap();
    assert_eq!(summary.sent, 1);
}

#[tokio::test]
async fn a_relay_is_built_while_another_transaction_writes() {
    let (_folder, pool) = pool().await;
    let stage = Stage::new(pool).await;
    let writes = crate::database::begin(&stage.pool).await;
    let _relay = stage.relay().patience(Duration::from_secs(1)).build().await.unwrap();
    writes.rollback().await.unwrap();
}
