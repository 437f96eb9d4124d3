//! What holds a channel open, and what everything on it goes through.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use leveret_wire::method::{Encode, basic};
use leveret_wire::{FrameMax, Method, Outbound, ShortStr};
use tokio::sync::Notify;
use tokio::sync::oneshot::Receiver;
use tokio::time::timeout;

use super::calls::{Calls, Reply, Subject};
use super::confirm::{Confirms, Returned};
use super::connection::Guard;
use super::consumer::{ConsumerQueue, End};
use super::delivery::Refused;
use super::error::{Error, ErrorKind};
use super::lock;
use super::settled::{Mark, Settled};

/// How many returned messages of a channel without confirms are kept for whoever asks. What is beyond, oldest first,
/// is dropped.
const KEEP_RETURNED: usize = 1024;

/// One channel, as the connection's reader and its handles share it.
#[derive(Debug)]
pub(super) struct ChannelState {
    pub(super) id: u16,
    pub(super) calls: Calls,
    /// Which deliveries were settled.
    pub(super) settled: Mutex<Settled>,
    pub(super) confirms: Confirms,
    /// Confirm mode is on: returns belong to the ledger.
    pub(super) confirming: AtomicBool,
    returned: Mutex<VecDeque<Returned>>,
    /// Transactions are on: an ack may yet be rolled back, so none may cover another.
    pub(super) tx: AtomicBool,
    /// The consumers of this channel, for the end and for their names.
    consumers: Mutex<Vec<Weak<ConsumerQueue>>>,
    /// Held while a consumer is begun: its prefetch is set by a call before.
    pub(super) consuming: tokio::sync::Mutex<()>,
    /// Why nothing more can be sent.
    pub(super) closed: OnceLock<Error>,
    /// This side asked for the close; the id is free once the broker has agreed.
    pub(super) close_sent: AtomicBool,
    /// The broker agreed to the close, or the connection is gone.
    pub(super) gone: Notify,
}

impl ChannelState {
    pub(super) fn new(id: u16) -> Self {
        ChannelState {
            id,
            calls: Calls::default(),
            settled: Mutex::new(Settled::new()),
            confirms: Confirms::new(),
            confirming: AtomicBool::new(false),
            returned: Mutex::default(),
            tx: AtomicBool::new(false),
            consumers: Mutex::default(),
            consuming: tokio::sync::Mutex::default(),
            closed: OnceLock::new(),
            close_sent: AtomicBool::new(false),
            gone: Notify::new(),
        }
    }

    #[inline]
    pub(super) fn check_open(&self) -> Result<(), Error> {
        match self.closed.get() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Ends everything that waits on this channel.
    pub(super) fn fail(&self, error: &Error) {
        let _ = self.closed.set(error.clone());
        self.calls.close(error);
        self.confirms.lost(error);
        for queue in std::mem::take(&mut *lock(&self.consumers)) {
            if let Some(queue) = queue.upgrade() {
                queue.end(End::Failed(error.clone()));
            }
        }
        self.gone.notify_waiters();
    }

    /// A consumer of this channel, unless its name is taken: the broker would close the connection.
    pub(super) fn add_consumer(&self, queue: &Arc<ConsumerQueue>) -> Result<(), Error> {
        let mut consumers = lock(&self.consumers);
        consumers.retain(|one| one.upgrade().is_some_and(|one| one.is_alive()));
        if consumers.iter().filter_map(Weak::upgrade).any(|one| one.tag == queue.tag) {
            let text = format!("the channel has a consumer {} already", queue.tag);
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        consumers.push(Arc::downgrade(queue));
        Ok(())
    }

    /// A message came back.
    pub(super) fn message_returned(&self, returned: Returned) {
        let returned = match self.confirming.load(Ordering::Relaxed) {
            true => lock(&self.confirms.ledger).returned(returned),
            false => Some(returned),
        };
        // Of a publish without confirms: kept for whoever asks.
        if let Some(returned) = returned {
            let mut kept = lock(&self.returned);
            if kept.len() == KEEP_RETURNED {
                kept.pop_front();
            }
            kept.push_back(returned);
        }
    }
}

/// Holds a channel open: its handle, its consumers and its deliveries share one. The channel is closed with the last.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) channel: Arc<ChannelState>,
    pub(super) connection: Arc<Guard>,
}

impl Link {
    /// Puts frames into the outbound buffer, unless the channel is closed by then.
    pub(super) fn send<T>(
        &self,
        encode: impl FnOnce(&mut Outbound, FrameMax) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.connection.core.sender.send(|outbound, max| {
            self.channel.check_open()?;
            encode(outbound, max)
        })
    }

    /// Sends a method and awaits its reply.
    pub(super) async fn call<R>(&self, method: &impl Encode) -> Result<R, Error>
    where
        R: TryFrom<Method<'static>>,
    {
        match self.request(method, Subject::None).await? {
            Reply::Method(reply) => R::try_from(reply).map_err(|_| unexpected_reply(method.name())),
            Reply::Got(_) => Err(unexpected_reply(method.name())),
        }
    }

    /// Sends a method and awaits its reply, whatever it is.
    ///
    /// A reply that does not come in time leaves nobody knowing where the channel stands, so it is closed.
    pub(super) async fn request(
        &self,
        method: &impl Encode,
        subject: Subject,
    ) -> Result<Reply, Error> {
        let send =
            || self.send(|outbound, max| Ok(outbound.method(self.channel.id, method, max)?));
        let reply = self.channel.calls.begin(method.name(), subject, send)?;
        self.reply(method.name(), reply).await
    }

