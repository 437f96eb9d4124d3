//! The other side of a connection, played by a test: it says exactly which frames or bytes to send, and
//! what must come.
//!
//! ```
//! use leveret_testkit::peer::{Peer, PeerListener};
//! use leveret_wire::method::channel;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let listener = PeerListener::bind().await;
//! let (mut client, mut server) = tokio::join!(Peer::connect(listener.addr()), listener.accept());
//! tokio::join!(client.open_connection("/", "guest", "guest"), server.accept_connection());
//!
//! client.send(1, &channel::Open {}).await;
//! server.expect::<channel::Open>(1).await;
//! server.send_bytes(b"\x01\x00\x01 not a frame").await;
//! # }
//! ```

use std::any::type_name;
use std::collections::{HashMap, VecDeque};
use std::fmt::Display;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Buf, Bytes};
use leveret_wire::method::{CarriesContent, Encode, connection};
use leveret_wire::{
    Assembler, Content, EncodeProperties, FRAME_END, FrameKind, FrameMax, Inbound, Method,
    Outbound, PROTOCOL_HEADER, Secret, ShortStr, Table,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs};
use tokio::time::timeout;

/// How long a peer waits for what a test says must come.
const PATIENCE: Duration = Duration::from_secs(60);

/// The largest message a peer takes.
const MAX_BODY: u64 = 256 * 1024 * 1024;

/// A port on which a test awaits the program it tests.
#[derive(Debug)]
pub struct PeerListener {
    listener: TcpListener,
    addr: SocketAddr,
}

