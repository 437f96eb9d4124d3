//! A client that says what it is told to, and waits for nothing.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes, BytesMut};
use leveret_broker::Broker;
use leveret_wire::method::{basic, channel, connection, exchange, queue};
use leveret_wire::method::{Encode, confirm, tx};
use leveret_wire::{
    Array, FRAME_END, FrameMax, Outbound, PROTOCOL_HEADER, Properties, Secret, ShortStr, Table,
    Value,
};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};

use crate::program::{BindingArguments, Chain, Links, Method, Publish, QueueArguments};

/// Small, so that contents have many frames.
const FRAME_MAX: u32 = 4096;

/// How many channels a client uses, one more than it may.
const CHANNELS: u16 = 4;
pub const CHANNEL_MAX: u16 = CHANNELS - 1;

const EXCHANGES: [&str; 8] =
    ["e0", "e1", "e2", "e3", "", "amq.topic", "amq.fanout", "amq.headers"];
const QUEUES: [&str; 6] = ["q0", "q1", "q2", "q3", "amq.rabbitmq.reply-to", ""];
const KEYS: [&str; 10] = ["q0", "q1", "q2", "q3", "a", "a.b", "#", "*", "a.#", "#.b"];
const KINDS: [&str; 4] = ["direct", "fanout", "topic", "headers"];
const OVERFLOWS: [&str; 3] = ["drop-head", "reject-publish", "reject-publish-dlx"];
const MATCHES: [&str; 5] = ["all", "any", "all-with-x", "any-with-x", "some"];
const HEADERS: [&str; 4] = ["h0", "h1", "x-h2", "h3"];
const TAGS: [&str; 4] = ["t0", "t1", "t2", ""];

