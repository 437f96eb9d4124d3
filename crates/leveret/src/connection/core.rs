//! What the handles of a client, its lines, publishers and consumers share.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::backoff::Backoff;
use super::endpoint::Endpoints;
use super::event::{Announcer, ClientEvent};
use super::extensions::Extensions;
use super::managed::{ManagedConnection, Role};
use super::registry::Registry;
use crate::amqp::lock;
use crate::error::Error;
use crate::topology::Remembered;

/// How a client connects and comes back.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) name: String,
    pub(crate) connect: ConnectLimits,
    pub(crate) backoff: Backoff,
    pub(crate) give_up_after: Option<Duration>,
    pub(crate) max_subscriptions: usize,
    pub(crate) timeout: Duration,
    pub(crate) check_every: Duration,
}

/// How long a client tries to connect for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectLimits {
    /// How many times it tries again. 25 by default.
    pub max_retries: u32,
    /// How long it goes on trying, the last attempt excluded. 15 seconds by default: enough for a broker that starts
    /// together with the program, and not much to wait for one that never will.
    pub within: Duration,
}

impl Default for ConnectLimits {
    fn default() -> Self {
        ConnectLimits { max_retries: 25, within: Duration::from_secs(15) }
    }
}

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) options: Options,
    pub(crate) endpoints: Endpoints,
    pub(crate) remembered: Remembered,
    pub(crate) extensions: Extensions,
    pub(crate) health: Registry,
    announcer: Announcer,
    lines: Mutex<Lines>,
    closing: watch::Sender<bool>,
    runtime: Handle,
}

/// The lines by what they are for.
#[derive(Debug, Default)]
struct Lines {
    /// The first one is home, and stays.
    consuming: Vec<Consuming>,
    /// By their numbers. The first one stays once it is there.
    publishing: BTreeMap<usize, Publishing>,
    /// Those that end when their last channel is closed.
    retired: Vec<Arc<ManagedConnection>>,
}

impl Lines {
    /// A line is no longer in use.
    fn retire(&mut self, line: Arc<ManagedConnection>) {
        line.retire();
        self.retired.retain(|line| !line.has_ended());
        self.retired.push(line);
    }
}

/// A line for consuming.
#[derive(Debug)]
struct Consuming {
    line: Arc<ManagedConnection>,
    /// Of no other one at this time.
    number: usize,
    subscriptions: usize,
}

/// A line for publishing.
#[derive(Debug)]
struct Publishing {
    line: Arc<ManagedConnection>,
    /// How many pools have channels on it.
    pools: usize,
}

impl Core {
    /// In the runtime in which this is called: all that works for the client works there, whoever asks for it first.
    pub(crate) fn new(options: Options, endpoints: Endpoints) -> Arc<Self> {
        Arc::new(Core {
            options,
            endpoints,
            remembered: Remembered::default(),
            extensions: Extensions::default(),
            health: Registry::default(),
            announcer: Announcer::new(),
            lines: Mutex::default(),
            closing: watch::Sender::new(false),
            runtime: Handle::current(),
        })
    }

