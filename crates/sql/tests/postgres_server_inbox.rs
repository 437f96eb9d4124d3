//! The inbox on a PostgreSQL that goes away and comes back.

mod postgres_server {
    mod bank;
    mod restarts;
}
