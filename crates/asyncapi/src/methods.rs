//! [`Methods`] holds the types of the requests and replies of a service, by method.

use std::collections::BTreeMap;

use leveret::{Error, ServiceBuilder};

use crate::body::{Body, BodyType};

/// The bodies of the requests and replies of a service, for [`AsyncApi::serves`](crate::AsyncApi::serves).
///
/// ```
/// use leveret::Json;
/// use leveret_asyncapi::Methods;
///
/// let methods = Methods::new()
///     .method::<String, Json<f64>>("quote")
///     .method::<(), Json<Vec<String>>>("list") // the request is empty
///     .fallback::<String, ()>();
/// # let _ = methods;
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Methods {
    by_name: BTreeMap<String, CallBodies>,
    fallback: Option<CallBodies>,
    /// A method that was described twice.
    twice: Option<String>,
}

/// The bodies of a request and its reply, `None` where nothing is known.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallBodies {
    pub(crate) request: Option<BodyType>,
    pub(crate) reply: Option<BodyType>,
}

impl CallBodies {
    fn of<Request: Body, Reply: Body>() -> Self {
        CallBodies { request: BodyType::of::<Request>(), reply: BodyType::of::<Reply>() }
    }
}

impl Methods {
    /// Describes no method yet. The document has undescribed methods too, without types of bodies.
    pub fn new() -> Self {
        Methods::default()
    }

    /// Describes the method of this name.
    pub fn method<Request: Body, Reply: Body>(mut self, name: &str) -> Self {
        if self.by_name.insert(name.to_owned(), CallBodies::of::<Request, Reply>()).is_some() {
            self.twice = Some(name.to_owned());
        }
        self
    }

    /// Describes the [fallback](ServiceBuilder::fallback).
    pub fn fallback<Request: Body, Reply: Body>(mut self) -> Self {
        self.fallback = Some(CallBodies::of::<Request, Reply>());
        self
    }

    pub(crate) fn of(&self, name: &str) -> CallBodies {
        self.by_name.get(name).copied().unwrap_or_default()
    }

    pub(crate) fn of_fallback(&self) -> CallBodies {
        self.fallback.unwrap_or_default()
    }

    /// Fails if the service does not have what this describes.
    pub(crate) fn check(&self, service: &ServiceBuilder) -> Result<(), Error> {
        let (service_name, names) = (service.name(), service.method_names());
        if let Some(name) = &self.twice {
            return Err(Error::invalid(format!(
                "method {name:?} of service {service_name:?} is described twice: leave one description out"
            )));
        }
        if let Some(name) = self.by_name.keys().find(|name| !names.contains(name)) {
            return Err(Error::invalid(format!(
                "service {service_name:?} has no method {name:?} to describe: its methods are {names:?}"
            )));
        }
        if self.fallback.is_some() && !service.has_fallback() {
            return Err(Error::invalid(format!(
                "service {service_name:?} has no fallback to describe: add one by ServiceBuilder::fallback, or leave out its \
                 description"
            )));
        }
        Ok(())
    }
}
