//! The arguments of queues, exchanges and bindings, before they are put on the wire.

use std::collections::BTreeMap;

use crate::amqp::{Table, Value};
use crate::error::{Error, ErrorKind};

/// Arguments by name. A later value replaces an earlier one.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Arguments(pub(super) BTreeMap<String, Value<'static>>);

impl Arguments {
    pub(crate) fn set(&mut self, name: impl Into<String>, value: impl Into<Value<'static>>) {
        self.0.insert(name.into(), value.into());
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Value<'static>> {
        self.0.get(name)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Value<'static>)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// As they go on the wire.
    pub(crate) fn to_table(&self) -> Result<Table<'static>, Error> {
        let pairs = self.0.iter().map(|(name, value)| (name.as_str(), value.clone()));
        Table::from_pairs(pairs)
            .map_err(|error| Error::caused(ErrorKind::Invalid, "an argument cannot be sent", error))
    }
}
