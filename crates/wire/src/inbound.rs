//! The bytes that came and were not looked at yet, handed out as whole frames.

use std::collections::VecDeque;
use std::fmt;

use bytes::buf::Limit;
use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::content::PartialBody;
use crate::error::DecodeError;
use crate::frame::{
    FRAME_HEADER, FRAME_OVERHEAD, Frame, FrameKind, FrameMax, PROTOCOL_HEADER, ProtocolVersion,
};

/// How much memory is made for reads. One read then takes hundreds of small messages.
const READ_SIZE: usize = 64 * 1024;

/// The same after a read that filled all the room it had, since more is waiting then: fewer reads, and fewer frames
/// that are cut by the end of the memory and moved to the next.
const BUSY_READ_SIZE: usize = 256 * 1024;

/// With less room than this, new memory is made. Small reads share one piece of memory, so that a few small messages
/// that are kept do not each keep one.
const LEAST_ROOM: usize = 8 * 1024;

/// How many pieces of memory are kept to be used again once nobody holds a part of them: new memory costs a page fault
/// every 4 KiB. About what is on its way through an application with several consumers that keep up: with half of it, large
/// deliveries cost a tenth more. 3 MiB for a connection that was ever that busy.
const KEEP_USED: usize = 12;

/// How much is read behind a piece of a large body. What follows is most likely the beginning of another one, and all of
/// that which is read here has to be moved there.
const LITTLE: usize = 4 * 1024;

/// With less than this to come of a body frame, it is read like any other: a read of its own costs more than a copy.
const LEAST_IN_PLACE: usize = 8 * 1024;

/// Collects bytes from a peer and gives them back as batches of whole frames.
///
/// It holds at most one unfinished frame beyond what the last read brought, because a frame that is
/// too large is refused from its first seven octets.
pub struct Inbound {
    buffer: BytesMut,
    /// Earlier buffers, the oldest first. Their frames are split off: what is left is a hold on their memory.
    used: VecDeque<BytesMut>,
    /// The buffer was made larger for one frame.
    unusual: bool,
    /// The last read was into a large body, and left so much of the frame to come.
    in_place: Option<usize>,
    max: FrameMax,
    /// What was wrong with the bytes behind the last whole frame.
    error: Option<DecodeError>,
}

impl Inbound {
    /// An empty one that refuses frames over `max`.
    pub fn new(max: FrameMax) -> Self {
        Inbound {
            buffer: BytesMut::with_capacity(READ_SIZE),
            used: VecDeque::new(),
            unusual: false,
            in_place: None,
            max,
            error: None,
        }
    }

    /// Changes the largest frame, once it is agreed on.
    pub fn set_max(&mut self, max: FrameMax) {
        self.max = max;
    }

