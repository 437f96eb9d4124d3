//! Values of every kind: whatever fits a frame comes back as it went, however it is cut.

#![no_main]

use bytes::{Buf, Bytes};
use leveret_wire::method::basic;
use leveret_wire::{Assembler, FrameKind, FrameMax, Inbound, Method, Outbound, Properties};
use libfuzzer_sys::fuzz_target;

#[derive(arbitrary::Arbitrary, Debug)]
struct Input<'a> {
    method: Method<'a>,
    publish: basic::Publish<'a>,
    properties: Properties<'a>,
    body: &'a [u8],
    /// Makes bodies of several frames out of few bytes.
    repeat: u8,
    cut: u8,
}

fuzz_target!(|input: Input<'_>| {
    let max = FrameMax::MIN;
    let body = Bytes::from(input.body.repeat(usize::from(input.repeat)));
    let mut outbound = Outbound::new();
    if outbound.method(1, &input.method, max).is_err() {
        assert_eq!(outbound.remaining(), 0);
        return;
    }
    if outbound.content(1, &input.publish, &input.properties, &body, max).is_err() {
        return;
    }
    let bytes = outbound.copy_to_bytes(outbound.remaining());
    let mut inbound = Inbound::new(max);
    let mut assembler = Assembler::new(u64::MAX);
    let (mut methods, mut contents) = (Vec::new(), 0);
    for piece in bytes.chunks(usize::from(input.cut) * 16 + 1) {
        inbound.extend_from_slice(piece);
        let batch = inbound.take().expect("our own frames");
        for frame in batch.frames() {
            let done = match frame.kind {
                FrameKind::Method => {
                    let method = Method::decode(frame.payload).expect("our own method").into_owned();
                    methods.push(method.clone());
                    if methods.len() == 2 { assembler.begin(method).map(|()| None) } else { Ok(None) }
                }
                FrameKind::Header => assembler.header(batch.keep(frame.payload)),
                FrameKind::Body => assembler.body(batch.keep(frame.payload)),
                FrameKind::Heartbeat => panic!("no heartbeat was sent"),
            };
            if let Some(content) = done.expect("frames in order") {
                assert_eq!(content.body, body);
                assert_eq!(content.properties.get(), input.properties);
                contents += 1;
            }
        }
    }
    assert_eq!(contents, 1);
    assert_eq!(methods, [input.method, input.publish.into()]);
});
