//! A message as the broker keeps it: one piece of memory for everything but a large body.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use leveret_wire::{Body, Properties, RawProperties, ShortStr, Table};
use triomphe::ThinArc;

use crate::death::Deaths;

/// The name of an exchange or queue, shared by the messages that went through it.
pub(crate) type Name = Arc<ShortStr<'static>>;

/// From this size on a body is kept where the read put it; below, it is copied, so that a small message that stays does
/// not keep the whole read.
const COPY_BELOW: usize = 4096;

/// From this size on a body is not much smaller than the read that it came in.
const LARGE: usize = 64 * 1024;

/// How large all bodies of a virtual host between these sizes together may be and still share the memory of reads, which saves a
/// copy: more than what is on its way to consumers that keep up. In the worst case they keep 256 MiB of reads.
const MOST_IN_READS: usize = 4 * 1024 * 1024;

/// A message. It clones cheaply: one that reaches ten queues is kept once.
#[derive(Clone)]
pub(crate) struct Message(ThinArc<Head, u8>);

/// What goes before the bytes: routing key, properties, and the body if it is small.
struct Head {
    exchange: Name,
    large_body: Option<Box<Bytes>>,
    aside: Option<Box<Counted>>,
    properties: u32,
    /// Its own time to live in milliseconds, or [`NO_TTL`].
    ttl: u64,
    routing_key: u8,
    persistent: bool,
}

const NO_TTL: u64 = u64::MAX;

/// It is counted once, and not whenever a queue takes or gives the message.
struct Counted {
    aside: Aside,
    size: usize,
}

/// What few messages have, and no client is told.
#[derive(Clone, Debug, Default)]
pub(crate) struct Aside {
    /// The routing keys beside the first: those of `CC`, then those of `BCC`.
    pub(crate) copies: Vec<ShortStr<'static>>,
    /// Those of `BCC` alone.
    pub(crate) blind: Vec<ShortStr<'static>>,
    /// Where it died before.
    pub(crate) deaths: Deaths,
    /// The headers as they came, if 4.3 left some out because their names came again: consumers see the first of a name,
    /// and headers exchanges go by the last.
    pub(crate) headers: Option<Table<'static>>,
}

impl Aside {
    fn is_empty(&self) -> bool {
        let Aside { copies, blind, deaths, headers } = self;
        copies.is_empty() && blind.is_empty() && deaths.is_empty() && headers.is_none()
    }

    fn counted(self) -> Box<Counted> {
        let Aside { copies, blind, deaths, headers } = &self;
        let headers = headers.as_ref().map_or(0, |headers| headers.as_bytes().len());
        let size = size_of::<Counted>() + size_of_keys(copies) + size_of_keys(blind);
        Box::new(Counted { size: size + deaths.size() + headers, aside: self })
    }
}

/// What an allocation takes beside its bytes, about.
const ALLOCATION: usize = 16;

/// How much memory routing keys take, about.
pub(crate) fn size_of_keys(keys: &[ShortStr<'_>]) -> usize {
    keys.iter().map(|key| size_of::<ShortStr<'_>>() + ALLOCATION + key.len()).sum()
}

/// What a message is made of.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    pub(crate) exchange: &'a Name,
    pub(crate) routing_key: &'a ShortStr<'a>,
    pub(crate) properties: &'a RawProperties,
    /// Its own time to live in milliseconds.
    pub(crate) ttl: Option<u64>,
    pub(crate) aside: Aside,
    pub(crate) body: Bytes,
}

/// Where a message is put together before it gets memory of its own.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    bytes: Vec<u8>,
    /// The size of all bodies that share the memory of a read and are small beside it.
    in_reads: Arc<AtomicUsize>,
}

