//! One connection through a [`FaultProxy`](super::FaultProxy).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy, sink};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::Counters;
use super::fault::{Cut, Direction, Faults, Flow};

/// The most that is in the proxy's hands per direction; the rest waits in the kernel's buffers.
const CHUNK: usize = 16 * 1024;
/// How long a side may go on sending after its connection was ended in good order.
const LAST_WORDS: Duration = Duration::from_secs(1);

pub(super) struct Connection {
    client: TcpStream,
    faults: watch::Receiver<Faults>,
    counters: Arc<Counters>,
    /// The cuts before this connection, which do not concern it.
    cuts_before: u64,
}

impl Connection {
    pub(super) fn new(
        client: TcpStream,
        faults: watch::Receiver<Faults>,
        counters: Arc<Counters>,
    ) -> Connection {
        let cuts_before = faults.borrow().cut.0;
        Connection { client, faults, counters, cuts_before }
    }

    /// Forwards both ways until both sides are done, one fails, or the connection is cut.
    pub(super) async fn run(mut self, upstream: SocketAddr) {
        match TcpStream::connect(upstream).await {
            Ok(mut server) => match self.forward_both_ways(&mut server).await {
                Cut::Finish => {
                    tokio::join!(finish(&mut self.client), finish(&mut server));
                }
                Cut::Reset => {
                    reset(&self.client);
                    reset(&server);
                }
            },
            Err(_) => reset(&self.client),
        }
        drop(self.client);
        self.counters.closed.fetch_add(1, Ordering::SeqCst);
    }

    /// How the connection has to be ended.
    async fn forward_both_ways(&mut self, server: &mut TcpStream) -> Cut {
        // Without this the kernel would put small pieces together again. It cannot fail on an open
        // socket.
        let _ = self.client.set_nodelay(true).and_then(|()| server.set_nodelay(true));
        let cuts_before = self.cuts_before;
        let mut faults = self.faults.clone();
        let (from_client, to_client) = self.client.split();
        let (from_server, to_server) = server.split();
        let up = Pipe {
            direction: Direction::ToServer,
            faults: faults.clone(),
            bytes: &self.counters.to_server,
        };
        let down = Pipe {
            direction: Direction::ToClient,
            faults: faults.clone(),
            bytes: &self.counters.to_client,
        };
        let both = async {
            tokio::try_join!(
                up.forward(from_client, to_server),
                down.forward(from_server, to_client)
            )
        };
        tokio::select! {
            both = both => {
                // A side that reset its connection has it reset on the other side too.
                if both.is_ok() { Cut::Finish } else { Cut::Reset }
            }
            cut = faults.wait_for(|faults| faults.cut.0 > cuts_before) => {
                cut.map_or(Cut::Reset, |faults| faults.cut.1)
            }
        }
    }
}

/// One direction of a connection.
struct Pipe<'a> {
    direction: Direction,
    faults: watch::Receiver<Faults>,
    bytes: &'a AtomicU64,
}

impl Pipe<'_> {
    async fn forward(mut self, mut from: ReadHalf<'_>, mut to: WriteHalf<'_>) -> io::Result<()> {
        let mut chunk = vec![0; CHUNK];
        let mut offset = 0;
        loop {
            let length = self.read(&mut from, &mut chunk).await?;
            // What was read just before a stall has to wait too.
            let flow = self.flow().await?;
            if length == 0 {
                return to.shutdown().await;
            }
            let piece = &mut chunk[..length];
            if let Some(corruption) = flow.corruption {
                corruption.apply(piece, offset);
            }
            if !flow.delay.is_zero() {
                sleep(flow.delay).await;
            }
            write(&mut to, piece, flow).await?;
            offset += length as u64;
        }
    }

    /// Reads a chunk, unless stalled.
    async fn read(&mut self, from: &mut ReadHalf<'_>, chunk: &mut [u8]) -> io::Result<usize> {
        loop {
            self.flow().await?;
            let direction = self.direction;
            tokio::select! {
                // A stall that was switched on before the bytes came holds them back.
                biased;
                _ = self.faults.wait_for(|faults| faults.flow(direction).stalled) => {}
                length = from.read(chunk) => {
                    let length = length?;
                    self.bytes.fetch_add(length as u64, Ordering::SeqCst);
                    return Ok(length);
                }
            }
        }
    }

    /// The switches as they are set once this direction is not stalled.
    async fn flow(&mut self) -> io::Result<Flow> {
        let direction = self.direction;
        let flowing = self.faults.wait_for(|faults| !faults.flow(direction).stalled).await;
        flowing
            .map(|faults| faults.flow(direction))
            .map_err(|_| io::Error::other("the proxy is gone"))
    }
}

async fn write(to: &mut WriteHalf<'_>, bytes: &[u8], flow: Flow) -> io::Result<()> {
    let at_most = flow.split.map_or(CHUNK, |split| split.get());
    for piece in bytes.chunks(at_most) {
        to.write_all(piece).await?;
        // Lets the other side see the piece before the next one joins it.
        tokio::task::yield_now().await;
    }
    Ok(())
}

/// Ends a connection with FIN. Closing a socket with unread data would reset it, hence the reading.
async fn finish(stream: &mut TcpStream) {
    if stream.shutdown().await.is_ok() {
        let _ = timeout(LAST_WORDS, copy(stream, &mut sink())).await;
    }
}

/// Has the stream end with RST when it is dropped. It cannot fail on an open socket.
fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger();
}
