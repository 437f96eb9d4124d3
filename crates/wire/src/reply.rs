//! The codes with which a peer closes a channel or connection, or returns a message.

use std::fmt;

/// An AMQP reply code, such as `404 NOT_FOUND`.
///
/// A newtype and not an enum, because a peer may send a code that nobody has heard of.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
pub struct ReplyCode(pub u16);

/// What a reply code takes down with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// A soft error: the channel is closed, the connection and its other channels go on.
    Channel,
    /// A hard error: the whole connection is closed.
    Connection,
}

macro_rules! reply_codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $scope:expr;)*) => {
        impl ReplyCode {
            $($(#[$doc])* pub const $name: ReplyCode = ReplyCode($code);)*

            /// The code's name in the specification, if it has one.
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($code => Some(stringify!($name)),)*
                    _ => None,
                }
            }

            /// What the code takes down, if it is the code of an error that the specification knows.
            pub fn scope(self) -> Option<Scope> {
                match self.0 {
                    $($code => $scope,)*
                    _ => None,
                }
            }
        }
    };
}

reply_codes! {
    /// Not an error: the close was asked for.
    SUCCESS = 200, None;
    /// A message was larger than the peer takes.
    CONTENT_TOO_LARGE = 311, Some(Scope::Channel);
    /// A mandatory message reached no queue.
    NO_ROUTE = 312, Some(Scope::Channel);
    /// An immediate message found no consumer. RabbitMQ never sends it.
    NO_CONSUMERS = 313, Some(Scope::Channel);
    /// An operator closed the connection, or the node is shutting down.
    CONNECTION_FORCED = 320, Some(Scope::Connection);
    /// An unknown virtual host, in older brokers.
    INVALID_PATH = 402, Some(Scope::Connection);
    /// Wrong credentials, or no permission.
    ACCESS_REFUSED = 403, Some(Scope::Channel);
    /// No such exchange or queue.
    NOT_FOUND = 404, Some(Scope::Channel);
    /// The queue belongs to another connection.
    RESOURCE_LOCKED = 405, Some(Scope::Channel);
    /// The object exists with other arguments, a delivery tag is unknown, a message is too large…
    PRECONDITION_FAILED = 406, Some(Scope::Channel);
    /// A frame was malformed.
    FRAME_ERROR = 501, Some(Scope::Connection);
    /// A frame held values that cannot be.
    SYNTAX_ERROR = 502, Some(Scope::Connection);
    /// A method came that is not valid at this point.
    COMMAND_INVALID = 503, Some(Scope::Connection);
    /// A method came on a channel that is not open.
    CHANNEL_ERROR = 504, Some(Scope::Connection);
    /// A frame came that does not fit the one before.
    UNEXPECTED_FRAME = 505, Some(Scope::Connection);
    /// The peer lacks a resource.
    RESOURCE_ERROR = 506, Some(Scope::Connection);
    /// The peer may not do that, whatever its permissions; or there is no such virtual host.
    NOT_ALLOWED = 530, Some(Scope::Connection);
    /// The method is not implemented.
    NOT_IMPLEMENTED = 540, Some(Scope::Connection);
    /// The peer failed for a reason of its own.
    INTERNAL_ERROR = 541, Some(Scope::Connection);
}

impl Default for ReplyCode {
    fn default() -> Self {
        ReplyCode::SUCCESS
    }
}

impl fmt::Display for ReplyCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{} {name}", self.0),
            None => write!(f, "{}", self.0),
        }
    }
}

impl fmt::Debug for ReplyCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_code_has_a_name_and_a_scope() {
        assert_eq!(ReplyCode::NOT_FOUND.to_string(), "404 NOT_FOUND");
        assert_eq!(ReplyCode::NOT_FOUND.scope(), Some(Scope::Channel));
        assert_eq!(ReplyCode::NOT_ALLOWED.scope(), Some(Scope::Connection));
        assert_eq!(ReplyCode::SUCCESS.scope(), None);
    }

    #[test]
    fn an_unknown_code_is_shown_as_a_number() {
        assert_eq!(ReplyCode(999).to_string(), "999");
        assert_eq!(ReplyCode(999).scope(), None);
    }
}
