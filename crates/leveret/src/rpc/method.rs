//! The methods of a service: async functions whose arguments are picked from the request and whose result is the reply.

use std::collections::HashMap;
use std::sync::Arc;

use super::address::ServiceAddress;
use crate::consumer::{BoxFuture, Given, Handler, Incoming};
use crate::error::{BoxError, Error};
use crate::message::{IntoMessage, Message};
use crate::retry::{Failure, named};

/// An async function that is called for a request. Its arguments are picked by type, see
/// [`FromIncoming`](crate::FromIncoming); what it returns is the reply, see [`IntoReply`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a method of a service",
    label = "not an async function that leveret can call with a request",
    note = "a method is an `async fn` with at most 6 arguments, each of which can be picked from a request: `Json<T>`, `String`, `Bytes`, `State<T>`, \
            `Headers`, `Incoming`, `Replier`",
    note = "it returns what can be published, as `Json<T>`, `String` or `()`, or a `Result` of that, whose error is a `Failure`, a `BoxError` or any error \
            that is `Send + Sync`",
    note = "its future has to be `Send`: no `Rc`, `RefCell` borrow or `MutexGuard` of std may be held across an `.await`",
    note = "a closure has to be `Fn + Send + Sync + 'static`: move clones into it, and shared values into `.state(..)`"
)]
pub trait Method<Arguments>: Send + Sync + 'static {
    /// Handles a request.
    fn call(&self, incoming: &Incoming) -> BoxFuture<Result<Option<Message>, BoxError>>;

    /// Whether the arguments can be picked at all, asked before the service begins.
    #[doc(hidden)]
    fn check(&self, _given: &Given<'_>) -> Result<(), Error> {
        Ok(())
    }
}

/// What a method may return: `()`, which is an empty reply; anything that [can be published](IntoMessage); [`End`]; or a
/// `Result` of one of them, whose error becomes an error reply.
#[diagnostic::on_unimplemented(
    message = "a method cannot reply with `{Self}`",
    label = "not a reply",
    note = "a method returns `()`, `Json<T>`, `MsgPack<T>`, `String`, `Bytes`, a `Message` or `End`, or a `Result` of one of them; wrap a value of your own: \
            `Json(quote)`"
)]
pub trait IntoReply {
    /// The reply; `None` to end without a value.
    fn into_reply(self) -> Result<Option<Message>, BoxError>;
}

/// Ends the replies to a call without another value: for methods that have sent all they had with a
/// [`Replier`](super::Replier).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End;

impl IntoReply for End {
    fn into_reply(self) -> Result<Option<Message>, BoxError> {
        Ok(None)
    }
}

impl IntoReply for () {
    fn into_reply(self) -> Result<Option<Message>, BoxError> {
        Ok(Some(Message::default()))
    }
}

impl<T: IntoMessage> IntoReply for T {
    fn into_reply(self) -> Result<Option<Message>, BoxError> {
        let message = self.into_message().and_then(|message| message.check().map(|()| message));
        message.map(Some).map_err(|error| Failure::permanent(error).kind("unencodable").into())
    }
}

impl<T: IntoReply, E: Into<BoxError>> IntoReply for Result<T, E> {
    fn into_reply(self) -> Result<Option<Message>, BoxError> {
        self.map_err(named)?.into_reply()
    }
}

/// A method of any type.
type BoxMethod = Arc<Calling>;

/// Checks the arguments of a method against what its service was given.
type CheckArguments = Arc<dyn Fn(&Given<'_>) -> Result<(), Error> + Send + Sync>;

type Calling = dyn Fn(&Incoming) -> BoxFuture<Result<Option<Message>, BoxError>> + Send + Sync;

/// The methods of a service by their names.
#[derive(Clone)]
pub(super) struct Methods {
    pub(super) address: ServiceAddress,
    by_name: HashMap<Box<[u8]>, BoxMethod>,
    /// A name that was given to two of them.
    twice: Option<String>,
    /// Whether what was given to the service is enough for each method.
    checks: Vec<CheckArguments>,
    /// What gets the requests for other methods.
    fallback: Option<BoxMethod>,
}

impl Methods {
    pub(super) fn new(address: ServiceAddress) -> Self {
        Methods {
            address,
            by_name: HashMap::new(),
            twice: None,
            checks: Vec::new(),
            fallback: None,
        }
    }

    pub(super) fn add<A: 'static>(&mut self, name: &str, method: impl Method<A>) {
        let method = self.checked(method);
        if self.by_name.insert(name.as_bytes().into(), method).is_some() {
            self.twice = Some(name.to_owned());
        }
    }

    /// A name that was given to two methods.
    pub(super) fn twice(&self) -> Option<&str> {
        self.twice.as_deref()
    }

    pub(super) fn set_fallback<A: 'static>(&mut self, method: impl Method<A>) {
        self.fallback = Some(self.checked(method));
    }

    /// The method as it is called. Its arguments are checked with those of the others.
    fn checked<A: 'static>(&mut self, method: impl Method<A>) -> BoxMethod {
        let method = Arc::new(method);
        let called = Arc::clone(&method);
        self.checks.push(Arc::new(move |given| method.check(given)));
        Arc::new(move |incoming| called.call(incoming))
    }

    /// Whether the arguments of all methods can be picked from requests to a service that was given this.
    pub(super) fn check(&self, given: &Given<'_>) -> Result<(), Error> {
        self.checks.iter().try_for_each(|check| check(given))
    }

    pub(super) fn has_fallback(&self) -> bool {
        self.fallback.is_some()
    }

    /// Their names, sorted.
    pub(super) fn names(&self) -> Vec<String> {
        let name = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        let mut names: Vec<String> = self.by_name.keys().map(|key| name(key)).collect();
        names.sort();
        names
    }

    /// The method that a request is for, or why there is none.
    fn of(&self, incoming: &Incoming) -> Result<&BoxMethod, BoxError> {
        let (exchange, key) = (incoming.exchange(), incoming.routing_key());
        let properties = incoming.properties();
        let kind = properties.kind.as_ref().map(|kind| kind.as_bytes());
        let name = self.address.method(exchange.as_bytes(), key.as_bytes(), kind);
        self.by_name.get(name).or(self.fallback.as_ref()).ok_or_else(|| {
            let service = &self.address.service;
            let text = match String::from_utf8_lossy(name) {
                name if name.is_empty() => format!(
                    "the request names no method in its property \"type\", and service {service:?} has none for such requests \
                     (ServiceBuilder::fallback is one)"
                ),
                name => format!("service {service:?} has no method {name:?}"),
            };
            Failure::permanent(text).kind("unknown-method").into()
        })
    }
}

/// Calls the method that a request is for. Its caller sends what the method returns.
pub(super) struct Dispatch(pub(super) Arc<Methods>);

impl Handler<Dispatch> for Dispatch {
    fn call(&self, incoming: &Incoming) -> BoxFuture<Result<(), BoxError>> {
        let method = match self.0.of(incoming) {
            Ok(method) => method(incoming),
            Err(error) => return Box::pin(std::future::ready(Err(error))),
        };
        let route = incoming.reply_route().cloned();
        Box::pin(async move {
            let value = method.await?;
            if let Some(route) = route {
                route.set_returned(value);
            }
            Ok(())
        })
    }
}
