//! Bindings: which messages of an exchange go where.

use std::fmt;

use super::arguments::Arguments;
use crate::amqp::Value;

/// Has messages of an exchange go to a queue or to another exchange.
#[derive(Clone, Debug, PartialEq)]
pub struct Binding {
    pub(crate) source: String,
    pub(crate) destination: Destination,
    pub(crate) routing_key: String,
    pub(crate) arguments: Arguments,
}

/// Where a binding leads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// To the queue of this name.
    Queue(String),
    /// To the exchange of this name.
    Exchange(String),
}

impl Binding {
    /// From an exchange to a queue.
    pub fn to_queue(
        queue: impl Into<String>,
        exchange: impl Into<String>,
        routing_key: impl Into<String>,
    ) -> Self {
        Binding::new(Destination::Queue(queue.into()), exchange.into(), routing_key.into())
    }

    /// From an exchange to another.
    pub fn to_exchange(
        destination: impl Into<String>,
        source: impl Into<String>,
        routing_key: impl Into<String>,
    ) -> Self {
        Binding::new(Destination::Exchange(destination.into()), source.into(), routing_key.into())
    }

    fn new(destination: Destination, source: String, routing_key: String) -> Self {
        Binding { source, destination, routing_key, arguments: Arguments::default() }
    }

    /// With an argument: what the headers have to be, for a headers exchange.
    #[must_use]
    pub fn argument(mut self, name: impl Into<String>, value: impl Into<Value<'static>>) -> Self {
        self.arguments.set(name, value);
        self
    }

    /// The exchange that messages come from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Where they go.
    pub fn destination(&self) -> &Destination {
        &self.destination
    }

    /// Which of them.
    pub fn routing_key(&self) -> &str {
        &self.routing_key
    }

    /// Its arguments.
    pub fn arguments(&self) -> impl Iterator<Item = (&str, &Value<'static>)> {
        self.arguments.iter()
    }

    pub(crate) fn is_to_queue(&self) -> bool {
        matches!(self.destination, Destination::Queue(_))
    }
}

impl fmt::Display for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "binding of {} to exchange {:?}", self.destination, self.source)?;
        match self.routing_key.as_str() {
            "" => Ok(()),
            key => write!(f, " with key {key:?}"),
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Destination::Queue(name) => write!(f, "queue {name:?}"),
            Destination::Exchange(name) => write!(f, "exchange {name:?}"),
        }
    }
}
