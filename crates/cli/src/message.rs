//! Messages as arguments, and as a person sees them.

use std::io::{self, Read};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use leveret::amqp::{Properties, ShortStr, Value};
use leveret::{Delivery, Message, ParkedMessage};

use crate::failure::Failure;
use crate::output::size;
use crate::reach::duration;
use crate::text::{escape, escape_lines};

/// The body of a message.
#[derive(Clone, Debug, Args)]
pub(crate) struct Body {
    /// The body; `-` or none takes it from the standard input.
    #[arg(value_name = "BODY")]
    body: Option<String>,

    /// Takes the body from a file.
    #[arg(long, value_name = "FILE", conflicts_with = "body")]
    file: Option<PathBuf>,
}

impl Body {
    pub(crate) fn read(&self) -> Result<Vec<u8>, Failure> {
        match (&self.body, &self.file) {
            (Some(text), _) if text != "-" => Ok(text.clone().into_bytes()),
            (_, Some(path)) => std::fs::read(path)
                .map_err(|error| Failure::wrong(format_args!("{}: {error}", path.display()))),
            _ => {
                let mut body = Vec::new();
                io::stdin().lock().read_to_end(&mut body).map_err(|error| {
                    Failure::new(format_args!("cannot read the standard input: {error}"))
                })?;
                Ok(body)
            }
        }
    }
}

/// The properties of a message.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Message")]
pub(crate) struct MessageOptions {
    /// A header: NAME=TEXT, or NAME:=VALUE for a number, true or false; may be given more than once.
    #[arg(short = 'H', long = "header", value_name = "NAME=TEXT", value_parser = Header::parse)]
    headers: Vec<Header>,

    #[arg(long, value_name = "TYPE", help = "What the body is, as in application/json")]
    content_type: Option<String>,

    #[arg(long, value_name = "ID", help = "The id of the message")]
    message_id: Option<String>,

    #[arg(long, value_name = "ID", help = "What it belongs to")]
    correlation_id: Option<String>,

    #[arg(long, value_name = "ADDRESS", help = "Where a reply goes")]
    reply_to: Option<String>,

    #[arg(long = "type", value_name = "NAME", help = "The kind of message")]
    kind: Option<String>,

    #[arg(long, value_name = "NUMBER", help = "Its priority")]
    priority: Option<u8>,

    #[arg(long, value_name = "TIME", value_parser = duration, help = "How long it may wait in its queue, as in 30s")]
    expires_in: Option<Duration>,

    #[arg(long, help = "It need not survive a restart of the broker")]
    transient: bool,
}

impl MessageOptions {
    pub(crate) fn message(&self, body: Vec<u8>) -> Message {
        let mut message = Message::new(body);
        message = with(message, &self.content_type, Message::content_type);
        message = with(message, &self.message_id, Message::message_id);
        message = with(message, &self.correlation_id, Message::correlation_id);
        message = with(message, &self.reply_to, Message::reply_to);
        message = with(message, &self.kind, Message::kind);
        message = with(message, &self.priority, Message::priority);
        message = with(message, &self.expires_in, Message::expires_in);
        if self.transient {
            message = message.transient();
        }
        for Header { name, value } in &self.headers {
            message = message.header(name, value.clone());
        }
        message
    }
}

/// Sets an option of something that is being built, if it was given.
pub(crate) fn with<T, V: Clone>(built: T, given: &Option<V>, set: impl FnOnce(T, V) -> T) -> T {
    match given {
        Some(value) => set(built, value.clone()),
        None => built,
    }
}

/// A header as an argument.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Header {
    pub(crate) name: String,
    pub(crate) value: Value<'static>,
}

impl Header {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let Some((name, value)) = text.split_once('=') else {
            return Err("a name and a value are needed, as in region=eu or tries:=3".to_owned());
        };
        let (name, value) = match name.strip_suffix(':') {
            Some(name) => (name, plain(value)?),
            None => (name, Value::from(value.to_owned())),
        };
        match name {
            "" => Err("a header needs a name before the =".to_owned()),
            _ => Ok(Header { name: name.to_owned(), value }),
        }
    }
}

/// A value that is no text.
fn plain(text: &str) -> Result<Value<'static>, String> {
    if let Ok(number) = text.parse::<i64>() {
        return Ok(Value::from(number));
    }
    match (text, text.parse::<f64>()) {
        ("true", _) => Ok(Value::from(true)),
        ("false", _) => Ok(Value::from(false)),
        ("null", _) => Ok(Value::Void),
        (_, Ok(number)) if number.is_finite() => Ok(Value::from(number)),
        _ => Err(format!(
            "{text:?} is no number, true, false or null; a text is given with = instead of :="
        )),
    }
}

/// A message, for a person.
pub(crate) struct Shown<'a> {
    exchange: String,
    routing_key: String,
    properties: Properties<'a>,
    body: &'a [u8],
}