impl Scratch {
    /// A body as it may be kept, for however long: it does not keep a read that is much larger, unless few others do.
    pub(crate) fn release(&self, body: Bytes) -> Bytes {
        if !(COPY_BELOW..LARGE).contains(&body.len()) || body.is_unique() {
            return body;
        }
        if self.in_reads.fetch_add(body.len(), Relaxed) < MOST_IN_READS {
            let in_reads = Arc::clone(&self.in_reads);
            return Bytes::from_owner(BodyInRead { body, in_reads });
        }
        self.in_reads.fetch_sub(body.len(), Relaxed);
        Bytes::copy_from_slice(&body)
    }
}

/// A body that shares the memory of a read, and counts for as long as anybody has it.
struct BodyInRead {
    body: Bytes,
    in_reads: Arc<AtomicUsize>,
}

impl AsRef<[u8]> for BodyInRead {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

impl Drop for BodyInRead {
    fn drop(&mut self) {
        self.in_reads.fetch_sub(self.body.len(), Relaxed);
    }
}

impl Message {
    pub(crate) fn new(scratch: &mut Scratch, parts: Parts<'_>) -> Self {
        let Parts { exchange, routing_key, properties, ttl, aside, body } = parts;
        let bytes = &mut scratch.bytes;
        bytes.clear();
        bytes.extend_from_slice(routing_key.as_bytes());
        bytes.extend_from_slice(properties.as_bytes());
        let large_body = if body.len() < COPY_BELOW {
            bytes.extend_from_slice(&body);
            None
        } else {
            Some(Box::new(body))
        };
        let head = Head {
            exchange: Arc::clone(exchange),
            large_body,
            aside: (!aside.is_empty()).then(|| aside.counted()),
            // A header is at most a frame, and a frame at most 4 GiB.
            properties: properties.as_bytes().len() as u32,
            ttl: ttl.unwrap_or(NO_TTL),
            routing_key: routing_key.len() as u8,
            persistent: is_persistent(properties.as_bytes()),
        };
        Message(ThinArc::from_header_and_slice(head, bytes))
    }

    fn head(&self) -> &Head {
        &self.0.header.header
    }

    /// The exchange it was published to.
    pub(crate) fn exchange(&self) -> &Name {
        &self.head().exchange
    }

    pub(crate) fn routing_key(&self) -> ShortStr<'_> {
        let key = &self.0.slice[..usize::from(self.head().routing_key)];
        ShortStr::from_bytes(key).unwrap_or_default()
    }

    fn properties_end(&self) -> usize {
        usize::from(self.head().routing_key) + self.head().properties as usize
    }

    /// The properties that consumers get, in their encoded form.
    #[inline]
    pub(crate) fn encoded_properties(&self) -> &[u8] {
        match self.aside().and_then(|aside| aside.deaths.told()) {
            Some(told) => told.as_bytes(),
            None => self.published_properties(),
        }
    }

    /// The same without what is told of its deaths.
    #[inline]
    pub(crate) fn published_properties(&self) -> &[u8] {
        &self.0.slice[usize::from(self.head().routing_key)..self.properties_end()]
    }

    /// The properties without what is told of its deaths, decoded: none at all if they are malformed.
    pub(crate) fn properties(&self) -> Properties<'_> {
        Properties::decode(self.published_properties()).unwrap_or_default()
    }

    #[inline]
    pub(crate) fn body(&self) -> Body<'_> {
        match &self.head().large_body {
            Some(body) => Body::Shared(body),
            None => Body::Copied(&self.0.slice[self.properties_end()..]),
        }
    }

    /// The body as bytes that may be kept.
    pub(crate) fn body_bytes(&self) -> Bytes {
        match self.body() {
            Body::Shared(bytes) => bytes.clone(),
            Body::Copied(bytes) => Bytes::copy_from_slice(bytes),
        }
    }

    pub(crate) fn body_len(&self) -> usize {
        match &self.head().large_body {
            Some(body) => body.len(),
            None => self.0.slice.len() - self.properties_end(),
        }
    }

    /// How much memory it takes, about.
    pub(crate) fn size(&self) -> usize {
        let large = self.head().large_body.as_ref().map_or(0, |body| body.len());
        let aside = self.head().aside.as_ref().map_or(0, |aside| aside.size);
        size_of::<Head>() + self.0.slice.len() + large + aside
    }

    pub(crate) fn aside(&self) -> Option<&Aside> {
        self.head().aside.as_ref().map(|counted| &counted.aside)
    }

    /// Its own time to live in milliseconds.
    pub(crate) fn ttl(&self) -> Option<u64> {
        Some(self.head().ttl).filter(|ttl| *ttl != NO_TTL)
    }

    /// Whether it survives a restart in a durable queue.
    pub(crate) fn is_persistent(&self) -> bool {
        self.head().persistent
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("exchange", self.exchange())
            .field("routing_key", &self.routing_key())
            .field("properties", &self.properties())
            .field("body", &format_args!("{} bytes", self.body_len()))
            .finish()
    }
}

