//! A listener for HTTP that slow or idle clients cannot use up: connections are limited in number and in time.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// How many connections are open at a time. One more ends the oldest, so that a client that is slow on purpose does not keep
/// others out.
const MAX_CONNECTIONS: usize = 64;
/// How long a connection lasts: what is asked here takes milliseconds.
const LIFETIME: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct LimitedListener {
    listener: TcpListener,
    /// Dropping one ends its connection. The oldest comes first.
    open: VecDeque<oneshot::Sender<()>>,
}

impl LimitedListener {
    pub(super) fn new(listener: TcpListener) -> Self {
        LimitedListener { listener, open: VecDeque::new() }
    }
}

impl Listener for LimitedListener {
    type Io = LimitedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (LimitedStream, SocketAddr) {
        let (stream, address) = Listener::accept(&mut self.listener).await;
        self.open.retain(|connection| !connection.is_closed());
        if self.open.len() >= MAX_CONNECTIONS {
            self.open.pop_front();
        }
        let (sender, evicted) = oneshot::channel();
        self.open.push_back(sender);
        let end = async move {
            let _ = timeout(LIFETIME, evicted).await;
        };
        (LimitedStream { stream, end: Some(Box::pin(end)) }, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that fails once its time is over.
pub(super) struct LimitedStream {
    stream: TcpStream,
    /// None when it has come.
    end: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl LimitedStream {
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.end.as_mut().is_some_and(|end| end.as_mut().poll(cx).is_pending()) {
            return Ok(());
        }
        self.end = None;
        Err(io::ErrorKind::TimedOut.into())
    }
}

impl AsyncRead for LimitedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for LimitedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
