//! Where messages go that leave a parking lot, and in which form.

use std::collections::HashMap;

use bytes::Bytes;

use super::ParkedMessage;
use crate::amqp::{Channel, Properties, ShortStr, Table, Value};
use crate::connection::Client;
use crate::error::{Error, ErrorKind};
use crate::forwarder::{ForwardedMessage, kept};
use crate::retry::stamp::{self, header};

/// Headers that tell to which further queues a message is copied, and where they are kept meanwhile.
const COPIES: [(&str, &str); 2] = [("CC", kept::COPIES), ("BCC", kept::BLIND_COPIES)];

/// What is remembered of places that exist or not. Beyond this they are asked for again.
const MAX_KNOWN: usize = 1000;

/// Where a message goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Target {
    /// Back to the queue it came from, and to no other.
    #[default]
    Origin,
    /// To this queue.
    Queue(String),
    /// To whatever this exchange has for it.
    Exchange {
        /// Its name.
        name: String,
        /// The routing key; without one, the message's own.
        routing_key: Option<String>,
    },
}

impl Target {
    /// To this queue.
    pub fn queue(name: impl Into<String>) -> Self {
        Target::Queue(name.into())
    }

    /// To this exchange, under the message's own routing key.
    pub fn exchange(name: impl Into<String>) -> Self {
        Target::Exchange { name: name.into(), routing_key: None }
    }
}

/// A message about to be replayed, to be changed: as it was before it failed, without what was counted and noted since.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Draft {
    /// The body.
    pub body: Bytes,
    /// The properties, headers included.
    pub properties: Properties<'static>,
    /// Where it goes.
    pub target: Target,
}

impl Draft {
    /// Sets a header.
    pub fn set_header<'v>(&mut self, name: &str, value: impl Into<Value<'v>>) -> Result<(), Error> {
        let headers = self.properties.headers.get_or_insert_with(Table::new);
        headers.insert(name, value).map_err(|error| {
            Error::caused(ErrorKind::Invalid, format!("header {name:?} cannot be set"), error)
        })
    }

    /// Takes a header away.
    pub fn remove_header(&mut self, name: &str) {
        if let Some(headers) = &mut self.properties.headers {
            headers.remove(name);
        }
    }
}

/// Finds the way for each message.
#[derive(Debug)]
pub(super) struct Router {
    client: Client,
    lot: String,
    queues: HashMap<String, bool>,
    exchanges: HashMap<String, bool>,
}

impl Router {
    pub(super) fn new(client: &Client, lot: &str) -> Self {
        Router {
            client: client.clone(),
            lot: lot.to_owned(),
            queues: HashMap::new(),
            exchanges: HashMap::new(),
        }
    }

    /// Writes the address on a parcel that is replayed. An error of kind [`ErrorKind::Missing`] or
    /// [`ErrorKind::Invalid`] is about this message alone.
    pub(super) async fn address(
        &mut self,
        parcel: &mut ForwardedMessage,
        target: &Target,
        message: &ParkedMessage,
    ) -> Result<(), Error> {
        match target {
            Target::Origin => self.back(parcel, message).await,
            Target::Queue(queue) => self.address_queue(parcel, queue).await,
            Target::Exchange { name, routing_key } => {
                if !self.has_exchange(name).await? {
                    return Err(missing(format!("exchange {name:?} does not exist")));
                }
                parcel.keep_copies();
                parcel.exchange.clone_from(name);
                if let Some(key) = routing_key {
                    parcel.routing_key.clone_from(key);
                }
                Ok(())
            }
        }
    }

    async fn back(
        &mut self,
        parcel: &mut ForwardedMessage,
        message: &ParkedMessage,
    ) -> Result<(), Error> {
        let story = message.story();
        let Some(queue) = &story.queue else {
            return Err(Error::new(
                ErrorKind::Invalid,
                "the message does not tell which queue it came from: name a target",
            ));
        };
        if let Some(back) = &story.back
            // If the queue is gone, that exchange would lead it back into the lot, its story lost.
            && self.has_queue(queue).await?
            && self.has_exchange(back).await?
        {
            parcel.exchange.clone_from(back);
            return Ok(());
        }
        self.address_queue(parcel, queue).await
    }

