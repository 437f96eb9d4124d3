//! What can be wrong with bytes from a peer, and with values that are to be sent.

use std::error::Error;
use std::fmt;

use crate::frame::{FRAME_END, FrameKind, ProtocolVersion};
use crate::method::Method;
use crate::reply::ReplyCode;
use crate::value::MAX_DEPTH;

/// Bytes from a peer that are not AMQP 0-9-1: what was wrong, where, and which reply code it deserves.
///
/// Boxed inside, because a decoder returns a `Result` per frame and fails at most once per connection.
#[derive(Clone, PartialEq, Eq)]
pub struct DecodeError(Box<Details>);

#[derive(Clone, PartialEq, Eq)]
struct Details {
    fault: Fault,
    /// What was being decoded, such as `basic.deliver`.
    within: &'static str,
    /// The field of it, where it has fields.
    field: Option<&'static str>,
    /// Bytes from the start of what was being decoded.
    offset: usize,
}

/// The ways in which bytes can be wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// A value needs more bytes than what holds it has left.
    Truncated {
        /// How many bytes the value needs.
        needed: u64,
        /// How many there are.
        left: usize,
    },
    /// Bytes are left after the last field.
    TrailingBytes {
        /// How many.
        left: usize,
    },
    /// A frame does not end in the octet `0xCE`.
    FrameEnd {
        /// The octet at its place.
        found: u8,
    },
    /// A frame announces more than the negotiated maximum.
    FrameTooLarge {
        /// The frame's size with its eight octets of framing.
        size: u64,
        /// The maximum.
        max: u32,
    },
    /// A frame of no known type.
    FrameType {
        /// The type octet.
        found: u8,
    },
    /// The peer sent a protocol header: it refuses ours and names the version it speaks.
    PeerSpeaks(ProtocolVersion),
    /// Bytes at the place of a protocol header that are none.
    NotAmqp,
    /// A method that neither the specification nor RabbitMQ knows.
    UnknownMethod {
        /// The class id.
        class: u16,
        /// The method id.
        method: u16,
    },
    /// A field of a table or array with an unknown type tag.
    UnknownType {
        /// The tag.
        tag: u8,
    },
    /// Tables or arrays nested deeper than [`MAX_DEPTH`].
    TooDeep,
    /// A floating point number that is infinite or not a number, which RabbitMQ cannot read.
    NotFinite,
    /// A heartbeat that is not on channel 0, or not empty.
    Heartbeat {
        /// Its channel.
        channel: u16,
    },
    /// A content header of a class that carries no content.
    ContentClass {
        /// The class id.
        class: u16,
    },
    /// A content header whose weight is not zero.
    ContentWeight {
        /// The weight.
        weight: u16,
    },
    /// A frame that does not fit the one before it on the channel.
    Unexpected {
        /// What came.
        found: FrameKind,
        /// What had to come.
        expected: FrameKind,
    },
    /// Body frames with more bytes than the header announced.
    BodyOverrun {
        /// The announced size.
        announced: u64,
        /// How many bytes came.
        received: u64,
    },
    /// A header that announces a body larger than this side takes.
    BodyTooLarge {
        /// The announced size.
        announced: u64,
        /// The limit.
        max: u64,
    },
}

impl DecodeError {
    #[cold]
    pub(crate) fn new(fault: Fault, within: &'static str, offset: usize) -> Self {
        DecodeError(Box::new(Details { fault, within, field: None, offset }))
    }

    /// Names what was being decoded, on the way up from the reader that only knows the offset.
    #[cold]
    pub(crate) fn named(mut self, within: &'static str, field: Option<&'static str>) -> Self {
        self.0.within = within;
        self.0.field = field;
        self
    }

    /// Counts the offset from further out.
    #[cold]
    pub(crate) fn shifted(mut self, by: usize) -> Self {
        self.0.offset += by;
        self
    }

    /// What was wrong.
    pub fn fault(&self) -> &Fault {
        &self.0.fault
    }

