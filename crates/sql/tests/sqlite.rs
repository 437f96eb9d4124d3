//! On SQLite, which needs no server.

mod bank;
mod dying;
mod inbox;
mod support;

mod sqlite {
    mod kills;
    mod lost_file;
    mod migrating;
    mod outbox;
    mod telemetry;
    mod troubles;
}

/// The database that the tests are on.
mod database {
    use leveret_sql::Schema;
    use leveret_testkit::ScratchFolder;
    use sqlx::SqlitePool;
    use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};

    pub(crate) type Db = sqlx::Sqlite;

    pub(crate) type Lang = leveret_sql::BuiltIn;

    pub(crate) fn schema() -> Schema<Lang> {
        Schema::default()
    }

    pub(crate) fn schema_of(name: &str) -> Schema<Lang> {
        Schema::new(name).expect("a name")
    }

    pub(crate) struct Database(ScratchFolder);

    impl Database {
        pub(crate) async fn new() -> Self {
            Database(ScratchFolder::new())
        }

        pub(crate) async fn pool(&self) -> SqlitePool {
            pool_of(&self.url()).await
        }

        pub(crate) fn url(&self) -> String {
            format!("sqlite://{}?mode=rwc", self.0.path().join("test.db").display())
        }

        /// There is no server: what SQLite does after a crash is done whenever a process was killed.
        pub(crate) async fn restart(&mut self) {}
    }

    /// The name of one of our tables.
    pub(crate) fn table(name: &str) -> String {
        format!("leveret_{name}")
    }

    /// A transaction that is going to write.
    pub(crate) async fn begin(pool: &SqlitePool) -> sqlx::Transaction<'static, Db> {
        pool.begin_with("BEGIN IMMEDIATE").await.expect("a transaction")
    }

    pub(crate) async fn pool_of(url: &str) -> SqlitePool {
        let options: SqliteConnectOptions = url.parse().expect("a URL");
        let options = options.journal_mode(SqliteJournalMode::Wal);
        SqlitePoolOptions::new().max_connections(10).connect_with(options).await.expect("a pool")
    }
}
