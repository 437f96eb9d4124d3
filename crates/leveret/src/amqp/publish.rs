//! Publishing: a message goes into the outbound buffer in one piece.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use leveret_wire::Properties;
use leveret_wire::method::basic;
use tokio::time::{Instant, timeout};

use super::channel::{Channel, Confirm, Plain, Tx};
use super::confirm::Confirmation;
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

impl<M> Channel<M> {
    fn patience(&self) -> Duration {
        self.link.connection.core.limits.publish_timeout
    }

    /// Encodes a message, and runs `register` with the buffer still locked, so that both happen in the same order.
    #[inline]
    async fn put<T>(
        &self,
        publish: &Publish<'_>,
        patience: Duration,
        register: impl FnOnce() -> T,
    ) -> Result<T, Error> {
        let method = basic::Publish {
            exchange: publish.exchange.try_into()?,
            routing_key: publish.routing_key.try_into()?,
            mandatory: publish.mandatory,
            immediate: false,
        };
        let (link, core) = (&self.link, &self.link.connection.core);
        let encode = |outbound: &mut leveret_wire::Outbound, max| {
            link.channel.check_open()?;
            outbound.content(link.channel.id, &method, &publish.properties, &publish.body, max)?;
            Ok(register())
        };
        core.sender.publish(patience, &link.channel.paused, encode).await
    }
}

impl Channel<Plain> {
    /// Publishes without asking for an answer: `Ok` says that the message is in the outbound buffer.
    ///
    /// It waits only if that buffer is full or the broker blocks the connection. Dropped while waiting, it has sent
    /// nothing.
    #[inline]
    pub async fn publish(&self, publish: &Publish<'_>) -> Result<(), Error> {
        self.put(publish, self.patience(), || ()).await
    }
}

impl Channel<Tx> {
    /// Publishes with the next commit.
    #[inline]
    pub async fn publish(&self, publish: &Publish<'_>) -> Result<(), Error> {
        self.put(publish, self.patience(), || ()).await
    }
}

impl Channel<Confirm> {
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
        mut patience: Duration,
    ) -> Result<Confirmation, Error> {
        let confirms = &self.link.channel.confirms;
        let max_unconfirmed = self.link.channel.max_unconfirmed.load(Ordering::Relaxed);
        if lock(&confirms.ledger).span() >= max_unconfirmed {
            let room = confirms.until(|ledger| ledger.span() < max_unconfirmed);
            let began = Instant::now();
            timeout(patience, room).await.map_err(|_| {
                let what = format!("confirming the oldest of {max_unconfirmed} publishes");
                Error::timeout(what, patience)
            })?;
            patience = patience.saturating_sub(began.elapsed());
        }
        let look = publish.mandatory.then(|| confirms.looks.of(publish));
        let register = || lock(&confirms.ledger).publish(look);
        let entry = self.put(publish, patience, register).await?;
        Ok(Confirmation::new(entry, &self.link))
    }
}
