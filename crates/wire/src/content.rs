//! Putting a message together again from the frames it came in.

use bytes::{Bytes, BytesMut};

use crate::error::{DecodeError, Fault};
use crate::frame::{FRAME_OVERHEAD, FrameKind, FrameMax};
use crate::properties::{RawProperties, decode_header};

/// A whole message with what the method before it said.
#[derive(Clone, Debug, PartialEq)]
pub struct Content<M> {
    /// What was given to [`Assembler::begin`].
    pub method: M,
    /// The properties.
    pub properties: RawProperties,
    /// The body, in one piece. Not copied if it came in one frame, or by way of [`Assembler::large_body`].
    pub body: Bytes,
}

impl<M> Content<M> {
    /// Copies properties and body into memory of their own, if they shared that of a read. For a message that is kept
    /// for long.
    pub fn compact(&mut self) {
        self.properties.compact();
        self.body = Bytes::copy_from_slice(&self.body);
    }
}

/// The frames of one channel, in the only order in which they may come.
///
/// ```text
///          begin(method)            header, size > 0            body, incomplete
///   Idle ---------------> Header ----------------------> Body ----+
///    ^                      |                            |  ^     |
///    |     header, size 0   |                            |  +-----+
///    +----------------------+                            |
///    |                       body, complete              |
///    +---------------------------------------------------+
/// ```
///
/// `M` is what the caller wants to keep of the method. Memory grows with what arrives, not with what is
/// announced. After an error, everything is refused: the connection is to be closed.
///
/// Malformed properties are no error here: they do not disturb the frames that follow, and a client that closed its
/// connection over them would get the same message again. See [`RawProperties::fault`].
#[derive(Debug)]
pub struct Assembler<M> {
    state: State<M>,
    max_body: u64,
}

#[derive(Debug)]
enum State<M> {
    Idle,
    Header(M),
    Body(Partial<M>),
    Failed(DecodeError),
}

#[derive(Debug)]
struct Partial<M> {
    method: M,
    properties: RawProperties,
    body: PartialBody,
}

impl<M> Partial<M> {
    #[inline]
    fn into_content(self) -> Content<M> {
        let Partial { method, properties, body: PartialBody { first, joined, .. } } = self;
        let body = if joined.is_empty() { first } else { joined.freeze() };
        Content { method, properties, body }
    }
}

/// A body of more than this is read into memory of its own: what does not fit into one frame of RabbitMQ's default size.
/// Smaller ones share the memory of a read, which is cheaper.
const LARGE: u64 = FrameMax::DEFAULT.payload() as u64;

/// For how much of a large body room is made at first, so that most never have to grow. Memory that nothing was written
/// to is not taken from the system.
const FIRST_ROOM: usize = 1024 * 1024;

/// For how many times of what came room is made when it is copied, whatever is announced: small memory may come from what was
/// in use before, and then all of it is taken.
const ROOM_AHEAD: usize = 8;

/// A body that is under way.
#[derive(Debug)]
pub struct PartialBody {
    announced: u64,
    /// The first piece, as it came.
    first: Bytes,
    /// All pieces, once there is a second one: a reference to each would keep the memory of a whole read for it.
    joined: BytesMut,
}

impl PartialBody {
    #[inline]
    fn received(&self) -> u64 {
        (self.first.len() + self.joined.len()) as u64
    }

    fn missing(&self) -> u64 {
        self.announced.saturating_sub(self.received())
    }

    #[inline]
    fn add(&mut self, piece: Bytes) {
        if self.received() == 0 {
            self.first = piece;
            return;
        }
        self.join(piece.len());
        self.joined.extend_from_slice(&piece);
    }

    /// One buffer for all pieces, with room for so many more bytes.
    #[cold]
    fn join(&mut self, more: usize) {
        let first = std::mem::take(&mut self.first);
        self.joined.reserve(first.len() + more);
        self.joined.extend_from_slice(&first);
    }

    /// The buffer of all pieces, with room for so many more bytes and those between two frames. It grows by doubling.
    pub(crate) fn room(&mut self, more: usize) -> &mut BytesMut {
        let most = usize::try_from(self.missing()).unwrap_or(usize::MAX);
        if self.joined.capacity() - self.joined.len() < more + FRAME_OVERHEAD {
            let ahead = FIRST_ROOM.max(self.joined.len()).min(most).max(more);
            self.join(ahead + FRAME_OVERHEAD);
        }
        &mut self.joined
    }
}

