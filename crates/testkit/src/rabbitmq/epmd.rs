//! Erlang's name server, one per node or cluster.

use std::fs::File;
use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::net::TcpStream;

use super::installation::{EPMD, Installation};
use crate::port::free_ports;
use crate::process::{Ending, GuardedProcess};
use crate::random::random;

const BOOT_DEADLINE: Duration = Duration::from_secs(60);

/// The circle of nodes that know each other: a name server on a port of its own and the secret they
/// share.
///
/// Erlang would start one epmd for the whole machine, in the background and for good. With one of
/// our own, nothing stays behind and node names need to be unique in the circle only.
#[derive(Debug)]
pub(super) struct Epmd {
    pub(super) port: u16,
    pub(super) cookie: String,
    _process: GuardedProcess,
}

impl Epmd {
    pub(super) async fn start(installation: &Installation) -> Epmd {
        const TRIES: usize = 3;
        for _ in 0..TRIES {
            let [port] = free_ports();
            let command = installation.command(
                &[],
                EPMD,
                &["-port", &port.to_string(), "-address", &Ipv4Addr::LOCALHOST.to_string()],
            );
            let nowhere =
                File::options().write(true).open("/dev/null").expect("/dev/null can be written");
            let mut process = GuardedProcess::start(command, Ending::Kill, nowhere);
            if listens(&mut process, port).await {
                return Epmd { port, cookie: format!("{:016x}", random()), _process: process };
            }
        }
        panic!("epmd of RabbitMQ {} ended at once, {TRIES} times over", installation.version);
    }
}

/// Whether the process comes to listen there; it does not if somebody else was quicker to take the
/// port.
async fn listens(process: &mut GuardedProcess, port: u16) -> bool {
    let what = format!("epmd to listen on port {port}");
    let probe = || async {
        let connected = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await;
        connected.map(drop).map_err(|error| error.to_string())
    };
    process.ready(BOOT_DEADLINE, what, probe).await.is_ok()
}
