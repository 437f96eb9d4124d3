//! Whatever can be said can be encoded, and comes back as it went; whatever cannot is refused calmly.

use std::collections::BTreeSet;

use arbitrary::{Arbitrary, Unstructured};
use bytes::{Buf, Bytes};
use leveret_wire::{
    Assembler, Content, FrameKind, FrameMax, Inbound, Method, Outbound, Properties, RawProperties,
    ShortStr, Table,
    method::{Encode, basic},
};
use proptest::collection::vec;
use proptest::prelude::*;

/// Values made out of random bytes, which shrink as the bytes do.
fn made_from<'a, T: Arbitrary<'a>>(seed: &'a [u8]) -> T {
    T::arbitrary(&mut Unstructured::new(seed)).expect("arbitrary values need no bytes")
}

fn seed(size: usize) -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..size)
}

/// Feeds bytes in pieces of the given sizes, and gives back all frames and the error, if there is one.
fn read_all(
    bytes: &[u8],
    pieces: &[usize],
    max: FrameMax,
) -> (Vec<(FrameKind, u16, Bytes)>, Option<leveret_wire::DecodeError>) {
    let mut inbound = Inbound::new(max);
    let mut frames = Vec::new();
    let mut rest = bytes;
    let mut sizes = pieces.iter().copied().chain(std::iter::repeat(usize::MAX));
    loop {
        loop {
            match inbound.take() {
                Err(error) => return (frames, Some(error)),
                Ok(batch) if batch.is_empty() => break,
                Ok(batch) => frames
                    .extend(batch.frames().map(|f| (f.kind, f.channel, batch.keep(f.payload)))),
            }
        }
        if rest.is_empty() {
            return (frames, None);
        }
        let (piece, after) = rest.split_at(sizes.next().unwrap().clamp(1, rest.len()));
        inbound.extend_from_slice(piece);
        rest = after;
    }
}

/// What a peer does with frames: decode methods, assemble contents. Must never panic.
fn digest(frames: Vec<(FrameKind, u16, Bytes)>) -> Vec<Content<Method<'static>>> {
    let mut assembler = Assembler::new(1 << 20);
    let mut contents = Vec::new();
    for (kind, _, payload) in frames {
        let done = match kind {
            FrameKind::Method => match Method::decode(&payload) {
                Ok(method) if method.carries_content() => {
                    assembler.begin(method.into_owned()).map(|()| None)
                }
                Ok(method) => {
                    let _ = format!("{method:?}");
                    assembler.expect_idle().map(|()| None)
                }
                Err(error) => Err(error),
            },
            FrameKind::Header => assembler.header(payload),
            FrameKind::Body => assembler.body(payload),
            FrameKind::Heartbeat => Ok(None),
        };
        match done {
            Ok(content) => contents.extend(content),
            Err(error) => {
                assert!(error.reply_code().name().is_some(), "{error}");
                break;
            }
        }
    }
    contents
}

#[test]
fn all_combinations_of_properties_come_back_as_they_went() {
    let all: Properties<'_> = Properties {
        content_type: Some(ShortStr::from_static("text/plain")),
        content_encoding: Some(ShortStr::from_static("gzip")),
        headers: Some(Table::from_pairs([("n", 1.into()), ("s", "two".into())]).unwrap()),
        delivery_mode: Some(2),
        priority: Some(0),
        correlation_id: Some(ShortStr::from_static("c")),
        reply_to: Some(ShortStr::from_static("amq.rabbitmq.reply-to")),
        expiration: Some(ShortStr::from_static("60000")),
        message_id: Some(ShortStr::from_static("m")),
        timestamp: Some(u64::MAX),
        kind: Some(ShortStr::EMPTY),
        user_id: Some(ShortStr::from_static("guest")),
        app_id: Some(ShortStr::from_static("a")),
        cluster_id: Some(ShortStr::from_static("z")),
    };
    for chosen in 0..1u16 << 14 {
        let mut bit = 0;
        let mut keep = || {
            bit += 1;
            chosen & (1 << (bit - 1)) != 0
        };
        let some = all.clone();
        let some = Properties {
            content_type: some.content_type.filter(|_| keep()),
            content_encoding: some.content_encoding.filter(|_| keep()),
            headers: some.headers.filter(|_| keep()),
            delivery_mode: some.delivery_mode.filter(|_| keep()),
            priority: some.priority.filter(|_| keep()),
            correlation_id: some.correlation_id.filter(|_| keep()),
            reply_to: some.reply_to.filter(|_| keep()),
            expiration: some.expiration.filter(|_| keep()),
            message_id: some.message_id.filter(|_| keep()),
            timestamp: some.timestamp.filter(|_| keep()),
            kind: some.kind.filter(|_| keep()),
            user_id: some.user_id.filter(|_| keep()),
            app_id: some.app_id.filter(|_| keep()),
            cluster_id: some.cluster_id.filter(|_| keep()),
        };
        assert_eq!(RawProperties::from(&some).get(), some);
    }
}

