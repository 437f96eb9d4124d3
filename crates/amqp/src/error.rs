//! What can go wrong on a connection.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leveret_wire::{DecodeError, EncodeError, InvalidValue, Method, ReplyCode};

use crate::text::escape;

/// Why something on a connection failed.
///
/// Its text includes that of its cause, so [`source`](StdError::source) goes on with what the text does not say yet, as it does
/// for [`std::io::Error`]; [`get_ref`](Self::get_ref) is the cause itself.
///
/// It clones cheaply, because one cause often ends many calls: a closed connection fails everything that
/// waits on it, and every one of them is told why.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: ErrorKind,
    /// What was attempted, or what happened, for a person.
    text: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The kinds of errors, for a program to branch on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No connection could be made: name resolution, refused, unreachable.
    Dial,
    /// TLS failed: files that cannot be read, a certificate that is not trusted, a wrong name, a port without TLS.
    Tls,
    /// The broker does not know the user, or the password is wrong.
    Authentication,
    /// The broker refused the virtual host.
    VirtualHost,
    /// Something did not happen in time.
    Timeout,
    /// The broker sent what AMQP 0-9-1 does not allow.
    Protocol,
    /// The connection broke: reset, end of stream.
    ConnectionLost,
    /// The broker has fallen silent: nothing was heard from it for two heartbeat intervals, or it left a question unanswered
    /// for more than one.
    HeartbeatLost,
    /// The broker closed the connection, with this code.
    ConnectionClosed(ReplyCode),
    /// The broker closed the channel, with this code.
    ChannelClosed(ReplyCode),
    /// This side closed the channel before.
    ChannelClosedHere,
    /// This side closed the connection before.
    ConnectionClosedHere,
    /// All channels of the connection are in use.
    ChannelLimit,
    /// An argument that AMQP cannot carry: a name over 255 bytes, headers over a frame.
    InvalidArgument,
    /// The broker ended a consumer: its queue was deleted, or its node failed.
    ConsumerCancelled,
    /// A consumer did not keep up, and was ended so that it does not stall the others.
    ConsumerTooSlow,
    /// The delivery cannot be settled any more: it was settled together with a later one, or it is to be delivered anew
    /// after a recover. Nothing was sent.
    Stale,
}

impl Error {
    #[doc(hidden)]
    pub fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Error(Arc::new(Inner { kind, text: text.into(), source: None }))
    }

    #[doc(hidden)]
    pub fn caused(
        kind: ErrorKind,
        text: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Error(Arc::new(Inner { kind, text: text.into(), source: Some(source.into()) }))
    }

    /// The broker does not know a consumer that is consuming as far as this side knows.
    #[doc(hidden)]
    pub fn unknown_consumer() -> Self {
        Error::new(ErrorKind::ConsumerCancelled, "the broker does not know the consumer any more")
    }

    #[doc(hidden)]
    pub fn timeout(what: impl fmt::Display, after: Duration) -> Self {
        Error::new(ErrorKind::Timeout, format!("{what} took longer than {after:?}"))
    }

    pub(crate) fn protocol(what: impl Into<String>) -> Self {
        Error::new(ErrorKind::Protocol, what)
    }

    /// The kind, to branch on.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The same, with what was attempted before it.
    pub(crate) fn within(self, what: impl Into<String>) -> Self {
        Error::caused(self.kind(), what, self)
    }

    /// The error behind this one, if there is one: of the system, of TLS, of the codec.
    pub fn get_ref(&self) -> Option<&(dyn StdError + Send + Sync + 'static)> {
        self.0.source.as_deref()
    }

    /// The broker's code, if it closed the channel or connection with one.
    pub fn reply_code(&self) -> Option<ReplyCode> {
        match self.0.kind {
            ErrorKind::ConnectionClosed(code) | ErrorKind::ChannelClosed(code) => Some(code),
            _ => None,
        }
    }

    /// Whether the whole connection is gone, and not just a channel or a call.
    pub fn is_connection_error(&self) -> bool {
        matches!(
            self.0.kind,
            ErrorKind::Protocol
                | ErrorKind::ConnectionLost
                | ErrorKind::HeartbeatLost
                | ErrorKind::ConnectionClosed(_)
                | ErrorKind::ConnectionClosedHere
        )
    }
}