fn pick(names: &[&'static str], number: u8) -> ShortStr<'static> {
    ShortStr::from_static(names[usize::from(number) % names.len()])
}

pub struct Client {
    stream: DuplexStream,
    /// What the broker has not taken yet.
    unsent: BytesMut,
    /// The last publish has so many bytes of its body to come.
    missing: [usize; CHANNELS as usize],
}

impl Client {
    /// Connects, and shakes hands without waiting for the other side.
    pub fn connect(broker: &Broker, heartbeat: u16) -> Client {
        let mut client =
            Client { stream: broker.connect(), unsent: BytesMut::new(), missing: Default::default() };
        client.bytes(&PROTOCOL_HEADER);
        let mut capabilities = Table::new();
        for capability in ["consumer_cancel_notify", "connection.blocked"] {
            let _ = capabilities.insert(capability, true);
        }
        let mut client_properties = Table::new();
        let _ = client_properties.insert("capabilities", capabilities);
        client.method(0, &connection::StartOk {
            client_properties,
            mechanism: ShortStr::from_static("PLAIN"),
            response: Secret::new(&b"\0guest\0guest"[..]),
            locale: ShortStr::from_static("en_US"),
        });
        client.method(0, &connection::TuneOk {
            channel_max: CHANNEL_MAX,
            frame_max: FRAME_MAX,
            heartbeat,
        });
        client.method(0, &connection::Open { virtual_host: ShortStr::from_static("/") });
        client
    }

    /// A number of a channel, sometimes one too many; never that of the connection.
    pub fn channel(number: u8) -> u16 {
        u16::from(number) % CHANNELS + 1
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.unsent.extend_from_slice(bytes);
    }

    pub fn frame(&mut self, kind: u8, channel: u16, payload: &[u8]) {
        self.bytes(&[kind]);
        self.bytes(&channel.to_be_bytes());
        self.bytes(&(payload.len() as u32).to_be_bytes());
        self.bytes(payload);
        self.bytes(&[FRAME_END]);
    }

    pub fn method(&mut self, channel: u16, method: &(impl Encode + ?Sized)) {
        let mut outbound = Outbound::new();
        // What fits no frame is not sent.
        let _ = outbound.method(channel, method, FrameMax::DEFAULT);
        self.append(outbound);
    }

    fn append(&mut self, mut outbound: Outbound) {
        self.unsent.extend_from_slice(&outbound.copy_to_bytes(outbound.remaining()));
    }

    /// Hands over what the broker takes.
    pub fn flush(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        while self.unsent.has_remaining() {
            let stream = Pin::new(&mut self.stream);
            match stream.poll_write(&mut context, self.unsent.chunk()) {
                Poll::Ready(Ok(written @ 1..)) => self.unsent.advance(written),
                Poll::Ready(_) => self.unsent.clear(),
                Poll::Pending => return,
            }
        }
    }

    pub fn has_unsent(&self) -> bool {
        self.unsent.has_remaining()
    }

    /// Reads all that came, and forgets it. False at the end.
    pub fn read(&mut self) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        let mut room = vec![0; 64 * 1024];
        loop {
            let mut buffer = ReadBuf::new(&mut room);
            match Pin::new(&mut self.stream).poll_read(&mut context, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {}
                Poll::Ready(_) => return false,
                Poll::Pending => return true,
            }
        }
    }

    /// A publish, whole or without its body.
    pub fn publish(&mut self, channel: u16, publish: &Publish, whole: bool) {
        let Publish { exchange, key, mandatory, size, .. } = *publish;
        let method = basic::Publish {
            exchange: pick(&EXCHANGES, exchange),
            routing_key: pick(&KEYS, key),
            mandatory,
            immediate: false,
        };
        let properties = properties(publish);
        let frame_max = FrameMax::new(FRAME_MAX).unwrap_or(FrameMax::MIN);
        let body = Bytes::from(vec![b'x'; size.bytes()]);
        if whole {
            let mut outbound = Outbound::new();
            let _ = outbound.content(channel, &method, &properties, &body, frame_max);
            return self.append(outbound);
        }
        self.method(channel, &method);
        let mut header = vec![0, 60, 0, 0];
        header.extend((body.len() as u64).to_be_bytes());
        header.extend_from_slice(leveret_wire::RawProperties::from(&properties).as_bytes());
        self.frame(2, channel, &header);
        self.missing[usize::from(channel - 1)] = body.len();
    }

    /// So much of a body that was not sent with its publish.
    pub fn body(&mut self, channel: u16, size: usize) {
        let missing = &mut self.missing[usize::from(channel - 1)];
        let size = size.min(*missing);
        *missing -= size;
        let body = vec![b'y'; size];
        for piece in body.chunks(FRAME_MAX as usize - 8) {
            self.frame(3, channel, piece);
        }
    }

    pub fn ask(&mut self, on: u16, method: &Method) {
        let nowait = false;
        match *method {
            Method::Open => self.method(on, &channel::Open {}),
            Method::Close => self.method(on, &channel::Close::default()),
            Method::CloseOk => self.method(on, &channel::CloseOk {}),
            Method::ConnectionClose => self.method(0, &connection::Close::default()),
            Method::DeclareQueue { queue, ref arguments, durable, exclusive, auto_delete } => {
                let queue = pick(&QUEUES, queue);
                let arguments = queue_arguments(arguments);
                self.method(on, &queue::Declare {
                    queue,
                    passive: false,
                    durable,
                    exclusive,
                    auto_delete,
                    nowait,
                    arguments,
                });
            }
            Method::DeclareExchange { exchange, kind, alternate, auto_delete } => {
                let mut arguments = Table::new();
                if let Some(alternate) = alternate {
                    let alternate = pick(&EXCHANGES, alternate).to_string();
                    let _ = arguments.insert("alternate-exchange", alternate.as_str());
                }
                let declare = exchange::Declare {
                    exchange: pick(&EXCHANGES, exchange),
                    kind: pick(&KINDS, kind),
                    auto_delete,
                    arguments,
                    ..Default::default()
                };
                self.method(on, &declare);
            }
            Method::BindQueue { queue, exchange, key, arguments } => {
                let (queue, exchange) = (pick(&QUEUES, queue), pick(&EXCHANGES, exchange));
                let (routing_key, arguments) = (pick(&KEYS, key), binding_arguments(arguments));
                self.method(on, &queue::Bind { queue, exchange, routing_key, nowait, arguments });
            }
            Method::UnbindQueue { queue, exchange, key, arguments } => {
                let (queue, exchange) = (pick(&QUEUES, queue), pick(&EXCHANGES, exchange));
                let (routing_key, arguments) = (pick(&KEYS, key), binding_arguments(arguments));
                self.method(on, &queue::Unbind { queue, exchange, routing_key, arguments });
            }
            Method::BindExchange { destination, source, key, arguments } => {
                let bind = exchange::Bind {
                    destination: pick(&EXCHANGES, destination),
                    source: pick(&EXCHANGES, source),
                    routing_key: pick(&KEYS, key),
                    arguments: binding_arguments(arguments),
                    ..Default::default()
                };
                self.method(on, &bind);
            }
            Method::UnbindExchange { destination, source, key, arguments } => {
                let unbind = exchange::Unbind {
                    destination: pick(&EXCHANGES, destination),
                    source: pick(&EXCHANGES, source),
                    routing_key: pick(&KEYS, key),
                    arguments: binding_arguments(arguments),
                    ..Default::default()
                };
                self.method(on, &unbind);
            }
            Method::DeleteQueue { queue, if_unused, if_empty } => {
                let queue = pick(&QUEUES, queue);
                self.method(on, &queue::Delete { queue, if_unused, if_empty, nowait });
            }
            Method::DeleteExchange { exchange, if_unused } => {
                let exchange = pick(&EXCHANGES, exchange);
                self.method(on, &exchange::Delete { exchange, if_unused, nowait });
            }
            Method::Purge { queue } => {
                self.method(on, &queue::Purge { queue: pick(&QUEUES, queue), nowait });
            }
            Method::Qos { prefetch, global } => {
                let prefetch_count = u16::from(prefetch % 5);
                self.method(on, &basic::Qos { prefetch_size: 0, prefetch_count, global });
            }
            Method::Consume { queue, tag, no_ack, exclusive, priority } => {
                let mut arguments = Table::new();
                if let Some(priority) = priority {
                    let _ = arguments.insert("x-priority", i32::from(priority));
                }
                let consume = basic::Consume {
                    queue: pick(&QUEUES, queue),
                    consumer_tag: pick(&TAGS, tag),
                    no_ack,
                    exclusive,
                    arguments,
                    ..Default::default()
                };
                self.method(on, &consume);
            }
            Method::Cancel { tag } => {
                self.method(on, &basic::Cancel { consumer_tag: pick(&TAGS, tag), nowait });
            }
            Method::CancelOk { tag } => {
                self.method(on, &basic::CancelOk { consumer_tag: pick(&TAGS, tag) });
            }
            Method::Get { queue, no_ack } => {
                self.method(on, &basic::Get { queue: pick(&QUEUES, queue), no_ack });
            }
            Method::Ack { tag, multiple } => {
                self.method(on, &basic::Ack { delivery_tag: delivery_tag(tag), multiple });
            }
            Method::Nack { tag, multiple, requeue } => {
                let delivery_tag = delivery_tag(tag);
                self.method(on, &basic::Nack { delivery_tag, multiple, requeue });
            }
            Method::Reject { tag, requeue } => {
                self.method(on, &basic::Reject { delivery_tag: delivery_tag(tag), requeue });
            }
            Method::Recover => self.method(on, &basic::Recover { requeue: true }),
            Method::ConfirmSelect => self.method(on, &confirm::Select { nowait }),
            Method::TxSelect => self.method(on, &tx::Select {}),
            Method::TxCommit => self.method(on, &tx::Commit {}),
            Method::TxRollback => self.method(on, &tx::Rollback {}),
        }
    }

    /// Declares a chain, and begins or ends it.
    pub fn chain(&mut self, on: u16, chain: &Chain) {
        let length = chain.length.links();
        let name = |number: usize| ShortStr::try_from(format!("c{number}")).unwrap_or_default();
        let last = name(length);
        self.method(on, &queue::Declare { queue: last.clone(), nowait: true, ..Default::default() });
        for number in (0..length).rev() {
            let (this, next) = (name(number), name(number + 1));
            let mut arguments = Table::new();
            match chain.links {
                Links::DeadLetters => {
                    let next = next.to_string();
                    let _ = arguments.insert("x-message-ttl", 0);
                    let _ = arguments.insert("x-dead-letter-exchange", "");
                    let _ = arguments.insert("x-dead-letter-routing-key", next.as_str());
                    self.method(on, &queue::Declare {
                        queue: this,
                        nowait: true,
                        arguments,
                        ..Default::default()
                    });
                    continue;
                }
                Links::Alternates => {
                    let next = next.to_string();
                    let _ = arguments.insert("alternate-exchange", next.as_str());
                }
                Links::AutoDelete => {}
            }
            let auto_delete = matches!(chain.links, Links::AutoDelete);
            self.method(on, &exchange::Declare {
                exchange: this.clone(),
                kind: ShortStr::from_static("fanout"),
                auto_delete,
                nowait: true,
                arguments,
                ..Default::default()
            });
            if number + 1 == length {
                self.method(on, &queue::Bind {
                    queue: last.clone(),
                    exchange: this,
                    nowait: true,
                    ..Default::default()
                });
            } else if auto_delete {
                self.method(on, &exchange::Bind {
                    destination: next,
                    source: this,
                    nowait: true,
                    ..Default::default()
                });
            }
        }
        if chain.publish {
            let mut publish = basic::Publish { exchange: name(0), ..Default::default() };
            if matches!(chain.links, Links::DeadLetters) {
                publish = basic::Publish { routing_key: name(0), ..Default::default() };
            }
            let body = Bytes::from_static(b"through the chain");
            let (mut outbound, max) = (Outbound::new(), FrameMax::DEFAULT);
            let _ = outbound.content(on, &publish, &Properties::default(), &body, max);
            self.append(outbound);
        }
        if chain.delete {
            self.method(on, &queue::Delete { queue: last, nowait: true, ..Default::default() });
        }
    }

    /// Deletes a queue of any name, and closes the connection.
    pub fn delete(&mut self, on: u16, name: &str) {
        let queue = ShortStr::try_from(name.to_owned()).unwrap_or_default();
        self.method(on, &queue::Delete { queue, nowait: true, ..Default::default() });
    }
}

fn binding_arguments(wanted: BindingArguments) -> Table<'static> {
    let mut table = headers(wanted.headers);
    if let Some(how) = wanted.how {
        let _ = table.insert("x-match", MATCHES[usize::from(how) % MATCHES.len()]);
    }
    table
}

