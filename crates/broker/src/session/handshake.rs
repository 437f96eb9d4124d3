//! The broker's part of the handshake, in a straight line: start, tune, open.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use leveret_wire::method::connection;
use leveret_wire::{
    FrameKind, FrameMax, Method, Outbound, PROTOCOL_HEADER, ProtocolVersion, ReplyCode, Table,
    Value,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

use super::{Agreed, End, Reader, Refused, properties, put, write_all};
use crate::broker::Shared;
use crate::outlet::Outlet;
use crate::refusal::Refusal;
use crate::vhost::Client;

/// Both directions of a stream, one method at a time.
pub(super) struct Line<'l, R, W> {
    pub(super) reader: &'l mut Reader<R>,
    pub(super) writer: &'l mut W,
    pub(super) outbound: Outbound,
    /// Where the client is, unless it is in this process.
    pub(super) peer: Option<SocketAddr>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Line<'_, R, W> {
    async fn flush(&mut self) -> Result<(), End> {
        Ok(write_all(self.writer, &mut self.outbound).await?)
    }

    /// Sends what was put, and awaits the next method.
    async fn next(&mut self) -> Result<Method<'static>, End> {
        self.flush().await?;
        loop {
            let batch = self.reader.inbound.take_one()?;
            for frame in batch.frames() {
                match (frame.kind, frame.channel) {
                    (FrameKind::Heartbeat, _) => {}
                    (FrameKind::Method, 0) => {
                        return Ok(Method::decode(frame.payload)?.into_owned());
                    }
                    (kind, channel) => {
                        let text =
                            format!("{kind} frame on channel {channel} during the handshake");
                        return Err(refused(ReplyCode::UNEXPECTED_FRAME, text));
                    }
                }
            }
            if batch.is_empty() && !self.reader.read().await? {
                return Err(End::Gone);
            }
        }
    }

    async fn protocol_header(&mut self) -> Result<(), End> {
        loop {
            match self.reader.inbound.take_protocol_header() {
                Ok(Some(ProtocolVersion::V0_9_1)) => return Ok(()),
                Ok(None) => {
                    if !self.reader.read().await? {
                        return Err(End::Gone);
                    }
                }
                // Another protocol: told which one is spoken here, as the specification has it.
                Ok(Some(_)) | Err(_) => {
                    self.writer.write_all(&PROTOCOL_HEADER).await?;
                    self.writer.flush().await?;
                    return Err(End::Gone);
                }
            }
        }
    }
}

fn refused(code: ReplyCode, text: impl std::fmt::Display) -> End {
    Refused::new(Refusal::new(code, text), None).into()
}

/// The same, and the method that asked for it is named.
fn refused_in(id: u16, code: ReplyCode, text: impl std::fmt::Display) -> End {
    Refused::new(Refusal::new(code, text), Some((connection::CLASS_ID, id))).into()
}

fn unexpected(method: &Method<'_>, due: &str) -> End {
    let text = format!("{} where {due} was due", method.name());
    refused(ReplyCode::COMMAND_INVALID, text)
}

/// Shakes hands. `None` if nothing came of it; the client has been told why as far as it wants to know.
pub(super) async fn shake_hands<R, W>(
    shared: &Shared,
    line: &mut Line<'_, R, W>,
    outlet: &Arc<Outlet>,
) -> Option<Agreed>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    match exchange(shared, line, outlet).await {
        Ok(agreed) => Some(agreed),
        Err(End::Gone) => None,
        Err(End::Refused(refused)) => {
            put(&mut line.outbound, &refused.close());
            // Whoever is told may say that it heard.
            let _ = line.next().await;
            None
        }
    }
}

