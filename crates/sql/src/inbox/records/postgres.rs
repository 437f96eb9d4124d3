//! On PostgreSQL, where each statement is a way to the server and back: several rows are one statement.

use std::collections::{HashMap, HashSet};

use leveret::inbox::HighWater;
use sqlx::{PgConnection, Postgres, Transaction};

use super::{Sender, Statements, all, decode};

pub(super) const BEGIN: &str = "BEGIN";
pub(super) const BEGIN_IMPATIENT: &str = "BEGIN; SET LOCAL lock_timeout = '10s'";

/// What is waited for longer is asked for again, by another connection. What the application has set is noted first, to be set
/// again for the handler; the note is gone with the transaction, so it also tells whether that is still the same.
macro_rules! impatient {
    () => {
        "WITH impatient AS MATERIALIZED (SELECT \
             set_config('leveret.lock_timeout', coalesce( \
                 nullif(current_setting('leveret.lock_timeout', true), ''), \
                 current_setting('lock_timeout')), true) AS before, \
             set_config('lock_timeout', '10s', true))"
    };
}

macro_rules! patient {
    () => {
        "set_config('lock_timeout', current_setting('leveret.lock_timeout'), true)"
    };
}

pub(super) const ADD: &str = concat!(
    impatient!(),
    " INSERT INTO {inbox} (scope, id, expires_at) SELECT $1::text, $2::bytea, $3::bigint FROM impatient \
     ON CONFLICT DO NOTHING RETURNING ",
    patient!()
);

/// One row comes of it, when all are written down.
pub(super) const ADD_ALL: &str = concat!(
    impatient!(),
    ", added AS ( \
         INSERT INTO {inbox} (scope, id, expires_at) \
         SELECT new.scope, new.id, $3::bigint FROM impatient, unnest($1::text[], $2::bytea[]) AS new (scope, id) \
         ON CONFLICT DO NOTHING RETURNING scope, id \
     ) \
     SELECT scopes, ids, ",
    patient!(),
    " FROM (SELECT array_agg(scope) AS scopes, array_agg(id) AS ids FROM added) AS all_added"
);

pub(super) const MARK: &str = concat!(
    impatient!(),
    ", locked AS MATERIALIZED ( \
         SELECT marks.mark FROM impatient, {inbox_marks} AS marks \
         WHERE marks.scope = $1 AND marks.sender = $2 FOR UPDATE OF marks \
     ) \
     SELECT mark, ",
    patient!(),
    " FROM locked"
);

/// Locked in the order of their names, so that no two transactions wait for each other. One row comes of it, when all are locked.
pub(super) const MARKS: &str = concat!(
    impatient!(),
    ", locked AS MATERIALIZED ( \
         SELECT marks.scope, marks.sender, marks.mark FROM impatient, {inbox_marks} AS marks \
         WHERE (marks.scope, marks.sender) IN (SELECT * FROM unnest($1::text[], $2::text[])) \
         ORDER BY marks.scope, marks.sender FOR UPDATE OF marks \
     ) \
     SELECT scopes, senders, marks, ",
    patient!(),
    " FROM (SELECT array_agg(scope) AS scopes, array_agg(sender) AS senders, array_agg(mark) AS marks FROM locked) AS all_locked"
);

/// In the same order. What is there is locked as well, though not changed.
pub(super) const ADD_MARKS: &str = concat!(
    impatient!(),
    " INSERT INTO {inbox_marks} AS marks (scope, sender, mark) \
     SELECT new.scope, new.sender, $3::bytea FROM impatient, unnest($1::text[], $2::text[]) AS new (scope, sender) \
     ORDER BY new.scope, new.sender \
     ON CONFLICT (scope, sender) DO UPDATE SET mark = marks.mark WHERE false"
);

/// Nothing is written where the handler has ended the transaction by itself: the note is gone then.
macro_rules! is_same {
    () => {
        "current_setting('leveret.lock_timeout', true) <> ''"
    };
}

pub(super) const SET_MARK: &str =
    concat!("UPDATE {inbox_marks} SET mark = $3 WHERE scope = $1 AND sender = $2 AND ", is_same!());

pub(super) const SET_MARKS: &str = concat!(
    "UPDATE {inbox_marks} AS marks SET mark = new.mark \
     FROM unnest($1::text[], $2::text[], $3::bytea[]) AS new (scope, sender, mark) \
     WHERE marks.scope = new.scope AND marks.sender = new.sender AND ",
    is_same!()
);

pub(super) const CLEAN: &str = "DELETE FROM {inbox} WHERE ctid = ANY ( \
     ARRAY(SELECT ctid FROM {inbox} WHERE expires_at <= $1 LIMIT $2))";
