//! Options as a URI, for people to read in logs.

use std::fmt;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};

use super::parameters as name;
use crate::options::{Options, Tls};

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
    let mut list = Vec::new();
    if let Some(heartbeat) = options.heartbeat {
        list.push((name::HEARTBEAT, heartbeat.as_secs().to_string()));
    }
    if options.connection_timeout != default.connection_timeout {
        let milliseconds = options.connection_timeout.as_millis();
        list.push((name::CONNECTION_TIMEOUT, milliseconds.to_string()));
    }
    if options.channel_max != default.channel_max {
        list.push((name::CHANNEL_MAX, options.channel_max.to_string()));
    }
    if options.frame_max != default.frame_max {
        list.push((name::FRAME_MAX, options.frame_max.to_string()));
    }
    let mechanisms: Vec<_> = options.auth_by_preference().map(|auth| auth.mechanism()).collect();
    if mechanisms != [default.auth.mechanism()] {
        let named = |mechanism: &str| (name::AUTH_MECHANISM, mechanism.to_ascii_lowercase());
        list.extend(mechanisms.into_iter().map(named));
    }
    if let Some(tls) = &options.tls {
        tls_parameters(tls, &mut list);
    }
    if let Some(connection_name) = &options.connection_name {
        list.push((name::CONNECTION_NAME, connection_name.clone()));
    }
    list
}

fn tls_parameters(tls: &Tls, list: &mut Vec<(&'static str, String)>) {
    let files = [
        (name::CA_FILE, &tls.ca_file),
        (name::CERT_FILE, &tls.cert_file),
        (name::KEY_FILE, &tls.key_file),
    ];
    for (name, file) in files {
        if let Some(path) = file {
            list.push((name, path.to_string_lossy().into_owned()));
        }
    }
    if !tls.verify {
        list.push((name::VERIFY, "verify_none".to_owned()));
    }
    if let Some(server_name) = &tls.server_name {
        list.push((name::SERVER_NAME, server_name.clone()));
    }
}
