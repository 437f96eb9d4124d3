//! What a dead letter must look like, in writing: the order of headers and fields and the types on the wire included.

use std::time::{Duration, SystemTime};

use leveret::amqp::{Delivery, Properties, Value};
use leveret_broker::Profile;

/// How old a death may be that has just happened.
const JUST_NOW: Duration = Duration::from_secs(60);

/// A message after its death.
#[derive(Clone, Debug, Default)]
pub(super) struct Letter<'a> {
    pub(super) exchange: &'a str,
    pub(super) key: &'a str,
    /// A consumer failed with it, in whichever queue: 4.3 calls it redelivered ever after.
    pub(super) failed: bool,
    /// The headers that are not about death.
    pub(super) headers: Vec<(&'a str, &'a str)>,
    pub(super) deaths: Vec<Entry<'a>>,
    /// If it is not the last of them.
    pub(super) first: Option<Entry<'a>>,
    /// The exchange of the last death, if it is not that of the newest entry.
    pub(super) last_exchange: Option<&'a str>,
    /// A client's `x-death` is in the place where 3.10 would tell the first one.
    pub(super) first_is_untold_in_3_10: bool,
}

/// An entry of `x-death`.
#[derive(Clone, Debug)]
pub(super) struct Entry<'a> {
    pub(super) reason: &'a str,
    pub(super) queue: &'a str,
    pub(super) exchange: &'a str,
    pub(super) keys: Vec<&'a str>,
    pub(super) count: i64,
    pub(super) expiration: Option<&'a str>,
    /// In 3.10 the order of the fields depends on whether there was an `x-death` before.
    pub(super) sorted: bool,
}

/// A first death in this queue, into which the message got by its name.
pub(super) fn death<'a>(reason: &'a str, queue: &'a str) -> Entry<'a> {
    let (keys, expiration) = (vec![queue], None);
    Entry { reason, queue, exchange: "", keys, count: 1, expiration, sorted: false }
}

impl<'a> Entry<'a> {
    pub(super) fn sorted(self) -> Self {
        Entry { sorted: true, ..self }
    }

    pub(super) fn times(self, count: i64) -> Self {
        Entry { count, ..self }
    }

    pub(super) fn by(self, exchange: &'a str, keys: &[&'a str]) -> Self {
        Entry { exchange, keys: keys.to_vec(), ..self }
    }

    pub(super) fn expiration(self, expiration: &'a str) -> Self {
        Entry { expiration: Some(expiration), ..self }
    }

    fn spelled(&self, profile: Profile) -> String {
        let mut fields = vec![
            ("count", format!("l:{}", self.count)),
            ("reason", format!("{:?}", self.reason)),
            ("queue", format!("{:?}", self.queue)),
            ("time", "now".to_owned()),
            ("exchange", format!("{:?}", self.exchange)),
            ("routing-keys", format!("{:?}", self.keys)),
        ];
        if let Some(expiration) = self.expiration {
            let field = ("original-expiration", format!("{expiration:?}"));
            match profile {
                Profile::RabbitMq3_10 => fields.push(field),
                Profile::RabbitMq4_3 => fields.insert(0, field),
            }
        }
        if self.sorted && profile == Profile::RabbitMq3_10 {
            fields.sort();
        }
        let fields: Vec<_> =
            fields.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        format!("{{{}}}", fields.join(", "))
    }
}

impl Letter<'_> {
    pub(super) fn spelled(&self, profile: Profile) -> String {
        let in_4_3 = profile == Profile::RabbitMq4_3;
        let deaths: Vec<_> = self.deaths.iter().map(|death| death.spelled(profile)).collect();
        let mut headers = vec![("x-death".to_owned(), format!("[{}]", deaths.join(", ")))];
        let mut tell = |which: &str, exchange: &str, death: &Entry<'_>| {
            for (what, name) in
                [("exchange", exchange), ("queue", death.queue), ("reason", death.reason)]
            {
                headers.push((format!("x-{which}-death-{what}"), format!("{name:?}")));
            }
        };
        let first = self.first.as_ref().or(self.deaths.last()).expect("a death");
        if in_4_3 || !self.first_is_untold_in_3_10 {
            tell("first", first.exchange, first);
        }
        if in_4_3 {
            let last = &self.deaths[0];
            tell("last", self.last_exchange.unwrap_or(last.exchange), last);
        }
        let own = self.headers.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        headers.extend(own);
        headers.sort();
        let redelivered = if self.failed && in_4_3 { ", redelivered" } else { "" };
        let lines = headers.iter().map(|(name, value)| format!("\n{name}: {value}"));
        format!("by {:?} with {:?}{redelivered}", self.exchange, self.key)
            + &lines.collect::<String>()
    }
}

/// A delivery in the same words.
pub(super) fn spelled(delivery: &Delivery) -> String {
    let redelivered = if delivery.redelivered() { ", redelivered" } else { "" };
    let mut lines =
        format!("by {:?} with {:?}{redelivered}", delivery.exchange(), delivery.routing_key());
    let properties = delivery.properties();
    for (name, value) in properties.headers.as_ref().into_iter().flat_map(|table| table.iter()) {
        lines += &format!("\n{name}: {}", in_words(&value));
    }
    let others = Properties { headers: None, ..properties.clone() };
    if others != Properties::default() {
        lines += &format!("\n{others:?}");
    }
    lines
}

/// A value with its type on the wire, unless it is text, a table or an array; a time is `now` or a number.
pub(super) fn in_words(value: &Value<'_>) -> String {
    match value {
        Value::Str(_) => format!("{value:?}"),
        Value::Timestamp(seconds) => {
            let then = SystemTime::UNIX_EPOCH + Duration::from_secs(*seconds);
            match SystemTime::now().duration_since(then) {
                Ok(age) if age < JUST_NOW => "now".to_owned(),
                _ => format!("T:{seconds}"),
            }
        }
        Value::Array(array) => {
            let values: Vec<_> = array.iter().map(|value| in_words(&value)).collect();
            format!("[{}]", values.join(", "))
        }
        Value::Table(table) => {
            let fields: Vec<_> =
                table.iter().map(|(name, value)| format!("{name}: {}", in_words(&value))).collect();
            format!("{{{}}}", fields.join(", "))
        }
        other => format!("{}:{other:?}", other.tag() as char),
    }
}
