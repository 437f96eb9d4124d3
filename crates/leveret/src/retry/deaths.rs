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
}

impl Deaths {
    /// What the header says. Entries that are not understood are left out.
    pub fn read(headers: &Table<'_>) -> Self {
        let header = headers.get("x-death");
        let entries = header.as_ref().and_then(Value::as_array);
        let entries = entries.into_iter().flat_map(|entries| entries.iter());
        Deaths(entries.filter_map(|entry| Death::read(entry.as_table()?)).collect())
    }

    pub(crate) fn of(properties: &RawProperties) -> Self {
        if !properties.has_headers() {
            return Deaths::default();
        }
        properties.get().headers.as_ref().map(Deaths::read).unwrap_or_default()
    }

    /// All of them, the latest first.
    pub fn iter(&self) -> impl Iterator<Item = &Death> {
        self.0.iter()
    }

    /// How often it was rejected by consumers of a queue.
    pub fn rejected_from(&self, queue: &str) -> u32 {
        let of_queue = self.0.iter().filter(|death| death.queue == queue);
        let count: u64 = of_queue.filter(|d| d.reason == "rejected").map(|d| d.count).sum();
        u32::try_from(count).unwrap_or(u32::MAX)
    }
}

impl Death {
    fn read(entry: &Table<'_>) -> Option<Self> {
        let text = |name: &str| entry.get(name)?.as_str().map(str::to_owned);
        // Before 3.5 there was no count, and an entry for each death.
        let count = entry.get("count").and_then(|count| count.as_i64()).unwrap_or(1);
        Some(Death {
            queue: text("queue")?,
            reason: text("reason")?,
            count: u64::try_from(count).unwrap_or(0),
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
    fn what_is_no_list_of_deaths_is_none() {
        for value in [Value::from("x"), Value::from(5), Value::Array(Array::new())] {
            let headers = Table::from_pairs([("x-death", value)]).unwrap();
            assert_eq!(Deaths::read(&headers), Deaths::default());
        }
        let negative = headers(&[("q", "rejected", Some(-5))]);
        assert_eq!(Deaths::read(&negative).rejected_from("q"), 0);
    }
}
