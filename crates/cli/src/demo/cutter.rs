//! What cuts the connections of the demo: the embedded broker itself, or a proxy before a real one.

use std::net::SocketAddr;
use std::sync::Arc;

use leveret::amqp::Options;
use leveret_broker::Broker;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::failure::Failure;

pub(super) enum Cutter {
    Embedded(Broker),
    Proxy(Box<Proxy>),
}

impl Cutter {
    pub(super) fn cut(&self) {
        match self {
            Cutter::Embedded(broker) => broker.faults().cut_all_connections(),
            Cutter::Proxy(proxy) => proxy.cut(),
        }
    }
}

/// Passes connections on to a broker, until they are cut.
pub(super) struct Proxy {
    options: Options,
    cuts: Arc<watch::Sender<u64>>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// A proxy to the broker at a URL.
    pub(super) async fn to(url: &str) -> Result<Proxy, Failure> {
        let mut options = Options::from_uri(url).map_err(Failure::wrong)?;
        if options.tls.is_some() || options.memory {
            return Err(Failure::wrong(
                "the demo cuts connections by a proxy of its own, so it needs a URL that begins with amqp://",
            ));
        }
        let broker = (options.host.clone(), options.port);
        if let Err(error) = TcpStream::connect(broker.clone()).await {
            let (host, port) = broker;
            return Err(Failure::no_broker(format_args!(
                "no broker answers at {host}:{port}: {error}"
            )));
        }
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.map_err(Failure::new)?;
        let here: SocketAddr = listener.local_addr().map_err(Failure::new)?;
        (options.host, options.port) = (here.ip().to_string(), here.port());
        let cuts = Arc::new(watch::Sender::new(0));
        let accepting = tokio::spawn(accept(listener, broker, Arc::clone(&cuts)));
        Ok(Proxy { options, cuts, accepting })
    }

    /// How to connect to it: as to the broker, but for the address.
    pub(super) fn options(&self) -> Options {
        self.options.clone()
    }

    fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, broker: (String, u16), cuts: Arc<watch::Sender<u64>>) {
    let mut passing = tokio::task::JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let (broker, mut cut) = (broker.clone(), cuts.subscribe());
        passing.spawn(async move {
            let Ok(server) = TcpStream::connect(broker).await else { return };
            let (mut client, mut server) = (client, server);
            tokio::select! {
                _ = copy_bidirectional(&mut client, &mut server) => {}
                _ = cut.changed() => {}
            }
        });
        while passing.try_join_next().is_some() {}
    }
}
