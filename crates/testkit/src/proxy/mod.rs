//! A TCP proxy on loopback that breaks connections in chosen ways.

mod connection;
mod fault;

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use reqwest::Url;
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs, lookup_host};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use connection::Connection;
use fault::Faults;
pub use fault::{Corruption, Cut, Direction};

/// A TCP proxy on loopback to one server, whose faults are switched on and off while connections
/// run.
///
/// A fault applies to open and to new connections, and faults add up. Without any, bytes pass as
/// they come. When this is dropped, the listener and all connections go with it.
#[derive(Debug)]
pub struct FaultProxy {
    addr: SocketAddr,
    faults: watch::Sender<Faults>,
    listening: watch::Receiver<bool>,
    counters: Arc<Counters>,
    accepting: AbortHandle,
}

/// What a [`FaultProxy`] has seen so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Connections accepted.
    pub connections: u64,
    /// Connections that are open now.
    pub open: u64,
    /// Bytes read from clients.
    pub to_server: u64,
    /// Bytes read from the server.
    pub to_client: u64,
}

#[derive(Debug, Default)]
struct Counters {
    connections: AtomicU64,
    closed: AtomicU64,
    to_server: AtomicU64,
    to_client: AtomicU64,
}

impl FaultProxy {
    /// Opens a proxy to the server at this address. The server need not be there yet: a connection
    /// for which it cannot be reached is reset.
    ///
    /// # Panics
    /// If the address cannot be resolved.
    pub async fn to(upstream: impl ToSocketAddrs + std::fmt::Debug) -> FaultProxy {
        let resolved = lookup_host(&upstream).await.ok().and_then(|mut addresses| addresses.next());
        let upstream =
            resolved.unwrap_or_else(|| panic!("{upstream:?} is no address a proxy could lead to"));
        let listener = crate::port::listener();
        let addr = listener.local_addr().expect("a listener has an address");
        let listener = listener
            .set_nonblocking(true)
            .and_then(|()| TcpListener::from_std(listener))
            .unwrap_or_else(|error| panic!("could not listen on {addr}: {error}"));

        let counters = Arc::new(Counters::default());
        let (faults, switched) = watch::channel(Faults::default());
        let (heard, listening) = watch::channel(true);
        let accepting = tokio::spawn(accept(listener, upstream, switched, heard, counters.clone()))
            .abort_handle();
        FaultProxy { addr, faults, listening, counters, accepting }
    }

    /// Where it listens, instead of the server.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// A URL of the server, changed to lead through the proxy.
    ///
    /// # Panics
    /// If it is no URL with a host.
    pub fn url(&self, original: &str) -> String {
        let mut url =
            Url::parse(original).unwrap_or_else(|error| panic!("{original:?} is no URL: {error}"));
        url.set_ip_host(self.addr.ip())
            .and_then(|()| url.set_port(Some(self.addr.port())))
            .unwrap_or_else(|()| panic!("{original:?} names no host"));
        url.to_string()
    }

    /// What has passed so far.
    pub fn seen(&self) -> Seen {
        let count = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        // Closed first: a connection that closes in between must not make the difference negative.
        let closed = count(&self.counters.closed);
        let connections = count(&self.counters.connections);
        Seen {
            connections,
            open: connections - closed,
            to_server: count(&self.counters.to_server),
            to_client: count(&self.counters.to_client),
        }
    }

    /// Ends every open connection, on both sides. New ones are welcome, and a connection counts as
    /// new until the proxy has got round to accepting it (see [`seen`](Self::seen)).
    pub fn cut(&self, how: Cut) {
        self.faults.send_modify(|faults| faults.cut = (faults.cut.0 + 1, how));
    }

    /// Stops listening, so that new connections are refused. Open ones go on.
    pub async fn refuse(&self) {
        self.set_refusing(true).await;
    }

    /// Listens again after [`refuse`](Self::refuse).
    pub async fn accept(&self) {
        self.set_refusing(false).await;
    }

    async fn set_refusing(&self, refusing: bool) {
        self.faults.send_modify(|faults| faults.refusing = refusing);
        let mut listening = self.listening.clone();
        let reached = listening.wait_for(|listening| *listening != refusing).await;
        reached.expect("the accepting task lives as long as the proxy");
    }

    /// Stops forwarding in one direction while connections stay open. The proxy no longer reads
    /// there, so whoever sends is blocked as soon as the kernel's buffers are full.
    pub fn stall(&self, direction: Direction) {
        self.faults.send_modify(|faults| faults.flow_mut(direction).stalled = true);
    }

    /// Forwards again after [`stall`](Self::stall).
    pub fn unstall(&self, direction: Direction) {
        self.faults.send_modify(|faults| faults.flow_mut(direction).stalled = false);
    }

    /// Holds back each piece of data for so long before passing it on.
    pub fn delay(&self, direction: Direction, delay: Duration) {
        self.faults.send_modify(|faults| faults.flow_mut(direction).delay = delay);
    }

    /// Writes at most so many bytes at a time, each piece in a packet of its own.
    pub fn split(&self, direction: Direction, at_most: NonZeroUsize) {
        self.faults.send_modify(|faults| faults.flow_mut(direction).split = Some(at_most));
    }

    /// Inverts bytes on their way.
    pub fn corrupt(&self, direction: Direction, corruption: Corruption) {
        self.faults.send_modify(|faults| faults.flow_mut(direction).corruption = Some(corruption));
    }

    /// Takes back every stall, delay, split and corruption, and listens again.
    pub async fn heal(&self) {
        self.faults.send_modify(Faults::heal);
        self.accept().await;
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        // The task owns the listener and the connections' tasks.
        self.accepting.abort();
    }
}

/// Accepts connections for as long as the proxy lives, except while it refuses.
async fn accept(
    mut listener: TcpListener,
    upstream: SocketAddr,
    mut faults: watch::Receiver<Faults>,
    listening: watch::Sender<bool>,
    counters: Arc<Counters>,
) {
    let addr = listener.local_addr().expect("a listener has an address");
    let mut connections = JoinSet::new();
    let welcome = |client, connections: &mut JoinSet<()>, faults: &watch::Receiver<Faults>| {
        counters.connections.fetch_add(1, Ordering::SeqCst);
        connections.spawn(Connection::new(client, faults.clone(), counters.clone()).run(upstream));
    };
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                // An error here is about one client that has gone already.
                if let Ok((client, _)) = accepted {
                    welcome(client, &mut connections, &faults);
                }
            }
            Some(_) = connections.join_next() => {}
            _ = changed_to(&mut faults, true) => {
                for client in already_connected(listener) {
                    welcome(client, &mut connections, &faults);
                }
                listening.send_replace(false);
                changed_to(&mut faults, false).await;
                listener = TcpListener::bind(addr)
                    .await
                    .unwrap_or_else(|error| panic!("could not listen on {addr} again: {error}"));
                listening.send_replace(true);
            }
        }
    }
}

/// Closes a listener without breaking the connections that clients have made and nobody has
/// accepted yet.
fn already_connected(listener: TcpListener) -> Vec<TcpStream> {
    let listener = listener.into_std().expect("a listener can leave the runtime it is in");
    std::iter::from_fn(|| listener.accept().ok())
        .filter_map(|(client, _)| {
            client.set_nonblocking(true).and_then(|()| TcpStream::from_std(client)).ok()
        })
        .collect()
}

async fn changed_to(faults: &mut watch::Receiver<Faults>, refusing: bool) {
    if faults.wait_for(|faults| faults.refusing == refusing).await.is_err() {
        // The proxy is gone, and this task about to be aborted.
        std::future::pending().await
    }
}
