//! Publishing: a message goes into the outbound buffer in one piece.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use leveret_wire::method::basic;
use leveret_wire::{EncodeProperties, FrameMax, Outbound, Properties};
use tokio::time::{Instant, timeout};

use super::channel::{Channel, Confirm, Plain, Tracked, Tx};
use super::confirm::{Confirmation, Fingerprint};
use super::error::Error;

/// A message and where it goes.
///
/// ```
/// use leveret_amqp::Publish;
///
/// let publish = Publish {
///     exchange: "orders",
///     routing_key: "order.created",
///     mandatory: true,
///     body: "{}".into(),
///     ..Publish::default()
/// };
/// ```
#[derive(Clone, Debug, Default)]
pub struct Publish<'a> {
    /// To which exchange; empty = the default exchange, straight to the queue named by the key.
    pub exchange: &'a str,
    /// The routing key.
    pub routing_key: &'a str,
    /// Send it back if it reaches no queue. (AMQP's other flag, `immediate`, is not offered: RabbitMQ closes the
    /// connection on it with 540.)
    pub mandatory: bool,
    /// The properties.
    pub properties: Properties<'a>,
    /// The body. Not copied if it is large.
    pub body: Bytes,
}

/// The same, with properties that may be encoded already.
#[doc(hidden)]
pub struct Prepared<'a, P> {
    pub exchange: &'a str,
    pub routing_key: &'a str,
    pub mandatory: bool,
    pub properties: &'a P,
    pub body: &'a Bytes,
}

impl<P> Clone for Prepared<'_, P> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for Prepared<'_, P> {}

impl<'a> Publish<'a> {
    #[inline]
    pub(super) fn prepared(&self) -> Prepared<'_, Properties<'a>> {
        let Publish { exchange, routing_key, mandatory, properties, body } = self;
        Prepared { exchange, routing_key, mandatory: *mandatory, properties, body }
    }
}

impl<M> Channel<M> {
    fn patience(&self) -> Duration {
        self.link.connection.core.limits.publish_timeout
    }

    /// Encodes a message, and runs `register` with the buffer still locked, so that both happen in the same order.
    #[inline]
    fn encode<T>(
        &self,
        publish: Prepared<'_, impl EncodeProperties>,
        register: impl FnOnce() -> T,
    ) -> impl FnOnce(&mut Outbound, FrameMax) -> Result<T, Error> {
        move |outbound, max| {
            let method = basic::Publish {
                exchange: publish.exchange.try_into()?,
                routing_key: publish.routing_key.try_into()?,
                mandatory: publish.mandatory,
                immediate: false,
            };
            let channel = &self.link.channel;
            channel.check_open()?;
            outbound.content(channel.id, &method, publish.properties, publish.body, max)?;
            Ok(register())
        }
    }

    /// Puts a message into the outbound buffer, if it need not wait for room.
    #[inline]
    fn put_now<T>(
        &self,
        publish: Prepared<'_, impl EncodeProperties>,
        register: impl FnOnce() -> T,
    ) -> Option<Result<T, Error>> {
        let sender = &self.link.connection.core.sender;
        sender.publish_now(&self.link.channel.paused, self.encode(publish, register))
    }

    /// Puts a message into the outbound buffer once there is room.
    async fn put_later<T>(
        &self,
        publish: &Publish<'_>,
        patience: Duration,
        register: impl FnOnce() -> T,
    ) -> Result<T, Error> {
        let sender = &self.link.connection.core.sender;
        let encode = self.encode(publish.prepared(), register);
        sender.publish(patience, &self.link.channel.paused, encode).await
    }
}

impl Channel<Plain> {
    /// Publishes without asking for an answer: `Ok` says that the message is in the outbound buffer.
    ///
    /// It waits only if that buffer is full or the broker blocks the connection. Dropped while waiting, it has sent
    /// nothing.
    #[inline]
    pub async fn publish(&self, publish: &Publish<'_>) -> Result<(), Error> {
        match self.put_now(publish.prepared(), || ()) {
            Some(put) => put,
            None => self.put_later(publish, self.patience(), || ()).await,
        }
    }
}