#[test]
fn every_method_comes_up_and_comes_back_as_it_went() {
    let mut seen = BTreeSet::new();
    // A plain linear congruential generator: the same values in every run.
    let mut state = 1u64;
    for _ in 0..20_000 {
        let mut seed = vec![0; 200];
        for byte in &mut seed {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        let method: Method<'_> = made_from(&seed);
        let mut payload = Vec::new();
        method.encode(&mut payload);
        assert_eq!(Method::decode(&payload).unwrap(), method);
        seen.insert(method.name());
    }
    assert_eq!(seen.len(), leveret_wire::method::ALL.len());
}

proptest! {
    // Enough that each of the 66 methods is all but sure to come up, many times.
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_method_comes_back_as_it_went(seed in seed(600), channel: u16) {
        let method: Method<'_> = made_from(&seed);
        let mut outbound = Outbound::new();
        outbound.method(channel, &method, FrameMax::DEFAULT).unwrap();
        let bytes = outbound.copy_to_bytes(outbound.remaining());
        let (frames, error) = read_all(&bytes, &[], FrameMax::DEFAULT);
        prop_assert_eq!(error, None);
        prop_assert_eq!(frames.len(), 1);
        prop_assert_eq!((frames[0].0, frames[0].1), (FrameKind::Method, channel));
        prop_assert_eq!(Method::decode(&frames[0].2).unwrap(), method);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_properties_come_back_as_they_went(seed in seed(1500)) {
        let properties: Properties<'_> = made_from(&seed);
        let raw = RawProperties::from(&properties);
        let again = RawProperties::new(raw.as_bytes().clone());
        prop_assert_eq!(again.get(), properties.clone());
        // Sent on from the decoded form, the bytes are the same.
        prop_assert_eq!(RawProperties::from(&again.get()), raw.clone());
        prop_assert_eq!(again.correlation_id(), properties.correlation_id.clone());
        prop_assert_eq!(properties.into_owned(), raw.get());
    }

    #[test]
    fn any_content_comes_back_as_it_went_however_it_is_cut(
        method_seed in seed(300),
        properties_seed in seed(600),
        size in 0usize..20_000,
        pieces in vec(1usize..6000, 0..20),
    ) {
        let max = FrameMax::MIN;
        let method: basic::Deliver<'_> = made_from(&method_seed);
        let properties: Properties<'_> = made_from(&properties_seed);
        let body: Bytes = (0..size).map(|n| n as u8).collect();
        let mut outbound = Outbound::new();
        for _ in 0..2 {
            outbound.content(3, &method, &properties, &body, max).unwrap();
        }
        let bytes = outbound.copy_to_bytes(outbound.remaining());
        let (frames, error) = read_all(&bytes, &pieces, max);
        prop_assert_eq!(error, None);
        let contents = digest(frames);
        prop_assert_eq!(contents.len(), 2);
        for content in contents {
            prop_assert_eq!(&content.body, &body);
            prop_assert_eq!(content.properties.get(), properties.clone());
            prop_assert_eq!(content.method, Method::from(method.clone()));
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..2000), pieces in vec(1usize..100, 0..50)) {
        let (frames, _) = read_all(&bytes, &pieces, FrameMax::MIN);
        digest(frames);
        let _ = Method::decode(&bytes).map(|method| format!("{method:?}"));
        let _ = Properties::decode(&bytes).map(|properties| format!("{properties:?}"));
        let _ = Table::decode(&bytes).map(|table| format!("{table:?}"));
    }

    #[test]
    fn damaged_frames_never_panic_and_never_bring_more_than_was_sent(
        method_seed in seed(300),
        properties_seed in seed(600),
        size in 0usize..6000,
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let method: Method<'_> = made_from(&method_seed);
        let deliver: basic::Deliver<'_> = made_from(&method_seed);
        let properties: Properties<'_> = made_from(&properties_seed);
        let mut outbound = Outbound::new();
        outbound.method(1, &method, FrameMax::DEFAULT).unwrap();
        let body = Bytes::from(vec![0xCE; size]);
        outbound.content(1, &deliver, &properties, &body, FrameMax::DEFAULT).unwrap();
        let mut bytes = outbound.copy_to_bytes(outbound.remaining()).to_vec();
        for (place, value) in damage {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        bytes.truncate(cut.index(bytes.len()) + 1);
        let (frames, _) = read_all(&bytes, &[], FrameMax::DEFAULT);
        for content in digest(frames) {
            prop_assert!(content.body.len() + content.properties.as_bytes().len() <= bytes.len());
        }
    }

    /// What decodes at all is either what we would have written, or differs in what has no meaning:
    /// reserved fields, unused bits.
    #[test]
    fn what_is_decoded_can_be_encoded_and_decoded_to_the_same(
        id in prop::sample::select(leveret_wire::method::ALL),
        fields in vec(any::<u8>(), 0..80),
    ) {
        let payload = [&id.0.to_be_bytes()[..], &id.1.to_be_bytes(), &fields].concat();
        if let Ok(method) = Method::decode(&payload) {
            let mut again = Vec::new();
            method.encode(&mut again);
            prop_assert_eq!(Method::decode(&again).unwrap(), method);
        }
    }
}