    async fn reply(&self, to: &str, reply: Receiver<Result<Reply, Error>>) -> Result<Reply, Error> {
        let patience = self.connection.core.limits.reply_timeout;
        match timeout(patience, reply).await {
            Ok(Ok(reply)) => reply,
            Ok(Err(_)) => Err(self.channel.check_open().err().unwrap_or_else(closed_here)),
            Err(_) => {
                let what = format_args!("the reply to {to} (the channel is closed now)");
                let error = Error::timeout(what, patience);
                self.close_with(&error);
                Err(error)
            }
        }
    }

    /// Has everything unsettled delivered anew. From the moment this is sent, old deliveries are of no more use: the
    /// broker would close the channel on an ack for one.
    pub(super) async fn recover(&self) -> Result<(), Error> {
        let recover = basic::Recover { requeue: true };
        let reply = {
            let mut settled = lock(&self.channel.settled);
            let send = || self.send_method(&recover);
            let reply = self.channel.calls.begin(basic::Recover::NAME, Subject::None, send)?;
            settled.pause();
            reply
        };
        self.reply(basic::Recover::NAME, reply).await.map(drop)
    }

    pub(super) fn ack(&self, tag: u64) -> Result<(), Error> {
        // Locked until the ack is in the buffer: two acks in order must not overtake each other, or the second could
        // grow to cover the first, and the first would then be one too many.
        let mut settled = lock(&self.channel.settled);
        match settled.mark(tag) {
            Mark::Again => Ok(()),
            mark => {
                let grows = mark == Mark::InOrder && !self.channel.tx.load(Ordering::Relaxed);
                self.send_ack(basic::Ack { delivery_tag: tag, multiple: false }, grows)
            }
        }
    }

    pub(super) fn ack_through(&self, tag: u64) -> Result<(), Error> {
        let mut settled = lock(&self.channel.settled);
        match settled.mark_through(tag) {
            true => self.send_ack(basic::Ack { delivery_tag: tag, multiple: true }, false),
            false => Ok(()),
        }
    }

    fn send_ack(&self, ack: basic::Ack, grows: bool) -> Result<(), Error> {
        let core = &self.connection.core;
        core.sender.ack(self.channel.id, ack, grows, || self.channel.check_open())
    }

    pub(super) fn nack(&self, tag: u64, refused: Refused) -> Result<(), Error> {
        let requeue = refused == Refused::Requeue;
        let mut settled = lock(&self.channel.settled);
        match settled.mark(tag) {
            Mark::Again => Ok(()),
            _ => self.send_method(&basic::Nack { delivery_tag: tag, multiple: false, requeue }),
        }
    }

    pub(super) fn nack_through(&self, tag: u64, refused: Refused) -> Result<(), Error> {
        let requeue = refused == Refused::Requeue;
        let mut settled = lock(&self.channel.settled);
        match settled.mark_through(tag) {
            true => self.send_method(&basic::Nack { delivery_tag: tag, multiple: true, requeue }),
            false => Ok(()),
        }
    }

    pub(super) fn reject(&self, tag: u64, refused: Refused) -> Result<(), Error> {
        let requeue = refused == Refused::Requeue;
        let mut settled = lock(&self.channel.settled);
        match settled.mark(tag) {
            Mark::Again => Ok(()),
            _ => self.send_method(&basic::Reject { delivery_tag: tag, requeue }),
        }
    }

    /// For what was dropped unsettled. If the channel is gone, the broker has it back already.
    pub(super) fn give_back(&self, tag: u64) {
        self.connection.core.give_back(&self.channel, tag);
    }

    fn send_method(&self, method: &impl Encode) -> Result<(), Error> {
        self.send(|outbound, max| Ok(outbound.method(self.channel.id, method, max)?))
    }

    pub(super) async fn cancel(&self, tag: &ShortStr<'static>) -> Result<(), Error> {
        let cancel = basic::Cancel { consumer_tag: tag.borrowed(), nowait: false };
        self.request(&cancel, Subject::Consumer(tag.clone(), None)).await?;
        Ok(())
    }

    /// For a consumer that was dropped: the reply finds nobody waiting.
    pub(super) fn cancel_and_forget(&self, tag: &ShortStr<'static>) {
        let cancel = basic::Cancel { consumer_tag: tag.borrowed(), nowait: false };
        let subject = Subject::Consumer(tag.clone(), None);
        let send = || self.send_method(&cancel);
        drop(self.channel.calls.begin(basic::Cancel::NAME, subject, send));
    }

    /// Asks the broker to close the channel; from here on nothing else is sent on it.
    pub(super) fn close_with(&self, error: &Error) {
        self.connection.core.close_channel(&self.channel, error);
    }

    /// Closes the channel and awaits the broker's agreement. If the channel was closed before for another reason, that
    /// is the error.
    pub(super) async fn close(&self) -> Result<(), Error> {
        self.close_with(&closed_here());
        self.connection.core.until_gone(&self.channel).await?;
        match self.channel.check_open() {
            Err(error) if error.kind() != ErrorKind::Closed => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes the returned messages of a channel without confirms.
    pub(super) fn take_returned(&self) -> Vec<Returned> {
        lock(&self.channel.returned).drain(..).collect()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close_with(&closed_here());
    }
}

pub(super) fn closed_here() -> Error {
    Error::new(ErrorKind::Closed, "the channel was closed")
}

fn unexpected_reply(to: &str) -> Error {
    Error::protocol(format!("the broker answered {to} with something else"))
}