/// A few headers, each with one of two values.
fn headers(wanted: u8) -> Table<'static> {
    let mut table = Table::new();
    for bit in 0..4 {
        if wanted & (1 << bit) != 0 {
            let _ = table.insert(HEADERS[bit], i32::from(wanted >> (bit + 4) & 1));
        }
    }
    table
}

/// Few, and 0 for all.
fn delivery_tag(tag: u8) -> u64 {
    u64::from(tag % 8)
}

fn queue_arguments(wanted: &QueueArguments) -> Table<'static> {
    let mut table = Table::new();
    let mut set = |name: &'static str, value: Value<'static>| {
        let _ = table.insert(name, value);
    };
    if wanted.quorum {
        set("x-queue-type", "quorum".into());
    }
    if wanted.at_least_once {
        set("x-dead-letter-strategy", "at-least-once".into());
    }
    if wanted.single_active {
        set("x-single-active-consumer", true.into());
    }
    if let Some(ttl) = wanted.ttl {
        set("x-message-ttl", (ttl.millis() as i64).into());
    }
    if let Some(expires) = wanted.expires {
        set("x-expires", (expires.millis() as i64).into());
    }
    if let Some(length) = wanted.max_length {
        set("x-max-length", i64::from(length % 8).into());
        let overflow = OVERFLOWS[usize::from(wanted.overflow) % OVERFLOWS.len()];
        set("x-overflow", overflow.into());
    }
    if let Some((exchange, key)) = wanted.dead_letters {
        set("x-dead-letter-exchange", pick(&EXCHANGES, exchange).to_string().into());
        if let Some(key) = key {
            set("x-dead-letter-routing-key", pick(&KEYS, key).to_string().into());
        }
    }
    if let Some(limit) = wanted.delivery_limit {
        set("x-delivery-limit", i64::from(limit % 4).into());
    }
    if let Some(timeout) = wanted.consumer_timeout {
        set("x-consumer-timeout", (timeout.millis() as i64).into());
    }
    table
}

