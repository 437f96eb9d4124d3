//! A peer that costs the client nothing to wait for: it shakes hands, swallows publishes and confirms them with one
//! ack per read, and sends deliveries that were encoded beforehand as fast as prefetch lets it.
//!
//! It runs in a process of its own, so that its CPU time is not the client's.
//!
//! | what the client does | what it gets |
//! |---|---|
//! | `queue.declare` passive, `published` | as the message count, how many whole messages it published on the channel |
//! | `queue.declare` passive, `acked` | the same of deliveries that it acked |
//! | `basic.consume` of `bench.0.1024.5000` | 5,000 deliveries of 1,024 bytes |

use std::io::ErrorKind::{BrokenPipe, ConnectionReset, WouldBlock};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;

use bytes::{Buf, BufMut};
use leveret_wire::method::{Encode, basic, channel, confirm, connection, queue};
use leveret_wire::{
    FrameBatch, FrameKind, FrameMax, Inbound, LongStr, Method, Outbound, ShortStr, Table,
};

use super::deliveries::Consumer;
use super::jobs::{ACKED, PUBLISHED, deliveries_of};

/// Serves until standard input ends, that is until the process that started this one has ended. Says on standard
/// output on which port.
pub(crate) fn serve() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    println!("{}", listener.local_addr()?.port());
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                match Conversation::new(stream).and_then(Conversation::run) {
                    // A client's process that has ended: its part is done.
                    Err(error) if matches!(error.kind(), ConnectionReset | BrokenPipe) => {}
                    Err(error) => eprintln!("null peer: {error}"),
                    Ok(()) => {}
                }
            });
        }
    });
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// One connection.
struct Conversation {
    stream: TcpStream,
    inbound: Inbound,
    replies: Outbound,
    /// Channel `n` at `n - 1`.
    channels: Vec<Channel>,
}

#[derive(Default)]
struct Channel {
    /// How many publishes came whole.
    whole: u64,
    /// How much of the body of the current one is missing.
    missing: u64,
    confirming: bool,
    confirmed: u64,
    prefetch: u16,
    consumer: Option<Consumer>,
}

