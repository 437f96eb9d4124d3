//! Where a stream gets its deliveries from: a consumer on the broker, begun anew whenever it is lost.

use std::sync::Arc;

use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::Settings;
use super::required_topology::Temporary;
use crate::amqp::{self, Channel, ConsumeOptions, Consumer, ReplyCode, deadline_in};
use crate::connection::Client;
use crate::connection::core::{Core, Subscription};
use crate::connection::event::ClientEvent;
use crate::connection::registry::Entry;
use crate::error::{Error, ErrorKind};
use crate::telemetry::Delivered;

#[derive(Debug)]
pub(super) struct Source {
    pub(super) queue: Arc<str>,
    core: Arc<Core>,
    settings: Settings,
    options: ConsumeOptions,
    place: Subscription,
    health: Entry,
    _temporary: Option<Arc<Temporary>>,
    pub(super) counts: Delivered,
}

impl Source {
    pub(super) fn new(
        client: &Client,
        settings: Settings,
        temporary: Option<Arc<Temporary>>,
    ) -> Result<Arc<Source>, Error> {
        let core = client.core();
        core.check_open()?;
        let options = settings.options()?;
        Ok(Arc::new(Source {
            queue: settings.queue.as_str().into(),
            place: core.subscribe(core.remembered.is_exclusive(&settings.queue)),
            health: Entry::new(core, &settings.queue, settings.seat_kind()),
            counts: Delivered::new(&settings.queue),
            core: Arc::clone(core),
            settings,
            options,
            _temporary: temporary,
        }))
    }

    /// Begins for the first time. What the broker refuses is an error at once.
    pub(super) async fn first(&self) -> Result<Consumer, Error> {
        let patience = self.core.options.timeout;
        let deadline = deadline_in(patience);
        let late = |_| Error::timed_out(self.what(), patience);
        loop {
            match timeout_at(deadline, self.begin()).await.map_err(late)?? {
                Ok(consumer) => {
                    self.began(&consumer);
                    return Ok(consumer);
                }
                Err(error) if error.is_connection_error() => {}
                Err(error) => return Err(Error::from_amqp(self.what(), error)),
            }
        }
    }

    /// Begins once more, on the channel of the consumer that there is. No error means that it took too long.
    pub(super) async fn beside(
        &self,
        consumer: &Consumer,
    ) -> Result<Consumer, Option<amqp::Error>> {
        let channel: Channel = consumer.channel();
        let name = self.core.remembered.name_of(&self.settings.queue);
        let begun = channel.consume(&name, self.options.clone());
        timeout(self.core.options.timeout, begun).await.map_err(|_| None)?.map_err(Some)
    }

    /// Begins again after a loss, when the broker is back. What it refuses is tried again for a while.
    pub(super) async fn again(self: Arc<Self>, lost: amqp::Error) -> Result<Consumer, Error> {
        let mut may_be_unbound = !lost.is_connection_error();
        self.lost(lost);
        let mut refused_since = None;
        for attempt in 0.. {
            let error = match self.begin().await? {
                Ok(consumer) => {
                    if may_be_unbound {
                        self.bind_again().await?;
                    }
                    let queue = self.settings.queue.clone();
                    self.core.announce(ClientEvent::ConsumerResumed { queue });
                    self.began(&consumer);
                    return Ok(consumer);
                }
                Err(error) if error.is_connection_error() => {
                    refused_since = None;
                    continue;
                }
                Err(error) => error,
            };
            may_be_unbound = true;
            let since = *refused_since.get_or_insert_with(Instant::now);
            let restored = self.restore_if_missing(&error).await?;
            let error = Error::from_amqp(self.what(), error);
            self.health.lost(error.clone());
            if since.elapsed() >= self.settings.missing_for {
                return Err(error);
            }
            if !(restored && attempt == 0) {
                sleep(self.core.options.backoff.pause(attempt)).await;
            }
        }
        Err(Error::closed("the consumer"))
    }

    /// One attempt, as soon as there is a connection. The outer error is the end.
    async fn begin(&self) -> Result<Result<Consumer, amqp::Error>, Error> {
        let up = self.place.line.up().await?;
        let name = self.core.remembered.name_of(&self.settings.queue);
        let begun = async {
            let channel = up.connection.open_channel().await?;
            if self.settings.transactional {
                return channel.into_tx().await?.consume(&name, self.options.clone()).await;
            }
            channel.consume(&name, self.options.clone()).await
        };
        Ok(begun.await)
    }

    /// A queue that this client has declared, and that somebody has deleted, is declared again.
    async fn restore_if_missing(&self, error: &amqp::Error) -> Result<bool, Error> {
        let is_missing = error.reply_code() == Some(ReplyCode::NOT_FOUND);
        let remembered = &self.core.remembered;
        if !is_missing || !remembered.has_queue(&self.settings.queue) {
            return Ok(false);
        }
        // What is exclusive belongs to the connection that everything is declared on.
        let up = self.core.home().up().await?;
        let failed = remembered.restore_queue(&up.connection, &self.settings.queue).await;
        Ok(failed.is_empty())
    }

    /// Others may have deleted the queue and declared it again, without what this client has bound it to: where failed messages
    /// come back from their waits, and delayed ones. No message is handled before it is bound.
    async fn bind_again(&self) -> Result<(), Error> {
        let (core, queue) = (&self.core, &self.settings.queue);
        if !core.remembered.has_bound(queue) {
            return Ok(());
        }
        let up = core.home().up().await?;
        for (name, error) in core.remembered.restore_bindings(&up.connection, queue).await {
            tracing::warn!(
                "queue {queue:?} was deleted and is there again, but {name} is not: {error}"
            );
        }
        Ok(())
    }

    /// Health looks at this consumer from now on.
    pub(super) fn began(&self, consumer: &Consumer) {
        self.health.live(consumer.pulse());
    }

    fn lost(&self, error: amqp::Error) {
        let error = Error::from_amqp(self.what(), error);
        self.health.lost(error.clone());
        let queue = self.settings.queue.clone();
        self.core.announce(ClientEvent::ConsumerLost { queue, error });
    }

    pub(super) fn ended(&self, error: &Error) {
        if error.kind() != ErrorKind::Closed {
            self.health.lost(error.clone());
        }
    }

    pub(super) fn is_transactional(&self) -> bool {
        self.settings.transactional
    }

    fn what(&self) -> String {
        format!("consuming queue {:?}", self.settings.queue)
    }
}
