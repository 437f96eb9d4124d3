//! Deaths as 4.3 keeps them: beside the message, told in its headers.

use std::sync::Arc;

use leveret_wire::{RawProperties, ShortStr, Table, Value};

use super::{Death, Dying, Reason, Station, X_DEATH};
use crate::fields::{Fields, array, text};

/// What a message has behind it. Nothing for one that has not died, and for every one of 3.10, whose headers say it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Deaths(Option<Arc<History>>);

#[derive(Clone, Debug)]
struct History {
    /// The properties as they were published, but for the expiration: what clients say about deaths is hidden, not
    /// gone. A headers exchange still sees their `x-death`.
    published: RawProperties,
    first: Circumstances,
    last: Circumstances,
    newest_first: Vec<Record>,
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
}

impl Deaths {
    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// The properties of a message after one more death, and its deaths.
    pub(super) fn after(&self, dying: &Dying<'_>, death: &Death<'_>) -> (RawProperties, Deaths) {
        let last = Circumstances {
            exchange: dying.exchange.clone().into_owned(),
            queue: death.queue.clone().into_owned(),
            reason: death.reason,
        };
        let mut history = match &self.0 {
            Some(history) => History { last, ..History::clone(history) },
            None => History {
                published: without_expiration(dying.properties),
                first: last.clone(),
                last,
                newest_first: Vec::new(),
            },
        };
        history.add(dying, death);
        (history.told(), Deaths(Some(Arc::new(history))))
    }

    /// For the cycle rule. `None` if the headers are to be asked.
    pub(super) fn newest_first(&self) -> Option<impl Iterator<Item = Station<'_>>> {
        let history = self.0.as_deref()?;
        Some(history.newest_first.iter().map(|record| Station {
            queue: Some(record.queue.as_bytes()),
            rejected: record.reason == Reason::Rejected,
        }))
    }

    /// What a headers exchange goes by. `None` if the headers are to be asked.
    pub(super) fn routing_headers(&self) -> Option<Table<'static>> {
        let history = self.0.as_deref()?;
        let headers = history.published.get().headers.unwrap_or_default();
        let mut fields = Fields::of(&headers);
        history.tell_circumstances(&mut fields);
        fields.sort_once_each();
        Some(fields.to_table())
    }
}

impl History {
    fn add(&mut self, dying: &Dying<'_>, death: &Death<'_>) {
        let alike = |record: &Record| record.queue == death.queue && record.reason == death.reason;
        let record = match self.newest_first.iter().position(alike) {
            Some(place) => {
                let record = self.newest_first.remove(place);
                Record { count: record.count + 1, ..record }
            }
            None => Record::new(dying, death),
        };
        self.newest_first.insert(0, record);
    }

    /// The properties as consumers get them.
    fn told(&self) -> RawProperties {
        if self.published.fault().is_some() {
            return self.published.clone();
        }
        let mut properties = self.published.get();
        let headers = properties.headers.take().unwrap_or_default();
        let mut fields = Fields::of(&headers);
        fields.set(X_DEATH, array(self.newest_first.iter().map(Record::told)));
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
        let mut routing_keys: Vec<_> =
            dying.routing_keys.iter().map(|key| key.clone().into_owned()).collect();
        // One for one, whichever way a key got there: a dead-letter routing key that was a BCC is not told.
        for secret in dying.bcc {
            if let Some(place) = routing_keys.iter().position(|key| key == secret) {
                routing_keys.remove(place);
            }
        }
        let expiration = dying.properties.get().expiration.map(|expiration| {
            // It is kept as a number: no sign, no zeros before it.
            let number = expiration.to_str().ok().and_then(|text| text.parse::<i64>().ok());
            number.map_or_else(|| expiration.to_string(), |number| number.to_string())
        });
        Record {
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
