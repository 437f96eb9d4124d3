//! The parameters after the question mark: those of RabbitMQ's Erlang client that have a meaning here,
//! and `connection_name`.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use leveret_wire::FrameMax;

use super::{Credentials, UriError, UriPart, decode, whole_number};
use crate::options::{Auth, Options, Tls};

pub(super) const HEARTBEAT: &str = "heartbeat";
pub(super) const CONNECTION_TIMEOUT: &str = "connection_timeout";
pub(super) const CHANNEL_MAX: &str = "channel_max";
pub(super) const FRAME_MAX: &str = "frame_max";
pub(super) const AUTH_MECHANISM: &str = "auth_mechanism";
pub(super) const CONNECTION_NAME: &str = "connection_name";
pub(super) const CA_FILE: &str = "cacertfile";
pub(super) const CERT_FILE: &str = "certfile";
pub(super) const KEY_FILE: &str = "keyfile";
pub(super) const VERIFY: &str = "verify";
pub(super) const SERVER_NAME: &str = "server_name_indication";

const KNOWN: [&str; 11] = [
    HEARTBEAT,
    CONNECTION_TIMEOUT,
    CHANNEL_MAX,
    FRAME_MAX,
    AUTH_MECHANISM,
    CONNECTION_NAME,
    CA_FILE,
    CERT_FILE,
    KEY_FILE,
    VERIFY,
    SERVER_NAME,
];

/// What the Erlang client takes as well. Refused instead of ignored, for whoever wrote it counts on an
/// effect.
const REFUSED: [(&str, &str); 4] = [
    ("password", "is not supported: the file named by keyfile must not be encrypted"),
    ("fail_if_no_peer_cert", "is for servers and does nothing in a client: leave it out"),
    ("depth", "is not supported: leave it out, there is one limit for all certificate chains"),
    ("customize_hostname_check", "is not needed: leave it out, names are checked as for HTTPS"),
];

/// Changes the options as the query says.
pub(super) fn apply(
    query: &str,
    credentials: &Credentials,
    options: &mut Options,
) -> Result<(), UriError> {
    let mut seen = Vec::new();
    let mut auth = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let parameter = Parameter::read(pair)?;
        if parameter.name == AUTH_MECHANISM {
            auth.push(parameter.auth(credentials, &auth)?);
            continue;
        }
        if seen.contains(&parameter.name) {
            return Err(parameter.wrong("is given more than once"));
        }
        seen.push(parameter.name);
        parameter.apply(options)?;
    }
    if !auth.is_empty() {
        options.auth = auth.remove(0);
        options.auth_alternatives = auth;
    }
    match &options.tls {
        Some(tls) => certificate_and_key_are_both_there_or_neither(tls),
        None => Ok(()),
    }
}

fn certificate_and_key_are_both_there_or_neither(tls: &Tls) -> Result<(), UriError> {
    let (lonely, reason) = match (&tls.cert_file, &tls.key_file) {
        (Some(_), None) => (CERT_FILE, "needs the key of the certificate: give keyfile, too"),
        (None, Some(_)) => (KEY_FILE, "needs the certificate of the key: give certfile, too"),
        _ => return Ok(()),
    };
    Err(UriError::new(UriPart::Parameter(lonely), reason))
}

/// One `name=value`, decoded.
struct Parameter {
    name: &'static str,
    value: String,
}

