//! A line: one connection to the broker that is made again whenever it is lost.
//!
//! ```text
//!            +--> Down --- connected, topology restored ---> Up ---+
//!            |      |                                         |    |
//!            |      +-- closed, or given up --> Ended <-------+    |
//!            +------------------------- lost ----------------------+
//! ```
//!
//! One task drives it. Whoever uses the line waits for it to be up, works on that connection, and comes back for the next
//! one when it fails.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::core::Core;
use super::endpoint::Endpoint;
use super::event::ClientEvent;
use crate::amqp::{self, Connection, ErrorKind as Amqp, lock};
use crate::error::{Error, ErrorKind};
use crate::topology::{Declarer, Failed};

/// How often the connection of a retired line is looked at.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// What a line is for. Publishers and consumers do not share one, so that a broker that blocks publishers does not delay
/// acks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The first one for consuming, on which everything is declared and which owns exclusive queues.
    Home,
    Consuming,
    Publishing,
}

impl Role {
    fn declarer(self) -> Declarer {
        match self {
            Role::Home => Declarer::Home,
            Role::Consuming | Role::Publishing => Declarer::Other,
        }
    }
}

/// Where a line stands.
#[derive(Clone, Debug)]
pub(crate) enum State {
    /// There is no connection: not yet, or because of this.
    Down(Option<Error>),
    Up(LiveConnection),
    /// There will be none any more.
    Ended(Error),
}

/// A line's connection of the moment.
#[derive(Clone, Debug)]
pub(crate) struct LiveConnection {
    pub(crate) connection: Connection,
    /// To which broker, by its place among the client's endpoints.
    pub(crate) index: usize,
    /// And for people.
    pub(crate) endpoint: Arc<str>,
}

impl LiveConnection {
    fn new(connection: Connection, index: usize, endpoint: &Endpoint) -> LiveConnection {
        LiveConnection { connection, index, endpoint: endpoint.to_string().into() }
    }

    /// Why another connection is left for this one.
    fn left(&self, other: &LiveConnection) -> Error {
        let text = format!(
            "the connection to {} is left for one to {}, where the client's other connections are",
            other.endpoint, self.endpoint
        );
        Error::new(ErrorKind::Lost, text)
    }
}

/// The broker takes no publishes on a line: why, and since when.
#[derive(Clone, Debug)]
pub(crate) struct Blocked {
    pub(crate) reason: String,
    pub(crate) since: Instant,
}

/// The handle to a line.
#[derive(Debug)]
pub(crate) struct ManagedConnection {
    pub(crate) name: String,
    state: watch::Receiver<State>,
    blocked: Arc<Mutex<Option<Blocked>>>,
    retired: Arc<Notify>,
    not_restored: Arc<Mutex<Vec<Failed>>>,
    task: JoinHandle<()>,
}

impl ManagedConnection {
    /// Begins to connect.
    pub(crate) fn start(core: &Arc<Core>, name: String, role: Role) -> ManagedConnection {
        let (sender, state) = watch::channel(State::Down(None));
        let (blocked, not_restored, retired) = (Arc::default(), Arc::default(), Arc::default());
        let driver = Driver {
            core: Arc::clone(core),
            name: name.clone(),
            role,
            state: sender,
            blocked: Arc::clone(&blocked),
            not_restored: Arc::clone(&not_restored),
            retired: Arc::clone(&retired),
        };
        let task = core.spawn(driver.run());
        ManagedConnection { name, state, blocked, not_restored, retired, task }
    }

    pub(crate) fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Why the broker takes no publishes on it, while it does not.
    pub(crate) fn blocked(&self) -> Option<Blocked> {
        lock(&self.blocked).clone()
    }

    /// What of the topology could not be declared on its connection, and why.
    pub(crate) fn not_restored(&self) -> Vec<Failed> {
        lock(&self.not_restored).clone()
    }

