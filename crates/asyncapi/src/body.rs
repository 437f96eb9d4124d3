//! [`Body`] maps the type of a body to its media type and the type of its value. [`BodyType`] is that pair as a value.

use std::any::type_name;

use leveret::{Bytes, Json, MsgPack, Payload};

pub(crate) const JSON: &str = "application/json";

/// The body of a message, by the type that a handler takes or a program publishes.
///
/// `()` says nothing about a body that is empty or not known. A format of your own needs two lines:
///
/// ```
/// use leveret_asyncapi::Body;
///
/// struct Protobuf<T>(T);
///
/// impl<T> Body for Protobuf<T> {
///     type Value = T;
///     const CONTENT_TYPE: Option<&'static str> = Some("application/protobuf");
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the type of a body",
    label = "not a body",
    note = "bodies are `Json<T>`, `MsgPack<T>`, `Payload<T>`, `String`, `Bytes`, and `()` for one of which nothing is known; name a value of your own in \
            one of them, as in `Json<Order>`"
)]
pub trait Body {
    /// The type of the value in the body. The document names the message after it, and takes its
    /// [schema](crate::AsyncApi::schema).
    type Value: ?Sized;

    /// The media type, or `None` if it differs from message to message.
    const CONTENT_TYPE: Option<&'static str>;
}

macro_rules! bodies {
    ($($body:ty $(, $generic:ident)?: $value:ty, $content_type:expr;)*) => {$(
        impl$(<$generic>)? Body for $body {
            type Value = $value;
            const CONTENT_TYPE: Option<&'static str> = $content_type;
        }
    )*};
}

bodies! {
    Json<T>, T: T, Some(JSON);
    MsgPack<T>, T: T, Some("application/msgpack");
    Payload<T>, T: T, None;
    String: String, Some("text/plain");
    &str: String, Some("text/plain");
    Bytes: Bytes, Some("application/octet-stream");
    Vec<u8>: Bytes, Some("application/octet-stream");
    &[u8]: Bytes, Some("application/octet-stream");
    (): (), None;
}

/// What the document says about a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BodyType {
    pub(crate) value: &'static str,
    pub(crate) content_type: Option<&'static str>,
}

impl BodyType {
    /// `None` for `()`.
    pub(crate) fn of<B: Body>() -> Option<Self> {
        let is_known = type_name::<B>() != type_name::<()>();
        is_known.then(|| BodyType { value: type_name::<B::Value>(), content_type: B::CONTENT_TYPE })
    }
}
