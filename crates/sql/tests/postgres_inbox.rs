//! The inbox on PostgreSQL.

mod dying;
mod inbox;

/// The database that the tests are on.
mod database {
    use leveret_testkit::postgres;
    use sqlx::PgPool;
    use sqlx::postgres::PgPoolOptions;

    pub(crate) type Db = sqlx::Postgres;

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

#[tokio::test]
async fn handlers_wait_for_locks_as_the_application_has_it() {
    inbox::handling::handlers_wait_for_locks_as_the_application_has_it().await;
}

#[tokio::test]
async fn who_calls_a_method_that_is_cut_short_does_not_wait_for_its_statement() {
    inbox::handling::who_calls_a_method_that_is_cut_short_does_not_wait_for_its_statement().await;
}

#[tokio::test]
async fn two_that_release_the_same_do_not_wait_for_each_other() {
    inbox::remembering::two_that_release_the_same_do_not_wait_for_each_other().await;
}

#[tokio::test]
async fn a_handler_that_hides_the_failure_of_its_transaction_has_failed() {
    inbox::handling::a_handler_that_hides_the_failure_of_its_transaction_has_failed().await;
}

#[tokio::test]
async fn nothing_of_a_spoilt_transaction_counts_as_done() {
    inbox::handling::nothing_of_a_spoilt_transaction_counts_as_done().await;
}

#[tokio::test]
async fn a_commit_that_finds_no_database_is_no_failure_of_the_message() {
    inbox::handling::a_commit_that_finds_no_database_is_no_failure_of_the_message().await;
}
