//! Making the tables, on either database.

use leveret_sql::ErrorKind;
use sqlx::Pool;
use tokio::task::JoinSet;

use crate::database::{Db, schema, schema_of};

/// As several instances of a program do that are started at once, each with a pool of its own.
pub async fn instances_may_start_at_the_same_time(pools: Vec<Pool<Db>>) {
    let mut instances = JoinSet::new();
    for pool in pools.clone() {
        instances.spawn(async move {
            let schema = schema();
            schema.migrate(&pool).await?;
            schema.check(&pool).await
        });
    }
    while let Some(migrated) = instances.join_next().await {
        migrated.unwrap().unwrap();
    }
    schema().migrate(&pools[0]).await.unwrap();
}

pub async fn tables_that_are_not_there_are_missed(pool: Pool<Db>) {
    let error = schema().check(&pool).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotMigrated);
    assert!(error.to_string().contains("Schema::migrate"), "{error}");
}

pub async fn schemas_live_side_by_side(pool: Pool<Db>) {
    let (one, other) = (schema_of("One"), schema_of("other"));
    one.migrate(&pool).await.unwrap();
    assert_eq!(other.check(&pool).await.unwrap_err().kind(), ErrorKind::NotMigrated);
    other.migrate(&pool).await.unwrap();
    one.check(&pool).await.unwrap();
    other.check(&pool).await.unwrap();
}

/// `make_newer` notes a step that does not exist yet in the default schema.
pub async fn what_a_later_version_has_made_is_refused(
    pool: Pool<Db>,
    make_newer: impl AsyncFnOnce(),
) {
    let schema = schema();
    schema.migrate(&pool).await.unwrap();
    make_newer().await;
    for refused in [schema.migrate(&pool).await, schema.check(&pool).await] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NewerSchema);
        assert!(error.to_string().contains("version 1000"), "{error}");
    }
}