    /// What was being decoded: a method by its name (`basic.deliver`), or `frame`, `content header`…
    pub fn within(&self) -> &'static str {
        self.0.within
    }

    /// The field that was being decoded, where it was one.
    pub fn field(&self) -> Option<&'static str> {
        self.0.field
    }

    /// How many bytes after the start of the frame's payload (or of the frame, for faults of its
    /// envelope) the fault was found.
    pub fn offset(&self) -> usize {
        self.0.offset
    }

    /// Class id and method id of the method that was being decoded, as a `connection.close` names it.
    pub fn method_id(&self) -> Option<(u16, u16)> {
        Method::id_of(self.0.within)
    }

    /// The reply code with which the connection should be closed, as RabbitMQ 4.3 does it where it has a code. (A peer
    /// that sent a protocol header, or what is none, is answered with a protocol header instead.)
    pub fn reply_code(&self) -> ReplyCode {
        match self.0.fault {
            Fault::FrameEnd { .. }
            | Fault::FrameTooLarge { .. }
            | Fault::FrameType { .. }
            | Fault::PeerSpeaks(_)
            | Fault::NotAmqp
            | Fault::Truncated { .. }
            | Fault::TrailingBytes { .. }
            | Fault::BodyOverrun { .. }
            | Fault::BodyTooLarge { .. } => ReplyCode::FRAME_ERROR,
            Fault::UnknownType { .. } | Fault::TooDeep | Fault::NotFinite => {
                ReplyCode::SYNTAX_ERROR
            }
            Fault::UnknownMethod { .. } => ReplyCode::NOT_IMPLEMENTED,
            Fault::ContentClass { .. }
            | Fault::ContentWeight { .. }
            | Fault::Heartbeat { .. }
            | Fault::Unexpected { .. } => ReplyCode::UNEXPECTED_FRAME,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Truncated { needed, left } => {
                write!(f, "bytes needed: {needed}, left: {left}")
            }
            Fault::TrailingBytes { left } => write!(f, "bytes too many: {left}"),
            Fault::FrameEnd { found } => {
                write!(f, "the frame ends in {found:#04x} and not in {FRAME_END:#04x}")
            }
            Fault::FrameTooLarge { size, max } => {
                write!(f, "a frame of {size} bytes, where at most {max} were agreed on")
            }
            Fault::FrameType { found } => write!(f, "unknown frame type {found}"),
            Fault::PeerSpeaks(version) => {
                write!(f, "the peer sent a protocol header, AMQP {version}, where a frame was due")
            }
            Fault::NotAmqp => write!(f, "the peer does not speak AMQP"),
            Fault::UnknownMethod { class, method } => {
                write!(f, "unknown method {method} of class {class}")
            }
            Fault::UnknownType { tag } => match char::from(*tag) {
                c if c.is_ascii_graphic() => write!(f, "unknown field type '{c}'"),
                _ => write!(f, "unknown field type {tag:#04x}"),
            },
            Fault::TooDeep => write!(f, "tables nested more than {MAX_DEPTH} deep"),
            Fault::NotFinite => write!(f, "a number that is infinite or not a number"),
            Fault::Heartbeat { channel } => {
                write!(f, "a heartbeat on channel {channel}, or with a payload")
            }
            Fault::ContentClass { class } => {
                write!(
                    f,
                    "a content header of class {class}; only class 60 (basic) carries content"
                )
            }
            Fault::ContentWeight { weight } => write!(f, "a content weight of {weight}, not 0"),
            Fault::Unexpected { found, expected } => {
                write!(f, "a {found} frame came where a {expected} frame was due")
            }
            Fault::BodyOverrun { announced, received } => {
                write!(f, "a body of {announced} bytes was announced, {received} came")
            }
            Fault::BodyTooLarge { announced, max } => {
                write!(f, "a body of {announced} bytes; at most {max} are taken")
            }
        }
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Details { fault, within, field, offset } = &*self.0;
        write!(f, "malformed {within}")?;
        if let Some(field) = field {
            write!(f, ", field {field}")?;
        }
        write!(f, ", byte {offset}: {fault} ({})", self.reply_code())
    }
}

impl fmt::Debug for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DecodeError({self})")
    }
}

impl Error for DecodeError {}

/// A method or content header that does not fit one frame of the negotiated size. Nothing was encoded.
///
/// Bodies are split over frames; methods and headers cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodeError {
    pub(crate) what: &'static str,
    pub(crate) size: usize,
    pub(crate) max: u32,
}

impl EncodeError {
    /// What was to be encoded: a method by its name, or `content header`.
    pub fn what(&self) -> &'static str {
        self.what
    }

    /// The size of the frame it would take.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The largest frame that was agreed on.
    pub fn max(&self) -> u32 {
        self.max
    }
}

impl fmt::Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EncodeError { what, size, max } = self;
        write!(
            f,
            "{what} needs a frame of {size} bytes, and at most {max} were agreed on with the peer: \
             shorten its tables or headers, or raise frame_max on both sides"
        )
    }
}

impl Error for EncodeError {}

/// A value that AMQP, or RabbitMQ, cannot carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidValue {
    /// A short string (a name, a key, most properties) of more than 255 bytes.
    TooLong {
        /// Its length in bytes.
        length: usize,
    },
    /// Tables or arrays nested deeper than [`MAX_DEPTH`].
    TooDeep,
    /// A floating point number that is infinite or not a number: RabbitMQ closes the connection on it.
    NotFinite,
}

impl fmt::Display for InvalidValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvalidValue::TooLong { length } => {
                write!(f, "a name or key of {length} bytes; AMQP takes at most 255")
            }
            InvalidValue::TooDeep => write!(f, "tables nested more than {MAX_DEPTH} deep"),
            InvalidValue::NotFinite => {
                write!(f, "a number that is infinite or not a number; RabbitMQ cannot read it")
            }
        }
    }
}

impl Error for InvalidValue {}
