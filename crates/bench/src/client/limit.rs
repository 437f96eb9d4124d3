//! The jobs done by hand: blocking sockets, frames encoded and parsed for each message, and no library. What is left is the
//! least that a client on this machine can take: a yardstick for what was measured on another one.
//!
//! One thread serves all channels in turns. Each delivery has an ack of its own, and so many acks are sent together.

use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use bytes::{Buf as _, BufMut as _};
use leveret_wire::method::{Encode, basic, channel, confirm, connection, queue};
use leveret_wire::{FRAME_END, FrameMax, Method, PROTOCOL_HEADER, ShortStr};

use super::frames::{BODY, BUFFER, Contents, FrameSocket, HEADER, METHOD, PUBLISH, put_method};
use super::jobs::{CONFIRM_WINDOW, Job, NOWHERE, PREFETCH, PUBLISHED, Run};
use crate::meter::{Failure, Measured, Meter, expect};

/// How many acks go out together, as Leveret's do.
const HELD_ACKS: u64 = 64;

/// The peer answers at once; if it does not, it hangs.
const READ_DEADLINE: Duration = Duration::from_secs(10);

/// Class and method id.
const DELIVER: &[u8] = &[0, 60, 0, 60];
const ACK: &[u8] = &[0, 60, 0, 80];

pub(crate) async fn run(run: Run) -> Result<Measured, Failure> {
    tokio::task::spawn_blocking(move || {
        let mut connection = open(run)?;
        if run.job == Job::Confirm {
            connection.on_each(run, &confirm::Select { nowait: false })?;
        }
        let meter = Meter::start();
        match run.job {
            Job::Publish => publish(&mut connection, run)?,
            Job::Confirm => confirm(&mut connection, run)?,
            _ => consume(&mut connection, run)?,
        }
        Ok(meter.stop(run.messages))
    })
    .await?
}

fn channels(run: Run) -> impl Iterator<Item = u16> {
    1..=run.setting.channels as u16
}

fn publish(connection: &mut FrameSocket, run: Run) -> Result<(), Failure> {
    let body = run.body();
    for _ in 0..run.share() {
        for channel in channels(run) {
            connection.publish(channel, NOWHERE, "key", &body)?;
        }
    }
    for channel in channels(run) {
        expect("arrived", run.published(), connection.count(channel, PUBLISHED)?)?;
    }
    Ok(())
}

fn confirm(connection: &mut FrameSocket, run: Run) -> Result<(), Failure> {
    let body = run.body();
    let queues: Vec<String> = run.queues().collect();
    let mut acked = vec![0; queues.len()];
    for sent in 0..run.share() {
        for (channel, queue) in channels(run).zip(&queues) {
            while sent - acked[usize::from(channel) - 1] >= CONFIRM_WINDOW as u64 {
                read_acks(connection, &mut acked)?;
            }
            connection.publish(channel, "", queue, &body)?;
        }
    }
    while acked.iter().any(|acked| *acked < run.share()) {
        read_acks(connection, &mut acked)?;
    }
    expect("were confirmed", run.messages, acked.iter().sum())
}

/// Waits for acks, and notes how many publishes of each channel have one.
fn read_acks(connection: &mut FrameSocket, acked: &mut [u64]) -> Result<(), Failure> {
    connection.flush()?;
    connection.read(|_, kind, channel, payload| {
        if let (METHOD, Some(mut ack)) = (kind, payload.strip_prefix(ACK)) {
            let (tag, multiple) = (ack.get_u64(), ack.get_u8() == 1);
            let before = &mut acked[usize::from(channel) - 1];
            *before = if multiple { tag } else { *before + 1 };
        }
        Ok::<_, Failure>(())
    })
}

/// What came on a channel. Its delivery tags are 1, 2, 3…
#[derive(Clone, Default)]
struct Deliveries {
    contents: Contents,
    acked: u64,
}

