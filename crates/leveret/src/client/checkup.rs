//! Asking the broker whether it agrees with what this side believes.
//!
//! Plain AMQP has no question "do you still have this consumer?". What it has is the number of consumers of a queue, those
//! of all clients, in the answer to a passive declare; and that number is not the same thing everywhere: RabbitMQ counts
//! none on a stream, and on a quorum queue with a single active consumer none but that one. So its word is taken only
//! against what it has said before: where it once counted a client's consumers and now counts fewer, some of them are gone,
//! whoever else consumes.
//!
//! Each consumer is asked about on its own channel: if the broker has lost that, or the queue, the question fails, and the
//! consumer with it, as it should.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;

use super::Client;
use super::core::Core;
use super::health::Health;
use super::registry::Seat;
use crate::amqp;

/// One answer may be wrong: a quorum queue that is about to get another leader counts none. So it is asked again after
/// this.
const AGAIN: Duration = Duration::from_secs(2);

/// It is asked no more often than this.
const PAUSE: Duration = Duration::from_millis(100);

impl Client {
    /// How the client is, after asking the broker whether it agrees: a consumer that it has silently forgotten is found,
    /// reported as not live, and begun anew by its reader; channels that pools have lost are opened again. It takes a round
    /// trip for each consumer. The client does so by itself, too, see [`check_every`](super::ClientBuilder::check_every).
    ///
    /// A consumer counts as forgotten if the broker counts fewer consumers on its queue than this client has there, twice,
    /// after it had once counted all of them. So one that was forgotten beside those of other clients may not be found.
    pub async fn check_health(&self) -> Health {
        check(self.core()).await;
        self.health()
    }
}

/// Checks again and again, until the client is closed.
pub(super) async fn keep_checking(core: Arc<Core>) {
    let checking = async {
        loop {
            sleep(core.options.check_every.max(PAUSE)).await;
            check(&core).await;
        }
    };
    let mut closing = core.closing();
    tokio::select! {
        () = checking => {}
        _ = closing.wait_for(|closing| *closing) => {}
    }
}

async fn check(core: &Arc<Core>) {
    for pool in core.health.pools.all() {
        pool.refill().await;
    }
    let suspects = missing(core).await;
    if suspects.is_empty() {
        return;
    }
    sleep(AGAIN).await;
    let still_missing = missing(core).await;
    for seat in suspects {
        if still_missing.iter().any(|other| Arc::ptr_eq(&seat, other)) {
            seat.pulse.stop(amqp::Error::unknown_consumer());
        }
    }
}

/// The consumers of which the broker has counted more before than it does now.
async fn missing(core: &Arc<Core>) -> Vec<Arc<Seat>> {
    let mut asking = JoinSet::new();
    for (queue, seats) in core.health.seats() {
        let name = core.remembered.name_of(&queue);
        asking.spawn(async move { missing_of(&name, seats).await });
    }
    asking.join_all().await.into_iter().flatten().collect()
}

/// The same, of one queue.
async fn missing_of(queue: &str, seats: Vec<Arc<Seat>>) -> Vec<Arc<Seat>> {
    let mut counting = JoinSet::new();
    for seat in &seats {
        counting.spawn(count_by(Arc::clone(seat), queue.to_owned()));
    }
    let Some(counted) = counting.join_all().await.into_iter().flatten().max() else {
        return Vec::new();
    };
    let is_alive = |seat: &Arc<Seat>| seat.pulse.is_alive();
    let mut seats: Vec<_> = seats.into_iter().filter(is_alive).collect();
    if seats.len() <= counted {
        seats.iter().for_each(|seat| seat.was_counted.store(true, Ordering::Relaxed));
        return Vec::new();
    }
    seats.retain(|seat| seat.was_counted.load(Ordering::Relaxed));
    if seats.len() > counted { seats } else { Vec::new() }
}

/// How many consumers a queue has, if the channel of one of them can say.
async fn count_by(seat: Arc<Seat>, queue: String) -> Option<usize> {
    let channel = seat.pulse.channel()?;
    let info = channel.inspect_queue(&queue).await.ok()?;
    usize::try_from(info.consumers).ok()
}
