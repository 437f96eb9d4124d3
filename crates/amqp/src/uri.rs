//! AMQP URIs, by the specification that RabbitMQ publishes.
//!
//! ```text
//! amqps://user:password@host:5671/vhost?heartbeat=20&verify=verify_peer
//! scheme  └──────────┬──────────┘ │     └ parameters.rs
//!                authority        virtual host: one segment, "/" if there is none
//! ```
//!
//! The parts are cut out first and percent-decoded after, so that an escaped delimiter never delimits.

mod error;
mod format;
mod parameters;

use std::net::Ipv6Addr;

use leveret_wire::ShortStr;
use percent_encoding::percent_decode_str;

use super::options::{Auth, Options, Password, Tls};
pub use error::{UriError, UriPart};

/// How a URI begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scheme {
    Amqp,
    Amqps,
    Memory,
}

/// What a URI says for each part; `None` where it is absent.
struct Parts<'a> {
    scheme: Scheme,
    userinfo: Option<&'a str>,
    host_and_port: &'a str,
    virtual_host: Option<&'a str>,
    query: &'a str,
    /// Whether errors may quote the URI: see [`may_quote`].
    quotable: bool,
}

pub(super) fn parse(uri: &str) -> Result<Options, UriError> {
    let parts = split(uri)?;
    read(&parts).map_err(|error| match error.part() {
        _ if parts.quotable => error,
        UriPart::Port => UriError::new(
            UriPart::Port,
            "is not a number from 1 to 65535; if it is a password, an @ and the host have to follow it",
        ),
        _ => error.without_value(),
    })
}

fn split(uri: &str) -> Result<Parts<'_>, UriError> {
    let (scheme, rest) = scheme(uri)?;
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, tail) = rest.split_at(end);
    refuse_misplaced_delimiters(tail)?;
    let (path, query) = tail.split_once('?').unwrap_or((tail, ""));
    // The last @, because an unescaped one can only be in the password.
    let (userinfo, host_and_port) = match authority.rsplit_once('@') {
        Some((userinfo, host_and_port)) => (Some(userinfo), host_and_port),
        None => (None, authority),
    };
    Ok(Parts {
        scheme,
        userinfo,
        host_and_port,
        virtual_host: path.strip_prefix('/'),
        query,
        quotable: may_quote(userinfo, rest),
    })
}

/// Whether what is not `userinfo` is no password either.
///
/// It is not if credentials were found, or if there is no colon that could stand before a password.
/// Otherwise this may be a user and a password whose host was forgotten, as in `amqp://user:password`.
fn may_quote(userinfo: Option<&str>, rest: &str) -> bool {
    userinfo.is_some() || !rest.contains(':')
}

fn scheme(uri: &str) -> Result<(Scheme, &str), UriError> {
    let Some((scheme, rest)) = uri.split_once("://") else {
        let reason = "is missing: the URI has to begin with amqp://, amqps:// or memory://";
        return Err(UriError::new(UriPart::Scheme, reason));
    };
    let known = [("amqp", Scheme::Amqp), ("amqps", Scheme::Amqps), ("memory", Scheme::Memory)];
    if let Some((_, known)) = known.iter().find(|(name, _)| scheme.eq_ignore_ascii_case(name)) {
        return Ok((*known, rest));
    }
    let error = UriError::new(UriPart::Scheme, "is none of amqp, amqps and memory");
    // Anything else than a scheme may be credentials without one.
    let quotable = scheme.chars().all(|c| c.is_ascii_alphanumeric());
    Err(if quotable { error.quoting(scheme) } else { error })
}

/// Of what follows the authority: nothing there is quoted, since it may be the rest of a password.
fn refuse_misplaced_delimiters(tail: &str) -> Result<(), UriError> {
    if tail.contains('@') {
        let reason = "or user ends too early, for an @ comes after the first / or ? or #: \
                      write / ? # as %2F %3F %23 in a user or password, and @ as %40 behind the host";
        return Err(UriError::new(UriPart::Password, reason));
    }
    if tail.contains('#') {
        let reason = "has no meaning for AMQP: leave it out, or write # as %23";
        return Err(UriError::new(UriPart::Fragment, reason));
    }
    Ok(())
}

fn read(parts: &Parts<'_>) -> Result<Options, UriError> {
    let mut options = Options::default();
    if parts.scheme == Scheme::Amqps {
        options.tls = Some(Tls::default());
        options.port = Options::DEFAULT_TLS_PORT;
    }
    let credentials = Credentials::read(parts.userinfo)?;
    read_host_and_port(parts.host_and_port, &mut options)?;
    if parts.scheme == Scheme::Memory {
        options.memory = true;
        if options.port != Options::DEFAULT_PORT {
            return Err(UriError::new(UriPart::Port, "has no meaning in memory: leave it out"));
        }
    }
    if let Some(segment) = parts.virtual_host {
        options.virtual_host = virtual_host(segment)?;
    }
    options.auth = credentials.plain();
    parameters::apply(parts.query, &credentials, &mut options)?;
    Ok(options)
}

