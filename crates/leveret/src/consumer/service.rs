//! A handler with the layers around it, as one thing to call.

use std::fmt;
use std::future::ready;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower::util::BoxCloneSyncService;
use tower::{Layer, Service, ServiceExt};

use super::handler::{BoxFuture, Handler};
use super::incoming::Incoming;
use crate::error::{BoxError, Error, ErrorKind};
use crate::retry::Classifiers;

/// What layers wrap: a handler, with the layers inside.
pub type HandlerService = BoxCloneSyncService<Incoming, (), BoxError>;

/// A layer of any type.
pub(super) type BoxLayer = Arc<dyn Fn(HandlerService) -> HandlerService + Send + Sync>;

/// Makes a layer of one from the ecosystem of tower.
pub(super) fn boxed<L>(layer: L) -> BoxLayer
where
    L: Layer<HandlerService> + Send + Sync + 'static,
    L::Service: Service<Incoming, Response = ()> + Clone + Send + Sync + 'static,
    <L::Service as Service<Incoming>>::Error: Into<BoxError>,
    <L::Service as Service<Incoming>>::Future: Send + 'static,
{
    Arc::new(move |inner| {
        BoxCloneSyncService::new(layer.layer(inner).map_err(Into::<BoxError>::into))
    })
}

/// Calls a handler through its layers. A panic is an error like any other.
#[derive(Clone)]
pub(crate) struct Call(Arc<Calling>);

type Calling = dyn Fn(&Incoming) -> BoxFuture<Result<(), BoxError>> + Send + Sync;

impl Call {
    pub(super) fn new<A: 'static>(handler: impl Handler<A>, layers: &[BoxLayer]) -> Self {
        if layers.is_empty() {
            return Call(Arc::new(move |incoming| handler.call(incoming)));
        }
        let handler = Arc::new(handler);
        let inner = HandlerService::new(tower::service_fn(move |incoming| handler.call(&incoming)));
        // The layer that was added first is the outermost.
        let service = layers.iter().rev().fold(inner, |inner, layer| layer(inner));
        Call(Arc::new(move |incoming| Box::pin(service.clone().oneshot(incoming.clone()))))
    }

    /// Calls this and nothing else.
    pub(crate) fn plain(
        call: impl Fn(Incoming) -> BoxFuture<Result<(), BoxError>> + Send + Sync + 'static,
    ) -> Self {
        Call(Arc::new(move |incoming| call(incoming.clone())))
    }

    /// The same, and its errors are classified.
    pub(super) fn classified(self, classifiers: Classifiers) -> Self {
        if classifiers.is_empty() {
            return self;
        }
        let classifiers = Arc::new(classifiers);
        Call(Arc::new(move |incoming| {
            let (handling, classifiers) = (self.call(incoming), Arc::clone(&classifiers));
            Box::pin(async move { handling.await.map_err(|error| classifiers.apply(error)) })
        }))
    }

    pub(crate) fn call(&self, incoming: &Incoming) -> CatchPanic<()> {
        CatchPanic::new(|| (self.0)(incoming))
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Call")
    }
}

/// Runs code of the application. A panic is an error.
#[inline]
pub(super) fn catch_panic<T>(run: impl FnOnce() -> T) -> Result<T, BoxError> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| panicked(&*panic))
}

#[cold]
fn panicked(panic: &(dyn std::any::Any + Send)) -> BoxError {
    let said = panic.downcast_ref::<&str>().copied();
    let said = said.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let text = format!("the handler panicked: {}", said.unwrap_or("it did not say why"));
    Error::new(ErrorKind::Panicked, text).into()
}

/// A future whose panic is an error, as is a panic of the function that makes it.
pub(crate) struct CatchPanic<T>(BoxFuture<Result<T, BoxError>>);

impl<T: Send + 'static> CatchPanic<T> {
    #[inline]
    pub(super) fn new(make: impl FnOnce() -> BoxFuture<Result<T, BoxError>>) -> Self {
        CatchPanic(catch_panic(make).unwrap_or_else(|panic| Box::pin(ready(Err(panic)))))
    }
}

impl<T> Future for CatchPanic<T> {
    type Output = Result<T, BoxError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let polled = catch_panic(|| self.0.as_mut().poll(context));
        polled.unwrap_or_else(|panic| Poll::Ready(Err(panic)))
    }
}