impl<M> Assembler<M> {
    /// An assembler that refuses bodies of more than `max_body` bytes as soon as they are announced.
    pub fn new(max_body: u64) -> Self {
        Assembler { state: State::Idle, max_body }
    }

    /// A method came that carries no content: refused in the midst of one.
    #[inline]
    pub fn expect_idle(&mut self) -> Result<(), DecodeError> {
        match self.state {
            State::Idle => Ok(()),
            _ => Err(self.refuse(FrameKind::Method)),
        }
    }

    /// A method came that a content follows.
    #[inline]
    pub fn begin(&mut self, method: M) -> Result<(), DecodeError> {
        self.expect_idle()?;
        self.state = State::Header(method);
        Ok(())
    }

    /// A header frame came. Gives the message if its body is empty.
    #[inline]
    pub fn header(&mut self, payload: Bytes) -> Result<Option<Content<M>>, DecodeError> {
        if !matches!(self.state, State::Header(_)) {
            return Err(self.refuse(FrameKind::Header));
        }
        let (announced, properties) =
            decode_header(payload, self.max_body).map_err(|error| self.fail(error))?;
        let State::Header(method) = std::mem::replace(&mut self.state, State::Idle) else {
            return Ok(None);
        };
        if announced == 0 {
            return Ok(Some(Content { method, properties, body: Bytes::new() }));
        }
        let body = PartialBody { announced, first: Bytes::new(), joined: BytesMut::new() };
        self.state = State::Body(Partial { method, properties, body });
        Ok(None)
    }

