//! The channel of one publisher, caller or forwarder: opened with a deadline, and opened again after a loss.
//!
//! ```text
//!             opened                 lost
//!  Closed -------------> Open ----------------> Closed
//!    | ^
//!    | +--- wanted --- Refused     the broker does not let it open
//!    +---------------> Ended       the client is closed, or its runtime is gone
//! ```
//!
//! A user without a task opens the channel on demand ([`ReliableChannel::get`]). A publisher and an RPC caller have a task that
//! reopens it, resends what has no answer ([`resend`](super::resend)) and sets the state; their users wait for it
//! ([`ReliableChannel::until_open`]).

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::core::Core;
use super::managed::{LiveConnection, ManagedConnection};
use crate::amqp::{self, Channel, ErrorKind as Amqp, ReplyCode, lock};
use crate::error::Error;

/// What a [`ReliableChannel`] holds: a channel, with whatever was opened together with it.
pub(crate) trait UsableChannel {
    /// Whether it can still be published on, as far as is known.
    fn is_usable(&self) -> bool;
}

impl<M> UsableChannel for Channel<M> {
    fn is_usable(&self) -> bool {
        self.check_open().is_ok()
    }
}

#[derive(Debug)]
pub(crate) enum ChannelState<C> {
    /// Not yet opened, or lost.
    Closed {
        since: Instant,
    },
    Open(Arc<C>),
    /// The broker refused to open it, for the `count`th time. The next user that wants it makes its task try again.
    Refused {
        error: Error,
        count: u64,
    },
    /// It will not be opened any more.
    Ended(Error),
}

/// A channel on the client's publishing connection that is opened again after a loss.
#[derive(Debug)]
pub(crate) struct ReliableChannel<C> {
    /// What its user does with it, for errors: `publishing to exchange "x"`.
    what: String,
    core: Arc<Core>,
    timeout: Duration,
    state: Mutex<ChannelState<C>>,
    /// Wakes all users that wait for another state.
    changed: Notify,
    /// Held while the channel is opened on demand.
    opening: tokio::sync::Mutex<()>,
    /// Wakes the task that opens the channel.
    wanted: Notify,
}

impl<C: UsableChannel> ReliableChannel<C> {
    pub(crate) fn new(core: &Arc<Core>, what: impl Into<String>, timeout: Duration) -> Self {
        ReliableChannel {
            what: what.into(),
            core: Arc::clone(core),
            timeout,
            state: Mutex::new(ChannelState::Closed { since: Instant::now() }),
            changed: Notify::new(),
            opening: tokio::sync::Mutex::default(),
            wanted: Notify::new(),
        }
    }

    pub(crate) fn what(&self) -> &str {
        &self.what
    }

    pub(crate) fn connection(&self) -> Arc<ManagedConnection> {
        self.core.publishing()
    }

    /// Calls `read` with the channel while no other state can be set.
    #[inline]
    pub(crate) fn with_open<T>(&self, read: impl FnOnce(&Arc<C>) -> T) -> Option<T> {
        match &*lock(&self.state) {
            ChannelState::Open(channel) => Some(read(channel)),
            _ => None,
        }
    }

    /// The channel, if it is open and usable.
    #[inline]
    pub(crate) fn open_now(&self) -> Option<Arc<C>> {
        match &*lock(&self.state) {
            ChannelState::Open(channel) if channel.is_usable() => Some(Arc::clone(channel)),
            _ => None,
        }
    }

    /// The channel; the caller opens it with `open` if it is not open. Callers get it in the order in which they ask.
    pub(crate) async fn get<F>(
        &self,
        deadline: Instant,
        open: impl Fn(LiveConnection) -> F,
    ) -> Result<Arc<C>, Error>
    where
        F: Future<Output = Result<C, amqp::Error>>,
    {
        let late = |_| self.timed_out();
        let _only_one = timeout_at(deadline, self.opening.lock()).await.map_err(late)?;
        if let Some(channel) = self.open_now() {
            return Ok(channel);
        }
        self.core.check_open()?;
        let opening = self.connection().attempt(&self.what, deadline, self.timeout, open).await;
        let channel = Arc::new(opening?);
        self.set(ChannelState::Open(Arc::clone(&channel)));
        Ok(channel)
    }