    /// What was attempted on it did not happen in time: why, if the broker has said.
    pub(crate) fn timed_out(&self, what: impl fmt::Display, after: Duration) -> Error {
        match self.blocked() {
            Some(Blocked { reason, .. }) => Error::blocked(what, after, reason),
            None => Error::timed_out(what, after),
        }
    }

    /// What an error means for what was attempted on it.
    pub(crate) fn failed(&self, what: impl fmt::Display, error: amqp::Error) -> Error {
        match self.blocked() {
            Some(Blocked { reason, .. }) if error.kind() == Amqp::Timeout => {
                Error::caused_by_block(what, error, reason)
            }
            _ => Error::from_amqp(what.to_string(), error),
        }
    }

    /// The connection, as soon as there is one, or the reason why there will be none.
    pub(crate) async fn up(&self) -> Result<LiveConnection, Error> {
        let mut state = self.state.clone();
        let settled = state.wait_for(|state| match state {
            State::Down(_) => false,
            // Its driver notices when it has ended.
            State::Up(up) => up.connection.is_usable(),
            State::Ended(_) => true,
        });
        let settled = settled.await;
        match settled.as_deref() {
            Ok(State::Up(up)) => Ok(up.clone()),
            Ok(State::Ended(error)) => Err(error.clone()),
            _ => Err(Error::ended_with_its_runtime(format!("connection {:?}", self.name))),
        }
    }

    /// Attempts something on the connection, as soon as there is one, and again on the next one if that is lost meanwhile; up to
    /// a deadline, which was so far away.
    pub(crate) async fn attempt<T, F>(
        &self,
        what: impl fmt::Display,
        deadline: Instant,
        patience: Duration,
        attempt: impl Fn(LiveConnection) -> F,
    ) -> Result<T, Error>
    where
        // Not `AsyncFn`: a future that calls one cannot be spawned.
        F: Future<Output = Result<T, amqp::Error>>,
    {
        let late = |_| self.timed_out(&what, patience);
        loop {
            let up = timeout_at(deadline, self.up()).await.map_err(late)??;
            match timeout_at(deadline, attempt(up)).await.map_err(late)? {
                Err(error) if error.is_connection_error() => {}
                done => return done.map_err(|error| self.failed(&what, error)),
            }
        }
    }

    /// Ends it as soon as its connection has no channel. Deliveries may outlive the consumer they came to, and hold one.
    pub(crate) fn retire(&self) {
        self.retired.notify_one();
    }

    /// Whether its task is done.
    pub(crate) fn has_ended(&self) -> bool {
        self.state.has_changed().is_err()
    }

    /// Its state, for tasks that follow each change.
    pub(crate) fn states(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    /// Waits until its task is done.
    pub(crate) async fn ended(&self) {
        let mut state = self.state.clone();
        // The other end goes with the task.
        while state.changed().await.is_ok() {}
    }
}

impl Drop for ManagedConnection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What makes the connection, and makes it again.
struct Driver {
    core: Arc<Core>,
    name: String,
    role: Role,
    state: watch::Sender<State>,
    blocked: Arc<Mutex<Option<Blocked>>>,
    retired: Arc<Notify>,
    not_restored: Arc<Mutex<Vec<Failed>>>,
}

impl Driver {
    async fn run(self) {
        let mut closing = self.core.closing();
        let error = tokio::select! {
            error = self.keep_connected() => error,
            _ = closing.wait_for(|closing| *closing) => Error::closed("the client"),
            () = self.until_unused() => Error::closed("the connection"),
        };
        if error.kind() != ErrorKind::Closed {
            let (connection, error) = (self.name.clone(), error.clone());
            self.core.announce(ClientEvent::GaveUp { connection, error });
        }
        let last = self.state.send_replace(State::Ended(error));
        if let State::Up(up) = last {
            // It has its own deadlines.
            let _ = up.connection.close().await;
        }
    }

    /// Waits until the line is retired, and its connection has no channel.
    async fn until_unused(&self) {
        self.retired.notified().await;
        let has_channels = || match &*self.state.borrow() {
            State::Up(up) => up.connection.has_channels(),
            State::Down(_) | State::Ended(_) => false,
        };
        while has_channels() {
            sleep(BETWEEN_LOOKS).await;
        }
    }