    /// Where to read the next bytes into. There is always room.
    pub fn space(&mut self) -> impl BufMut + '_ {
        self.ordinary_space()
    }

    fn ordinary_space(&mut self) -> Limit<&mut BytesMut> {
        if self.buffer.capacity() - self.buffer.len() < LEAST_ROOM {
            self.make_room();
        }
        let most = if self.in_place.take().is_some() { LITTLE } else { usize::MAX };
        (&mut self.buffer).limit(most)
    }

    /// Where to read the next bytes into, where bodies may be large: the payload of a frame that is under way goes to the
    /// body it belongs to. `body` gives that for a channel and the size of the payload; see
    /// [`Assembler::large_body`](crate::Assembler::large_body).
    pub fn space_for<'b>(
        &'b mut self,
        body: impl FnOnce(u16, usize) -> Option<&'b mut PartialBody>,
    ) -> Space<'b> {
        let frame = self.long_body_frame();
        let found = frame.and_then(|(channel, size)| Some((size, body(channel, size)?)));
        let place = found.map(|(size, body)| self.take_out(size, body));
        Space { inbound: self, place }
    }

    /// Channel and size of the body frame that is under way, if there is one and it is worth to be read in place.
    #[inline]
    fn long_body_frame(&self) -> Option<(u16, usize)> {
        let (&[kind, c0, c1, s0, s1, s2, s3], came) =
            self.buffer.split_first_chunk::<FRAME_HEADER>()?;
        let size = u32::from_be_bytes([s0, s1, s2, s3]) as usize;
        let begun = came.is_empty() && self.in_place.is_some_and(|left| left > 0);
        let long = begun || size >= came.len() + LEAST_IN_PLACE;
        (kind == FrameKind::Body as u8 && long).then_some((u16::from_be_bytes([c0, c1]), size))
    }

    /// Moves what came of the first frame's payload into its body, and makes room there for the rest.
    fn take_out<'b>(&mut self, size: usize, body: &'b mut PartialBody) -> Place<'b> {
        let bytes = body.room(size);
        let came = &self.buffer[FRAME_HEADER..];
        bytes.extend_from_slice(came);
        let left = size - came.len();
        self.buffer.truncate(FRAME_HEADER);
        self.shorten(left);
        if self.buffer.capacity() < FRAME_HEADER + FRAME_OVERHEAD {
            self.make_room();
        }
        Place { end: bytes.len() + left, bytes }
    }

    /// The rest of the first frame's payload is elsewhere but for so many bytes, and its header says so.
    fn shorten(&mut self, left: usize) {
        self.buffer[FRAME_HEADER - 4..FRAME_HEADER].copy_from_slice(&(left as u32).to_be_bytes());
    }

    /// Goes on in other memory: such as is free again, or new.
    fn make_room(&mut self) {
        let unfinished = self.buffer.len();
        if unfinished + READ_SIZE > BUSY_READ_SIZE {
            // A frame of unusual size. Its memory is not for keeping.
            self.buffer.reserve(READ_SIZE);
            self.unusual = true;
            return;
        }
        let filled = unfinished == self.buffer.capacity();
        let busy = filled || unfinished > READ_SIZE / 2;
        let size = if busy { BUSY_READ_SIZE } else { READ_SIZE };
        if !self.unusual && self.buffer.try_reclaim(size) {
            return;
        }
        // The latest that is free: it is the most likely to be in the processor's cache.
        let free = self.used.iter_mut().rposition(|used| used.try_reclaim(size));
        let free = free.and_then(|place| self.used.remove(place));
        let mut next = free.unwrap_or_else(|| BytesMut::with_capacity(size));
        next.extend_from_slice(&self.buffer);
        let mut used = std::mem::replace(&mut self.buffer, next);
        if !std::mem::take(&mut self.unusual) {
            used.clear();
            self.used.push_back(used);
            if self.used.len() > KEEP_USED {
                self.used.pop_front();
            }
        }
    }

    /// Appends bytes that were read elsewhere.
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The protocol header with which a client begins, or `None` if it is not whole yet.
    pub fn take_protocol_header(&mut self) -> Result<Option<ProtocolVersion>, DecodeError> {
        let version = ProtocolVersion::decode(&self.buffer)?;
        if version.is_some() {
            self.buffer.advance(PROTOCOL_HEADER.len());
        }
        Ok(version)
    }

    /// How many bytes wait for the rest of their frame.
    pub fn pending(&self) -> usize {
        self.buffer.len()
    }

    /// All frames that are whole, or an empty batch.
    ///
    /// Frames before a malformed one are handed out first; the error comes with the next call, and with
    /// every one after it. So call it until the batch is empty, and only then read on.
    pub fn take(&mut self) -> Result<FrameBatch, DecodeError> {
        self.take_at_most(usize::MAX)
    }

    /// The first frame alone if it is whole, or an empty batch.
    pub fn take_one(&mut self) -> Result<FrameBatch, DecodeError> {
        self.take_at_most(1)
    }

    #[inline]
    fn take_at_most(&mut self, mut frames: usize) -> Result<FrameBatch, DecodeError> {
        let mut whole = 0;
        while self.error.is_none() && frames > 0 {
            frames -= 1;
            match Frame::decode(&self.buffer[whole..], self.max) {
                Ok(Some(frame)) => whole += frame.encoded_len(),
                Ok(None) => break,
                Err(error) => self.error = Some(error),
            }
        }
        match &self.error {
            Some(error) if whole == 0 => {
                // Nothing that follows a malformed frame means anything.
                self.buffer.clear();
                Err(error.clone())
            }
            _ if whole == 0 => Ok(FrameBatch { bytes: Bytes::new() }),
            _ => Ok(FrameBatch { bytes: self.buffer.split_to(whole).freeze() }),
        }
    }
}

/// Without the bytes: a password may be among them.
impl fmt::Debug for Inbound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inbound { buffer, max, error, .. } = self;
        f.debug_struct("Inbound")
            .field("pending", &buffer.len())
            .field("max", max)
            .field("error", error)
            .finish()
    }
}

/// Room for the next bytes: see [`Inbound::space_for`].
pub struct Space<'b> {
    inbound: &'b mut Inbound,
    place: Option<Place<'b>>,
}

