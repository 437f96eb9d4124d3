//! A request as it is sent, and why it may get no reply.

use std::borrow::Cow;
use std::fmt;

use bytes::Bytes;

use crate::amqp::{Prepared, Properties, Returned};
use crate::error::{Error, ErrorKind, RemoteError};
use crate::message::Message;

/// A request. Its correlation id and reply address are set when it is sent.
#[derive(Clone, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) exchange: Cow<'a, str>,
    pub(crate) routing_key: Cow<'a, str>,
    pub(crate) properties: Properties<'a>,
    pub(crate) body: Bytes,
}

impl<'a> Request<'a> {
    /// Fails if the message cannot be sent.
    pub(crate) fn new(
        exchange: &'a str,
        routing_key: impl Into<Cow<'a, str>>,
        message: Message,
    ) -> Result<Self, Error> {
        let (body, properties) = message.into_parts()?;
        Ok(Request { exchange: exchange.into(), routing_key: routing_key.into(), properties, body })
    }

    /// The request with everything it borrows, to be resent after a loss.
    pub(super) fn to_owned(&self) -> Request<'static> {
        Request {
            exchange: self.exchange.clone().into_owned().into(),
            routing_key: self.routing_key.clone().into_owned().into(),
            properties: self.properties.clone().into_owned(),
            body: self.body.clone(),
        }
    }

    /// The message to publish. It is mandatory: a request that reaches no queue fails its call at once.
    pub(super) fn prepared(&self) -> Prepared<'_, Properties<'a>> {
        Prepared {
            exchange: &self.exchange,
            routing_key: &self.routing_key,
            mandatory: true,
            properties: &self.properties,
            body: &self.body,
        }
    }
}

/// Why a call has no reply. The caller adds what it attempted.
#[derive(Clone, Debug)]
pub(crate) enum CallFailure {
    /// The service replied with an error.
    Remote(RemoteError),
    /// The broker could not take the request.
    Nacked,
    /// The request reached no queue.
    Returned(Box<Returned>),
    /// The call expects a value, and the reply only ends it.
    NoValue,
    /// The buffer for this many replies is full.
    TooMany(usize),
    /// No reply can come any more.
    Lost(Error),
}

impl CallFailure {
    pub(crate) fn into_error(self, what: impl fmt::Display) -> Error {
        match self {
            CallFailure::Remote(error) => Error::remote_error(what, error),
            CallFailure::Nacked => {
                let text = format!("{what}: the broker could not take the request");
                Error::new(ErrorKind::Nacked, text)
            }
            CallFailure::Returned(returned) => unroutable(what, returned),
            CallFailure::NoValue => {
                Error::new(ErrorKind::Payload, format!("{what}: there is no reply but its end"))
            }
            CallFailure::TooMany(buffer) => {
                let text = format!("{what}: more than {buffer} replies wait to be taken");
                Error::new(ErrorKind::Lost, text)
            }
            CallFailure::Lost(error) => Error::caused(error.kind(), what.to_string(), error),
        }
    }
}

fn unroutable(what: impl fmt::Display, returned: Box<Returned>) -> Error {
    let key = &returned.routing_key;
    let text = match &*returned.exchange {
        "" => format!("{what}: there is no queue {key:?}"),
        exchange => format!("{what}: exchange {exchange:?} has no queue for the key {key:?}"),
    };
    Error::unroutable(text, returned)
}
