//! On SQLite, which is in the process: several rows are as many statements. Whoever has begun is the only one who writes, so nobody
//! is waited for afterwards.

use leveret::inbox::HighWater;
use sqlx::{Sqlite, SqliteConnection, Transaction};

use super::{Records as _, Sender, Statements, all};

/// The savepoint is gone with its transaction, which tells whether that is still the same.
pub(super) const BEGIN: &str = "BEGIN IMMEDIATE; SAVEPOINT leveret";
const IS_SAME: &str = "RELEASE leveret";

pub(super) const BEGIN_IMPATIENT: &str = BEGIN;

pub(super) const ADD: &str =
    "INSERT INTO {inbox} (scope, id, expires_at) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
pub(super) const ADD_ALL: &str = ADD;
pub(super) const MARK: &str = "SELECT mark FROM {inbox_marks} WHERE scope = $1 AND sender = $2";
pub(super) const MARKS: &str = MARK;
pub(super) const ADD_MARKS: &str =
    "INSERT INTO {inbox_marks} (scope, sender, mark) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
pub(super) const SET_MARK: &str =
    "UPDATE {inbox_marks} SET mark = $3 WHERE scope = $1 AND sender = $2";
pub(super) const SET_MARKS: &str = SET_MARK;

pub(super) const CLEAN: &str = "DELETE FROM {inbox} WHERE rowid IN ( \
     SELECT rowid FROM {inbox} WHERE expires_at <= $1 LIMIT $2)";
pub(super) const CLEAN_REPLIES: &str = "DELETE FROM {inbox_replies} WHERE rowid IN ( \
     SELECT rowid FROM {inbox_replies} WHERE expires_at <= $1 LIMIT $2)";

/// What has failed before has changed nothing, and a transaction that has ended otherwise cannot be committed.
pub(super) async fn commit_record(transaction: Transaction<'static, Sqlite>) -> sqlx::Result<()> {
    transaction.commit().await
}

pub(super) async fn add_all(
    connection: &mut SqliteConnection,
    statements: &Statements,
    ids: &[(&str, &[u8])],
    expires_at: Option<i64>,
) -> sqlx::Result<Vec<bool>> {
    let mut added = Vec::new();
    for id in ids {
        added.push(Sqlite::add(connection, statements, *id, expires_at).await?);
    }
    Ok(added)
}

pub(super) async fn marks(
    connection: &mut SqliteConnection,
    statements: &Statements,
    senders: &[Sender],
) -> sqlx::Result<Option<Vec<HighWater>>> {
    let mut marks = Vec::new();
    for sender in senders {
        let Some(mark) = Sqlite::mark(connection, statements, sender).await? else {
            return Ok(None);
        };
        marks.push(mark);
    }
    Ok(Some(marks))
}

pub(super) async fn add_marks(
    connection: &mut SqliteConnection,
    statements: &Statements,
    senders: &[Sender],
) -> sqlx::Result<()> {
    for (scope, sender) in senders {
        let add = sqlx::query(statements.add_marks.clone()).bind(scope).bind(sender);
        add.bind(HighWater::default().encode()).execute(&mut *connection).await?;
    }
    Ok(())
}

pub(super) async fn set_mark(
    connection: &mut SqliteConnection,
    statements: &Statements,
    sender: &Sender,
    mark: &HighWater,
) -> sqlx::Result<()> {
    let (sender, mark) = (std::slice::from_ref(sender), std::slice::from_ref(mark));
    set_marks(connection, statements, sender, mark).await
}

pub(super) async fn set_marks(
    connection: &mut SqliteConnection,
    statements: &Statements,
    senders: &[Sender],
    marks: &[HighWater],
) -> sqlx::Result<()> {
    // Otherwise they would be written though nothing else is.
    sqlx::query(IS_SAME).execute(&mut *connection).await?;
    for ((scope, sender), mark) in senders.iter().zip(marks) {
        let set = sqlx::query(statements.set_mark.clone()).bind(scope).bind(sender);
        let set = set.bind(mark.encode()).execute(&mut *connection).await?;
        all(1, set.rows_affected())?;
    }
    Ok(())
}
