//! A client's connection: bytes in, bytes out, from the protocol header to the last close.

mod channels;
mod handshake;
mod properties;
#[cfg(test)]
mod tests;
mod texts;

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Buf;
use leveret_wire::method::{Encode, basic, connection};
use leveret_wire::{
    DecodeError, Fault, FrameKind, FrameMax, Inbound, Outbound, ReplyCode, Scope, ShortStr,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};

use crate::alarm::Raised;
use crate::broker::{Enrolled, Shared};
use crate::outlet::{Outlet, Taken};
use crate::refusal::Refusal;
use crate::vhost::{ConnectionId, Host};

use channels::Channels;

/// How long a client may take to shake hands: what says nothing must not hold a connection.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// A client that leaves answers unread for as long is cut off. While memory is short, so is one that leaves messages unread.
const UNREAD: Duration = Duration::from_secs(60);

/// How often a client that is not read from is asked whether it is still there.
const PROBE: Duration = Duration::from_secs(2);

/// How long the last frames may take on their way out, and the client's agreement to a close on its way in.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// The stream's reading half with what came and was not looked at yet.
#[derive(Debug)]
struct Reader<R> {
    stream: R,
    inbound: Inbound,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    /// Reads some bytes. False at the end of the stream.
    async fn read(&mut self) -> io::Result<bool> {
        let mut space = self.inbound.space();
        Ok(self.stream.read_buf(&mut space).await? > 0)
    }

    /// The same where bodies may be large: their bytes are read to where they stay.
    async fn read_for(&mut self, channels: &mut Channels) -> io::Result<bool> {
        let mut space = self.inbound.space_for(|channel, size| channels.large_body(channel, size));
        Ok(self.stream.read_buf(&mut space.room()).await? > 0)
    }
}

/// Class and method of a publish.
const PUBLISH: (u16, u16) = (basic::CLASS_ID, basic::Publish::ID);

/// Why a conversation is over.
#[derive(Debug)]
enum End {
    /// The client closed it, or hung up.
    Gone,
    /// The client did what costs the connection: it is told, and may agree.
    Refused(Refused),
}

/// A refusal, and what was refused.
#[derive(Debug)]
struct Refused {
    refusal: Refusal,
    class_id: u16,
    method_id: u16,
}

impl Refused {
    fn new(refusal: Refusal, method: Option<(u16, u16)>) -> Self {
        let (class_id, method_id) = method.unwrap_or_default();
        Refused { refusal, class_id, method_id }
    }

    fn close(&self) -> connection::Close<'_> {
        connection::Close {
            reply_code: self.refusal.code,
            reply_text: self.refusal.reply_text(),
            class_id: self.class_id,
            method_id: self.method_id,
        }
    }
}

impl From<Refused> for End {
    fn from(refused: Refused) -> Self {
        End::Refused(refused)
    }
}

impl From<DecodeError> for End {
    fn from(error: DecodeError) -> Self {
        let refused = match *error.fault() {
            Fault::Unexpected { expected, .. } => unexpected_frame(expected, basic::Publish::ID),
            Fault::ContentClass { class } => {
                let text = format!(
                    "expected content header for class 60, got one for class {class} instead"
                );
                Refused::new(Refusal::new(ReplyCode::UNEXPECTED_FRAME, text), Some(PUBLISH))
            }
            Fault::BodyOverrun { .. } => {
                let text = "content body frame exceeds remaining content size";
                Refused::new(Refusal::new(ReplyCode::FRAME_ERROR, text), Some(PUBLISH))
            }
            Fault::Heartbeat { channel: 1.. } => {
                let text = "type 8, all octets = <<>>";
                Refused::new(Refusal::new(ReplyCode::UNEXPECTED_FRAME, text), None)
            }
            _ => Refused::new(Refusal::new(error.reply_code(), &error), error.method_id()),
        };
        End::Refused(refused)
    }
}

/// RabbitMQ's words for a frame of the wrong kind, on a channel where this method came before.
fn unexpected_frame(expected: FrameKind, method_id: u16) -> Refused {
    let (text, method) = match expected {
        FrameKind::Header => (
            "expected content header for class 60, got non content header frame instead",
            Some((basic::CLASS_ID, method_id)),
        ),
        FrameKind::Body => (
            "expected content body, got non content body frame instead",
            Some((basic::CLASS_ID, method_id)),
        ),
        _ => ("expected method frame, got non method frame instead", None),
    };
    Refused::new(Refusal::new(ReplyCode::UNEXPECTED_FRAME, text), method)
}

impl From<io::Error> for End {
    fn from(_: io::Error) -> Self {
        End::Gone
    }
}

