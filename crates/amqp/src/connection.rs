//! A connection: what its handles, its channels and its driver share.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret_wire::method::{Encode, basic, channel, connection};
use leveret_wire::{FrameMax, Method, Outbound, ReplyCode, Secret, ShortStr, Table};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::timeout;

use super::calls::{Calls, Reply, Subject};
use super::channel::Channel;
use super::connector::Connector;
use super::driver;
use super::error::{Error, ErrorKind};
use super::handshake::{self, Agreed};
use super::limits::Limits;
use super::link::{ChannelState, Link};
use super::lock;
use super::options::Options;
use super::outbound::Sender;
use super::settled::Mark;

/// What lives as long as the connection does.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) sender: Sender,
    pub(super) limits: Limits,
    pub(super) agreed: Agreed,
    channels: Mutex<Registry>,
    /// Calls on channel 0.
    pub(super) calls: Calls,
    blocked: watch::Sender<Option<String>>,
    /// A call or a publish waits for a broker that has fallen silent.
    unanswered: AtomicBool,
    /// The broker is to be asked whether it is there, although nothing waits for it here.
    suspected: AtomicBool,
    consumer_tags: AtomicU64,
    /// Why the connection ended, once its driver is done.
    ended: watch::Sender<Option<Error>>,
}

/// The channels by number, and which numbers are free.
#[derive(Debug, Default)]
struct Registry {
    /// Channel `n` at `n - 1`.
    channels: Vec<Option<Arc<ChannelState>>>,
    /// Numbers that were used and are free again, the one that rests the longest first.
    resting: VecDeque<u16>,
    closed: Option<Error>,
}

/// So many other numbers are freed before one is used again, as long as there are enough. When RabbitMQ closes a channel, its
/// deliveries and confirms may come later than the close; even, under load, later than the agreement that the next channel
/// of this number is open, which would take them for its own.
const REST: usize = 256;

impl Registry {
    /// A number that is not in use.
    fn free_number(&mut self, max: u16) -> Option<u16> {
        if self.resting.len() > REST {
            return self.resting.pop_front();
        }
        match u16::try_from(self.channels.len() + 1) {
            Ok(new) if new <= max => {
                self.channels.push(None);
                Some(new)
            }
            _ => self.resting.pop_front(),
        }
    }
}

impl Core {
    pub(super) fn new(agreed: Agreed, limits: Limits) -> Self {
        Core {
            sender: Sender::new(agreed.frame_max),
            limits,
            agreed,
            channels: Mutex::default(),
            calls: Calls::default(),
            blocked: watch::Sender::new(None),
            unanswered: AtomicBool::new(false),
            suspected: AtomicBool::new(false),
            consumer_tags: AtomicU64::new(1),
            ended: watch::Sender::new(None),
        }
    }

    /// A new channel.
    fn add_channel(&self) -> Result<Arc<ChannelState>, Error> {
        let mut registry = lock(&self.channels);
        if let Some(error) = &registry.closed {
            return Err(error.clone());
        }
        let max = self.agreed.channel_max;
        let Some(id) = registry.free_number(max) else {
            let text = format!(
                "all {max} channels of the connection are open: close some, open another connection, or raise \
                 channel_max, here and in the broker"
            );
            return Err(Error::new(ErrorKind::ChannelLimit, text));
        };
        let channel = Arc::new(ChannelState::new(id, self.limits.max_unconfirmed));
        registry.channels[usize::from(id) - 1] = Some(Arc::clone(&channel));
        Ok(channel)
    }

    pub(super) fn channel(&self, id: u16) -> Option<Arc<ChannelState>> {
        let registry = lock(&self.channels);
        registry.channels.get(usize::from(id).checked_sub(1)?)?.clone()
    }

    pub(super) fn has_channel(&self, channel: &Arc<ChannelState>) -> bool {
        self.channel(channel.id).is_some_and(|found| Arc::ptr_eq(&found, channel))
    }

    /// The number is free again.
    pub(super) fn remove_channel(&self, id: u16) {
        let mut registry = lock(&self.channels);
        let slot = usize::from(id).checked_sub(1).and_then(|at| registry.channels.get_mut(at));
        if slot.is_some_and(|slot| slot.take().is_some()) {
            registry.resting.push_back(id);
        }
    }

    pub(super) fn next_consumer_tag(&self) -> String {
        format!("leveret-{}", self.consumer_tags.fetch_add(1, Ordering::Relaxed))
    }