async fn exchange<R, W>(
    shared: &Shared,
    line: &mut Line<'_, R, W>,
    outlet: &Arc<Outlet>,
) -> Result<Agreed, End>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    line.protocol_header().await?;
    put(
        &mut line.outbound,
        &connection::Start {
            version_major: 0,
            version_minor: 9,
            server_properties: properties::server_properties(shared.profile()),
            mechanisms: "PLAIN AMQPLAIN".into(),
            locales: "en_US".into(),
        },
    );
    let start_ok = match line.next().await? {
        Method::ConnectionStartOk(start_ok) => start_ok,
        other => return Err(unexpected(&other, "connection.start-ok")),
    };
    let user = authenticate(shared, &start_ok, line.peer)?;

    let tune = connection::Tune {
        channel_max: shared.channel_max(),
        frame_max: shared.frame_max().get(),
        heartbeat: shared.heartbeat_seconds(),
    };
    put(&mut line.outbound, &tune);
    let tune_ok = match line.next().await? {
        Method::ConnectionTuneOk(tune_ok) => tune_ok,
        other => return Err(unexpected(&other, "connection.tune-ok")),
    };
    check_tuning(&tune, &tune_ok)?;
    let frame_max = match tune_ok.frame_max {
        0 => FrameMax::UNLIMITED,
        bytes => FrameMax::new(bytes).unwrap_or(FrameMax::MIN),
    };
    line.reader.inbound.set_max(frame_max);
    outlet.set_frame_max(frame_max);

    let name = match line.next().await? {
        Method::ConnectionOpen(open) => open.virtual_host.to_str_lossy().into_owned(),
        other => return Err(unexpected(&other, "connection.open")),
    };
    let Some(host) = shared.host(&name) else {
        let text = format!("vhost {name} not found");
        return Err(refused_in(connection::Open::ID, ReplyCode::NOT_ALLOWED, text));
    };
    let Some(access) = shared.access(&user, &name) else {
        let text = format!("access to vhost '{name}' refused for user '{user}'");
        return Err(refused_in(connection::Open::ID, ReplyCode::NOT_ALLOWED, text));
    };
    put(&mut line.outbound, &connection::OpenOk {});
    line.flush().await?;
    let called = start_ok.client_properties.get("connection_name");
    let called = called.and_then(|name| name.as_str().map(str::to_owned));
    let client = Client {
        user,
        access,
        outlet: Arc::clone(outlet),
        name: called.clone(),
        peer: line.peer,
        hears_of_cancels: can(&start_ok.client_properties, "consumer_cancel_notify"),
    };
    let connection = host.with(|vhost| vhost.connect(client));
    let channel_max = match tune_ok.channel_max {
        0 => u16::MAX,
        max => max,
    };
    let heartbeat = Duration::from_secs(tune_ok.heartbeat.into());
    Ok(Agreed {
        host,
        connection,
        channel_max,
        heartbeat,
        name: called,
        hears_of_blocking: can(&start_ok.client_properties, "connection.blocked"),
    })
}

/// Who connects, if the password is right.
fn authenticate(
    shared: &Shared,
    start_ok: &connection::StartOk<'_>,
    peer: Option<SocketAddr>,
) -> Result<String, End> {
    let response = start_ok.response.expose();
    let mechanism = &start_ok.mechanism;
    let credentials = if *mechanism == "PLAIN" {
        plain(response)
    } else if *mechanism == "AMQPLAIN" {
        amqplain(response)
    } else {
        let text = format!("unknown authentication mechanism '{mechanism}'");
        return Err(refused(ReplyCode::COMMAND_INVALID, text));
    };
    match credentials {
        Some((user, password)) if shared.lets_in(&user, &password, peer) => Ok(user),
        // Who cannot be told is just hung up on.
        _ if !can(&start_ok.client_properties, "authentication_failure_close") => Err(End::Gone),
        _ => {
            let text = format!(
                "Login was refused using authentication mechanism {mechanism}. For details see the broker logfile."
            );
            Err(refused(ReplyCode::ACCESS_REFUSED, text))
        }
    }
}

/// `\0user\0password`, with something before the first zero that nobody uses.
fn plain(response: &[u8]) -> Option<(String, Vec<u8>)> {
    let mut parts = response.splitn(3, |byte| *byte == 0).skip(1);
    let user = String::from_utf8(parts.next()?.to_vec()).ok()?;
    Some((user, parts.next()?.to_vec()))
}

/// A table without its length.
fn amqplain(response: &[u8]) -> Option<(String, Vec<u8>)> {
    let table = Table::decode(response).ok()?;
    let user = table.get("LOGIN")?.as_str()?.to_owned();
    let password = table.get("PASSWORD")?.as_bytes()?.to_vec();
    Some((user, password))
}

/// Whether the client says that it has a capability.
fn can(client_properties: &Table<'_>, capability: &str) -> bool {
    let capabilities = client_properties.get("capabilities");
    let known = capabilities.as_ref().and_then(Value::as_table);
    known.and_then(|known| known.get(capability)).and_then(|can| can.as_bool()) == Some(true)
}

/// Neither side may go beyond what the other can do.
fn check_tuning(tune: &connection::Tune, tune_ok: &connection::TuneOk) -> Result<(), End> {
    let check = |name: &str, ours: u32, theirs: u32| {
        if ours != 0 && theirs == 0 {
            let text = format!(
                "negotiated {name} = 0 (no limit) is higher than the maximum allowed value ({ours})"
            );
            return Err(refused_in(connection::TuneOk::ID, ReplyCode::NOT_ALLOWED, text));
        }
        if ours != 0 && theirs > ours {
            let text = format!(
                "negotiated {name} = {theirs} is higher than the maximum allowed value ({ours})"
            );
            return Err(refused_in(connection::TuneOk::ID, ReplyCode::NOT_ALLOWED, text));
        }
        Ok(())
    };
    check("channel_max", tune.channel_max.into(), tune_ok.channel_max.into())?;
    check("frame_max", tune.frame_max, tune_ok.frame_max)?;
    if tune_ok.frame_max != 0 && tune_ok.frame_max < FrameMax::MIN.get() {
        let text = format!(
            "negotiated frame_max = {} is lower than the minimum allowed value ({})",
            tune_ok.frame_max,
            FrameMax::MIN.get()
        );
        return Err(refused_in(connection::TuneOk::ID, ReplyCode::NOT_ALLOWED, text));
    }
    Ok(())
}
