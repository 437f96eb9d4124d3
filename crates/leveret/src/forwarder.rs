//! Sending messages on as they came: a confirmed, mandatory publish, for those who settle the original only after it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

use crate::amqp::{
    Channel, Confirm, Confirmation, Outcome, Properties, Publish, RawProperties, ShortStr, Table,
    Value, deadline_in,
};
use crate::connection::Client;
use crate::connection::managed::LiveConnection;
use crate::connection::{ReliableChannel, UsableChannel};
use crate::deaths::{Death, Deaths};
use crate::delivery::Delivery;
use crate::error::{Error, ErrorKind};

/// Headers in which a message keeps what the broker would refuse, or act on at the wrong time.
pub(crate) mod kept {
    use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};

    use crate::amqp::{Array, Value};

    /// Who published it: the broker refuses the name of anybody but the one who sends it on.
    pub(crate) const USER_ID: &str = "x-leveret-user-id";
    /// The `expiration` it had: it may not expire where it waits, or where it is parked.
    pub(crate) const EXPIRATION: &str = "x-leveret-expiration";
    /// The `priority` it had: no message may hold others up where they wait.
    pub(crate) const PRIORITY: &str = "x-leveret-priority";
    /// The header `CC` it had: routing keys by which others got copies when it was published.
    pub(crate) const COPIES: &str = "x-leveret-cc";
    /// The header `BCC` it had, which the broker takes away from whoever gets the message.
    pub(crate) const BLIND_COPIES: &str = "x-leveret-bcc";
    /// Its properties as they came, if they cannot be read: malformed, or nested too deep.
    pub(crate) const PROPERTIES: &str = "x-leveret-properties";

    /// What a routing key keeps its distance from others with, and what makes text look like a list in JSON.
    const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'[');

    /// Routing keys as one text. A list of texts would be enough for Orb to refuse the message.
    pub(crate) fn keys_as_text<'k>(keys: impl Iterator<Item = &'k [u8]>) -> String {
        let keys = keys.map(|key| percent_encode(key, ENCODED).to_string());
        keys.collect::<Vec<_>>().join(" ")
    }

    /// The list of them again. What is no text is one already: earlier versions wrote lists.
    pub(crate) fn keys(kept: Value<'static>) -> Value<'static> {
        let Some(text) = kept.as_str() else { return kept };
        let keys = text.split(' ').map(|key| percent_decode_str(key).collect::<Vec<u8>>());
        match Array::from_values(keys.map(|key| Value::Str(key.into()))) {
            Ok(keys) => Value::Array(keys),
            Err(_) => kept,
        }
    }
}

/// The headers in which the broker says where a message died.
const DEATHS: [&str; 7] = [
    "x-death",
    "x-first-death-exchange",
    "x-first-death-queue",
    "x-first-death-reason",
    "x-last-death-exchange",
    "x-last-death-queue",
    "x-last-death-reason",
];

/// A message on its way from one place to another: its exchange, routing key, properties and body. From
/// [`FailedMessage::forward_to`](crate::retry::FailedMessage::forward_to).
#[derive(Clone, Debug)]
pub struct ForwardedMessage {
    pub(crate) exchange: String,
    pub(crate) routing_key: String,
    pub(crate) properties: Properties<'static>,
    pub(crate) body: Bytes,
    /// How many bytes the broker may add to its headers on the way, before it is delivered again: where a message was
    /// dead-lettered is one of them. Headers that then no longer fit into a frame would cost whoever gets it the connection.
    pub(crate) reserve: usize,
}

/// Room for what the broker says about a death: an entry of `x-death` and the first and last one once more, with the names
/// of a queue, an exchange and a routing key in each.
pub(crate) const ROOM_FOR_A_DEATH: usize = 2048;

/// Properties other than headers are twelve short strings and some numbers at most.
const MOST_BESIDE_HEADERS: usize = 4096;

impl ForwardedMessage {
    /// What was delivered, as it came, under its own routing key.
    pub(crate) fn of(delivery: &Delivery, exchange: impl Into<String>) -> Self {
        let routing_key = key_of(&delivery.routing_key());
        ForwardedMessage::new(
            exchange.into(),
            routing_key,
            delivery.raw_properties(),
            delivery.body(),
        )
    }

