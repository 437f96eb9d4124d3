//! The embedded broker in a process of its own.

use std::io::{self, Read, Write};
use std::time::Duration;

use leveret_broker::Broker;

use crate::client::{Failure, Server};

/// The child's side: serves until standard input ends, that is until the process that started this one has ended. Says
/// on standard output on which port.
pub(crate) fn serve() -> Result<(), Failure> {
    let runtime = tokio::runtime::Runtime::new()?;
    let _broker = runtime.block_on(async {
        let broker = Broker::builder().memory_limit(usize::MAX).start()?;
        let address = broker.listen("127.0.0.1:0").await?;
        println!("{}", address.port());
        io::stdout().flush()?;
        Ok::<_, Failure>(broker)
    })?;
    io::stdin().read_to_end(&mut Vec::new())?;
    runtime.shutdown_background();
    Ok(())
}

/// The parent's side. The process ends with this value.
pub(crate) struct EmbeddedBroker(Server);

impl EmbeddedBroker {
    pub(crate) fn start() -> io::Result<Self> {
        Ok(EmbeddedBroker(Server::start("serve-broker")?))
    }

    /// Where it listens on 127.0.0.1.
    pub(crate) fn port(&self) -> u16 {
        self.0.port
    }

    pub(super) fn url(&self) -> String {
        format!("amqp://127.0.0.1:{}", self.port())
    }

    /// User and system time so far, as Linux counts it.
    pub(super) fn cpu_time(&self) -> io::Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.process_id()))?;
        // The name, in parentheses, may hold blanks; the times are the 14th and 15th fields, in hundredths of a second.
        let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
        let ticks: u64 =
            fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        Ok(Duration::from_millis(ticks * 10))
    }

    /// Bytes of memory that it holds.
    pub(super) fn memory(&self) -> io::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.process_id()))?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = resident.and_then(|text| text.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.map(|kib| kib * 1024)
            .ok_or_else(|| io::Error::other("Linux does not say how much memory"))
    }
}
