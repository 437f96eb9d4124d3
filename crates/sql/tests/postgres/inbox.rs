//! The inbox on PostgreSQL.

use crate::inbox::{handling, remembering};

#[tokio::test]
async fn handlers_wait_for_locks_as_the_application_has_it() {
    handling::handlers_wait_for_locks_as_the_application_has_it().await;
}

#[tokio::test]
async fn who_calls_a_method_that_is_cut_short_does_not_wait_for_its_statement() {
    handling::who_calls_a_method_that_is_cut_short_does_not_wait_for_its_statement().await;
}

#[tokio::test]
async fn two_that_release_the_same_do_not_wait_for_each_other() {
    remembering::two_that_release_the_same_do_not_wait_for_each_other().await;
}

#[tokio::test]
async fn a_handler_that_hides_the_failure_of_its_transaction_has_failed() {
    handling::a_handler_that_hides_the_failure_of_its_transaction_has_failed().await;
}

#[tokio::test]
async fn nothing_of_a_spoilt_transaction_counts_as_done() {
    handling::nothing_of_a_spoilt_transaction_counts_as_done().await;
}

#[tokio::test]
async fn a_commit_that_finds_no_database_is_no_failure_of_the_message() {
    handling::a_commit_that_finds_no_database_is_no_failure_of_the_message().await;
}
