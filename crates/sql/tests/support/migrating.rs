//! Making the tables, on either database.

use leveret_sql::{Backend, ErrorKind, Schema};
use sqlx::Pool;
use tokio::task::JoinSet;

/// As several instances of a program do that are started at once, each with a pool of its own.
pub async fn instances_may_start_at_the_same_time<D: Backend>(pools: Vec<Pool<D>>) {
    let mut instances = JoinSet::new();
    for pool in pools.clone() {
        instances.spawn(async move {
            let schema = Schema::default();
            schema.migrate(&pool).await?;
            schema.check(&pool).await
        });
    }
    while let Some(migrated) = instances.join_next().await {
        migrated.unwrap().unwrap();
    }
    Schema::default().migrate(&pools[0]).await.unwrap();
}

pub async fn tables_that_are_not_there_are_missed<D: Backend>(pool: Pool<D>) {
    let error = Schema::default().check(&pool).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotMigrated);
    assert!(error.to_string().contains("Schema::migrate"), "{error}");
}

pub async fn schemas_live_side_by_side<D: Backend>(pool: Pool<D>) {
    let (one, other) = (Schema::new("One").unwrap(), Schema::new("other").unwrap());
    one.migrate(&pool).await.unwrap();
    assert_eq!(other.check(&pool).await.unwrap_err().kind(), ErrorKind::NotMigrated);
    other.migrate(&pool).await.unwrap();
    one.check(&pool).await.unwrap();
    other.check(&pool).await.unwrap();
}

/// `make_newer` notes a step that does not exist yet in the default schema.
pub async fn what_a_later_version_has_made_is_refused<D: Backend>(
    pool: Pool<D>,
    make_newer: impl AsyncFnOnce(),
) {
    let schema = Schema::default();
    schema.migrate(&pool).await.unwrap();
    make_newer().await;
    for refused in [schema.migrate(&pool).await, schema.check(&pool).await] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NewerSchema);
        assert!(error.to_string().contains("version 1000"), "{error}");
    }
}
