//! Headers taken apart and put together again.

use leveret_wire::{Array, LongStr, ShortStr, Table, Value};

/// The fields of a table in order. Unlike a [`Table`] it changes the first of several that have the same name and
/// leaves the others alone, as RabbitMQ does.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Fields<'a>(Vec<(ShortStr<'a>, Value<'a>)>);

impl<'a> Fields<'a> {
    pub(crate) fn of(table: &'a Table<'_>) -> Self {
        Fields(table.iter().collect())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The first of that name.
    pub(crate) fn get(&self, name: &str) -> Option<&Value<'a>> {
        self.0.iter().find(|(field, _)| field == name).map(|(_, value)| value)
    }

    /// Sets the first of that name, or appends it.
    pub(crate) fn set(&mut self, name: &'static str, value: impl Into<Value<'a>>) {
        let value = value.into();
        match self.0.iter_mut().find(|(field, _)| field == name) {
            Some((_, old)) => *old = value,
            None => self.push(name, value),
        }
    }

    pub(crate) fn push(&mut self, name: &'static str, value: impl Into<Value<'a>>) {
        self.0.push((ShortStr::from_static(name), value.into()));
    }

    pub(crate) fn push_front(&mut self, name: &'static str, value: impl Into<Value<'a>>) {
        self.0.insert(0, (ShortStr::from_static(name), value.into()));
    }

    /// Takes the first of that name out.
    pub(crate) fn remove(&mut self, name: &str) {
        if let Some(place) = self.0.iter().position(|(field, _)| field == name) {
            self.0.remove(place);
        }
    }

    /// By name, byte for byte; several of one name stay in their order.
    pub(crate) fn sort(&mut self) {
        self.0.sort_by(|(one, _), (other, _)| one.cmp(other));
    }

    /// By name, and of each name only the first.
    pub(crate) fn sort_once_each(&mut self) {
        self.sort();
        self.0.dedup_by(|later, first| later.0 == first.0);
    }

    /// The table, with every value in the spelling that RabbitMQ writes.
    pub(crate) fn to_table(&self) -> Table<'static> {
        let mut bytes = Vec::new();
        for (name, value) in &self.0 {
            // One at a time: inserting into a table would merge those of the same name. It cannot fail, since the
            // values come from tables, where they were as deep as here.
            let mut field = Table::new();
            if field.insert(name, respelled(value)).is_ok() {
                bytes.extend_from_slice(field.as_bytes());
            }
        }
        Table::decode(&bytes).unwrap_or_default().into_owned()
    }
}

/// The same value without spellings that are read but never written: `L` for `l`, a true that is not 1.
fn respelled<'a>(value: &Value<'a>) -> Value<'a> {
    match value {
        Value::Table(table) => Fields::of(table).to_table().into(),
        Value::Array(array) => Array::from_values(array.iter().map(|value| respelled(&value)))
            .map_or_else(|_| value.clone(), Value::Array),
        other => other.clone(),
    }
}

/// A name as the value of a header.
pub(crate) fn text<'a>(name: &'a ShortStr<'_>) -> LongStr<'a> {
    LongStr::from(name.as_bytes())
}

/// Values that are known to fit an array: names, entries of ours, and what was in such an array before.
pub(crate) fn array<'a>(values: impl IntoIterator<Item = Value<'a>>) -> Array<'static> {
    Array::from_values(values).unwrap_or_default()
}
