//! Publishing: a message goes into the outbound buffer in one piece.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use leveret_wire::method::basic;
use leveret_wire::{EncodeProperties, FrameMax, Outbound, Properties};
use tokio::time::{Instant, timeout};

use super::channel::{Channel, Confirm, Plain, Tx};
use super::confirm::{Confirmation, Look, Visible};
use super::error::Error;
use super::lock;

/// A message and where it goes.
///
/// ```
/// use leveret::amqp::Publish;
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
pub(crate) struct Prepared<'a, P> {
    pub(crate) exchange: &'a str,
    pub(crate) routing_key: &'a str,
    pub(crate) mandatory: bool,
    pub(crate) properties: &'a P,
    pub(crate) body: &'a Bytes,
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
    pub(crate) fn check(&self, publish: &Publish<'_>) -> Result<(), Error> {
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
    pub(crate) fn publish_now(&self, publish: &Publish<'_>) -> Option<Result<Confirmation, Error>> {
        let publish = publish.prepared();
        let published = self.publish_prepared(publish, self.look(publish).as_ref())?;
        Some(published.map(|confirmation| confirmation.holding(&self.link)))
    }

    /// How a message looks, if it may come back.
    #[inline]
    pub(crate) fn look(&self, publish: Prepared<'_, impl Visible>) -> Option<Look> {
        publish.mandatory.then(|| self.link.channel.confirms.looks.of(publish))
    }

    /// The same with properties in any form, for a message that looks like this. The confirmation does not hold the channel
    /// open.
    #[inline]
    pub(crate) fn publish_prepared(
        &self,
        publish: Prepared<'_, impl EncodeProperties>,
        look: Option<&Look>,
    ) -> Option<Result<Confirmation, Error>> {
        let confirms = &self.link.channel.confirms;
        let max_unconfirmed = self.link.channel.max_unconfirmed.load(Ordering::Relaxed);
        if lock(&confirms.ledger).span() >= max_unconfirmed {
            return None;
        }
        let put = self.put_now(publish, || lock(&confirms.ledger).publish(look))?;
        Some(put.map(Confirmation::new))
    }

    async fn publish_later(
        &self,
        publish: &Publish<'_>,
        patience: Duration,
    ) -> Result<Confirmation, Error> {
        let confirms = &self.link.channel.confirms;
        let max_unconfirmed = self.link.channel.max_unconfirmed.load(Ordering::Relaxed);
        let began = Instant::now();
        let room = confirms.until(|ledger| ledger.span() < max_unconfirmed);
        timeout(patience, room).await.map_err(|_| {
            let what = format!("confirming the oldest of {max_unconfirmed} publishes");
            Error::timeout(what, patience)
        })?;
        let left = patience.saturating_sub(began.elapsed());
        let look = self.look(publish.prepared());
        let register = || lock(&confirms.ledger).publish(look.as_ref());
        let entry = self.put_later(publish, left, register).await?;
        Ok(Confirmation::new(entry).holding(&self.link))
    }
}
