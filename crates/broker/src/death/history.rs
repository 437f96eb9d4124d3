//! Deaths as 4.3 keeps them: beside the message, told in its headers.

use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};
use leveret_wire::{RawProperties, ShortStr, Table, Value};

use super::{Death, Dying, ENTRY, Reason, Station, X_DEATH};
use crate::fields::{Fields, array, text};
use crate::message::size_of_keys;

#[derive(Clone, Debug)]
pub(super) struct History {
    /// The properties as they were published, but for the expiration: what clients say about deaths is hidden, not
    /// gone. A headers exchange still sees their `x-death`.
    pub(super) published: RawProperties,
    first: Circumstances,
    last: Circumstances,
    /// Shared by all messages that have been through the same.
    newest_last: Vec<Arc<Record>>,
}

/// How it died, once.
#[derive(Clone, Debug)]
struct Circumstances {
    exchange: ShortStr<'static>,
    queue: ShortStr<'static>,
    reason: Reason,
}

/// How often it died in a queue for a reason, and how it got there the first time.
#[derive(Clone, Debug)]
struct Record {
    queue: ShortStr<'static>,
    reason: Reason,
    count: i64,
    time: u64,
    exchange: ShortStr<'static>,
    routing_keys: Vec<ShortStr<'static>>,
    expiration: Option<String>,
    /// How much memory it takes, about.
    size: usize,
}

impl History {
    /// The story of a message after one more death.
    pub(super) fn after(before: Option<&History>, dying: &Dying<'_>, death: &Death<'_>) -> Self {
        let last = Circumstances {
            exchange: dying.exchange.clone().into_owned(),
            queue: death.queue.clone().into_owned(),
            reason: death.reason,
        };
        let mut history = match before {
            Some(history) => History { last, ..history.clone() },
            None => History {
                published: without_expiration(dying.properties),
                first: last.clone(),
                last,
                newest_last: Vec::new(),
            },
        };
        history.add(dying, death);
        history
    }

    pub(super) fn len(&self) -> usize {
        self.newest_last.len()
    }

    /// How much memory the entries take, about.
    pub(super) fn size(&self) -> usize {
        self.newest_last.iter().map(|record| record.size).sum()
    }

    /// For the cycle rule.
    pub(super) fn newest_first(&self) -> impl Iterator<Item = Station<'_>> {
        self.newest_last.iter().rev().map(|record| Station {
            queue: Some(record.queue.as_bytes()),
            rejected: record.reason == Reason::Rejected,
        })
    }

    /// What a headers exchange goes by.
    pub(super) fn routing_headers(&self) -> Table<'static> {
        let headers = self.published.get().headers.unwrap_or_default();
        let mut fields = Fields::of(&headers);
        self.tell_circumstances(&mut fields);
        fields.sort_once_each();
        fields.to_table()
    }

    fn add(&mut self, dying: &Dying<'_>, death: &Death<'_>) {
        let alike =
            |record: &Arc<Record>| record.reason == death.reason && record.queue == death.queue;
        let record = match self.newest_last.iter().position(alike) {
            Some(place) => {
                let record = Record::clone(&self.newest_last.remove(place));
                Record { count: record.count + 1, ..record }
            }
            None => Record::new(dying, death),
        };
        self.newest_last.push(Arc::new(record));
    }

    /// The properties as consumers get them.
    pub(super) fn told(&self) -> RawProperties {
        if self.published.fault().is_some() {
            return self.published.clone();
        }
        let mut properties = self.published.get();
        let headers = properties.headers.take().unwrap_or_default();
        let mut fields = Fields::of(&headers);
        fields.set(X_DEATH, array(self.newest_last.iter().rev().map(|record| record.told())));
        self.tell_circumstances(&mut fields);
        fields.sort_once_each();
        properties.headers = Some(fields.to_table());
        RawProperties::from(&properties)
    }

    fn tell_circumstances<'a>(&'a self, fields: &mut Fields<'a>) {
        fields.set("x-first-death-exchange", text(&self.first.exchange));
        fields.set("x-first-death-queue", text(&self.first.queue));
        fields.set("x-first-death-reason", self.first.reason.name());
        fields.set("x-last-death-exchange", text(&self.last.exchange));
        fields.set("x-last-death-queue", text(&self.last.queue));
        fields.set("x-last-death-reason", self.last.reason.name());
    }
}

impl Record {
    fn new(dying: &Dying<'_>, death: &Death<'_>) -> Self {
        // One for one, whichever way a key got there: a dead-letter routing key that was a BCC is not told.
        let mut secrets = HashMap::new();
        for secret in dying.bcc {
            *secrets.entry(secret.as_bytes()).or_insert(0) += 1;
        }
        let mut is_told = |key: &&ShortStr<'_>| match secrets.get_mut(key.as_bytes()) {
            None | Some(0) => true,
            Some(left) => {
                *left -= 1;
                false
            }
        };
        let told = dying.routing_keys.iter().filter(|key| is_told(key));
        let routing_keys: Vec<_> = told.map(|key| key.borrowed().into_owned()).collect();
        let expiration = dying.properties.get().expiration.map(|expiration| {
            // It is kept as a number: no sign, no zeros before it.
            let number = expiration.to_str().ok().and_then(|text| text.parse::<i64>().ok());
            number.map_or_else(|| expiration.to_string(), |number| number.to_string())
        });
        let names = death.queue.len() + dying.exchange.len();
        Record {
            size: ENTRY + names + size_of_keys(&routing_keys),
            queue: death.queue.clone().into_owned(),
            reason: death.reason,
            count: 1,
            time: death.time,
            exchange: dying.exchange.clone().into_owned(),
            routing_keys,
            expiration,
        }
    }

    fn told(&self) -> Value<'static> {
        let mut entry = Fields::default();
        if let Some(expiration) = &self.expiration {
            entry.push("original-expiration", expiration);
        }
        entry.push("count", self.count);
        entry.push("reason", self.reason.name());
        entry.push("queue", text(&self.queue));
        entry.push("time", Value::Timestamp(self.time));
        entry.push("exchange", text(&self.exchange));
        entry.push("routing-keys", array(self.routing_keys.iter().map(|key| text(key).into())));
        entry.to_table().into()
    }
}

fn without_expiration(properties: &RawProperties) -> RawProperties {
    let mut stripped = properties.get();
    match stripped.expiration.take() {
        Some(_) => RawProperties::from(&stripped),
        None => properties.clone(),
    }
}