    /// Asks the broker to close a channel; from here on nothing else is sent on it.
    pub(super) fn close_channel(&self, channel: &ChannelState, error: &Error) {
        let close = channel::Close {
            reply_code: ReplyCode::SUCCESS,
            reply_text: ShortStr::from_static("closed"),
            class_id: 0,
            method_id: 0,
        };
        let sent = self.sender.send(|outbound, max| {
            channel.check_open()?;
            outbound.method(channel.id, &close, max)?;
            let _ = channel.closed.set(error.clone());
            Ok(())
        });
        if sent.is_ok() {
            channel.fail(error);
        }
    }

    /// Waits until a channel's number is free.
    pub(super) async fn until_gone(&self, channel: &Arc<ChannelState>) -> Result<(), Error> {
        let gone = async {
            loop {
                let mut gone = pin!(channel.gone.notified());
                gone.as_mut().enable();
                if !self.has_channel(channel) {
                    return;
                }
                gone.await;
            }
        };
        let patience = self.limits.reply_timeout;
        let late = |_| Error::timeout("the reply to channel.close", patience);
        timeout(patience, gone).await.map_err(late)
    }

    /// Returns a delivery that was dropped unsettled to its queue. If the channel is gone, the broker has done so already.
    ///
    /// A stream takes nothing back, and RabbitMQ before 4.3 closes the connection on the attempt: there nothing is sent.
    pub(super) fn requeue(&self, channel: &ChannelState, tag: u64, is_of_stream: bool) {
        if is_of_stream && !self.agreed.is_4_3_or_later() {
            return;
        }
        let mut settled = lock(&channel.settled);
        if settled.mark(tag) != Mark::Again {
            let nack = basic::Nack { delivery_tag: tag, multiple: false, requeue: true };
            self.answer(channel, &nack);
        }
    }

    /// Sends a method that nobody waits for, unless channel or connection are closed.
    pub(super) fn answer(&self, channel: &ChannelState, method: &impl Encode) {
        let encode = |outbound: &mut Outbound, max| Ok(outbound.method(channel.id, method, max)?);
        let _ = channel.send(&self.sender, encode);
    }

    pub(super) fn set_blocked(&self, reason: Option<String>) {
        self.sender.set_blocked(reason.clone());
        self.blocked.send_replace(reason);
    }

    /// Whether the broker owes an answer. While it blocks the connection it owes none: it may not read from it.
    pub(super) fn is_awaited(&self) -> bool {
        if self.blocked.borrow().is_some() {
            return false;
        }
        self.is_suspected()
            || self.calls.is_waiting()
            || self.sender.has_backlog()
            || self.open_channels().iter().any(|channel| channel.is_waiting())
    }

    fn open_channels(&self) -> Vec<Arc<ChannelState>> {
        let registry = lock(&self.channels);
        let channels = registry.channels.iter().flatten();
        channels.filter(|channel| channel.closed.get().is_none()).cloned().collect()
    }

    /// Asks the broker whether it is there, by what changes nothing: a channel stays paused if its user has paused it. The answer concerns only the reader.
    pub(super) fn ask(&self) {
        let channels = self.open_channels();
        let waiting = channels.iter().find(|channel| channel.is_waiting());
        let Some(channel) = waiting.or(channels.first()) else { return };
        let flow = channel::Flow { active: !channel.deliveries_paused.load(Ordering::Relaxed) };
        let encode = |outbound: &mut Outbound, max| Ok(outbound.method(channel.id, &flow, max)?);
        let send = || channel.send(&self.sender, encode);
        drop(channel.calls.begin(channel::Flow::NAME, Subject::None, send));
    }

    pub(super) fn set_unanswered(&self, unanswered: bool) {
        self.unanswered.store(unanswered, Ordering::Relaxed);
    }

    pub(super) fn is_suspected(&self) -> bool {
        self.suspected.load(Ordering::Relaxed)
    }

    pub(super) fn set_suspected(&self, suspected: bool) {
        self.suspected.store(suspected, Ordering::Relaxed);
    }

    /// Asks the broker for the end of the connection; nothing else is sent after that.
    pub(super) fn begin_close(&self, error: Error, reply_code: ReplyCode, text: &str) {
        let reply_text = ShortStr::truncated(text);
        let close = connection::Close { reply_code, reply_text, class_id: 0, method_id: 0 };
        // A close fits any frame.
        self.sender.close(error, |outbound, max| drop(outbound.method(0, &close, max)));
    }

