//! Messages to publish: a body and its properties.

use std::time::{Duration, SystemTime};

use bytes::Bytes;

use crate::amqp::{Properties, ShortStr, Table, Value};
use crate::clock;
use crate::error::{Error, ErrorKind};
use crate::random;

/// The longest expiration that RabbitMQ takes.
const LONGEST: Duration = Duration::from_millis(u32::MAX as u64);

/// A message to publish. Anything that is a body is a message without properties:
///
/// ```
/// use std::time::Duration;
/// use leveret::Message;
///
/// let plain = Message::from("hello");
/// let told = Message::new("{}")
///     .content_type("application/json")
///     .header("tenant", "acme")
///     .expires_in(Duration::from_secs(60));
/// # let _ = (plain, told);
/// ```
///
/// A name or text over 255 bytes is an error when it is published.
#[derive(Clone, Debug, Default)]
pub struct Message {
    pub(crate) body: Bytes,
    /// Most messages have none, and a message is moved a lot before it is sent.
    pub(crate) extra: Option<Box<Extra>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Extra {
    pub(crate) properties: Properties<'static>,
    /// What cannot be sent, found while it was made.
    fault: Option<String>,
}

impl Message {
    /// A message with this body.
    pub fn new(body: impl Into<Bytes>) -> Self {
        Message { body: body.into(), extra: None }
    }

    /// A message with all properties of another one, as a delivery has them.
    pub fn with_properties(body: impl Into<Bytes>, properties: Properties<'static>) -> Self {
        Message { body: body.into(), extra: Some(Box::new(Extra { properties, fault: None })) }
    }

    fn extra(&mut self) -> &mut Extra {
        self.extra.get_or_insert_default()
    }

    /// The body's media type.
    #[must_use]
    pub fn content_type(self, text: impl Into<String>) -> Self {
        self.text("content type", text, |properties| &mut properties.content_type)
    }

    /// The body's encoding, such as `gzip`.
    #[must_use]
    pub fn content_encoding(self, text: impl Into<String>) -> Self {
        self.text("content encoding", text, |properties| &mut properties.content_encoding)
    }

    /// What ties it to other messages.
    #[must_use]
    pub fn correlation_id(self, text: impl Into<String>) -> Self {
        self.text("correlation id", text, |properties| &mut properties.correlation_id)
    }

    /// Where a reply should go.
    #[must_use]
    pub fn reply_to(self, text: impl Into<String>) -> Self {
        self.text("reply-to", text, |properties| &mut properties.reply_to)
    }

    /// Its id. One is made if none is given.
    #[must_use]
    pub fn message_id(self, text: impl Into<String>) -> Self {
        self.text("message id", text, |properties| &mut properties.message_id)
    }

    /// The application's name for this kind of message.
    #[must_use]
    pub fn kind(self, text: impl Into<String>) -> Self {
        self.text("type", text, |properties| &mut properties.kind)
    }

    /// The application that publishes it.
    #[must_use]
    pub fn app_id(self, text: impl Into<String>) -> Self {
        self.text("application id", text, |properties| &mut properties.app_id)
    }

    /// From 0, the lowest. Of meaning in queues with priorities.
    #[must_use]
    pub fn priority(mut self, priority: u8) -> Self {
        self.extra().properties.priority = Some(priority);
        self
    }

    /// When it was made, in whole seconds.
    #[must_use]
    pub fn timestamp(mut self, time: SystemTime) -> Self {
        self.extra().properties.timestamp = clock::seconds(time);
        self
    }

    /// It leaves its queue after this long, in whole milliseconds: to the dead-letter exchange, or away.
    #[must_use]
    pub fn expires_in(self, time: Duration) -> Self {
        let text = time.as_millis().to_string();
        self.text("expiration", text, |properties| &mut properties.expiration)
    }

    /// It may be gone when the broker restarts.
    #[must_use]
    pub fn transient(mut self) -> Self {
        self.extra().properties.delivery_mode = Some(1);
        self
    }

    /// A header. A later one of the same name replaces it.
    #[must_use]
    pub fn header(mut self, name: impl AsRef<str>, value: impl Into<Value<'static>>) -> Self {
        let Extra { properties, fault } = self.extra();
        let headers = properties.headers.get_or_insert_with(Table::new);
        if let Err(error) = headers.insert(name.as_ref(), value) {
            fault.get_or_insert(format!("header {:?}: {error}", name.as_ref()));
        }
        self
    }

