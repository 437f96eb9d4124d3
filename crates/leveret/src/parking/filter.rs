//! Which messages of a parking lot are meant.

use std::time::{Duration, SystemTime};

use super::ParkedMessage;
use crate::amqp::Value;

/// Which messages of a parking lot are meant: those for which all that it says is true. A new one means all.
///
/// ```
/// use std::time::Duration;
/// use leveret::Filter;
///
/// let filter = Filter::new().queue("billing").kind("timeout").older_than(Duration::from_secs(3600));
/// # let _ = filter;
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[must_use]
pub struct Filter {
    queue: Option<String>,
    kind: Option<String>,
    reason: Option<String>,
    error: Option<String>,
    message_id: Option<String>,
    position: Option<u64>,
    older_than: Option<Duration>,
    newer_than: Option<Duration>,
    headers: Vec<(String, Value<'static>)>,
}

impl Filter {
    /// All messages.
    pub fn new() -> Self {
        Filter::default()
    }

    /// Messages that failed in this queue.
    pub fn queue(mut self, queue: impl Into<String>) -> Self {
        self.queue = Some(queue.into());
        self
    }

    /// Messages whose last error was of this kind.
    pub fn kind(mut self, kind: impl Into<String>) -> Self {
        self.kind = Some(kind.into());
        self
    }

    /// Messages that were parked for this reason, as [`Story::reason`](super::Story::reason) has it.
    pub fn reason(mut self, reason: impl Into<String>) -> Self {
        self.reason = Some(reason.into());
        self
    }

    /// Messages whose last error has this text in it, in upper or lower case.
    pub fn error_contains(mut self, text: impl AsRef<str>) -> Self {
        self.error = Some(text.as_ref().to_lowercase());
        self
    }

    /// The message with this id.
    pub fn message_id(mut self, id: impl Into<String>) -> Self {
        self.message_id = Some(id.into());
        self
    }

    /// The message at this place, from 1. Places change when messages before them leave.
    pub fn position(mut self, position: u64) -> Self {
        self.position = Some(position);
        self
    }

    /// Messages that failed last longer ago than this. One that does not tell when is not meant.
    pub fn older_than(mut self, age: Duration) -> Self {
        self.older_than = Some(age);
        self
    }

    /// Messages that failed last not longer ago than this. One that does not tell when is not meant.
    pub fn newer_than(mut self, age: Duration) -> Self {
        self.newer_than = Some(age);
        self
    }

    /// Messages with a header of this value. Integers are equal whatever their width; texts and numbers are not.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<Value<'static>>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Whether it means all messages.
    pub fn is_all(&self) -> bool {
        *self == Filter::default()
    }

    /// Whether a message is meant.
    pub fn matches(&self, message: &ParkedMessage, now: SystemTime) -> bool {
        let story = message.story();
        is_or_any(&self.queue, &story.queue)
            && is_or_any(&self.kind, &story.kind)
            && is_or_any(&self.reason, &story.reason)
            && self.position.is_none_or(|position| position == message.position())
            && (self.message_id.is_none() || self.message_id == message.message_id())
            && self.error.as_ref().is_none_or(|text| {
                story.error.as_ref().is_some_and(|error| error.to_lowercase().contains(text))
            })
            && self.is_of_age(message, now)
            && self.headers.iter().all(|(name, wanted)| {
                message.header(name).is_some_and(|found| is_same(&found, wanted))
            })
    }

    fn is_of_age(&self, message: &ParkedMessage, now: SystemTime) -> bool {
        if self.older_than.is_none() && self.newer_than.is_none() {
            return true;
        }
        let Some(age) = message.age(now) else { return false };
        self.older_than.is_none_or(|least| age > least)
            && self.newer_than.is_none_or(|most| age <= most)
    }

    /// The place after which nothing can be meant any more.
    pub(super) fn last_position(&self) -> Option<u64> {
        self.position
    }
}

fn is_or_any(wanted: &Option<String>, found: &Option<String>) -> bool {
    wanted.is_none() || wanted == found
}

fn is_same(one: &Value<'_>, other: &Value<'_>) -> bool {
    match (one.as_i64(), other.as_i64()) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use bytes::Bytes;

    use super::*;
    use crate::amqp::{Properties, RawProperties, Table};

    fn message() -> ParkedMessage {
        let headers = Table::from_pairs([
            ("x-leveret-queue", "jobs".into()),
            ("x-leveret-error", "Connection REFUSED by 10.0.0.1".into()),
            ("x-leveret-error-kind", "io".into()),
            ("x-leveret-reason", "exhausted".into()),
            ("x-leveret-last-failure", Value::Timestamp(1000)),
            ("tenant", 7i64.into()),
        ]);
        let properties = Properties {
            headers: Some(headers.unwrap()),
            message_id: Some("m1".try_into().unwrap()),
            ..Properties::default()
        };
        ParkedMessage::new(3, "", "k", &RawProperties::from(&properties), &Bytes::new())
    }

    #[test]
    fn every_condition_has_to_hold() {
        let seconds = Duration::from_secs;
        let now = UNIX_EPOCH + seconds(1060);
        let all = || Filter::new();
        let table = [
            (all(), true),
            (all().queue("jobs"), true),
            (all().queue("other"), false),
            (all().kind("io"), true),
            (all().kind("i"), false),
            (all().reason("exhausted"), true),
            (all().reason("permanent"), false),
            (all().error_contains("connection refused"), true),
            (all().error_contains("denied"), false),
            (all().message_id("m1"), true),
            (all().message_id("m2"), false),
            (all().position(3), true),
            (all().position(2), false),
            (all().older_than(seconds(59)), true),
            (all().older_than(seconds(60)), false),
            (all().newer_than(seconds(60)), true),
            (all().newer_than(seconds(59)), false),
            (all().header("tenant", 7i32), true),
            (all().header("tenant", "7"), false),
            (all().header("nobody", 7), false),
            (all().queue("jobs").kind("io").header("tenant", 7), true),
            (all().queue("jobs").kind("io").header("tenant", 8), false),
        ];
        for (filter, expected) in table {
            assert_eq!(filter.matches(&message(), now), expected, "{filter:?}");
        }
    }

    #[test]
    fn a_message_that_does_not_tell_its_age_has_none() {
        let message = ParkedMessage::new(1, "", "", &RawProperties::default(), &Bytes::new());
        for filter in
            [Filter::new().older_than(Duration::ZERO), Filter::new().newer_than(Duration::MAX)]
        {
            assert!(!filter.matches(&message, UNIX_EPOCH));
        }
    }
}
