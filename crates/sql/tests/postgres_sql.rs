//! On PostgreSQL.

mod support;

mod postgres {
    mod migrating;
    mod outbox;
}
