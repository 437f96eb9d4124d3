//! Deaths as 3.10 keeps them: in the `x-death` header, whoever wrote it.

use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};
use leveret_wire::{Properties, RawProperties, Table, Value};

use super::{Death, Dying, ENTRY, REJECTED, Station, X_DEATH};
use crate::fields::{Fields, array, text};

/// The properties of a message that has died, and its `x-death` apart from them: that is put together when somebody is to see
/// it, and not at each death.
#[derive(Clone, Debug)]
pub(super) struct History {
    /// All but the `x-death`.
    pub(super) properties: RawProperties,
    /// In the order in which they are told; shared by all messages that have been through the same.
    entries: Vec<Arc<Entry>>,
}

/// An entry of an `x-death`.
#[derive(Clone, Debug)]
struct Entry {
    fields: Table<'static>,
    queue: Option<Value<'static>>,
    reason: Option<Value<'static>>,
    has_count: bool,
}

impl Entry {
    fn new(fields: &Fields<'_>) -> Arc<Self> {
        let value = |name| fields.get(name).map(|value| value.clone().into_owned());
        Arc::new(Entry {
            fields: fields.to_table(),
            queue: value("queue"),
            reason: value("reason"),
            has_count: has_count(fields),
        })
    }
}

fn has_count(fields: &Fields<'_>) -> bool {
    !matches!(fields.get("count"), None | Some(Value::Void))
}

impl History {
    /// The properties and entries of a message after a death.
    pub(super) fn after(before: Option<&History>, dying: &Dying<'_>, death: &Death<'_>) -> Self {
        match before {
            Some(before) => before.followed_by(dying, death),
            None => History::begin(dying, death),
        }
    }

    /// The first death that happens here. Others may have written of earlier ones.
    fn begin(dying: &Dying<'_>, death: &Death<'_>) -> Self {
        let mut properties = dying.properties.get();
        let headers = properties.headers.take().unwrap_or_default();
        let mut fields = Fields::of(&headers);
        let entry = entry(dying, death, &properties, &fields);
        let entries = match fields.get(X_DEATH) {
            None => {
                fields.set("x-first-death-reason", death.reason.name());
                fields.set("x-first-death-queue", text(&death.queue));
                fields.set("x-first-death-exchange", text(&dying.exchange));
                vec![Entry::new(&entry)]
            }
            Some(found) => match tables(found) {
                Some(before) => updated(merged(&before), entry, death),
                None => vec![Entry::new(&entry)],
            },
        };
        fields.remove(X_DEATH);
        if death.routing_key.is_some() {
            fields.remove("CC");
        }
        fields.sort();
        properties.headers = Some(fields.to_table());
        properties.expiration = None;
        History { properties: RawProperties::from(&properties), entries }
    }

    fn followed_by(&self, dying: &Dying<'_>, death: &Death<'_>) -> Self {
        let mut properties = self.properties.get();
        let headers = properties.headers.take().unwrap_or_default();
        let mut fields = Fields::of(&headers);
        let entry = entry(dying, death, &properties, &fields);
        let entries = updated(turned_round(&self.entries), entry, death);
        if death.routing_key.is_none() || fields.get("CC").is_none() {
            return History { properties: self.properties.clone(), entries };
        }
        fields.remove("CC");
        properties.headers = Some(fields.to_table());
        History { properties: RawProperties::from(&properties), entries }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// How much memory the entries take, about.
    pub(super) fn size(&self) -> usize {
        self.entries.iter().map(|entry| ENTRY + entry.fields.as_bytes().len()).sum()
    }

    /// For the cycle rule. Only what is written as text counts there, unlike where deaths are added up.
    pub(super) fn newest_first(&self) -> impl Iterator<Item = Station<'_>> {
        fn text<'a>(value: &'a Option<Value<'static>>) -> Option<&'a [u8]> {
            match value {
                Some(Value::Str(text)) => Some(text.as_bytes()),
                _ => None,
            }
        }
        self.entries.iter().map(|entry| Station {
            queue: text(&entry.queue),
            rejected: text(&entry.reason) == Some(REJECTED.as_bytes()),
        })
    }

    /// The properties as consumers get them.
    pub(super) fn told(&self) -> RawProperties {
        let mut properties = self.properties.get();
        let headers = properties.headers.take().unwrap_or_default();
        let mut fields = Fields::of(&headers);
        let entries = self.entries.iter().map(|entry| Value::Table(entry.fields.clone()));
        // Before others of that name, which are left alone.
        fields.push_front(X_DEATH, array(entries));
        fields.sort();
        properties.headers = Some(fields.to_table());
        RawProperties::from(&properties)
    }
}

