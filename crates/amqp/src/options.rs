//! What to connect to and how: all that can be chosen before a connection is opened.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use leveret_wire::FrameMax;

use super::limits::Limits;
use super::uri::{self, UriError};

/// How to reach a broker and what to agree on with it.
///
/// It comes from a URI, from [`Options::default`], or from either with fields changed:
///
/// ```
/// use std::time::Duration;
/// use leveret_amqp::{Auth, Options};
///
/// # fn main() -> Result<(), leveret_amqp::UriError> {
/// let mut options: Options = "amqp://shop:secret@rabbit.example/orders?heartbeat=20".parse()?;
/// options.connection_name = Some("order importer".to_owned());
///
/// assert_eq!(options.address(), ("rabbit.example", 5672));
/// assert_eq!(options.virtual_host, "orders");
/// assert_eq!(options.auth, Auth::plain("shop", "secret"));
/// assert_eq!(options.heartbeat, Some(Duration::from_secs(20)));
/// # Ok(())
/// # }
/// ```
///
/// The default is a broker on this machine, `amqp://guest:guest@localhost:5672/%2F`. `Display` gives
/// the URI without the password, fit for logs; `Debug` hides the password too.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// A name or an address; an IPv6 address without brackets.
    pub host: String,
    /// The TCP port: 5672 by default, 5671 in a URI that begins with `amqps://`.
    pub port: u16,
    /// The broker is in this process, and [`host`](Self::host) is its name: `memory://NAME`. It is made if there is none of
    /// that name. Needs the cargo feature `embedded`.
    pub memory: bool,
    /// The virtual host, `/` by default. At most 255 bytes.
    pub virtual_host: String,
    /// How to prove who is connecting.
    pub auth: Auth,
    /// What to use instead if the server does not offer [`auth`](Self::auth)'s mechanism, best first.
    /// Empty by default.
    pub auth_alternatives: Vec<Auth>,
    /// Whether and how to encrypt; `None`, the default, is plain TCP.
    pub tls: Option<Tls>,
    /// The heartbeat interval to ask for: a broker from which nothing comes for two intervals is dead, and one that
    /// a call or publish waits for is after one interval and two seconds. `None`, the default, is ten seconds, or what
    /// the server proposes if that is shorter or none. Zero asks for no heartbeats: then silence is not noticed. The
    /// shorter of the two sides' intervals holds. Whole seconds, at most 65535.
    pub heartbeat: Option<Duration>,
    /// How long connecting may take as a whole: dialling, TLS and the handshake.
    ///
    /// The default is ten seconds, since RabbitMQ gives up a handshake after that time, too.
    pub connection_timeout: Duration,
    /// How many channels to ask for; the server may grant fewer. 2047 by default, 0 is no limit.
    ///
    /// With some hundreds more than are open at a time, the number of a channel that the server has closed rests before
    /// it is used again, and nothing that the server sends late for it is taken for the next one's.
    pub channel_max: u16,
    /// The largest frame in bytes to ask for; the server may grant less. 131072 by default, 0 is no
    /// limit, and 4096 is the least that the protocol knows.
    pub frame_max: u32,
    /// What the server's logs and management pages call the connection.
    pub connection_name: Option<String>,
    /// Deadlines and bounds once it is open. Not part of the URI.
    pub limits: Limits,
}

impl Options {
    /// The port of AMQP without encryption.
    pub const DEFAULT_PORT: u16 = 5672;

    /// The port of AMQP over TLS.
    pub const DEFAULT_TLS_PORT: u16 = 5671;

