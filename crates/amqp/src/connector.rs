//! How the byte stream of a connection is opened, if not by TCP.

use std::io;

use tokio::io::{AsyncRead, AsyncWrite};

use super::options::Options;

/// Opens the byte streams that connections run on: through a proxy, a tunnel or a simulated network, in place of TCP.
///
/// TLS, if the options ask for it, runs on that stream.
pub trait Connector: Send + Sync + 'static {
    /// A stream to a broker.
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Opens a stream to the broker of these options. It counts towards their
    /// [`connection_timeout`](Options::connection_timeout), and is dropped when that is over.
    fn connect(&self, broker: &Options) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}
