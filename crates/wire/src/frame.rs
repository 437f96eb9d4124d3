//! The envelope: type, channel, length, payload, end octet.
//!
//! ```text
//! 0      1         3             7                  7+size
//! +------+---------+-------------+------------------+------+
//! | type | channel |    size     |     payload      | 0xCE |
//! +------+---------+-------------+------------------+------+
//! ```

use std::fmt;

use crate::error::{DecodeError, Fault};

/// The octet that every frame ends in.
pub const FRAME_END: u8 = 0xCE;

/// What a frame takes beside its payload: seven octets before and one behind.
pub const FRAME_OVERHEAD: usize = FRAME_HEADER + 1;

/// Type, channel and size.
pub(crate) const FRAME_HEADER: usize = 7;

/// What a client sends first.
pub const PROTOCOL_HEADER: [u8; 8] = *b"AMQP\x00\x00\x09\x01";

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// A method.
    Method = 1,
    /// Properties and body size of a message.
    Header = 2,
    /// A piece of a message's body.
    Body = 3,
    /// A sign of life.
    Heartbeat = 8,
}

impl FrameKind {
    #[inline]
    fn from_octet(octet: u8) -> Option<Self> {
        match octet {
            1 => Some(FrameKind::Method),
            2 => Some(FrameKind::Header),
            3 => Some(FrameKind::Body),
            8 => Some(FrameKind::Heartbeat),
            _ => None,
        }
    }
}

impl fmt::Display for FrameKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FrameKind::Method => "method",
            FrameKind::Header => "content header",
            FrameKind::Body => "content body",
            FrameKind::Heartbeat => "heartbeat",
        })
    }
}

/// The largest frame, framing included, as two peers agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrameMax(u32);

impl FrameMax {
    /// The least that the specification allows. RabbitMQ 4.3 wants at least 8192.
    pub const MIN: FrameMax = FrameMax(4096);

    /// RabbitMQ's default: 128 KiB.
    pub const DEFAULT: FrameMax = FrameMax(131_072);

    /// No limit but what four octets of length can say.
    pub const UNLIMITED: FrameMax = FrameMax(u32::MAX);

    /// A limit as `connection.tune` has it: 0 is none. `None` if it is less than [`FrameMax::MIN`].
    #[inline]
    pub fn new(bytes: u32) -> Option<Self> {
        match bytes {
            0 => Some(Self::UNLIMITED),
            bytes if bytes < Self::MIN.0 => None,
            bytes => Some(FrameMax(bytes)),
        }
    }

    /// The limit in bytes.
    #[inline]
    pub fn get(self) -> u32 {
        self.0
    }

    /// How much of a body fits into one frame.
    #[inline]
    pub const fn payload(self) -> usize {
        self.0 as usize - FRAME_OVERHEAD
    }
}

/// One frame, borrowed from the bytes it came in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// What it carries.
    pub kind: FrameKind,
    /// For which channel.
    pub channel: u16,
    /// What is between the envelope's seven octets and its last.
    pub payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// The first frame of these bytes, or `None` if it is not whole yet.
    ///
    /// Type and size are checked as soon as they are there, so that nobody waits, or makes room, for a
    /// frame that will be refused. As with RabbitMQ, the limit holds for the payload: a peer that forgot the
    /// eight octets of framing is understood.
    #[inline]
    pub fn decode(bytes: &'a [u8], max: FrameMax) -> Result<Option<Self>, DecodeError> {
        let Some(&first) = bytes.first() else {
            return Ok(None);
        };
        let Some(kind) = FrameKind::from_octet(first) else {
            return unknown_type(bytes);
        };
        let Some((&[_, c0, c1, s0, s1, s2, s3], rest)) = bytes.split_first_chunk::<FRAME_HEADER>()
        else {
            return Ok(None);
        };
        let channel = u16::from_be_bytes([c0, c1]);
        let size = u32::from_be_bytes([s0, s1, s2, s3]);
        if size > max.0 {
            let size = u64::from(size) + FRAME_OVERHEAD as u64;
            return Err(DecodeError::new(Fault::FrameTooLarge { size, max: max.0 }, "frame", 3));
        }
        if kind == FrameKind::Heartbeat && (channel, size) != (0, 0) {
            return Err(DecodeError::new(Fault::Heartbeat { channel }, "frame", 1));
        }
        let size = size as usize;
        let Some((payload, [end, ..])) = rest.split_at_checked(size) else {
            return Ok(None);
        };
        if *end != FRAME_END {
            let at = FRAME_HEADER + size;
            return Err(DecodeError::new(Fault::FrameEnd { found: *end }, "frame", at));
        }
        Ok(Some(Frame { kind, channel, payload }))
    }

    /// How many bytes the frame takes with its envelope.
    #[inline]
    pub fn encoded_len(&self) -> usize {
        FRAME_OVERHEAD + self.payload.len()
    }
}

/// Without the payload: a password may be in it.
impl fmt::Debug for Frame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Frame { kind, channel, payload } = self;
        write!(f, "Frame({kind} on channel {channel}, {} bytes)", payload.len())
    }
}

/// Type, channel and size of a frame.
#[inline]
pub(crate) fn frame_header(kind: FrameKind, channel: u16, size: u32) -> [u8; FRAME_HEADER] {
    let ([c0, c1], [s0, s1, s2, s3]) = (channel.to_be_bytes(), size.to_be_bytes());
    [kind as u8, c0, c1, s0, s1, s2, s3]
}

