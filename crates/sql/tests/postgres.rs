//! On PostgreSQL.

mod dying;
mod inbox;
mod support;

mod postgres {
    mod inbox;
    mod migrating;
    mod outbox;
}

/// The database that the tests are on.
mod database {
    use leveret_sql::Schema;
    use leveret_testkit::postgres;
    use sqlx::PgPool;
    use sqlx::postgres::PgPoolOptions;

    pub(crate) type Db = sqlx::Postgres;

    pub(crate) type Lang = leveret_sql::BuiltIn;

    pub(crate) fn schema() -> Schema<Lang> {
        Schema::default()
    }

    pub(crate) fn schema_of(name: &str) -> Schema<Lang> {
        Schema::new(name).expect("a name")
    }

    pub(crate) struct Database(postgres::Database);

    impl Database {
        pub(crate) async fn new() -> Self {
            Database(postgres::database().await)
        }

        pub(crate) async fn pool(&self) -> PgPool {
            pool_of(&self.url()).await
        }

        pub(crate) fn url(&self) -> String {
            self.0.url().to_owned()
        }
    }

    /// The name of one of our tables.
    pub(crate) fn table(name: &str) -> String {
        format!("leveret.{name}")
    }

    /// A transaction that is going to write.
    pub(crate) async fn begin(pool: &PgPool) -> sqlx::Transaction<'static, Db> {
        pool.begin_with("BEGIN").await.expect("a transaction")
    }

    pub(crate) async fn pool_of(url: &str) -> PgPool {
        PgPoolOptions::new().max_connections(10).connect(url).await.expect("a pool")
    }
}
