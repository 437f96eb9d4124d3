//! Why a command could not be done, and the status with which the program then ends.

use std::path::Path;
use std::process::ExitCode;
use std::{fmt, io};

use leveret::{ErrorKind, amqp};

use crate::output::{say_beside, say_beside_at_once};
use crate::signals::Signal;

/// Why a command could not be done, and what to do about it.
#[derive(Debug)]
pub(crate) struct Failure {
    text: String,
    status: Status,
}

/// The exit statuses. Scripts branch on the numbers, so they never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    Done = 0,
    Failed = 1,
    Wrong = 2,
    NoBroker = 69,
    NotAllowed = 77,
    Interrupted = 130,
    Terminated = 143,
}

/// What `--help` says of them. The guide's page on operations has the same table, which a test compares.
pub(crate) const STATUSES: &str = "\
Exit status:
  0    done
  1    not done, or not all of it
  2    wrong arguments, or a wrong file
  69   no broker answers, or TLS with it fails
  77   the broker does not let this user in, or not do this
  130  stopped by Ctrl-C
  143  stopped by SIGTERM";

impl Failure {
    pub(crate) fn with(status: Status, text: impl fmt::Display) -> Self {
        Failure { text: text.to_string(), status }
    }

    pub(crate) fn new(text: impl fmt::Display) -> Self {
        Failure::with(Status::Failed, text)
    }

    /// What was asked for cannot be: arguments or a file are wrong.
    pub(crate) fn wrong(text: impl fmt::Display) -> Self {
        Failure::with(Status::Wrong, text)
    }

    pub(crate) fn no_broker(text: impl fmt::Display) -> Self {
        Failure::with(Status::NoBroker, text)
    }

    pub(crate) fn not_allowed(text: impl fmt::Display) -> Self {
        Failure::with(Status::NotAllowed, text)
    }

    /// An address cannot be listened on: it is wrong, or cannot be had at present.
    pub(crate) fn listening(address: &str, error: &io::Error) -> Self {
        use io::ErrorKind::{AddrInUse, AddrNotAvailable, PermissionDenied};
        let (status, advice) = match error.kind() {
            AddrInUse => (
                Status::Failed,
                ": something listens there already; choose another port by --listen",
            ),
            PermissionDenied => {
                (Status::Failed, ": ports below 1024 need rights; choose another by --listen")
            }
            AddrNotAvailable => (Status::Failed, ": this machine does not have that address"),
            _ => (Status::Wrong, "; an address and a port are needed, as in 127.0.0.1:9000"),
        };
        Failure::with(status, format_args!("cannot listen on {address}: {error}{advice}"))
    }

    /// A file cannot be written: its path is wrong, or there is no room for it.
    pub(crate) fn writing(path: &Path, error: &io::Error) -> Self {
        use io::ErrorKind::{
            AlreadyExists, IsADirectory, NotADirectory, NotFound, PermissionDenied,
        };
        let status = match error.kind() {
            AlreadyExists | IsADirectory | NotADirectory | NotFound | PermissionDenied => {
                Status::Wrong
            }
            _ => Status::Failed,
        };
        Failure::with(status, format_args!("cannot write {}: {error}", path.display()))
    }

    /// The same, with something more to say.
    pub(crate) fn and(mut self, more: &str) -> Self {
        if !self.text.is_empty() {
            self.text.push_str(more);
        }
        self
    }

    /// A signal has stopped the program.
    pub(crate) fn stopped(signal: Signal, text: impl fmt::Display) -> Self {
        Failure::with(signal.status(), format_args!("stopped by {signal}; {text}"))
    }

    /// The reader of the output has gone: no error, and nothing to be said.
    pub(crate) fn nobody_reads() -> Self {
        Failure::with(Status::Done, "")
    }

    pub(crate) fn is_unread(&self) -> bool {
        self.status == Status::Done
    }

    pub(crate) fn status(&self) -> Status {
        self.status
    }

    /// Says why, and gives the exit status.
    pub(crate) fn report(&self) -> ExitCode {
        self.say();
        ExitCode::from(self.status as u8)
    }

    /// Says why, if that needs no waiting, and ends the process at once.
    pub(crate) fn exit(self) -> ! {
        if !self.text.is_empty() {
            say_beside_at_once(&self.text, self.form());
        }
        // The standard output is flushed only if it is not locked, and has nothing to flush then: see `output::unbuffered`.
        std::process::exit(self.status as i32)
    }

    fn say(&self) {
        if !self.text.is_empty() {
            say_beside(&self.text, self.form());
        }
    }

    fn form(&self) -> serde_json::Value {
        serde_json::json!({ "error": self.text, "status": self.status as u8 })
    }
}

impl From<amqp::Error> for Failure {
    fn from(error: amqp::Error) -> Self {
        let status = match error.kind() {
            amqp::ErrorKind::Authentication | amqp::ErrorKind::VirtualHost => Status::NotAllowed,
            amqp::ErrorKind::InvalidArgument => Status::Wrong,
            _ => Status::NoBroker,
        };
        Failure::with(status, error)
    }
}

/// Whether something could not be written because its reader has gone.
fn is_unread(error: &leveret::Error) -> bool {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<io::Error>());
    error.kind() == ErrorKind::Io
        && cause.is_some_and(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

impl From<leveret::Error> for Failure {
    fn from(error: leveret::Error) -> Self {
        if is_unread(&error) {
            return Failure::nobody_reads();
        }
        let status = match error.kind() {
            ErrorKind::Unreachable | ErrorKind::Lost => Status::NoBroker,
            // A broker that is short of memory answers all else.
            ErrorKind::TimedOut if error.blocked_by_broker().is_none() => Status::NoBroker,
            ErrorKind::Refused => Status::NotAllowed,
            ErrorKind::Invalid => Status::Wrong,
            _ => Status::Failed,
        };
        let failure = Failure::with(status, &error);
        match error.kind() {
            ErrorKind::Missing => {
                failure.and(". Is the name right, and the virtual host at the end of --url?")
            }
            _ => failure,
        }
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
