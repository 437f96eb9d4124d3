//! What can go wrong for an application.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::amqp::{self, ReplyCode, Returned};
use crate::text::{escape, escape_lines};

mod conflict;
mod remote;

pub use conflict::Conflict;
pub use remote::RemoteError;

/// Any error, as handlers return it.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// Why something failed: what was attempted, on what, and what the broker said.
///
/// It clones cheaply: what ends many calls tells each of them why. Programs branch on [`Error::kind`].
///
/// Its text includes that of its cause, so [`source`](StdError::source) goes on with what the text does not say yet, as it does
/// for [`std::io::Error`]; [`get_ref`](Self::get_ref) is the cause itself.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: ErrorKind,
    /// What was attempted, for a person.
    text: String,
    detail: Detail,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// What a program may want to look at, beyond the kind.
enum Detail {
    None,
    Conflicts(Vec<Conflict>),
    Returned(Box<Returned>),
    Blocked(String),
    Remote(RemoteError),
}

/// The kinds of errors, for a program to branch on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No broker could be connected to.
    Unreachable,
    /// The broker does not let this user in, or not do this.
    Refused,
    /// The application closed what it then used.
    Closed,
    /// It did not happen in time. What was sent may still happen.
    TimedOut,
    /// The connection or channel went before the broker answered: it may have happened, or not.
    Lost,
    /// The broker has an object of this name with other parameters. See [`Error::conflicts`].
    Conflict,
    /// The queue or exchange does not exist.
    Missing,
    /// The message reached no queue. See [`Error::returned`].
    Unroutable,
    /// The broker could not take the message: a queue is full, or its node failed.
    Nacked,
    /// The delivery can no longer be settled: its channel is gone, or it was settled before. The broker delivers it
    /// again, if it was not.
    Stale,
    /// What was asked for cannot be: a name that is too long, a value out of range, a file with a mistake.
    Invalid,
    /// A file or another stream cannot be read or written.
    Io,
    /// A body is not what its reader expects.
    Payload,
    /// A handler panicked.
    Panicked,
    /// The service that was called has answered with an error. See [`Error::remote`].
    Remote,
    /// The broker closed the channel or connection for another reason, see [`Error::reply_code`]; or it keeps a queue's messages
    /// for another consumer.
    Broker,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Error::with(kind, text, Detail::None, None)
    }

    pub(crate) fn caused(
        kind: ErrorKind,
        text: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Error::with(kind, text, Detail::None, Some(source.into()))
    }

    fn with(
        kind: ErrorKind,
        text: impl Into<String>,
        detail: Detail,
        source: Option<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Error(Arc::new(Inner { kind, text: text.into(), detail, source }))
    }

    /// What an error of the connection means for what was attempted.
    pub(crate) fn from_amqp(what: impl Into<String>, error: amqp::Error) -> Self {
        Error::caused(kind_of(&error), what, error)
    }

    pub(crate) fn timed_out(what: impl fmt::Display, after: Duration) -> Self {
        Error::new(ErrorKind::TimedOut, format!("{what} took longer than {after:?}"))
    }

    /// The same, because the broker takes no publishes.
    pub(crate) fn blocked(what: impl fmt::Display, after: Duration, reason: String) -> Self {
        let text = format!(
            "{what} took longer than {after:?}: blocked by the broker: {}",
            escape(&reason)
        );
        Error::with(ErrorKind::TimedOut, text, Detail::Blocked(reason), None)
    }

    pub(crate) fn caused_by_block(
        what: impl fmt::Display,
        source: amqp::Error,
        reason: String,
    ) -> Self {
        let text = format!("{what} is blocked by the broker: {}", escape(&reason));
        Error::with(kind_of(&source), text, Detail::Blocked(reason), Some(source.into()))
    }

    /// A call or a publish waits for a broker that has fallen silent.
    pub(crate) fn unanswered(endpoint: &str) -> Self {
        Error::new(ErrorKind::TimedOut, format!("{endpoint} does not answer, and was asked to"))
    }

    /// The last of so many attempts failed with this error.
    pub(crate) fn after_attempts(self, attempts: u32, elapsed: Duration) -> Self {
        if attempts == 1 {
            return self;
        }
        let text = format!("gave up after {attempts} attempts in {:.0?}", elapsed);
        Error::caused(self.kind(), text, self)
    }

    pub(crate) fn closed(what: impl fmt::Display) -> Self {
        Error::new(ErrorKind::Closed, format!("{what} was closed"))
    }

    /// A task that works for others was dropped before it was done.
    pub(crate) fn ended_with_its_runtime(what: impl fmt::Display) -> Self {
        let text = format!(
            "{what}: the runtime in which the client connected has ended; connect in one that lives as long as the client is used"
        );
        Error::new(ErrorKind::Closed, text)
    }

    pub(crate) fn conflicting(text: impl Into<String>, conflicts: Vec<Conflict>) -> Self {
        Error::with(ErrorKind::Conflict, text, Detail::Conflicts(conflicts), None)
    }

    pub(crate) fn unroutable(text: impl Into<String>, returned: Box<Returned>) -> Self {
        Error::with(ErrorKind::Unroutable, text, Detail::Returned(returned), None)
    }

    pub(crate) fn remote_error(what: impl fmt::Display, error: RemoteError) -> Self {
        let text = format!("{what} failed there: {}", escape(&error.to_string()));
        Error::with(ErrorKind::Remote, text, Detail::Remote(error), None)
    }

    /// What was asked for cannot be: for those who write arguments of handlers, see [`FromIncoming`](crate::FromIncoming).
    pub fn invalid(text: impl Into<String>) -> Self {
        Error::new(ErrorKind::Invalid, text)
    }

    /// The kind, to branch on.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Where the broker has something else than was declared, if that is what failed.
    pub fn conflicts(&self) -> &[Conflict] {
        match &self.0.detail {
            Detail::Conflicts(conflicts) => conflicts,
            _ => &[],
        }
    }

    /// Whether a queue was refused only because it is there with another type, which may serve as well.
    pub(crate) fn is_of_other_type(&self) -> bool {
        let of_type = ["x-queue-type", "x-overflow", "x-dead-letter-strategy", "x-delivery-limit"];
        self.kind() == ErrorKind::Conflict
            && self.conflicts().iter().all(|found| of_type.contains(&found.argument.as_str()))
    }

    /// The message that the broker sent back, if that is what failed.
    pub fn returned(&self) -> Option<&Returned> {
        match &self.0.detail {
            Detail::Returned(returned) => Some(returned),
            _ => None,
        }
    }

    /// Why the broker takes no publishes, in its words (`low on memory`), if that is what a publish has waited for.
    pub fn blocked_by_broker(&self) -> Option<&str> {
        match &self.0.detail {
            Detail::Blocked(reason) => Some(reason),
            _ => None,
        }
    }

    /// What the service that was called has answered, if that is an error.
    pub fn remote(&self) -> Option<&RemoteError> {
        match &self.0.detail {
            Detail::Remote(error) => Some(error),
            _ => None,
        }
    }

    /// The broker's code, if it closed the channel or connection with one.
    pub fn reply_code(&self) -> Option<ReplyCode> {
        self.amqp()?.reply_code()
    }

    /// The error behind this one, if there is one: of the connection, of a format, of the application.
    pub fn get_ref(&self) -> Option<&(dyn StdError + Send + Sync + 'static)> {
        self.0.source.as_deref()
    }

    /// The error of the connection behind this one, if there is one.
    pub(crate) fn amqp(&self) -> Option<&amqp::Error> {
        let source = self.0.source.as_deref()?;
        source.downcast_ref().or_else(|| source.downcast_ref::<Error>()?.amqp())
    }
}