impl Parameter {
    fn read(pair: &str) -> Result<Self, UriError> {
        let (given, value) = match pair.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (pair, None),
        };
        let name = known(given)?;
        let part = UriPart::Parameter(name);
        let value = value.ok_or_else(|| UriError::new(part, "has no value: write name=value"))?;
        match decode(value) {
            Ok(value) => Ok(Parameter { name, value }),
            Err(reason) => Err(UriError::new(part, reason).quoting(value)),
        }
    }

    fn apply(self, options: &mut Options) -> Result<(), UriError> {
        match (self.name, &mut options.tls) {
            (HEARTBEAT, _) => {
                let seconds = self.number(0..=u16::MAX.into(), "of seconds")?;
                options.heartbeat = Some(Duration::from_secs(seconds.into()));
            }
            (CONNECTION_TIMEOUT, _) => {
                let milliseconds = self.number(1..=u32::MAX, "of milliseconds")?;
                options.connection_timeout = Duration::from_millis(milliseconds.into());
            }
            (CHANNEL_MAX, _) => {
                let channels = self.number(0..=u16::MAX.into(), "of channels")?;
                options.channel_max = channels as u16;
            }
            (FRAME_MAX, _) => options.frame_max = self.frame_max()?,
            (CONNECTION_NAME, _) => options.connection_name = Some(self.text()?),
            (CA_FILE, Some(tls)) => tls.ca_file = Some(self.path()?),
            (CERT_FILE, Some(tls)) => tls.cert_file = Some(self.path()?),
            (KEY_FILE, Some(tls)) => tls.key_file = Some(self.path()?),
            (VERIFY, Some(tls)) => tls.verify = self.verify()?,
            (SERVER_NAME, Some(tls)) => tls.server_name = Some(self.server_name()?),
            _ => {
                let part = UriPart::Parameter(self.name);
                return Err(UriError::new(part, "is about TLS: the URI needs amqps:// for it"));
            }
        }
        Ok(())
    }

    fn wrong(&self, reason: impl Into<String>) -> UriError {
        UriError::new(UriPart::Parameter(self.name), reason.into()).quoting(&self.value)
    }

    fn number(&self, allowed: RangeInclusive<u32>, unit: &str) -> Result<u32, UriError> {
        match whole_number(&self.value) {
            Some(number) if allowed.contains(&number) => Ok(number),
            _ => Err(self.wrong(format!(
                "is not a number {unit} from {} to {}",
                allowed.start(),
                allowed.end()
            ))),
        }
    }

    fn frame_max(&self) -> Result<u32, UriError> {
        let least = FrameMax::MIN.get();
        match whole_number(&self.value) {
            Some(bytes) if bytes == 0 || bytes >= least => Ok(bytes),
            _ => Err(self.wrong(format!(
                "is neither 0 (no limit) nor a number of bytes from {least} to {}",
                u32::MAX
            ))),
        }
    }

    fn text(self) -> Result<String, UriError> {
        match self.value.as_str() {
            "" => Err(self.wrong("is empty: leave it out, or give a value")),
            _ => Ok(self.value),
        }
    }

    fn path(self) -> Result<PathBuf, UriError> {
        match self.value.contains('\0') {
            true => Err(self.wrong("contains a NUL character, which no path does")),
            false => self.text().map(PathBuf::from),
        }
    }

    fn verify(&self) -> Result<bool, UriError> {
        match self.value.as_str() {
            "verify_peer" => Ok(true),
            "verify_none" => Ok(false),
            _ => Err(self.wrong("is neither verify_peer nor verify_none")),
        }
    }

    fn server_name(self) -> Result<String, UriError> {
        match self.value.as_str() {
            "disable" => Err(self.wrong(
                "is not supported: give the name in the server's certificate, \
                 or say verify=verify_none if it is not to be checked",
            )),
            _ => self.text(),
        }
    }

    fn auth(&self, credentials: &Credentials, before: &[Auth]) -> Result<Auth, UriError> {
        let auth = [credentials.plain(), credentials.amqplain(), Auth::External]
            .into_iter()
            .find(|auth| auth.mechanism().eq_ignore_ascii_case(&self.value))
            .ok_or_else(|| self.wrong("is not plain, amqplain or external"))?;
        match before.contains(&auth) {
            true => Err(self.wrong("is given more than once")),
            false => Ok(auth),
        }
    }
}

/// The name as one of [`KNOWN`].
fn known(given: &str) -> Result<&'static str, UriError> {
    if let Some(name) = KNOWN.into_iter().find(|name| *name == given) {
        return Ok(name);
    }
    // Without the value: one of these is a password.
    if let Some((name, reason)) = REFUSED.into_iter().find(|(name, _)| *name == given) {
        return Err(UriError::new(UriPart::Parameter(name), reason));
    }
    let reason = format!("is unknown; the known ones are {}", KNOWN.join(", "));
    Err(UriError::new(UriPart::UnknownParameter, reason).quoting(given))
}
