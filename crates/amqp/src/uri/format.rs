//! Options as a URI, for people to read in logs.

use std::fmt;
use std::path::PathBuf;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};

use super::parameters as name;
use crate::options::Options;

/// Escaped in user and virtual host: all but what RFC 3986 calls unreserved.
const COMPONENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Escaped in a parameter's value, where a slash is harmless and paths are frequent.
const VALUE: &AsciiSet = &COMPONENT.remove(b'/');

/// Escaped in an IPv6 address: the percent sign before its zone.
const ADDRESS: &AsciiSet = &COMPONENT.remove(b':');

/// The URI without the password. It parses, and to the same options as far as a URI can say them: the
/// password becomes the default one.
///
/// ```
/// let options = leveret_amqp::Options::from_uri("AMQP://shop:secret@host?heartbeat=05")?;
/// assert_eq!(options.to_string(), "amqp://shop@host:5672/%2F?heartbeat=5");
/// assert_eq!(format!("{options:#}"), "amqp://shop@host:5672/%2F");
/// # Ok::<(), leveret_amqp::UriError>(())
/// ```
///
/// With `#` it ends before the parameters: which broker it is, for errors.
impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.tls {
            _ if self.memory => "memory://",
            Some(_) => "amqps://",
            None => "amqp://",
        })?;
        if let Some(user) = self.auth_by_preference().find_map(|auth| auth.user()) {
            write!(f, "{}@", escape(user, COMPONENT))?;
        }
        match self.host.contains(':') {
            true => write!(f, "[{}]", escape(&self.host, ADDRESS))?,
            false => write!(f, "{}", escape(&self.host, COMPONENT))?,
        }
        let virtual_host = escape(&self.virtual_host, COMPONENT);
        if !self.memory {
            write!(f, ":{}", self.port)?;
        }
        write!(f, "/{virtual_host}")?;
        if f.alternate() {
            return Ok(());
        }
        for (index, (name, value)) in parameters(self).iter().enumerate() {
            let delimiter = if index == 0 { '?' } else { '&' };
            write!(f, "{delimiter}{name}={}", escape(value, VALUE))?;
        }
        Ok(())
    }
}

fn escape<'a>(text: &'a str, set: &'static AsciiSet) -> PercentEncode<'a> {
    utf8_percent_encode(text, set)
}

/// What differs from the defaults, in the order in which a person would write it.
fn parameters(options: &Options) -> Vec<(&'static str, String)> {
    let default = Options::default();
    let tls = options.tls.as_ref();
    let path = |file: Option<&PathBuf>| file.map(|path| path.to_string_lossy().into_owned());
    let unless_default = |value: u128, default: u128| (value != default).then(|| value.to_string());
    let timeouts = [options, &default].map(|options| options.connection_timeout.as_millis());
    let mechanisms: Vec<_> = options.auth_by_preference().map(|auth| auth.mechanism()).collect();
    let is_default = mechanisms == [default.auth.mechanism()];
    let mechanism = |mechanism: &str| (name::AUTH_MECHANISM, Some(mechanism.to_ascii_lowercase()));
    let limits = [
        (name::HEARTBEAT, options.heartbeat.map(|interval| interval.as_secs().to_string())),
        (name::CONNECTION_TIMEOUT, unless_default(timeouts[0], timeouts[1])),
        (name::CHANNEL_MAX, unless_default(options.channel_max.into(), default.channel_max.into())),
        (name::FRAME_MAX, unless_default(options.frame_max.into(), default.frame_max.into())),
    ];
    let others = [
        (name::CA_FILE, path(tls.and_then(|tls| tls.ca_file.as_ref()))),
        (name::CERT_FILE, path(tls.and_then(|tls| tls.cert_file.as_ref()))),
        (name::KEY_FILE, path(tls.and_then(|tls| tls.key_file.as_ref()))),
        (name::VERIFY, tls.filter(|tls| !tls.verify).map(|_| "verify_none".to_owned())),
        (name::SERVER_NAME, tls.and_then(|tls| tls.server_name.clone())),
        (name::CONNECTION_NAME, options.connection_name.clone()),
    ];
    let mechanisms = mechanisms.into_iter().filter(|_| !is_default).map(mechanism);
    let all = limits.into_iter().chain(mechanisms).chain(others);
    all.filter_map(|(name, value)| Some((name, value?))).collect()
}