    /// Waits until its task has opened the channel, or says why it cannot.
    pub(crate) async fn until_open(&self, deadline: Instant) -> Result<Arc<C>, Error> {
        let refused_before = match &*lock(&self.state) {
            ChannelState::Refused { count, .. } => *count,
            _ => 0,
        };
        self.wanted.notify_one();
        let settled = self.until(|state| match state {
            // Its task notices the loss in a moment.
            ChannelState::Open(channel) => channel.is_usable().then(|| Ok(Arc::clone(channel))),
            ChannelState::Refused { error, count } if *count > refused_before => {
                Some(Err(error.clone()))
            }
            ChannelState::Ended(error) => Some(Err(error.clone())),
            ChannelState::Refused { .. } | ChannelState::Closed { .. } => None,
        });
        timeout_at(deadline, settled).await.map_err(|_| self.timed_out())?
    }

    /// Waits until its task has noticed that this channel is gone.
    pub(crate) async fn until_replaced(
        &self,
        channel: &Arc<C>,
        deadline: Instant,
    ) -> Result<(), Error> {
        let replaced = self.until(|state| match state {
            ChannelState::Open(current) => (!Arc::ptr_eq(current, channel)).then_some(()),
            _ => Some(()),
        });
        timeout_at(deadline, replaced).await.map_err(|_| self.timed_out())
    }

    /// Waits until `choose` takes something from the state.
    async fn until<T>(&self, choose: impl Fn(&ChannelState<C>) -> Option<T>) -> T {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(chosen) = choose(&lock(&self.state)) {
                return chosen;
            }
            changed.await;
        }
    }

    /// Waits until a user wants the channel.
    pub(crate) async fn until_wanted(&self) {
        self.wanted.notified().await;
    }

    pub(crate) fn set(&self, state: ChannelState<C>) {
        // The channel before is dropped outside of the lock: that may close it.
        let _before = std::mem::replace(&mut *lock(&self.state), state);
        self.changed.notify_waiters();
    }

    pub(crate) fn is_ended(&self) -> bool {
        matches!(&*lock(&self.state), ChannelState::Ended(_))
    }

    /// Since when it has been closed, and why it cannot be opened.
    pub(crate) fn health(&self) -> (Option<Instant>, Option<Error>) {
        match &*lock(&self.state) {
            ChannelState::Open(_) => (None, None),
            ChannelState::Closed { since } => (Some(*since), None),
            ChannelState::Refused { error, .. } | ChannelState::Ended(error) => {
                (None, Some(error.clone()))
            }
        }
    }

    pub(crate) fn timed_out(&self) -> Error {
        self.connection().timed_out(&self.what, self.timeout)
    }

    /// What an error of its channel means to its user.
    pub(crate) fn failed(&self, error: amqp::Error) -> Error {
        self.connection().failed(&self.what, error)
    }
}

/// Why a channel was lost, which decides how its unanswered messages are resent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LossCause {
    /// The connection was lost, or confirms did not come: all are resent at once.
    Connection,
    /// The broker closed the channel because of one of the messages, and does not say which: they are resent in groups, each
    /// confirmed before the next, until the one that costs the channel is found.
    Message,
    /// The broker closed the connection because of something on it, which may be a message of this channel or of another one.
    ConnectionClosed,
    /// The exchange does not exist: all are resent at once and awaited, to find out whether it exists now.
    MissingExchange,
}

impl LossCause {
    pub(crate) fn of(error: &amqp::Error) -> LossCause {
        match error.kind() {
            Amqp::ChannelClosed(ReplyCode::NOT_FOUND) => LossCause::MissingExchange,
            Amqp::ChannelClosed(_) => LossCause::Message,
            Amqp::ConnectionClosed(code) if code != ReplyCode::CONNECTION_FORCED => {
                LossCause::ConnectionClosed
            }
            _ => LossCause::Connection,
        }
    }
}
