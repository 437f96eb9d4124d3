//! The bytes that are to be sent: frames are encoded here, and the socket is written from here.

use std::collections::VecDeque;
use std::fmt;
use std::io::IoSlice;

use bytes::{Buf, Bytes};

use crate::error::EncodeError;
use crate::frame::{FRAME_END, FRAME_OVERHEAD, FrameKind, FrameMax, PROTOCOL_HEADER, frame_header};
use crate::method::{CarriesContent, Encode};
use crate::properties::{EncodeProperties, encode_header};

/// From this size on, a piece of a body is not copied into the buffer but sent from where it is. Below
/// it, the copy is cheaper than one more entry in a vectored write.
const COPY_BELOW: usize = 4096;

/// How much memory an emptied buffer keeps for the next time; what one large burst took beyond it is
/// given back.
const KEEP_CAPACITY: usize = 1024 * 1024;

/// The same for the list of large bodies, in entries.
const KEEP_BODIES: usize = 1024;

/// From here on, bytes that were written are not carried along before those that were not.
const MOVE_BEYOND: usize = 64 * 1024;

/// A buffer that frames are encoded into, and from which a socket is written.
///
/// To write, it is a [`Buf`]: hand it to a vectored write. Large bodies are in it by reference, so they
/// are not copied at all; everything else is copied once. When all is written, its memory is used again.
///
/// ```text
///   bytes:    method header 16-byte body | method header body-frame | end octet, method …
///                                                                   ^ here goes a 16 KiB body, by reference
/// ```
#[derive(Default)]
pub struct Outbound {
    /// Everything but large bodies.
    bytes: Vec<u8>,
    /// How much of `bytes` was written.
    written: usize,
    /// Large bodies that were not written, each with the place in `bytes` before which it goes. In order.
    bodies: VecDeque<(usize, Bytes)>,
    /// How much there is left to write, bodies included.
    remaining: usize,
}

impl Outbound {
    /// An empty buffer.
    pub fn new() -> Self {
        Outbound::default()
    }

    /// Appends the eight octets with which a client begins.
    pub fn protocol_header(&mut self) {
        self.bytes.extend_from_slice(&PROTOCOL_HEADER);
        self.remaining += PROTOCOL_HEADER.len();
    }

    /// Appends a sign of life.
    pub fn heartbeat(&mut self) {
        self.bytes.extend_from_slice(&frame_header(FrameKind::Heartbeat, 0, 0));
        self.bytes.push(FRAME_END);
        self.remaining += FRAME_OVERHEAD;
    }

    /// Appends a method. One that carries content belongs into [`Outbound::content`], or its content must follow.
    ///
    /// If it does not fit a frame, nothing is appended.
    #[inline]
    pub fn method(
        &mut self,
        channel: u16,
        method: &(impl Encode + ?Sized),
        max: FrameMax,
    ) -> Result<(), EncodeError> {
        self.encode(|bytes| method_frame(bytes, channel, method, max))
    }

