//! What the broker says about where a message died: its header `x-death`.

use crate::amqp::{RawProperties, Table, Value};

/// How often a message was dead-lettered, from which queue and why.
///
/// The header `x-death` has one entry for each queue and reason, with a count: its length is not the number of deaths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Deaths(Vec<Death>);

/// Deaths in one queue for one reason.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Death {
    /// The queue it was in.
    pub queue: String,
    /// Why it left: `rejected`, `expired`, `maxlen` or `delivery_limit`.
    pub reason: String,
    /// How often.
    pub count: u64,
    /// The exchange by which it had come there, the first time.
    pub exchange: String,
    /// The routing keys with which it had come, the first time: its own, and those of `CC`.
    pub routing_keys: Vec<String>,
    /// When that was, in seconds since 1970.
    pub time: Option<u64>,
    /// The `expiration` it had, which dying took from it.
    pub expiration: Option<String>,
}

impl Deaths {
    /// What the header says. Entries that are not understood are left out.
    pub fn read(headers: &Table<'_>) -> Self {
        let header = headers.get("x-death");
        let entries = header.as_ref().and_then(Value::as_array);
        let entries = entries.into_iter().flat_map(|entries| entries.iter());
        let mut deaths: Vec<_> =
            entries.filter_map(|entry| Death::read(entry.as_table()?)).collect();
        // RabbitMQ 3.10 mixes up three and more entries; later versions name the latest one.
        let text = |name| Some(headers.get(name)?.as_str()?.to_owned());
        let named = text("x-last-death-queue").zip(text("x-last-death-reason"));
        let is_named = |death: &Death| {
            named.as_ref().is_some_and(|(queue, why)| (&death.queue, &death.reason) == (queue, why))
        };
        if let Some(latest) = deaths.iter().position(is_named) {
            deaths[..=latest].rotate_right(1);
        }
        Deaths(deaths)
    }

    /// The deaths that the headers of a message list.
    pub fn of(properties: &RawProperties) -> Self {
        if !properties.has_headers() {
            return Deaths::default();
        }
        properties.get().headers.as_ref().map(Deaths::read).unwrap_or_default()
    }

    /// Whether the header is as a broker writes it, if there is one.
    pub(crate) fn is_well_formed(headers: &Table<'_>) -> bool {
        let is_entry = |entry: Value<'_>| {
            let count = entry.as_table().map(|entry| entry.get("count"));
            matches!(count, Some(None | Some(Value::I64(_))))
        };
        match headers.get("x-death") {
            None => true,
            Some(header) => header.as_array().is_some_and(|all| all.iter().all(is_entry)),
        }
    }

    /// All of them, the latest first. RabbitMQ 3.10 does not keep the order of three and more.
    pub fn iter(&self) -> impl Iterator<Item = &Death> {
        self.0.iter()
    }

    /// How often it was rejected by consumers of a queue.
    pub fn rejected_from(&self, queue: &str) -> u32 {
        let count: u64 = self.rejections(queue).map(|death| death.count).sum();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// The entry that says so.
    pub(crate) fn rejection(&self, queue: &str) -> Option<&Death> {
        self.rejections(queue).next()
    }

    fn rejections(&self, queue: &str) -> impl Iterator<Item = &Death> {
        self.0.iter().filter(move |death| death.queue == queue && death.reason == "rejected")
    }
}

impl Death {
    fn read(entry: &Table<'_>) -> Option<Self> {
        let text = |name: &str| entry.get(name)?.as_str().map(str::to_owned);
        // Before 3.5 there was no count, and an entry for each death.
        let count = entry.get("count").and_then(|count| count.as_i64()).unwrap_or(1);
        let keys = entry.get("routing-keys");
        let keys = keys.as_ref().and_then(Value::as_array);
        let keys = keys.into_iter().flat_map(|keys| keys.iter());
        Some(Death {
            queue: text("queue")?,
            reason: text("reason")?,
            count: u64::try_from(count).unwrap_or(0),
            exchange: text("exchange").unwrap_or_default(),
            routing_keys: keys.filter_map(|key| key.as_str().map(str::to_owned)).collect(),
            time: match entry.get("time") {
                Some(Value::Timestamp(time)) => Some(time),
                _ => None,
            },
            expiration: text("original-expiration"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amqp::Array;

    fn headers(entries: &[(&str, &str, Option<i64>)]) -> Table<'static> {
        let mut deaths = Array::new();
        for (queue, reason, count) in entries {
            let mut entry = Table::new();
            entry.insert("queue", *queue).unwrap();
            entry.insert("reason", *reason).unwrap();
            if let Some(count) = count {
                entry.insert("count", *count).unwrap();
            }
            deaths.push(Value::Table(entry)).unwrap();
        }
        Table::from_pairs([("x-death", Value::Array(deaths))]).unwrap()
    }

    #[test]
    fn only_rejections_from_the_queue_itself_count() {
        let header = headers(&[
            ("jobs-retry", "expired", Some(7)),
            ("jobs", "rejected", Some(3)),
            ("jobs", "expired", Some(20)),
            ("other", "rejected", Some(9)),
            ("jobs", "rejected", None),
        ]);
        assert_eq!(Deaths::read(&header).rejected_from("jobs"), 4);
        assert_eq!(Deaths::read(&Table::new()).rejected_from("jobs"), 0);
    }

    #[test]
    fn the_latest_death_comes_first_if_the_broker_names_it() {
        let deaths = [("a", "rejected", None), ("b", "expired", None), ("b", "rejected", None)];
        let mut header = headers(&deaths);
        let queues = |header: &Table<'_>| -> Vec<_> {
            Deaths::read(header).iter().map(|d| (d.queue.clone(), d.reason.clone())).collect()
        };
        let pairs =
            |order: [usize; 3]| order.map(|n| (deaths[n].0.to_owned(), deaths[n].1.to_owned()));
        assert_eq!(queues(&header), pairs([0, 1, 2]));
        header.insert("x-last-death-queue", "b").unwrap();
        header.insert("x-last-death-reason", "rejected").unwrap();
        assert_eq!(queues(&header), pairs([2, 0, 1]));
    }

    #[test]
    fn a_list_that_no_broker_writes_is_told() {
        let counted = |count: Value<'static>| {
            let entry = Table::from_pairs([("queue", "q".into()), ("count", count)]).unwrap();
            Value::Array(Array::from_values([Value::Table(entry)]).unwrap())
        };
        for (deaths, expected) in [
            (counted(Value::I64(3)), true),
            (counted("3".into()), false),
            (counted(Value::I32(3)), false),
            (Value::Array(Array::from_values(["q".into()]).unwrap()), false),
            ("q".into(), false),
        ] {
            let headers = Table::from_pairs([("x-death", deaths)]).unwrap();
            assert_eq!(Deaths::is_well_formed(&headers), expected, "{headers:?}");
        }
        assert!(Deaths::is_well_formed(&Table::new()));
    }

    #[test]
    fn what_is_no_list_of_deaths_is_none() {
        for value in [Value::from("x"), Value::from(5), Value::Array(Array::new())] {
            let headers = Table::from_pairs([("x-death", value)]).unwrap();
            assert_eq!(Deaths::read(&headers), Deaths::default());
        }
        let negative = headers(&[("q", "rejected", Some(-5))]);
        assert_eq!(Deaths::read(&negative).rejected_from("q"), 0);
    }
}