/// A large body, and where in it the payload of the frame that is under way will end.
///
/// ```text
///                     the body's buffer             the ordinary buffer: the frame, so much shorter
///  before a read      ....payload|                  3 channel size
///  a read brings      ....payload|payload|X 3 ...
///  after it           ....payload|payload|          3 channel 0 X 3 ...
/// ```
struct Place<'b> {
    bytes: &'b mut BytesMut,
    end: usize,
}

impl Space<'_> {
    /// Where to read into. What was read is looked at when the space is dropped.
    pub fn room(&mut self) -> impl BufMut + '_ {
        match &mut self.place {
            None => self.inbound.ordinary_space(),
            // With the octets behind the payload, the frame's last and the header of the next, the next payload can be
            // read in place, too.
            Some(Place { bytes, end }) => {
                let most = *end + FRAME_OVERHEAD - bytes.len();
                (&mut **bytes).limit(most)
            }
        }
    }
}

/// Without the bytes, as for [`Inbound`].
impl fmt::Debug for Space<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Space").field("in_place", &self.place.is_some()).finish_non_exhaustive()
    }
}

impl Drop for Space<'_> {
    fn drop(&mut self) {
        let Some(Place { bytes, end }) = &mut self.place else { return };
        let inbound = &mut *self.inbound;
        let payload_end = bytes.len().min(*end);
        let left = *end - payload_end;
        inbound.shorten(left);
        inbound.buffer.extend_from_slice(&bytes[payload_end..]);
        bytes.truncate(payload_end);
        inbound.in_place = Some(left);
    }
}

/// Whole frames, one after another, in one piece of memory that their payloads share.
#[derive(Clone)]
pub struct FrameBatch {
    /// Nothing but whole frames that were checked.
    bytes: Bytes,
}

impl FrameBatch {
    /// Whether there is no frame.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The frames, in order.
    #[inline]
    pub fn frames(&self) -> Frames<'_> {
        Frames { rest: &self.bytes }
    }

    /// A part of one of the frames' payloads that shall outlive the batch. Not a copy: it shares the
    /// batch's memory, and keeps all of it alive. (Bytes from elsewhere are copied.)
    #[inline]
    pub fn keep(&self, part: &[u8]) -> Bytes {
        let (ours, theirs) = (self.bytes.as_ptr_range(), part.as_ptr_range());
        if ours.start <= theirs.start && theirs.end <= ours.end {
            self.bytes.slice_ref(part)
        } else {
            Bytes::copy_from_slice(part)
        }
    }
}

impl fmt::Debug for FrameBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.frames()).finish()
    }
}

/// The frames of a [`FrameBatch`].
#[derive(Clone, Debug)]
pub struct Frames<'b> {
    rest: &'b [u8],
}

impl<'b> Iterator for Frames<'b> {
    type Item = Frame<'b>;

    #[inline]
    fn next(&mut self) -> Option<Frame<'b>> {
        let frame = Frame::decode(self.rest, FrameMax::UNLIMITED).ok().flatten()?;
        self.rest = &self.rest[frame.encoded_len()..];
        Some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Fault;
    use crate::frame::FrameKind;

    const HEARTBEAT: &[u8] = b"\x08\x00\x00\x00\x00\x00\x00\xce";
    const METHOD: &[u8] = b"\x01\x00\x05\x00\x00\x00\x04abcd\xce";

    #[test]
    fn frames_split_at_every_byte_come_out_whole() {
        let bytes = [HEARTBEAT, METHOD, HEARTBEAT].concat();
        for cut in 0..=bytes.len() {
            let mut inbound = Inbound::new(FrameMax::MIN);
            let mut seen = Vec::new();
            for part in [&bytes[..cut], &bytes[cut..]] {
                inbound.extend_from_slice(part);
                let batch = inbound.take().unwrap();
                seen.extend(batch.frames().map(|frame| (frame.kind, frame.payload.to_vec())));
            }
            let kinds: Vec<FrameKind> = seen.iter().map(|(kind, _)| *kind).collect();
            assert_eq!(kinds, [FrameKind::Heartbeat, FrameKind::Method, FrameKind::Heartbeat]);
            assert_eq!(seen[1].1, b"abcd");
            assert_eq!(inbound.pending(), 0);
        }
    }

