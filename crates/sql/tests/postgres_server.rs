//! On a PostgreSQL and a RabbitMQ that are stopped, killed and suspended.

mod bank;
mod dying;
mod support;

mod postgres_server {
    mod kills;
    mod restarts;
    mod troubles;
}

/// The database that the bank is on.
mod database {
    use std::time::Duration;

    use leveret_sql::Schema;
    use leveret_testkit::eventually;
    use leveret_testkit::postgres::Postgres;
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

    pub(crate) struct Database(Postgres);

    impl Database {
        pub(crate) async fn new() -> Self {
            Database(Postgres::start().await)
        }

        pub(crate) fn url(&self) -> String {
            self.0.url()
        }

        pub(crate) async fn restart(&mut self) {
            self.0.kill().await;
            self.0.start_again().await;
        }
    }

    /// The name of one of our tables.
    pub(crate) fn table(name: &str) -> String {
        format!("leveret.{name}")
    }

    /// It may be down just now.
    pub(crate) async fn pool_of(url: &str) -> PgPool {
        eventually(Duration::from_secs(60), "the database", async || {
            let options = PgPoolOptions::new().max_connections(10);
            options.acquire_timeout(Duration::from_secs(2)).connect(url).await
        })
        .await
    }
}