impl PeerListener {
    /// Listens on a free port of the loopback address.
    ///
    /// # Panics
    /// If there is none.
    pub async fn bind() -> PeerListener {
        let listener = TcpListener::bind(("127.0.0.1", 0))
            .await
            .unwrap_or_else(|error| panic!("no port for a scripted peer: {error}"));
        let addr = listener.local_addr().expect("a bound socket has an address");
        PeerListener { listener, addr }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Where it listens, as an address with credentials that it never looks at.
    pub fn url(&self) -> String {
        format!("amqp://guest:guest@{}", self.addr)
    }

    /// The next connection.
    ///
    /// # Panics
    /// If none comes.
    pub async fn accept(&self) -> Peer {
        let accepted = in_time("a connection", self.listener.accept()).await;
        let (stream, _) = accepted.unwrap_or_else(|error| panic!("could not accept: {error}"));
        Peer::over(stream)
    }
}

/// What came from the other side.
#[derive(Debug)]
pub enum Received {
    /// A method without content.
    Method(u16, Method<'static>),
    /// A method with its content.
    Content(u16, Box<Content<Method<'static>>>),
    /// A sign of life.
    Heartbeat,
    /// The other side closed its half of the connection, or reset it.
    End,
}

impl Received {
    /// What a panic says came.
    fn describe(&self) -> String {
        match self {
            Received::Method(channel, method) => format!("on channel {channel}: {method:?}"),
            Received::Content(channel, content) => format!(
                "on channel {channel}: {:?} with a body of {} bytes",
                content.method,
                content.body.len()
            ),
            Received::Heartbeat => "a heartbeat".to_owned(),
            Received::End => "the end of the connection".to_owned(),
        }
    }
}

/// One side of a connection, in a test's hands. Every wait has a deadline; what does not come in time,
/// or is not what was expected, is a panic that says what came instead.
#[derive(Debug)]
pub struct Peer<S = TcpStream> {
    stream: S,
    inbound: Inbound,
    frame_max: FrameMax,
    assemblers: HashMap<u16, Assembler<Method<'static>>>,
    received: VecDeque<Received>,
}

impl Peer {
    /// Connects as a client would.
    ///
    /// # Panics
    /// If nobody listens there.
    pub async fn connect(addr: impl ToSocketAddrs) -> Peer {
        let connected = in_time("a connection", TcpStream::connect(addr)).await;
        Peer::over(connected.unwrap_or_else(|error| panic!("no connection: {error}")))
    }

    /// Ends the connection as a crashed machine would: with a reset, and nothing before it.
    pub fn reset(self) {
        // If the option cannot be set, the socket is dead already.
        let _ = self.stream.set_zero_linger();
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Peer<S> {
    /// Plays one side of any stream: a TLS session, a pipe.
    pub fn over(stream: S) -> Peer<S> {
        Peer {
            stream,
            inbound: Inbound::new(FrameMax::DEFAULT),
            frame_max: FrameMax::DEFAULT,
            assemblers: HashMap::new(),
            received: VecDeque::new(),
        }
    }

    /// Sends these very bytes.
    pub async fn send_bytes(&mut self, bytes: &[u8]) {
        let sent = in_time("the other side to take bytes", self.stream.write_all(bytes)).await;
        sent.unwrap_or_else(|error| panic!("could not send {} bytes: {error}", bytes.len()));
    }

    /// Sends a frame with these very bytes inside.
    pub async fn send_frame(&mut self, kind: FrameKind, channel: u16, payload: &[u8]) {
        let size = u32::try_from(payload.len()).expect("a payload of less than 4 GiB");
        let mut frame = vec![kind as u8];
        frame.extend_from_slice(&channel.to_be_bytes());
        frame.extend_from_slice(&size.to_be_bytes());
        frame.extend_from_slice(payload);
        frame.push(FRAME_END);
        self.send_bytes(&frame).await;
    }

    /// Sends a method.
    pub async fn send(&mut self, channel: u16, method: &impl Encode) {
        let mut outbound = Outbound::new();
        outbound.method(channel, method, self.frame_max).expect("a method that fits a frame");
        self.send_outbound(outbound).await;
    }

    /// Sends a method with content, in frames of the size that was agreed on.
    pub async fn send_content(
        &mut self,
        channel: u16,
        method: &impl CarriesContent,
        properties: &impl EncodeProperties,
        body: impl Into<Bytes>,
    ) {
        let mut outbound = Outbound::new();
        outbound
            .content(channel, method, properties, &body.into(), self.frame_max)
            .expect("a method and headers that fit a frame");
        self.send_outbound(outbound).await;
    }

    /// Sends a sign of life.
    pub async fn send_heartbeat(&mut self) {
        self.send_frame(FrameKind::Heartbeat, 0, &[]).await;
    }

    async fn send_outbound(&mut self, mut outbound: Outbound) {
        let bytes = outbound.copy_to_bytes(outbound.remaining());
        self.send_bytes(&bytes).await;
    }

    /// Closes this side's half of the connection; the other half can still be read.
    pub async fn finish(&mut self) {
        // The other side may have closed already.
        let _ = self.stream.shutdown().await;
    }

    /// The next thing that comes.
    ///
    /// # Panics
    /// If nothing comes in time, or what comes is not AMQP.
    pub async fn receive(&mut self) -> Received {
        in_time("anything", self.next()).await
    }

    /// A method of this type on this channel. Heartbeats before it are passed over.
    ///
    /// # Panics
    /// If something else comes, or nothing in time.
    pub async fn expect<M>(&mut self, channel: u16) -> M
    where
        M: TryFrom<Method<'static>, Error = Method<'static>>,
    {
        let wanted = format!("{} on channel {channel}", short_name::<M>());
        let received = in_time(&wanted, self.next_but_heartbeats()).await;
        if let Received::Method(on, method) = &received
            && *on == channel
            && let Ok(method) = M::try_from(method.clone())
        {
            return method;
        }
        panic!("awaited {wanted}; instead came {}", received.describe())
    }

    /// A method of this type with its content. Heartbeats before it are passed over.
    ///
    /// # Panics
    /// If something else comes, or nothing in time.
    pub async fn expect_content<M>(&mut self, channel: u16) -> Content<M>
    where
        M: TryFrom<Method<'static>, Error = Method<'static>>,
    {
        let wanted = format!("{} with content on channel {channel}", short_name::<M>());
        let received = in_time(&wanted, self.next_but_heartbeats()).await;
        if let Received::Content(on, content) = &received
            && *on == channel
            && let Ok(method) = M::try_from(content.method.clone())
        {
            let Content { properties, body, .. } = (**content).clone();
            return Content { method, properties, body };
        }
        panic!("awaited {wanted}; instead came {}", received.describe())
    }

    /// The eight octets with which a client begins.
    ///
    /// # Panics
    /// If something else comes, or nothing in time.
    pub async fn expect_protocol_header(&mut self) {
        let mut header = [0; PROTOCOL_HEADER.len()];
        let read = in_time("a protocol header", self.stream.read_exact(&mut header)).await;
        read.unwrap_or_else(|error| panic!("awaited a protocol header; instead came {error}"));
        assert_eq!(header, PROTOCOL_HEADER, "awaited AMQP 0-9-1's protocol header");
    }

    /// A sign of life.
    ///
    /// # Panics
    /// If something else comes, or nothing in time.
    pub async fn expect_heartbeat(&mut self) {
        match in_time("a heartbeat", self.next()).await {
            Received::Heartbeat => {}
            other => panic!("awaited a heartbeat; instead came {}", other.describe()),
        }
    }

    /// The end of the connection. Heartbeats before it are passed over.
    ///
    /// # Panics
    /// If something else comes, or nothing in time.
    pub async fn expect_end(&mut self) {
        match in_time("the end of the connection", self.next_but_heartbeats()).await {
            Received::End => {}
            other => panic!("awaited the end of the connection; instead came {}", other.describe()),
        }
    }

    /// Nothing but heartbeats, for as long as this.
    ///
    /// # Panics
    /// If anything comes.
    pub async fn expect_silence(&mut self, duration: Duration) {
        if let Ok(received) = timeout(duration, self.next_but_heartbeats()).await {
            panic!("awaited silence; instead came {}", received.describe());
        }
    }

    /// The server's part of a handshake that goes well, with RabbitMQ's usual limits. Gives back what
    /// the client said of itself.
    pub async fn accept_connection(&mut self) -> connection::StartOk<'static> {
        let tune = connection::Tune { channel_max: 2047, frame_max: 131_072, heartbeat: 60 };
        self.accept_connection_with(tune, Table::new()).await.0
    }

    /// The server's part of a handshake that goes well, with these limits and properties. Gives back
    /// what the client said of itself, and the limits it chose; they hold from here on.
    pub async fn accept_connection_with(
        &mut self,
        tune: connection::Tune,
        server_properties: Table<'_>,
    ) -> (connection::StartOk<'static>, connection::TuneOk) {
        self.expect_protocol_header().await;
        let start = connection::Start {
            version_major: 0,
            version_minor: 9,
            server_properties,
            mechanisms: "PLAIN AMQPLAIN EXTERNAL".into(),
            locales: "en_US".into(),
        };
        self.send(0, &start).await;
        let start_ok = self.expect(0).await;
        self.send(0, &tune).await;
        let tune_ok: connection::TuneOk = self.expect(0).await;
        self.set_frame_max(tune_ok.frame_max);
        self.expect::<connection::Open<'_>>(0).await;
        self.send(0, &connection::OpenOk {}).await;
        (start_ok, tune_ok)
    }

    /// The client's part of a handshake that goes well: takes the server's limits as they are. Gives
    /// back what the server said of itself.
    pub async fn open_connection(
        &mut self,
        virtual_host: &str,
        user: &str,
        password: &str,
    ) -> connection::Start<'static> {
        self.send_bytes(&PROTOCOL_HEADER).await;
        let start = self.expect(0).await;
        let start_ok = connection::StartOk {
            client_properties: client_properties(),
            mechanism: ShortStr::from_static("PLAIN"),
            response: Secret::new(format!("\0{user}\0{password}").into_bytes()),
            locale: ShortStr::from_static("en_US"),
        };
        self.send(0, &start_ok).await;
        let connection::Tune { channel_max, frame_max, heartbeat } = self.expect(0).await;
        let tune_ok = connection::TuneOk { channel_max, frame_max, heartbeat };
        self.send(0, &tune_ok).await;
        self.set_frame_max(frame_max);
        let virtual_host = virtual_host.try_into().expect("a short virtual host name");
        self.send(0, &connection::Open { virtual_host }).await;
        self.expect::<connection::OpenOk>(0).await;
        start
    }

    /// Takes frames of any size from here on: RabbitMQ sends content headers that are larger than was agreed on.
    pub fn accept_frames_of_any_size(&mut self) {
        self.inbound.set_max(FrameMax::UNLIMITED);
    }

    fn set_frame_max(&mut self, bytes: u32) {
        let max = FrameMax::new(bytes).unwrap_or_else(|| panic!("a frame_max of {bytes}"));
        self.frame_max = max;
        self.inbound.set_max(max);
    }

    async fn next_but_heartbeats(&mut self) -> Received {
        loop {
            match self.next().await {
                Received::Heartbeat => {}
                other => return other,
            }
        }
    }

    async fn next(&mut self) -> Received {
        loop {
            if let Some(received) = self.received.pop_front() {
                return received;
            }
            let read = self.stream.read_buf(&mut self.inbound.space()).await;
            match read {
                Ok(0) | Err(_) => return Received::End,
                Ok(_) => while self.sort_frames() {},
            }
        }
    }

    /// Turns the frames that are whole into methods and contents. Says whether there were any.
    fn sort_frames(&mut self) -> bool {
        let batch = self.inbound.take().unwrap_or_else(|error| panic!("not AMQP: {error}"));
        for frame in batch.frames() {
            let assembler =
                self.assemblers.entry(frame.channel).or_insert_with(|| Assembler::new(MAX_BODY));
            let done = match frame.kind {
                FrameKind::Method => Method::decode(frame.payload).and_then(|method| {
                    let method = method.into_owned();
                    if method.carries_content() {
                        return assembler.begin(method).map(|()| None);
                    }
                    assembler.expect_idle()?;
                    self.received.push_back(Received::Method(frame.channel, method));
                    Ok(None)
                }),
                FrameKind::Header => assembler.header(batch.keep(frame.payload)),
                FrameKind::Body => assembler.body(batch.keep(frame.payload)),
                FrameKind::Heartbeat => {
                    self.received.push_back(Received::Heartbeat);
                    Ok(None)
                }
            };
            let content = done.unwrap_or_else(|error| panic!("not AMQP: {error}"));
            self.received.extend(content.map(|c| Received::Content(frame.channel, Box::new(c))));
        }
        !batch.is_empty()
    }
}

/// What makes RabbitMQ send everything it can: cancel notifications, blocked, nacks.
fn client_properties() -> Table<'static> {
    let capabilities = [
        "publisher_confirms",
        "exchange_exchange_bindings",
        "basic.nack",
        "consumer_cancel_notify",
        "connection.blocked",
        "authentication_failure_close",
    ];
    let capabilities = Table::from_pairs(capabilities.map(|name| (name, true.into())));
    capabilities
        .and_then(|capabilities| {
            Table::from_pairs([
                ("product", "Leveret testkit".into()),
                ("capabilities", capabilities.into()),
            ])
        })
        .expect("short names")
}

/// `basic::Publish` for `leveret_wire::method::table::basic::Publish<'_>`.
fn short_name<M>() -> &'static str {
    let name = type_name::<M>();
    name.rmatch_indices("::").nth(1).map_or(name, |(at, _)| &name[at + 2..])
}

#[track_caller]
fn in_time<T>(what: impl Display, wait: impl Future<Output = T>) -> impl Future<Output = T> {
    let asked_at = std::panic::Location::caller();
    async move {
        match timeout(PATIENCE, wait).await {
            Ok(value) => value,
            Err(_) => panic!("waited {PATIENCE:?} for {what}, in vain (at {asked_at})"),
        }
    }
}
