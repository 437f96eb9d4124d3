//! What an error of the database says about the message.

use leveret::{BoxError, Failure};

/// The kind of failures that are the inbox's.
const KIND: &str = "inbox";

/// SQLite's `SQLITE_BUSY` and `SQLITE_LOCKED`, whose details are in the higher bits.
const BUSY: [u32; 2] = [5, 6];

/// A commit has failed. What nobody is to blame for is no failure of the message: it comes again, uncounted, and then the inbox
/// tells whether it was committed.
pub(super) fn of_commit(error: BoxError) -> BoxError {
    match error.downcast_ref() {
        Some(found) if is_passing(found) => Failure::requeue(error).kind(KIND).into(),
        _ => error,
    }
}

/// Messages cannot be looked up. What will not change is a failure of the message; otherwise it is asked for again. Of several,
/// one may be to blame, or wait for long for a copy of it: then each is looked up on its own.
pub(super) fn of_opening(error: BoxError, messages: usize) -> BoxError {
    match error.downcast_ref() {
        Some(found) if is_permanent(found) || messages > 1 && is_locked(found) => {
            Failure::permanent(error).kind(KIND).into()
        }
        _ => error,
    }
}

/// Whether it is about what was found, or what was to be written: a mark of a later version, something too long for an index.
fn is_permanent(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Decode(_) | sqlx::Error::ColumnDecode { .. } | sqlx::Error::Encode(_) => true,
        sqlx::Error::Database(_) => is_of(error, &["22", "54"]),
        _ => false,
    }
}

fn is_locked(error: &sqlx::Error) -> bool {
    is_of(error, &["55P03"])
}

/// Whether PostgreSQL says that it is of one of these classes.
fn is_of(error: &sqlx::Error, classes: &[&str]) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    let is_of = |code: &str| classes.iter().any(|class| code.starts_with(class));
    code.is_some_and(|code| code.len() == 5 && is_of(&code))
}

/// Whether the database could not be reached, or has had to choose between transactions.
fn is_passing(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => true,
        // The connection, a shutdown, a rollback that it has chosen.
        sqlx::Error::Database(_) => is_of(error, &["08", "57P0", "40"]) || is_busy(error),
        _ => false,
    }
}

fn is_busy(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    let is_busy = |code: &str| code.parse().is_ok_and(|code: u32| BUSY.contains(&(code & 0xff)));
    code.is_some_and(|code| code.len() < 5 && is_busy(&code))
}