    async fn address_queue(
        &mut self,
        parcel: &mut ForwardedMessage,
        queue: &str,
    ) -> Result<(), Error> {
        if queue == self.lot {
            return Err(Error::new(ErrorKind::Invalid, "the message would go back into the lot"));
        }
        if !self.has_queue(queue).await? {
            return Err(missing(format!("queue {queue:?} does not exist")));
        }
        straight_to(parcel, queue);
        Ok(())
    }

    async fn has_queue(&mut self, queue: &str) -> Result<bool, Error> {
        if let Some(known) = self.queues.get(queue) {
            return Ok(*known);
        }
        let found = exists(self.client.inspect_queue(queue).await)?;
        remember(&mut self.queues, queue, found);
        Ok(found)
    }

    async fn has_exchange(&mut self, exchange: &str) -> Result<bool, Error> {
        // The broker answers no question about the default exchange, which is always there.
        if exchange.is_empty() {
            return Ok(true);
        }
        if let Some(known) = self.exchanges.get(exchange) {
            return Ok(*known);
        }
        let what = format!("cannot inspect exchange {exchange:?}");
        let ask = move |channel: Channel| async move { channel.inspect_exchange(exchange).await };
        let inspect = self.client.on_channel(&what, ask);
        let found = exists(inspect.await)?;
        remember(&mut self.exchanges, exchange, found);
        Ok(found)
    }
}

fn remember(known: &mut HashMap<String, bool>, name: &str, found: bool) {
    if known.len() >= MAX_KNOWN {
        known.clear();
    }
    known.insert(name.to_owned(), found);
}

fn exists<T>(answer: Result<T, Error>) -> Result<bool, Error> {
    match answer {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::Missing => Ok(false),
        Err(error) => Err(error),
    }
}

fn missing(text: String) -> Error {
    Error::new(ErrorKind::Missing, text)
}

/// To one queue and no other. Its own routing key is noted, since the default exchange needs another.
pub(super) fn straight_to(parcel: &mut ForwardedMessage, queue: &str) {
    // They were made when it was published first. Blind ones were not: only messages that were delayed, and came to no queue,
    // still tell of them.
    parcel.keep_copies();
    // Whoever gets it is not to know.
    parcel.remove_header("BCC");
    parcel.exchange.clear();
    parcel.routing_key = queue.to_owned();
}

/// To the lot itself, with a note of how it had come there.
pub(super) fn address_to_lot(parcel: &mut ForwardedMessage, message: &ParkedMessage, queue: &str) {
    if (message.exchange(), message.routing_key()) != ("", queue) {
        note_address(parcel, message);
    }
    straight_to(parcel, queue);
}

/// How it had been published is noted, if it is not yet: it gets another address.
pub(super) fn note_address(parcel: &mut ForwardedMessage, message: &ParkedMessage) {
    let story = message.story();
    if story.exchange.is_none() {
        parcel.set_header(header::EXCHANGE, message.exchange());
    }
    if story.routing_key.is_none() {
        parcel.set_header(header::ROUTING_KEY, message.routing_key());
    }
}

/// As it was before it failed: without what was counted and noted, and with the properties that it could not keep.
pub(super) fn reset(parcel: &mut ForwardedMessage) {
    parcel.restore_deep_headers();
    for (name, stowed) in COPIES {
        if let Some(copies) = parcel.remove_header(stowed) {
            parcel.set_header(name, kept::keys(copies));
        }
    }
    let text = |value: Option<Value<'static>>| {
        value.and_then(|value| ShortStr::from_bytes(value.as_bytes()?.to_vec()).ok())
    };
    if let Some(expiration) = text(parcel.remove_header(kept::EXPIRATION)) {
        parcel.properties.expiration.get_or_insert(expiration);
    }
    if let Some(user) = text(parcel.remove_header(kept::USER_ID)) {
        parcel.properties.user_id.get_or_insert(user);
    }
    let priority =
        parcel.remove_header(kept::PRIORITY).and_then(|priority| stamp::count(&priority));
    if let Some(priority) = priority.and_then(|priority| u8::try_from(priority).ok()) {
        parcel.properties.priority = Some(priority);
    }
    let Some(headers) = &parcel.properties.headers else { return };
    let names: Vec<Vec<u8>> = headers
        .iter()
        .map(|(name, _)| name.as_bytes().to_vec())
        .filter(|name| is_noted(name))
        .collect();
    if let Some(headers) = &mut parcel.properties.headers {
        for name in &names {
            headers.remove(name);
        }
        if headers.is_empty() && !names.is_empty() {
            parcel.properties.headers = None;
        }
    }
}