    /// Everything that waits on the connection fails.
    pub(super) fn fail(&self, error: &Error) {
        self.sender.close(error.clone(), |_, _| ());
        self.calls.close(error);
        let channels = {
            let mut registry = lock(&self.channels);
            registry.closed.get_or_insert_with(|| error.clone());
            std::mem::take(&mut registry.channels)
        };
        for channel in channels.into_iter().flatten() {
            channel.fail(error);
        }
    }

    /// The first reason stands.
    pub(super) fn set_ended(&self, error: Error) {
        self.ended.send_if_modified(|ended| {
            let first = ended.is_none();
            ended.get_or_insert(error);
            first
        });
    }
}

/// Holds the connection open: its handles and its channels share one. The connection is closed with the last.
#[derive(Debug)]
pub(super) struct Guard {
    pub(super) core: Arc<Core>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.core.begin_close(closed_here(), ReplyCode::SUCCESS, "closed");
    }
}

/// A connection to a broker.
///
/// It clones cheaply. It is closed by [`Connection::close`], or when its last handle, channel, consumer and delivery
/// are dropped. It does not come back by itself: that is for the layers above.
#[derive(Clone, Debug)]
pub struct Connection {
    guard: Arc<Guard>,
}

impl Connection {
    /// Connects, and shakes hands.
    pub async fn open(options: &Options) -> Result<Connection, Error> {
        let named = |error: Error| error.within(format!("cannot connect to {options}"));
        Connection::dial(options).await.map_err(named)
    }

    /// The same, with an error that does not name the broker.
    #[doc(hidden)]
    pub async fn dial(options: &Options) -> Result<Connection, Error> {
        handshake::dial(options).await
    }

    /// The same over a stream that a connector opens.
    #[doc(hidden)]
    pub async fn dial_with(
        options: &Options,
        connector: &impl Connector,
    ) -> Result<Connection, Error> {
        handshake::dial_with(options, connector).await
    }

