//! What holds a channel open, and what everything on it goes through.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use leveret_wire::method::{Encode, basic, tx};
use leveret_wire::{FrameMax, Method, Outbound, ShortStr};
use tokio::sync::Notify;
use tokio::sync::oneshot::Receiver;
use tokio::time::timeout;

use super::calls::{Calls, Reply, Subject};
use super::confirm::{ConfirmSink, Confirms, Returned};
use super::connection::Guard;
use super::consumer::{ConsumerQueue, End};
use super::delivery::Refused;
use super::error::{Error, ErrorKind};
use super::lock;
use super::outbound::Sender;
use super::settled::{Mark, Settled};

/// How many returned messages of a channel without confirms are kept for whoever asks. What is beyond, oldest first,
/// is dropped.
const KEEP_RETURNED: usize = 1024;

/// The only kind that RabbitMQ knows: to whoever is free, and not to who had them.
const RECOVER: basic::Recover = basic::Recover { requeue: true };

/// One channel, as the connection's reader and its handles share it.
#[derive(Debug)]
pub(super) struct ChannelState {
    pub(super) id: u16,
    pub(super) calls: Calls,
    /// Which deliveries were settled.
    pub(super) settled: Mutex<Settled>,
    pub(super) confirms: Confirms,
    /// Where confirms go instead, if a layer above keeps what was published.
    sink: OnceLock<Arc<dyn ConfirmSink>>,
    /// Woken whenever confirms came.
    pub(super) confirm_progress: Notify,
    /// How many publishes there may be from the oldest unconfirmed one on.
    pub(super) max_unconfirmed: AtomicUsize,
    /// Confirm mode is on: returned messages are of publishes with confirms.
    pub(super) confirming: AtomicBool,
    returned: Mutex<VecDeque<Returned>>,
    /// Why publishes have to wait, as bits of [`Pause`]; 0 if they need not.
    pub(super) paused: AtomicU8,
    /// The user has asked the broker to pause deliveries.
    pub(super) deliveries_paused: AtomicBool,
    /// What is to be sent on the channel, while a commit is under way: RabbitMQ closes the connection on anything that
    /// comes before it is done.
    held: Mutex<Option<Outbound>>,
    /// A commit is done.
    committed: Notify,
    /// The limit for all consumers together; 0 is none.
    pub(super) prefetch_for_all: AtomicU16,
    /// Transactions are on: an ack may yet be rolled back, so none may cover another.
    pub(super) tx: AtomicBool,
    /// Something was asked for that has to be settled.
    pub(super) takes: AtomicBool,
    /// The consumers of this channel, for the end and for their names.
    consumers: Mutex<Vec<Weak<ConsumerQueue>>>,
    /// Held while a consumer is begun: its prefetch is set by a call before.
    pub(super) consuming: tokio::sync::Mutex<()>,
    /// Why nothing more can be sent.
    pub(super) closed: OnceLock<Error>,
    /// The broker agreed to the close, or the connection is gone.
    pub(super) gone: Notify,
}