impl Channel<Tx> {
    /// Publishes with the next commit.
    #[inline]
    pub async fn publish(&self, publish: &Publish<'_>) -> Result<(), Error> {
        match self.put_now(publish.prepared(), || ()) {
            Some(put) => put,
            None => self.put_later(publish, self.patience(), || ()).await,
        }
    }
}

impl Channel<Confirm> {
    /// Whether a message could be sent, without sending it. What the broker would say is another question.
    #[doc(hidden)]
    pub fn check(&self, publish: &Publish<'_>) -> Result<(), Error> {
        let max = self.link.connection.core.sender.frame_max();
        self.encode(publish.prepared(), || ())(&mut Outbound::new(), max)
    }

    /// Publishes and gives the confirmation, to be awaited now, later, or never.
    ///
    /// It waits only if the outbound buffer is full, the broker blocks the connection, or too many publishes are
    /// unconfirmed. Dropped while waiting, it has sent nothing.
    #[inline]
    pub async fn publish(&self, publish: &Publish<'_>) -> Result<Confirmation, Error> {
        self.publish_within(publish, self.patience()).await
    }

    /// The same, with another deadline for that wait than [`Limits::publish_timeout`](super::Limits::publish_timeout).
    #[inline]
    pub async fn publish_within(
        &self,
        publish: &Publish<'_>,
        patience: Duration,
    ) -> Result<Confirmation, Error> {
        match self.publish_now(publish) {
            Some(published) => published,
            None => self.publish_later(publish, patience).await,
        }
    }

    /// The same, if it need not wait.
    #[inline]
    #[doc(hidden)]
    pub fn publish_now(&self, publish: &Publish<'_>) -> Option<Result<Confirmation, Error>> {
        let channel = &self.link.channel;
        if channel.confirms.span() >= channel.max_unconfirmed.load(Ordering::Relaxed) {
            return None;
        }
        let publish = publish.prepared();
        let fingerprint = self.fingerprint(publish);
        let put = self.put_now(publish, || channel.confirms.publish(fingerprint))?;
        Some(put.map(|entry| Confirmation::new(entry, &self.link)))
    }

    /// What the message is recognised by, if it may come back.
    #[inline]
    fn fingerprint(&self, publish: Prepared<'_, Properties<'_>>) -> Option<Fingerprint> {
        let Prepared { exchange, routing_key, mandatory, properties, body } = publish;
        let fingerprints = &self.link.channel.confirms.fingerprints;
        mandatory.then(|| fingerprints.of(exchange, routing_key, properties, body))
    }

    async fn publish_later(
        &self,
        publish: &Publish<'_>,
        patience: Duration,
    ) -> Result<Confirmation, Error> {
        let channel = &self.link.channel;
        let began = Instant::now();
        timeout(patience, channel.until_window()).await.map_err(|_| {
            let max_unconfirmed = channel.max_unconfirmed.load(Ordering::Relaxed);
            let what = format!("confirming the oldest of {max_unconfirmed} publishes");
            Error::timeout(what, patience)
        })?;
        let left = patience.saturating_sub(began.elapsed());
        let fingerprint = self.fingerprint(publish.prepared());
        let register = || channel.confirms.publish(fingerprint);
        let entry = self.put_later(publish, left, register).await?;
        Ok(Confirmation::new(entry, &self.link))
    }
}

impl Channel<Tracked> {
    /// Publishes, if it need not wait for room. The caller registers the message before it unlocks what its sink locks.
    #[inline]
    #[doc(hidden)]
    pub fn publish_now(
        &self,
        publish: Prepared<'_, impl EncodeProperties>,
    ) -> Option<Result<(), Error>> {
        self.put_now(publish, || ())
    }

    /// Waits until there is room in the outbound buffer and the broker takes publishes.
    #[doc(hidden)]
    pub async fn until_room(&self, deadline: Instant, patience: Duration) -> Result<(), Error> {
        let sender = &self.link.connection.core.sender;
        tokio::select! {
            room = sender.until_room(deadline, patience, &self.link.channel.paused) => room,
            error = self.ended() => Err(error),
        }
    }
}