    /// Appends a method and the message it carries: method, header and as many body frames as it takes.
    ///
    /// If method or header do not fit a frame, nothing is appended.
    #[inline]
    pub fn content<'b>(
        &mut self,
        channel: u16,
        method: &(impl CarriesContent + ?Sized),
        properties: &(impl EncodeProperties + ?Sized),
        body: impl Into<Body<'b>>,
        max: FrameMax,
    ) -> Result<(), EncodeError> {
        self.content_within(channel, method, properties, body.into(), max, max)
    }

    /// The same for a broker: as with RabbitMQ, a header may be larger than a frame. It came in a larger frame of another
    /// connection, or has grown since.
    #[inline]
    pub fn relayed_content<'b>(
        &mut self,
        channel: u16,
        method: &(impl CarriesContent + ?Sized),
        properties: &(impl EncodeProperties + ?Sized),
        body: impl Into<Body<'b>>,
        max: FrameMax,
    ) -> Result<(), EncodeError> {
        let header_max = FrameMax::UNLIMITED;
        self.content_within(channel, method, properties, body.into(), max, header_max)
    }

    #[inline]
    fn content_within(
        &mut self,
        channel: u16,
        method: &(impl CarriesContent + ?Sized),
        properties: &(impl EncodeProperties + ?Sized),
        body: Body<'_>,
        max: FrameMax,
        header_max: FrameMax,
    ) -> Result<(), EncodeError> {
        let mut rest = body.bytes();
        self.encode(|bytes| {
            method_frame(bytes, channel, method, max)?;
            let frame = open_frame(bytes, FrameKind::Header, channel);
            encode_header(bytes, rest.len(), properties);
            close_frame(bytes, frame, "content header", header_max)
        })?;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.len().min(max.payload()));
            self.body_frame(channel, piece, &body);
            rest = after;
        }
        Ok(())
    }

    #[inline]
    fn body_frame(&mut self, channel: u16, piece: &[u8], body: &Body<'_>) {
        let header = frame_header(FrameKind::Body, channel, piece.len() as u32);
        self.bytes.extend_from_slice(&header);
        match body {
            Body::Shared(body) if piece.len() >= COPY_BELOW => {
                self.bodies.push_back((self.bytes.len(), body.slice_ref(piece)));
            }
            _ => self.bytes.extend_from_slice(piece),
        }
        self.bytes.push(FRAME_END);
        self.remaining += FRAME_OVERHEAD + piece.len();
    }

    /// Appends all that another buffer has left to write.
    pub fn append(&mut self, other: Outbound) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&other.bytes[other.written..]);
        let moved = other.bodies.into_iter();
        self.bodies.extend(moved.map(|(place, body)| (place - other.written + start, body)));
        self.remaining += other.remaining;
    }

    /// Runs an encoder on the bytes, and undoes what it did if it fails.
    #[inline]
    fn encode(
        &mut self,
        encode: impl FnOnce(&mut Vec<u8>) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        let start = self.bytes.len();
        let result = encode(&mut self.bytes);
        if result.is_err() {
            self.bytes.truncate(start);
        }
        self.remaining += self.bytes.len() - start;
        result
    }

    /// Where in `bytes` the run ends that goes before the body with this index.
    fn run_end(&self, body: usize) -> usize {
        self.bodies.get(body).map_or(self.bytes.len(), |(place, _)| *place)
    }

    /// Uses the memory of what was written again: all of it when nothing is left, and when much was written and
    /// little is left, by moving that to the front.
    fn reclaim(&mut self) {
        if self.remaining == 0 {
            self.bytes.clear();
            self.bytes.shrink_to(KEEP_CAPACITY);
            self.bodies.shrink_to(KEEP_BODIES);
            self.written = 0;
        } else if self.written > MOVE_BEYOND && self.written > self.bytes.len() / 2 {
            self.bytes.drain(..self.written);
            for (place, _) in &mut self.bodies {
                *place -= self.written;
            }
            self.written = 0;
        }
    }
}

/// The body of a message that is to be sent: `&Bytes`, which are not copied if they are many, or `&[u8]`.
#[derive(Clone, Copy, Debug)]
pub enum Body<'b> {
    /// Kept by reference until it is written, unless it is small.
    Shared(&'b Bytes),
    /// Copied, whatever its size.
    Copied(&'b [u8]),
}

impl<'b> Body<'b> {
    #[inline]
    fn bytes(self) -> &'b [u8] {
        match self {
            Body::Shared(bytes) => bytes,
            Body::Copied(bytes) => bytes,
        }
    }
}

impl<'b> From<&'b Bytes> for Body<'b> {
    #[inline]
    fn from(bytes: &'b Bytes) -> Self {
        Body::Shared(bytes)
    }
}

impl<'b> From<&'b [u8]> for Body<'b> {
    #[inline]
    fn from(bytes: &'b [u8]) -> Self {
        Body::Copied(bytes)
    }
}

