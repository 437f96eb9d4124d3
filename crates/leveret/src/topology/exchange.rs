//! Exchanges.

use std::fmt;

use super::arguments::Arguments;
use super::binding::Binding;
use crate::amqp::Value;

/// An exchange: durable, and open to publishers, unless said otherwise.
///
/// ```
/// use leveret::Exchange;
///
/// let orders = Exchange::topic("orders").alternate("unrouted");
/// let audit = Exchange::fanout("audit").bind("orders", "#");
/// # let _ = (orders, audit);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Exchange {
    pub(crate) name: String,
    pub(crate) kind: ExchangeKind,
    pub(crate) durable: bool,
    pub(crate) auto_delete: bool,
    pub(crate) internal: bool,
    pub(crate) arguments: Arguments,
    /// Moved into the topology that the exchange becomes part of.
    pub(crate) bindings: Vec<Binding>,
}

/// How an exchange chooses who gets a message.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ExchangeKind {
    /// By a key that is equal.
    Direct,
    /// By a pattern of the key's words: `*` is one word, `#` any number of them.
    Topic,
    /// All that are bound.
    Fanout,
    /// By the message's headers.
    Headers,
    /// As a plugin of the broker has it.
    Other(String),
}

impl ExchangeKind {
    /// Its name on the wire.
    pub fn as_str(&self) -> &str {
        match self {
            ExchangeKind::Direct => "direct",
            ExchangeKind::Topic => "topic",
            ExchangeKind::Fanout => "fanout",
            ExchangeKind::Headers => "headers",
            ExchangeKind::Other(name) => name,
        }
    }
}

impl From<&str> for ExchangeKind {
    fn from(name: &str) -> Self {
        match name {
            "direct" => ExchangeKind::Direct,
            "topic" => ExchangeKind::Topic,
            "fanout" => ExchangeKind::Fanout,
            "headers" => ExchangeKind::Headers,
            other => ExchangeKind::Other(other.to_owned()),
        }
    }
}

impl fmt::Display for ExchangeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Exchange {
    /// An exchange of any kind.
    pub fn new(name: impl Into<String>, kind: ExchangeKind) -> Self {
        Exchange {
            name: name.into(),
            kind,
            durable: true,
            auto_delete: false,
            internal: false,
            arguments: Arguments::default(),
            bindings: Vec::new(),
        }
    }

    /// Messages go where the key is equal.
    pub fn direct(name: impl Into<String>) -> Self {
        Exchange::new(name, ExchangeKind::Direct)
    }

    /// Messages go where the pattern fits the key.
    pub fn topic(name: impl Into<String>) -> Self {
        Exchange::new(name, ExchangeKind::Topic)
    }

    /// Messages go everywhere.
    pub fn fanout(name: impl Into<String>) -> Self {
        Exchange::new(name, ExchangeKind::Fanout)
    }

    /// Messages go where the headers fit.
    pub fn headers(name: impl Into<String>) -> Self {
        Exchange::new(name, ExchangeKind::Headers)
    }

    /// Gone when the broker restarts.
    #[must_use]
    pub fn transient(mut self) -> Self {
        self.durable = false;
        self
    }

    /// Gone when its last binding goes.
    #[must_use]
    pub fn auto_delete(mut self) -> Self {
        self.auto_delete = true;
        self
    }

    /// Takes messages from other exchanges only.
    #[must_use]
    pub fn internal(mut self) -> Self {
        self.internal = true;
        self
    }

    /// Where messages go that it routes nowhere.
    #[must_use]
    pub fn alternate(self, exchange: impl Into<String>) -> Self {
        self.argument("alternate-exchange", exchange.into())
    }

    /// Any other argument.
    #[must_use]
    pub fn argument(mut self, name: impl Into<String>, value: impl Into<Value<'static>>) -> Self {
        self.arguments.set(name, value);
        self
    }

    /// Gets messages from another exchange.
    #[must_use]
    pub fn bind(mut self, source: impl Into<String>, routing_key: impl Into<String>) -> Self {
        let binding = Binding::to_exchange(self.name.clone(), source, routing_key);
        self.bindings.push(binding);
        self
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its kind.
    pub fn kind(&self) -> &ExchangeKind {
        &self.kind
    }

    /// Whether it survives a restart of the broker.
    pub fn is_durable(&self) -> bool {
        self.durable
    }

    /// Whether it goes with its last binding.
    pub fn is_auto_delete(&self) -> bool {
        self.auto_delete
    }

    /// Whether it takes messages from other exchanges only.
    pub fn is_internal(&self) -> bool {
        self.internal
    }

    /// Its arguments.
    pub fn arguments(&self) -> impl Iterator<Item = (&str, &Value<'static>)> {
        self.arguments.iter()
    }
}
