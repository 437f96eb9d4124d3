//! Asking the broker whether it agrees with what this side believes.
//!
//! Plain AMQP has no question "do you still have this consumer?". What it has is the number of consumers of a queue, those
//! of all clients, in the answer to a passive declare; and that number is not the same thing everywhere: RabbitMQ counts
//! none on a stream, and on a quorum queue with a single active consumer none but that one. So its word is taken only
//! against what it has said before: where it once counted a client's consumers and now counts fewer, some of them are gone,
//! whoever else consumes. It is asked for the first time as soon as a consumer has begun, and again until it counts it.
//! A new consumer hides one that was forgotten just before: the number is the same. So where the broker once counted one, and
//! the queue has no standbys, those that began some seconds ago have to be counted, too. The count does not tell
//! which of them is gone, so each one that gets no delivery meanwhile is replaced.
//!
//! Where other programs consume the same queue, a lower number says only that a consumer has left, theirs or ours. Then a
//! consumer is gone if the queue has messages for it, all its deliveries are settled, and it gets none of them. That says
//! nothing of a consumer that may have to wait all the same: one with a priority, or a standby of a single active consumer.
//!
//! Each consumer is asked about on its own channel: if the broker has lost that, or the queue, the question fails, and the
//! consumer with it, as it should.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::Client;
use super::core::Core;
use super::health::Health;
use super::registry::Seat;
use crate::amqp::{self, Channel, Connection, ReplyCode};

/// One answer may be wrong: a quorum queue that is about to get another leader counts none. So it is asked again after
/// this.
const AGAIN: Duration = Duration::from_secs(2);

/// It is asked no more often than this.
const PAUSE: Duration = Duration::from_millis(100);

/// The pauses before each time that the broker is asked whether it counts a new consumer, until it does. It may not yet: a
/// quorum queue that is about to get another leader counts none.
const COUNTING: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(200), Duration::from_secs(1), Duration::from_secs(5)];

/// A consumer that the broker counts at all is counted by this time after it has begun.
const COUNTED_WITHIN: Duration = Duration::from_secs(7);

/// How long one of these answers may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// How many queues are asked about new consumers at a time: each question takes a channel.
const COUNTED_AT_ONCE: usize = 8;

impl Client {
    /// How the client is, after asking the broker whether it agrees: a consumer that it has silently forgotten is found,
    /// reported as not live, and begun anew by its reader; channels that pools have lost are opened again. It takes a round
    /// trip for each consumer. The client does so by itself, too, see [`check_every`](crate::ClientBuilder::check_every).
    ///
    /// A consumer counts as forgotten if the broker says twice, two seconds apart, that
    /// - its queue has fewer consumers than this client alone has there, after it had once counted all of them, or one of them
    ///   and the others began 7 s ago or more (not on a queue with a single active consumer; and if the client has not declared
    ///   the queue, only once two of them have had a delivery); or
    /// - its queue has fewer consumers than before, those of other programs included, and has messages, while this one has
    ///   settled all its deliveries and gets no other. This does not hold for a consumer with a priority, for queues with a
    ///   single active consumer, and, if the client has not declared the queue, for a consumer that has had no delivery.
    pub async fn check_health(&self) -> Health {
        check(self.core()).await;
        self.health()
    }
}

