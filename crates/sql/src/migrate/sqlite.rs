//! On SQLite: tables with a prefix, and all steps in one transaction, which is the lock as well.

use sqlx::{SqliteConnection, SqlitePool};

use super::SQLITE;
use crate::error::Error;
use crate::schema::Schema;

const MIGRATIONS: &str = "CREATE TABLE IF NOT EXISTS {migrations} (
    version INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    made_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
)";

pub(crate) async fn migrate(pool: &SqlitePool, schema: &Schema) -> Result<(), Error> {
    let failed = |error| schema.migrating(error);
    // Writing from the begin on: who began by reading would not wait for the other, but fail.
    let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await.map_err(failed)?;
    sqlx::raw_sql(schema.sqlite(MIGRATIONS)).execute(&mut *transaction).await.map_err(failed)?;
    let found = latest(&mut transaction, schema).await.map_err(failed)?;
    for migration in schema.missing(found, SQLITE)? {
        let sql = schema.sqlite(migration.sql);
        sqlx::raw_sql(sql).execute(&mut *transaction).await.map_err(failed)?;
        sqlx::query(schema.sqlite("INSERT INTO {migrations} (version, name) VALUES (?, ?)"))
            .bind(migration.version)
            .bind(migration.name)
            .execute(&mut *transaction)
            .await
            .map_err(failed)?;
    }
    transaction.commit().await.map_err(failed)
}

pub(crate) async fn check(pool: &SqlitePool, schema: &Schema) -> Result<(), Error> {
    let found = async {
        let mut connection = pool.acquire().await?;
        latest(&mut connection, schema).await
    };
    let failed = |error| Error::database(format!("looking at schema {:?}", schema.name()), error);
    schema.is_current(found.await.map_err(failed)?, SQLITE)
}

/// The latest step that was made, if any was. Names that differ in case are the same here.
async fn latest(connection: &mut SqliteConnection, schema: &Schema) -> sqlx::Result<Option<i32>> {
    let exists: bool = sqlx::query_scalar(
        "SELECT EXISTS (SELECT * FROM sqlite_master WHERE type = 'table' AND name = ? COLLATE NOCASE)",
    )
    .bind(format!("{}_migrations", schema.name()))
    .fetch_one(&mut *connection)
    .await?;
    if !exists {
        return Ok(None);
    }
    let sql = schema.sqlite("SELECT max(version) FROM {migrations}");
    sqlx::query_scalar(sql).fetch_one(connection).await
}
