//! What is wrong with a URI, said without giving away what is secret in it.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

/// How much of a wrong value is quoted, so that a file pasted for a URI does not fill a log.
const MAX_QUOTED: usize = 80;

/// A URI that cannot be used: which part of it, and what is allowed there.
///
/// The wrong value is quoted where it is not part of a password. That leaves out user and password, which
/// is all before the last `@`, and everything in a URI with a colon and no `@`, such as
/// `amqp://shop:70000`: it may be a user and a password whose host was forgotten.
///
/// ```
/// use leveret_amqp::{Options, UriPart};
///
/// let error = "amqps://shop:secret@host?verify=no".parse::<Options>().unwrap_err();
/// assert_eq!(error.part(), UriPart::Parameter("verify"));
/// assert_eq!(error.value(), Some("no"));
/// assert_eq!(
///     error.to_string(),
///     r#"invalid AMQP URI: parameter verify "no" is neither verify_peer nor verify_none"#
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UriError {
    part: UriPart,
    value: Option<String>,
    /// Continues a sentence that begins with the part; never quotes the URI.
    reason: Cow<'static, str>,
}

/// The parts of an AMQP URI that can be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UriPart {
    /// What is before `://`.
    Scheme,
    /// What is before the first colon of the credentials.
    User,
    /// What is between that colon and the `@`.
    Password,
    /// The name or address of the server.
    Host,
    /// The number after it.
    Port,
    /// What is between the slash after the host and the question mark.
    VirtualHost,
    /// The parameter with this name.
    Parameter(&'static str),
    /// A parameter with a name that means nothing here.
    UnknownParameter,
    /// What follows a `#`.
    Fragment,
}

impl UriError {
    pub(super) fn new(part: UriPart, reason: impl Into<Cow<'static, str>>) -> Self {
        UriError { part, value: None, reason: reason.into() }
    }

    /// Quotes the value. Only for what is neither user nor password.
    pub(super) fn quoting(mut self, value: &str) -> Self {
        let mut quoted: String = value.chars().take(MAX_QUOTED).collect();
        if quoted.len() < value.len() {
            quoted.push('…');
        }
        self.value = Some(quoted);
        self
    }

    pub(super) fn without_value(mut self) -> Self {
        self.value = None;
        self
    }

    /// Which part is wrong.
    pub fn part(&self) -> UriPart {
        self.part
    }

    /// What is there, where that can be said without giving away a password; of a long value the
    /// beginning.
    pub fn value(&self) -> Option<&str> {
        self.value.as_deref()
    }
}

impl fmt::Display for UriError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid AMQP URI: {}", self.part)?;
        if let Some(value) = &self.value {
            write!(f, " {value:?}")?;
        }
        write!(f, " {}", self.reason)
    }
}

impl Error for UriError {}

impl fmt::Display for UriPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            UriPart::Scheme => "scheme",
            UriPart::User => "user",
            UriPart::Password => "password",
            UriPart::Host => "host",
            UriPart::Port => "port",
            UriPart::VirtualHost => "virtual host",
            UriPart::Parameter(name) => return write!(f, "parameter {name}"),
            UriPart::UnknownParameter => "parameter",
            UriPart::Fragment => "fragment",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_value_is_cut_between_characters() {
        let whole = UriError::new(UriPart::Host, "is odd").quoting(&"é".repeat(MAX_QUOTED));
        assert_eq!(whole.value().unwrap(), "é".repeat(MAX_QUOTED));
        let cut = UriError::new(UriPart::Host, "is odd").quoting(&"é".repeat(MAX_QUOTED + 1));
        assert_eq!(cut.value().unwrap(), "é".repeat(MAX_QUOTED) + "…");
    }

    #[test]
    fn what_is_invisible_in_a_value_is_escaped_when_shown() {
        let error = UriError::new(UriPart::Host, "is odd").quoting("host\n\u{1b}[31m");
        assert_eq!(error.to_string(), r#"invalid AMQP URI: host "host\n\u{1b}[31m" is odd"#);
    }
}
