//! A message in a parking lot, and what its headers tell of how it came there.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;

use crate::amqp::{Properties, RawProperties, Table, Value};
use crate::deaths::Deaths;
use crate::delay::ladder::header as delay_header;
use crate::forwarder::ForwardedMessage;
use crate::retry::stamp::{self, header};

/// A message that was parked: a copy, to look at. The message itself stays where it is.
#[derive(Clone, Debug)]
pub struct ParkedMessage {
    position: u64,
    exchange: String,
    routing_key: String,
    raw: RawProperties,
    body: Bytes,
    story: Story,
}

/// What is known of the failures of a parked message. What nobody has written down is `None`.
///
/// Messages that were parked by leveret tell all of it. Those of other systems tell what they can: `x-death` of the broker
/// names the queue, `retry_info` of Sneakers and Kicks the error, `mb-exceptions` a history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Story {
    /// What the last error said.
    pub error: Option<String>,
    /// Of what kind it was.
    pub kind: Option<String>,
    /// Why it was parked: `exhausted`, `too-old`, `permanent`, `unmovable`; or why the broker moved it: `rejected`,
    /// `expired`, `maxlen`, `delivery_limit`.
    pub reason: Option<String>,
    /// How many deliveries of it failed.
    pub attempts: Option<u32>,
    /// When it failed first.
    pub first_failure: Option<SystemTime>,
    /// When it failed last.
    pub last_failure: Option<SystemTime>,
    /// The queue whose consumer failed.
    pub queue: Option<String>,
    /// The exchange it had been published to.
    pub exchange: Option<String>,
    /// The routing key it had been published with.
    pub routing_key: Option<String>,
    /// The exchange by which it gets back to its queue, and to no other.
    pub back: Option<String>,
    /// The errors so far, the oldest first. Not all of them if there were many.
    pub history: Vec<PastError>,
}

/// One of the errors that a message met with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PastError {
    /// When.
    pub at: Option<SystemTime>,
    /// Of what kind.
    pub kind: Option<String>,
    /// What it said.
    pub error: String,
}

impl ParkedMessage {
    pub(super) fn new(
        position: u64,
        exchange: &str,
        routing_key: &str,
        raw: &RawProperties,
        body: &Bytes,
    ) -> Self {
        ParkedMessage {
            position,
            exchange: exchange.to_owned(),
            routing_key: routing_key.to_owned(),
            story: Story::read(raw),
            raw: raw.clone(),
            body: body.clone(),
        }
    }

    /// With memory of its own: what was read from the socket is not held by what is kept to be looked at.
    pub(super) fn compact(mut self) -> Self {
        self.raw.compact();
        self.body = Bytes::copy_from_slice(&self.body);
        self
    }

    /// How much memory it takes, roughly.
    pub(super) fn size(&self) -> usize {
        self.body.len() + self.raw.as_bytes().len()
    }

    /// The properties and the body, to send on.
    pub(super) fn parcel(&self) -> ForwardedMessage {
        let routing_key = self.story.routing_key.as_ref().unwrap_or(&self.routing_key);
        ForwardedMessage::new(String::new(), routing_key.clone(), &self.raw, &self.body)
    }

    /// Its place in the lot when it was looked at; the first has number 1.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Its id, if it has one.
    pub fn message_id(&self) -> Option<String> {
        self.properties().message_id.map(|id| id.to_str_lossy().into_owned())
    }

    /// The body.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// The properties, headers included.
    pub fn properties(&self) -> Properties<'_> {
        self.raw.get()
    }

    /// The properties as they came.
    pub fn raw_properties(&self) -> &RawProperties {
        &self.raw
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<Value<'_>> {
        self.raw.header(name)
    }

    /// The exchange by which it came into the lot.
    pub fn exchange(&self) -> &str {
        &self.exchange
    }

    /// The routing key under which it came into the lot.
    pub fn routing_key(&self) -> &str {
        &self.routing_key
    }

    /// What is known of its failures.
    pub fn story(&self) -> &Story {
        &self.story
    }

    /// How long ago it failed last; if that is unknown, how long ago it was made.
    pub fn age(&self, now: SystemTime) -> Option<Duration> {
        let made = || self.properties().timestamp.and_then(time);
        let at = self.story.last_failure.or_else(made)?;
        Some(now.duration_since(at).unwrap_or_default())
    }
}

impl Story {
    pub(super) fn read(raw: &RawProperties) -> Self {
        let Some(headers) = raw.get().headers else { return Story::default() };
        let headers = &headers;
        let text = |name: &str| headers.get(name).and_then(|value| readable(&value));
        let when = |name: &str| headers.get(name).and_then(|value| stamp::time_in(&value));
        let mut story = Story {
            error: text(header::ERROR),
            kind: text(header::KIND),
            reason: text(header::REASON),
            attempts: headers.get(header::ATTEMPTS).and_then(|value| stamp::count(&value)),
            first_failure: when(header::FIRST),
            last_failure: when(header::LAST),
            queue: text(header::QUEUE),
            exchange: text(header::EXCHANGE),
            routing_key: text(header::ROUTING_KEY),
            back: text(header::RETURN),
            history: headers.get(header::HISTORY).map(|past| history(&past)).unwrap_or_default(),
        };
        story.learn_from_sneakers(headers);
        story.learn_from_exceptions(headers);
        story.learn_from_deaths(headers);
        // A delayed message whose target was gone when it was due.
        story.queue = story.queue.take().or_else(|| text(delay_header::QUEUE));
        story
    }

