//! Bytes from a hostile peer, in pieces: frames, methods, contents. Nothing may panic, and what was
//! decoded must encode to something that decodes to the same.

#![no_main]

use leveret_wire::method::Encode;
use leveret_wire::{Assembler, FrameKind, FrameMax, Inbound, Method, ProtocolVersion, RawProperties};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, &[u8])| {
    let (cut, bytes) = input;
    let _ = ProtocolVersion::decode(bytes);
    let mut inbound = Inbound::new(FrameMax::MIN);
    let mut assembler = Assembler::new(64 * 1024);
    for piece in bytes.chunks(usize::from(cut) + 1) {
        inbound.extend_from_slice(piece);
        let batch = match inbound.take() {
            Ok(batch) => batch,
            Err(error) => {
                let _ = error.to_string();
                return;
            }
        };
        if let Err(error) = inbound.take() {
            let _ = error.to_string();
        }
        for frame in batch.frames() {
            let done = match frame.kind {
                FrameKind::Method => match Method::decode(frame.payload) {
                    Ok(method) => {
                        let _ = format!("{method:?}");
                        let mut again = Vec::new();
                        method.encode(&mut again);
                        assert_eq!(Method::decode(&again).as_ref(), Ok(&method));
                        if method.carries_content() {
                            assembler.begin(method.into_owned()).map(|()| None)
                        } else {
                            assembler.expect_idle().map(|()| None)
                        }
                    }
                    Err(error) => Err(error),
                },
                FrameKind::Header => assembler.header(batch.keep(frame.payload)),
                FrameKind::Body => assembler.body(batch.keep(frame.payload)),
                FrameKind::Heartbeat => Ok(None),
            };
            match done {
                Ok(Some(content)) => {
                    assert!(content.body.len() <= bytes.len());
                    let _ = format!("{:?} {:?}", content.properties, content.properties.fault());
                    let again = RawProperties::from(&content.properties.get());
                    assert_eq!(again.get(), content.properties.get());
                }
                Ok(None) => {}
                Err(error) => {
                    let _ = error.to_string();
                    return;
                }
            }
        }
    }
});