/// What is written of this death if it is the first of its kind.
fn entry<'a>(
    dying: &'a Dying<'_>,
    death: &'a Death<'_>,
    properties: &'a Properties<'_>,
    headers: &Fields<'_>,
) -> Fields<'a> {
    // Those of `CC` are taken from the header, and so those of `BCC` stay secret: that header is gone since the
    // message was published.
    let cc = headers.get("CC").and_then(Value::as_array);
    let cc = cc.into_iter().flat_map(|keys| keys.iter().filter(|key| key.tag() == b'S'));
    let keys = dying.routing_keys.first().map(|key| text(key).into()).into_iter().chain(cc);
    let mut entry = Fields::default();
    entry.push("count", 1i64);
    entry.push("reason", death.reason.name());
    entry.push("queue", text(&death.queue));
    entry.push("time", Value::Timestamp(death.time));
    entry.push("exchange", text(&dying.exchange));
    entry.push("routing-keys", array(keys));
    if let Some(expiration) = &properties.expiration {
        entry.push("original-expiration", text(expiration));
    }
    entry
}

/// The deaths with one more: the entry, or the one of the same queue and reason counted up, in front of the others.
/// The entry alone if that one has a count that nothing can be added to.
fn updated(mut others: Vec<Arc<Entry>>, entry: Fields<'_>, death: &Death<'_>) -> Vec<Arc<Entry>> {
    let (queue, reason) = (Value::from(text(&death.queue)), Value::from(death.reason.name()));
    let alike = |other: &Arc<Entry>| {
        same(other.queue.as_ref(), Some(&queue)) && same(other.reason.as_ref(), Some(&reason))
    };
    let before = others.iter().position(alike).map(|place| others.remove(place));
    let mut newest = match &before {
        None => entry,
        Some(before) => {
            let mut fields = Fields::of(&before.fields);
            match fields.get("count") {
                None | Some(Value::Void) => fields.push_front("count", 1i64),
                Some(count) => match integer(count) {
                    Some(count) => fields.set("count", count.wrapping_add(1)),
                    None => return vec![Entry::new(&entry)],
                },
            }
            fields
        }
    };
    newest.sort();
    others.insert(0, Entry::new(&newest));
    others
}

/// Entries of which each queue and reason has one: what [`merged`] makes of them.
fn turned_round(entries: &[Arc<Entry>]) -> Vec<Arc<Entry>> {
    if let [only] = entries {
        return vec![Arc::clone(only)];
    }
    let counted = |entry: &Arc<Entry>| match entry.has_count {
        true => Arc::clone(entry),
        false => {
            let mut fields = Fields::of(&entry.fields);
            fields.push_front("count", 1i64);
            Entry::new(&fields)
        }
    };
    entries.iter().rev().map(counted).collect()
}

/// One entry for each queue and reason, with a count: that of the first, or else how many there were. That turns their
/// order round, except where there is nothing to merge because there is one at most.
fn merged(deaths: &[Table<'_>]) -> Vec<Arc<Entry>> {
    let mut merged: Vec<(Fields<'_>, i64)> = Vec::new();
    let mut places = HashMap::new();
    for death in deaths {
        let death = Fields::of(death);
        let alike = (Alike::of(death.get("queue")), Alike::of(death.get("reason")));
        let place = *places.entry(alike).or_insert(merged.len());
        match merged.get_mut(place) {
            Some((_, times)) => *times += 1,
            None => merged.push((death, 1)),
        }
    }
    if deaths.len() > 1 {
        for (death, times) in &mut merged {
            if !has_count(death) {
                death.push_front("count", *times);
            }
        }
        merged.reverse();
    }
    merged.iter().map(|(death, _)| Entry::new(death)).collect()
}

/// What two values have in common that are the [`same`].
#[derive(PartialEq, Eq, Hash)]
enum Alike {
    Nothing,
    Text(Vec<u8>),
    Number(i64),
    /// As it is written.
    Other(Vec<u8>),
}

impl Alike {
    fn of(value: Option<&Value<'_>>) -> Self {
        match value {
            None | Some(Value::Void) => Alike::Nothing,
            Some(value) => match (value.as_bytes(), integer(value)) {
                (Some(text), _) => Alike::Text(text.to_vec()),
                (None, Some(number)) => Alike::Number(number),
                (None, None) => Alike::Other(array([value.clone()]).as_bytes().to_vec()),
            },
        }
    }
}

/// The entries of an `x-death`, if it is an array of nothing but tables.
fn tables<'a>(deaths: &'a Value<'_>) -> Option<Vec<Table<'a>>> {
    let entry = |value: Value<'a>| match value {
        Value::Table(table) => Some(table),
        _ => None,
    };
    deaths.as_array()?.iter().map(entry).collect()
}

/// Whether two values are the same to RabbitMQ, which forgets how text and integers were written when it compares.
fn same(one: Option<&Value<'_>>, other: Option<&Value<'_>>) -> bool {
    match (one, other) {
        (None | Some(Value::Void), None | Some(Value::Void)) => true,
        (Some(one), Some(other)) => {
            let bytes = one.as_bytes().is_some() && one.as_bytes() == other.as_bytes();
            let number = integer(one).is_some() && integer(one) == integer(other);
            bytes || number || one == other
        }
        _ => false,
    }
}

fn integer(value: &Value<'_>) -> Option<i64> {
    match value {
        Value::Timestamp(seconds) => i64::try_from(*seconds).ok(),
        other => other.as_i64(),
    }
}
