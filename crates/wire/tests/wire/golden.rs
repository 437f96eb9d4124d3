//! Our bytes against those of an implementation that nobody here wrote.
//!
//! The vectors in `tests/golden/` were made once by `generate.py` with pamqp; see there.

use std::collections::BTreeSet;

use bytes::{Buf, Bytes};
use leveret_wire::{
    Array, Assembler, Frame, FrameKind, FrameMax, Method, Outbound, Properties, ShortStr, Table,
    Value,
    method::{Encode, access, basic},
};

fn rows(file: &str) -> impl Iterator<Item = (&str, &str)> {
    file.lines().map(|line| line.split_once('\t').expect("two columns"))
}

fn unhex(text: &str) -> Bytes {
    let octet = |pair: &[u8]| {
        let pair = std::str::from_utf8(pair).unwrap();
        u8::from_str_radix(pair, 16).unwrap()
    };
    text.as_bytes().chunks(2).map(octet).collect()
}

#[test]
fn every_method_is_read_and_written_as_pamqp_writes_it() {
    let mut names = BTreeSet::new();
    for (hex, expected) in rows(include_str!("../golden/methods.tsv")) {
        let bytes = unhex(hex);
        let frame = Frame::decode(&bytes, FrameMax::DEFAULT).unwrap().expect("a whole frame");
        assert_eq!((frame.kind, frame.encoded_len()), (FrameKind::Method, bytes.len()));

        let method = Method::decode(frame.payload).unwrap();
        assert_eq!(format!("{method:?}"), expected);
        assert_eq!(format!("{:?}", method.clone().into_owned()), expected);
        assert_eq!(Method::name_of(method.id().0, method.id().1), Some(method.name()));
        names.insert(method.name());

        // pamqp puts "0" into reserved fields of these two; they should be empty.
        if !["channel.open", "channel.open-ok"].contains(&method.name()) {
            let mut outbound = Outbound::new();
            outbound.method(frame.channel, &method, FrameMax::DEFAULT).unwrap();
            assert_eq!(outbound.copy_to_bytes(outbound.remaining()), bytes, "{expected}");
        }
    }
    // All but the two of `access`, which pamqp does not have.
    assert_eq!(names.len(), 64);
}

/// pamqp does not have this class. RabbitMQ answers such a request, as these bytes show, with ticket 1.
#[test]
fn access_tickets_are_read_and_written_as_rabbitmq_does() {
    let request = access::Request {
        realm: ShortStr::from_static("/data"),
        exclusive: false,
        passive: true,
        active: true,
        write: true,
        read: true,
    };
    for (bytes, method) in [
        (b"\x00\x1e\x00\x0a\x05/data\x1e".as_slice(), Method::from(request)),
        (b"\x00\x1e\x00\x0b\x00\x01".as_slice(), access::RequestOk { ticket: 1 }.into()),
    ] {
        assert_eq!(Method::decode(bytes).as_ref(), Ok(&method));
        let mut encoded = Vec::new();
        method.encode(&mut encoded);
        assert_eq!(encoded, bytes);
    }
}

#[test]
fn every_property_is_read_and_written_as_pamqp_writes_it() {
    const SIZE: usize = 123_456_789_012;
    for (hex, expected) in rows(include_str!("../golden/properties.tsv")) {
        let bytes = unhex(hex);
        let frame = Frame::decode(&bytes, FrameMax::DEFAULT).unwrap().expect("a whole frame");
        assert_eq!((frame.kind, frame.encoded_len()), (FrameKind::Header, bytes.len()));

        let encoded = &frame.payload[12..];
        let properties = Properties::decode(encoded).unwrap();
        assert_eq!(format!("{properties:?}"), expected);

        let mut assembler = Assembler::new(SIZE as u64);
        assembler.begin(()).unwrap();
        assert_eq!(assembler.header(bytes.slice_ref(frame.payload)).unwrap(), None);

        // Encoded with an empty body, the header differs in the body size alone.
        let mut outbound = Outbound::new();
        let publish = basic::Publish::default();
        outbound.content(9, &publish, &properties, &Bytes::new(), FrameMax::DEFAULT).unwrap();
        let mut written = outbound.copy_to_bytes(outbound.remaining()).to_vec();
        let header = written.len() - bytes.len();
        written[header + 11..header + 19].copy_from_slice(&(SIZE as u64).to_be_bytes());
        assert_eq!(written[header..], bytes[..], "{expected}");
    }
}

#[test]
fn every_field_type_is_read_and_written_as_pamqp_writes_it() {
    for (name, hex) in rows(include_str!("../golden/values.tsv")) {
        let value = match name {
            "true" => true.into(),
            "text" => "häll".into(),
            "bytes" => Value::Bytes(b"\x00\xff".as_slice().into()),
            "decimal" => Value::Decimal { scale: 2, value: 314 },
            "double" => (-0.5f64).into(),
            "float" => 0.25f32.into(),
            "u8" => 200u8.into(),
            "i16" => (-2i16).into(),
            "u16" => 65_000u16.into(),
            "i32" => (-3i32).into(),
            "u32" => 4_000_000_000u32.into(),
            "i64" => (-4i64).into(),
            "timestamp" => Value::Timestamp(1_709_208_000),
            "void" => Value::Void,
            "array" => Array::from_values([true.into(), "a".into()]).unwrap().into(),
            "table" => Table::from_pairs([("k", "v".into())]).unwrap().into(),
            other => panic!("no value for {other}"),
        };
        let encoded = unhex(hex);
        let table = Table::decode(&encoded[4..]).unwrap();
        assert_eq!(table.get("v"), Some(value.clone()), "{name}");
        assert_eq!(Table::from_pairs([("v", value)]).unwrap(), table, "{name}");
    }
}
