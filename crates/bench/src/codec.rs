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

use crate::meter::{Failure, Measured, cpu_time};
use crate::suite::{Row, Suite, name};

/// Messages per buffer: about what one system call takes.
const BATCH: usize = 500;
const EXCHANGE: &str = "orders";
const KEY: &str = "order.created";
const TAG: &str = "consumer-1";
const CONTENT_TYPE: &str = "application/json";

/// How long a run lasts.
const SLICE: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, PartialEq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Job {
    Encode,
    Decode,
}

#[derive(Clone, Copy, PartialEq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Candidate {
    LeveretWire,
    AmqProtocol,
    #[value(name = "amq-protocol, frames made beforehand")]
    AmqProtocolPrepared,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Run {
    job: Job,
    candidate: Candidate,
    size: usize,
}

pub(crate) struct Codec;

impl Suite for Codec {
    const NAME: &'static str = "codec";
    const DEADLINE: Duration = Duration::from_secs(60);
    const ROUNDS: u32 = 7;
    const NOTES: &'static str =
        "ns per message: of CPU time; least: of all rounds; times ours: that of leveret-wire";

    type Arguments = ();
    type Run = Run;

    async fn start((): ()) -> Result<Self, Failure> {
        Ok(Codec)
    }

    fn settings(&self) -> Vec<Vec<Run>> {
        let mut settings = Vec::new();
        for &job in Job::value_variants() {
            let mut candidates = Candidate::value_variants().to_vec();
            candidates.retain(|one| job == Job::Encode || *one != Candidate::AmqProtocolPrepared);
            for size in [16, 1024, 16 * 1024] {
                let runs = candidates.iter().map(|&candidate| Run { job, candidate, size });
                settings.push(runs.collect());
            }
        }
        settings
    }

    async fn run(Run { job, candidate, size }: Run) -> Result<Measured, Failure> {
        Ok(match (job, candidate) {
            (Job::Encode, Candidate::LeveretWire) => encode(size),
            (Job::Encode, Candidate::AmqProtocol) => encode_amq(size, false),
            (Job::Encode, Candidate::AmqProtocolPrepared) => encode_amq(size, true),
            (Job::Decode, Candidate::LeveretWire) => decode(size),
            (Job::Decode, _) => decode_amq(size),
        })
    }

    fn labels(run: &Run) -> Vec<(&'static str, Value)> {
        let job = match run.job {
            Job::Encode => "encode publish",
            Job::Decode => "decode deliveries",
        };
        vec![("job", format!("{job}, {} B", run.size).into()), ("candidate", name(run.candidate))]
    }

    fn comparisons(row: &Row<Run>, rows: &[Row<Run>]) -> Vec<(&'static str, Option<f64>)> {
        let least = row.result.as_ref().ok().and_then(|runs| runs.first());
        let least = least.map(|least| least.cpu_us_per_message() * 1e3);
        let is_ours = |run: &Run| Run { candidate: Candidate::LeveretWire, ..row.run } == *run;
        vec![
            ("ns_per_message", row.cpu().map(|cpu| cpu * 1e3)),
            ("least", least),
            ("times_ours", row.times(rows, is_ours)),
        ]
    }
}

/// Does the job batch by batch, until it has lasted long enough. The making of the input does not count.
fn measure<T>(mut input: impl FnMut() -> T, mut work: impl FnMut(T)) -> Measured {
    work(input());
    let (mut messages, mut spent) = (0, Duration::ZERO);
    while spent < SLICE {
        let input = input();
        let began = cpu_time();
        work(input);
        spent += cpu_time() - began;
        messages += BATCH as u64;
    }
    let spent = spent.as_nanos() as u64;
    Measured { messages, cpu_ns: spent, wall_ns: spent, ..Measured::default() }
}

fn body(size: usize) -> Bytes {
    Bytes::from(vec![b'x'; size])
}

fn encode(size: usize) -> Measured {
    let body = body(size);
    assert_same_bytes(&body);
    let mut outbound = Outbound::new();
    measure(
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

fn encode_amq(size: usize, are_frames_prepared: bool) -> Measured {
    let body = body(size);
    let prepared = are_frames_prepared.then(|| amq_publish(&body));
    let mut buffer = Some(Vec::new());
    measure(
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

fn decode(size: usize) -> Measured {
    let stream = deliveries(size);
    let mut assembler = Assembler::new(u64::MAX);
    let received = || {
        let mut inbound = Inbound::new(FrameMax::DEFAULT);
        inbound.extend_from_slice(&stream);
        inbound
    };
    measure(received, |mut inbound| {
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

fn decode_amq(size: usize) -> Measured {
    let stream = deliveries(size);
    measure(
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
    let body = body(size);
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