impl<'a> From<&'a ParkedMessage> for Shown<'a> {
    fn from(message: &'a ParkedMessage) -> Self {
        // Into the lot it came under the lot's name. Its story knows where it had been published to.
        let story = message.story();
        Shown {
            exchange: story.exchange.clone().unwrap_or_else(|| message.exchange().to_owned()),
            routing_key: story
                .routing_key
                .clone()
                .unwrap_or_else(|| message.routing_key().to_owned()),
            properties: message.properties(),
            body: message.body(),
        }
    }
}

impl<'a> From<&'a Delivery> for Shown<'a> {
    fn from(delivery: &'a Delivery) -> Self {
        Shown {
            exchange: delivery.exchange().to_str_lossy().into_owned(),
            routing_key: delivery.routing_key().to_str_lossy().into_owned(),
            properties: delivery.properties(),
            body: delivery.body(),
        }
    }
}

impl Shown<'_> {
    /// Everything: where it came from, what it says of itself, the body.
    pub(crate) fn in_full(&self) -> String {
        let exchange = match self.exchange.as_str() {
            "" => "(default)".to_owned(),
            name => escape(name),
        };
        let mut text =
            format!("exchange        {exchange}\nrouting key     {}\n", escape(&self.routing_key));
        for (name, value) in self.facts() {
            text += &format!("{name:<15} {}\n", escape(&value));
        }
        for (name, value) in self.properties.headers.iter().flat_map(|headers| headers.iter()) {
            text += &format!("  {}: {}\n", escape(&name.to_str_lossy()), escape(&told(&value)));
        }
        format!("{text}\n{}", readable(self.body))
    }

    fn facts(&self) -> Vec<(String, String)> {
        let time = |seconds: &str| {
            let time = Duration::from_secs(seconds.parse().ok()?);
            let time = std::time::UNIX_EPOCH.checked_add(time)?;
            Some(humantime::format_rfc3339_seconds(time).to_string())
        };
        let headers = self.properties.headers.as_ref().is_some_and(|headers| !headers.is_empty());
        let told = property_facts(&self.properties).into_iter().map(|(name, value)| match name {
            "timestamp" => (name.to_owned(), time(&value).unwrap_or(value)),
            "content-encoding" => ("encoding".to_owned(), value),
            name => (name.replace('-', " "), value),
        });
        told.chain(headers.then(|| ("headers".to_owned(), String::new()))).collect()
    }
}

/// What a message says of itself, but for its headers: `message-id`, `order-17`. What it does not have is left out.
pub(crate) fn property_facts(properties: &Properties<'_>) -> Vec<(&'static str, String)> {
    let text = |name, value: &Option<ShortStr<'_>>| {
        value.as_ref().map(|value| (name, value.to_str_lossy().into_owned()))
    };
    [
        text("message-id", &properties.message_id),
        text("content-type", &properties.content_type),
        text("content-encoding", &properties.content_encoding),
        text("type", &properties.kind),
        text("correlation-id", &properties.correlation_id),
        text("reply-to", &properties.reply_to),
        text("app-id", &properties.app_id),
        text("user-id", &properties.user_id),
        text("expiration", &properties.expiration),
        properties.timestamp.map(|seconds| ("timestamp", seconds.to_string())),
        properties.priority.map(|priority| ("priority", priority.to_string())),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A value of a header: texts as they are, all others as they are written.
fn told(value: &Value<'_>) -> String {
    match value {
        Value::Str(text) => text.to_str_lossy().into_owned(),
        other => format!("{other:?}"),
    }
}

/// A body, for a person: text as it is, JSON in lines, and of all else how large it is.
pub(crate) fn readable(body: &[u8]) -> String {
    let Ok(text) = std::str::from_utf8(body) else {
        return format!("({} that are no text; --raw writes them as they are)", size(body.len()));
    };
    match serde_json::from_str::<serde_json::Value>(text) {
        Ok(json) if json.is_object() || json.is_array() => {
            escape_lines(&serde_json::to_string_pretty(&json).unwrap_or_else(|_| text.to_owned()))
        }
        _ => escape_lines(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_texts_or_plain_values() {
        let header = |text: &str| Header::parse(text).map(|header| (header.name, header.value));
        assert_eq!(header("a=b=c"), Ok(("a".to_owned(), Value::from("b=c"))));
        assert_eq!(header("a=17"), Ok(("a".to_owned(), Value::from("17"))));
        assert_eq!(header("a:=17"), Ok(("a".to_owned(), Value::from(17i64))));
        assert_eq!(header("a:=1.5"), Ok(("a".to_owned(), Value::from(1.5))));
        assert_eq!(header("a:=true"), Ok(("a".to_owned(), Value::from(true))));
        for wrong in ["a", "=b", ":=1", "a:=b", "a:=inf"] {
            assert!(header(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn bodies_are_shown_as_what_they_are() {
        assert_eq!(readable(b"{\"a\":1}"), "{\n  \"a\": 1\n}");
        assert_eq!(readable(b"a\x1b[0mb"), "a\\u{1b}[0mb");
        assert!(readable(&[0xff; 2048]).starts_with("(2.0 KiB"));
    }
}