pub(super) const CLEAN_REPLIES: &str = "DELETE FROM {inbox_replies} WHERE ctid = ANY ( \
     ARRAY(SELECT ctid FROM {inbox_replies} WHERE expires_at <= $1 LIMIT $2))";

/// The first statement fails where another one has failed before, and where the handler has ended the transaction by itself.
/// Then there is no commit, and all that in one message to the server. The next transaction is there for sqlx to roll back:
/// as far as it knows, this one has not ended.
const COMMIT: &str = "SELECT 1 / length(current_setting('leveret.lock_timeout')); COMMIT AND CHAIN";

const DIVISION_BY_ZERO: &str = "22012";

pub(super) async fn commit_record(
    mut transaction: Transaction<'static, Postgres>,
) -> sqlx::Result<()> {
    let committed = sqlx::raw_sql(COMMIT).execute(&mut *transaction).await;
    committed.map(drop).map_err(|error| match error.as_database_error().and_then(|it| it.code()) {
        Some(code) if code == DIVISION_BY_ZERO => {
            sqlx::Error::Protocol("the handler has ended its transaction by itself".into())
        }
        _ => error,
    })
}

pub(super) async fn add_all(
    connection: &mut PgConnection,
    statements: &Statements,
    ids: &[(&str, &[u8])],
    expires_at: Option<i64>,
) -> sqlx::Result<Vec<bool>> {
    type Added = (Option<Vec<String>>, Option<Vec<Vec<u8>>>, String);
    let (scopes, keys): (Vec<&str>, Vec<&[u8]>) = ids.iter().copied().unzip();
    let add = sqlx::query_as(statements.add_all.clone()).bind(scopes).bind(keys).bind(expires_at);
    let (scopes, keys, _): Added = add.fetch_one(connection).await?;
    let (scopes, keys) = (scopes.unwrap_or_default(), keys.unwrap_or_default());
    let added = scopes.iter().map(String::as_str).zip(keys.iter().map(Vec::as_slice));
    let added: HashSet<(&str, &[u8])> = added.collect();
    Ok(ids.iter().map(|id| added.contains(id)).collect())
}

pub(super) async fn marks(
    connection: &mut PgConnection,
    statements: &Statements,
    senders: &[Sender],
) -> sqlx::Result<Option<Vec<HighWater>>> {
    type Locked = (Option<Vec<String>>, Option<Vec<String>>, Option<Vec<Vec<u8>>>, String);
    let (scopes, names) = apart(senders);
    let marks = sqlx::query_as(statements.marks.clone()).bind(scopes).bind(names);
    let (scopes, names, marks, _): Locked = marks.fetch_one(connection).await?;
    let found = scopes.into_iter().flatten().zip(names.into_iter().flatten());
    let mut found: HashMap<Sender, Vec<u8>> = found.zip(marks.into_iter().flatten()).collect();
    if found.len() < senders.len() {
        return Ok(None);
    }
    let mut mark = |sender| decode(&found.remove(sender).ok_or(sqlx::Error::RowNotFound)?);
    let marks: sqlx::Result<_> = senders.iter().map(&mut mark).collect();
    marks.map(Some)
}

pub(super) async fn add_marks(
    connection: &mut PgConnection,
    statements: &Statements,
    senders: &[Sender],
) -> sqlx::Result<()> {
    let (scopes, names) = apart(senders);
    let add = sqlx::query(statements.add_marks.clone()).bind(scopes).bind(names);
    add.bind(HighWater::default().encode()).execute(connection).await.map(drop)
}

pub(super) async fn set_mark(
    connection: &mut PgConnection,
    statements: &Statements,
    (scope, sender): &Sender,
    mark: &HighWater,
) -> sqlx::Result<()> {
    let set = sqlx::query(statements.set_mark.clone()).bind(scope).bind(sender);
    all(1, set.bind(mark.encode()).execute(connection).await?.rows_affected())
}

pub(super) async fn set_marks(
    connection: &mut PgConnection,
    statements: &Statements,
    senders: &[Sender],
    marks: &[HighWater],
) -> sqlx::Result<()> {
    let (scopes, names) = apart(senders);
    let marks: Vec<Vec<u8>> = marks.iter().map(HighWater::encode).collect();
    let set = sqlx::query(statements.set_marks.clone()).bind(scopes).bind(names).bind(marks);
    all(senders.len(), set.execute(connection).await?.rows_affected())
}

fn apart(senders: &[Sender]) -> (Vec<&str>, Vec<&str>) {
    senders.iter().map(|(scope, sender)| (scope.as_str(), sender.as_str())).unzip()
}