    /// With an id that no other message has, unless it has one: for whoever keeps a message before it is published, so that
    /// it has the same id however often that happens.
    ///
    /// With the id goes a timestamp, unless it has one, so that whoever remembers ids
    /// [for a time](crate::inbox::Remember::ids_for) can tell a late copy. A message that comes with an id stays as it is.
    #[must_use]
    pub fn identified(mut self) -> Self {
        let properties = &mut self.extra().properties;
        if properties.message_id.is_some() {
            return self;
        }
        let text = format!("{:032x}", random::id());
        properties.message_id = ShortStr::try_from(text).ok();
        match properties.timestamp {
            Some(_) => self,
            None => self.timestamp(clock::now()),
        }
    }

    /// The body.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// Body and properties, to be kept; [`with_properties`](Self::with_properties) makes a message of them again. Fails if it
    /// cannot be sent.
    pub fn into_parts(self) -> Result<(Bytes, Properties<'static>), Error> {
        self.check()?;
        let properties = self.extra.map(|extra| extra.properties).unwrap_or_default();
        Ok((self.body, properties))
    }

    fn text(
        mut self,
        what: &str,
        text: impl Into<String>,
        field: impl for<'p> FnOnce(&'p mut Properties<'static>) -> &'p mut Option<ShortStr<'static>>,
    ) -> Self {
        match ShortStr::try_from(text.into()) {
            Ok(text) => *field(&mut self.extra().properties) = Some(text),
            Err(error) => {
                self.extra().fault.get_or_insert(format!("{what}: {error}"));
            }
        }
        self
    }

    /// With this correlation id, unless it has one.
    pub(crate) fn in_group(mut self, id: &ShortStr<'static>) -> Self {
        self.extra().properties.correlation_id.get_or_insert_with(|| id.clone());
        self
    }

    /// It leaves its queue after this long, in whole milliseconds, unless it says otherwise.
    pub(crate) fn expires_unless_said(self, time: Duration) -> Self {
        let expiration = |extra: &Extra| extra.properties.expiration.is_some();
        match self.extra.as_deref().is_some_and(expiration) {
            true => self,
            false => self.expires_in(time.min(LONGEST)),
        }
    }

    /// Fails if it cannot be sent.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.extra.as_deref() {
            Some(Extra { fault: Some(fault), .. }) => {
                let text = format!("the message cannot be sent: {fault}");
                Err(Error::new(ErrorKind::Invalid, text))
            }
            _ => Ok(()),
        }
    }
}

/// What can be published: a [`Message`], a body, or a payload such as [`Json`](crate::Json).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be published",
    label = "not a message",
    note = "a message is a `Message`, a body as `&str`, `String`, `Vec<u8>` or `Bytes`, or a value of your own in `Json(..)` or `MsgPack(..)`"
)]
pub trait IntoMessage {
    /// The message.
    fn into_message(self) -> Result<Message, Error>;
}

impl IntoMessage for Message {
    fn into_message(self) -> Result<Message, Error> {
        Ok(self)
    }
}

macro_rules! bodies {
    ($($body:ty),*) => {$(
        impl From<$body> for Message {
            fn from(body: $body) -> Self {
                Message::new(body)
            }
        }

        impl IntoMessage for $body {
            fn into_message(self) -> Result<Message, Error> {
                Ok(Message::new(self))
            }
        }
    )*};
}

bodies!(&'static str, String, &'static [u8], Vec<u8>, Bytes);

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn an_id_is_made_unless_there_is_one() {
        let id =
            |message: Message| message.identified().into_parts().unwrap().1.message_id.unwrap();
        assert_eq!(id(Message::new("").message_id("own")).to_string(), "own");
        assert_ne!(id(Message::new("")), id(Message::new("")));
    }

    #[test]
    fn a_timestamp_goes_with_an_id_that_is_made_unless_there_is_one() {
        let timestamp = |message: Message| message.identified().into_parts().unwrap().1.timestamp;
        let long_ago = UNIX_EPOCH + Duration::from_secs(7);
        assert!(timestamp(Message::new("")) > Some(7));
        assert_eq!(timestamp(Message::new("").timestamp(long_ago)), Some(7));
        // It is not known when this was sent first.
        assert_eq!(timestamp(Message::new("").message_id("own")), None);
        let once = Message::new("").identified();
        let again = once.clone().identified();
        assert_eq!(once.into_parts().unwrap().1, again.into_parts().unwrap().1);
    }

    #[test]
    fn what_cannot_be_sent_is_named() {
        let message = Message::new("").kind("x".repeat(256)).header("fine", 1);
        let error = message.check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("type"), "{error}");
        assert_eq!(message.into_parts().unwrap_err().kind(), ErrorKind::Invalid);
        assert!(Message::new("").header("fine", 1).check().is_ok());
    }
}