    /// A body frame came. Gives the message if it is whole now.
    #[inline]
    pub fn body(&mut self, payload: Bytes) -> Result<Option<Content<M>>, DecodeError> {
        let State::Body(partial) = &mut self.state else {
            return Err(self.refuse(FrameKind::Body));
        };
        let body = &mut partial.body;
        let (announced, received) = (body.announced, body.received() + payload.len() as u64);
        if received > announced {
            let fault = Fault::BodyOverrun { announced, received };
            return Err(self.fail(DecodeError::new(fault, "content body", 0)));
        }
        body.add(payload);
        if received < announced {
            return Ok(None);
        }
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Body(partial) => Ok(Some(partial.into_content())),
            _ => Ok(None),
        }
    }

    /// The body that is under way, if it is a large one and a frame with so much of it is in order: for
    /// [`Inbound::space_for`](crate::Inbound::space_for).
    pub fn large_body(&mut self, size: usize) -> Option<&mut PartialBody> {
        let State::Body(Partial { body, .. }) = &mut self.state else { return None };
        (body.announced > LARGE && size as u64 <= body.missing()).then_some(body)
    }

    /// Copies what there is of an unfinished message into memory of its own, if it shares that of a read: its rest may take
    /// long. `method` does so for what was given to [`Assembler::begin`], and says how many bytes that is.
    ///
    /// Returns how many bytes there are.
    pub fn compact(&mut self, method: impl FnOnce(&mut M) -> usize) -> usize {
        match &mut self.state {
            State::Idle | State::Failed(_) => 0,
            State::Header(begun) => method(begun),
            State::Body(partial) => {
                if !partial.properties.as_bytes().is_unique() {
                    partial.properties.compact();
                }
                if !partial.body.first.is_empty() {
                    let missing = usize::try_from(partial.body.missing()).unwrap_or(usize::MAX);
                    let ahead = (ROOM_AHEAD * partial.body.first.len()).min(FIRST_ROOM);
                    partial.body.join(missing.min(ahead) + FRAME_OVERHEAD);
                }
                let properties = partial.properties.as_bytes().len();
                method(&mut partial.method) + properties + partial.body.joined.len()
            }
        }
    }

    #[cold]
    fn refuse(&mut self, found: FrameKind) -> DecodeError {
        let expected = match &self.state {
            State::Idle => FrameKind::Method,
            State::Header(_) => FrameKind::Header,
            State::Body(_) => FrameKind::Body,
            State::Failed(error) => return error.clone(),
        };
        self.fail(DecodeError::new(Fault::Unexpected { found, expected }, "frame", 0))
    }

    #[cold]
    fn fail(&mut self, error: DecodeError) -> DecodeError {
        self.state = State::Failed(error.clone());
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::properties::{Properties, encode_header};

    fn header(body_size: usize) -> Bytes {
        let mut buffer = Vec::new();
        encode_header(&mut buffer, body_size, &Properties::default());
        buffer.into()
    }

    fn assembler() -> Assembler<&'static str> {
        Assembler::new(100)
    }

    #[test]
    fn an_empty_body_is_complete_with_its_header() {
        let mut assembler = assembler();
        assembler.begin("deliver").unwrap();
        let content = assembler.header(header(0)).unwrap().unwrap();
        assert_eq!((content.method, content.body.len()), ("deliver", 0));
        assembler.begin("again").unwrap();
    }

    #[test]
    fn a_body_in_one_frame_is_not_copied() {
        let mut assembler = assembler();
        assembler.begin("deliver").unwrap();
        assert_eq!(assembler.header(header(5)).unwrap(), None);
        let payload = Bytes::from(b"hello".to_vec());
        let content = assembler.body(payload.clone()).unwrap().unwrap();
        assert_eq!(content.body.as_ptr(), payload.as_ptr());
    }

    #[test]
    fn a_body_in_several_frames_is_joined_and_empty_ones_are_nothing() {
        let mut assembler = assembler();
        assembler.begin("deliver").unwrap();
        assembler.header(header(6)).unwrap();
        for piece in ["", "ab", "", "cd"] {
            assert_eq!(assembler.body(piece.into()).unwrap(), None);
        }
        assert_eq!(assembler.body("ef".into()).unwrap().unwrap().body, "abcdef");
    }

    #[test]
    fn frames_out_of_order_are_refused_and_nothing_is_taken_after_them() {
        use FrameKind::{Body, Header, Method};
        let idle = assembler;
        let begun = || {
            let mut assembler = assembler();
            assembler.begin("one").unwrap();
            assembler
        };
        let amid = || {
            let mut assembler = begun();
            assembler.header(header(2)).unwrap();
            assembler
        };
        type Feed =
            fn(&mut Assembler<&'static str>) -> Result<Option<Content<&'static str>>, DecodeError>;
        let a_method: Feed = |assembler| assembler.expect_idle().map(|()| None);
        let a_content: Feed = |assembler| assembler.begin("two").map(|()| None);
        let a_header: Feed = |assembler| assembler.header(header(2));
        let a_body: Feed = |assembler| assembler.body("x".into());
        for (mut assembler, feed, found, expected) in [
            (idle(), a_header, Header, Method),
            (idle(), a_body, Body, Method),
            (begun(), a_method, Method, Header),
            (begun(), a_content, Method, Header),
            (begun(), a_body, Body, Header),
            (amid(), a_method, Method, Body),
            (amid(), a_content, Method, Body),
            (amid(), a_header, Header, Body),
        ] {
            let error = feed(&mut assembler).unwrap_err();
            assert_eq!(error.fault(), &Fault::Unexpected { found, expected });
            assert_eq!(error.reply_code(), crate::ReplyCode::UNEXPECTED_FRAME);
            for feed in [a_method, a_content, a_header, a_body] {
                assert_eq!(feed(&mut assembler).unwrap_err(), error);
            }
        }
    }

    #[test]
    fn pieces_do_not_keep_the_reads_they_came_in() {
        let mut assembler = Assembler::new(1000);
        assembler.begin("deliver").unwrap();
        assembler.header(header(3)).unwrap();
        let read = Bytes::from(vec![7; 64 * 1024]);
        for _ in 0..2 {
            assembler.body(read.slice(..1)).unwrap();
        }
        assert!(read.is_unique(), "a piece still refers to the read");
        assert_eq!(assembler.body(read.slice(..1)).unwrap().unwrap().body, vec![7; 3]);
    }

    #[test]
    fn an_unfinished_message_that_was_compacted_keeps_no_read() {
        let mut assembler = Assembler::new(1000);
        let read = Bytes::from([vec![7; 64 * 1024], header(3).to_vec()].concat());
        let method = |method: &mut Bytes| {
            *method = Bytes::copy_from_slice(method);
            method.len()
        };
        assert_eq!(assembler.compact(method), 0);
        assembler.begin(read.slice(..10)).unwrap();
        assert_eq!(assembler.compact(method), 10);
        assembler.header(read.slice(64 * 1024..)).unwrap();
        assert_eq!(assembler.compact(method), 10 + 2);
        assembler.body(read.slice(..1)).unwrap();
        for _ in 0..2 {
            assert_eq!(assembler.compact(method), 10 + 2 + 1);
        }
        assert!(read.is_unique(), "something still refers to the read");
        let content = assembler.body(read.slice(..2)).unwrap().unwrap();
        assert_eq!((content.method.len(), content.body), (10, vec![7; 3].into()));
        assert_eq!(assembler.compact(method), 0);
    }

    #[test]
    fn little_that_came_is_compacted_to_little_whatever_is_announced() {
        for (came, most) in [(1, 100), (100, 1000), (FIRST_ROOM, 2 * FIRST_ROOM + 100)] {
            let mut assembler = Assembler::new(u64::MAX);
            assembler.begin("deliver").unwrap();
            assembler.header(header(16 * FIRST_ROOM)).unwrap();
            assembler.body(Bytes::from(vec![7; came])).unwrap();
            assembler.compact(|_| 0);
            let State::Body(Partial { body, .. }) = &assembler.state else { unreachable!() };
            assert!(body.joined.capacity() <= most, "{came} take {}", body.joined.capacity());
        }
    }

    #[test]
    fn malformed_properties_are_the_messages_own_trouble() {
        let mut assembler = assembler();
        assembler.begin("deliver").unwrap();
        let mut payload = header(1).to_vec();
        payload[12] = 0x80;
        assert_eq!(assembler.header(payload.into()).unwrap(), None);
        let content = assembler.body("x".into()).unwrap().unwrap();
        let fault = content.properties.fault().unwrap();
        assert_eq!((fault.field(), fault.offset()), (Some("content_type"), 2));
        assert_eq!(content.properties.get(), Properties::default());
        assert_eq!(content.properties.as_bytes().as_ref(), [0x80, 0]);
        assembler.begin("next").unwrap();
    }

    #[test]
    fn a_compact_message_shares_no_memory() {
        let mut assembler = assembler();
        assembler.begin("deliver").unwrap();
        let read = Bytes::from([&header(2)[..], b"hi"].concat());
        assembler.header(read.slice(..read.len() - 2)).unwrap();
        let mut content = assembler.body(read.slice(read.len() - 2..)).unwrap().unwrap();
        content.compact();
        assert!(read.is_unique());
        assert_eq!(content.body, "hi");
    }

    #[test]
    fn more_body_than_announced_is_refused() {
        let mut assembler = assembler();
        assembler.begin("deliver").unwrap();
        assembler.header(header(3)).unwrap();
        assembler.body("ab".into()).unwrap();
        assert_eq!(
            assembler.body("cd".into()).unwrap_err().fault(),
            &Fault::BodyOverrun { announced: 3, received: 4 }
        );
    }

    #[test]
    fn room_for_a_large_body_grows_with_what_came_and_not_with_what_is_announced() {
        const FRAME: usize = 100_000;
        let mut assembler = Assembler::new(u64::MAX);
        assembler.begin("deliver").unwrap();
        assembler.header(header(usize::MAX)).unwrap();
        for received in 0..300 {
            let body = assembler.large_body(FRAME).unwrap();
            let room = body.room(FRAME);
            assert!(room.capacity() - room.len() >= FRAME + FRAME_OVERHEAD);
            assert!(room.capacity() <= 2 * (received * FRAME + FIRST_ROOM + FRAME_OVERHEAD));
            room.extend_from_slice(&[0; FRAME]);
        }
        assert!(assembler.large_body(usize::MAX).is_none(), "a frame with more than is announced");
    }

    #[test]
    fn a_small_body_is_not_read_in_place() {
        for (size, large) in [(131_064, false), (131_065, true)] {
            let mut assembler = Assembler::new(u64::MAX);
            assembler.begin("deliver").unwrap();
            assert!(assembler.large_body(0).is_none());
            assembler.header(header(size)).unwrap();
            assert_eq!(assembler.large_body(10_000).is_some(), large);
        }
    }

    #[test]
    fn a_body_over_the_limit_is_refused_when_it_is_announced() {
        let mut assembler = assembler();
        assembler.begin("deliver").unwrap();
        let error = assembler.header(header(usize::MAX)).unwrap_err();
        assert_eq!(error.fault(), &Fault::BodyTooLarge { announced: u64::MAX, max: 100 });
        assert_eq!(error.reply_code(), crate::ReplyCode::FRAME_ERROR);
    }

    #[test]
    fn a_header_of_another_class_or_with_weight_is_refused() {
        for (at, fault) in
            [(1, Fault::ContentClass { class: 61 }), (3, Fault::ContentWeight { weight: 1 })]
        {
            let mut assembler = assembler();
            assembler.begin("deliver").unwrap();
            let mut payload = header(1).to_vec();
            payload[at] += 1;
            assert_eq!(assembler.header(payload.into()).unwrap_err().fault(), &fault);
        }
    }
}
