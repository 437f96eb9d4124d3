//! A pool of channels: a fixed number of them, lent to one user at a time.
//!
//! ```text
//!  borrow --> a permit --> an idle slot --> its channel, opened anew if it is gone --> Borrowed
//!                              ^                                                         |
//!                              +--- all confirmed: as it is; else: closed, to be reopened +
//! ```
//!
//! A slot never leaves the pool, whatever becomes of its channel; so the pool never shrinks, and as there are as many
//! permits as slots, it never grows. One task for each connection opens idle channels again once the connection is back, and
//! whenever a broken channel is given back.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::watch::{self, error::RecvError};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use crate::amqp::{Channel, Confirm, Tally, deadline_in, lock};
use crate::connection::Client;
use crate::connection::core::PoolPlace;
use crate::connection::health::PoolHealth;
use crate::connection::managed::{LiveConnection, State};
use crate::connection::registry::ReportHealth;
use crate::error::Error;
use crate::telemetry::waited_for_channel;

/// How to make a [`ChannelPool`].
#[derive(Clone, Debug)]
#[must_use]
pub struct ChannelPoolBuilder {
    client: Client,
    size: usize,
    connections: usize,
    timeout: Duration,
}

impl Client {
    /// A pool of channels to publish on.
    pub fn channel_pool(&self) -> ChannelPoolBuilder {
        ChannelPoolBuilder::new(self.clone())
    }
}

impl ChannelPoolBuilder {
    pub(crate) fn new(client: Client) -> Self {
        ChannelPoolBuilder { client, size: 25, connections: 1, timeout: Duration::from_secs(30) }
    }

    /// How many channels there are: so many, and never more. 25 by default. With 0 there is no pool: each borrower gets a
    /// channel of its own, which is closed afterwards.
    pub fn size(mut self, channels: usize) -> Self {
        self.size = channels;
        self
    }

    /// Over how many connections the channels are spread. One by default.
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections.max(1);
        self
    }

    /// How long a borrower waits for a channel, and a channel that is given back for its confirms. Half a minute by
    /// default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Opens all channels.
    pub async fn build(self) -> Result<ChannelPool, Error> {
        let ChannelPoolBuilder { client, size, connections, timeout } = self;
        let places: Vec<_> =
            (0..connections).map(|number| client.core().publish_pooled(number)).collect();
        let pool = Pool {
            permits: (size > 0).then(|| Arc::new(Semaphore::new(size.min(Semaphore::MAX_PERMITS)))),
            idle: Mutex::default(),
            broken: places.iter().map(|_| Arc::default()).collect(),
            places,
            size,
            timeout,
            borrowed: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            failure: Mutex::default(),
            refilling: Mutex::default(),
            client,
        };
        let deadline = deadline_in(timeout);
        for number in 0..size {
            let mut slot = Slot { line: number % connections, channel: None };
            pool.open(&mut slot, deadline).await?;
            lock(&pool.idle).push_back(slot);
        }
        let pool = Arc::new(pool);
        pool.client.core().health.pools.add(&(Arc::clone(&pool) as _));
        if size > 0 {
            pool.keep_filled();
        }
        Ok(ChannelPool { pool })
    }
}

/// A fixed number of channels with confirms, opened once and lent to one user at a time.
///
/// A [`Publisher`](crate::Publisher) needs none: it may be shared, and has many messages under way on one channel. A pool is
/// for those who want a channel for themselves: to have their own confirms on it and nobody else's.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use leveret::amqp::Publish;
/// use leveret::{Client, Queue, Topology};
///
/// let client = Client::embedded().await?;
/// client.apply(&Topology::new().queue(Queue::classic("letters"))).await?;
/// let pool = client.channel_pool().size(2).build().await?;
///
/// let channel = pool.borrow().await?;
/// for _ in 0..10 {
///     let letter = Publish { routing_key: "letters", body: "hello".into(), ..Publish::default() };
///     drop(channel.publish(&letter).await?);
/// }
/// let tally = channel.give_back().await?;
/// assert_eq!(tally.acked, 10);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ChannelPool {
    pool: Arc<Pool>,
}

#[derive(Debug)]
pub(crate) struct Pool {
    /// As many as slots; none if there is no limit.
    permits: Option<Arc<Semaphore>>,
    /// The channel that was used last is lent first: the others may be gone meanwhile, and that is found out later.
    idle: Mutex<VecDeque<Slot>>,
    places: Vec<PoolPlace>,
    size: usize,
    timeout: Duration,
    /// How many channels are lent, and how many borrowers wait for one.
    borrowed: AtomicUsize,
    waiting: AtomicUsize,
    /// Why the last channel that was to be opened could not be.
    failure: Mutex<Option<Error>>,
    /// A broken channel of a connection was given back.
    broken: Vec<Arc<Notify>>,
    /// The tasks that open channels again, one for each connection.
    refilling: Mutex<Vec<JoinHandle<()>>>,
    client: Client,
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.refilling).iter().for_each(JoinHandle::abort);
    }
}

