//! On SQLite, which needs no server.

mod support;

mod sqlite {
    mod kills;
    mod migrating;
    mod outbox;
    mod telemetry;
    mod troubles;
}