    /// A message as it came.
    pub(crate) fn new(
        exchange: String,
        routing_key: String,
        raw: &RawProperties,
        body: &Bytes,
    ) -> Self {
        let properties = raw.get().into_owned();
        let body = body.clone();
        let mut parcel = ForwardedMessage { exchange, routing_key, properties, body, reserve: 0 };
        parcel.forget_counts();
        if raw.fault().is_some() {
            parcel.set_header(kept::PROPERTIES, Value::Bytes(raw.as_bytes().to_vec().into()));
        }
        parcel
    }

    /// The broker says it anew where it counts; to others it would be a lie.
    fn forget_counts(&mut self) {
        for count in ["x-delivery-count", "x-acquired-count"] {
            self.remove_header(count);
        }
    }

    /// Gives it the properties back that wait in a header because they could not be read, if nothing is wrong with them but how
    /// deep their headers are nested: other clients may read those.
    pub(crate) fn restore_deep_headers(&mut self) {
        let Some(kept) = self.header(kept::PROPERTIES) else { return };
        let original = kept.as_bytes().map(|bytes| RawProperties::new(bytes.to_vec().into()));
        if let Some(properties) = original.and_then(|original| original.get_of_any_depth()) {
            self.properties = properties;
            self.forget_counts();
        }
    }

    /// The exchange it is published to.
    pub fn exchange(&self) -> &str {
        &self.exchange
    }

    /// The routing key it is published with.
    pub fn routing_key(&self) -> &str {
        &self.routing_key
    }

    /// Sets a header. A value that cannot be sent is left out: it is something that was to be said about the message, and
    /// must not keep it from moving.
    pub fn set_header<'v>(&mut self, name: &str, value: impl Into<Value<'v>>) {
        let headers = self.properties.headers.get_or_insert_with(Table::new);
        if let Err(error) = headers.insert(name, value) {
            tracing::debug!("header {name:?} is left out: {error}");
        }
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<Value<'_>> {
        self.properties.headers.as_ref()?.get(name)
    }

    /// Takes a header away, and returns what it was.
    pub fn remove_header(&mut self, name: &str) -> Option<Value<'static>> {
        let headers = self.properties.headers.as_mut()?;
        let removed = headers.remove(name);
        if removed.is_some() && headers.is_empty() {
            self.properties.headers = None;
        }
        removed
    }

    /// Its expiration waits in a header, so that the message does not expire on the way.
    pub(crate) fn keep_expiration(&mut self) {
        if let Some(expiration) = self.properties.expiration.take() {
            self.set_header(kept::EXPIRATION, expiration.to_str_lossy().as_ref());
        }
    }

    /// Further routing keys wait in a header, so that they do not send copies to others whenever it is tried again.
    pub(crate) fn keep_copies(&mut self) {
        let Some(keys) = self.remove_header("CC") else { return };
        match keys.as_array().map(|keys| keys.iter().collect::<Vec<_>>()) {
            Some(keys) if keys.is_empty() => {}
            Some(keys) if keys.iter().all(|key| key.as_bytes().is_some()) => {
                let text = kept::keys_as_text(keys.iter().filter_map(Value::as_bytes));
                self.set_header(kept::COPIES, text);
            }
            _ => self.set_header(kept::COPIES, keys),
        }
    }

    /// Whether further routing keys wait in a header.
    pub(crate) fn has_copies(&self) -> bool {
        self.header(kept::COPIES).is_some()
    }

    /// Sets after how long it expires in the queue that it is published to. In whole milliseconds, one at least.
    pub fn set_expiration(&mut self, time: Duration) {
        let milliseconds = time.as_millis().max(1).to_string();
        self.properties.expiration = ShortStr::try_from(milliseconds).ok();
    }

    /// Notes in headers what the broker took from the message when it died: its `expiration` and, where RabbitMQ 3.10 gave it
    /// another routing key, the keys of `CC`. A parked message gets them back when it is replayed.
    pub fn note_death(&mut self, death: &Death) {
        if let Some(expiration) = &death.expiration {
            self.set_header(kept::EXPIRATION, expiration.as_str());
        }
        let has_copies = self.has_copies() || self.header("CC").is_some();
        if !has_copies && death.routing_keys.len() > 1 {
            let keys = death.routing_keys[1..].iter().map(|key| key.as_bytes());
            self.set_header(kept::COPIES, kept::keys_as_text(keys));
        }
    }

    /// Removes `x-death` and all else that the broker said about where it died, so that it counts as a new message.
    pub fn remove_deaths(&mut self) {
        for name in DEATHS {
            self.remove_header(name);
        }
    }

    /// The same, if they would end it on its way to this queue, to which it is about to be dead-lettered. RabbitMQ before
    /// 4.0 believes what a message says: one that died there before goes in a cycle, and is dropped; a list that the
    /// broker cannot have written breaks the queue that adds to it.
    pub(crate) fn forget_fatal_deaths(&mut self, queue: &str) {
        let Some(headers) = &self.properties.headers else { return };
        let died_there = Deaths::read(headers).iter().any(|death| death.queue == queue);
        if died_there || !Deaths::is_well_formed(headers) {
            self.remove_deaths();
        }
    }

    /// Who published it waits in a header, if the broker would refuse it from this user.
    fn keep_user(&mut self, user: Option<&str>) {
        let is_other = |id: &ShortStr<'_>| Some(id.as_bytes()) != user.map(str::as_bytes);
        if let Some(id) = self.properties.user_id.take_if(|id| is_other(id)) {
            self.set_header(kept::USER_ID, id.to_str_lossy().as_ref());
        }
    }
}

