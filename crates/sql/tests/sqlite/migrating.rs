//! Making the tables.

use leveret_sql::Schema;
use leveret_testkit::ScratchFolder;
use sqlx::SqlitePool;
use sqlx::sqlite::SqliteConnectOptions;

use crate::support::migrating;

async fn pool(folder: &ScratchFolder) -> SqlitePool {
    let file = folder.path().join("database");
    let options = SqliteConnectOptions::new().filename(file).create_if_missing(true);
    SqlitePool::connect_with(options).await.unwrap()
}

#[tokio::test]
async fn instances_may_start_at_the_same_time() {
    let folder = ScratchFolder::new();
    let mut pools = Vec::new();
    for _ in 0..8 {
        pools.push(pool(&folder).await);
    }
    migrating::instances_may_start_at_the_same_time(pools).await;
}

#[tokio::test]
async fn tables_that_are_not_there_are_missed() {
    let folder = ScratchFolder::new();
    migrating::tables_that_are_not_there_are_missed(pool(&folder).await).await;
}

#[tokio::test]
async fn schemas_live_side_by_side() {
    let folder = ScratchFolder::new();
    migrating::schemas_live_side_by_side(pool(&folder).await).await;
}

/// SQLite knows no case in names, so neither do we there.
#[tokio::test]
async fn names_that_differ_in_case_are_one_schema() {
    let folder = ScratchFolder::new();
    let pool = pool(&folder).await;
    Schema::new("Billing").unwrap().migrate(&pool).await.unwrap();
    let same = Schema::new("billing").unwrap();
    same.check(&pool).await.unwrap();
    same.migrate(&pool).await.unwrap();
}

#[tokio::test]
async fn what_a_later_version_has_made_is_refused() {
    let folder = ScratchFolder::new();
    let pool = pool(&folder).await;
    let make_newer = async || {
        let sql = "INSERT INTO leveret_migrations (version, name) VALUES (1000, 'later')";
        sqlx::query(sql).execute(&pool).await.unwrap();
    };
    migrating::what_a_later_version_has_made_is_refused(pool.clone(), make_newer).await;
}
