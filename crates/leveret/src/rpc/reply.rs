//! What a service answers: replies, and errors as replies.

use std::fmt;

use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::correlation::CorrelationId;
use crate::amqp::{Delivery, Properties, RawProperties, Value};
use crate::error::{Error, ErrorKind, RemoteError};
use crate::payload::{self, Json, MsgPack, Payload};

/// The kind of an error. A reply with this header is an error, and its body the text.
pub(crate) const ERROR: &str = "leveret-error";

/// [`MORE`] or [`END`]. A reply without it is the last one, and a value.
pub(crate) const PART: &str = "leveret-reply";

/// Others follow.
pub(crate) const MORE: &str = "more";

/// No other follows, and this one is no value.
pub(crate) const END: &str = "end";

/// Counts the replies to one call, from 1 on.
pub(crate) const NUMBER: &str = "leveret-reply-number";

/// A reply, all of it. It clones cheaply.
#[derive(Clone)]
pub struct Reply {
    properties: RawProperties,
    body: Bytes,
}

impl Reply {
    pub(crate) fn new(properties: RawProperties, body: Bytes) -> Self {
        Reply { properties, body }
    }

    pub(crate) fn of(delivery: &Delivery) -> Self {
        Reply::new(delivery.raw_properties().clone(), delivery.body().clone())
    }

    /// Whose it is, if it says so.
    pub(super) fn correlation_id(&self) -> Option<CorrelationId> {
        CorrelationId::parse(self.properties.correlation_id()?.as_bytes())
    }

    /// The body.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// The properties.
    pub fn properties(&self) -> Properties<'_> {
        self.properties.get()
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<Value<'_>> {
        self.properties.header(name)
    }

    /// What it is among the replies to its call.
    pub(crate) fn part(&self) -> ReplyPart {
        if !self.properties.has_headers() {
            return ReplyPart::Last;
        }
        let Some(headers) = self.properties().headers else { return ReplyPart::Last };
        if headers.get(ERROR).is_some() {
            return ReplyPart::Error;
        }
        let part = headers.get(PART);
        match part.as_ref().and_then(Value::as_str) {
            Some(MORE) => {
                let number = headers.get(NUMBER).and_then(|number| number.as_i64());
                ReplyPart::More(number.and_then(|number| u64::try_from(number).ok()))
            }
            Some(END) => ReplyPart::End,
            _ => ReplyPart::Last,
        }
    }

    /// The error that it is.
    pub(crate) fn error(&self) -> RemoteError {
        let kind = self.header(ERROR);
        let kind = kind.as_ref().and_then(Value::as_str).unwrap_or("error").to_owned();
        RemoteError { kind, text: String::from_utf8_lossy(&self.body).into_owned() }
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply")
            .field("properties", &self.properties)
            .field("body", &format_args!("{} bytes", self.body.len()))
            .finish()
    }
}

/// What a reply is among the replies to its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyPart {
    /// A value that others follow, with its number if it has one.
    More(Option<u64>),
    /// A value, the last one.
    Last,
    /// No value, and no other follows.
    End,
    /// An error, and no other follows.
    Error,
}

/// What a call may return: [`Json`], [`MsgPack`] and [`Payload`] for bodies as values, [`Bytes`] and `String` for the body as
/// it is, `()` if it does not matter, and [`Reply`] for all of it.
#[diagnostic::on_unimplemented(
    message = "a call cannot return `{Self}`",
    label = "not a type of reply",
    note = "say what the reply is: `let Json(price): Json<f64> = rpc.call(..).await?`; also `MsgPack<T>`, `Payload<T>`, `String`, `Bytes`, `Reply`, and `()` if it does \
            not matter"
)]
pub trait FromReply: Sized {
    /// Reads it.
    fn from_reply(reply: Reply) -> Result<Self, Error>;
}

impl FromReply for Reply {
    fn from_reply(reply: Reply) -> Result<Self, Error> {
        Ok(reply)
    }
}

impl FromReply for () {
    fn from_reply(_: Reply) -> Result<Self, Error> {
        Ok(())
    }
}

impl FromReply for Bytes {
    fn from_reply(reply: Reply) -> Result<Self, Error> {
        Ok(reply.body)
    }
}

/// Text in UTF-8.
impl FromReply for String {
    fn from_reply(reply: Reply) -> Result<Self, Error> {
        let text = std::str::from_utf8(&reply.body);
        let invalid =
            |error| Error::caused(ErrorKind::Payload, "the reply is not text in UTF-8", error);
        text.map(str::to_owned).map_err(invalid)
    }
}

impl<T: DeserializeOwned> FromReply for Json<T> {
    fn from_reply(reply: Reply) -> Result<Self, Error> {
        payload::from_json(&reply.body).map(Json)
    }
}

impl<T: DeserializeOwned> FromReply for MsgPack<T> {
    fn from_reply(reply: Reply) -> Result<Self, Error> {
        payload::from_msgpack(&reply.body).map(MsgPack)
    }
}

impl<T: DeserializeOwned> FromReply for Payload<T> {
    fn from_reply(reply: Reply) -> Result<Self, Error> {
        let properties = reply.properties();
        let content_type = properties.content_type.as_ref().and_then(|text| text.to_str().ok());
        payload::from_content_type(content_type, &reply.body).map(Payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amqp::Table;

    fn with(pairs: &[(&str, Value<'static>)]) -> Reply {
        let headers = Table::from_pairs(pairs.iter().cloned()).unwrap();
        let properties = Properties { headers: Some(headers), ..Properties::default() };
        Reply::new(RawProperties::from(&properties), Bytes::from_static(b"text"))
    }

    #[test]
    fn headers_say_what_a_reply_is() {
        assert_eq!(Reply::new(RawProperties::default(), Bytes::new()).part(), ReplyPart::Last);
        for (pairs, part) in [
            (&[("other", 1.into())][..], ReplyPart::Last),
            (&[(PART, "more".into())], ReplyPart::More(None)),
            (&[(PART, "more".into()), (NUMBER, 7i64.into())], ReplyPart::More(Some(7))),
            (&[(PART, "more".into()), (NUMBER, (-7i64).into())], ReplyPart::More(None)),
            (&[(PART, "end".into())], ReplyPart::End),
            (&[(PART, "what".into())], ReplyPart::Last),
            (&[(PART, "more".into()), (ERROR, "odd".into())], ReplyPart::Error),
            (&[(ERROR, true.into())], ReplyPart::Error),
        ] {
            assert_eq!(with(pairs).part(), part, "{pairs:?}");
        }
    }

    #[test]
    fn an_error_has_a_kind_and_a_text_whatever_its_header_is() {
        let error = with(&[(ERROR, "declined".into())]).error();
        assert_eq!((&*error.kind, &*error.text), ("declined", "text"));
        assert_eq!(with(&[(ERROR, 1.into())]).error().kind, "error");
    }
}
