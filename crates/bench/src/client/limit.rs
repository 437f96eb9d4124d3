//! The jobs done by hand: blocking sockets, frames encoded and parsed for each message, and no library. What is left is the
//! least that a client on this machine can take: a yardstick for what was measured on another one.
//!
//! One thread serves all channels in turns. Each delivery has an ack of its own, and so many acks are sent together.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use bytes::{Buf as _, BufMut as _};
use leveret_wire::method::{Encode, basic, channel, confirm, connection, queue};
use leveret_wire::{FRAME_END, FrameMax, Method, Outbound, PROTOCOL_HEADER, ShortStr};

use super::jobs::{CONFIRM_WINDOW, Job, NOWHERE, PREFETCH, PUBLISHED, Run};
use crate::meter::{Failure, Measured, Meter, expect};

/// How much is written at once, about, and read at most: system calls are then few, and the processor's cache holds it.
const PIECE: usize = 256 * 1024;

/// How many acks go out together, as Leveret's do.
const HELD_ACKS: u64 = 64;

/// The peer answers at once; if it does not, it hangs.
const PATIENCE: Duration = Duration::from_secs(10);

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;

/// Class and method id.
const PUBLISH: &[u8] = &[0, 60, 0, 40];
const DELIVER: &[u8] = &[0, 60, 0, 60];
const ACK: &[u8] = &[0, 60, 0, 80];

pub(crate) async fn run(run: Run) -> Result<Measured, Failure> {
    tokio::task::spawn_blocking(move || {
        let mut line = Line::open(run)?;
        if run.job == Job::Confirm {
            line.on_each(run, &confirm::Select { nowait: false })?;
        }
        let meter = Meter::start();
        match run.job {
            Job::Publish => publish(&mut line, run)?,
            Job::Confirm => confirm(&mut line, run)?,
            _ => consume(&mut line, run)?,
        }
        Ok(meter.stop(run.messages))
    })
    .await?
}

fn channels(run: Run) -> impl Iterator<Item = u16> {
    1..=run.channels as u16
}

fn publish(line: &mut Line, run: Run) -> Result<(), Failure> {
    let body = vec![b'x'; run.size];
    for _ in 0..run.share() {
        for channel in channels(run) {
            line.publish(channel, NOWHERE, "key", &body)?;
        }
    }
    line.flush()?;
    for channel in channels(run) {
        expect("arrived", run.published(), line.count(channel, PUBLISHED)?)?;
    }
    Ok(())
}

fn confirm(line: &mut Line, run: Run) -> Result<(), Failure> {
    let body = vec![b'x'; run.size];
    let queues: Vec<String> = (0..run.channels).map(|place| run.queue(place)).collect();
    let mut acked = vec![0; queues.len()];
    for sent in 0..run.share() {
        for (channel, queue) in channels(run).zip(&queues) {
            while sent - acked[usize::from(channel) - 1] >= CONFIRM_WINDOW as u64 {
                read_acks(line, &mut acked)?;
            }
            line.publish(channel, "", queue, &body)?;
        }
    }
    while acked.iter().any(|acked| *acked < run.share()) {
        read_acks(line, &mut acked)?;
    }
    expect("were confirmed", run.messages, acked.iter().sum())
}

/// Waits for acks, and notes how many publishes of each channel have one.
fn read_acks(line: &mut Line, acked: &mut [u64]) -> Result<(), Failure> {
    line.flush()?;
    line.read(|kind, channel, payload| {
        if let (METHOD, Some(mut ack)) = (kind, payload.strip_prefix(ACK)) {
            let (tag, multiple) = (ack.get_u64(), ack.get_u8() == 1);
            let before = &mut acked[usize::from(channel) - 1];
            *before = if multiple { tag } else { *before + 1 };
        }
    })
}

/// What came on a channel.
#[derive(Clone, Default)]
struct Lane {
    /// The delivery that comes, and how much of its body is missing.
    tag: u64,
    missing: usize,
    /// The last that came whole, and the last that was acked.
    whole: u64,
    acked: u64,
}

