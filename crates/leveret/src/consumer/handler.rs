//! Handlers: async functions whose arguments are picked from the message by type.

use std::pin::Pin;

use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::incoming::{Given, Incoming};
use crate::amqp::Table;
use crate::error::{BoxError, Error, ErrorKind};
use crate::message::Message;
use crate::payload::{self, Json, MsgPack, Payload};
use crate::retry::named;
use crate::rpc::{IntoReply, Method};

/// A future in a box.
pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// An argument of a handler, picked from the message.
///
/// There are [`Json`], [`MsgPack`] and [`Payload`] for bodies as values, [`Bytes`] for the body as it is, [`State`] for what
/// handlers share, [`Headers`], [`Attempt`], and [`Incoming`] for everything else; methods of a service may have a
/// [`Replier`](crate::Replier).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be an argument of a handler or method",
    label = "this argument is not picked from a message",
    note = "arguments are `Json<T>`, `MsgPack<T>`, `Payload<T>`, `String` or `Bytes` for the body, `State<T>` for what `.state(..)` was given, \
            `Headers`, `Attempt` and `Incoming`; a plain value of your own goes into one of them, as in `Json(order): Json<Order>`"
)]
pub trait FromIncoming: Sized {
    /// Picks it. A failure counts as one of the message, which is not tried again.
    fn from_incoming(incoming: &Incoming) -> Result<Self, Error>;

    /// Whether it can be picked at all, asked before the consumer begins.
    #[doc(hidden)]
    fn check(_given: &Given<'_>) -> Result<(), Error> {
        Ok(())
    }
}

impl<T: DeserializeOwned> FromIncoming for Json<T> {
    fn from_incoming(incoming: &Incoming) -> Result<Self, Error> {
        payload::from_json(incoming.body()).map(Json)
    }
}

impl<T: DeserializeOwned> FromIncoming for MsgPack<T> {
    fn from_incoming(incoming: &Incoming) -> Result<Self, Error> {
        payload::from_msgpack(incoming.body()).map(MsgPack)
    }
}

impl<T: DeserializeOwned> FromIncoming for Payload<T> {
    fn from_incoming(incoming: &Incoming) -> Result<Self, Error> {
        let properties = incoming.properties();
        let content_type = properties.content_type.as_ref().and_then(|text| text.to_str().ok());
        payload::from_content_type(content_type, incoming.body()).map(Payload)
    }
}

impl FromIncoming for Bytes {
    fn from_incoming(incoming: &Incoming) -> Result<Self, Error> {
        Ok(incoming.body().clone())
    }
}

/// Text in UTF-8.
impl FromIncoming for String {
    fn from_incoming(incoming: &Incoming) -> Result<Self, Error> {
        String::from_utf8(incoming.body().to_vec()).map_err(|error| {
            Error::caused(ErrorKind::Payload, "the body is not text in UTF-8", error)
        })
    }
}

impl FromIncoming for Incoming {
    fn from_incoming(incoming: &Incoming) -> Result<Self, Error> {
        Ok(incoming.clone())
    }
}

/// The headers of the message, empty if it has none. As an argument of a handler.
#[derive(Clone, Debug, PartialEq)]
pub struct Headers(pub Table<'static>);

impl FromIncoming for Headers {
    fn from_incoming(incoming: &Incoming) -> Result<Self, Error> {
        let headers = incoming.properties().headers;
        Ok(Headers(headers.map_or_else(Table::new, Table::into_owned)))
    }
}

/// Which attempt this is: 1 at first, 2 if one failed before. As an argument of a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt(pub u32);

impl FromIncoming for Attempt {
    fn from_incoming(incoming: &Incoming) -> Result<Self, Error> {
        Ok(Attempt(incoming.attempt()))
    }
}

/// What was given to the consumer for its handlers to share. As an argument of a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State<T>(pub T);

impl<T: Clone + Send + Sync + 'static> FromIncoming for State<T> {
    fn from_incoming(incoming: &Incoming) -> Result<Self, Error> {
        incoming.state().map(State).ok_or_else(|| missing_state::<T>("a handler or method", "it"))
    }

    fn check(given: &Given<'_>) -> Result<(), Error> {
        match given.has_state::<T>() {
            true => Ok(()),
            false if given.is_service() => Err(missing_state::<T>("a method", "the service")),
            false => Err(missing_state::<T>("a handler", "the consumer, before .handle(..)")),
        }
    }
}

