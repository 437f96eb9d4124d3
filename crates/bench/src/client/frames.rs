//! Frames by hand over a blocking socket, for the null peer and for the candidate `limit`: they take less than any library.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;

use bytes::{Buf as _, BufMut as _};
use leveret_wire::method::Encode;
use leveret_wire::{FRAME_END, FrameMax, Outbound};

pub(super) const METHOD: u8 = 1;
pub(super) const HEADER: u8 = 2;
pub(super) const BODY: u8 = 3;

/// Class and method id of `basic.publish`.
pub(super) const PUBLISH: &[u8] = &[0, 60, 0, 40];

/// How much is buffered each way, about: system calls are then few, and the processor's cache holds it.
pub(super) const BUFFER: usize = 256 * 1024;

pub(super) struct FrameSocket {
    pub(super) stream: TcpStream,
    pub(super) outgoing: Vec<u8>,
    incoming: Vec<u8>,
    /// The bytes in `incoming` that came and are not taken: the beginning of a frame.
    filled: usize,
    /// How much one read may bring.
    read_size: usize,
}

impl FrameSocket {
    pub(super) fn new(stream: TcpStream, read_size: usize) -> io::Result<FrameSocket> {
        stream.set_nodelay(true)?;
        let (outgoing, incoming) = (Vec::with_capacity(2 * BUFFER), vec![0; BUFFER]);
        Ok(FrameSocket { stream, outgoing, incoming, filled: 0, read_size })
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.stream.write_all(&self.outgoing)?;
        self.outgoing.clear();
        Ok(())
    }

    /// Reads once, and hands out the type, channel and payload of each frame that is whole, with the buffer for replies.
    pub(super) fn read<E: From<io::Error>>(
        &mut self,
        mut take: impl FnMut(&mut Vec<u8>, u8, u16, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let end = self.incoming.len().min(self.filled + self.read_size);
        let read = self.stream.read(&mut self.incoming[self.filled..end])?;
        if read == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        self.filled += read;
        let mut rest = &self.incoming[..self.filled];
        while let Some((&[kind, c0, c1, s0, s1, s2, s3], after)) = rest.split_first_chunk() {
            let size = u32::from_be_bytes([s0, s1, s2, s3]) as usize;
            match after.split_at_checked(size) {
                Some((payload, [FRAME_END, next @ ..])) => {
                    take(&mut self.outgoing, kind, u16::from_be_bytes([c0, c1]), payload)?;
                    rest = next;
                }
                Some((_, [_, ..])) => return Err(malformed().into()),
                _ => break,
            }
        }
        let taken = self.filled - rest.len();
        self.incoming.copy_within(taken..self.filled, 0);
        self.filled -= taken;
        Ok(())
    }
}

pub(super) fn put_method(bytes: &mut Vec<u8>, id: u16, method: &impl Encode) -> io::Result<()> {
    let mut outbound = Outbound::new();
    outbound.method(id, method, FrameMax::DEFAULT).map_err(io::Error::other)?;
    bytes.put(outbound);
    Ok(())
}

pub(super) fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the other end sent what AMQP does not allow")
}

/// Counts the messages that come on a channel.
#[derive(Clone, Default)]
pub(super) struct Contents {
    /// How much of the current body is still to come.
    missing: u64,
    /// How many messages came whole.
    pub(super) whole: u64,
}

impl Contents {
    /// The payload of a header frame. Gives the size of the body.
    pub(super) fn header(&mut self, payload: &[u8]) -> io::Result<u64> {
        self.missing = payload.get(4..12).ok_or_else(malformed)?.get_u64();
        self.whole += u64::from(self.missing == 0);
        Ok(self.missing)
    }

    /// The payload of a body frame.
    pub(super) fn body(&mut self, payload: &[u8]) -> io::Result<()> {
        let missing = self.missing.checked_sub(payload.len() as u64);
        self.missing = missing.ok_or_else(malformed)?;
        self.whole += u64::from(self.missing == 0);
        Ok(())
    }
}
