//! The last step to an exchange, taken by a client: it hears of it if there is no queue for a message, and parks that.
//!
//! ```text
//!  queue leveret.delay.relay --> Relay: confirmed, mandatory publish --> the target exchange
//!           ^                      +--> returned, or no such exchange: published to leveret.delay.unroutable
//!           |                      +--> anything else goes wrong: to wait once more
//!           +-------- the ladder <-----------------------------------------+
//! ```
//!
//! Whoever has delayed a message for an exchange relays those of everybody until its client is closed. What a relay has
//! published and could not ack comes a second time, and never is it lost.

use std::time::Duration;

use tokio::time::sleep;

use crate::connection::{Client, ClientEvent, ParkReason};
use crate::consumer::Deliveries;
use crate::delivery::Delivery;
use crate::error::{Error, ErrorKind};
use crate::forwarder::{ForwardedMessage, Forwarder, PendingForward, kept};
use crate::retry::stamp;

use super::forget_steps;
use super::ladder::{self, header};
use super::ready::Ready;

/// How many messages are under way at a time.
const WINDOW: u16 = 200;

/// How long a message that can be put nowhere stays with its relay before that is tried again.
const PAUSE: Duration = Duration::from_secs(1);

/// The level at which a message waits that could not be sent on, a second at first. Each time it waits twice as long: another
/// relay may be allowed to publish it, or the target may have room again.
const FIRST_WAIT: u8 = 3;

/// How often it does, a quarter of an hour in all, before it is parked.
const MAX_TRIES: u8 = 10;

/// Relays until the client is closed. It does not keep the client open.
pub(super) async fn run(client: Client) {
    let mut closing = client.core().closing();
    let relay = Relay { mover: Forwarder::new(&client, "sending on a delayed message"), client };
    tokio::select! {
        () = relay.run() => {}
        _ = closing.wait_for(|closing| *closing) => {}
    }
}

struct Relay {
    client: Client,
    mover: Forwarder,
}

impl Relay {
    async fn run(&self) {
        for attempt in 0.. {
            let consumer = self.client.consumer(ladder::RELAY).prefetch(WINDOW);
            let ended = match consumer.stream().await {
                Ok(deliveries) => self.relay(deliveries).await,
                Err(error) => error,
            };
            if ended.kind() == ErrorKind::Closed {
                return;
            }
            tracing::warn!("delayed messages for exchanges wait for another client: {ended}");
            sleep(self.client.core().options.backoff.pause(attempt)).await;
        }
    }

    /// Sends on what comes, in its order, and gives the reason why nothing comes any more.
    async fn relay(&self, mut deliveries: Deliveries) -> Error {
        loop {
            let batch = match take(&mut deliveries).await {
                Ok(batch) => batch,
                Err(error) => return error,
            };
            for (delivery, sent) in self.send(batch).await {
                let outcome = match sent {
                    Ok(moving) => moving.confirmed().await,
                    Err(error) => Err(error),
                };
                self.settle(delivery, outcome).await;
            }
        }
    }

    /// Publishes them. If the broker takes no publishes, not each of them waits for it to do so.
    async fn send(&self, batch: Vec<Delivery>) -> Vec<(Delivery, Result<PendingForward, Error>)> {
        let mut all = Vec::with_capacity(batch.len());
        let mut late = None;
        for delivery in batch {
            let sent = match &late {
                None => self.mover.send(addressed(&delivery)).await,
                Some(error) => Err(Error::clone(error)),
            };
            if let Err(error) = &sent
                && error.kind() == ErrorKind::TimedOut
            {
                late = Some(error.clone());
            }
            all.push((delivery, sent));
        }
        all
    }

    async fn settle(&self, delivery: Delivery, mut outcome: Result<(), Error>) {
        if outcome.as_ref().is_err_and(may_be_anothers) && delivery.is_held() {
            outcome = self.mover.deliver(addressed(&delivery)).await;
        }
        match outcome {
            Ok(()) => report(delivery.ack()),
            Err(error) => match error.kind() {
                // It goes back to its queue.
                ErrorKind::Closed => {}
                ErrorKind::Unroutable | ErrorKind::Missing | ErrorKind::Invalid => {
                    self.park(delivery, &error).await;
                }
                _ if tries(&delivery) >= MAX_TRIES => self.park(delivery, &error).await,
                _ => self.put_off(delivery, &error).await,
            },
        }
    }

    /// Has a message wait once more.
    async fn put_off(&self, delivery: Delivery, error: &Error) {
        tracing::warn!("a delayed message waits once more: {error}");
        let level = FIRST_WAIT + tries(&delivery);
        if self.put(&delivery, Place::Level(level)).await {
            report(delivery.ack());
        }
    }

    async fn park(&self, delivery: Delivery, error: &Error) {
        let error = error.to_string();
        if self.put(&delivery, Place::Parked(&error)).await {
            let routing_key = delivery.routing_key().to_str_lossy().into_owned();
            let message_id =
                delivery.properties().message_id.map(|id| id.to_str_lossy().into_owned());
            report(delivery.ack());
            let (queue, reason) = (ladder::RELAY.to_owned(), ParkReason::Unroutable);
            self.client.core().announce(ClientEvent::Parked {
                queue,
                routing_key,
                message_id,
                reason,
                error,
            });
        }
    }

