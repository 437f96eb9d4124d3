//! The embedded broker in a process of its own.

use std::time::Duration;

use leveret_broker::Broker;

use crate::child::{Server, stdin_end};
use crate::meter::{Failure, memory_kib};

/// The child's side.
pub(crate) fn serve() -> Result<(), Failure> {
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let broker = Broker::builder().memory_limit(usize::MAX).start()?;
        println!("{}", broker.listen("127.0.0.1:0").await?.port());
        stdin_end().await;
        Ok::<_, Failure>(())
    })?;
    runtime.shutdown_background();
    Ok(())
}

/// The parent's side. The process ends with this value.
pub(crate) struct EmbeddedBroker {
    server: Server,
    /// Where it listens on 127.0.0.1.
    pub(crate) port: u16,
}

impl EmbeddedBroker {
    pub(crate) async fn start() -> Result<Self, Failure> {
        let (server, port) = Server::start("serve-broker").await?;
        Ok(EmbeddedBroker { server, port })
    }

    pub(super) fn url(&self) -> String {
        format!("amqp://127.0.0.1:{}", self.port)
    }

    /// User and system time so far, as Linux counts it.
    pub(super) fn cpu_time(&self) -> Result<Duration, Failure> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.server.process_id()?))?;
        // The name, in parentheses, may hold blanks; the times are the 14th and 15th fields, in hundredths of a second.
        let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
        let ticks: u64 =
            fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        Ok(Duration::from_millis(ticks * 10))
    }

    /// Bytes of memory that it holds.
    pub(super) fn memory(&self) -> Result<u64, Failure> {
        let kib = memory_kib(&self.server.process_id()?.to_string(), "VmRSS:");
        Ok(kib.ok_or("Linux does not say how much memory the broker holds")? * 1024)
    }
}