impl Buf for Outbound {
    #[inline]
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn chunk(&self) -> &[u8] {
        let run = &self.bytes[self.written..self.run_end(0)];
        match self.bodies.front() {
            Some((_, body)) if run.is_empty() => body,
            _ => run,
        }
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let (mut filled, mut from) = (0, self.written);
        let mut fill = |part: &'a [u8]| {
            if !part.is_empty() && filled < slices.len() {
                slices[filled] = IoSlice::new(part);
                filled += 1;
            }
            filled < slices.len()
        };
        for body in 0..=self.bodies.len() {
            let end = self.run_end(body);
            let more = fill(&self.bytes[from..end])
                && self.bodies.get(body).is_none_or(|(_, bytes)| fill(bytes));
            if !more {
                break;
            }
            from = end;
        }
        filled
    }

    fn advance(&mut self, mut count: usize) {
        assert!(count <= self.remaining, "advanced past the end of the buffer");
        self.remaining -= count;
        while count > 0 {
            let run = (self.run_end(0) - self.written).min(count);
            self.written += run;
            count -= run;
            if count == 0 {
                break;
            }
            let Some((_, body)) = self.bodies.front_mut() else {
                break;
            };
            let step = body.len().min(count);
            body.advance(step);
            count -= step;
            if body.is_empty() {
                self.bodies.pop_front();
            }
        }
        self.reclaim();
    }
}

/// Without the bytes: a password may be among them.
impl fmt::Debug for Outbound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbound").field("remaining", &self.remaining).finish_non_exhaustive()
    }
}

#[inline]
fn method_frame(
    bytes: &mut Vec<u8>,
    channel: u16,
    method: &(impl Encode + ?Sized),
    max: FrameMax,
) -> Result<(), EncodeError> {
    let frame = open_frame(bytes, FrameKind::Method, channel);
    method.encode(bytes);
    close_frame(bytes, frame, method.name(), max)
}

/// Appends a frame's envelope with room for its size, and gives back where its payload begins.
#[inline]
fn open_frame(bytes: &mut Vec<u8>, kind: FrameKind, channel: u16) -> usize {
    bytes.extend_from_slice(&frame_header(kind, channel, 0));
    bytes.len()
}