/// What was agreed on in the handshake, and where it led.
#[derive(Debug)]
struct Agreed {
    host: Arc<Host>,
    connection: ConnectionId,
    channel_max: u16,
    heartbeat: Duration,
    /// What the client calls the connection.
    name: Option<String>,
    /// The client wants to be told when it is blocked.
    hears_of_blocking: bool,
}

/// Serves one client until it or the broker ends the connection.
pub(crate) async fn run<R, W>(
    shared: Arc<Shared>,
    reader: R,
    mut writer: W,
    peer: Option<SocketAddr>,
) where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    shared.until_started().await;
    shared.frozen().thawed().await;
    let outlet = Arc::new(Outlet::new());
    let reader =
        Reader { stream: reader, inbound: Inbound::new(shared.profile().handshake_frame_max()) };
    converse(&shared, reader, &mut writer, &outlet, peer).await;
    let _ = timeout(LAST_WORDS, writer.shutdown()).await;
}

async fn converse<R, W>(
    shared: &Arc<Shared>,
    mut reader: Reader<R>,
    writer: &mut W,
    outlet: &Arc<Outlet>,
    peer: Option<SocketAddr>,
) where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut line = handshake::Line { reader: &mut reader, writer, outbound: Outbound::new(), peer };
    let shaken = timeout(HANDSHAKE, handshake::shake_hands(shared, &mut line, outlet)).await;
    let Ok(Some(agreed)) = shaken else { return };
    let user = agreed.host.with(|vhost| vhost.user(agreed.connection).to_owned());
    let from = (user, peer.map(|peer| peer.ip()));
    let enrolled = shared.enrol(agreed.name.clone(), from);
    let _leave = Leave { host: &agreed.host, connection: agreed.connection, outlet };
    let mut write = pin!(write(shared, &agreed, outlet, writer));
    let mut stop = shared.stopping();
    let end = {
        let mut channels = Channels::new(&agreed, Arc::clone(outlet), shared.max_message_size());
        tokio::select! {
            end = read(shared, &agreed, &enrolled, &mut reader, &mut channels) => end,
            _ = &mut write => return,
            () = enrolled.cut() => return,
            refusal = enrolled.refused() => End::Refused(Refused::new(refusal, None)),
            () = stop.wait() => {
                let refusal = Refusal::new(ReplyCode::CONNECTION_FORCED, "broker forced connection closure with reason 'shutdown'");
                End::Refused(Refused::new(refusal, None))
            }
        }
    };
    if let End::Refused(refused) = &end {
        // What it holds is not wanted any more.
        enrolled.set_unfinished(0);
        outlet.send(0, &refused.close());
        tokio::select! {
            () = until_agreed(&mut reader) => {}
            // Nothing can be said any more, and this future is not to be polled again.
            _ = &mut write => return,
            () = sleep(LAST_WORDS) => {}
        }
    }
    outlet.close();
    let _ = timeout(LAST_WORDS, write).await;
}

/// Takes the connection out of its virtual host, however the session ends.
struct Leave<'s> {
    host: &'s Host,
    connection: ConnectionId,
    outlet: &'s Outlet,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.outlet.close();
        self.host.with(|vhost| vhost.disconnect(self.connection));
    }
}

/// Reads and does what the client wants, until it is over.
async fn read<R: AsyncRead + Unpin>(
    shared: &Shared,
    agreed: &Agreed,
    enrolled: &Enrolled,
    reader: &mut Reader<R>,
    channels: &mut Channels,
) -> End {
    let mut alarm = shared.alarm().watch();
    let mut frozen = shared.frozen();
    loop {
        frozen.thawed().await;
        // Frames may have come along with the last one of the handshake, hence the read comes last.
        loop {
            let batch = match reader.inbound.take() {
                Ok(batch) if batch.is_empty() => break,
                Ok(batch) => batch,
                Err(error) => return error.into(),
            };
            let mut frames = batch.frames();
            loop {
                let left = agreed.host.with(|vhost| channels.frames(vhost, &batch, &mut frames));
                enrolled.set_unfinished(channels.unfinished());
                match left {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(end) => return end,
                }
                yield_now().await;
                if let Err(end) = until_allowed(agreed, channels, &mut alarm).await {
                    return end;
                }
            }
        }
        if let Err(end) = until_allowed(agreed, channels, &mut alarm).await {
            return end;
        }
        let read = reader.read_for(channels);
        let read = if agreed.heartbeat.is_zero() {
            read.await
        } else {
            // Two intervals: one for the client's, one for the network's delay.
            match timeout(agreed.heartbeat * 2, read).await {
                Ok(read) => read,
                Err(_) => return End::Gone,
            }
        };
        if !read.unwrap_or(false) {
            return End::Gone;
        }
    }
}