/// Opens the channels of a pool on one connection again whenever that is back, is no longer blocked, or a broken channel was
/// given back.
async fn refill_after_losses(
    pool: Weak<Pool>,
    number: usize,
    mut connection: watch::Receiver<State>,
    broken: Arc<Notify>,
) {
    loop {
        // Before the channels are opened: what changes from here on is a reason to try again.
        let mut blocked = match &*connection.borrow() {
            State::Up(up) => Some(up.connection.blocked()),
            State::Down(_) | State::Ended(_) => None,
        };
        {
            let Some(pool) = pool.upgrade() else { return };
            pool.refill_from(number).await;
        }
        tokio::select! {
            changed = connection.changed() => if changed.is_err() { return },
            Some(Ok(())) = changed(&mut blocked) => {}
            () = broken.notified() => {}
        }
    }
}

async fn changed<T>(watched: &mut Option<watch::Receiver<T>>) -> Option<Result<(), RecvError>> {
    match watched {
        Some(watched) => Some(watched.changed().await),
        None => None,
    }
}

/// The place of one channel.
#[derive(Debug)]
struct Slot {
    line: usize,
    /// Open or not; none if it has never been opened, or nobody knows how far its closing got.
    channel: Option<Channel<Confirm>>,
}

impl ChannelPool {
    /// A channel for the borrower alone, as soon as one is free.
    pub async fn borrow(&self) -> Result<BorrowedChannel, Error> {
        let pool = &self.pool;
        let began = Instant::now();
        let deadline = deadline_in(pool.timeout);
        let waiting = Counted::new(&pool.waiting);
        let permit = pool.permit(deadline).await?;
        let slot = lock(&pool.idle).pop_front();
        let borrowed = pool.lend(slot.unwrap_or(Slot { line: 0, channel: None }), permit);
        let borrowed = borrowed.opened(deadline).await?;
        drop(waiting);
        waited_for_channel(began.elapsed());
        Ok(borrowed)
    }

    /// How many channels the pool has.
    pub fn size(&self) -> usize {
        self.pool.size
    }

    /// How many of them nobody uses.
    pub fn idle(&self) -> usize {
        lock(&self.pool.idle).len()
    }
}

impl Pool {
    /// The right to a slot, as soon as there is one; none is needed if there is no limit.
    async fn permit(&self, deadline: Instant) -> Result<Option<OwnedSemaphorePermit>, Error> {
        let Some(permits) = &self.permits else { return Ok(None) };
        let permit = timeout_at(deadline, Arc::clone(permits).acquire_owned()).await;
        let late = |_| {
            let what = format!("waiting for one of the {} channels of the pool", self.size);
            Error::timed_out(what, self.timeout)
        };
        permit.map_err(late)?.map(Some).map_err(|_| Error::closed("the pool"))
    }

    /// From here on the slot goes back by itself, whatever fails.
    fn lend(self: &Arc<Self>, slot: Slot, permit: Option<OwnedSemaphorePermit>) -> BorrowedChannel {
        self.borrowed.fetch_add(1, Ordering::Relaxed);
        let pool = Arc::clone(self);
        BorrowedChannel { slot, pool, before: Tally::default(), permit }
    }

    fn keep_filled(self: &Arc<Self>) {
        let core = self.client.core();
        let refilling =
            self.places.iter().zip(&self.broken).enumerate().map(|(number, (place, broken))| {
                let (pool, broken) = (Arc::downgrade(self), Arc::clone(broken));
                core.spawn(refill_after_losses(pool, number, place.line.states(), broken))
            });
        *lock(&self.refilling) = refilling.collect();
    }

    /// Opens idle channels of one connection that are gone, before they are needed. Another connection may fail, or not answer.
    async fn refill_from(self: &Arc<Self>, number: usize) {
        let deadline = deadline_in(self.timeout);
        while let Some(permit) =
            self.permits.as_ref().and_then(|permits| Arc::clone(permits).try_acquire_owned().ok())
        {
            let broken = {
                let mut idle = lock(&self.idle);
                let at = idle.iter().position(|slot| slot.line == number && self.can_open(slot));
                at.and_then(|at| idle.remove(at))
            };
            let Some(slot) = broken else { return };
            if self.lend(slot, Some(permit)).opened(deadline).await.is_err() {
                return;
            }
        }
    }

    /// Whether it is closed, and its connection is there and takes what is sent.
    fn can_open(&self, slot: &Slot) -> bool {
        let State::Up(up) = self.places[slot.line].line.state() else { return false };
        !slot.is_open() && up.connection.is_usable() && up.connection.blocked().borrow().is_none()
    }

