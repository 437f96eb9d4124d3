//! The outbox on a PostgreSQL and a RabbitMQ that are stopped, killed and suspended.

mod support;

mod postgres_server {
    mod kills;
    mod troubles;
}