    /// Begins what lives as long as the client, or until its owner ends it: in the client's runtime, and not in that of whoever
    /// needs it first, which may end before.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.runtime.spawn(work)
    }

    pub(crate) fn announcer(&self) -> &Announcer {
        &self.announcer
    }

    pub(crate) fn announce(&self, event: ClientEvent) {
        self.announcer.announce(event);
    }

    /// Turns true when the client is closed.
    pub(crate) fn closing(&self) -> watch::Receiver<bool> {
        self.closing.subscribe()
    }

    pub(crate) fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }

    /// Says whether this is the first time.
    pub(crate) fn begin_close(&self) -> bool {
        !self.closing.send_replace(true)
    }

    pub(crate) fn check_open(&self) -> Result<(), Error> {
        if self.is_closing() { Err(Error::closed("the client")) } else { Ok(()) }
    }

    /// The line on which everything is declared.
    pub(crate) fn home(self: &Arc<Self>) -> Arc<ManagedConnection> {
        let mut lines = lock(&self.lines);
        if lines.consuming.is_empty() {
            let line = self.start(Role::Home, 0);
            lines.consuming.push(Consuming { line, number: 0, subscriptions: 0 });
        }
        Arc::clone(&lines.consuming[0].line)
    }

    /// The line for publishing that all share.
    pub(crate) fn publishing(self: &Arc<Self>) -> Arc<ManagedConnection> {
        Arc::clone(&self.publishing_at(&mut lock(&self.lines), 0).line)
    }

    fn publishing_at<'a>(
        self: &Arc<Self>,
        lines: &'a mut Lines,
        number: usize,
    ) -> &'a mut Publishing {
        let start = || Publishing { line: self.start(Role::Publishing, number), pools: 0 };
        lines.publishing.entry(number).or_insert_with(start)
    }

    /// A place for a pool on one of the lines for publishing.
    pub(crate) fn publish_pooled(self: &Arc<Self>, number: usize) -> PoolPlace {
        let mut lines = lock(&self.lines);
        let publishing = self.publishing_at(&mut lines, number);
        publishing.pools += 1;
        PoolPlace { core: Arc::clone(self), number, line: Arc::clone(&publishing.line) }
    }

    /// A pool is gone. With its last one, a line other than the first ends.
    fn leave_pooled(&self, number: usize) {
        let mut lines = lock(&self.lines);
        let Some(publishing) = lines.publishing.get_mut(&number) else { return };
        publishing.pools -= 1;
        if number > 0
            && publishing.pools == 0
            && let Some(Publishing { line, .. }) = lines.publishing.remove(&number)
        {
            lines.retire(line);
        }
    }

    /// A place on a line for consuming: the first with room, or a new one.
    pub(crate) fn subscribe(self: &Arc<Self>, needs_home: bool) -> Subscription {
        self.home();
        let mut lines = lock(&self.lines);
        let max = self.options.max_subscriptions;
        let free = lines.consuming.iter().position(|one| one.subscriptions < max);
        let index = match free {
            _ if needs_home => 0,
            Some(index) => index,
            None => {
                let is_free =
                    |number: &usize| lines.consuming.iter().all(|one| one.number != *number);
                let number = (0..).find(is_free).unwrap_or_default();
                let line = self.start(Role::Consuming, number);
                lines.consuming.push(Consuming { line, number, subscriptions: 0 });
                lines.consuming.len() - 1
            }
        };
        let one = &mut lines.consuming[index];
        one.subscriptions += 1;
        Subscription { core: Arc::clone(self), line: Arc::clone(&one.line) }
    }

    /// A subscription has ended. With its last one, a line other than home ends.
    fn unsubscribe(&self, line: &Arc<ManagedConnection>) {
        let mut lines = lock(&self.lines);
        let is_it = |one: &Consuming| Arc::ptr_eq(&one.line, line);
        let Some(index) = lines.consuming.iter().position(is_it) else { return };
        lines.consuming[index].subscriptions -= 1;
        if index > 0 && lines.consuming[index].subscriptions == 0 {
            let line = lines.consuming.remove(index).line;
            lines.retire(line);
        }
    }

    fn start(self: &Arc<Self>, role: Role, index: usize) -> Arc<ManagedConnection> {
        let what = if role == Role::Publishing { "publishing" } else { "consuming" };
        let number = if index == 0 { String::new() } else { format!(" {}", index + 1) };
        let name = format!("{} ({what}{number})", self.options.name);
        Arc::new(ManagedConnection::start(self, name, role))
    }

    /// All lines in use.
    pub(crate) fn lines(&self) -> Vec<Arc<ManagedConnection>> {
        let lines = lock(&self.lines);
        let consuming = lines.consuming.iter().map(|one| &one.line);
        let publishing = lines.publishing.values().map(|one| &one.line);
        consuming.chain(publishing).cloned().collect()
    }

    /// Those that may still have a connection to close, and are not in use.
    pub(crate) fn retired_lines(&self) -> Vec<Arc<ManagedConnection>> {
        lock(&self.lines).retired.clone()
    }
}

/// A consumer's place on a line, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Subscription {
    core: Arc<Core>,
    pub(crate) line: Arc<ManagedConnection>,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.core.unsubscribe(&self.line);
    }
}

/// A pool's place on a line, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct PoolPlace {
    core: Arc<Core>,
    number: usize,
    pub(crate) line: Arc<ManagedConnection>,
}

impl Drop for PoolPlace {
    fn drop(&mut self) {
        self.core.leave_pooled(self.number);
    }
}