/// Why the broker has closed a channel or connection: a sentence where it has a usual reason, else its words.
pub(crate) fn closed_by_broker(scope: &str, close: &ClosedWith<'_>) -> Error {
    let ClosedWith { code, text, class, method } = *close;
    let kind = match scope {
        "channel" => ErrorKind::ChannelClosed(code),
        _ => ErrorKind::ConnectionClosed(code),
    };
    let missing = (code == ReplyCode::NOT_FOUND).then(|| missing_object(text)).flatten();
    Error::new(
        kind,
        missing.unwrap_or_else(|| {
            let reason = close_reason(code, text, class, method);
            format!("the broker closed the {scope}: {reason}")
        }),
    )
}

/// What a close says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClosedWith<'a> {
    pub(crate) code: ReplyCode,
    pub(crate) text: &'a str,
    pub(crate) class: u16,
    pub(crate) method: u16,
}

/// Of RabbitMQ's `NOT_FOUND - no queue 'q' in vhost '/'`: there is no queue "q" in virtual host "/".
fn missing_object(text: &str) -> Option<String> {
    let text = text.strip_prefix("NOT_FOUND - ").unwrap_or(text).strip_prefix("no ")?;
    let (kind, rest) = text.split_once(" '")?;
    let (name, vhost) = rest.strip_suffix('\'')?.rsplit_once("' in vhost '")?;
    matches!(kind, "queue" | "exchange")
        .then(|| format!("there is no {kind} {name:?} in virtual host {vhost:?}"))
}

/// `403 ACCESS_REFUSED in queue.declare: access to queue 'q' in vhost '/' refused for user 'guest'`
#[doc(hidden)]
pub fn close_reason(code: ReplyCode, text: &str, class: u16, method: u16) -> String {
    // RabbitMQ begins the text with the code's name; once is enough.
    let name = code.name().unwrap_or_default();
    let text = text.strip_prefix(name).map_or(text, |rest| rest.trim_start_matches(" - "));
    let blame = Method::name_of(class, method).map_or(String::new(), |name| format!(" in {name}"));
    if text.is_empty() { format!("{code}{blame}") } else { format!("{code}{blame}: {text}") }
}

/// The first of these causes that a text does not include.
#[doc(hidden)]
pub fn next_cause<'e>(
    text: &str,
    cause: &'e (dyn StdError + 'static),
) -> Option<&'e (dyn StdError + 'static)> {
    let mut next = Some(cause);
    while let Some(said) = next.filter(|cause| text.contains(&cause.to_string())) {
        next = said.source();
    }
    next
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Words of the broker's are among it.
        f.write_str(&escape(&self.0.text))?;
        match &self.0.source {
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
        next_cause(&self.to_string(), self.0.source.as_deref()?)
    }
}

impl From<DecodeError> for Error {
    fn from(error: DecodeError) -> Self {
        Error::caused(ErrorKind::Protocol, "the broker sent what is not AMQP 0-9-1", error)
    }
}

impl From<EncodeError> for Error {
    fn from(error: EncodeError) -> Self {
        Error::caused(ErrorKind::InvalidArgument, "cannot be sent", error)
    }
}

impl From<InvalidValue> for Error {
    fn from(error: InvalidValue) -> Self {
        Error::caused(ErrorKind::InvalidArgument, "cannot be sent", error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closed(code: ReplyCode, text: &str) -> String {
        let close = ClosedWith { code, text, class: 50, method: 10 };
        closed_by_broker("channel", &close).to_string()
    }

    #[test]
    fn a_missing_object_is_told_in_a_sentence() {
        let said = closed(ReplyCode::NOT_FOUND, "NOT_FOUND - no queue 'it's' in vhost '/'");
        assert_eq!(said, "there is no queue \"it's\" in virtual host \"/\"");
        let said = closed(ReplyCode::NOT_FOUND, "NOT_FOUND - no exchange 'x' in vhost 'shop'");
        assert_eq!(said, "there is no exchange \"x\" in virtual host \"shop\"");
        let said = closed(ReplyCode::NOT_FOUND, "NOT_FOUND - something else");
        assert_eq!(
            said,
            "the broker closed the channel: 404 NOT_FOUND in queue.declare: something else"
        );
    }

    #[test]
    fn words_of_the_broker_cannot_move_the_cursor_or_forge_a_line() {
        let said = closed(ReplyCode::ACCESS_REFUSED, "no\r\n\u{1b}[2J\u{202e}");
        assert!(said.ends_with(r"no\r\n\u{1b}[2J\u{202e}"), "{said}");
    }
}
