//! Why a command could not be done, and the status with which the program then ends.

use std::fmt;
use std::process::ExitCode;

use leveret::ErrorKind;

use crate::text::escape_json;

/// Why a command could not be done, and what to do about it.
#[derive(Debug)]
pub(crate) struct Failure {
    text: String,
    status: Status,
}

/// With what the program ends. The numbers are part of what is promised: scripts branch on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    Done = 0,
    /// It was not done, or not all of it.
    Failed = 1,
    /// Arguments or a file are wrong. As with arguments that cannot be read at all.
    Wrong = 2,
    /// No broker answers.
    NoBroker = 69,
    /// The broker does not let this user in, or not do this.
    NotAllowed = 77,
    /// Ctrl-C, or the signal by which services are stopped.
    Stopped = 130,
}

/// What `--help` says of them.
pub(crate) const STATUSES: &str = "\
Exit status:
  0    done
  1    not done, or not all of it
  2    wrong arguments, or a wrong file
  69   no broker answers
  77   the broker does not allow it
  130  stopped by Ctrl-C";

impl Failure {
    pub(crate) fn new(text: impl fmt::Display) -> Self {
        Failure { text: text.to_string(), status: Status::Failed }
    }

    /// What was asked for cannot be: arguments or a file are wrong.
    pub(crate) fn wrong(text: impl fmt::Display) -> Self {
        Failure { text: text.to_string(), status: Status::Wrong }
    }

    pub(crate) fn no_broker(text: impl fmt::Display) -> Self {
        Failure { text: text.to_string(), status: Status::NoBroker }
    }

    pub(crate) fn not_allowed(text: impl fmt::Display) -> Self {
        Failure { text: text.to_string(), status: Status::NotAllowed }
    }

    /// The same, with something more to say.
    pub(crate) fn and(mut self, more: &str) -> Self {
        if !self.text.is_empty() {
            self.text.push_str(more);
        }
        self
    }

    pub(crate) fn stopped(text: impl fmt::Display) -> Self {
        Failure { text: text.to_string(), status: Status::Stopped }
    }

    /// Whoever was reading has gone: there is nothing to be said, and nothing wrong.
    pub(crate) fn nobody_reads() -> Self {
        Failure { text: String::new(), status: Status::Done }
    }

    /// Says why, and gives the exit status.
    pub(crate) fn report(&self) -> ExitCode {
        if !self.text.is_empty() {
            eprintln!("leveret: {}", self.text);
        }
        ExitCode::from(self.status as u8)
    }

    /// The same for a program: a line of JSON.
    pub(crate) fn report_json(&self) -> ExitCode {
        if !self.text.is_empty() {
            let line = serde_json::json!({ "error": self.text, "status": self.status as u8 });
            eprintln!("{}", escape_json(&line.to_string()));
        }
        ExitCode::from(self.status as u8)
    }
}

impl From<leveret::Error> for Failure {
    fn from(error: leveret::Error) -> Self {
        let status = match error.kind() {
            ErrorKind::Unreachable => Status::NoBroker,
            ErrorKind::Refused => Status::NotAllowed,
            ErrorKind::Invalid => Status::Wrong,
            _ => Status::Failed,
        };
        Failure { text: error.to_string(), status }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// What is behind an error that only says that something failed.
pub(crate) fn last_cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
