//! The broker: its virtual hosts, its users, and the tasks that serve its clients.

mod connections;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leveret_wire::FrameMax;
use tokio::io::DuplexStream;
use tokio::net::{TcpListener, TcpSocket, ToSocketAddrs, lookup_host};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use crate::alarm::Alarm;
use crate::events::{Event, Record};
use crate::faults::Faults;
use crate::profile::Profile;
use crate::session;
use crate::snapshot::{Message, Snapshot, Statistics};
use crate::time::Clock;
use crate::users::{Access, InvalidPermission, Permissions, Users};
use crate::vhost::{Host, Settings, Vhost};

use connections::Connections;
pub(crate) use connections::Enrolled;

/// How long the clients get to agree when the broker is shut down, before they are cut off.
const SHUTDOWN: Duration = Duration::from_secs(5);

/// How many clients may connect at once before the first of them is accepted: a burst must not be dropped.
const BACKLOG: u32 = 1024;

/// What a pipe to a client in the same process holds.
const PIPE: usize = 256 * 1024;

/// How to make a [`Broker`]. The default has the virtual host `/` and the user `guest` with the password `guest`.
#[derive(Clone, Debug)]
pub struct Builder {
    profile: Profile,
    users: Vec<(String, Secret)>,
    vhosts: Vec<String>,
    permissions: Vec<(String, String, Permissions)>,
    channel_max: u16,
    frame_max: FrameMax,
    heartbeat: Duration,
    /// If not given, as the profile has it.
    max_message_size: Option<u64>,
    memory_limit: usize,
    consumer_timeout: Duration,
    record: Option<usize>,
    loopback_users: Vec<String>,
}

/// A password, which is not shown.
#[derive(Clone)]
struct Secret(String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[hidden]")
    }
}

impl Default for Builder {
    fn default() -> Self {
        Builder {
            profile: Profile::default(),
            users: Vec::new(),
            vhosts: Vec::new(),
            permissions: Vec::new(),
            channel_max: 2047,
            frame_max: FrameMax::DEFAULT,
            heartbeat: Duration::from_secs(60),
            max_message_size: None,
            memory_limit: 1024 * 1024 * 1024,
            consumer_timeout: Duration::from_secs(30 * 60),
            record: None,
            loopback_users: vec!["guest".to_owned()],
        }
    }
}

impl Builder {
    /// Which RabbitMQ to behave like.
    #[must_use]
    pub fn profile(mut self, profile: Profile) -> Self {
        self.profile = profile;
        self
    }

    /// A user. With the first one, `guest` is no longer there unless it is named.
    #[must_use]
    pub fn user(mut self, name: impl Into<String>, password: impl Into<String>) -> Self {
        self.users.push((name.into(), Secret(password.into())));
        self
    }

    /// Which users may connect from this machine alone: `guest` by default. Others are refused, and so are these from
    /// elsewhere, as with a wrong password. An empty list lets all users in from anywhere.
    #[must_use]
    pub fn loopback_users(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.loopback_users = names.into_iter().map(Into::into).collect();
        self
    }

    /// A virtual host. With the first one, `/` is no longer there unless it is named.
    #[must_use]
    pub fn virtual_host(mut self, name: impl Into<String>) -> Self {
        self.vhosts.push(name.into());
        self
    }

    /// What a user may do in a virtual host. Users for whom nothing is said may do everything everywhere.
    #[must_use]
    pub fn permissions(
        mut self,
        user: impl Into<String>,
        virtual_host: impl Into<String>,
        permissions: Permissions,
    ) -> Self {
        self.permissions.push((user.into(), virtual_host.into(), permissions));
        self
    }

    /// How many channels a connection may have. 2047 by default.
    #[must_use]
    pub fn channel_max(mut self, channels: u16) -> Self {
        self.channel_max = channels;
        self
    }

