//! Making the tables.

use leveret_sql::{ErrorKind, Schema};
use leveret_testkit::postgres::{Database, database};
use sqlx::PgPool;

use crate::support::migrating;

async fn pool(database: &Database) -> PgPool {
    PgPool::connect(database.url()).await.unwrap()
}

#[tokio::test]
async fn instances_may_start_at_the_same_time() {
    let database = database().await;
    let mut pools = Vec::new();
    for _ in 0..8 {
        pools.push(pool(&database).await);
    }
    migrating::instances_may_start_at_the_same_time(pools).await;
}

/// Who waits has begun before the first one is done.
#[tokio::test]
async fn instances_may_start_at_the_same_time_whatever_the_level_of_transactions_is() {
    for level in ["repeatable read", "serializable"] {
        let database = database().await;
        let set = format!("SET default_transaction_isolation = '{level}'");
        database.sql(&format!("ALTER DATABASE \"{}\" {set}", database.name())).await;
        let mut pools = Vec::new();
        for _ in 0..8 {
            pools.push(pool(&database).await);
        }
        migrating::instances_may_start_at_the_same_time(pools).await;
    }
}

#[tokio::test]
async fn tables_that_are_not_there_are_missed() {
    let database = database().await;
    migrating::tables_that_are_not_there_are_missed(pool(&database).await).await;
}

#[tokio::test]
async fn schemas_live_side_by_side() {
    let database = database().await;
    migrating::schemas_live_side_by_side(pool(&database).await).await;
}

#[tokio::test]
async fn what_a_later_version_has_made_is_refused() {
    let database = database().await;
    let make_newer = async || {
        let sql = "INSERT INTO leveret.migrations (version, name) VALUES (1000, 'later')";
        database.sql(sql).await;
    };
    migrating::what_a_later_version_has_made_is_refused(pool(&database).await, make_newer).await;
}

#[tokio::test]
async fn who_may_not_make_schemas_uses_one_that_is_there() {
    let database = database().await;
    let role = format!("{}_user", database.name());
    let sql = format!("CREATE ROLE {role} LOGIN; CREATE SCHEMA given AUTHORIZATION {role}");
    database.sql(&sql).await;
    let url = database.url().replace("postgres@", &format!("{role}@"));
    let pool = PgPool::connect(&url).await.unwrap();
    let refused = Schema::new("own").unwrap().migrate(&pool).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Database);
    let given = Schema::new("given").unwrap();
    given.migrate(&pool).await.unwrap();
    given.migrate(&pool).await.unwrap();
    pool.close().await;
    database.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}
