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

use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof, WouldBlock};
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;

use leveret_wire::method::{basic, channel, confirm, connection, queue};
use leveret_wire::{FrameMax, LongStr, Method, ShortStr, Table};

use super::frames::{BODY, Contents, FrameSocket, HEADER, METHOD, PUBLISH, malformed, put_method};
use super::jobs::{ACKED, PUBLISHED, deliveries_of};
use consumer::Consumer;

mod consumer;

/// How much one read may bring, and so how many publishes one ack confirms.
const READ_SIZE: usize = 64 * 1024;

/// The client's process has ended: its part is done.
const GONE: [io::ErrorKind; 3] = [BrokenPipe, ConnectionReset, UnexpectedEof];

/// Serves until standard input ends, that is until the process that started this one has ended. Says on standard
/// output on which port.
pub(crate) fn serve() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    println!("{}", listener.local_addr()?.port());
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || match converse(stream) {
                Err(error) if GONE.contains(&error.kind()) => {}
                Err(error) => eprintln!("null peer: {error}"),
                Ok(()) => {}
            });
        }
    });
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Serves one connection.
fn converse(mut stream: TcpStream) -> io::Result<()> {
    stream.read_exact(&mut [0; leveret_wire::PROTOCOL_HEADER.len()])?;
    let mut socket = FrameSocket::new(stream, READ_SIZE)?;
    put_method(&mut socket.outgoing, 0, &start())?;
    socket.flush()?;
    let (mut channels, mut delivered) = (Channels::default(), false);
    while !channels.closed {
        // While there are deliveries to send, reading does not wait.
        socket.stream.set_nonblocking(delivered)?;
        let read =
            socket.read(|replies, kind, id, payload| channels.frame(replies, kind, id, payload));
        socket.stream.set_nonblocking(false)?;
        match read {
            Err(error) if error.kind() != WouldBlock => return Err(error),
            _ => {}
        }
        channels.confirm(&mut socket.outgoing)?;
        socket.flush()?;
        delivered = channels.deliver(&mut socket.stream)?;
    }
    Ok(())
}

/// The channels of a connection.
#[derive(Default)]
struct Channels {
    /// Channel `n` at `n - 1`.
    channels: Vec<Channel>,
    /// Whether the client has closed the connection.
    closed: bool,
}

#[derive(Default)]
struct Channel {
    published: Contents,
    confirming: bool,
    confirmed: u64,
    prefetch: u16,
    consumer: Option<Consumer>,
}

impl Channels {
    fn frame(
        &mut self,
        replies: &mut Vec<u8>,
        kind: u8,
        id: u16,
        payload: &[u8],
    ) -> io::Result<()> {
        match kind {
            METHOD if payload.starts_with(PUBLISH) => Ok(()),
            METHOD => self.method(replies, id, Method::decode(payload).map_err(io::Error::other)?),
            HEADER => self.channel(id)?.published.header(payload).map(drop),
            BODY => self.channel(id)?.published.body(payload),
            _ => Ok(()),
        }
    }

    fn channel(&mut self, channel: u16) -> io::Result<&mut Channel> {
        let index = usize::from(channel).checked_sub(1).ok_or_else(malformed)?;
        self.channels.get_mut(index).ok_or_else(malformed)
    }

    fn method(&mut self, replies: &mut Vec<u8>, id: u16, method: Method<'_>) -> io::Result<()> {
        match method {
            Method::ConnectionStartOk(_) => put_method(replies, id, &tune()),
            Method::ConnectionTuneOk(_) => Ok(()),
            Method::ConnectionOpen(_) => put_method(replies, id, &connection::OpenOk {}),
            Method::ConnectionClose(_) => {
                self.closed = true;
                put_method(replies, id, &connection::CloseOk {})
            }
            Method::ChannelOpen(_) => {
                let channels = self.channels.len().max(id.into());
                self.channels.resize_with(channels, Channel::default);
                put_method(replies, id, &channel::OpenOk {})
            }
            Method::ChannelClose(_) => put_method(replies, id, &channel::CloseOk {}),
            Method::ConfirmSelect(_) => {
                self.channel(id)?.confirming = true;
                put_method(replies, id, &confirm::SelectOk {})
            }
            Method::BasicQos(qos) => {
                self.channel(id)?.prefetch = qos.prefetch_count;
                put_method(replies, id, &basic::QosOk {})
            }
            Method::BasicConsume(consume) => self.consume(replies, id, &consume),
            Method::BasicCancel(cancel) => {
                put_method(replies, id, &basic::CancelOk { consumer_tag: cancel.consumer_tag })
            }
            Method::BasicAck(ack) => {
                let consumer = self.channel(id)?.consumer.as_mut().ok_or_else(malformed)?;
                consumer.ack(ack.delivery_tag, ack.multiple)
            }
            Method::QueueDeclare(declare) => self.count(replies, id, declare.queue),
            other => Err(io::Error::other(format!("the null peer has no {}", other.name()))),
        }
    }

    fn consume(
        &mut self,
        replies: &mut Vec<u8>,
        id: u16,
        consume: &basic::Consume<'_>,
    ) -> io::Result<()> {
        let consumer_tag = match consume.consumer_tag.as_bytes() {
            b"" => ShortStr::from_static("bench"),
            _ => consume.consumer_tag.borrowed(),
        };
        let (size, messages) = deliveries_of(&consume.queue.to_string()).ok_or_else(malformed)?;
        let channel = self.channel(id)?;
        let prefetch = if consume.no_ack { 0 } else { channel.prefetch };
        put_method(replies, id, &basic::ConsumeOk { consumer_tag: consumer_tag.borrowed() })?;
        channel.consumer = Some(Consumer::new(id, consumer_tag, size, messages, prefetch));
        Ok(())
    }

    fn count(&mut self, replies: &mut Vec<u8>, id: u16, name: ShortStr<'_>) -> io::Result<()> {
        let counted = match name.to_string().as_str() {
            PUBLISHED => self.channel(id)?.published.whole,
            ACKED => self.channel(id)?.consumer.as_ref().map_or(0, Consumer::acked),
            _ => 0,
        };
        let message_count = u32::try_from(counted).unwrap_or(u32::MAX);
        put_method(replies, id, &queue::DeclareOk { queue: name, message_count, consumer_count: 0 })
    }

    /// One ack for all that came since the last.
    fn confirm(&mut self, replies: &mut Vec<u8>) -> io::Result<()> {
        for (id, channel) in (1..).zip(&mut self.channels) {
            let whole = channel.published.whole;
            if channel.confirming && whole > channel.confirmed {
                let multiple = whole > channel.confirmed + 1;
                channel.confirmed = whole;
                put_method(replies, id, &basic::Ack { delivery_tag: whole, multiple })?;
            }
        }
        Ok(())
    }

    /// Sends some deliveries to each consumer that may have more. False if none may.
    fn deliver(&mut self, stream: &mut TcpStream) -> io::Result<bool> {
        let mut delivered = false;
        for consumer in self.channels.iter_mut().filter_map(|channel| channel.consumer.as_mut()) {
            let bytes = consumer.next();
            stream.write_all(bytes)?;
            delivered |= !bytes.is_empty();
        }
        Ok(delivered)
    }
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