fn consume(line: &mut Line, run: Run) -> Result<(), Failure> {
    let no_ack = run.job == Job::AutoAck;
    line.on_each(run, &basic::Qos { prefetch_count: PREFETCH, ..Default::default() })?;
    for channel in channels(run) {
        let queue = run.queue(u64::from(channel) - 1);
        let queue = ShortStr::try_from(queue.as_str())?;
        line.method(channel, &basic::Consume { queue, no_ack, ..Default::default() })?;
    }
    line.flush()?;
    let mut lanes = vec![Lane::default(); run.channels as usize];
    let (mut delivered, mut held) = (0, 0);
    while delivered < run.messages {
        let came = deliveries(line, run, &mut lanes)?;
        (delivered, held) = (delivered + came, held + came);
        if !no_ack && (held >= HELD_ACKS || delivered == run.messages) {
            held = 0;
            for (channel, lane) in channels(run).zip(&mut lanes) {
                (lane.acked + 1..=lane.whole).for_each(|tag| line.ack(channel, tag));
                lane.acked = lane.whole;
            }
            line.flush()?;
        }
    }
    for (place, channel) in (0..).zip(channels(run)).filter(|_| !no_ack) {
        let (queue, expected) = run.acked(place);
        expect("were acked", expected, line.count(channel, &queue)?)?;
    }
    Ok(())
}

/// Waits for deliveries, and says how many came whole.
fn deliveries(line: &mut Line, run: Run, lanes: &mut [Lane]) -> Result<u64, Failure> {
    let (mut came, mut wrong) = (0, 0);
    line.read(|kind, channel, payload| {
        let lane = &mut lanes[usize::from(channel) - 1];
        match (kind, payload.strip_prefix(DELIVER)) {
            (METHOD, Some(mut deliver)) => {
                let consumer_tag = deliver.get_u8();
                deliver.advance(consumer_tag.into());
                lane.tag = deliver.get_u64();
            }
            (HEADER, _) => {
                lane.missing = (&payload[4..]).get_u64() as usize;
                wrong += u64::from(lane.missing != run.size);
            }
            (BODY, _) => {
                lane.missing -= payload.len();
                if lane.missing == 0 {
                    lane.whole = lane.tag;
                    came += 1;
                }
            }
            _ => {}
        }
    })?;
    expect("are of another size", 0, wrong)?;
    Ok(came)
}

/// A connection.
struct Line {
    stream: TcpStream,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    /// How much of `incoming` came and is not looked at: the beginning of a frame.
    filled: usize,
}

