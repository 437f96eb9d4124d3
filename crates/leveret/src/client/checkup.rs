//! Asking the broker whether it agrees with what this side believes.
//!
//! Plain AMQP has no question "do you still have this consumer?". What it has is the number of consumers of a queue, those
//! of all clients, in the answer to a passive declare; and that number is not the same thing everywhere: RabbitMQ counts
//! none on a stream, and on a quorum queue with a single active consumer none but that one. So its word is taken only
//! against what it has said before: where it once counted a client's consumers and now counts fewer, some of them are gone,
//! whoever else consumes. It is asked for the first time as soon as a consumer has begun.
//!
//! Where other programs consume the same queue, a lower number says only that a consumer has left, theirs or ours. Then a
//! consumer is gone if the queue has messages for it, all its deliveries are settled, and it gets none of them.
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
use crate::amqp::{self, Channel};

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
    /// A consumer counts as forgotten if the broker says twice, two seconds apart, that
    /// - its queue has fewer consumers than this client alone has there, after it had once counted all of them; or
    /// - its queue has fewer consumers than before, those of other programs included, and has messages, while this one has
    ///   settled all its deliveries and gets no other.
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
    let counting = async {
        loop {
            core.health.began.notified().await;
            count_new(&core).await;
        }
    };
    let mut closing = core.closing();
    tokio::select! {
        () = checking => {}
        () = counting => {}
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
    let before: Vec<_> = suspects.iter().map(|seat| seat.pulse.delivered()).collect();
    sleep(AGAIN).await;
    let still_missing = missing(core).await;
    for (seat, before) in suspects.into_iter().zip(before) {
        let is_missing = still_missing.iter().any(|other| Arc::ptr_eq(&seat, other));
        if is_missing && seat.pulse.delivered() == before {
            seat.pulse.stop(amqp::Error::unknown_consumer());
        }
    }
}

/// Asks whether the broker counts the consumers that have begun: only then it can be noticed that it no longer does. A refusal
/// costs a channel, so it is not that of a consumer, which would begin again, and be asked about again, without end.
async fn count_new(core: &Core) {
    for (queue, seats) in core.health.seats() {
        // The answer is about all of them.
        let is_new = |seat: &&Arc<Seat>| !seat.was_asked_about.swap(true, Ordering::Relaxed);
        let new: Vec<_> = seats.iter().filter(is_new).collect();
        let Some(connection) = new.first().and_then(|new| new.pulse.connection()) else { continue };
        let Ok(channel) = connection.open_channel().await else { continue };
        if let Some(found) = ask(&channel, &core.remembered.name_of(&queue)).await {
            note(&seats, found);
        }
    }
}

/// The consumers that the broker may have forgotten.
async fn missing(core: &Arc<Core>) -> Vec<Arc<Seat>> {
    let mut asking = JoinSet::new();
    for (queue, seats) in core.health.seats() {
        let name = core.remembered.name_of(&queue);
        asking.spawn(async move { missing_of(&name, seats).await });
    }
    asking.join_all().await.into_iter().flatten().collect()
}

/// The same, of one queue.
async fn missing_of(queue: &str, mut seats: Vec<Arc<Seat>>) -> Vec<Arc<Seat>> {
    let mut asking = JoinSet::new();
    for channel in seats.iter().filter_map(|seat| seat.pulse.channel()) {
        let queue = queue.to_owned();
        asking.spawn(async move { ask(&channel, &queue).await });
    }
    let answers = asking.join_all().await.into_iter().flatten();
    let Some(found) = answers.max_by_key(|found| found.consumers) else { return Vec::new() };
    seats.retain(|seat| seat.pulse.is_alive());
    note(&seats, found)
}

/// What a queue has, as the broker says.
#[derive(Clone, Copy)]
struct Found {
    consumers: usize,
    messages: u32,
}

/// Compares what the broker says of a queue with what it has said before of these consumers. Gives those that may be gone.
fn note(seats: &[Arc<Seat>], found: Found) -> Vec<Arc<Seat>> {
    let may_be_gone = |seat: &Arc<Seat>| seat.may_be_gone(found.consumers);
    let doubtful: Vec<_> = seats.iter().filter(|seat| may_be_gone(seat)).cloned().collect();
    if seats.len() <= found.consumers {
        seats.iter().for_each(|seat| seat.was_counted.store(true, Ordering::Relaxed));
        let is_passed_over = |seat: &Arc<Seat>| found.messages > 0 && seat.pulse.is_idle();
        return doubtful.into_iter().filter(is_passed_over).collect();
    }
    let counted = |seat: &&Arc<Seat>| seat.was_counted.load(Ordering::Relaxed);
    let counted: Vec<_> = seats.iter().filter(counted).cloned().collect();
    if counted.len() > found.consumers { counted } else { Vec::new() }
}

/// Asks how many consumers and messages a queue has.
async fn ask(channel: &Channel, queue: &str) -> Option<Found> {
    let info = channel.inspect_queue(queue).await.ok()?;
    Some(Found { consumers: usize::try_from(info.consumers).ok()?, messages: info.messages })
}