struct Credentials {
    user: String,
    password: Password,
}

impl Credentials {
    fn read(userinfo: Option<&str>) -> Result<Self, UriError> {
        let (user, password) = match userinfo {
            None => ("guest", "guest"),
            Some(userinfo) => userinfo.split_once(':').unwrap_or((userinfo, "guest")),
        };
        Ok(Credentials {
            user: credential(UriPart::User, user)?,
            password: credential(UriPart::Password, password)?.into(),
        })
    }

    fn plain(&self) -> Auth {
        Auth::Plain { user: self.user.clone(), password: self.password.clone() }
    }

    fn amqplain(&self) -> Auth {
        Auth::AmqPlain { user: self.user.clone(), password: self.password.clone() }
    }
}

fn credential(part: UriPart, text: &str) -> Result<String, UriError> {
    let text = decode(text).map_err(|reason| UriError::new(part, reason))?;
    if text.contains('\0') {
        // SASL PLAIN puts it between the two, so it could make one user look like another.
        return Err(UriError::new(part, "contains a NUL character (%00)"));
    }
    Ok(text)
}

/// Leaves the defaults for what is absent.
fn read_host_and_port(text: &str, options: &mut Options) -> Result<(), UriError> {
    let (host, port) = match text.strip_prefix('[') {
        Some(bracketed) => ipv6_and_port(text, bracketed)?,
        None => name_and_port(text)?,
    };
    if !host.is_empty() {
        options.host = host;
    }
    if !port.is_empty() {
        options.port = port_number(port)?;
    }
    Ok(())
}

fn ipv6_and_port<'a>(text: &str, bracketed: &'a str) -> Result<(String, &'a str), UriError> {
    let wrong = |reason| UriError::new(UriPart::Host, reason).quoting(text);
    let (address, after) =
        bracketed.split_once(']').ok_or_else(|| wrong("has no ] after its ["))?;
    let address = decode(address).map_err(wrong)?;
    let (number, zone) = address.split_once('%').unwrap_or((&address, "0"));
    if number.parse::<Ipv6Addr>().is_err() {
        return Err(wrong("is not an IPv6 address, the only thing for brackets"));
    }
    if zone.is_empty() || !zone.chars().all(is_host_character) {
        return Err(wrong("has no usable zone after %25"));
    }
    match after.strip_prefix(':') {
        Some(port) => Ok((address, port)),
        None if after.is_empty() => Ok((address, "")),
        None => Err(wrong("goes on after its ] with something else than a port")),
    }
}

fn name_and_port(text: &str) -> Result<(String, &str), UriError> {
    let wrong = |reason| UriError::new(UriPart::Host, reason).quoting(text);
    let (host, port) = text.split_once(':').unwrap_or((text, ""));
    if port.contains(':') {
        return Err(wrong("has more than one colon: an IPv6 address has to be in brackets"));
    }
    let host = decode(host).map_err(wrong)?;
    if !host.chars().all(is_host_character) {
        return Err(wrong("contains a character that no name or address of a host has"));
    }
    Ok((host, port))
}

/// Wider than DNS, for the sake of names with underscores and of names not in ASCII.
fn is_host_character(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '-' | '.' | '_' | '~')
}

fn port_number(text: &str) -> Result<u16, UriError> {
    match whole_number(text).and_then(|number| u16::try_from(number).ok()) {
        Some(port) if port > 0 => Ok(port),
        _ => Err(UriError::new(UriPart::Port, "is not a number from 1 to 65535").quoting(text)),
    }
}

fn virtual_host(segment: &str) -> Result<String, UriError> {
    let wrong = |reason| UriError::new(UriPart::VirtualHost, reason).quoting(segment);
    if segment.contains('/') {
        return Err(wrong("has more than one segment: write a / that belongs to the name as %2F"));
    }
    let name = decode(segment).map_err(wrong)?;
    if name.len() > ShortStr::MAX {
        return Err(wrong("is longer than 255 bytes"));
    }
    Ok(name)
}

/// Digits only: unlike `str::parse`, this takes no plus sign.
fn whole_number(text: &str) -> Option<u32> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

/// Percent-decodes, or says why it cannot.
fn decode(text: &str) -> Result<String, &'static str> {
    if text.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err("contains a blank or control character: percent-encode it");
    }
    if !text.split('%').skip(1).all(starts_with_hex_pair) {
        return Err("contains a % without two hexadecimal digits: write % itself as %25");
    }
    match percent_decode_str(text).decode_utf8() {
        Ok(decoded) => Ok(decoded.into_owned()),
        Err(_) => Err("is not UTF-8 when percent-decoded"),
    }
}

fn starts_with_hex_pair(text: &str) -> bool {
    matches!(text.as_bytes(), [a, b, ..] if a.is_ascii_hexdigit() && b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests;