impl Line {
    fn open(run: Run) -> Result<Line, Failure> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, run.port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let outgoing = Vec::with_capacity(2 * PIECE);
        let mut line = Line { stream, outgoing, incoming: vec![0; PIECE], filled: 0 };
        line.outgoing.extend_from_slice(&PROTOCOL_HEADER);
        line.flush()?;
        line.reply()?;
        line.call(0, &connection::StartOk::default())?;
        let frame_max = FrameMax::DEFAULT.get();
        line.method(0, &connection::TuneOk { channel_max: 2047, frame_max, heartbeat: 0 })?;
        line.call(0, &connection::Open::default())?;
        line.on_each(run, &channel::Open::default())?;
        Ok(line)
    }

    /// Calls a method on each channel.
    fn on_each(&mut self, run: Run, method: &impl Encode) -> Result<(), Failure> {
        channels(run).try_for_each(|channel| self.call(channel, method).map(drop))
    }

    fn method(&mut self, channel: u16, method: &impl Encode) -> Result<(), Failure> {
        let mut outbound = Outbound::new();
        outbound.method(channel, method, FrameMax::DEFAULT)?;
        self.outgoing.put(outbound);
        Ok(())
    }

    /// Calls a method, and gives the payload of the frame that answers.
    fn call(&mut self, channel: u16, method: &impl Encode) -> Result<Vec<u8>, Failure> {
        self.method(channel, method)?;
        self.flush()?;
        self.reply()
    }

    fn reply(&mut self) -> Result<Vec<u8>, Failure> {
        let mut reply = None;
        while reply.is_none() {
            self.read(|_, _, payload| reply = Some(payload.to_vec()))?;
        }
        reply.ok_or_else(|| "there is no reply".into())
    }

    /// What the peer has counted.
    fn count(&mut self, channel: u16, name: &str) -> Result<u64, Failure> {
        let queue = ShortStr::try_from(name)?;
        let declare = queue::Declare { queue, passive: true, ..Default::default() };
        let reply = self.call(channel, &declare)?;
        match Method::decode(&reply)? {
            Method::QueueDeclareOk(ok) => Ok(ok.message_count.into()),
            other => Err(format!("{} is no answer", other.name()).into()),
        }
    }

    fn publish(
        &mut self,
        channel: u16,
        exchange: &str,
        key: &str,
        body: &[u8],
    ) -> Result<(), Failure> {
        let bytes = &mut self.outgoing;
        let method = PUBLISH.len() + 2 + (1 + exchange.len()) + (1 + key.len()) + 1;
        begin_frame(bytes, METHOD, channel, method);
        bytes.put_slice(PUBLISH);
        bytes.put_u16(0);
        for name in [exchange, key] {
            bytes.put_u8(name.len() as u8);
            bytes.put_slice(name.as_bytes());
        }
        bytes.put_slice(&[0, FRAME_END]);
        begin_frame(bytes, HEADER, channel, 14);
        // Class 60, weight 0; behind the size, that there are no properties.
        bytes.put_u32(60 << 16);
        bytes.put_u64(body.len() as u64);
        bytes.put_slice(&[0, 0, FRAME_END]);
        begin_frame(bytes, BODY, channel, body.len());
        bytes.put_slice(body);
        bytes.put_u8(FRAME_END);
        if bytes.len() >= PIECE { self.flush() } else { Ok(()) }
    }

    fn ack(&mut self, channel: u16, tag: u64) {
        begin_frame(&mut self.outgoing, METHOD, channel, ACK.len() + 9);
        self.outgoing.put_slice(ACK);
        self.outgoing.put_u64(tag);
        self.outgoing.put_slice(&[0, FRAME_END]);
    }

    fn flush(&mut self) -> Result<(), Failure> {
        self.stream.write_all(&self.outgoing)?;
        self.outgoing.clear();
        Ok(())
    }

    /// Reads once, and hands out the type, channel and payload of each frame that is whole.
    fn read(&mut self, mut take: impl FnMut(u8, u16, &[u8])) -> Result<(), Failure> {
        let read = self.stream.read(&mut self.incoming[self.filled..])?;
        if read == 0 {
            return Err("the peer hung up".into());
        }
        self.filled += read;
        let mut rest = &self.incoming[..self.filled];
        while let Some((&[kind, c0, c1, s0, s1, s2, s3], after)) = rest.split_first_chunk() {
            let size = u32::from_be_bytes([s0, s1, s2, s3]) as usize;
            match after.split_at_checked(size) {
                Some((payload, [FRAME_END, next @ ..])) => {
                    take(kind, u16::from_be_bytes([c0, c1]), payload);
                    rest = next;
                }
                Some((_, [_, ..])) => return Err("a frame without an end".into()),
                _ => break,
            }
        }
        let looked_at = self.filled - rest.len();
        self.incoming.copy_within(looked_at..self.filled, 0);
        self.filled -= looked_at;
        Ok(())
    }
}

fn begin_frame(bytes: &mut Vec<u8>, kind: u8, channel: u16, size: usize) {
    bytes.put_u8(kind);
    bytes.put_u16(channel);
    bytes.put_u32(size as u32);
}
