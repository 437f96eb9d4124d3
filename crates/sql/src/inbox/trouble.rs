//! What an error of the database says about the message.

use leveret::{BoxError, Failure};
use sqlx::Database;

use super::Shared;
use crate::dialect::{Dialect, ErrorClass};

/// The kind of failures that are the inbox's.
const KIND: &str = "inbox";

impl<DB: Database, L: Dialect<DB>> Shared<DB, L> {
    /// A commit has failed. What is not the message's fault is no failure of the message: it comes again, uncounted, and then the
    /// inbox tells whether it was committed.
    pub(super) fn commit_failed(&self, error: BoxError) -> BoxError {
        match self.classify(&error) {
            ErrorClass::Passing | ErrorClass::Locked => Failure::requeue(error).kind(KIND).into(),
            _ => error,
        }
    }

    /// Messages cannot be looked up. What will not change is a failure of the message; otherwise it is asked for again. Of several,
    /// one may be to blame, or wait for long for a copy of it: then each is looked up on its own.
    pub(super) fn opening_failed(&self, error: BoxError, messages: usize) -> BoxError {
        match self.classify(&error) {
            ErrorClass::Permanent => Failure::permanent(error).kind(KIND).into(),
            ErrorClass::Locked if messages > 1 => Failure::permanent(error).kind(KIND).into(),
            _ => error,
        }
    }

    /// Whether a statement has failed before this one, and the handler has hidden that.
    pub(super) fn is_aborted(&self, error: &BoxError) -> bool {
        self.classify(error) == ErrorClass::Aborted
    }

    fn classify(&self, error: &BoxError) -> ErrorClass {
        use sqlx::Error::{
            ColumnDecode, Database, Decode, Encode, Io, PoolClosed, PoolTimedOut, Tls,
            WorkerCrashed,
        };
        match error.downcast_ref() {
            Some(Decode(_) | ColumnDecode { .. } | Encode(_)) => ErrorClass::Permanent,
            Some(Io(_) | Tls(_) | PoolTimedOut | PoolClosed | WorkerCrashed) => ErrorClass::Passing,
            Some(Database(error)) => self.dialect().classify(&**error),
            _ => ErrorClass::Other,
        }
    }
}