impl ChannelState {
    pub(super) fn new(id: u16, max_unconfirmed: usize) -> Self {
        ChannelState {
            id,
            max_unconfirmed: AtomicUsize::new(max_unconfirmed),
            calls: Calls::default(),
            settled: Mutex::new(Settled::new()),
            confirms: Confirms::new(),
            sink: OnceLock::new(),
            confirm_progress: Notify::new(),
            confirming: AtomicBool::new(false),
            returned: Mutex::default(),
            paused: AtomicU8::new(0),
            deliveries_paused: AtomicBool::new(false),
            held: Mutex::new(None),
            committed: Notify::new(),
            prefetch_for_all: AtomicU16::new(0),
            tx: AtomicBool::new(false),
            takes: AtomicBool::new(false),
            consumers: Mutex::default(),
            consuming: tokio::sync::Mutex::default(),
            closed: OnceLock::new(),
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

    /// Whether a call or a publish on it has no answer yet.
    pub(super) fn is_waiting(&self) -> bool {
        self.calls.is_waiting() || !self.sink().tags().is_empty()
    }

    /// Where confirms go.
    #[inline]
    pub(super) fn sink(&self) -> &dyn ConfirmSink {
        self.sink.get().map_or(&self.confirms, |sink| &**sink)
    }

    /// Before the first publish with confirms, if at all.
    pub(super) fn set_sink(&self, sink: Arc<dyn ConfirmSink>) {
        let _ = self.sink.set(sink);
    }

    /// Waits until every publish so far is confirmed, rejected, returned or lost.
    pub(super) async fn until_confirmed(&self) {
        let next = self.sink().tags().end;
        self.until(|| self.sink().tags().start >= next).await;
    }

    /// Waits until there is room for another unconfirmed publish.
    pub(super) async fn until_window(&self) {
        let max = self.max_unconfirmed.load(Ordering::Relaxed);
        self.until(|| self.confirms.span() < max).await;
    }

    async fn until(&self, is_so: impl Fn() -> bool) {
        loop {
            let mut progress = pin!(self.confirm_progress.notified());
            // Registered before the check, so that no wake-up falls between the two.
            progress.as_mut().enable();
            if is_so() {
                return;
            }
            progress.await;
        }
    }

    /// Waits until nothing more can be sent, and says why.
    pub(super) async fn ended(&self) -> Error {
        loop {
            let mut gone = pin!(self.gone.notified());
            // Registered before the check, so that no wake-up falls between the two.
            gone.as_mut().enable();
            if let Some(error) = self.closed.get() {
                return error.clone();
            }
            gone.await;
        }
    }

    /// Ends everything that waits on this channel.
    pub(super) fn fail(&self, error: &Error) {
        let _ = self.closed.set(error.clone());
        self.calls.close(error);
        self.sink().lost(error);
        self.confirm_progress.notify_waiters();
        for queue in std::mem::take(&mut *lock(&self.consumers)) {
            if let Some(queue) = queue.upgrade() {
                // What waits can no longer be settled, and is delivered again.
                queue.set_stale(u64::MAX);
                queue.end(End::Failed(error.clone()));
            }
        }
        self.gone.notify_waiters();
        self.committed.notify_waiters();
    }

    /// Puts frames of this channel into the outbound buffer, unless it is closed by then.
    #[inline]
    pub(super) fn send<T>(
        &self,
        sender: &Sender,
        encode: impl FnOnce(&mut Outbound, FrameMax) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let open = |outbound: &mut Outbound, max| {
            self.check_open()?;
            encode(outbound, max)
        };
        if !self.tx.load(Ordering::Relaxed) {
            return sender.send(open);
        }
        // Locked until it is sent, so that no commit comes in between.
        let mut held = lock(&self.held);
        match &mut *held {
            Some(held) => open(held, sender.frame_max()),
            None => sender.send(open),
        }
    }

    /// Publishes have to wait, or for this reason no longer.
    pub(super) fn pause(&self, why: Pause, is_so: bool) {
        let bit = why as u8;
        match is_so {
            true => self.paused.fetch_or(bit, Ordering::Relaxed),
            false => self.paused.fetch_and(!bit, Ordering::Relaxed),
        };
    }

    /// Sends a commit, unless another is under way. What follows it is held back.
    fn try_commit(&self, sender: &Sender) -> Option<Result<Awaited, Error>> {
        if lock(&self.held).is_some() {
            return None;
        }
        let commit = || {
            let mut held = lock(&self.held);
            self.pause(Pause::Commit, true);
            sender.send(|outbound, max| {
                self.check_open()?;
                Ok(outbound.method(self.id, &tx::Commit {}, max)?)
            })?;
            *held = Some(Outbound::new());
            Ok(())
        };
        Some(self.calls.begin(tx::Commit::NAME, Subject::None, commit))
    }

    /// A commit is done: what was held back is sent.
    pub(super) fn committed(&self, sender: &Sender) {
        let mut held = lock(&self.held);
        if let Some(held) = held.take() {
            let _ = sender.send(|outbound, _| {
                outbound.append(held);
                Ok(())
            });
        }
        self.pause(Pause::Commit, false);
        drop(held);
        sender.look_again();
        self.committed.notify_waiters();
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
            true => self.sink().returned(returned),
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

/// Why publishes on a channel have to wait.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(super) enum Pause {
    /// The broker asked for it.
    Flow = 1,
    /// A commit is under way.
    Commit = 2,
}

/// Where a reply arrives.
type Awaited = Receiver<Result<Reply, Error>>;

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
        self.channel.send(&self.connection.core.sender, encode)
    }

    /// Commits what was published and settled since the last time.
    pub(super) async fn commit(&self) -> Result<(), Error> {
        let sender = &self.connection.core.sender;
        let begin = async {
            loop {
                let mut committed = pin!(self.channel.committed.notified());
                committed.as_mut().enable();
                self.channel.check_open()?;
                match self.channel.try_commit(sender) {
                    Some(reply) => return reply,
                    None => committed.await,
                }
            }
        };
        let patience = self.connection.core.limits.reply_timeout;
        let late = |_| Error::timeout("the commit before this one", patience);
        let reply = timeout(patience, begin).await.map_err(late)??;
        self.reply(tx::Commit::NAME, reply).await.map(drop)
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

    async fn reply(&self, to: &str, reply: Awaited) -> Result<Reply, Error> {
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

    /// Has everything unsettled delivered anew.
    pub(super) async fn recover(&self) -> Result<(), Error> {
        let reply = self.begin_recover(|| self.send_method(&RECOVER))?;
        self.reply(basic::Recover::NAME, reply).await.map(drop)
    }

    /// Has everything unsettled delivered anew, without waiting for the broker.
    ///
    /// Nothing answers `basic.recover-async`, so nobody could tell the old deliveries that are still under way from the
    /// new ones. Hence a `basic.recover` goes with it, for its answer. RabbitMQ takes both in one go, and has nothing
    /// to do for the second.
    pub(super) fn recover_async(&self) -> Result<(), Error> {
        let send = || {
            self.send(|outbound, max| {
                let recover_async = basic::RecoverAsync { requeue: true };
                outbound.method(self.channel.id, &recover_async, max)?;
                Ok(outbound.method(self.channel.id, &RECOVER, max)?)
            })
        };
        self.begin_recover(send).map(drop)
    }

    /// From the moment a recover is sent, old deliveries are of no more use: the broker would close the channel on an
    /// ack for one.
    fn begin_recover(&self, send: impl FnOnce() -> Result<(), Error>) -> Result<Awaited, Error> {
        let mut settled = lock(&self.channel.settled);
        let reply = self.channel.calls.begin(basic::Recover::NAME, Subject::None, send)?;
        settled.pause();
        Ok(reply)
    }

    pub(super) fn ack(&self, tag: u64) -> Result<(), Error> {
        // Locked until the ack is in the buffer: two acks in order must not overtake each other, or the second could
        // grow to cover the first, and the first would then be one too many.
        let mut settled = lock(&self.channel.settled);
        match settled.mark(tag) {
            Mark::Again => Err(self.stale(tag)),
            mark => {
                let grows = mark == Mark::InOrder;
                self.send_ack(basic::Ack { delivery_tag: tag, multiple: false }, grows)
            }
        }
    }

    pub(super) fn ack_through(&self, tag: u64) -> Result<(), Error> {
        let mut settled = lock(&self.channel.settled);
        match settled.mark_through(tag) {
            true => self.send_ack(basic::Ack { delivery_tag: tag, multiple: true }, false),
            false => Err(self.stale(tag)),
        }
    }

    fn send_ack(&self, ack: basic::Ack, grows: bool) -> Result<(), Error> {
        if self.channel.tx.load(Ordering::Relaxed) {
            return self.send_method(&ack);
        }
        let core = &self.connection.core;
        core.sender.ack(self.channel.id, ack, grows, || self.channel.check_open())
    }

    pub(super) fn nack(&self, tag: u64, refused: Refused) -> Result<(), Error> {
        let requeue = refused == Refused::Requeue;
        let mut settled = lock(&self.channel.settled);
        match settled.mark(tag) {
            Mark::Again => Err(self.stale(tag)),
            _ => self.send_method(&basic::Nack { delivery_tag: tag, multiple: false, requeue }),
        }
    }

    pub(super) fn nack_through(&self, tag: u64, refused: Refused) -> Result<(), Error> {
        let requeue = refused == Refused::Requeue;
        let mut settled = lock(&self.channel.settled);
        match settled.mark_through(tag) {
            true => self.send_method(&basic::Nack { delivery_tag: tag, multiple: true, requeue }),
            false => Err(self.stale(tag)),
        }
    }

    pub(super) fn reject(&self, tag: u64, refused: Refused) -> Result<(), Error> {
        let requeue = refused == Refused::Requeue;
        let mut settled = lock(&self.channel.settled);
        match settled.mark(tag) {
            Mark::Again => Err(self.stale(tag)),
            _ => self.send_method(&basic::Reject { delivery_tag: tag, requeue }),
        }
    }

    #[cold]
    fn stale(&self, tag: u64) -> Error {
        // If the channel is gone, that is why.
        self.channel.check_open().err().unwrap_or_else(|| {
            let text = format!(
                "delivery {tag} cannot be settled any more: it was settled together with a later one, or is delivered \
                 anew after a recover"
            );
            Error::new(ErrorKind::Stale, text)
        })
    }

    /// Returns a delivery that was dropped unsettled to its queue.
    pub(super) fn requeue(&self, tag: u64, is_of_stream: bool) {
        self.connection.core.requeue(&self.channel, tag, is_of_stream);
    }

    /// For what is still under way to those who are gone. RabbitMQ counts what goes back with its channel against the
    /// delivery limit, and from 4.3 on does not count this.
    fn give_all_back(&self) {
        let ChannelState { takes, tx, .. } = &*self.channel;
        let agreed = &self.connection.core.agreed;
        if takes.load(Ordering::Relaxed) && !tx.load(Ordering::Relaxed) && agreed.is_4_3_or_later()
        {
            let all = basic::Nack { delivery_tag: 0, multiple: true, requeue: true };
            self.connection.core.answer(&self.channel, &all);
        }
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
            Ok(()) => Ok(()),
            Err(error) => match error.kind() {
                ErrorKind::ChannelClosedHere | ErrorKind::ConnectionClosedHere => Ok(()),
                _ => Err(error),
            },
        }
    }

    /// Waits until every publish so far has its outcome. An error if the channel is closed by then.
    pub(super) async fn until_confirmed(&self, patience: Duration) -> Result<(), Error> {
        timeout(patience, self.channel.until_confirmed())
            .await
            .map_err(|_| Error::timeout("confirming what was published", patience))?;
        self.channel.check_open()
    }

    /// Takes the returned messages of a channel without confirms.
    pub(super) fn take_returned(&self) -> Vec<Returned> {
        lock(&self.channel.returned).drain(..).collect()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.give_all_back();
        self.close_with(&closed_here());
    }
}

pub(super) fn closed_here() -> Error {
    Error::new(ErrorKind::ChannelClosedHere, "the channel was closed")
}

fn unexpected_reply(to: &str) -> Error {
    Error::protocol(format!("the broker answered {to} with something else"))
}
