//! The null peer's deliveries: encoded once, and sent again and again with new tags.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::TcpStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use bytes::{Buf, Bytes};
use leveret_wire::method::basic;
use leveret_wire::{FrameMax, Outbound, Properties, ShortStr};

use super::tags::Tags;

/// How much is sent with one system call, about.
const PIECE: usize = 64 * 1024;

/// Where the delivery tag is in a `basic.deliver` frame: after the frame header, the ids, and the consumer tag with
/// its length.
const TAG_AFTER_CONSUMER: usize = 7 + 4 + 1;

/// The deliveries of one connection.
#[derive(Default)]
pub(crate) struct Deliveries {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    consumers: BTreeMap<u16, Consumer>,
    over: bool,
}

/// The only consumer of a channel.
struct Consumer {
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

impl Deliveries {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A channel wants this many messages of this size.
    pub(crate) fn add(
        &self,
        channel: u16,
        tag: ShortStr<'_>,
        size: usize,
        messages: u64,
        prefetch: u16,
    ) {
        let consumer = Consumer::new(channel, tag, size, messages, prefetch);
        self.lock().consumers.insert(channel, consumer);
        self.changed.notify_one();
    }

    /// Fails if the same delivery was acked before, or never sent.
    pub(crate) fn ack(&self, channel: u16, tag: u64, multiple: bool) -> io::Result<()> {
        let mut state = self.lock();
        let consumer = state.consumers.get_mut(&channel);
        let known = consumer
            .is_some_and(|consumer| tag <= consumer.sent && consumer.acked.mark(tag, multiple));
        match known {
            true => Ok(()),
            false => Err(io::Error::other(format!("unknown delivery tag {tag}"))),
        }
    }

    /// How many deliveries of a channel were acked.
    pub(crate) fn acked(&self, channel: u16) -> u64 {
        self.lock().consumers.get(&channel).map_or(0, |consumer| consumer.acked.count())
    }

    /// Acks may have made room.
    pub(crate) fn go_on(&self) {
        self.changed.notify_one();
    }

    /// The connection is over.
    pub(crate) fn stop(&self) {
        self.lock().over = true;
        self.changed.notify_one();
    }

    /// Sends until the connection is over, the channels in turns.
    pub(crate) fn send(&self, writer: &Mutex<TcpStream>) {
        let mut bytes = Vec::new();
        let mut state = self.lock();
        while !state.over {
            let mut idle = true;
            for channel in state.consumers.keys().copied().collect::<Vec<_>>() {
                let Some(consumer) = state.consumers.get_mut(&channel) else { continue };
                bytes.clear();
                consumer.next(&mut bytes);
                if bytes.is_empty() {
                    continue;
                }
                idle = false;
                drop(state);
                let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
                if writer.write_all(&bytes).is_err() {
                    return;
                }
                drop(writer);
                state = self.lock();
            }
            if idle && !state.over {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl Consumer {
    fn new(channel: u16, tag: ShortStr<'_>, size: usize, messages: u64, prefetch: u16) -> Self {
        let tag_at = TAG_AFTER_CONSUMER + tag.len();
        let deliver = basic::Deliver {
            consumer_tag: tag,
            delivery_tag: 0,
            redelivered: false,
            exchange: ShortStr::default(),
            routing_key: ShortStr::from_static("key"),
        };
        let mut outbound = Outbound::new();
        let body = Bytes::from(vec![b'x'; size]);
        let (properties, max) = (Properties::default(), FrameMax::DEFAULT);
        outbound.content(channel, &deliver, &properties, &body, max).expect("it fits a frame");
        let one = outbound.copy_to_bytes(outbound.remaining());
        let piece = one.repeat(PIECE.div_ceil(one.len()));
        let acked = Tags::default();
        Consumer { piece, step: one.len(), tag_at, left: messages, sent: 0, prefetch, acked }
    }

    /// Appends as many deliveries as may be sent and go into one piece.
    fn next(&mut self, bytes: &mut Vec<u8>) {
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
        bytes.extend_from_slice(piece);
    }
}
