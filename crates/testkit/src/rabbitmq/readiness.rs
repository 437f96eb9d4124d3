//! When a starting node counts as ready.

use std::net::Ipv4Addr;
use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Broker;

const PROTOCOL_HEADER: &[u8] = b"AMQP\x00\x00\x09\x01";
/// The first octet of a method frame, which is how a willing server answers (connection.start).
const METHOD_FRAME: u8 = 1;

/// What a node prints to its console, whatever its log level, as the last step of its start.
const STARTED: &str = " completed with ";

/// Whether the node has printed that its start is over, after what it had printed before.
///
/// The listeners open a moment earlier. A virtual host that is made in this moment is never started
/// on the node, and whoever makes it waits for good.
pub(super) fn has_started(log: &Path, said_before: u64) -> Result<(), String> {
    let text = std::fs::read(log).map_err(|error| format!("{}: {error}", log.display()))?;
    let new = text.get(said_before as usize..).unwrap_or_default();
    if String::from_utf8_lossy(new).contains(STARTED) {
        Ok(())
    } else {
        Err("its start is not over".to_owned())
    }
}

/// Whether the node says that its AMQP listener is open, and that listener answers as an AMQP
/// server does.
pub(super) async fn serves_clients(broker: &Broker, amqp_port: u16) -> Result<(), String> {
    let port = amqp_port.to_string();
    broker
        .management()
        .get(&["health", "checks", "port-listener", &port])
        .await
        .map_err(|error| error.to_string())?;
    greets(amqp_port).await.map_err(|error| format!("AMQP on port {amqp_port}: {error}"))
}

async fn greets(port: u16) -> std::io::Result<()> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    stream.write_all(PROTOCOL_HEADER).await?;
    match stream.read_u8().await? {
        METHOD_FRAME => Ok(()),
        other => Err(std::io::Error::other(format!("an answer that starts with {other:#04x}"))),
    }
}
