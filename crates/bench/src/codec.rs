//! The codec alone: no sockets, no tasks, one thread.
//!
//! Both sides do what a client has to do per message. Encoding begins with borrowed names and a body and
//! ends with bytes in a buffer that is used again; decoding begins with bytes in a read buffer (how they
//! came there is the socket's affair) and ends with a method, properties and a body that outlive it.

use std::hint::black_box;
use std::time::Duration;

use amq_protocol::frame::{
    AMQPContentHeader, AMQPFrame, GenResult, WriteContext, gen_frame, parse_frame,
};
use amq_protocol::protocol::{AMQPClass, basic as amq};
use bytes::{Buf, Bytes};
use clap::ValueEnum;
use leveret_wire::method::basic;
use leveret_wire::{
    Assembler, FrameKind, FrameMax, Inbound, Method, Outbound, Properties, ShortStr,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::message::filler;
use crate::meter::{Failure, Measured, cpu_time};
use crate::suite::{self, ArgumentsOf, Suite};

/// Messages per buffer: about what one system call takes.
const BATCH: usize = 500;
const EXCHANGE: &str = "orders";
const KEY: &str = "order.created";
const TAG: &str = "consumer-1";
const CONTENT_TYPE: &str = "application/json";

#[derive(Clone, Copy, PartialEq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Job {
    /// Encode publishes
    Encode,
    /// Decode deliveries
    Decode,
}

#[derive(Clone, Copy, PartialEq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Candidate {
    /// The codec of Leveret
    LeveretWire,
    /// The codec of lapin
    AmqProtocol,
    /// The same, with frames made beforehand
    AmqProtocolPrepared,
}

/// Bytes per body.
type Setting = usize;

type Run = suite::Run<Job, Candidate, Setting>;

pub(crate) struct Codec;

impl Suite for Codec {
    const NAME: &'static str = "codec";
    const DEADLINE: Duration = Duration::from_secs(60);
    const ROUNDS: u32 = 7;
    const NOTES: &'static str = "The same bytes are encoded and decoded by all candidates.";

    type Job = Job;
    type Candidate = Candidate;
    type Options = ();
    type Setting = Setting;

    async fn start(_: &mut ArgumentsOf<Self>) -> Result<Self, Failure> {
        Ok(Codec)
    }

    fn settings(&self, _: Job) -> Vec<Setting> {
        vec![16, 1024, 16 * 1024]
    }

    /// About what takes a fifth of a second.
    fn messages(job: Job, candidate: Candidate, size: &Setting, asked: Option<u64>) -> Option<u64> {
        let messages = match (job, candidate) {
            (Job::Decode, Candidate::AmqProtocolPrepared) => return None,
            (_, Candidate::LeveretWire) if *size <= 1024 => 2_000_000,
            _ if *size <= 1024 => 250_000,
            _ => 50_000,
        };
        Some(asked.unwrap_or(messages).next_multiple_of(BATCH as u64))
    }

    async fn run(
        Run { job, candidate, messages, setting: size }: Run,
    ) -> Result<Measured, Failure> {
        Ok(match (job, candidate) {
            (Job::Encode, Candidate::LeveretWire) => encode(messages, size),
            (Job::Encode, Candidate::AmqProtocol) => encode_amq(messages, size, false),
            (Job::Encode, Candidate::AmqProtocolPrepared) => encode_amq(messages, size, true),
            (Job::Decode, Candidate::LeveretWire) => decode(messages, size),
            (Job::Decode, _) => decode_amq(messages, size),
        })
    }

    fn is_peer(candidate: Candidate) -> bool {
        candidate != Candidate::LeveretWire
    }

    fn labels(size: &Setting) -> Vec<(&'static str, Value)> {
        vec![("body_B", (*size).into())]
    }
}

/// Does the job batch by batch. The making of the input does not count.
fn measure<T>(messages: u64, mut input: impl FnMut() -> T, mut work: impl FnMut(T)) -> Measured {
    work(input());
    let mut spent = Duration::ZERO;
    for _ in 0..messages / BATCH as u64 {
        let input = input();
        let began = cpu_time();
        work(input);
        spent += cpu_time() - began;
    }
    let spent = spent.as_nanos() as u64;
    Measured { messages, cpu_ns: spent, wall_ns: spent, ..Measured::default() }
}

