//! On PostgreSQL: a schema, and all steps in one transaction under a lock.

use sqlx::{PgConnection, PgPool};

use super::POSTGRES;
use crate::error::Error;
use crate::schema::Schema;

const MIGRATIONS: &str = "CREATE TABLE IF NOT EXISTS {migrations} (
    version integer PRIMARY KEY,
    name text NOT NULL,
    made_at timestamptz NOT NULL DEFAULT now()
)";

/// Whatever the database's default is: in the other levels, who has waited for the lock would not see what was made meanwhile.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

pub(crate) async fn migrate(pool: &PgPool, schema: &Schema) -> Result<(), Error> {
    let failed = |error| schema.migrating(error);
    let mut transaction = pool.begin_with(BEGIN).await.map_err(failed)?;
    lock(&mut transaction, schema).await.map_err(failed)?;
    make_schema(&mut transaction, schema).await.map_err(failed)?;
    let found = latest(&mut transaction, schema).await.map_err(failed)?;
    for migration in schema.missing(found, POSTGRES)? {
        let sql = schema.postgres(migration.sql);
        sqlx::raw_sql(sql).execute(&mut *transaction).await.map_err(failed)?;
        sqlx::query(schema.postgres("INSERT INTO {migrations} (version, name) VALUES ($1, $2)"))
            .bind(migration.version)
            .bind(migration.name)
            .execute(&mut *transaction)
            .await
            .map_err(failed)?;
    }
    transaction.commit().await.map_err(failed)
}

pub(crate) async fn check(pool: &PgPool, schema: &Schema) -> Result<(), Error> {
    let found = async {
        let mut connection = pool.acquire().await?;
        latest(&mut connection, schema).await
    };
    let failed = |error| Error::database(format!("looking at schema {:?}", schema.name()), error);
    schema.is_current(found.await.map_err(failed)?, POSTGRES)
}

/// Until the end of the transaction. `CREATE … IF NOT EXISTS` alone fails if two do it at once.
async fn lock(connection: &mut PgConnection, schema: &Schema) -> sqlx::Result<()> {
    let name = format!("leveret-sql {}", schema.name());
    let lock = sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))");
    lock.bind(name).execute(connection).await.map(drop)
}

/// Asks first, because who may not make schemas may not even try.
async fn make_schema(connection: &mut PgConnection, schema: &Schema) -> sqlx::Result<()> {
    let exists: bool =
        sqlx::query_scalar("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)")
            .bind(schema.name())
            .fetch_one(&mut *connection)
            .await?;
    if !exists {
        let sql = format!("CREATE SCHEMA \"{}\"", schema.name());
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut *connection).await?;
    }
    sqlx::raw_sql(schema.postgres(MIGRATIONS)).execute(connection).await.map(drop)
}

/// The latest step that was made, if any was.
async fn latest(connection: &mut PgConnection, schema: &Schema) -> sqlx::Result<Option<i32>> {
    let exists: bool = sqlx::query_scalar(
        "SELECT EXISTS (SELECT FROM pg_tables WHERE schemaname = $1 AND tablename = 'migrations')",
    )
    .bind(schema.name())
    .fetch_one(&mut *connection)
    .await?;
    if !exists {
        return Ok(None);
    }
    let sql = schema.postgres("SELECT max(version) FROM {migrations}");
    sqlx::query_scalar(sql).fetch_one(connection).await
}
