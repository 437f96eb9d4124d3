//! How the byte stream of a connection is opened, if not by TCP.

use std::io;

use tokio::io::{AsyncRead, AsyncWrite};

use super::options::Options;

/// Opens the byte streams that connections run on: through a proxy, a tunnel or a simulated network, in place of TCP.
///
/// TLS, if the options ask for it, runs on that stream.
///
/// ```
/// use std::io;
///
/// use leveret::amqp::{Connector, Options};
/// use leveret::{Client, Queue, Topology};
/// use leveret_broker::Broker;
/// use tokio::net::TcpStream;
///
/// /// All brokers are reached through one gateway.
/// struct Gateway(String);
///
/// impl Connector for Gateway {
///     type Stream = TcpStream;
///
///     async fn connect(&self, _broker: &Options) -> io::Result<TcpStream> {
///         TcpStream::connect(&self.0).await
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::BoxError> {
/// # let broker = Broker::builder().start()?;
/// # let gateway = broker.listen("127.0.0.1:0").await?.to_string();
/// let builder = Client::builder().endpoint("amqp://rabbit-1")?;
/// let client = builder.connector(Gateway(gateway)).connect().await?;
/// client.apply(&Topology::new().queue(Queue::quorum("jobs"))).await?;
/// # Ok(())
/// # }
/// ```
pub trait Connector: Send + Sync + 'static {
    /// A stream to a broker.
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Opens a stream to the broker of these options. It counts towards their
    /// [`connection_timeout`](Options::connection_timeout), and is dropped when that is over.
    fn connect(&self, broker: &Options) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}
