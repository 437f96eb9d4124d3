//! What a message that failed carries with it: how often, when, where and why.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::amqp::{Array, RawProperties, ShortStr, Table, Value};
use crate::forwarder::ForwardedMessage;

use super::iso8601;
use crate::connection::ParkReason;
use crate::deaths::Death;

/// The names of the headers. They are part of the API: other programs read them.
///
/// Their values are text, and the history a list of tables of text: there are clients that refuse a message with any other
/// header (Orb's; those made with watermill). Earlier versions wrote integers and timestamps, which are still read.
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
    /// How often consumers of its queue had rejected it before it was published to the end of that queue.
    pub(crate) const REJECTED: &str = "x-leveret-rejected";
    /// For how many milliseconds it waits. The broker routes by it, and does not look at names that begin with `x-`.
    pub(crate) const DELAY: &str = "leveret-delay";
}

/// Longer texts of errors are cut: all headers have to fit into one frame.
pub(crate) const MAX_ERROR: usize = 2000;
/// The same, in the history.
const MAX_PAST_ERROR: usize = 200;
/// How many errors the history keeps: the first one, and the last ones.
pub(crate) const MAX_HISTORY: usize = 10;

/// Where a message was published to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The exchange.
    pub exchange: ShortStr<'static>,
    /// The routing key.
    pub routing_key: ShortStr<'static>,
}

/// One failure of a message.
#[derive(Clone, Debug)]
pub(crate) struct Failed<'a> {
    /// How often it has failed, this time included.
    pub(crate) failures: u32,
    pub(crate) kind: &'a str,
    pub(crate) error: &'a str,
    /// When it failed for the first time.
    pub(crate) first: SystemTime,
    /// When it failed this time.
    pub(crate) at: SystemTime,
    /// The queue whose consumer failed.
    pub(crate) queue: &'a str,
    pub(crate) origin: Origin,
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
    pub(crate) fn stamp(&self, parcel: &mut ForwardedMessage, detail: Detail) {
        let now = iso8601::format(self.at);
        parcel.set_header(header::ATTEMPTS, self.failures.to_string());
        parcel.set_header(header::QUEUE, self.queue);
        self.origin.stamp(parcel);
        parcel.set_header(header::FIRST, iso8601::format(self.first));
        parcel.set_header(header::LAST, now.as_str());
        parcel.set_header(header::KIND, cut(self.kind, 100));
        if let Some(reason) = self.reason {
            parcel.set_header(header::REASON, reason.as_str());
        }
        match detail {
            Detail::Full => {
                parcel.set_header(header::ERROR, cut(self.error, MAX_ERROR));
                let history = self.history(parcel.header(header::HISTORY), &now);
                parcel.set_header(header::HISTORY, Value::Array(history));
            }
            Detail::Needed => {
                parcel.remove_header(header::HISTORY);
                parcel.set_header(header::ERROR, cut(self.error, 100));
            }
        }
    }

    fn history(&self, past: Option<Value<'_>>, now: &str) -> Array<'static> {
        let mut history = past_of(past);
        let mut entry = Table::new();
        let fields = [
            ("at", now),
            ("kind", cut(self.kind, 100)),
            ("error", cut(self.error, MAX_PAST_ERROR)),
        ];
        for (name, value) in fields {
            let _ = entry.insert(name, value);
        }
        let _ = history.push(Value::Table(entry));
        history
    }
}

impl Origin {
    /// What a message that was tried again says of it itself, in the headers that [`Retry`](super::Retry) lists.
    pub fn of(properties: &RawProperties) -> Option<Self> {
        if !properties.has_headers() {
            return None;
        }
        let kept = |name| short(properties.header(name)?.as_bytes()?);
        Some(Origin { exchange: kept(header::EXCHANGE)?, routing_key: kept(header::ROUTING_KEY)? })
    }

    /// What the broker has noted of it when the message died.
    pub fn of_death(death: &Death) -> Option<Self> {
        let exchange = short(death.exchange.as_bytes())?;
        let routing_key = short(death.routing_keys.first()?.as_bytes())?;
        Some(Origin { exchange, routing_key })
    }