/// A routing key that can be sent. One that is no text is longer as text, and then cut: no key is worth a message that
/// cannot be moved.
fn key_of(key: &ShortStr<'_>) -> String {
    ShortStr::truncated(&key.to_str_lossy()).to_str_lossy().into_owned()
}

/// Publishes parcels on a channel of its own, which is opened anew when it is gone.
#[derive(Debug)]
pub(crate) struct Forwarder {
    what: &'static str,
    timeout: Duration,
    channel: ReliableChannel<Open>,
    _client: Client,
}

/// A channel, and what its connection allows.
#[derive(Debug)]
struct Open {
    channel: Channel<Confirm>,
    user: Option<Arc<str>>,
    frame_max: usize,
}

impl UsableChannel for Open {
    fn is_usable(&self) -> bool {
        self.channel.is_usable()
    }
}

impl Open {
    /// Its headers fit into a frame, now and when it is delivered again.
    fn check_room(&self, parcel: &ForwardedMessage) -> Result<(), Error> {
        let headers =
            parcel.properties.headers.as_ref().map_or(0, |headers| headers.as_bytes().len());
        // Nearly always; what they are exactly is counted only otherwise.
        if parcel.reserve == 0 || headers + MOST_BESIDE_HEADERS + parcel.reserve <= self.frame_max {
            return Ok(());
        }
        let size = RawProperties::from(&parcel.properties).as_bytes().len();
        if size + parcel.reserve <= self.frame_max {
            return Ok(());
        }
        let text = format!("the properties of the message have {size} bytes, and leave no room");
        Err(Error::new(ErrorKind::Invalid, text))
    }
}

/// A parcel that was sent and has no outcome yet.
#[must_use = "a message has moved only once that is confirmed"]
pub(crate) struct PendingForward {
    confirmation: Confirmation,
    what: &'static str,
    timeout: Duration,
    deadline: Instant,
}

impl Forwarder {
    /// `what` is done with it, for errors: "parking a message".
    pub(crate) fn new(client: &Client, what: &'static str) -> Self {
        let timeout = client.core().options.timeout;
        let channel = ReliableChannel::new(client.core(), what, timeout);
        Forwarder { what, timeout, channel, _client: client.clone() }
    }

    /// Publishes, and waits until the broker has taken responsibility: the message is in one queue at least.
    pub(crate) async fn deliver(&self, parcel: ForwardedMessage) -> Result<(), Error> {
        self.send(parcel).await?.confirmed().await
    }

    /// Publishes. Many can be under way at once.
    pub(crate) async fn send(&self, mut parcel: ForwardedMessage) -> Result<PendingForward, Error> {
        let deadline = deadline_in(self.timeout);
        loop {
            let open = self.open(deadline).await?;
            // Nothing was sent: the next channel may take it.
            if let Some(moving) = self.send_on(&open, &mut parcel, deadline).await? {
                return Ok(moving);
            }
        }
    }

    /// Whether a parcel could be published, without doing it: what it says fits into what is sent. What the broker would say
    /// to it is not known before.
    pub(crate) async fn check(&self, mut parcel: ForwardedMessage) -> Result<(), Error> {
        let open = self.open(deadline_in(self.timeout)).await?;
        parcel.keep_user(open.user.as_deref());
        open.check_room(&parcel)?;
        let ForwardedMessage { exchange, routing_key, properties, body, .. } = parcel;
        let (exchange, routing_key) = (exchange.as_str(), routing_key.as_str());
        let publish = Publish { exchange, routing_key, mandatory: true, properties, body };
        open.channel.check(&publish).map_err(|error| Error::from_amqp(self.what, error))
    }

