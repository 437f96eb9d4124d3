//! Publishing without confirms: fast, and promising no more than that a message was written.

use std::fmt;
use std::sync::Arc;

use tokio::time::Instant;

use super::Settings;
use super::span::PublishSpan;
use crate::amqp::{Channel, Properties, Publish, deadline_in};
use crate::connection::Client;
use crate::connection::ReliableChannel;
use crate::connection::managed::LiveConnection;
use crate::error::Error;
use crate::message::{IntoMessage, Message};
use crate::telemetry::Published;

/// Publishes to one exchange without confirms.
///
/// `Ok` means that the message is on its way to the broker, and no more: it is gone if the connection is lost on the
/// way, if it can be routed nowhere, or if the exchange does not exist. For what must arrive there is
/// [`Publisher`](super::Publisher).
#[derive(Clone)]
pub struct UnconfirmedPublisher {
    shared: Arc<Shared>,
}

struct Shared {
    settings: Settings,
    counts: Published,
    channel: ReliableChannel<Channel>,
    _client: Client,
}

impl UnconfirmedPublisher {
    pub(super) async fn new(client: Client, settings: Settings) -> Result<Self, Error> {
        let shared = Shared {
            counts: Published::new(&settings.exchange),
            channel: ReliableChannel::new(client.core(), settings.what(), settings.timeout),
            settings,
            _client: client,
        };
        shared.open(deadline_in(shared.settings.timeout)).await?;
        Ok(UnconfirmedPublisher { shared: Arc::new(shared) })
    }

    /// The exchange it publishes to.
    pub fn exchange(&self) -> &str {
        &self.shared.settings.exchange
    }

    /// Publishes, and waits for nothing but room: in the outbound buffer, or for the broker to come back.
    pub async fn publish(&self, routing_key: &str, message: impl IntoMessage) -> Result<(), Error> {
        let span = PublishSpan::begin(self.exchange(), routing_key);
        let published = self.publish_within(&span, routing_key, message).await;
        span.record(&published);
        published
    }

    async fn publish_within(
        &self,
        span: &PublishSpan,
        routing_key: &str,
        message: impl IntoMessage,
    ) -> Result<(), Error> {
        let message = message.into_message()?;
        message.check()?;
        let Message { body, extra } = message;
        let settings = &self.shared.settings;
        let mut publish = Publish {
            exchange: &settings.exchange,
            routing_key,
            mandatory: false,
            properties: extra.map_or_else(Properties::default, |extra| extra.properties),
            body,
        };
        settings.complete(&mut publish.properties);
        span.put_into(&mut publish.properties);
        span.describe(&publish.properties);
        let mut deadline = None;
        loop {
            let channel = match self.shared.channel.open_now() {
                Some(channel) => channel,
                None => {
                    let until = || deadline_in(settings.timeout);
                    self.shared.open(*deadline.get_or_insert_with(until)).await?
                }
            };
            match channel.publish(&publish).await {
                Ok(()) => {
                    self.shared.counts.published();
                    return Ok(());
                }
                Err(_) if channel.is_gone() => {}
                Err(error) => return Err(self.shared.channel.failed(error)),
            }
        }
    }
}

impl Shared {
    async fn open(&self, deadline: Instant) -> Result<Arc<Channel>, Error> {
        let open = |up: LiveConnection| async move { up.connection.open_channel().await };
        self.channel.get(deadline, open).await
    }
}

impl fmt::Debug for UnconfirmedPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnconfirmedPublisher")
            .field("exchange", &self.exchange())
            .finish_non_exhaustive()
    }
}
