//! The mark on messages that a task has put in anew, by which it knows them when they come again.
//!
//! It is their routing key. The default exchange leads a message to the queue of that name, and to those that its header `BCC` names,
//! which the broker takes off before anybody gets the message. So the key is free to tell something, and nothing else of the message
//! is changed by it.
//!
//! ```text
//!  leveret.look.h.5c1f09a3b2d44e67.0a1b2c3d4e5f6071
//!               |        |                |
//!               |        |                +-- others who have put it in anew before, the last one first
//!               |        +------------------- whose it is
//!               +---------------------------- n: it had no headers. The broker leaves a table without any
//! ```
//!
//! Others who look at the same time have to leave each other's marks on it: so they are kept, the last ones of many.

use std::borrow::Cow;

use crate::amqp::{Array, Properties, RawProperties, ShortStr, Table, Value};
use crate::forwarder::Parcel;
use crate::random;

const PREFIX: &str = "leveret.look.";

/// How many marks a message keeps: a key has 255 bytes.
const MAX_MARKS: usize = 12;

/// What a task marks messages with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark(String);

impl Mark {
    pub(super) fn new() -> Self {
        Mark(format!("{:016x}", random::number()))
    }

    /// Marks a message that is about to be put into a queue, and that had these marks when it was taken. If there is no way to do
    /// so, it is as good without.
    pub(super) fn put_on(&self, parcel: &mut Parcel, queue: &str, marks: &[String]) {
        let had_headers = if parcel.properties.headers.is_some() { "h" } else { "n" };
        let Ok(queue) = Array::from_values([Value::from(queue)]) else { return };
        parcel.set("BCC", Value::Array(queue));
        if parcel.header("BCC").is_none() {
            return;
        }
        let others = marks.iter().filter(|mark| **mark != self.0).take(MAX_MARKS - 1);
        let others: String = others.map(|mark| format!(".{mark}")).collect();
        parcel.routing_key = format!("{PREFIX}{had_headers}.{}{others}", self.0);
    }

    pub(super) fn is_among(&self, marks: &[String]) -> bool {
        marks.contains(&self.0)
    }
}

/// Whether this is no key that somebody has chosen.
fn is_mark(exchange: &ShortStr<'_>, key: &ShortStr<'_>) -> bool {
    exchange.as_bytes().is_empty() && key.as_bytes().starts_with(PREFIX.as_bytes())
}

/// The routing key of a message that was taken from a queue, without a mark.
pub(crate) fn key_without_mark<'a>(
    exchange: &ShortStr<'_>,
    key: ShortStr<'a>,
    queue: &'a str,
) -> ShortStr<'a> {
    match is_mark(exchange, &key) {
        true => ShortStr::try_from(queue).unwrap_or(key),
        false => key,
    }
}

/// The marks of a message, and its properties as they were before it was marked.
pub(super) fn without_mark<'a>(
    exchange: &ShortStr<'_>,
    key: &ShortStr<'_>,
    raw: &'a RawProperties,
) -> (Vec<String>, Cow<'a, RawProperties>) {
    if !is_mark(exchange, key) {
        return (Vec::new(), Cow::Borrowed(raw));
    }
    let key = key.to_str_lossy();
    let mut parts = key[PREFIX.len()..].split('.');
    let had_no_headers = parts.next() == Some("n");
    let marks = parts.take(MAX_MARKS).map(str::to_owned).collect();
    let properties = raw.get();
    if had_no_headers && properties.headers.as_ref().is_some_and(Table::is_empty) {
        let bare = Properties { headers: None, ..properties };
        return (marks, Cow::Owned(RawProperties::from(&bare)));
    }
    (marks, Cow::Borrowed(raw))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn parcel(headers: Option<Table<'static>>) -> Parcel {
        let raw = RawProperties::from(&Properties { headers, ..Properties::default() });
        Parcel::new(String::new(), "q".to_owned(), &raw, &Bytes::new())
    }

    /// What arrives of it: the broker takes `BCC` off.
    fn delivered(mut parcel: Parcel) -> (ShortStr<'static>, RawProperties) {
        if let Some(headers) = &mut parcel.properties.headers {
            headers.remove("BCC");
        }
        (parcel.routing_key.try_into().unwrap(), RawProperties::from(&parcel.properties))
    }

    #[test]
    fn a_message_is_the_same_without_its_mark() {
        let some = Table::from_pairs([("n", Value::from(5))]).unwrap();
        for headers in [None, Some(Table::new()), Some(some)] {
            let mut parcel = parcel(headers.clone());
            Mark::new().put_on(&mut parcel, "q", &[]);
            let (key, raw) = delivered(parcel);
            let (_, raw) = without_mark(&"".try_into().unwrap(), &key, &raw);
            assert_eq!(raw.get(), Properties { headers, ..Properties::default() });
            let without = key_without_mark(&"".try_into().unwrap(), key, "q");
            assert_eq!(without, "q");
        }
    }

    #[test]
    fn who_has_put_it_in_is_known_among_many() {
        let exchange = "".try_into().unwrap();
        let all: Vec<Mark> = (0..50).map(|_| Mark::new()).collect();
        let mut marks = Vec::new();
        for mark in &all {
            let mut parcel = parcel(None);
            mark.put_on(&mut parcel, "q", &marks);
            let (key, raw) = delivered(parcel);
            marks = without_mark(&exchange, &key, &raw).0;
        }
        let (old, last) = all.split_at(50 - MAX_MARKS);
        assert!(last.iter().all(|mark| mark.is_among(&marks)));
        assert!(!old.iter().any(|mark| mark.is_among(&marks)));
    }

    #[test]
    fn keys_of_others_are_no_marks() {
        let raw = RawProperties::default();
        for (exchange, key) in [("jobs", "leveret.look.h.1"), ("", "jobs"), ("", "leveret.look")] {
            let (exchange, key) = (exchange.try_into().unwrap(), ShortStr::try_from(key).unwrap());
            assert!(without_mark(&exchange, &key, &raw).0.is_empty());
            assert_eq!(key_without_mark(&exchange, key.clone(), "q"), key);
        }
    }
}
