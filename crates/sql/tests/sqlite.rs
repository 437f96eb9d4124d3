//! On SQLite, which needs no server.

mod support;

mod sqlite {
    mod migrating;
    mod outbox;
}