    /// The heartbeat interval to propose, in whole seconds. A minute by default.
    #[must_use]
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.heartbeat = interval;
        self
    }

    /// The largest body of a message that is taken. By default 16 MiB as 4.3 has it, or 128 MiB as 3.10.
    #[must_use]
    pub fn max_message_size(mut self, bytes: u64) -> Self {
        self.max_message_size = Some(bytes);
        self
    }

    /// How much memory messages may take before publishers are stopped. 1 GiB by default. Exchanges, queues and bindings, with their
    /// names and arguments, do not count.
    ///
    /// Messages that are still being received count as well. If these alone take more than half of it, and more than the largest
    /// message may have, a connection is closed (506): the one that has sent the most, of the user and address that have.
    #[must_use]
    pub fn memory_limit(mut self, bytes: usize) -> Self {
        self.memory_limit = bytes;
        self
    }

    /// How long a consumer may keep a delivery before it is taken away from it. Half an hour by default; `Duration::MAX` is
    /// for ever.
    ///
    /// In 4.3 that is for quorum queues alone: the consumer is cancelled. In 3.10 it is for all queues, and costs the
    /// channel.
    #[must_use]
    pub fn consumer_timeout(mut self, timeout: Duration) -> Self {
        self.consumer_timeout = timeout;
        self
    }

    /// Records what happens to messages: the newest events, as many as this. See [`events`](crate::events).
    #[must_use]
    pub fn record(mut self, capacity: usize) -> Self {
        self.record = Some(capacity);
        self
    }

    /// Starts the broker, on the runtime of the caller. It has no clients yet: see [`Broker::listen`], [`Broker::run`]
    /// and [`Broker::connect`].
    ///
    /// It fails if a permission is no regular expression, or is for a user or virtual host that does not exist.
    pub fn start(self) -> Result<Broker, InvalidPermission> {
        let or = |given: Vec<String>, default: &str| {
            if given.is_empty() { vec![default.to_owned()] } else { given }
        };
        let vhosts = or(self.vhosts, "/");
        let mut users = Users::default();
        users.keep_on_loopback(self.loopback_users);
        for (name, Secret(password)) in &self.users {
            users.add(name, password);
        }
        if users.is_empty() {
            users.add("guest", "guest");
        }
        for name in users.names() {
            let own: Vec<_> = self.permissions.iter().filter(|one| one.0 == name).collect();
            for (_, vhost, permissions) in &own {
                users.permit(&name, vhost, Access::new(permissions)?);
            }
            if own.is_empty() {
                for vhost in &vhosts {
                    users.permit(&name, vhost, Access::new(&Permissions::all())?);
                }
            }
        }
        let clock = Clock::new();
        let max_message_size = self.max_message_size.unwrap_or(self.profile.max_message_size());
        let alarm = Arc::new(Alarm::new(self.memory_limit, max_message_size));
        let record = self.record.map(|capacity| Arc::new(Record::new(capacity)));
        let settings = Settings {
            profile: self.profile,
            consumer_timeout: self.consumer_timeout.as_millis().try_into().unwrap_or(u64::MAX),
            record: record.clone(),
        };
        let host = |name: &String| {
            let host = Host::new(name, settings.clone(), clock, Arc::clone(&alarm));
            (name.clone(), Arc::new(host))
        };
        let hosts: HashMap<_, _> = vhosts.iter().map(host).collect();
        let shared = Shared {
            profile: self.profile,
            users: Mutex::new(users),
            hosts,
            channel_max: self.channel_max,
            frame_max: self.frame_max,
            heartbeat: self.heartbeat,
            max_message_size,
            alarm,
            record,
            state: watch::Sender::new(State::Running),
            frozen: watch::Sender::new(false),
            connections: Mutex::default(),
            timekeepers: Mutex::new(JoinSet::new()),
            listeners: Mutex::new(JoinSet::new()),
            sessions: Mutex::new(JoinSet::new()),
        };
        shared.keep_time();
        Ok(Broker { shared: Arc::new(shared) })
    }
}

/// What all sessions of a broker share.
#[derive(Debug)]
pub(crate) struct Shared {
    profile: Profile,
    users: Mutex<Users>,
    hosts: HashMap<String, Arc<Host>>,
    channel_max: u16,
    frame_max: FrameMax,
    heartbeat: Duration,
    max_message_size: u64,
    alarm: Arc<Alarm>,
    record: Option<Arc<Record>>,
    state: watch::Sender<State>,
    frozen: watch::Sender<bool>,
    connections: Mutex<Connections>,
    timekeepers: Mutex<JoinSet<()>>,
    listeners: Mutex<JoinSet<()>>,
    sessions: Mutex<JoinSet<()>>,
}

/// Whether clients are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// New ones wait until it is over.
    Restarting,
    Stopping,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Listens on the first of these addresses that can be had.