    /// Sees to it that the slot has an open channel.
    async fn open(&self, slot: &mut Slot, deadline: Instant) -> Result<(), Error> {
        let opened = self.try_open(slot, deadline).await;
        *lock(&self.failure) = opened.as_ref().err().cloned();
        opened
    }

    async fn try_open(&self, slot: &mut Slot, deadline: Instant) -> Result<(), Error> {
        let what = "opening a channel of the pool";
        let line = &self.places[slot.line].line;
        if let Some(channel) = &slot.channel {
            if channel.check_open().is_ok() {
                return Ok(());
            }
            // Not before the broker has closed the old one, or there would be one too many.
            let closed = timeout_at(deadline, channel.close()).await;
            let late = |_| line.timed_out("closing a broken channel of the pool", self.timeout);
            let _ = closed.map_err(late)?;
            slot.channel = None;
        }
        let open = |up: LiveConnection| async move {
            up.connection.open_channel().await?.into_confirm().await
        };
        slot.channel = Some(line.attempt(what, deadline, self.timeout, open).await?);
        Ok(())
    }
}

impl ReportHealth<PoolHealth> for Pool {
    fn health(&self) -> PoolHealth {
        let idle = lock(&self.idle);
        let borrowed = self.borrowed.load(Ordering::Relaxed);
        PoolHealth {
            size: self.size,
            open: idle.iter().filter(|slot| slot.is_open()).count() + borrowed,
            idle: idle.len(),
            borrowed,
            waiting: self.waiting.load(Ordering::Relaxed),
            error: lock(&self.failure).clone(),
        }
    }

    /// Opens idle channels that are gone. Health then has what fails.
    fn repair(self: Arc<Self>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            join_all((0..self.places.len()).map(|number| self.refill_from(number))).await;
        })
    }
}

/// A channel of a [`ChannelPool`], for as long as its borrower keeps it.
///
/// Dropped, it goes back if everything published on it has its outcome, and is closed and replaced if not.
pub struct BorrowedChannel {
    slot: Slot,
    pool: Arc<Pool>,
    /// What was counted when it was lent.
    before: Tally,
    /// Given back after the slot: each permit stands for an idle slot.
    permit: Option<OwnedSemaphorePermit>,
}

impl Slot {
    fn is_open(&self) -> bool {
        self.channel.as_ref().is_some_and(|channel| channel.check_open().is_ok())
    }
}

/// Counts as one for as long as it lives.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(counter: &'a AtomicUsize) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Counted(counter)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl BorrowedChannel {
    async fn opened(mut self, deadline: Instant) -> Result<Self, Error> {
        let pool = Arc::clone(&self.pool);
        pool.open(&mut self.slot, deadline).await?;
        self.before = self.tally();
        Ok(self)
    }

    /// Waits until everything published on it has its outcome, and gives it back. Says how many got which.
    ///
    /// Where outcomes are missing after the pool's timeout, the channel is closed and replaced.
    pub async fn give_back(self) -> Result<Tally, Error> {
        let patience = self.pool.timeout;
        let tally = self.confirmed(patience).await.map_err(|error| {
            Error::from_amqp("confirming what was published on a channel of the pool", error)
        })?;
        Ok(Tally {
            acked: tally.acked - self.before.acked,
            nacked: tally.nacked - self.before.nacked,
            returned: tally.returned - self.before.returned,
            lost: tally.lost - self.before.lost,
        })
    }
}

impl Deref for BorrowedChannel {
    type Target = Channel<Confirm>;

    fn deref(&self) -> &Channel<Confirm> {
        // It is opened before it is lent, and taken out only when it is dropped.
        self.slot.channel.as_ref().expect("a borrowed channel is open when it is lent")
    }
}

impl Drop for BorrowedChannel {
    fn drop(&mut self) {
        let Slot { line, channel } = &mut self.slot;
        let channel = channel.take();
        if let Some(channel) = &channel
            && (channel.unconfirmed() > 0 || self.pool.size == 0)
        {
            channel.close_now();
        }
        self.pool.borrowed.fetch_sub(1, Ordering::Relaxed);
        if self.pool.size > 0 {
            let slot = Slot { line: *line, channel };
            // One that could not be opened has no channel, and would fail again at once.
            let has_broken = slot.channel.is_some() && !slot.is_open();
            lock(&self.pool.idle).push_front(slot);
            drop(self.permit.take());
            if has_broken {
                self.pool.broken[*line].notify_one();
            }
        }
    }
}

impl fmt::Debug for BorrowedChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BorrowedChannel").field("id", &self.id()).finish_non_exhaustive()
    }
}

impl fmt::Debug for ChannelPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChannelPool")
            .field("size", &self.size())
            .field("idle", &self.idle())
            .finish_non_exhaustive()
    }
}
