//! On a dialect that is written here, against the public API alone, as another database's would be.

mod dying;
mod inbox;
mod own_dialect {
    pub(crate) mod dialect;
    mod outbox;
}
mod support;

/// The database that the tests are on: SQLite, in other words.
mod database {
    use leveret_sql::Schema;
    use leveret_testkit::ScratchFolder;
    use sqlx::SqlitePool;
    use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};

    pub(crate) type Db = sqlx::Sqlite;

    pub(crate) type Lang = crate::own_dialect::dialect::Own;

    pub(crate) fn schema() -> Schema<Lang> {
        schema_of("leveret")
    }

    pub(crate) fn schema_of(name: &str) -> Schema<Lang> {
        Schema::with_dialect(name, crate::own_dialect::dialect::Own).expect("a name")
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
    }

    /// The name of one of the tables.
    pub(crate) fn table(name: &str) -> String {
        match name {
            "inbox_marks" => "leveret_own_marks".to_owned(),
            name => format!("leveret_{name}"),
        }
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