fn is_persistent(properties: &[u8]) -> bool {
    // Most messages have the flag off or nothing before it: the full decoding is for the rest.
    const DELIVERY_MODE: u16 = 1 << 12;
    match properties {
        [high, low, ..] if u16::from_be_bytes([*high, *low]) & DELIVERY_MODE == 0 => false,
        _ => Properties::decode(properties).is_ok_and(|found| found.delivery_mode == Some(2)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(body: Bytes, delivery_mode: Option<u8>) -> Message {
        let properties = Properties {
            delivery_mode,
            content_type: Some(ShortStr::from_static("text/plain")),
            ..Properties::default()
        };
        let exchange = Arc::new(ShortStr::from_static("x"));
        let parts = Parts {
            exchange: &exchange,
            routing_key: &ShortStr::from_static("the.key"),
            properties: &RawProperties::from(&properties),
            ttl: None,
            aside: Aside::default(),
            body,
        };
        Message::new(&mut Scratch::default(), parts)
    }

    #[test]
    fn all_parts_come_out_as_they_went_in() {
        for size in [0, 1, 4095, 4096, 100_000] {
            let body: Bytes = (0..size).map(|n| n as u8).collect();
            let message = message(body.clone(), Some(2));
            assert_eq!(**message.exchange(), "x");
            assert_eq!(message.routing_key(), "the.key");
            assert_eq!(message.properties().content_type.unwrap(), "text/plain");
            assert_eq!(message.body_len(), size);
            assert!(message.body_bytes() == body, "{size} bytes");
            assert!(message.is_persistent());
        }
    }

    #[test]
    fn only_delivery_mode_two_is_persistent() {
        for (mode, persistent) in
            [(None, false), (Some(1), false), (Some(2), true), (Some(3), false)]
        {
            assert_eq!(message(Bytes::new(), mode).is_persistent(), persistent, "{mode:?}");
        }
    }

    #[test]
    fn what_is_kept_aside_counts() {
        let key = |number: u32| ShortStr::try_from(number.to_string()).unwrap();
        let keys: Vec<_> = (0..20_000).map(key).collect();
        let headers = Table::from_pairs([("h", "x".repeat(5000).as_str().into())]).unwrap();
        let parts = Parts {
            exchange: &Arc::new(ShortStr::default()),
            routing_key: &ShortStr::default(),
            properties: &RawProperties::from(&Properties::default()),
            ttl: None,
            aside: Aside {
                copies: keys.clone(),
                blind: keys,
                headers: Some(headers),
                ..Aside::default()
            },
            body: Bytes::new(),
        };
        let size = Message::new(&mut Scratch::default(), parts).size();
        assert!((1_000_000..3_000_000).contains(&size), "{size} bytes");
    }

    #[test]
    fn a_large_body_is_not_copied() {
        let body = Bytes::from(vec![0; COPY_BELOW]);
        assert_eq!(message(body.clone(), None).body_bytes().as_ptr(), body.as_ptr());
    }
}
