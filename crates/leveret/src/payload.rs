//! Bodies as values: JSON and MessagePack through serde.

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, ErrorKind};
use crate::message::{IntoMessage, Message};

pub(crate) const JSON: &str = "application/json";
pub(crate) const MSGPACK: &str = "application/msgpack";

/// A value whose body is JSON: to publish one, or as an argument of a handler.
///
/// ```
/// use leveret::{IntoMessage, Json};
///
/// let message = Json(&["a", "b"]).into_message()?;
/// # Ok::<(), leveret::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Json<T>(pub T);

/// A value whose body is MessagePack, with the names of fields: to publish one, or as an argument of a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsgPack<T>(pub T);

/// A value whose body is what its content type says, JSON or MessagePack; JSON if it says nothing. As an argument of a
/// handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload<T>(pub T);

impl<T: Serialize> IntoMessage for Json<T> {
    fn into_message(self) -> Result<Message, Error> {
        let body = serde_json::to_vec(&self.0).map_err(|error| cannot_encode("JSON", error))?;
        Ok(Message::new(body).content_type(JSON))
    }
}

impl<T: Serialize> IntoMessage for MsgPack<T> {
    fn into_message(self) -> Result<Message, Error> {
        let body = rmp_serde::to_vec_named(&self.0)
            .map_err(|error| cannot_encode("MessagePack", error))?;
        Ok(Message::new(body).content_type(MSGPACK))
    }
}

fn cannot_encode(
    format: &str,
    error: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> Error {
    Error::caused(ErrorKind::Payload, format!("the value cannot be written as {format}"), error)
}

pub(crate) fn from_json<T: DeserializeOwned>(body: &Bytes) -> Result<T, Error> {
    serde_json::from_slice(body).map_err(|error| {
        Error::caused(ErrorKind::Payload, "the body is not the expected JSON", error)
    })
}

pub(crate) fn from_msgpack<T: DeserializeOwned>(body: &Bytes) -> Result<T, Error> {
    rmp_serde::from_slice(body).map_err(|error| {
        Error::caused(ErrorKind::Payload, "the body is not the expected MessagePack", error)
    })
}

/// By the media type, without its parameters.
pub(crate) fn from_content_type<T: DeserializeOwned>(
    content_type: Option<&str>,
    body: &Bytes,
) -> Result<T, Error> {
    let media_type = content_type.unwrap_or(JSON).split(';').next().unwrap_or_default().trim();
    match media_type.to_ascii_lowercase().as_str() {
        MSGPACK | "application/x-msgpack" | "application/vnd.msgpack" => from_msgpack(body),
        JSON | "text/json" | "" => from_json(body),
        other if other.ends_with("+json") => from_json(body),
        other => {
            let text = format!(
                "a body of the content type {other:?} cannot be read: it is neither JSON nor MessagePack; take `Bytes` \
                 and decode it in the handler"
            );
            Err(Error::new(ErrorKind::Payload, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_content_type_decides() {
        let json = Json(vec![1, 2]).into_message().unwrap();
        let msgpack = MsgPack(vec![1, 2]).into_message().unwrap();
        let read = |content_type, body| from_content_type::<Vec<i32>>(content_type, body);
        assert_eq!(read(Some("application/json; charset=utf-8"), &json.body).unwrap(), [1, 2]);
        assert_eq!(read(Some("application/problem+json"), &json.body).unwrap(), [1, 2]);
        assert_eq!(read(None, &json.body).unwrap(), [1, 2]);
        assert_eq!(read(Some("application/msgpack"), &msgpack.body).unwrap(), [1, 2]);
        let error = read(Some("text/plain"), &json.body).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Payload);
    }
}