/// Fills in the size of a frame and ends it.
#[inline]
fn close_frame(
    bytes: &mut Vec<u8>,
    payload: usize,
    what: &'static str,
    max: FrameMax,
) -> Result<(), EncodeError> {
    let size = bytes.len() - payload;
    if size > max.payload() {
        return Err(EncodeError { what, size: size + FRAME_OVERHEAD, max: max.get() });
    }
    bytes[payload - 4..payload].copy_from_slice(&(size as u32).to_be_bytes());
    bytes.push(FRAME_END);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::method::{basic, queue};
    use crate::properties::Properties;
    use crate::table::Table;

    fn all(mut outbound: Outbound) -> Vec<u8> {
        outbound.copy_to_bytes(outbound.remaining()).to_vec()
    }

    fn publish(body: impl Into<Bytes>, max: FrameMax) -> Outbound {
        let mut outbound = Outbound::new();
        let method = basic::Publish::default();
        outbound.content(1, &method, &Properties::default(), &body.into(), max).unwrap();
        outbound
    }

    /// Writes like a socket that takes `step` bytes at a time.
    fn drain(outbound: &mut Outbound, step: usize) -> Vec<u8> {
        let mut written = Vec::new();
        while outbound.has_remaining() {
            let mut slices = [IoSlice::new(&[]); 3];
            let filled = outbound.chunks_vectored(&mut slices);
            assert!(filled > 0);
            assert_eq!(slices[0].as_ref(), outbound.chunk());
            let mut left = step;
            for slice in &slices[..filled] {
                let part = &slice[..slice.len().min(left)];
                written.extend_from_slice(part);
                left -= part.len();
            }
            let step = step - left;
            outbound.advance(step);
        }
        written
    }

    #[test]
    fn a_body_is_split_at_the_frame_size_and_an_empty_one_has_no_frame() {
        let overhead = all(publish("", FrameMax::MIN)).len();
        let fits = FrameMax::MIN.payload();
        for (size, frames) in [(1, 1), (fits, 1), (fits + 1, 2), (3 * fits, 3)] {
            let bytes = all(publish(vec![b'x'; size], FrameMax::MIN));
            assert_eq!(bytes.len(), overhead + size + frames * FRAME_OVERHEAD, "body of {size}");
        }
    }

    #[test]
    fn copied_and_referenced_bodies_give_the_same_bytes_in_steps_of_any_size() {
        let sizes = [0, 1, COPY_BELOW - 1, COPY_BELOW, 3 * COPY_BELOW, 200_000];
        let fill = |outbound: &mut Outbound| {
            for (n, size) in sizes.into_iter().enumerate() {
                let body = Bytes::from(vec![n as u8; size]);
                let (method, properties) = (basic::Publish::default(), Properties::default());
                outbound.content(1, &method, &properties, &body, FrameMax::DEFAULT).unwrap();
                outbound.heartbeat();
            }
        };
        let mut outbound = Outbound::new();
        fill(&mut outbound);
        let length = outbound.remaining();
        let expected = all(outbound);
        assert_eq!(expected.len(), length);

        let mut outbound = Outbound::new();
        for step in [1, 7, 4096, 65_536, usize::MAX] {
            fill(&mut outbound);
            assert!(drain(&mut outbound, step) == expected, "in steps of {step}");
        }
    }

    #[test]
    fn frames_may_be_appended_while_others_are_half_written() {
        let append = |outbound: &mut Outbound, n: usize| {
            let body = Bytes::from(vec![n as u8; (n * 977) % 9000]);
            let (method, properties) = (basic::Publish::default(), Properties::default());
            outbound.content(1, &method, &properties, &body, FrameMax::DEFAULT).unwrap();
        };
        let mut whole = Outbound::new();
        let mut stepwise = Outbound::new();
        let mut written = Vec::new();
        for n in 0..2000 {
            append(&mut whole, n);
            append(&mut stepwise, n);
            let mut step = (n * 7919) % 10_000;
            while step > 0 && stepwise.has_remaining() {
                let part = stepwise.chunk().len().min(step);
                written.extend_from_slice(&stepwise.chunk()[..part]);
                stepwise.advance(part);
                step -= part;
            }
        }
        written.extend(drain(&mut stepwise, 3000));
        assert!(written == all(whole));
    }

    #[test]
    fn a_large_body_is_not_copied() {
        let body = Bytes::from(vec![7; 64 * 1024]);
        let outbound = publish(body.clone(), FrameMax::DEFAULT);
        let mut slices = [IoSlice::new(&[]); 8];
        let filled = outbound.chunks_vectored(&mut slices);
        assert!(slices[..filled].iter().any(|slice| slice.as_ptr() == body.as_ptr()));
    }

    #[test]
    fn what_does_not_fit_a_frame_leaves_nothing_behind() {
        let long = "x".repeat(5000);
        let arguments = Table::from_pairs([("long", long.as_str().into())]).unwrap();
        let mut outbound = Outbound::new();
        outbound.heartbeat();
        let before = outbound.remaining();

        let declare = queue::Declare { arguments: arguments.clone(), ..Default::default() };
        let error = outbound.method(1, &declare, FrameMax::MIN).unwrap_err();
        assert_eq!((error.what(), error.max()), ("queue.declare", 4096));

        let properties = Properties { headers: Some(arguments), ..Default::default() };
        let publish = basic::Publish::default();
        let body = Bytes::from_static(b"body");
        let error = outbound.content(1, &publish, &properties, &body, FrameMax::MIN).unwrap_err();
        assert_eq!(error.what(), "content header");

        assert_eq!(outbound.remaining(), before);
        assert_eq!(all(outbound), b"\x08\x00\x00\x00\x00\x00\x00\xce");
    }

    #[test]
    fn a_broker_sends_a_header_of_any_size_and_bodies_that_fit_their_frames() {
        let long = "x".repeat(5000);
        let headers = Table::from_pairs([("long", long.as_str().into())]).unwrap();
        let properties = Properties { headers: Some(headers), ..Default::default() };
        let (deliver, body) = (basic::Deliver::default(), Bytes::from(vec![7; 5000]));
        let mut outbound = Outbound::new();
        outbound.relayed_content(1, &deliver, &properties, &body, FrameMax::MIN).unwrap();
        let bytes = all(outbound);
        let (mut sizes, mut rest) = (Vec::new(), &bytes[..]);
        while let Some(frame) = crate::Frame::decode(rest, FrameMax::UNLIMITED).unwrap() {
            sizes.push((frame.kind, frame.encoded_len() > 4096));
            rest = &rest[frame.encoded_len()..];
        }
        let body = (FrameKind::Body, false);
        assert_eq!(sizes, [(FrameKind::Method, false), (FrameKind::Header, true), body, body]);
    }

    #[test]
    fn what_was_written_is_let_go_of_even_if_the_buffer_is_never_empty() {
        let mut outbound = Outbound::new();
        let body = Bytes::from(vec![1; COPY_BELOW]);
        let (method, properties) = (basic::Publish::default(), Properties::default());
        for _ in 0..20_000 {
            outbound.content(1, &method, &properties, &body, FrameMax::DEFAULT).unwrap();
            outbound.method(1, &basic::Ack::default(), FrameMax::DEFAULT).unwrap();
            outbound.advance(outbound.remaining() - 1);
            assert!(outbound.bodies.is_empty());
        }
        assert!(outbound.bytes.capacity() < 4 * MOVE_BEYOND, "{}", outbound.bytes.capacity());
        assert_eq!(outbound.chunk(), [FRAME_END]);
    }

    #[test]
    fn passwords_are_not_shown() {
        let response = crate::Secret::new(&b"\0guest\0hunter2"[..]);
        let mut outbound = Outbound::new();
        let start_ok = crate::method::connection::StartOk { response, ..Default::default() };
        outbound.method(0, &start_ok, FrameMax::MIN).unwrap();
        let shown = format!("{outbound:?} {start_ok:?}");
        assert!(!shown.contains("hunter2") && !shown.contains("104, 117"), "{shown}");
    }

    #[test]
    fn memory_of_a_burst_is_given_back_and_the_rest_used_again() {
        let mut outbound = Outbound::new();
        for _ in 0..100_000 {
            outbound.method(1, &basic::Ack::default(), FrameMax::MIN).unwrap();
        }
        assert!(outbound.bytes.capacity() > KEEP_CAPACITY);
        outbound.advance(outbound.remaining());
        let kept = outbound.bytes.capacity();
        assert!(kept > 0 && kept <= KEEP_CAPACITY, "kept {kept}");
    }

    #[test]
    fn one_buffer_is_appended_to_another() {
        let max = FrameMax::DEFAULT;
        let large = Bytes::from(vec![7; COPY_BELOW]);
        let mut expected = publish("a", max);
        let mut outbound = publish("a", max);
        for body in [Bytes::from_static(b"b"), large.clone(), Bytes::from_static(b"c")] {
            let mut part = publish(body.clone(), max);
            outbound.append(std::mem::take(&mut part));
            expected.append(publish(body, max));
        }
        // What was written of the other is not appended.
        let mut half = publish(large, max);
        half.advance(20);
        let rest = half.remaining();
        let before = outbound.remaining();
        outbound.append(half);
        assert_eq!(outbound.remaining(), before + rest);
        let mut all = outbound.copy_to_bytes(outbound.remaining());
        assert_eq!(all.split_to(before), expected.copy_to_bytes(before));
    }
}