    /// Publishes on a channel, unless it is gone.
    async fn send_on(
        &self,
        open: &Open,
        parcel: &mut ForwardedMessage,
        deadline: Instant,
    ) -> Result<Option<PendingForward>, Error> {
        parcel.keep_user(open.user.as_deref());
        open.check_room(parcel)?;
        // They are the larger part, and need no copy.
        let headers = parcel.properties.headers.take();
        let properties = Properties {
            headers: headers.as_ref().map(Table::borrowed),
            ..parcel.properties.clone()
        };
        let publish = Publish {
            exchange: &parcel.exchange,
            routing_key: &parcel.routing_key,
            mandatory: true,
            properties,
            body: parcel.body.clone(),
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let published = open.channel.publish_within(&publish, left).await;
        parcel.properties.headers = headers;
        match published {
            Ok(confirmation) => {
                let (what, timeout) = (self.what, self.timeout);
                Ok(Some(PendingForward { confirmation, what, timeout, deadline }))
            }
            Err(_) if open.channel.is_gone() => Ok(None),
            Err(error) => Err(Error::from_amqp(self.what, error)),
        }
    }

    async fn open(&self, deadline: Instant) -> Result<Arc<Open>, Error> {
        let open = |up: LiveConnection| async move {
            let channel = up.connection.open_channel().await?.into_confirm().await?;
            let user = up.connection.user().map(Arc::from);
            let frame_max = up.connection.frame_max().get() as usize;
            Ok(Open { channel, user, frame_max })
        };
        self.channel.get(deadline, open).await
    }
}

impl PendingForward {
    /// Waits for the outcome.
    pub(crate) async fn confirmed(mut self) -> Result<(), Error> {
        self.answered().await?
    }

    /// Waits for the broker's answer. An error if there will be none, or not in time; it can be asked again.
    pub(crate) async fn answered(&mut self) -> Result<Result<(), Error>, Error> {
        let late = |_| Error::timed_out(self.what, self.timeout);
        let outcome = timeout_at(self.deadline, &mut self.confirmation).await.map_err(late)?;
        read(self.what, outcome)
    }

    /// The broker's answer, if it is there.
    pub(crate) fn answer(&self) -> Option<Result<(), Error>> {
        read(self.what, self.confirmation.outcome()?).ok()
    }

    /// Whether there will be no answer, since the channel is gone.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self.confirmation.outcome(), Some(Outcome::Lost(_)))
    }
}

/// What the broker has said to a message; an error if that is lost.
fn read(what: &str, outcome: Outcome) -> Result<Result<(), Error>, Error> {
    match outcome {
        Outcome::Acked => Ok(Ok(())),
        Outcome::Nacked => {
            let text = format!("{what}: the broker could not take it");
            Ok(Err(Error::new(ErrorKind::Nacked, text)))
        }
        Outcome::Returned(returned) => {
            let exchange = returned.exchange.as_str();
            let text = format!("{what}: exchange {exchange:?} has no queue for it");
            Ok(Err(Error::unroutable(text, returned)))
        }
        Outcome::Lost(error) => Err(Error::from_amqp(what, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amqp::Array;

    #[test]
    fn further_routing_keys_are_kept_as_one_text_and_come_back() {
        let keys: [&[u8]; 5] = [b"a.b", b"", b"x y%", "gr\u{fc}n".as_bytes(), b"[\xff]"];
        let text = kept::keys_as_text(keys.iter().copied());
        assert_eq!(text, "a.b  x%20y%25 gr%C3%BCn %5B%FF]");
        let read = kept::keys(Value::from(text));
        let read: Vec<Vec<u8>> =
            read.as_array().unwrap().iter().map(|key| key.as_bytes().unwrap().to_vec()).collect();
        assert_eq!(read, keys);
        // As earlier versions kept them.
        let list = Value::Array(Array::from_values(["a".into(), "b".into()]).unwrap());
        assert_eq!(kept::keys(list.clone()), list);
    }

    #[test]
    fn a_routing_key_that_is_no_text_can_be_sent_all_the_same() {
        let key = |bytes: &[u8]| key_of(&ShortStr::from_bytes(bytes).unwrap());
        assert_eq!(key("grün".as_bytes()), "grün");
        assert_eq!(key(b"a\xff"), "a\u{fffd}");
        // Each of them is three bytes long as text.
        assert_eq!(key(&[0xff; 255]).len(), ShortStr::MAX);
    }
}