    /// Tries to put a message there until it is done, or the message is no longer here: it then comes again, to whoever
    /// relays.
    async fn put(&self, delivery: &Delivery, place: Place<'_>) -> bool {
        while let Err(error) = self.try_to_put(delivery, place).await {
            if error.kind() == ErrorKind::Closed || !delivery.is_held() {
                return false;
            }
            tracing::error!("a delayed message can neither be sent on nor put aside yet: {error}");
            if matches!(error.kind(), ErrorKind::Unroutable | ErrorKind::Missing) {
                // Somebody has deleted what it should be put into.
                Ready::of(self.client.core()).was_deleted(ladder::ENTRY);
            }
            sleep(PAUSE).await;
        }
        true
    }

    async fn try_to_put(&self, delivery: &Delivery, place: Place<'_>) -> Result<(), Error> {
        let level = match place {
            Place::Level(level) => level,
            Place::Parked(_) => 0,
        };
        Ready::of(self.client.core()).ensure(&self.client, level, None).await?;
        match place {
            Place::Level(level) => self.mover.deliver(once_more(delivery, level)).await,
            Place::Parked(reason) => match self.mover.deliver(parked(delivery, reason)).await {
                // There is no room for a word about it: it is parked as it came.
                Err(error) if error.kind() == ErrorKind::Invalid => {
                    self.mover.deliver(ForwardedMessage::of(delivery, ladder::UNROUTABLE)).await
                }
                other => other,
            },
        }
    }
}

/// Where a message is put that could not be sent on.
#[derive(Clone, Copy)]
enum Place<'a> {
    /// Into the ladder.
    Level(u8),
    /// For good, and why.
    Parked(&'a str),
}

/// What can no longer be settled comes again.
fn report(settled: Result<(), Error>) {
    if let Err(error) = settled {
        tracing::debug!("{error}");
    }
}

/// The next messages: as many as are there. An error once none will come.
async fn take(deliveries: &mut Deliveries) -> Result<Vec<Delivery>, Error> {
    let mut batch = Vec::new();
    let mut next = deliveries.next().await;
    loop {
        match next {
            Some(Ok(delivery)) => batch.push(delivery),
            Some(Err(error)) => return Err(error),
            None => return Err(Error::closed("the relay of delayed messages")),
        }
        if batch.len() >= usize::from(WINDOW) {
            return Ok(batch);
        }
        next = tokio::select! {
            biased;
            next = deliveries.next() => next,
            () = std::future::ready(()) => return Ok(batch),
        };
    }
}

/// Whether the channel was closed, which may have been because of another message.
fn may_be_anothers(error: &Error) -> bool {
    use ErrorKind::{Broker, Lost, Missing, Refused};
    matches!(error.kind(), Broker | Lost | Missing | Refused)
}

/// To its target, as it was published: nobody but the broker is told of blind copies, and consumers that look at where a message
/// died first, as Orb's redelivery handler does, do not take a queue of the ladder for its own.
fn addressed(delivery: &Delivery) -> ForwardedMessage {
    let mut parcel = ForwardedMessage::of(delivery, target(delivery));
    forget_steps(&mut parcel);
    parcel.remove_deaths();
    if let Some(copies) = parcel.remove_header(kept::BLIND_COPIES) {
        parcel.set_header("BCC", copies);
    }
    parcel
}

fn target(delivery: &Delivery) -> String {
    let target = delivery.header(header::RELAY);
    target.and_then(|target| target.as_str().map(str::to_owned)).unwrap_or_default()
}

fn tries(delivery: &Delivery) -> u8 {
    let tries = delivery.header(header::TRIES).and_then(|tries| stamp::count(&tries));
    tries.map_or(0, |tries| u8::try_from(tries).unwrap_or(MAX_TRIES))
}

/// To the ladder, to wait at this level and no other.
fn once_more(delivery: &Delivery, level: u8) -> ForwardedMessage {
    let mut parcel = ForwardedMessage::of(delivery, ladder::ENTRY);
    parcel.remove_deaths();
    parcel.set_header(header::TRIES, (tries(delivery) + 1).to_string());
    parcel.set_header(header::LEVEL, level.to_string());
    for below in 0..level {
        parcel.set_header(&header::bit(below), "false");
    }
    parcel
}

/// To where it is parked, with the reason.
fn parked(delivery: &Delivery, error: &str) -> ForwardedMessage {
    let mut parcel = ForwardedMessage::of(delivery, ladder::UNROUTABLE);
    parcel.set_header(stamp::header::EXCHANGE, target(delivery));
    parcel.set_header(stamp::header::ROUTING_KEY, parcel.routing_key.clone());
    parcel.set_header(stamp::header::REASON, ParkReason::Unroutable.as_str());
    parcel.set_header(stamp::header::ERROR, stamp::cut(error, stamp::MAX_ERROR));
    parcel
}