async fn bind(addresses: impl ToSocketAddrs) -> io::Result<TcpListener> {
    let mut failure = io::Error::new(io::ErrorKind::InvalidInput, "no address to listen on");
    for address in lookup_host(addresses).await? {
        match bind_one(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn bind_one(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // A broker that is started again gets its port, even if connections of the former linger. Windows means something else by it.
    #[cfg(not(windows))]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

impl Shared {
    pub(crate) fn profile(&self) -> Profile {
        self.profile
    }

    pub(crate) fn host(&self, name: &str) -> Option<Arc<Host>> {
        self.hosts.get(name).cloned()
    }

    pub(crate) fn lets_in(&self, user: &str, password: &[u8], peer: Option<SocketAddr>) -> bool {
        lock(&self.users).lets_in(user, password, peer)
    }

    pub(crate) fn access(&self, user: &str, vhost: &str) -> Option<Arc<Access>> {
        lock(&self.users).access(user, vhost)
    }

    pub(crate) fn channel_max(&self) -> u16 {
        self.channel_max
    }

    pub(crate) fn frame_max(&self) -> FrameMax {
        self.frame_max
    }

    pub(crate) fn heartbeat_seconds(&self) -> u16 {
        u16::try_from(self.heartbeat.as_secs()).unwrap_or(u16::MAX)
    }

    pub(crate) fn max_message_size(&self) -> u64 {
        self.max_message_size
    }

    pub(crate) fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    pub(crate) fn hosts(&self) -> impl Iterator<Item = &Arc<Host>> {
        self.hosts.values()
    }

    pub(crate) fn stopping(&self) -> Stopping {
        Stopping(self.state.subscribe())
    }

    /// Waits while the broker is restarted.
    pub(crate) async fn until_started(&self) {
        let mut state = self.state.subscribe();
        let _ = state.wait_for(|state| *state != State::Restarting).await;
    }

    pub(crate) fn set_frozen(&self, frozen: bool) {
        self.frozen.send_replace(frozen);
    }

    pub(crate) fn frozen(&self) -> Frozen {
        Frozen(self.frozen.subscribe())
    }

    /// Has the deadlines of the virtual hosts kept: by tasks of this runtime, if those of another have ended with it.
    fn keep_time(&self) {
        let mut timekeepers = lock(&self.timekeepers);
        while timekeepers.try_join_next().is_some() {}
        if timekeepers.is_empty() {
            for host in self.hosts() {
                timekeepers.spawn(Arc::clone(host).keep_time());
            }
        }
    }

    /// Serves a client in a task of its own, which ends with the client or the broker.
    fn serve(self: &Arc<Self>, session: impl Future<Output = ()> + Send + 'static) {
        let mut sessions = lock(&self.sessions);
        // Those that have ended are forgotten here: it would only grow otherwise.
        while sessions.try_join_next().is_some() {}
        if *self.state.borrow() != State::Stopping {
            sessions.spawn(session);
        }
    }
}

/// Tells a session when the broker stops.
#[derive(Debug)]
pub(crate) struct Stopping(watch::Receiver<State>);

impl Stopping {
    pub(crate) async fn wait(&mut self) {
        // An error says that the broker is gone, which is as good.
        let _ = self.0.wait_for(|state| *state == State::Stopping).await;
    }
}

/// Tells a session when it is frozen.
#[derive(Debug)]
pub(crate) struct Frozen(watch::Receiver<bool>);

impl Frozen {
    /// Waits while it is.
    #[inline]
    pub(crate) async fn thawed(&mut self) {
        if *self.0.borrow() {
            let _ = self.0.wait_for(|frozen| !*frozen).await;
        }
    }
}

/// An AMQP 0-9-1 broker in this process.
///
/// It clones cheaply; all clones are the same broker. It serves until [`Broker::shutdown`], or until the runtime it was
/// started on ends.
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use leveret_broker::Broker;
///
/// let broker = Broker::builder().user("me", "secret").start()?;
/// let address = broker.listen("127.0.0.1:0").await?;
/// println!("amqp://me:secret@{address}");
/// broker.shutdown().await;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Broker {
    shared: Arc<Shared>,
}

impl Broker {
    /// How to make one.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The broker of this name in this process: `memory://NAME` connects to it. It is made, with the defaults of
    /// [`Broker::builder`], if there is none, and lives as long as the process.
    pub fn named(name: &str) -> Broker {
        static NAMED: LazyLock<Mutex<HashMap<String, Broker>>> = LazyLock::new(Mutex::default);
        let mut named = lock(&NAMED);
        if let Some(broker) = named.get(name) {
            return broker.clone();
        }
        // Its only permission is to do everything, which is a regular expression.
        let broker = Broker::builder().start().expect("a broker with the default permissions");
        named.insert(name.to_owned(), broker.clone());
        broker
    }

    #[cfg(test)]
    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Which RabbitMQ it behaves like.
    pub fn profile(&self) -> Profile {
        self.shared.profile
    }

    /// Listens, serves whoever connects, and says where: give port 0 to have one chosen.
    pub async fn listen(&self, address: impl ToSocketAddrs) -> io::Result<SocketAddr> {
        let listener = bind(address).await?;
        let address = listener.local_addr()?;
        let accepting = self.clone().run(listener);
        self.shared.keep_time();
        lock(&self.shared.listeners).spawn(async move {
            let _ = accepting.await;
        });
        Ok(address)
    }

    /// Serves whoever connects, until the broker is shut down.
    pub async fn run(self, listener: TcpListener) -> io::Result<()> {
        let mut stop = self.shared.stopping();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stop.wait() => return Ok(()),
            };
            match accepted {
                Ok((stream, peer)) => {
                    let _ = stream.set_nodelay(true);
                    let (reader, writer) = stream.into_split();
                    let shared = Arc::clone(&self.shared);
                    self.shared.serve(session::run(shared, reader, writer, Some(peer)));
                }
                // Out of files, as a rule: others may close theirs.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// A connection without a socket, to be spoken AMQP over: hand it to `leveret::amqp::Connection::open_over`.
    pub fn connect(&self) -> DuplexStream {
        self.shared.keep_time();
        let (ours, theirs) = tokio::io::duplex(PIPE);
        let (reader, writer) = tokio::io::split(ours);
        let shared = Arc::clone(&self.shared);
        self.shared.serve(session::run(shared, reader, writer, None));
        theirs
    }

    /// As if the broker had been stopped and started again: all connections are cut, without a word; durable exchanges and
    /// queues are there again, and the persistent messages in them; everything else is gone. What was delivered and not
    /// settled is `redelivered` then.
    pub async fn restart(&self) {
        if *self.shared.state.borrow() == State::Stopping {
            return;
        }
        self.shared.state.send_replace(State::Restarting);
        let mut sessions = std::mem::take(&mut *lock(&self.shared.sessions));
        // A session that is cut takes its connection out of its virtual host when it is dropped.
        sessions.shutdown().await;
        for host in self.shared.hosts() {
            host.with(Vhost::restart);
        }
        self.shared.state.send_if_modified(|state| {
            let restarting = *state == State::Restarting;
            if restarting {
                *state = State::Running;
            }
            restarting
        });
    }

    /// Makes it misbehave, for tests.
    pub fn faults(&self) -> Faults {
        Faults::new(Arc::clone(&self.shared))
    }

    /// What is in it now.
    pub fn snapshot(&self) -> Snapshot {
        let mut virtual_hosts: Vec<_> =
            self.shared.hosts().map(|host| host.with(|vhost| vhost.snapshot())).collect();
        virtual_hosts.sort_by(|a, b| a.name.cmp(&b.name));
        Snapshot { virtual_hosts, memory: self.shared.alarm.used() }
    }

    /// What it has to do, in numbers: cheaper than a [`Broker::snapshot`].
    pub fn statistics(&self) -> Statistics {
        let mut sum = Statistics { memory: self.shared.alarm.used(), ..Statistics::default() };
        for host in self.shared.hosts() {
            host.with(|vhost| vhost.add_to(&mut sum));
        }
        sum
    }

    /// The first messages of a queue that wait to be delivered; they stay there. `None` if there is no such queue.
    pub fn peek(&self, virtual_host: &str, queue: &str, count: usize) -> Option<Vec<Message>> {
        self.shared.host(virtual_host)?.with(|vhost| vhost.peek(queue, count))
    }

    /// What happened to messages, oldest first, as far as it was to be recorded: see [`Builder::record`].
    pub fn events(&self) -> Vec<Event> {
        self.shared.record.as_ref().map(|record| record.events()).unwrap_or_default()
    }

    /// The same, and the record is empty then.
    pub fn take_events(&self) -> Vec<Event> {
        self.shared.record.as_ref().map(|record| record.take()).unwrap_or_default()
    }

    /// Ends the broker: clients are told and get a moment to agree; then they are cut off. It never hangs.
    pub async fn shutdown(&self) {
        self.shared.state.send_replace(State::Stopping);
        self.shared.set_frozen(false);
        let deadline = Instant::now() + SHUTDOWN;
        let mut sessions = std::mem::take(&mut *lock(&self.shared.sessions));
        while let Ok(Some(_)) = timeout_at(deadline, sessions.join_next()).await {}
        sessions.shutdown().await;
        for tasks in [&self.shared.listeners, &self.shared.timekeepers] {
            let mut tasks = std::mem::take(&mut *lock(tasks));
            tasks.shutdown().await;
        }
    }
}
