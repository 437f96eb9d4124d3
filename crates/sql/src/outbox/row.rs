//! A message as it is written down.

use leveret::amqp::{Properties, RawProperties, ShortStr, Table};
use leveret::{IntoMessage, Message, TraceContext};

use crate::dialect::{LANES, NewRow};
use crate::error::{Error, ErrorKind};

/// A message that is to be written into an [`Outbox`](crate::Outbox), and where it goes.
#[derive(Debug)]
#[must_use]
pub struct Outgoing {
    exchange: String,
    routing_key: String,
    message: Result<Message, leveret::Error>,
    ordering_key: Option<String>,
    mandatory: bool,
}

impl Outgoing {
    /// To this exchange, with this routing key.
    pub fn new(
        exchange: impl Into<String>,
        routing_key: impl Into<String>,
        message: impl IntoMessage,
    ) -> Self {
        Outgoing {
            exchange: exchange.into(),
            routing_key: routing_key.into(),
            message: message.into_message(),
            ordering_key: None,
            mandatory: true,
        }
    }

    /// Messages with the same key are sent in the order in which they were written, whichever relays send them: each once the
    /// one before it was confirmed. Those without a key are in no order.
    ///
    /// Transactions that write messages of one key at the same time are in no order either, unless they wait for each other: as
    /// they do if each has changed the row before that the messages are about.
    pub fn ordered_by(mut self, key: impl Into<String>) -> Self {
        self.ordering_key = Some(key.into());
        self
    }

    /// It counts as sent even if no queue gets it. By default that is an error, and it is tried again.
    pub fn allow_unroutable(mut self) -> Self {
        self.mandatory = false;
        self
    }

    /// Everything that can be wrong with it shows here, and not when nobody is there any more to be told.
    pub(super) fn into_row(self) -> Result<NewRow, Error> {
        let what = || format!("a message to exchange {:?}", self.exchange);
        let message = self.message.map_err(|error| Error::broker(what(), error))?;
        let (body, mut properties) =
            message.identified().into_parts().map_err(|error| Error::broker(what(), error))?;
        check("exchange", &self.exchange)?;
        check("routing key", &self.routing_key)?;
        check("ordering key", self.ordering_key.as_deref().unwrap_or_default())?;
        if let Some(context) = TraceContext::current() {
            context.put_into(properties.headers.get_or_insert_with(Table::new));
        }
        Ok(NewRow {
            lane: lane(self.ordering_key.as_deref(), &properties),
            exchange: self.exchange,
            routing_key: self.routing_key,
            ordering_key: self.ordering_key,
            mandatory: self.mandatory,
            properties: RawProperties::from(&properties).as_bytes().clone(),
            body,
        })
    }
}

/// Names have 255 bytes at most, as AMQP has it, and PostgreSQL's texts have no zero.
fn check(what: &str, name: &str) -> Result<(), Error> {
    if ShortStr::try_from(name).is_ok() && !name.contains('\0') {
        return Ok(());
    }
    let text = format!("{what} {name:?} cannot be: 255 bytes at most, and none of them zero");
    Err(Error::new(ErrorKind::Invalid, text))
}

/// Everything with the same key is in the same lane; what has none is anywhere.
fn lane(key: Option<&str>, properties: &Properties<'_>) -> i16 {
    let hash = match (key, &properties.message_id) {
        (Some(key), _) => hash(key.as_bytes()),
        (None, Some(id)) => hash(id.as_bytes()),
        (None, None) => 0,
    };
    (hash % u64::from(LANES)) as i16
}

/// FNV-1a: all writers have to agree on it, whatever version they are of.
fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325, step);
    // Its lowest bits alone depend on the lowest bits of the bytes alone.
    hash ^ (hash >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_sent_cannot_be_written() {
        let long = "x".repeat(256);
        for outgoing in [
            Outgoing::new(&long, "", ""),
            Outgoing::new("", &long, ""),
            Outgoing::new("", "", "").ordered_by(&long),
            Outgoing::new("", "a\0b", ""),
            Outgoing::new("", "", Message::new("").kind(&long)),
        ] {
            assert_eq!(outgoing.into_row().unwrap_err().kind(), ErrorKind::Invalid);
        }
    }

    /// Rows that were written by one version are found by another.
    #[test]
    fn lanes_of_keys_never_change() {
        let lane = |key: &str| lane(Some(key), &Properties::default());
        assert_eq!(["", "a", "customer 7"].map(lane), [1, 0, 15]);
        let used: std::collections::HashSet<i16> =
            (0..1000).map(|n| lane(&n.to_string())).collect();
        assert_eq!(used.len(), usize::from(LANES));
    }

    #[tokio::test]
    async fn a_message_belongs_to_the_trace_it_was_written_in() {
        let context = TraceContext::root();
        let row = context.clone().scope(async { Outgoing::new("", "q", "").into_row() }).await;
        let properties = RawProperties::new(row.unwrap().properties);
        let parent = properties.header("traceparent").unwrap();
        assert_eq!(parent.as_str(), Some(context.to_string().as_str()));
        assert!(properties.get().message_id.is_some());
    }
}
