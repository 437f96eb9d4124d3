//! What can go wrong with a database.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use leveret::text::escape;

/// An error of the outbox, the inbox, or their database.
///
/// [`kind`](Self::kind) is what to branch on; the text tells a person what was attempted, and why it failed. It includes the
/// text of its cause, so [`source`](StdError::source) goes on with what is not said yet; the cause itself is
/// [`leveret`](Self::leveret) or [`sql`](Self::sql).
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    text: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// What kind of error it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// What was asked for cannot be: a name that is none, a message that cannot be sent.
    Invalid,
    /// The tables are not there: see [`Schema::migrate`](crate::Schema::migrate).
    NotMigrated,
    /// The tables are those of a later version of this crate.
    NewerSchema,
    /// The database failed, or cannot be reached.
    Database,
    /// The broker failed, or cannot be reached.
    Broker,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Error(Box::new(Inner { kind, text: text.into(), source: None }))
    }

    /// The database has failed at this.
    pub(crate) fn database(what: impl Into<String>, source: sqlx::Error) -> Self {
        Error::caused(ErrorKind::Database, what, source)
    }

    fn caused(
        kind: ErrorKind,
        text: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        // Classifiers look for causes that `source` passes over.
        leveret::look_behind_errors(|error| {
            error.downcast_ref::<Error>()?.0.source.as_deref().map(|cause| cause as _)
        });
        Error(Box::new(Inner { kind, text: text.into(), source: Some(source.into()) }))
    }

    /// The broker, or what was to be sent to it, has failed at this.
    pub(crate) fn broker(what: impl Into<String>, source: leveret::Error) -> Self {
        let kind = match source.kind() {
            leveret::ErrorKind::Invalid | leveret::ErrorKind::Payload => ErrorKind::Invalid,
            _ => ErrorKind::Broker,
        };
        Error::caused(kind, what, source)
    }

    /// The database did not answer.
    pub(crate) fn late(what: impl std::fmt::Display, after: Duration) -> Self {
        let text = format!("{what} took longer than {after:?}");
        Error::new(ErrorKind::Database, text)
    }

    /// The kind, to branch on.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The client's own error, if there is one behind this.
    pub fn leveret(&self) -> Option<&leveret::Error> {
        self.0.source.as_deref()?.downcast_ref()
    }

    /// The database's own error, if there is one behind this.
    pub fn sql(&self) -> Option<&sqlx::Error> {
        self.0.source.as_deref()?.downcast_ref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escape(&self.0.text))?;
        match &self.0.source {
            // Words of the database's and of the broker's.
            Some(source) => write!(f, ": {}", escape(&source.to_string())),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({self})", self.0.kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let text = self.to_string();
        let mut cause = self.0.source.as_deref().map(|cause| cause as &(dyn StdError + 'static));
        while let Some(said) = cause.filter(|cause| text.contains(&escape(&cause.to_string()))) {
            cause = said.source();
        }
        cause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_database_stay_on_one_line_and_are_said_once() {
        let error = Error::database("cannot read", sqlx::Error::Protocol("a\nforged".to_owned()));
        let text = error.to_string();
        assert!(text.contains("a\\nforged") && !text.contains('\n'), "{text}");
        assert!(error.source().is_none(), "{:?}", error.source());
    }
}
