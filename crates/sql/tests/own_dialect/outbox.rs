//! The outbox, and making the tables.

use sqlx::SqlitePool;

use crate::database::Database;
use crate::support::{migrating, outbox};

async fn pool() -> (Database, SqlitePool) {
    let database = Database::new().await;
    let pool = database.pool().await;
    (database, pool)
}

outbox::tests!();

#[tokio::test]
async fn instances_may_start_at_the_same_time() {
    let database = Database::new().await;
    let mut pools = Vec::new();
    for _ in 0..8 {
        pools.push(database.pool().await);
    }
    migrating::instances_may_start_at_the_same_time(pools).await;
}
