//! Bodies that are read into memory of their own come out as if they had been read like all others.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use bytes::{Buf, BufMut, Bytes};
use leveret_wire::method::basic;
use leveret_wire::{
    Assembler, Content, DecodeError, Fault, FrameKind, FrameMax, Inbound, Method, Outbound,
    Properties, ShortStr,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

const MAX_BODY: u64 = 8 << 20;

/// Who reads: a client with a few channels.
struct Reader {
    inbound: Inbound,
    assemblers: BTreeMap<u16, Assembler<u16>>,
    whole: Vec<Content<u16>>,
    /// Where the bytes of each read went.
    reads: Vec<Range<usize>>,
}

impl Reader {
    fn new(max: FrameMax) -> Self {
        Reader {
            inbound: Inbound::new(max),
            assemblers: BTreeMap::new(),
            whole: Vec::new(),
            reads: Vec::new(),
        }
    }

    /// Reads at most so many bytes, as many as there is room for.
    fn read(&mut self, from: &mut &[u8], most: usize) -> Result<(), DecodeError> {
        let Reader { inbound, assemblers, .. } = self;
        let mut space =
            inbound.space_for(|channel, size| assemblers.get_mut(&channel)?.large_body(size));
        let mut room = space.room();
        let chunk = room.chunk_mut();
        let (start, size) = (chunk.as_mut_ptr() as usize, chunk.len().min(most).min(from.len()));
        room.put_slice(&from[..size]);
        drop(room);
        drop(space);
        from.advance(size);
        self.reads.push(start..start + size);
        self.sort()
    }

    fn sort(&mut self) -> Result<(), DecodeError> {
        loop {
            let batch = self.inbound.take()?;
            if batch.is_empty() {
                return Ok(());
            }
            for frame in batch.frames() {
                let assembler = self
                    .assemblers
                    .entry(frame.channel)
                    .or_insert_with(|| Assembler::new(MAX_BODY));
                let done = match frame.kind {
                    FrameKind::Method => {
                        Method::decode(frame.payload)?;
                        assembler.begin(frame.channel)?;
                        None
                    }
                    FrameKind::Header => assembler.header(batch.keep(frame.payload))?,
                    FrameKind::Body => assembler.body(batch.keep(frame.payload))?,
                    FrameKind::Heartbeat => None,
                };
                self.whole.extend(done);
            }
        }
    }

    /// Reads all, in pieces of these sizes.
    fn read_all(&mut self, mut bytes: &[u8], sizes: &[usize]) -> Result<(), DecodeError> {
        let mut sizes = sizes.iter().copied().cycle();
        while !bytes.is_empty() {
            self.read(&mut bytes, sizes.next().unwrap_or(usize::MAX).max(1))?;
        }
        Ok(())
    }
}

/// What all came to, in order, and what was wrong in the end.
type Outcome = (Vec<(u16, Bytes)>, Option<Fault>);

fn outcome(reader: Reader, result: Result<(), DecodeError>) -> Outcome {
    let whole = reader.whole.into_iter().map(|one| (one.method, one.body)).collect();
    (whole, result.err().map(|error| error.fault().clone()))
}

fn in_place(bytes: &[u8], sizes: &[usize], max: FrameMax) -> Outcome {
    let mut reader = Reader::new(max);
    let result = reader.read_all(bytes, sizes);
    outcome(reader, result)
}

/// The model: all bytes in one buffer, bodies joined by copying.
fn copied(bytes: &[u8], max: FrameMax) -> Outcome {
    let mut reader = Reader::new(max);
    reader.inbound.extend_from_slice(bytes);
    let result = reader.sort();
    outcome(reader, result)
}

/// A message as a list of frames.
fn frames(channel: u16, body: &Bytes, max: FrameMax) -> VecDeque<Bytes> {
    let publish = basic::Publish {
        exchange: ShortStr::EMPTY,
        routing_key: ShortStr::from_static("key"),
        mandatory: false,
        immediate: false,
    };
    let mut outbound = Outbound::new();
    outbound.content(channel, &publish, &Properties::default(), body, max).unwrap();
    let mut bytes = outbound.copy_to_bytes(outbound.remaining());
    let mut frames = VecDeque::new();
    while !bytes.is_empty() {
        let size = u32::from_be_bytes(bytes[3..7].try_into().unwrap()) as usize + 8;
        frames.push_back(bytes.split_to(size));
    }
    frames
}

/// A body in which no stretch is like another.
fn body(size: usize, seed: u64) -> Bytes {
    let word = |place: u64| (place ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
    (0..size as u64 / 8 + 1).flat_map(word).take(size).collect()
}

/// Contents of several channels, their frames mixed as `turns` has it, heartbeats among them.
fn mixed(sizes: &[(u16, usize)], turns: &[u16], max: FrameMax) -> (Vec<Bytes>, usize) {
    let mut waiting: BTreeMap<u16, VecDeque<Bytes>> = BTreeMap::new();
    for (seed, (channel, size)) in sizes.iter().enumerate() {
        let frames = frames(*channel, &body(*size, seed as u64), max);
        waiting.entry(*channel).or_default().extend(frames);
    }
    let mut stream = Vec::new();
    let mut turns = turns.iter().copied().chain([1]).cycle();
    while waiting.values().any(|frames| !frames.is_empty()) {
        match turns.next().unwrap_or(1) {
            0 => stream.push(Bytes::from_static(b"\x08\x00\x00\x00\x00\x00\x00\xce")),
            turn => {
                let lanes: Vec<_> = waiting.values_mut().filter(|one| !one.is_empty()).collect();
                let place = usize::from(turn) % lanes.len();
                stream.extend(lanes.into_iter().nth(place).and_then(VecDeque::pop_front));
            }
        }
    }
    (stream, sizes.len())
}

fn limits() -> impl Strategy<Value = FrameMax> {
    prop_oneof![Just(4096), Just(20_000), Just(131_072), Just(0)]
        .prop_map(|bytes| FrameMax::new(bytes).unwrap())
}

fn contents() -> impl Strategy<Value = Vec<(u16, usize)>> {
    let size =
        prop_oneof![0usize..100, 8_000usize..140_000, 131_060usize..131_080, 0usize..1_500_000];
    vec((1u16..4, size), 1..6)
}

fn read_sizes() -> impl Strategy<Value = Vec<usize>> {
    let size = prop_oneof![1usize..20, 1usize..5000, 1usize..400_000];
    // At least one large, or a stream of megabytes takes long.
    (vec(size, 0..10), 100_000usize..400_000).prop_map(|(mut sizes, large)| {
        sizes.push(large);
        sizes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn contents_come_out_as_they_went_however_they_are_mixed_and_cut(
        max in limits(),
        contents in contents(),
        turns in vec(0u16..6, 1..20),
        sizes in read_sizes(),
    ) {
        let (stream, count) = mixed(&contents, &turns, max);
        let bytes = stream.concat();
        let (whole, fault) = in_place(&bytes, &sizes, max);
        prop_assert_eq!(fault, None);
        prop_assert_eq!(whole.len(), count);
        for channel in 1..4 {
            let sent = (0..).zip(&contents).filter(|(_, (to, _))| *to == channel);
            let came = whole.iter().filter(|(on, _)| *on == channel).map(|(_, body)| body);
            prop_assert!(came.eq(sent.map(|(seed, (_, size))| body(*size, seed)).collect::<Vec<_>>().iter()));
        }
        prop_assert!(whole == copied(&bytes, max).0, "in another order");
    }

    #[test]
    fn a_malformed_frame_is_refused_as_if_nothing_were_read_in_place(
        max in limits(),
        contents in contents(),
        turns in vec(0u16..6, 1..20),
        sizes in read_sizes(),
        which in any::<Index>(),
        part in 0usize..8,
        octet in any::<u8>(),
    ) {
        let (mut stream, _) = mixed(&contents, &turns, max);
        // One of the eight octets around a payload becomes another.
        let frame = which.index(stream.len());
        let mut damaged = stream[frame].to_vec();
        let place = if part == 7 { damaged.len() - 1 } else { part };
        damaged[place] = octet;
        stream[frame] = damaged.into();
        let bytes = stream.concat();
        let (ours, model) = (in_place(&bytes, &sizes, max), copied(&bytes, max));
        prop_assert_eq!(ours.1, model.1);
        prop_assert!(ours.0 == model.0, "other contents came before the malformed frame");
    }
}

#[test]
fn a_large_body_is_cut_anywhere() {
    let max = FrameMax::DEFAULT;
    let sent = body(200_000, 7);
    let stream: Vec<Bytes> = frames(1, &sent, max).into();
    let bytes = stream.concat();
    let ends: Vec<usize> = stream
        .iter()
        .scan(0, |end, frame| {
            *end += frame.len();
            Some(*end)
        })
        .collect();
    // At each octet around the seams of frames, the rest in one read and octet by octet.
    for end in ends {
        for cut in end.saturating_sub(20)..(end + 20).min(bytes.len()) {
            let (whole, fault) = in_place(&bytes, &[cut.max(1), 1, 1, 1, usize::MAX], max);
            assert_eq!((whole.len(), fault), (1, None), "cut at {cut}");
            assert!(whole[0].1 == sent, "cut at {cut}");
        }
    }
}

#[test]
fn the_bytes_of_a_large_body_stay_where_they_were_read() {
    let max = FrameMax::DEFAULT;
    let stream: Vec<Bytes> = (0..3).flat_map(|seed| frames(1, &body(1 << 20, seed), max)).collect();
    let mut reader = Reader::new(max);
    reader.read_all(&stream.concat(), &[usize::MAX]).unwrap();
    // What the first read brought with its header was moved; nearly nothing of the others was.
    for content in &reader.whole[1..] {
        let memory = content.body.as_ptr_range();
        let memory = memory.start as usize..memory.end as usize;
        let in_place = reader.reads.iter().filter(|read| memory.contains(&read.start));
        let bytes: usize = in_place.map(ExactSizeIterator::len).sum();
        assert!(bytes >= (1 << 20) - 4096, "only {bytes} bytes were read in place");
    }
}

#[test]
fn a_frame_of_any_size_is_read_in_place() {
    let sent = body(5 << 20, 1);
    let stream: Vec<Bytes> = frames(1, &sent, FrameMax::UNLIMITED).into();
    let mut reader = Reader::new(FrameMax::UNLIMITED);
    reader.read_all(&stream.concat(), &[60_000]).unwrap();
    assert!(reader.whole[0].body == sent);
}

#[test]
fn a_body_longer_than_announced_is_refused() {
    let max = FrameMax::DEFAULT;
    let mut stream: Vec<Bytes> = frames(1, &body(200_000, 1), max).into();
    let last = stream.pop().unwrap();
    let size = 100_000u32.to_be_bytes();
    stream.push([&[3, 0, 1], size.as_slice(), &[b'x'; 100_000], &[0xce]].concat().into());
    assert!(last.len() < 100_000);
    let fault = Fault::BodyOverrun { announced: 200_000, received: 231_064 };
    for sizes in [[usize::MAX], [1000]] {
        assert_eq!(in_place(&stream.concat(), &sizes, max), (Vec::new(), Some(fault.clone())));
    }
}
