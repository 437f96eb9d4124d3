//! The connections of a broker, as far as others may end them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use leveret_wire::ReplyCode;
use tokio::sync::Notify;

use super::{Shared, lock};
use crate::refusal::Refusal;

/// The connections there are, and how to cut them.
#[derive(Debug, Default)]
pub(super) struct Connections {
    next: u64,
    all: HashMap<u64, Arc<Connected>>,
}

/// Where a connection comes from: a user at an address, unless it is in this process.
pub(crate) type Origin = (String, Option<IpAddr>);

/// A connection, as far as others may end it.
#[derive(Debug)]
struct Connected {
    name: Option<String>,
    from: Origin,
    cut: Notify,
    /// It is to be closed because of what it holds.
    refuse: Notify,
    /// How much it has sent of messages that are not finished.
    unfinished: AtomicUsize,
}

impl Shared {
    /// A connection that may be cut by its name, for as long as what is returned is held.
    pub(crate) fn enrol(self: &Arc<Self>, name: Option<String>, from: Origin) -> Enrolled {
        let mut connections = lock(&self.connections);
        connections.next += 1;
        let number = connections.next;
        let (cut, refuse) = (Notify::new(), Notify::new());
        let connected =
            Arc::new(Connected { name, from, cut, refuse, unfinished: AtomicUsize::new(0) });
        connections.all.insert(number, Arc::clone(&connected));
        Enrolled { shared: Arc::clone(self), number, connected }
    }

    /// Cuts the connections with such names. Says how many there are.
    pub(crate) fn cut(&self, which: impl Fn(Option<&str>) -> bool) -> usize {
        let connections = lock(&self.connections);
        let chosen = connections.all.values().filter(|found| which(found.name.as_deref()));
        chosen.map(|found| found.cut.notify_one()).count()
    }

    /// Refuses the connection that has sent the most of unfinished messages, of those who have sent the most in all their
    /// connections together: otherwise many connections with a little less each would have others refused.
    fn refuse_greediest(&self) {
        let connections = lock(&self.connections);
        let mut totals: HashMap<&Origin, usize> = HashMap::new();
        for one in connections.all.values() {
            *totals.entry(&one.from).or_default() += one.unfinished();
        }
        let greed = |one: &&Arc<Connected>| (totals.get(&one.from).copied(), one.unfinished());
        let greediest = connections.all.values().max_by_key(greed);
        if let Some(greediest) = greediest {
            greediest.refuse.notify_one();
        }
    }
}

impl Connected {
    fn unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Relaxed)
    }
}

/// A connection among those that others can end.
#[derive(Debug)]
pub(crate) struct Enrolled {
    shared: Arc<Shared>,
    number: u64,
    connected: Arc<Connected>,
}

impl Enrolled {
    /// Waits until it is cut.
    pub(crate) async fn cut(&self) {
        self.connected.cut.notified().await;
    }

    /// Waits until it holds the most of too many unfinished messages.
    pub(crate) async fn refused(&self) -> Refusal {
        self.connected.refuse.notified().await;
        let text = format!(
            "low on memory: of all messages that are still being received, this connection has sent the most, {} bytes",
            self.connected.unfinished()
        );
        Refusal::new(ReplyCode::RESOURCE_ERROR, text)
    }

    /// It has sent so much of messages that are not finished. If all connections have sent too much, the greediest is refused.
    pub(crate) fn set_unfinished(&self, bytes: usize) {
        let before = self.connected.unfinished.swap(bytes, Ordering::Relaxed);
        if before != bytes && self.shared.alarm.unfinished_changed(before, bytes) && before < bytes
        {
            self.shared.refuse_greediest();
        }
    }
}

impl Drop for Enrolled {
    fn drop(&mut self) {
        self.set_unfinished(0);
        lock(&self.shared.connections).all.remove(&self.number);
    }
}