fn consume(connection: &mut FrameSocket, run: Run) -> Result<(), Failure> {
    let no_ack = run.job == Job::AutoAck;
    connection.on_each(run, &basic::Qos { prefetch_count: PREFETCH, ..Default::default() })?;
    for (channel, queue) in channels(run).zip(run.queues()) {
        let queue = ShortStr::try_from(queue.as_str())?;
        connection.method(channel, &basic::Consume { queue, no_ack, ..Default::default() })?;
    }
    connection.flush()?;
    let mut deliveries = vec![Deliveries::default(); run.setting.channels as usize];
    let (mut delivered, mut acked) = (0, 0);
    while delivered < run.messages {
        read_deliveries(connection, run, &mut deliveries)?;
        delivered = deliveries.iter().map(|channel| channel.contents.whole).sum();
        if !no_ack && (delivered - acked >= HELD_ACKS || delivered == run.messages) {
            acked = delivered;
            for (channel, deliveries) in channels(run).zip(&mut deliveries) {
                let whole = deliveries.contents.whole;
                (deliveries.acked + 1..=whole).for_each(|tag| connection.ack(channel, tag));
                deliveries.acked = whole;
            }
            connection.flush()?;
        }
    }
    for (index, channel) in (0..).zip(channels(run)).filter(|_| !no_ack) {
        let (queue, expected) = run.acked(index);
        expect("were acked", expected, connection.count(channel, &queue)?)?;
    }
    Ok(())
}

/// Waits for deliveries, and notes them. Fails if one is not the next, or has another size.
fn read_deliveries(
    connection: &mut FrameSocket,
    run: Run,
    deliveries: &mut [Deliveries],
) -> Result<(), Failure> {
    connection.read(|_, kind, channel, payload| {
        let contents = &mut deliveries[usize::from(channel) - 1].contents;
        match (kind, payload.strip_prefix(DELIVER)) {
            (METHOD, Some(mut deliver)) => {
                let consumer_tag = deliver.get_u8();
                deliver.advance(consumer_tag.into());
                if deliver.get_u64() != contents.whole + 1 {
                    return Err("a delivery out of order".into());
                }
            }
            (HEADER, _) if contents.header(payload)? == run.setting.size as u64 => {}
            (HEADER, _) => return Err("a body of another size".into()),
            (BODY, _) => contents.body(payload)?,
            _ => {}
        }
        Ok::<_, Failure>(())
    })
}

fn open(run: Run) -> Result<FrameSocket, Failure> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, run.setting.port))?;
    stream.set_read_timeout(Some(READ_DEADLINE))?;
    let mut connection = FrameSocket::new(stream, BUFFER)?;
    connection.outgoing.extend_from_slice(&PROTOCOL_HEADER);
    connection.reply()?;
    connection.call(0, &connection::StartOk::default())?;
    let frame_max = FrameMax::DEFAULT.get();
    connection.method(0, &connection::TuneOk { channel_max: 2047, frame_max, heartbeat: 0 })?;
    connection.call(0, &connection::Open::default())?;
    connection.on_each(run, &channel::Open::default())?;
    Ok(connection)
}

impl FrameSocket {
    /// Calls a method on each channel.
    fn on_each(&mut self, run: Run, method: &impl Encode) -> Result<(), Failure> {
        channels(run).try_for_each(|channel| self.call(channel, method).map(drop))
    }

    fn method(&mut self, channel: u16, method: &impl Encode) -> Result<(), Failure> {
        Ok(put_method(&mut self.outgoing, channel, method)?)
    }

    /// Calls a method, and gives the payload of the frame that answers.
    fn call(&mut self, channel: u16, method: &impl Encode) -> Result<Vec<u8>, Failure> {
        self.method(channel, method)?;
        self.reply()
    }

    fn reply(&mut self) -> Result<Vec<u8>, Failure> {
        self.flush()?;
        let mut reply = Vec::new();
        while reply.is_empty() {
            self.read(|_, _, _, payload| {
                reply.extend_from_slice(payload);
                Ok::<_, Failure>(())
            })?;
        }
        Ok(reply)
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
        if bytes.len() >= BUFFER { Ok(self.flush()?) } else { Ok(()) }
    }

    fn ack(&mut self, channel: u16, tag: u64) {
        let bytes = &mut self.outgoing;
        begin_frame(bytes, METHOD, channel, ACK.len() + 9);
        bytes.put_slice(ACK);
        bytes.put_u64(tag);
        bytes.put_slice(&[0, FRAME_END]);
    }
}

fn begin_frame(bytes: &mut Vec<u8>, kind: u8, channel: u16, size: usize) {
    bytes.put_u8(kind);
    bytes.put_u16(channel);
    bytes.put_u32(size as u32);
}