/// Whether a header was added by whoever tried the message again: us, the broker, or another system.
fn is_noted(name: &[u8]) -> bool {
    const NAMES: [&str; 11] = [
        header::DELAY,
        "mb-retries",
        "mb-exceptions",
        "orb-queue",
        "orb-redelivery-count",
        "retry_info",
        "x-death",
        "x-delivery-count",
        "x-acquired-count",
        "x-opt-deaths",
        "x-opt-rabbitmq-delivery-count",
    ];
    let begins = |start: &str| name.starts_with(start.as_bytes());
    // Malformed properties, which cannot be sent as they came, are a part of the message.
    if name == kept::PROPERTIES.as_bytes() {
        return false;
    }
    NAMES.iter().any(|noted| name == noted.as_bytes())
        || begins("x-leveret-")
        || begins("leveret-delay-")
        || begins("x-first-death-")
        || begins("x-last-death-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amqp::{Array, RawProperties};

    fn parcel(headers: &[(&str, Value<'static>)]) -> ForwardedMessage {
        let headers = Table::from_pairs(headers.iter().cloned()).unwrap();
        let properties = Properties { headers: Some(headers), ..Properties::default() };
        let raw = RawProperties::from(&properties);
        ForwardedMessage::new("x".to_owned(), "k".to_owned(), &raw, &Bytes::new())
    }

    fn copies() -> Value<'static> {
        Value::Array(Array::from_values(["other".into()]).unwrap())
    }

    #[test]
    fn a_message_is_as_it_was_before_it_failed() {
        let mut parcel = parcel(&[
            ("tenant", "acme".into()),
            ("x-leveret-attempts", 3i64.into()),
            ("x-leveret-expiration", "5000".into()),
            ("x-leveret-user-id", "shop".into()),
            ("x-leveret-priority", "9".into()),
            ("x-leveret-cc", copies()),
            ("x-death", copies()),
            ("x-first-death-queue", "q".into()),
            ("leveret-delay", 5i64.into()),
            ("leveret-delay-p9", 5i64.into()),
            ("retry_info", "{}".into()),
            ("mb-retries", 2.into()),
            ("mb-exceptions", copies()),
        ]);
        reset(&mut parcel);
        let expected = Table::from_pairs([("tenant", "acme".into()), ("CC", copies())]).unwrap();
        assert_eq!(parcel.properties.headers, Some(expected));
        assert_eq!(parcel.properties.expiration.unwrap(), "5000");
        assert_eq!(parcel.properties.user_id.unwrap(), "shop");
        assert_eq!(parcel.properties.priority, Some(9));
    }

    #[test]
    fn a_message_that_had_no_headers_has_none_again() {
        let mut parcel = parcel(&[("x-leveret-attempts", 3i64.into())]);
        reset(&mut parcel);
        assert_eq!(parcel.properties, Properties::default());
    }

    #[test]
    fn straight_to_a_queue_there_are_no_copies() {
        let mut parcel = parcel(&[("CC", copies()), ("n", 1.into())]);
        straight_to(&mut parcel, "q");
        assert_eq!((parcel.exchange.as_str(), parcel.routing_key.as_str()), ("", "q"));
        assert_eq!(parcel.header("CC"), None);
        assert_eq!(parcel.header("x-leveret-cc"), Some("other".into()));
        reset(&mut parcel);
        assert_eq!(parcel.header("CC"), Some(copies()));
    }
}