    /// Reads `amqp://user:password@host:port/vhost?parameter=value`, or the same with `amqps://`; or `memory://NAME`, which
    /// is the embedded broker of that name in this process.
    ///
    /// The rules are those of RabbitMQ's [URI specification]; every part after the scheme may be left
    /// out and has its default then. User, password, host, virtual host and values of parameters may be
    /// percent-encoded; a plus sign is a plus sign.
    ///
    /// - **Host:** an IPv6 address stands in brackets, a zone follows it as in `[fe80::1%25eth0]`.
    /// - **User and password:** the default for each that is absent is `guest`. Present and empty, as
    ///   both are in `amqp://:@host`, is not absent.
    /// - **Virtual host:** `amqp://host` is the virtual host `/`. So is `amqp://host/%2F`, but
    ///   `amqp://host/` names the one whose name is empty. That is the specification's word, although
    ///   some clients read it as `/`.
    /// - An `@` is allowed nowhere behind the host (write `%40`): it is the trace of a password with an
    ///   unescaped `/`, `?` or `#`, which would send what precedes it to the wrong host.
    ///
    /// # Parameters
    ///
    /// | name | value | needs `amqps` |
    /// |---|---|---|
    /// | `heartbeat` | seconds, 0 to 65535; 0 is none | |
    /// | `connection_timeout` | milliseconds, at least 1 | |
    /// | `channel_max` | 0 to 65535; 0 is no limit | |
    /// | `frame_max` | bytes, 4096 and more; 0 is no limit | |
    /// | `auth_mechanism` | `plain`, `amqplain` or `external`; given more than once, the first that the server offers is used | |
    /// | `connection_name` | any text | |
    /// | `cacertfile` | the authorities to trust instead of the system's | yes |
    /// | `certfile`, `keyfile` | the client's certificate and key, both or neither | yes |
    /// | `verify` | `verify_peer` (the default) or `verify_none` | yes |
    /// | `server_name_indication` | the name to ask for and to check the certificate against | yes |
    ///
    /// All but `connection_name` are those of RabbitMQ's own client. Any other is an error, and so is one
    /// given twice. With `external` alone, a user and password in the URI are not used and not kept.
    /// `server_name_indication=disable` is refused: it would skip the check of the server's name while
    /// looking like a detail. Say `verify_none` for that.
    ///
    /// # Errors
    /// [`UriError`] says which part is wrong and what is allowed there.
    ///
    /// ```
    /// use leveret_amqp::{Options, UriPart};
    ///
    /// let error = Options::from_uri("amqp://guest@localhost:70000").unwrap_err();
    /// assert_eq!(error.part(), UriPart::Port);
    /// assert_eq!(
    ///     error.to_string(),
    ///     r#"invalid AMQP URI: port "70000" is not a number from 1 to 65535"#
    /// );
    /// ```
    ///
    /// [URI specification]: https://www.rabbitmq.com/docs/uri-spec
    pub fn from_uri(uri: &str) -> Result<Self, UriError> {
        uri::parse(uri)
    }

    /// Host and port, as dialling takes them.
    pub fn address(&self) -> (&str, u16) {
        (&self.host, self.port)
    }

    /// The name that the server's certificate has to be made out to: [`Tls::server_name`] if one is
    /// given, else the host, without the zone of an IPv6 address, which is this machine's affair.
    ///
    /// ```
    /// let options = leveret_amqp::Options::from_uri("amqps://[fe80::1%25eth0]")?;
    /// assert_eq!(options.host, "fe80::1%eth0");
    /// assert_eq!(options.server_name(), "fe80::1");
    /// # Ok::<(), leveret_amqp::UriError>(())
    /// ```
    pub fn server_name(&self) -> &str {
        let given = self.tls.as_ref().and_then(|tls| tls.server_name.as_deref());
        given.unwrap_or_else(|| match self.host.split_once('%') {
            Some((address, _zone)) => address,
            None => &self.host,
        })
    }

    /// The first of [`auth`](Self::auth) and [`auth_alternatives`](Self::auth_alternatives) that is
    /// among the mechanisms a server offers, which it names with blanks between them.
    ///
    /// ```
    /// use leveret_amqp::{Auth, Options};
    ///
    /// let mut options = Options::default();
    /// options.auth = Auth::External;
    /// options.auth_alternatives = vec![Auth::plain("shop", "secret")];
    /// assert_eq!(options.choose_auth("PLAIN EXTERNAL"), Some(&Auth::External));
    /// assert_eq!(options.choose_auth("AMQPLAIN PLAIN"), Some(&Auth::plain("shop", "secret")));
    /// assert_eq!(options.choose_auth("AMQPLAIN"), None);
    /// ```
    pub fn choose_auth(&self, offered: &str) -> Option<&Auth> {
        self.auth_by_preference()
            .find(|auth| offered.split_ascii_whitespace().any(|name| name == auth.mechanism()))
    }

    pub(super) fn auth_by_preference(&self) -> impl Iterator<Item = &Auth> {
        std::iter::once(&self.auth).chain(&self.auth_alternatives)
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            host: "localhost".to_owned(),
            port: Self::DEFAULT_PORT,
            memory: false,
            virtual_host: "/".to_owned(),
            auth: Auth::default(),
            auth_alternatives: Vec::new(),
            tls: None,
            heartbeat: None,
            connection_timeout: Duration::from_secs(10),
            channel_max: 2047,
            frame_max: FrameMax::DEFAULT.get(),
            connection_name: None,
            limits: Limits::default(),
        }
    }
}

/// By [`Options::from_uri`].
impl FromStr for Options {
    type Err = UriError;

    fn from_str(uri: &str) -> Result<Self, UriError> {
        Options::from_uri(uri)
    }
}

