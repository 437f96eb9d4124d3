//! The null peer's deliveries: encoded once, and sent again and again with new tags.

use std::io;

use bytes::Buf as _;
use leveret_wire::method::basic;
use leveret_wire::{FrameMax, Outbound, Properties, ShortStr};

use crate::client::tags::Tags;
use crate::message::filler;

/// How much is sent with one system call, about.
const PIECE: usize = 64 * 1024;

/// Where the delivery tag is in a `basic.deliver` frame: after the frame header, the ids, and the consumer tag with
/// its length.
const TAG_AFTER_CONSUMER: usize = 7 + 4 + 1;

/// The only consumer of a channel.
pub(crate) struct Consumer {
    /// As many deliveries as go into one piece.
    piece: Vec<u8>,
    /// The length of one.
    step: usize,
    /// Where in it the tag is.
    tag_at: usize,
    left: u64,
    sent: u64,
    /// 0 = no limit.
    prefetch: u16,
    acked: Tags,
}

impl Consumer {
    /// Fails if the same delivery was acked before, or never sent.
    pub(crate) fn ack(&mut self, tag: u64, multiple: bool) -> io::Result<()> {
        match tag <= self.sent && self.acked.mark(tag, multiple) {
            true => Ok(()),
            false => Err(io::Error::other(format!("unknown delivery tag {tag}"))),
        }
    }

    /// How many deliveries were acked.
    pub(crate) fn acked(&self) -> u64 {
        self.acked.count()
    }

    /// A channel wants this many messages of this size.
    pub(crate) fn new(
        channel: u16,
        tag: ShortStr<'_>,
        size: usize,
        messages: u64,
        prefetch: u16,
    ) -> Self {
        let tag_at = TAG_AFTER_CONSUMER + tag.len();
        let deliver = basic::Deliver {
            consumer_tag: tag,
            delivery_tag: 0,
            redelivered: false,
            exchange: ShortStr::default(),
            routing_key: ShortStr::from_static("key"),
        };
        let mut outbound = Outbound::new();
        let body = filler(size);
        let (properties, max) = (Properties::default(), FrameMax::DEFAULT);
        outbound.content(channel, &deliver, &properties, &body, max).expect("it fits a frame");
        let one = outbound.copy_to_bytes(outbound.remaining());
        let piece = one.repeat(PIECE.div_ceil(one.len()));
        let acked = Tags::default();
        Consumer { piece, step: one.len(), tag_at, left: messages, sent: 0, prefetch, acked }
    }

    /// As many deliveries as may be sent and go into one piece.
    pub(crate) fn next(&mut self) -> &[u8] {
        let room = match self.prefetch {
            0 => u64::MAX,
            prefetch => (self.acked.count() + u64::from(prefetch)).saturating_sub(self.sent),
        };
        let count = room.min(self.left).min((self.piece.len() / self.step) as u64);
        let piece = &mut self.piece[..count as usize * self.step];
        for delivery in piece.chunks_exact_mut(self.step) {
            self.sent += 1;
            delivery[self.tag_at..][..8].copy_from_slice(&self.sent.to_be_bytes());
        }
        self.left -= count;
        piece
    }
}