fn kind_of(error: &amqp::Error) -> ErrorKind {
    use amqp::ErrorKind as Amqp;
    match error.kind() {
        Amqp::Dial | Amqp::Tls => ErrorKind::Unreachable,
        Amqp::Authentication | Amqp::VirtualHost => ErrorKind::Refused,
        Amqp::Timeout => ErrorKind::TimedOut,
        Amqp::ConnectionLost | Amqp::HeartbeatLost | Amqp::Protocol => ErrorKind::Lost,
        Amqp::ConnectionClosedHere | Amqp::ChannelClosedHere => ErrorKind::Lost,
        Amqp::ConsumerCancelled | Amqp::ConsumerTooSlow => ErrorKind::Lost,
        Amqp::InvalidArgument => ErrorKind::Invalid,
        Amqp::Stale => ErrorKind::Stale,
        Amqp::ChannelClosed(ReplyCode::NOT_FOUND) => ErrorKind::Missing,
        Amqp::ChannelClosed(ReplyCode::ACCESS_REFUSED) => ErrorKind::Refused,
        Amqp::ConnectionClosed(ReplyCode::CONNECTION_FORCED) => ErrorKind::Lost,
        _ => ErrorKind::Broker,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Words of the broker's, of a service's and of a message's are among it. An error may have several lines.
        f.write_str(&escape_lines(&self.0.text))?;
        match &self.0.source {
            Some(source) => write!(f, ": {}", escape_lines(&source.to_string())),
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
        amqp::next_cause(&self.to_string(), self.0.source.as_deref()?)
    }
}

/// For `?` where the engine is used, on a channel of a [pool](crate::ChannelPool) for instance.
impl From<amqp::Error> for Error {
    fn from(error: amqp::Error) -> Self {
        Error::from_amqp("AMQP", error)
    }
}

impl From<amqp::UriError> for Error {
    fn from(error: amqp::UriError) -> Self {
        Error::caused(ErrorKind::Invalid, "the broker's address", error)
    }
}