/// Waits until the client may go on: while the alarm is raised, if it has published, and while too many answers are unread.
async fn until_allowed(
    agreed: &Agreed,
    channels: &mut Channels,
    alarm: &mut watch::Receiver<Raised>,
) -> Result<(), End> {
    let is_raised = channels.has_published() && alarm.borrow().reason().is_some();
    if is_raised {
        until_unblocked(agreed, channels, alarm).await?;
    }
    timeout(UNREAD, channels.until_room()).await.map_err(|_| End::Gone)
}

/// A client that publishes is not read from while the alarm is raised, and is told.
///
/// So what it says at its end is not heard. Heartbeats are sent to it, whether or not it has asked for any: to a client that is
/// gone they cannot be written. One that is there and has deliveries, which it cannot ack, or a transaction, which it cannot
/// commit, does not keep them for longer than consumers may: nothing else would end the alarm.
async fn until_unblocked(
    agreed: &Agreed,
    channels: &Channels,
    alarm: &mut watch::Receiver<Raised>,
) -> Result<(), End> {
    let reason = alarm.borrow().reason().map(|reason| ShortStr::truncated(reason).into_owned());
    let Some(reason) = reason else { return Ok(()) };
    if agreed.hears_of_blocking {
        channels.tell(&connection::Blocked { reason });
    }
    let blocked = Instant::now();
    loop {
        tokio::select! {
            _ = alarm.wait_for(|raised| raised.reason().is_none()) => break,
            () = sleep(PROBE) => channels.probe(),
        }
        if alarm.borrow().is_memory()
            && let Some(refusal) = agreed
                .host
                .with(|vhost| vhost.kept_while_blocked(agreed.connection, blocked.elapsed()))
        {
            return Err(Refused::new(refusal, None).into());
        }
    }
    if agreed.hears_of_blocking {
        channels.tell(&connection::Unblocked {});
    }
    Ok(())
}

/// Reads until the client has agreed to a close; everything else is passed over.
async fn until_agreed<R: AsyncRead + Unpin>(reader: &mut Reader<R>) {
    loop {
        while let Ok(batch) = reader.inbound.take() {
            if batch.is_empty() {
                break;
            }
            if batch.frames().any(|frame| channels::ends_the_connection(&frame)) {
                return;
            }
        }
        if !reader.read().await.unwrap_or(false) {
            return;
        }
    }
}

/// Writes what the broker puts into the outlet, and signs of life when it puts nothing.
async fn write(
    shared: &Shared,
    agreed: &Agreed,
    outlet: &Outlet,
    writer: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    let mut frozen = shared.frozen();
    let mut buffer = Outbound::new();
    let interval = agreed.heartbeat / 2;
    loop {
        let taken = if interval.is_zero() {
            outlet.take(&mut buffer).await
        } else {
            match timeout(interval, outlet.take(&mut buffer)).await {
                Ok(taken) => taken,
                Err(_) => {
                    buffer.heartbeat();
                    Taken::Some
                }
            }
        };
        frozen.thawed().await;
        write_while_read(shared, agreed, writer, &mut buffer).await?;
        match taken {
            Taken::Some => {}
            Taken::Drained => agreed.host.with(|vhost| vhost.drained(agreed.connection)),
            Taken::End => return Ok(()),
        }
    }
}

/// A client that reads nothing may take its time, unless memory is short and messages for it count: nothing else would end the
/// alarm.
async fn write_while_read(
    shared: &Shared,
    agreed: &Agreed,
    writer: &mut (impl AsyncWrite + Unpin),
    buffer: &mut Outbound,
) -> io::Result<()> {
    while buffer.has_remaining() {
        match timeout(UNREAD, writer.write_buf(buffer)).await {
            Ok(written) => written.map(drop)?,
            Err(_)
                if agreed.host.with(|vhost| vhost.has_unread(agreed.connection))
                    && shared.alarm().watch().borrow().is_memory() =>
            {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(_) => {}
        }
    }
    writer.flush().await
}

async fn write_all(
    writer: &mut (impl AsyncWrite + Unpin),
    buffer: &mut Outbound,
) -> io::Result<()> {
    while buffer.has_remaining() {
        writer.write_buf(buffer).await?;
    }
    writer.flush().await
}

/// Whether a refusal costs the whole connection.
fn is_fatal(refusal: &Refusal) -> bool {
    refusal.scope() == Scope::Connection
}

/// Encodes a method that fits any frame.
fn put(outbound: &mut Outbound, method: &impl Encode) {
    let _ = outbound.method(0, method, FrameMax::DEFAULT);
}