    #[test]
    fn frames_before_a_malformed_one_are_handed_out_first() {
        let mut inbound = Inbound::new(FrameMax::MIN);
        inbound.extend_from_slice(HEARTBEAT);
        inbound.extend_from_slice(b"\x09");
        assert_eq!(inbound.take().unwrap().frames().count(), 1);
        for _ in 0..2 {
            inbound.extend_from_slice(HEARTBEAT);
            assert_eq!(inbound.take().unwrap_err().fault(), &Fault::FrameType { found: 9 });
        }
    }

    #[test]
    fn one_frame_is_taken_at_a_time_if_asked() {
        let mut inbound = Inbound::new(FrameMax::MIN);
        inbound.extend_from_slice(&[METHOD, HEARTBEAT].concat());
        for _ in 0..2 {
            assert_eq!(inbound.take_one().unwrap().frames().count(), 1);
        }
        assert!(inbound.take_one().unwrap().is_empty());
    }

    #[test]
    fn what_is_kept_shares_memory_with_the_batch() {
        let mut inbound = Inbound::new(FrameMax::MIN);
        inbound.extend_from_slice(METHOD);
        let batch = inbound.take().unwrap();
        let payload = batch.frames().next().unwrap().payload;
        let kept = batch.keep(&payload[1..3]);
        assert_eq!(kept.as_ptr(), payload[1..].as_ptr());
        let foreign = batch.keep(b"elsewhere");
        drop(batch);
        assert_eq!(kept, "bc");
        assert_eq!(foreign, "elsewhere");
    }

    /// Lets a read bring as much as there is room for of these bytes.
    fn read(inbound: &mut Inbound, from: &mut &[u8]) -> FrameBatch {
        let mut space = inbound.space();
        let room = space.chunk_mut().len().min(from.len());
        space.put_slice(&from[..room]);
        from.advance(room);
        drop(space);
        inbound.take().unwrap()
    }

    fn frames_of(size: usize, count: usize) -> Vec<u8> {
        let length = (size as u32).to_be_bytes();
        let frame = [&[3, 0, 1], length.as_slice(), &vec![b'x'; size], &[0xce]].concat();
        frame.repeat(count)
    }

    #[test]
    fn memory_that_nobody_holds_is_used_again() {
        let bytes = frames_of(1000, 5000);
        let mut inbound = Inbound::new(FrameMax::MIN);
        let mut rest = bytes.as_slice();
        let mut held = FrameBatch { bytes: Bytes::new() };
        let (mut frames, mut memory) = (0, std::collections::HashSet::new());
        while !rest.is_empty() {
            // As an application does, the last batch is held while the next is read.
            held = read(&mut inbound, &mut rest);
            frames += held.frames().count();
            memory.insert(held.bytes.as_ptr() as usize / READ_SIZE);
        }
        drop(held);
        assert_eq!(frames, 5000);
        // Three pieces, each of four times the size that is counted here, and the first one.
        assert!(memory.len() <= 3 * 5 + 2, "{} pieces", memory.len());
    }

    #[test]
    fn small_reads_share_memory_and_large_ones_get_more() {
        let mut inbound = Inbound::new(FrameMax::MIN);
        let mut kept = Vec::new();
        for _ in 0..100 {
            kept.push(read(&mut inbound, &mut frames_of(92, 1).as_slice()));
        }
        let first = kept[0].bytes.as_ptr() as usize;
        assert!(kept.iter().all(|one| one.bytes.as_ptr() as usize - first < READ_SIZE));
        let bytes = frames_of(1000, 500);
        let mut rest = bytes.as_slice();
        let largest = std::iter::from_fn(|| {
            (!rest.is_empty()).then(|| read(&mut inbound, &mut rest).bytes.len())
        });
        assert!(largest.max().unwrap() > READ_SIZE);
    }

    #[test]
    fn what_is_kept_for_use_again_is_bounded() {
        let mut inbound = Inbound::new(FrameMax::UNLIMITED);
        let mut kept = Vec::new();
        for size in [1000, 100_000, 1_000_000, 5_000_000, 100] {
            let bytes = frames_of(size, 20);
            let mut rest = bytes.as_slice();
            let mut frames = 0;
            while !rest.is_empty() {
                let batch = read(&mut inbound, &mut rest);
                assert!(batch.frames().all(|frame| frame.payload.iter().all(|byte| *byte == b'x')));
                frames += batch.frames().count();
                kept.push(batch);
            }
            assert_eq!(frames, 20);
        }
        drop(kept);
        assert!(inbound.used.len() <= KEEP_USED);
        for used in &mut inbound.used {
            assert!(!used.try_reclaim(BUSY_READ_SIZE + 1));
        }
    }
}