/// Checks again and again, until the client is closed.
pub(crate) async fn keep_checking(core: Arc<Core>) {
    let checking = async {
        loop {
            sleep(core.options.check_every.max(PAUSE)).await;
            check(&core).await;
        }
    };
    let counting = async {
        let room = Arc::new(Semaphore::new(COUNTED_AT_ONCE));
        let mut counting = JoinSet::new();
        loop {
            tokio::select! {
                () = core.health.began.notified() => {
                    for (queue, seats) in core.health.seats_to_count() {
                        counting.spawn(count(Arc::clone(&core), queue, seats, Arc::clone(&room)));
                    }
                }
                Some(_) = counting.join_next() => {}
            }
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
    let pools = core.health.pools.all();
    let refilling = join_all(pools.iter().map(|pool| Arc::clone(pool).repair()));
    // Each for itself, so that a queue that does not answer delays no other.
    let mut checking = JoinSet::new();
    for (queue, seats) in core.health.seats() {
        checking.spawn(check_queue(Arc::clone(core), queue, seats));
    }
    tokio::join!(refilling, checking.join_all());
}

/// Stops the consumers of a queue that the broker has forgotten.
async fn check_queue(core: Arc<Core>, queue: String, seats: Vec<Arc<Seat>>) {
    let suspects = missing(&core, &queue, seats).await;
    if suspects.is_empty() {
        return;
    }
    let before: Vec<_> = suspects.iter().map(|seat| seat.pulse.delivered()).collect();
    sleep(AGAIN).await;
    let still_missing = missing(&core, &queue, core.health.seats_of(&queue)).await;
    for (seat, before) in suspects.into_iter().zip(before) {
        let is_missing = still_missing.iter().any(|other| Arc::ptr_eq(&seat, other));
        if is_missing && seat.pulse.delivered() == before {
            seat.pulse.stop(amqp::Error::unknown_consumer());
        }
    }
}

/// Asks until the broker counts the consumers of a queue: only then it can be noticed that it no longer does.
async fn count(core: Arc<Core>, queue: String, mut seats: Vec<Arc<Seat>>, room: Arc<Semaphore>) {
    for pause in COUNTING {
        if !pause.is_zero() {
            sleep(pause).await;
            seats = core.health.seats_of(&queue);
        }
        let Ok(_room) = room.acquire().await else { return };
        let Some(connection) = seats.iter().find_map(|seat| seat.pulse.connection()) else {
            return;
        };
        let name = core.remembered.name_of(&queue);
        let answer = timeout(ANSWER_WITHIN, ask_apart(&connection, &name)).await;
        let Ok(Some(found)) = answer else { continue };
        note(&core, &queue, &seats, found);
        if seats.len() <= found.consumers {
            return;
        }
    }
}

/// Asks on a channel of its own. A refusal costs the channel, and a consumer that loses its own begins again, and is asked
/// about again, without end.
async fn ask_apart(connection: &Connection, queue: &str) -> Option<Found> {
    let channel = connection.open_channel().await.ok()?;
    ask(&channel, queue).await
}

/// Asks on the channel of a consumer, which fails with it.
async fn ask_for(seat: &Seat, queue: &str) -> Option<Found> {
    if seat.is_of_replies() {
        let connection = seat.pulse.connection()?;
        return timeout(ANSWER_WITHIN, ask_apart(&connection, queue)).await.ok()?;
    }
    ask(&seat.pulse.channel()?, queue).await
}

/// The consumers of a queue that the broker may have forgotten.
async fn missing(core: &Core, queue: &str, mut seats: Vec<Arc<Seat>>) -> Vec<Arc<Seat>> {
    let name = core.remembered.name_of(queue);
    let answers = join_all(seats.iter().map(|seat| ask_for(seat, &name))).await;
    let answers = answers.into_iter().flatten();
    let Some(found) = answers.max_by_key(|found| found.consumers) else { return Vec::new() };
    seats.retain(|seat| seat.pulse.is_alive());
    note(core, queue, &seats, found)
}

/// What a queue has, as the broker says.
#[derive(Clone, Copy)]
struct Found {
    consumers: usize,
    messages: u32,
}

/// Compares what the broker says of a queue with what it has said before of these consumers. Gives those that may be gone.
fn note(core: &Core, queue: &str, seats: &[Arc<Seat>], found: Found) -> Vec<Arc<Seat>> {
    let single_active = core.remembered.has_single_active(queue);
    let may_be_gone = |seat: &&Arc<Seat>| seat.may_be_gone(found.consumers);
    let mut doubtful: Vec<_> = seats.iter().filter(may_be_gone).cloned().collect();
    if seats.len() <= found.consumers {
        seats.iter().for_each(|seat| seat.was_counted.store(true, Ordering::Relaxed));
    } else {
        let all_are_counted = counts_all(seats, single_active);
        let is_counted = |seat: &&Arc<Seat>| {
            seat.was_counted.load(Ordering::Relaxed)
                || all_are_counted && seat.began.elapsed() >= COUNTED_WITHIN
        };
        let counted: Vec<_> = seats.iter().filter(is_counted).cloned().collect();
        if counted.len() > found.consumers {
            return counted;
        }
    }
    doubtful.retain(|seat| {
        found.messages > 0 && seat.pulse.is_idle() && !seat.may_have_to_wait(single_active)
    });
    doubtful
}

/// Whether the broker counts all consumers of a queue sooner or later. It has once counted one, as it does on no stream; and the
/// queue is known not to have a single active consumer, or, if this client has not declared it, to have given messages to two.
fn counts_all(seats: &[Arc<Seat>], single_active: Option<bool>) -> bool {
    let has_counted_one = seats.iter().any(|seat| seat.was_counted.load(Ordering::Relaxed));
    let active = seats.iter().filter(|seat| !seat.may_have_to_wait(single_active)).count();
    let has_standbys = single_active.unwrap_or(active < 2);
    has_counted_one && !has_standbys
}

/// Asks how many consumers and messages a queue has.
async fn ask(channel: &Channel, queue: &str) -> Option<Found> {
    match channel.inspect_queue(queue).await {
        Ok(info) => {
            let consumers = usize::try_from(info.consumers).ok()?;
            Some(Found { consumers, messages: info.messages })
        }
        // A queue that is gone has none.
        Err(error) if error.reply_code() == Some(ReplyCode::NOT_FOUND) => {
            Some(Found { consumers: 0, messages: 0 })
        }
        Err(_) => None,
    }
}
