//! What moves the bytes of a connection: one task with a reading and a writing half.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Buf;
use leveret_wire::{DecodeError, Outbound, ReplyCode};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::connection::Core;
use super::error::{Error, ErrorKind};
use super::handshake::Reader;
use super::idle::IdleTimer;
use super::inlet::Inlet;

/// How long the last frames, a close among them, may take on their way out, and the broker's reason on its way in when
/// writing has failed.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What is written at once, if it is less, could have been more.
const LITTLE: usize = 4096;

/// Runs the connection until it ends, and then ends everything that waits on it.
pub(super) async fn run<R, W>(core: Arc<Core>, reader: Reader<R>, mut writer: W)
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let _end = End(Arc::clone(&core));
    let error = converse(&core, reader, &mut writer).await;
    // With TLS, this says good-bye.
    let _ = timeout(LAST_WORDS, writer.shutdown()).await;
    core.set_ended(error);
}

/// Reads and writes until the connection ends, and says why it did.
async fn converse<R, W>(core: &Arc<Core>, reader: Reader<R>, writer: &mut W) -> Error
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut inlet = Inlet::new(Arc::clone(core), reader);
    let mut write = pin!(write(core, writer));
    let mut written = None;
    let error = {
        let mut read = pin!(inlet.run());
        tokio::select! {
            // First read, then write: acks that have waited for more to read are found by the writer, which is not woken for them.
            biased;
            error = &mut read => error,
            result = &mut write => {
                // Either we asked for the end, and the broker's agreement is due; or the socket broke, and the broker's
                // reason may be among what it sent before.
                let (patience, otherwise) = match &result {
                    Ok(()) => (core.limits.reply_timeout, no_agreement(core)),
                    Err(error) => (LAST_WORDS, error.clone()),
                };
                written = Some(result);
                timeout(patience, read).await.unwrap_or(otherwise)
            }
            error = overdue(core) => error,
        }
    };
    if error.kind() == ErrorKind::Protocol {
        core.begin_close(error.clone(), deserved_code(&error), &error.to_string());
    }
    core.fail(&error);
    inlet.end(&error);
    if written.is_none() {
        let _ = timeout(LAST_WORDS, write).await;
    }
    error
}

/// Ends everything that waits, also if the task is dropped before it is done: with its runtime, or by a panic.
struct End(Arc<Core>);

impl Drop for End {
    fn drop(&mut self) {
        let text = "the connection's task was ended, most likely with its runtime";
        let error = Error::new(ErrorKind::ConnectionLost, text);
        self.0.fail(&error);
        self.0.set_ended(error);
    }
}

/// Once this side wants the end, the broker gets only so long: it may have stopped to read.
async fn overdue(core: &Core) -> Error {
    core.sender.until_closed().await;
    tokio::time::sleep(core.limits.reply_timeout).await;
    no_agreement(core)
}

fn no_agreement(core: &Core) -> Error {
    Error::timeout("the reply to connection.close", core.limits.reply_timeout)
}

/// With which code the broker's mistake is answered.
fn deserved_code(error: &Error) -> ReplyCode {
    let malformed = error.get_ref().and_then(|cause| cause.downcast_ref::<DecodeError>());
    malformed.map_or(ReplyCode::COMMAND_INVALID, DecodeError::reply_code)
}

/// Writes what callers put into the outbound buffer, and signs of life when they put nothing.
async fn write(core: &Core, writer: &mut (impl AsyncWrite + Unpin)) -> Result<(), Error> {
    let lost = |error| Error::caused(ErrorKind::ConnectionLost, "the connection broke", error);
    let mut buffer = Outbound::new();
    // A heartbeat goes out after half an interval at the latest.
    let mut idle = IdleTimer::new(core.agreed.heartbeat / 4);
    let mut last = None;
    loop {
        let more = match idle.within_a_tick(core.sender.take(&mut buffer, last)).await {
            Some(more) => more,
            None => {
                buffer.heartbeat();
                true
            }
        };
        let is_little = buffer.remaining() < LITTLE;
        while buffer.has_remaining() {
            writer.write_buf(&mut buffer).await.map_err(lost)?;
        }
        writer.flush().await.map_err(lost)?;
        last = is_little.then(Instant::now);
        if !more {
            return Ok(());
        }
    }
}
