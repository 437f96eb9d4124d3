//! The codec alone: no sockets, no tasks, one thread.
//!
//! Both sides do what a client has to do per message. Encoding begins with borrowed names and a body and
//! ends with bytes in a buffer that is used again; decoding begins with bytes in a read buffer (how they
//! came there is the socket's affair) and ends with a method, properties and a body that outlive it.

use std::hint::black_box;

use amq_protocol::frame::{
    AMQPContentHeader, AMQPFrame, GenResult, WriteContext, gen_frame, parse_frame,
};
use amq_protocol::protocol::{AMQPClass, basic as amq};
use bytes::{Buf, Bytes};
use leveret_wire::method::basic;
use leveret_wire::{
    Assembler, FrameKind, FrameMax, Inbound, Method, Outbound, Properties, ShortStr,
};

use crate::measure::{Candidate, Measured, compare};

/// Messages per buffer: about what one system call takes.
const BATCH: usize = 500;
const EXCHANGE: &str = "orders";
const KEY: &str = "order.created";
const TAG: &str = "consumer-1";
const CONTENT_TYPE: &str = "application/json";

pub(crate) fn run(rounds: u32) -> Vec<Measured> {
    let mut results = Vec::new();
    for size in [16, 1024, 16 * 1024] {
        results.extend(encode(size, rounds));
    }
    for size in [16, 1024, 16 * 1024] {
        results.extend(decode(size, rounds));
    }
    results
}

fn encode(size: usize, rounds: u32) -> Vec<Measured> {
    let body = Bytes::from(vec![b'x'; size]);
    let mut outbound = Outbound::new();
    let mut buffer = Some(Vec::new());
    let mut prepared_buffer = Some(Vec::new());
    let prepared = amq_publish(&body);
    assert_same_bytes(&body);
    let candidates = vec![
        Candidate::new("leveret-wire", || {
            for _ in 0..BATCH {
                encode_publish(&mut outbound, black_box(&body));
            }
            black_box(outbound.chunk());
            outbound.advance(outbound.remaining());
        }),
        Candidate::new("amq-protocol", || {
            for _ in 0..BATCH {
                amq_encode(&mut buffer, &amq_publish(black_box(&body)));
            }
            black_box(&mut buffer).as_mut().expect("a buffer").clear();
        }),
        Candidate::new("amq-protocol, frames made beforehand", || {
            for _ in 0..BATCH {
                amq_encode(&mut prepared_buffer, black_box(&prepared));
            }
            black_box(&mut prepared_buffer).as_mut().expect("a buffer").clear();
        }),
    ];
    compare(&format!("encode publish, {size} B"), BATCH, rounds, candidates)
}

fn encode_publish(outbound: &mut Outbound, body: &Bytes) {
    let publish = basic::Publish {
        exchange: ShortStr::try_from(EXCHANGE).expect("a short name"),
        routing_key: ShortStr::try_from(KEY).expect("a short key"),
        mandatory: true,
        immediate: false,
    };
    let properties = Properties {
        content_type: Some(ShortStr::try_from(CONTENT_TYPE).expect("a short type")),
        delivery_mode: Some(2),
        ..Properties::default()
    };
    outbound.content(1, &publish, &properties, body, FrameMax::DEFAULT).expect("it fits a frame");
}

fn amq_publish(body: &[u8]) -> [AMQPFrame; 3] {
    let publish = amq::Publish {
        exchange: EXCHANGE.into(),
        routing_key: KEY.into(),
        mandatory: true,
        immediate: false,
    };
    amq_content(AMQPClass::Basic(amq::AMQPMethod::Publish(publish)), body)
}

fn amq_content(method: AMQPClass, body: &[u8]) -> [AMQPFrame; 3] {
    let header = AMQPContentHeader {
        class_id: 60,
        body_size: body.len() as u64,
        properties: amq::AMQPProperties::default()
            .with_content_type(CONTENT_TYPE.into())
            .with_delivery_mode(2),
    };
    [AMQPFrame::Method(1, method), AMQPFrame::Header(1, header), AMQPFrame::Body(1, body.to_vec())]
}

/// The buffer goes through the generator and comes back, so that its memory is used again.
fn amq_encode(buffer: &mut Option<Vec<u8>>, frames: &[AMQPFrame]) {
    let mut context = WriteContext::from(buffer.take().expect("a buffer"));
    for frame in frames {
        let result: GenResult<Vec<u8>> = gen_frame(frame)(context);
        context = result.expect("it fits the buffer");
    }
    *buffer = Some(context.into_inner().0);
}

/// A comparison counts only if both do the same.
fn assert_same_bytes(body: &Bytes) {
    let mut ours = Outbound::new();
    encode_publish(&mut ours, body);
    let mut theirs = Some(Vec::new());
    amq_encode(&mut theirs, &amq_publish(body));
    assert_eq!(ours.copy_to_bytes(ours.remaining()), theirs.expect("a buffer"));
}

fn decode(size: usize, rounds: u32) -> Vec<Measured> {
    let stream = deliveries(size);
    let mut assembler = Assembler::new(u64::MAX);
    let received = || {
        let mut inbound = Inbound::new(FrameMax::DEFAULT);
        inbound.extend_from_slice(&stream);
        inbound
    };
    let candidates = vec![
        Candidate::with_input("leveret-wire", received, |mut inbound| {
            let mut bodies = 0;
            let batch = inbound.take().expect("well-formed frames");
            for frame in batch.frames() {
                let done = match frame.kind {
                    FrameKind::Method => {
                        let Ok(Method::BasicDeliver(deliver)) = Method::decode(frame.payload)
                        else {
                            panic!("only deliveries are in the stream");
                        };
                        // What a consumer keeps: the numbers, and the names by reference.
                        let names = batch.keep(frame.payload);
                        assembler
                            .begin((deliver.delivery_tag, deliver.redelivered, names))
                            .map(|()| None)
                    }
                    FrameKind::Header => assembler.header(batch.keep(frame.payload)),
                    FrameKind::Body => assembler.body(batch.keep(frame.payload)),
                    FrameKind::Heartbeat => Ok(None),
                };
                if let Some(content) = done.expect("frames in order") {
                    bodies += content.body.len();
                    black_box(content);
                }
            }
            assert_eq!(bodies, BATCH * size);
        }),
        Candidate::new("amq-protocol", || {
            let mut bodies = 0;
            let mut rest = black_box(stream.as_ref());
            while !rest.is_empty() {
                let (after, frame) = parse_frame(rest).expect("well-formed frames");
                if let AMQPFrame::Body(_, body) = &frame {
                    bodies += body.len();
                }
                black_box(frame);
                rest = after;
            }
            assert_eq!(bodies, BATCH * size);
        }),
    ];
    compare(&format!("decode deliveries, {size} B"), BATCH, rounds, candidates)
}

fn deliveries(size: usize) -> Bytes {
    let body = Bytes::from(vec![b'x'; size]);
    let mut outbound = Outbound::new();
    for tag in 1..=BATCH as u64 {
        let deliver = basic::Deliver {
            consumer_tag: ShortStr::from_static(TAG),
            delivery_tag: tag,
            redelivered: false,
            exchange: ShortStr::from_static(EXCHANGE),
            routing_key: ShortStr::from_static(KEY),
        };
        let properties = Properties {
            content_type: Some(ShortStr::from_static(CONTENT_TYPE)),
            delivery_mode: Some(2),
            ..Properties::default()
        };
        outbound.content(1, &deliver, &properties, &body, FrameMax::DEFAULT).expect("it fits");
    }
    outbound.copy_to_bytes(outbound.remaining())
}