    /// Shakes hands over a stream that is connected already: a pipe, a tunnel, a TLS session of one's own.
    pub async fn open_over<S>(stream: S, options: &Options) -> Result<Connection, Error>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (reader, writer) = tokio::io::split(stream);
        handshake::shake_hands(reader, writer, options).await
    }

    /// Begins to drive a connection whose handshake is done.
    pub(super) fn start<R, W>(
        reader: handshake::Reader<R>,
        writer: W,
        agreed: Agreed,
        options: &Options,
    ) -> Self
    where
        R: AsyncRead + Send + Unpin + 'static,
        W: AsyncWrite + Send + Unpin + 'static,
    {
        let core = Arc::new(Core::new(agreed, options.limits.clone()));
        tokio::spawn(driver::run(Arc::clone(&core), reader, writer));
        Connection { guard: Arc::new(Guard { core }) }
    }

    /// Another handle to a connection that something else holds open.
    pub(super) fn over(guard: Arc<Guard>) -> Self {
        Connection { guard }
    }

    fn core(&self) -> &Arc<Core> {
        &self.guard.core
    }

    /// Opens a channel.
    pub async fn open_channel(&self) -> Result<Channel, Error> {
        let channel = self.core().add_channel()?;
        let link = Link { channel, connection: Arc::clone(&self.guard) };
        Channel::open(link).await
    }

    /// What the server said of itself: product, version, capabilities.
    pub fn server_properties(&self) -> &Table<'static> {
        &self.core().agreed.server_properties
    }

    /// Who is connected, unless only the certificate says so.
    pub fn user(&self) -> Option<&str> {
        self.core().agreed.user.as_deref()
    }

    /// The largest frame that was agreed on.
    pub fn frame_max(&self) -> FrameMax {
        self.core().agreed.frame_max
    }

    /// How many channels can be open at a time.
    pub fn channel_max(&self) -> u16 {
        self.core().agreed.channel_max
    }

    /// The heartbeat interval that was agreed on; zero if there are none.
    pub fn heartbeat(&self) -> Duration {
        self.core().agreed.heartbeat
    }

    /// Why the broker blocks publishing, while it does. Publishes wait; everything else goes on.
    pub fn blocked(&self) -> watch::Receiver<Option<String>> {
        self.core().blocked.subscribe()
    }

    /// Gives the broker a new secret before the old one expires, as OAuth 2 needs it.
    pub async fn update_secret(&self, secret: &[u8], reason: &str) -> Result<(), Error> {
        let core = self.core();
        let update = connection::UpdateSecret {
            new_secret: Secret::new(secret),
            reason: reason.try_into()?,
        };
        let send = || core.sender.send(|outbound, max| Ok(outbound.method(0, &update, max)?));
        let reply = core.calls.begin(connection::UpdateSecret::NAME, Subject::None, send)?;
        let patience = core.limits.reply_timeout;
        match timeout(patience, reply).await {
            Ok(Ok(Ok(Reply::Method(Method::ConnectionUpdateSecretOk(_))))) => Ok(()),
            Ok(Ok(Err(error))) => Err(error),
            Ok(_) => Err(closed_here()),
            Err(_) => {
                let what = "the reply to connection.update-secret (the connection is closed now)";
                let error = Error::timeout(what, patience);
                core.begin_close(error.clone(), ReplyCode::SUCCESS, "no update-secret-ok came");
                Err(error)
            }
        }
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.core().ended.borrow().is_some()
    }

    /// Whether anything can be begun on it. One that has failed may yet take some time to end.
    #[doc(hidden)]
    pub fn is_usable(&self) -> bool {
        self.core().sender.is_open()
    }

    /// Whether any channel is open on it.
    #[doc(hidden)]
    pub fn has_channels(&self) -> bool {
        lock(&self.core().channels).channels.iter().any(Option::is_some)
    }

    /// Whether something waits for a broker that has fallen silent, for longer than a healthy one takes.
    #[doc(hidden)]
    pub fn is_unanswered(&self) -> bool {
        self.core().unanswered.load(Ordering::Relaxed)
    }

    /// Another connection to the same broker is dead: the reader asks whether this one is.
    #[doc(hidden)]
    pub fn suspect(&self) {
        self.core().set_suspected(true);
    }

    /// Waits until the connection has ended, and says why.
    pub async fn ended(&self) -> Error {
        let mut ended = self.core().ended.subscribe();
        match ended.wait_for(Option::is_some).await {
            Ok(error) => error.clone().unwrap_or_else(closed_here),
            Err(_) => closed_here(),
        }
    }

    /// Closes the connection: waits for outstanding confirms, then closes its channels, so that everything published
    /// before is dealt with, and then the connection itself; each up to a deadline.
    ///
    /// It never hangs, and closing twice is no error.
    pub async fn close(&self) -> Result<(), Error> {
        let core = self.core();
        let patience = core.limits.reply_timeout;
        let channels = {
            let mut registry = lock(&core.channels);
            // One that was opened from now on would not be closed before the connection is.
            registry.closed.get_or_insert_with(closed_here);
            registry.channels.clone()
        };
        let channels = || channels.iter().flatten();
        let confirmed = async {
            for channel in channels() {
                channel.until_confirmed().await;
            }
        };
        let _ = timeout(patience, confirmed).await;
        for channel in channels() {
            core.close_channel(channel, &super::link::closed_here());
        }
        let gone = async {
            for channel in channels() {
                let _ = core.until_gone(channel).await;
            }
        };
        let _ = timeout(patience, gone).await;
        core.begin_close(closed_here(), ReplyCode::SUCCESS, "closed");
        // The driver has a deadline of its own.
        self.ended().await;
        Ok(())
    }
}

pub(super) fn closed_here() -> Error {
    Error::new(ErrorKind::ConnectionClosedHere, "the connection was closed")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses and frees a number.
    fn used(registry: &mut Registry, max: u16) -> u16 {
        let number = registry.free_number(max).unwrap();
        registry.resting.push_back(number);
        number
    }

    #[test]
    fn a_channel_number_rests_before_it_is_used_again() {
        let mut registry = Registry::default();
        let first: Vec<_> = (0..=REST).map(|_| used(&mut registry, u16::MAX)).collect();
        assert!(first.is_sorted_by(|one, next| one < next), "{first:?}");
        // From here on they take turns.
        let again: Vec<_> = (0..=REST).map(|_| used(&mut registry, u16::MAX)).collect();
        assert_eq!(again, first);
    }

    #[test]
    fn where_there_are_few_numbers_the_one_that_rests_the_longest_is_next() {
        let mut registry = Registry::default();
        let numbers: Vec<_> = (0..7).map(|_| used(&mut registry, 3)).collect();
        assert_eq!(numbers, [1, 2, 3, 1, 2, 3, 1]);
        let in_use: Vec<_> = (0..3).filter_map(|_| registry.free_number(3)).collect();
        assert_eq!(in_use, [2, 3, 1]);
        assert_eq!(registry.free_number(3), None);
    }
}