fn missing_state<T>(function: &str, taker: &str) -> Error {
    let text = format!(
        "{function} takes State<{0}>, and no such value was given: call .state(value) with a {0} on {taker}",
        std::any::type_name::<T>()
    );
    Error::new(ErrorKind::Invalid, text)
}

/// What a handler may return: nothing, or a `Result`. An error that is a [`Failure`](crate::Failure) says what should become of
/// the message; any other one is tried again.
#[diagnostic::on_unimplemented(
    message = "a handler cannot return `{Self}`",
    label = "not an outcome of a message",
    note = "a handler returns nothing, or a `Result<(), E>` whose error is a `Failure`, a `BoxError` or any `std::error::Error` that is `Send + Sync`"
)]
pub trait IntoOutcome {
    /// Whether the message is done.
    fn into_outcome(self) -> Result<(), BoxError>;
}

impl IntoOutcome for () {
    fn into_outcome(self) -> Result<(), BoxError> {
        Ok(())
    }
}

impl<E: Into<BoxError>> IntoOutcome for Result<(), E> {
    fn into_outcome(self) -> Result<(), BoxError> {
        self.map_err(named)
    }
}

/// An async function that handles a message. Its arguments are picked by type, see [`FromIncoming`]; what it returns
/// decides whether the message is done.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler",
    label = "not an async function that leveret can call with a message",
    note = "a handler is an `async fn` with at most 6 arguments, each of which can be picked from a message: `Json<T>`, `String`, `Bytes`, `State<T>`, \
            `Headers`, `Attempt`, `Incoming`",
    note = "it returns nothing or a `Result<(), E>`, where `E` is a `Failure`, a `BoxError` or any error that is `Send + Sync`",
    note = "its future has to be `Send`: no `Rc`, `RefCell` borrow or `MutexGuard` of std may be held across an `.await`",
    note = "a closure has to be `Fn + Send + Sync + 'static`: move clones into it, and shared values into `.state(..)`"
)]
pub trait Handler<Arguments>: Send + Sync + 'static {
    /// Handles a message.
    fn call(&self, incoming: &Incoming) -> BoxFuture<Result<(), BoxError>>;

    /// Whether the arguments can be picked at all, asked before the consumer begins.
    #[doc(hidden)]
    fn check(&self, _given: &Given<'_>) -> Result<(), Error> {
        Ok(())
    }
}

/// Picks the arguments, or returns why not.
macro_rules! pick {
    ($incoming:ident: $($argument:ident),*) => {$(
        let $argument = match $argument::from_incoming($incoming) {
            Ok(argument) => argument,
            Err(error) => return Box::pin(std::future::ready(Err(error.into()))),
        };
    )*};
}

macro_rules! handlers {
    ($(($($argument:ident),*))*) => {$(
        impl<F, Fut, Out, $($argument),*> Handler<($($argument,)*)> for F
        where
            F: Fn($($argument),*) -> Fut + Send + Sync + 'static,
            Fut: Future<Output = Out> + Send + 'static,
            Out: IntoOutcome,
            $($argument: FromIncoming,)*
        {
            #[allow(non_snake_case, unused_variables)]
            fn call(&self, incoming: &Incoming) -> BoxFuture<Result<(), BoxError>> {
                pick!(incoming: $($argument),*);
                let handling = self($($argument),*);
                Box::pin(async move { handling.await.into_outcome() })
            }

            #[allow(unused_variables)]
            fn check(&self, given: &Given<'_>) -> Result<(), Error> {
                $($argument::check(given)?;)*
                Ok(())
            }
        }

        impl<F, Fut, Out, $($argument),*> Method<($($argument,)*)> for F
        where
            F: Fn($($argument),*) -> Fut + Send + Sync + 'static,
            Fut: Future<Output = Out> + Send + 'static,
            Out: IntoReply,
            $($argument: FromIncoming,)*
        {
            #[allow(non_snake_case, unused_variables)]
            fn call(&self, incoming: &Incoming) -> BoxFuture<Result<Option<Message>, BoxError>> {
                pick!(incoming: $($argument),*);
                let handling = self($($argument),*);
                Box::pin(async move { handling.await.into_reply() })
            }

            #[allow(unused_variables)]
            fn check(&self, given: &Given<'_>) -> Result<(), Error> {
                $($argument::check(given)?;)*
                Ok(())
            }
        }
    )*};
}

handlers! { () (A) (A, B) (A, B, C) (A, B, C, D) (A, B, C, D, E) (A, B, C, D, E, G) }