/// An unknown type octet: a peer that answers with a protocol header begins with `A`.
#[cold]
fn unknown_type(bytes: &[u8]) -> Result<Option<Frame<'_>>, DecodeError> {
    let fault = if bytes[0] == b'A' {
        match ProtocolVersion::decode(bytes) {
            Ok(None) => return Ok(None),
            Ok(Some(version)) => Fault::PeerSpeaks(version),
            Err(_) => Fault::FrameType { found: b'A' },
        }
    } else {
        Fault::FrameType { found: bytes[0] }
    };
    Err(DecodeError::new(fault, "frame", 0))
}

/// The version in a protocol header: eight octets, `AMQP` and four numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ProtocolVersion(pub [u8; 4]);

impl ProtocolVersion {
    /// AMQP 0-9-1, the one that this crate speaks.
    pub const V0_9_1: ProtocolVersion = ProtocolVersion([0, 0, 9, 1]);

    /// Reads a protocol header, or gives `None` if it is not whole yet.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>, DecodeError> {
        let magic = b"AMQP";
        let common = bytes.iter().zip(magic).take_while(|(found, wanted)| found == wanted).count();
        if common < bytes.len().min(magic.len()) {
            return Err(DecodeError::new(Fault::NotAmqp, "protocol header", common));
        }
        Ok(match bytes {
            [_, _, _, _, a, b, c, d, ..] => Some(ProtocolVersion([*a, *b, *c, *d])),
            _ => None,
        })
    }
}

impl fmt::Display for ProtocolVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            // 0-9-1 and its kin have the version in the last three octets; AMQP 1.0 and 0-8 differ.
            [0, major, minor, revision] => write!(f, "{major}-{minor}-{revision}"),
            [id, major, minor, revision] => {
                write!(f, "{major}-{minor}-{revision} (protocol id {id})")
            }
        }
    }
}

impl fmt::Debug for ProtocolVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(bytes: &[u8]) -> Fault {
        Frame::decode(bytes, FrameMax::MIN).unwrap_err().fault().clone()
    }

    #[test]
    fn a_frame_is_whole_or_not_yet() {
        let bytes = b"\x01\x00\x07\x00\x00\x00\x03abc\xceNEXT";
        for cut in 0..11 {
            assert_eq!(Frame::decode(&bytes[..cut], FrameMax::MIN), Ok(None), "cut at {cut}");
        }
        let frame = Frame::decode(bytes, FrameMax::MIN).unwrap().unwrap();
        assert_eq!(frame, Frame { kind: FrameKind::Method, channel: 7, payload: b"abc" });
        assert_eq!(frame.encoded_len(), 11);
    }

    #[test]
    fn an_oversize_frame_is_refused_from_its_header_alone() {
        assert_eq!(
            fault(b"\x03\x00\x01\xff\xff\xff\xff"),
            Fault::FrameTooLarge { size: u64::from(u32::MAX) + 8, max: 4096 }
        );
        let just_too_large = 4097u32.to_be_bytes();
        assert_eq!(
            fault(&[[3, 0, 1].as_slice(), &just_too_large].concat()),
            Fault::FrameTooLarge { size: 4105, max: 4096 }
        );
        let largest = 4096u32.to_be_bytes();
        let header = [[3, 0, 1].as_slice(), &largest].concat();
        assert_eq!(Frame::decode(&header, FrameMax::MIN), Ok(None));
    }

    #[test]
    fn a_wrong_type_or_end_is_refused() {
        assert_eq!(fault(b"\x04"), Fault::FrameType { found: 4 });
        assert_eq!(fault(b"HTTP/1.1 400"), Fault::FrameType { found: b'H' });
        let error = Frame::decode(b"\x08\x00\x00\x00\x00\x00\x00\xcd", FrameMax::MIN).unwrap_err();
        assert_eq!(error.fault(), &Fault::FrameEnd { found: 0xcd });
        assert_eq!(error.offset(), 7);
        assert_eq!(error.reply_code(), crate::ReplyCode::FRAME_ERROR);
    }

    #[test]
    fn a_peer_that_answers_with_a_protocol_header_is_understood() {
        assert_eq!(
            fault(b"AMQP\x00\x01\x00\x00"),
            Fault::PeerSpeaks(ProtocolVersion([0, 1, 0, 0]))
        );
        let error = Frame::decode(b"AMQP\x00\x00\x09\x01", FrameMax::MIN).unwrap_err();
        assert!(error.to_string().contains("protocol header, AMQP 0-9-1"), "{error}");
        assert_eq!(Frame::decode(b"AMQ", FrameMax::MIN), Ok(None));
        assert_eq!(fault(b"ANQP"), Fault::FrameType { found: b'A' });
        assert_eq!(ProtocolVersion::decode(&PROTOCOL_HEADER), Ok(Some(ProtocolVersion::V0_9_1)));
        assert!(ProtocolVersion::decode(b"GET /").is_err());
    }

    #[test]
    fn a_heartbeat_is_empty_and_on_channel_0() {
        assert_eq!(fault(b"\x08\x00\x03\x00\x00\x00\x00\xce"), Fault::Heartbeat { channel: 3 });
        assert_eq!(fault(b"\x08\x00\x00\x00\x00\x00\x01x\xce"), Fault::Heartbeat { channel: 0 });
    }

    #[test]
    fn the_lower_limit_of_two_holds_and_0_is_none() {
        let limits = [0, 8192].map(|bytes| FrameMax::new(bytes).unwrap());
        assert_eq!(limits.into_iter().min(), FrameMax::new(8192));
        assert_eq!(FrameMax::new(4095), None);
        assert_eq!(FrameMax::DEFAULT.payload(), 131_064);
    }
}
