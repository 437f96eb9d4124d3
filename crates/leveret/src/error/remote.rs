//! Errors that come from a service.

use std::fmt;

/// An error that a service has answered with: what its handler returned, or why it was not called.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteError {
    /// The kind, a word to branch on: that of a [`Failure`](crate::Failure), the name of the error's type,
    /// `undecodable`, `panic`, `unknown-method`, or else `error`.
    pub kind: String,
    /// What went wrong, for people.
    pub text: String,
}

impl fmt::Display for RemoteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.text, self.kind)
    }
}

impl std::error::Error for RemoteError {}