    /// `retry_info`: JSON, by the Maxretry handler of Sneakers and Kicks.
    fn learn_from_sneakers(&mut self, headers: &Table<'_>) {
        let Some(info) = headers.get("retry_info") else { return };
        let Some(bytes) = info.as_bytes() else { return };
        let Ok(info) = serde_json::from_slice::<serde_json::Value>(bytes) else { return };
        let text = |name: &str| info.get(name)?.as_str().map(str::to_owned);
        let error = || text("error_message").or_else(|| text("error"));
        self.error = self.error.take().or_else(error);
        self.kind = self.kind.take().or_else(|| text("error_class"));
        let attempts = || count(info.get("num_attempts")?.as_i64()?);
        self.attempts = self.attempts.or_else(attempts);
    }

    /// `mb-exceptions`: a list of texts.
    fn learn_from_exceptions(&mut self, headers: &Table<'_>) {
        let Some(header) = headers.get("mb-exceptions") else { return };
        if self.history.is_empty() {
            self.history = history(&header);
        }
        if self.error.is_none() {
            self.error = self.history.last().map(|last| last.error.clone());
        }
    }

    /// What the broker has noted of dead letters.
    fn learn_from_deaths(&mut self, headers: &Table<'_>) {
        let text = |name: &str| headers.get(name).and_then(|value| readable(&value));
        let deaths = Deaths::read(headers);
        // The queue in which a message died first is the one it was meant for, unless it only waited there.
        let is_failure = |reason: &str| reason != "expired";
        let first = || {
            let reason = text("x-first-death-reason").filter(|reason| is_failure(reason))?;
            Some((text("x-first-death-queue")?, reason))
        };
        let noted = || {
            let oldest = deaths.iter().filter(|death| is_failure(&death.reason)).last()?;
            Some((oldest.queue.clone(), oldest.reason.clone()))
        };
        if let Some((queue, reason)) = first().or_else(noted) {
            if self.attempts.is_none() {
                let rejected = deaths.rejected_from(&queue);
                self.attempts = (rejected > 0).then_some(rejected);
            }
            self.queue.get_or_insert(queue);
            self.reason.get_or_insert(reason);
        }
        if self.exchange.is_none()
            && let Some(exchange) = text("x-first-death-exchange")
        {
            self.exchange = Some(exchange);
        }
    }
}

fn history(header: &Value<'_>) -> Vec<PastError> {
    let entries = header.as_array().into_iter().flat_map(|entries| entries.iter());
    let read = |entry: Value<'_>| match entry.as_table() {
        None => Some(PastError { error: readable(&entry)?, ..PastError::default() }),
        Some(table) => Some(PastError {
            at: table.get("at").and_then(|at| stamp::time_in(&at)),
            kind: table.get("kind").and_then(|kind| readable(&kind)),
            error: table.get("error").and_then(|error| readable(&error)).unwrap_or_default(),
        }),
    };
    entries.filter_map(read).collect()
}

fn readable(value: &Value<'_>) -> Option<String> {
    value.as_bytes().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
}

fn time(seconds: u64) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

fn count(number: i64) -> Option<u32> {
    u32::try_from(number).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amqp::Array;

    fn story(headers: Table<'_>) -> Story {
        Story::read(&RawProperties::from(&Properties {
            headers: Some(headers),
            ..Properties::default()
        }))
    }

    #[test]
    fn a_message_of_sneakers_tells_what_it_can() {
        let info = r#"{"num_attempts":6,"error_class":"RuntimeError","error_message":"boom","failed_at":"2024"}"#;
        let death = |queue: &str, reason: &str, count: i64| {
            let fields = [("queue", queue.into()), ("reason", reason.into())];
            let mut table = Table::from_pairs(fields).unwrap();
            table.insert("count", count).unwrap();
            Value::Table(table)
        };
        let deaths = [death("jobs-retry", "expired", 5), death("jobs", "rejected", 5)];
        let headers = Table::from_pairs([
            ("retry_info", info.into()),
            ("x-death", Value::Array(Array::from_values(deaths).unwrap())),
        ]);
        let story = story(headers.unwrap());
        assert_eq!(story.error.as_deref(), Some("boom"));
        assert_eq!(story.kind.as_deref(), Some("RuntimeError"));
        assert_eq!(story.attempts, Some(6));
        assert_eq!(story.queue.as_deref(), Some("jobs"));
        assert_eq!(story.reason.as_deref(), Some("rejected"));
    }

    #[test]
    fn a_queue_in_which_a_message_only_waited_is_not_the_one_it_came_from() {
        let headers = [
            ("x-first-death-queue", "jobs.retry".into()),
            ("x-first-death-reason", "expired".into()),
            ("mb-exceptions", Value::Array(Array::from_values(["a".into(), "b".into()]).unwrap())),
        ];
        let story = story(Table::from_pairs(headers).unwrap());
        assert_eq!(story.queue, None);
        assert_eq!(story.error.as_deref(), Some("b"));
        assert_eq!(story.history.len(), 2);
    }

    #[test]
    fn headers_of_another_shape_are_no_story() {
        let headers = [
            ("x-leveret-attempts", "many".into()),
            ("x-leveret-history", 5.into()),
            ("x-leveret-first-failure", "yesterday".into()),
            ("retry_info", "{".into()),
            ("x-death", "x".into()),
        ];
        assert_eq!(story(Table::from_pairs(headers).unwrap()), Story::default());
        assert_eq!(Story::read(&RawProperties::default()), Story::default());
    }
}