fn properties(publish: &Publish) -> Properties<'static> {
    let mut headers = headers(publish.headers);
    if let Some(copies) = publish.copies {
        let count = if publish.many_copies { 300 } else { usize::from(copies % 4) };
        let key = |more: usize| match more {
            0..4 => pick(&KEYS, copies / 4 + more as u8).to_string(),
            // Beyond those that meet bindings, what differs: none is passed over as one that was there before.
            _ => format!("a.{more}"),
        };
        let keys = (0..count).map(|more| Value::from(key(more)));
        if let Ok(keys) = Array::from_values(keys) {
            let _ = headers.insert(if copies >= 128 { "BCC" } else { "CC" }, keys);
        }
    }
    if let Some(death) = publish.death {
        let deaths = (0..death % 5).map(|number| {
            let mut entry = Table::new();
            let _ = entry.insert("queue", pick(&QUEUES, death / 5 + number).to_string().as_str());
            let _ = entry.insert("reason", if death >= 128 { "rejected" } else { "expired" });
            if number % 2 == 0 {
                let _ = entry.insert("count", i64::from(number));
            }
            Value::from(entry)
        });
        if let Ok(deaths) = Array::from_values(deaths) {
            let _ = headers.insert("x-death", deaths);
        }
    }
    Properties {
        delivery_mode: publish.persistent.then_some(2),
        expiration: publish.expiration.map(|time| {
            ShortStr::try_from(time.millis().to_string()).unwrap_or_default()
        }),
        reply_to: publish.reply_to.then(|| ShortStr::from_static("amq.rabbitmq.reply-to")),
        headers: (!headers.is_empty()).then_some(headers),
        ..Properties::default()
    }
}
