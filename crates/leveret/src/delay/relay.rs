//! The last step to an exchange, taken by a client: it hears of it if there is no queue for a message, and parks that.
//!
//! ```text
//!  queue leveret.delay.relay --> Relay: confirmed, mandatory publish --> the target exchange
//!           |                      +--> returned: published to leveret.delay.unroutable
//!           |                      +--> anything else goes wrong: rejected, and the broker takes the step
//!           +--> no relay there for a while: the broker takes the step
//! ```
//!
//! Whoever has delayed a message for an exchange relays those of everybody until its client is closed. What a relay has
//! published and could not ack comes a second time, and never is it lost.

use std::time::Duration;

use tokio::time::sleep;

use crate::client::{Client, ClientEvent};
use crate::consumer::Deliveries;
use crate::delivery::Delivery;
use crate::error::{Error, ErrorKind};
use crate::mover::{Mover, Moving, Parcel};
use crate::retry::ParkReason;
use crate::retry::stamp;

use super::ladder::{self, header};

/// How many messages are under way at a time.
const WINDOW: u16 = 200;

/// How long a message that cannot be parked stays with its relay before that is tried again.
const PAUSE: Duration = Duration::from_secs(1);

/// Relays until the client is closed. It does not keep the client open.
pub(super) async fn run(client: Client) {
    let mut closing = client.core().closing();
    let relay = Relay { mover: Mover::new(&client, "sending on a delayed message"), client };
    tokio::select! {
        () = relay.run() => {}
        _ = closing.wait_for(|closing| *closing) => {}
    }
}

struct Relay {
    client: Client,
    mover: Mover,
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
            tracing::warn!("delayed messages for exchanges are left to the broker: {ended}");
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
    async fn send(&self, batch: Vec<Delivery>) -> Vec<(Delivery, Result<Moving, Error>)> {
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
        if outcome.as_ref().is_err_and(may_be_anothers) {
            outcome = self.mover.deliver(addressed(&delivery)).await;
        }
        let settled = match outcome {
            Ok(()) => delivery.ack(),
            Err(error) if error.kind() == ErrorKind::Unroutable => {
                return self.park(delivery, &error).await;
            }
            Err(error) if error.kind() == ErrorKind::Closed => return,
            Err(error) => {
                tracing::warn!("a delayed message is left to the broker: {error}");
                delivery.discard()
            }
        };
        if let Err(error) = settled {
            tracing::debug!("{error}");
        }
    }

    /// Parks a message, however often that has to be tried: the broker would drop it.
    async fn park(&self, delivery: Delivery, error: &Error) {
        let text = error.to_string();
        while let Err(error) = self.mover.deliver(parked(&delivery, &text)).await {
            if error.kind() == ErrorKind::Closed || !delivery.is_held() {
                return;
            }
            tracing::error!("a delayed message cannot be parked yet: {error}");
            sleep(PAUSE).await;
        }
        if let Err(error) = delivery.ack() {
            tracing::debug!("{error}");
        }
        let (queue, reason) = (ladder::RELAY.to_owned(), ParkReason::Unroutable);
        self.client.core().announce(ClientEvent::Parked { queue, reason, error: text });
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

/// To its target, as it came.
fn addressed(delivery: &Delivery) -> Parcel {
    Parcel::of(delivery, target(delivery))
}

fn target(delivery: &Delivery) -> String {
    let target = delivery.header(header::RELAY);
    target.and_then(|target| target.as_str().map(str::to_owned)).unwrap_or_default()
}

/// To where it is parked, with the reason.
fn parked(delivery: &Delivery, error: &str) -> Parcel {
    let mut parcel = Parcel::of(delivery, ladder::UNROUTABLE);
    parcel.set(stamp::header::EXCHANGE, target(delivery));
    parcel.set(stamp::header::ROUTING_KEY, parcel.routing_key.clone());
    parcel.set(stamp::header::REASON, ParkReason::Unroutable.as_str());
    parcel.set(stamp::header::ERROR, stamp::cut(error, stamp::MAX_ERROR));
    parcel
}