/// How a client proves who it is: a SASL mechanism with what it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Auth {
    /// User and password in the form that every server takes.
    Plain {
        /// Who connects.
        user: String,
        /// With which password.
        password: Password,
    },
    /// User and password in AMQP's older form, a table.
    AmqPlain {
        /// Who connects.
        user: String,
        /// With which password.
        password: Password,
    },
    /// What the transport has proved already, which is the client's certificate with TLS.
    External,
}

impl Auth {
    /// User and password by the mechanism PLAIN.
    pub fn plain(user: impl Into<String>, password: impl Into<Password>) -> Self {
        Auth::Plain { user: user.into(), password: password.into() }
    }

    /// The mechanism's name on the wire.
    pub fn mechanism(&self) -> &'static str {
        match self {
            Auth::Plain { .. } => "PLAIN",
            Auth::AmqPlain { .. } => "AMQPLAIN",
            Auth::External => "EXTERNAL",
        }
    }

    /// Who connects, unless only the certificate says so.
    pub fn user(&self) -> Option<&str> {
        match self {
            Auth::Plain { user, .. } | Auth::AmqPlain { user, .. } => Some(user),
            Auth::External => None,
        }
    }
}

/// RabbitMQ's default user, `guest` with the password `guest`, whom it lets in from its own machine only.
impl Default for Auth {
    fn default() -> Self {
        Auth::plain("guest", "guest")
    }
}

/// A password: shown as `[hidden]`, however it is printed.
///
/// ```
/// use leveret_amqp::Password;
///
/// let password = Password::from("hunter2");
/// assert_eq!(format!("{password} {password:?}"), "[hidden] [hidden]");
/// assert_eq!(password.expose(), "hunter2");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Password {
    /// The password itself, for whoever has to send it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Password {
    fn from(password: String) -> Self {
        Password(password)
    }
}

impl From<&str> for Password {
    fn from(password: &str) -> Self {
        Password(password.to_owned())
    }
}

impl fmt::Display for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[hidden]")
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[hidden]")
    }
}

/// What TLS is to trust and to show. The files are read when a connection is opened.
///
/// The default trusts the system's authorities, checks the server's name, and shows no certificate.
///
/// ```
/// use leveret_amqp::{Options, Tls};
///
/// let mut tls = Tls::default();
/// tls.ca_file = Some("/etc/shop/ca.pem".into());
/// let mut options = Options::default();
/// options.port = Options::DEFAULT_TLS_PORT;
/// options.tls = Some(tls);
/// assert_eq!(
///     options.to_string(),
///     "amqps://guest@localhost:5671/%2F?cacertfile=/etc/shop/ca.pem"
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tls {
    /// The authorities to trust instead of the system's, in PEM.
    pub ca_file: Option<PathBuf>,
    /// The client's certificate with what links it to its authority, in PEM. Needs a key.
    pub cert_file: Option<PathBuf>,
    /// The key of the client's certificate, in PEM and not encrypted. Needs a certificate.
    pub key_file: Option<PathBuf>,
    /// Whether to check the server's certificate and the name in it. Without that check, anyone on the
    /// way can read and change everything, the password included.
    pub verify: bool,
    /// The name to ask the server for and to check its certificate against, if it is not the host.
    pub server_name: Option<String>,
}

impl Default for Tls {
    fn default() -> Self {
        Tls { ca_file: None, cert_file: None, key_file: None, verify: true, server_name: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_what_its_uri_says() {
        let uri = "amqp://guest:guest@localhost:5672/%2F";
        assert_eq!(Options::from_uri(uri), Ok(Options::default()));
        assert_eq!(Options::from_uri("amqp://"), Ok(Options::default()));
    }

    #[test]
    fn debug_shows_the_user_and_not_the_password() {
        let mut options = Options::from_uri("amqp://shop:hunter2@host").unwrap();
        options
            .auth_alternatives
            .push(Auth::AmqPlain { user: "shop".to_owned(), password: "hunter3".into() });
        let shown = format!("{options:?} {options:#?} {options}");
        assert!(shown.contains("shop"), "{shown}");
        assert!(!shown.contains("hunter"), "{shown}");
    }

    #[test]
    fn the_servers_name_is_the_host_unless_another_is_given() {
        let cases = [
            ("amqps://rabbit.example", "rabbit.example"),
            ("amqps://[::1]", "::1"),
            ("amqps://10.0.0.1?server_name_indication=rabbit", "rabbit"),
        ];
        for (uri, name) in cases {
            assert_eq!(Options::from_uri(uri).unwrap().server_name(), name, "{uri}");
        }
    }
}