    /// Connects again and again. Returns why it gave up.
    async fn keep_connected(&self) -> Error {
        let (mut again, mut short_lived) = (false, 0);
        let (mut at_home, mut silent) = (None, None);
        loop {
            let up = match at_home.take() {
                Some(connected) => connected,
                None => match self.connect(again, short_lived, silent).await {
                    Ok(connected) => connected,
                    Err(error) => return error,
                },
            };
            let _in_use = InUse::new(&self.core, up.index, self.role == Role::Home);
            let began = Instant::now();
            let failed = self.restore(&up.connection).await;
            if let Some(error) = silence(&failed) {
                // Another one may answer.
                short_lived += 1;
                silent = Some(Silent::Topology(up.index));
                let (connection, error) = (self.name.clone(), error.clone());
                self.core.announce(ClientEvent::ConnectFailed { connection, error });
                continue;
            }
            silent = None;
            if up.connection.is_usable() {
                self.announce_not_restored(&failed);
                lock(&self.not_restored).clone_from(&failed);
                self.state.send_replace(State::Up(up.clone()));
                let endpoint = up.endpoint.to_string();
                let connection = self.name.clone();
                self.core.announce(ClientEvent::Connected { connection, endpoint, again });
                again = true;
            }
            let error = tokio::select! {
                error = self.stay(&up.connection, failed) => {
                    Error::from_amqp(format!("the connection to {}", up.endpoint), error)
                }
                connected = self.connected_at_home(up.index) => at_home.insert(connected).left(&up),
            };
            *lock(&self.blocked) = None;
            lock(&self.not_restored).clear();
            if error.amqp().is_some_and(|error| error.kind() == Amqp::HeartbeatLost) {
                silent = Some(Silent::Connection(up.index));
                self.suspect_others(up.index);
            }
            self.state.send_replace(State::Down(Some(error.clone())));
            self.core.announce(ClientEvent::Lost { connection: self.name.clone(), error });
            if at_home.is_some() {
                // It has its own deadlines. What was not confirmed by then is published again.
                let _ = up.connection.close().await;
            }
            // One that is lost as soon as it is made must not be made again without a pause.
            let is_short = began.elapsed() < self.core.options.backoff.initial.saturating_mul(2);
            short_lived = if is_short { short_lived + 1 } else { 0 };
        }
    }

    /// Has the client's other connections to this endpoint ask whether the broker is there.
    fn suspect_others(&self, index: usize) {
        for line in self.core.lines() {
            if let State::Up(up) = line.state()
                && up.index == index
            {
                up.connection.suspect();
            }
        }
    }

