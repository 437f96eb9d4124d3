//! What a message that failed carries with it: how often, when, where and why.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::amqp::{Array, RawProperties, Table, Value};
use crate::delivery::Delivery;
use crate::mover::Parcel;

use super::policy::ParkReason;

/// The names of the headers. They are part of the API: other programs read them.
pub(crate) mod header {
    /// How many deliveries of it have failed.
    pub(crate) const ATTEMPTS: &str = "x-leveret-attempts";
    /// What the last error said.
    pub(crate) const ERROR: &str = "x-leveret-error";
    /// Of what kind it was.
    pub(crate) const KIND: &str = "x-leveret-error-kind";
    /// Why it was parked.
    pub(crate) const REASON: &str = "x-leveret-reason";
    /// When it failed first.
    pub(crate) const FIRST: &str = "x-leveret-first-failure";
    /// When it failed last.
    pub(crate) const LAST: &str = "x-leveret-last-failure";
    /// The queue whose consumer failed.
    pub(crate) const QUEUE: &str = "x-leveret-queue";
    /// The exchange it had been published to.
    pub(crate) const EXCHANGE: &str = "x-leveret-exchange";
    /// The routing key it had been published with.
    pub(crate) const ROUTING_KEY: &str = "x-leveret-routing-key";
    /// The exchange by which it gets back to that queue, and to no other, under its own routing key.
    pub(crate) const RETURN: &str = "x-leveret-return";
    /// The errors so far: tables with `at`, `kind` and `error`, the oldest first.
    pub(crate) const HISTORY: &str = "x-leveret-history";
    /// For how many milliseconds it waits. The broker routes by it, and does not look at names that begin with `x-`.
    pub(crate) const DELAY: &str = "leveret-delay";
}

/// Longer texts of errors are cut: all headers have to fit into one frame.
const MAX_ERROR: usize = 2000;
/// The same, in the history.
const MAX_PAST_ERROR: usize = 200;
/// How many errors the history keeps: the first one, and the last ones.
const MAX_HISTORY: usize = 10;

/// One failure of a message.
#[derive(Clone, Debug)]
pub(crate) struct Failed<'a> {
    /// How often it has failed, this time included.
    pub(crate) failures: u32,
    pub(crate) kind: &'a str,
    pub(crate) error: &'a str,
    pub(crate) at: SystemTime,
    /// Why it is parked, if it is.
    pub(crate) reason: Option<ParkReason>,
}

/// How much is said about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    /// Everything.
    Full,
    /// What is needed to go on. For a message whose headers leave no room for more.
    Needed,
}

impl Failed<'_> {
    /// Writes it into the headers of a message that moves on.
    pub(crate) fn stamp(&self, parcel: &mut Parcel, delivery: &Delivery, detail: Detail) {
        let now = seconds(self.at);
        parcel.set(header::ATTEMPTS, i64::from(self.failures));
        parcel.set(header::QUEUE, delivery.queue());
        if parcel.header(header::EXCHANGE).is_none() {
            parcel.set(header::EXCHANGE, delivery.exchange().to_str_lossy().as_ref());
            parcel.set(header::ROUTING_KEY, delivery.routing_key().to_str_lossy().as_ref());
        }
        if parcel.header(header::FIRST).is_none() {
            parcel.set(header::FIRST, Value::Timestamp(now));
        }
        parcel.set(header::LAST, Value::Timestamp(now));
        parcel.set(header::KIND, cut(self.kind, 100));
        if let Some(reason) = self.reason {
            parcel.set(header::REASON, reason.as_str());
        }
        match detail {
            Detail::Full => {
                parcel.set(header::ERROR, cut(self.error, MAX_ERROR));
                let history = self.history(parcel.header(header::HISTORY), now);
                parcel.set(header::HISTORY, Value::Array(history));
            }
            Detail::Needed => {
                parcel.remove(header::HISTORY);
                parcel.set(header::ERROR, cut(self.error, 100));
            }
        }
    }

    fn history(&self, past: Option<Value<'_>>, now: u64) -> Array<'static> {
        let past = past.as_ref().and_then(Value::as_array);
        let past: Vec<Value<'_>> = past.into_iter().flat_map(|past| past.iter()).collect();
        let dropped = (past.len() + 1).saturating_sub(MAX_HISTORY);
        let mut history = Array::new();
        for (index, entry) in past.into_iter().enumerate() {
            if index == 0 || index > dropped {
                // It was in a table before, so it can be in one.
                let _ = history.push(entry);
            }
        }
        let mut entry = Table::new();
        let fields = [
            ("at", Value::Timestamp(now)),
            ("kind", cut(self.kind, 100).into()),
            ("error", cut(self.error, MAX_PAST_ERROR).into()),
        ];
        for (name, value) in fields {
            let _ = entry.insert(name, value);
        }
        let _ = history.push(Value::Table(entry));
        history
    }
}

/// How many deliveries of a message failed before, by the header in which that is counted here.
pub(crate) fn failures(properties: &RawProperties) -> u32 {
    if !properties.has_headers() {
        return 0;
    }
    let attempts = properties.header(header::ATTEMPTS).and_then(|attempts| attempts.as_i64());
    attempts.map_or(0, |attempts| u32::try_from(attempts.max(0)).unwrap_or(u32::MAX))
}

/// For how long a message has been failing.
pub(crate) fn age(properties: &RawProperties, now: SystemTime) -> Duration {
    match properties.header(header::FIRST) {
        Some(Value::Timestamp(first)) => Duration::from_secs(seconds(now).saturating_sub(first)),
        _ => Duration::ZERO,
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Not longer than so many bytes.
fn cut(text: &str, most: usize) -> &str {
    match text.char_indices().map(|(index, _)| index).take_while(|index| *index <= most).last() {
        Some(end) if text.len() > most => &text[..end],
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_between_characters() {
        assert_eq!(cut("abc", 5), "abc");
        assert_eq!(cut("abcdef", 3), "abc");
        assert_eq!(cut("ääää", 3), "ä");
        assert_eq!(cut("", 3), "");
    }

    #[test]
    fn the_history_keeps_the_first_error_and_the_last_ones() {
        let mut history = None;
        for n in 1..=30 {
            let error = format!("error {n}");
            let failed =
                Failed { failures: n, kind: "k", error: &error, at: UNIX_EPOCH, reason: None };
            history = Some(Value::Array(failed.history(history, n.into())));
        }
        let history = history.unwrap();
        let at = |entry: Value<'_>| match entry.as_table().unwrap().get("at") {
            Some(Value::Timestamp(at)) => at,
            other => panic!("{other:?}"),
        };
        let kept: Vec<u64> = history.as_array().unwrap().iter().map(at).collect();
        assert_eq!(kept, [1, 22, 23, 24, 25, 26, 27, 28, 29, 30]);
    }
}