    pub(crate) fn stamp(&self, parcel: &mut ForwardedMessage) {
        parcel.set_header(header::EXCHANGE, self.exchange.to_str_lossy().as_ref());
        parcel.set_header(header::ROUTING_KEY, self.routing_key.to_str_lossy().as_ref());
    }
}

/// The list in a header to which one more entry comes, without those there is no room for: the first one stays, and
/// the last ones.
pub(crate) fn past_of(header: Option<Value<'_>>) -> Array<'static> {
    let past = header.as_ref().and_then(Value::as_array);
    let past: Vec<Value<'_>> = past.into_iter().flat_map(|past| past.iter()).collect();
    let dropped = (past.len() + 1).saturating_sub(MAX_HISTORY);
    let mut kept = Array::new();
    for (index, entry) in past.into_iter().enumerate() {
        if index == 0 || index > dropped {
            // It was in a table before, so it can be in one.
            let _ = kept.push(entry);
        }
    }
    kept
}

/// How many deliveries of a message failed before, by the header in which that is counted here.
pub(crate) fn failures(properties: &RawProperties) -> u32 {
    if !properties.has_headers() {
        return 0;
    }
    properties.header(header::ATTEMPTS).and_then(|attempts| count(&attempts)).unwrap_or(0)
}

/// When a message failed first, as it says itself in the header `x-leveret-first-failure`.
pub fn first_failure(properties: &RawProperties) -> Option<SystemTime> {
    time_in(&properties.has_headers().then(|| properties.header(header::FIRST)).flatten()?)
}

/// A count in a header: text, or an integer of whatever width. One below zero is zero.
pub(crate) fn count(value: &Value<'_>) -> Option<u32> {
    let number = value.as_i64().or_else(|| value.as_str()?.trim().parse().ok())?;
    Some(u32::try_from(number.max(0)).unwrap_or(u32::MAX))
}

/// A time in a header: text, or a timestamp.
pub(crate) fn time_in(value: &Value<'_>) -> Option<SystemTime> {
    match value {
        Value::Timestamp(seconds) => time(*seconds),
        text => iso8601::parse(text.as_str()?),
    }
}

/// What is too long for a name is none.
fn short(bytes: &[u8]) -> Option<ShortStr<'static>> {
    ShortStr::from_bytes(bytes).map(ShortStr::into_owned).ok()
}

/// So many seconds after 1970, if the clock goes that far.
pub(crate) fn time(seconds: u64) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

pub(crate) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Not longer than so many bytes.
pub(crate) fn cut(text: &str, most: usize) -> &str {
    match text.char_indices().map(|(index, _)| index).take_while(|index| *index <= most).last() {
        Some(end) if text.len() > most => &text[..end],
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_times_are_read_in_all_forms_that_were_ever_written() {
        for (value, expected) in [
            ("7".into(), Some(7)),
            (" 7 ".into(), Some(7)),
            (Value::I64(7), Some(7)),
            (Value::I32(7), Some(7)),
            ("-1".into(), Some(0)),
            (Value::I64(i64::MAX), Some(u32::MAX)),
            ("seven".into(), None),
            (Value::Bool(true), None),
        ] {
            assert_eq!(count(&value), expected, "{value:?}");
        }
        let then = time(1_700_000_000);
        for (value, expected) in [
            ("2023-11-14T22:13:20Z".into(), then),
            (Value::Timestamp(1_700_000_000), then),
            ("yesterday".into(), None),
            (Value::I64(1_700_000_000), None),
        ] {
            assert_eq!(time_in(&value), expected, "{value:?}");
        }
    }

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
            let nowhere = ShortStr::default();
            let failed = Failed {
                failures: n,
                kind: "k",
                error: &error,
                first: UNIX_EPOCH,
                at: UNIX_EPOCH,
                queue: "q",
                origin: Origin { exchange: nowhere.clone(), routing_key: nowhere },
                reason: None,
            };
            history = Some(Value::Array(failed.history(history, &n.to_string())));
        }
        let history = history.unwrap();
        let at = |entry: Value<'_>| {
            let at = entry.as_table().unwrap().get("at").unwrap();
            at.as_str().unwrap().parse().unwrap()
        };
        let kept: Vec<u64> = history.as_array().unwrap().iter().map(at).collect();
        assert_eq!(kept, [1, 22, 23, 24, 25, 26, 27, 28, 29, 30]);
    }
}