    /// Waits for home to be with another endpoint than this line, and for a connection to that: what is published to one
    /// broker is not found by those who consume from another. Until there is one, the line is of more use where it is.
    async fn connected_at_home(&self, index: usize) -> LiveConnection {
        if self.role == Role::Home {
            return std::future::pending().await;
        }
        let mut home_state = self.core.home().state.clone();
        loop {
            let endpoints = &self.core.endpoints;
            let mut attempt = 0;
            while endpoints.home_elsewhere(index).is_some() {
                sleep(self.core.options.backoff.pause(attempt)).await;
                // Home may have come here meanwhile, and also while this connects.
                let Some((home, endpoint)) = endpoints.home_elsewhere(index) else { break };
                if let Ok(connection) = self.connect_and_ask(endpoint).await
                    && endpoints.home_elsewhere(index).is_some_and(|(now, _)| now == home)
                {
                    return LiveConnection::new(connection, home, endpoint);
                }
                attempt += 1;
            }
            if home_state.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Tries all endpoints in turn, with growing pauses, as often as allowed.
    async fn connect(
        &self,
        again: bool,
        short_lived: u32,
        silent: Option<Silent>,
    ) -> Result<LiveConnection, Error> {
        let options = &self.core.options;
        let limits = &options.connect;
        // Only `ClientBuilder::connect` gives up so soon. A line that a working client opens later lives as long as the client.
        let is_first = !again && self.role == Role::Home;
        let (within, max_retries) = match is_first {
            true => (Some(limits.within), limits.max_retries),
            false => (options.give_up_after, u32::MAX),
        };
        let began = Instant::now();
        for round in 0u32.. {
            let silent = silent.filter(|_| round == 0);
            let before = short_lived.saturating_add(round);
            if before > 0 {
                let left =
                    within.map_or(Duration::MAX, |within| within - began.elapsed().min(within));
                sleep(options.backoff.pause(before - 1).min(left)).await;
            }
            let (error, permanent) = match self.try_endpoints(silent).await {
                Ok(connected) => return Ok(connected),
                Err(failed) => failed,
            };
            let (connection, elapsed) = (self.name.clone(), began.elapsed());
            let is_last = (permanent && is_first)
                || round >= max_retries
                || within.is_some_and(|within| elapsed >= within);
            let event = ClientEvent::ConnectFailed { connection, error: error.clone() };
            self.core.announce(event);
            if is_last {
                return Err(error.after_attempts(round + 1, elapsed));
            }
        }
        unreachable!("rounds are not counted beyond what is allowed")
    }

    /// The first endpoint that answers; or why none does, and whether there is no use in trying again.
    async fn try_endpoints(&self, silent: Option<Silent>) -> Result<LiveConnection, (Error, bool)> {
        let mut errors = Vec::new();
        let mut endpoints = self.core.endpoints.in_order();
        endpoints.sort_by_key(|(index, _)| silent == Some(Silent::Topology(*index)));
        let has_others = endpoints.len() > 1;
        for (index, endpoint) in endpoints {
            let is_doubtful = has_others && silent == Some(Silent::Connection(index));
            let connected = match is_doubtful {
                true => {
                    let late =
                        |_| Err(amqp::Error::timeout("an answer after it fell silent", DOUBTFUL));
                    let connecting = timeout(DOUBTFUL, self.connect_and_ask(endpoint));
                    connecting.await.unwrap_or_else(late)
                }
                false => endpoint.connect(&self.name).await,
            };
            match connected {
                Ok(connection) => return Ok(LiveConnection::new(connection, index, endpoint)),
                Err(error) => errors.push((endpoint, error)),
            }
        }
        let permanent = errors.iter().all(|(_, error)| is_permanent(error));
        Err((unreachable_endpoints(errors), permanent))
    }

    /// Connects to an endpoint, and waits for an answer to more than the handshake.
    async fn connect_and_ask(&self, endpoint: &Endpoint) -> Result<Connection, amqp::Error> {
        let connection = endpoint.connect(&self.name).await?;
        connection.open_channel().await?.close().await?;
        Ok(connection)
    }

    /// Restores the topology. Other lines than home wait for what is exclusive, which only home can restore: nothing is
    /// to be published before all of it is back.
    async fn restore(&self, connection: &Connection) -> Vec<Failed> {
        let failed = self.core.remembered.restore(connection, self.role.declarer()).await;
        if self.role != Role::Home && self.core.remembered.has_exclusive() {
            tokio::select! {
                _ = connection.ended() => {}
                () = self.until_home_answers() => {}
            }
        }
        failed
    }

    /// Home may have lost its connection and not know it yet, so it has to be heard of.
    async fn until_home_answers(&self) {
        let home = self.core.home();
        while let Ok(up) = home.up().await {
            if let Ok(channel) = up.connection.open_channel().await {
                let _ = channel.close().await;
                return;
            }
            // One that refuses a channel is there.
            if up.connection.is_usable() {
                return;
            }
        }
    }

    /// Stays until the connection ends; meanwhile, tries to restore what could not be restored.
    async fn stay(&self, connection: &Connection, mut failed: Vec<Failed>) -> amqp::Error {
        let mut blocked = connection.blocked();
        if blocked.borrow().is_some() {
            blocked.mark_changed();
        }
        let mut tries = 0;
        loop {
            tokio::select! {
                error = connection.ended() => return error,
                Ok(()) = blocked.changed() => {
                    let reason = blocked.borrow_and_update().clone();
                    self.announce_blocked(reason);
                }
                () = sleep(self.core.options.backoff.pause(tries)), if !failed.is_empty() => {
                    failed = self.restore_again(connection, failed).await;
                    lock(&self.not_restored).clone_from(&failed);
                    tries += 1;
                }
            }
        }
    }

    async fn restore_again(&self, connection: &Connection, failed: Vec<Failed>) -> Vec<Failed> {
        let names: BTreeSet<String> = failed.into_iter().map(|(name, _)| name).collect();
        let declarer = self.role.declarer();
        let remembered = &self.core.remembered;
        let wanted = |name: &str| names.contains(name);
        let failed = remembered.restore_some(connection, declarer, wanted).await;
        if !connection.is_usable() {
            return failed;
        }
        let still: BTreeSet<&String> = failed.iter().map(|(name, _)| name).collect();
        for object in names.iter().filter(|name| !still.contains(name)) {
            self.core.announce(ClientEvent::Restored { object: object.clone() });
        }
        failed
    }

    fn announce_not_restored(&self, failed: &[Failed]) {
        for (object, error) in failed.iter().cloned() {
            self.core.announce(ClientEvent::NotRestored { object, error });
        }
    }

    fn announce_blocked(&self, reason: Option<String>) {
        let since = Instant::now();
        *lock(&self.blocked) = reason.clone().map(|reason| Blocked { reason, since });
        let connection = self.name.clone();
        self.core.announce(match reason {
            Some(reason) => ClientEvent::Blocked { connection, reason },
            None => ClientEvent::Unblocked { connection },
        });
    }
}

/// The endpoint that fell silent before the next attempt to connect, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Silent {
    /// Its connection died of silence. The broker may be there all the same, so it is tried in its turn, but for less time.
    Connection(usize),
    /// It let the client in and did not answer a declaration: it is tried last.
    Topology(usize),
}

/// How long connecting to an endpoint that may be silent takes at most, if there are others.
const DOUBTFUL: Duration = Duration::from_secs(3);

/// Counts a connection for as long as it lives.
struct InUse<'a> {
    core: &'a Core,
    index: usize,
    is_home: bool,
}

impl<'a> InUse<'a> {
    fn new(core: &'a Core, index: usize, is_home: bool) -> Self {
        core.endpoints.connected(index, is_home);
        InUse { core, index, is_home }
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        self.core.endpoints.disconnected(self.index, self.is_home);
    }
}

/// A broker that lets one in and then does not answer is as good as none.
fn silence(failed: &[Failed]) -> Option<&Error> {
    failed.iter().map(|(_, error)| error).find(|error| error.kind() == ErrorKind::TimedOut)
}

/// Whether trying again cannot help before somebody changes something.
fn is_permanent(error: &amqp::Error) -> bool {
    matches!(
        error.kind(),
        Amqp::Authentication | Amqp::VirtualHost | Amqp::InvalidArgument | Amqp::Tls
    )
}

fn unreachable_endpoints(mut errors: Vec<(&Endpoint, amqp::Error)>) -> Error {
    match errors.len() {
        1 => {
            let (endpoint, error) = errors.remove(0);
            Error::from_amqp(format!("cannot connect to {endpoint}"), error)
        }
        _ => {
            let each = errors.iter().map(|(endpoint, error)| format!("\n  {endpoint}: {error}"));
            let text =
                format!("cannot connect to any of these brokers:{}", each.collect::<String>());
            let is_refusal = |error: &amqp::Error| {
                matches!(error.kind(), Amqp::Authentication | Amqp::VirtualHost)
            };
            let refused = errors.iter().all(|(_, error)| is_refusal(error));
            let kind = if refused { ErrorKind::Refused } else { ErrorKind::Unreachable };
            Error::new(kind, text)
        }
    }
}