impl Conversation {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let inbound = Inbound::new(FrameMax::DEFAULT);
        Ok(Conversation { stream, inbound, replies: Outbound::new(), channels: Vec::new() })
    }

    fn run(mut self) -> io::Result<()> {
        self.expect_protocol_header()?;
        self.reply(0, &start())?;
        self.flush()?;
        self.converse()
    }

    fn expect_protocol_header(&mut self) -> io::Result<()> {
        while self.inbound.take_protocol_header().map_err(io::Error::other)?.is_none() {
            if !self.read()? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    fn converse(&mut self) -> io::Result<()> {
        // Frames may have come along with the protocol header, hence the read comes last.
        loop {
            loop {
                let batch = self.inbound.take().map_err(io::Error::other)?;
                if batch.is_empty() {
                    break;
                }
                if !self.frames(&batch)? {
                    return self.flush();
                }
            }
            self.confirm()?;
            self.flush()?;
            // While there are deliveries to send, reading does not wait.
            let delivered = self.deliver()?;
            self.stream.set_nonblocking(delivered)?;
            let read = self.read();
            self.stream.set_nonblocking(false)?;
            match read {
                Ok(false) => return Ok(()),
                Err(error) if error.kind() != WouldBlock => return Err(error),
                _ => {}
            }
        }
    }

    /// False at the end of the stream.
    fn read(&mut self) -> io::Result<bool> {
        let mut space = self.inbound.space();
        let chunk = space.chunk_mut();
        // A fixed piece, copied: what the peer's reading costs is not what is measured.
        let mut piece = [0; 64 * 1024];
        let room = chunk.len().min(piece.len());
        let read = self.stream.read(&mut piece[..room])?;
        space.put_slice(&piece[..read]);
        Ok(read > 0)
    }

    /// False when the connection is closed.
    fn frames(&mut self, batch: &FrameBatch) -> io::Result<bool> {
        for frame in batch.frames() {
            let payload = frame.payload;
            match frame.kind {
                FrameKind::Heartbeat => {}
                FrameKind::Method if payload.starts_with(&PUBLISH) => {}
                FrameKind::Method => {
                    let method = Method::decode(payload).map_err(io::Error::other)?;
                    if !self.method(frame.channel, method)? {
                        return Ok(false);
                    }
                }
                FrameKind::Header => {
                    let mut size = payload.get(4..12).ok_or_else(malformed)?;
                    let channel = self.channel(frame.channel)?;
                    channel.missing = size.get_u64();
                    channel.whole += u64::from(channel.missing == 0);
                }
                FrameKind::Body => {
                    let channel = self.channel(frame.channel)?;
                    let missing = channel.missing.checked_sub(payload.len() as u64);
                    channel.missing = missing.ok_or_else(malformed)?;
                    channel.whole += u64::from(channel.missing == 0);
                }
            }
        }
        Ok(true)
    }

    fn channel(&mut self, channel: u16) -> io::Result<&mut Channel> {
        let index = usize::from(channel).checked_sub(1).ok_or_else(malformed)?;
        self.channels.get_mut(index).ok_or_else(malformed)
    }

    fn method(&mut self, id: u16, method: Method<'_>) -> io::Result<bool> {
        match method {
            Method::ConnectionStartOk(_) => self.reply(id, &tune())?,
            Method::ConnectionTuneOk(_) => {}
            Method::ConnectionOpen(_) => self.reply(id, &connection::OpenOk {})?,
            Method::ConnectionClose(_) => {
                self.reply(id, &connection::CloseOk {})?;
                return Ok(false);
            }
            Method::ChannelOpen(_) => {
                let channels = self.channels.len().max(id.into());
                self.channels.resize_with(channels, Channel::default);
                self.reply(id, &channel::OpenOk {})?;
            }
            Method::ChannelClose(_) => self.reply(id, &channel::CloseOk {})?,
            Method::ConfirmSelect(_) => {
                self.channel(id)?.confirming = true;
                self.reply(id, &confirm::SelectOk {})?;
            }
            Method::BasicQos(qos) => {
                self.channel(id)?.prefetch = qos.prefetch_count;
                self.reply(id, &basic::QosOk {})?;
            }
            Method::BasicConsume(consume) => self.consume(id, &consume)?,
            Method::BasicCancel(cancel) => {
                self.reply(id, &basic::CancelOk { consumer_tag: cancel.consumer_tag })?;
            }
            Method::BasicAck(ack) => {
                let consumer = self.channel(id)?.consumer.as_mut().ok_or_else(malformed)?;
                consumer.ack(ack.delivery_tag, ack.multiple)?;
            }
            Method::QueueDeclare(declare) => self.count(id, declare.queue)?,
            other => return Err(io::Error::other(format!("{} is not for here", other.name()))),
        }
        Ok(true)
    }

    fn consume(&mut self, id: u16, consume: &basic::Consume<'_>) -> io::Result<()> {
        let consumer_tag = match consume.consumer_tag.as_bytes() {
            b"" => ShortStr::from_static("bench"),
            _ => consume.consumer_tag.borrowed(),
        };
        let (size, messages) = deliveries_of(&consume.queue.to_string()).ok_or_else(malformed)?;
        let prefetch = if consume.no_ack { 0 } else { self.channel(id)?.prefetch };
        self.reply(id, &basic::ConsumeOk { consumer_tag: consumer_tag.borrowed() })?;
        let consumer = Consumer::new(id, consumer_tag, size, messages, prefetch);
        self.channel(id)?.consumer = Some(consumer);
        Ok(())
    }

    fn count(&mut self, id: u16, name: ShortStr<'_>) -> io::Result<()> {
        let counted = match name.to_string().as_str() {
            PUBLISHED => self.channel(id)?.whole,
            ACKED => self.channel(id)?.consumer.as_ref().map_or(0, Consumer::acked),
            _ => 0,
        };
        let message_count = u32::try_from(counted).unwrap_or(u32::MAX);
        self.reply(id, &queue::DeclareOk { queue: name, message_count, consumer_count: 0 })
    }

    /// One ack for all that came since the last.
    fn confirm(&mut self) -> io::Result<()> {
        for (index, channel) in self.channels.iter_mut().enumerate() {
            if channel.confirming && channel.whole > channel.confirmed {
                let multiple = channel.whole > channel.confirmed + 1;
                let ack = basic::Ack { delivery_tag: channel.whole, multiple };
                channel.confirmed = channel.whole;
                let id = index as u16 + 1;
                self.replies.method(id, &ack, FrameMax::DEFAULT).map_err(io::Error::other)?;
            }
        }
        Ok(())
    }

    fn reply(&mut self, channel: u16, method: &impl Encode) -> io::Result<()> {
        self.replies.method(channel, method, FrameMax::DEFAULT).map_err(io::Error::other)
    }

    /// Sends some deliveries to each consumer that may have more. False if none may.
    fn deliver(&mut self) -> io::Result<bool> {
        let mut delivered = false;
        for consumer in self.channels.iter_mut().filter_map(|channel| channel.consumer.as_mut()) {
            let bytes = consumer.next();
            self.stream.write_all(bytes)?;
            delivered |= !bytes.is_empty();
        }
        Ok(delivered)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.replies.has_remaining() {
            let bytes = self.replies.copy_to_bytes(self.replies.remaining());
            self.stream.write_all(&bytes)?;
        }
        Ok(())
    }
}

/// Class and method id of `basic.publish`: nothing else of it matters here.
const PUBLISH: [u8; 4] = [0, 60, 0, 40];

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the client sent what cannot be")
}

/// As much as the clients insist on.
fn start() -> connection::Start<'static> {
    let capabilities = [
        "publisher_confirms",
        "exchange_exchange_bindings",
        "basic.nack",
        "consumer_cancel_notify",
        "connection.blocked",
        "consumer_priorities",
        "authentication_failure_close",
        "per_consumer_qos",
        "direct_reply_to",
    ];
    let capabilities =
        Table::from_pairs(capabilities.map(|name| (name, true.into()))).expect("short names");
    let server_properties = Table::from_pairs([
        ("product", "null peer".into()),
        ("version", "0".into()),
        ("cluster_name", "none".into()),
        ("capabilities", capabilities.into()),
    ]);
    connection::Start {
        version_major: 0,
        version_minor: 9,
        server_properties: server_properties.expect("short names"),
        mechanisms: LongStr::from("PLAIN AMQPLAIN"),
        locales: LongStr::from("en_US"),
    }
}

/// What RabbitMQ offers.
fn tune() -> connection::Tune {
    connection::Tune { channel_max: 2047, frame_max: FrameMax::DEFAULT.get(), heartbeat: 60 }
}