fn encode(messages: u64, size: usize) -> Measured {
    let body = filler(size);
    assert_same_bytes(&body);
    let mut outbound = Outbound::new();
    measure(
        messages,
        || (),
        |()| {
            for _ in 0..BATCH {
                encode_publish(&mut outbound, black_box(&body));
            }
            black_box(outbound.chunk());
            outbound.advance(outbound.remaining());
        },
    )
}

fn encode_amq(messages: u64, size: usize, are_frames_prepared: bool) -> Measured {
    let body = filler(size);
    let prepared = are_frames_prepared.then(|| amq_publish(&body));
    let mut buffer = Some(Vec::new());
    measure(
        messages,
        || (),
        |()| {
            for _ in 0..BATCH {
                match &prepared {
                    Some(frames) => amq_encode(&mut buffer, black_box(frames)),
                    None => amq_encode(&mut buffer, &amq_publish(black_box(&body))),
                }
            }
            black_box(&mut buffer).as_mut().expect("a buffer").clear();
        },
    )
}

fn encode_publish(outbound: &mut Outbound, body: &Bytes) {
    let publish = basic::Publish {
        exchange: ShortStr::try_from(EXCHANGE).expect("a short name"),
        routing_key: ShortStr::try_from(KEY).expect("a short key"),
        mandatory: true,
        immediate: false,
    };
    outbound.content(1, &publish, &properties(), body, FrameMax::DEFAULT).expect("it fits a frame");
}

fn properties() -> Properties<'static> {
    Properties {
        content_type: Some(ShortStr::try_from(CONTENT_TYPE).expect("a short type")),
        delivery_mode: Some(2),
        ..Properties::default()
    }
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

fn decode(messages: u64, size: usize) -> Measured {
    let stream = deliveries(size);
    let mut assembler = Assembler::new(u64::MAX);
    let received = || {
        let mut inbound = Inbound::new(FrameMax::DEFAULT);
        inbound.extend_from_slice(&stream);
        inbound
    };
    measure(messages, received, |mut inbound| {
        let mut bodies = 0;
        let batch = inbound.take().expect("well-formed frames");
        for frame in batch.frames() {
            let done = match frame.kind {
                FrameKind::Method => {
                    let Ok(Method::BasicDeliver(deliver)) = Method::decode(frame.payload) else {
                        panic!("only deliveries are in the stream");
                    };
                    // What a consumer keeps: the numbers, and the names by reference.
                    let names = batch.keep(frame.payload);
                    let kept = (deliver.delivery_tag, deliver.redelivered, names);
                    assembler.begin(kept).map(|()| None)
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
    })
}

fn decode_amq(messages: u64, size: usize) -> Measured {
    let stream = deliveries(size);
    measure(
        messages,
        || black_box(stream.as_ref()),
        |mut rest: &[u8]| {
            let mut bodies = 0;
            while !rest.is_empty() {
                let (after, frame) = parse_frame(rest).expect("well-formed frames");
                if let AMQPFrame::Body(_, body) = &frame {
                    bodies += body.len();
                }
                black_box(frame);
                rest = after;
            }
            assert_eq!(bodies, BATCH * size);
        },
    )
}

fn deliveries(size: usize) -> Bytes {
    let body = filler(size);
    let mut outbound = Outbound::new();
    for tag in 1..=BATCH as u64 {
        let deliver = basic::Deliver {
            consumer_tag: ShortStr::from_static(TAG),
            delivery_tag: tag,
            redelivered: false,
            exchange: ShortStr::from_static(EXCHANGE),
            routing_key: ShortStr::from_static(KEY),
        };
        outbound.content(1, &deliver, &properties(), &body, FrameMax::DEFAULT).expect("it fits");
    }
    outbound.copy_to_bytes(outbound.remaining())
}
