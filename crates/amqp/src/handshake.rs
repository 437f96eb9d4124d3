//! From an address to a connection, in a straight line: dial, TLS, start, tune, open.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Buf;
use leveret_wire::method::{Encode, connection};
use leveret_wire::{
    DecodeError, Fault, FrameKind, FrameMax, Inbound, Method, Outbound, ReplyCode, Secret,
    ShortStr, Table, Value,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, timeout, timeout_at};

use super::connection::Connection;
use super::connector::Connector;
use super::error::{Error, ErrorKind, close_reason};
use super::options::{Auth, Options, Tls};
#[cfg(feature = "tls")]
use super::tls;

/// The longest heartbeat interval in seconds that is agreed on unless another one is asked for. RabbitMQ proposes 60; its
/// documentation recommends 5 to 20, so that a dead peer is noticed in time.
const DEFAULT_HEARTBEAT: u16 = 10;

/// What the two sides agreed on.
#[derive(Clone, Debug)]
pub(super) struct Agreed {
    pub(super) server_properties: Table<'static>,
    pub(super) channel_max: u16,
    pub(super) frame_max: FrameMax,
    pub(super) heartbeat: Duration,
    /// Who is connected, unless only the certificate says so.
    pub(super) user: Option<String>,
}

impl Agreed {
    /// Whether the broker limits a channel as a whole: from 4.3 on, RabbitMQ takes that for a limit of each consumer.
    pub(super) fn has_prefetch_for_all(&self) -> bool {
        !self.is_4_3_or_later()
    }

    /// Whether the broker is a RabbitMQ of this version or a later one.
    pub(super) fn is_4_3_or_later(&self) -> bool {
        let is = |name: &str, value: &str| {
            self.server_properties.get(name).is_some_and(|found| found.as_str() == Some(value))
        };
        let version = self.server_properties.get("version");
        let mut numbers = version
            .iter()
            .filter_map(|found| found.as_str())
            .flat_map(|text| text.split('.').map(|number| number.parse::<u32>().unwrap_or(0)));
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        is("product", "RabbitMQ") && version >= (4, 3)
    }
}

/// The reading half of a stream, with what was read and not looked at yet.
#[derive(Debug)]
pub(super) struct Reader<R> {
    pub(super) stream: R,
    pub(super) inbound: Inbound,
}

/// When the whole must be done, and for whom.
struct Deadline<'o> {
    options: &'o Options,
    end: Instant,
}

/// That long from now; a time too long to be reckoned with is a year.
pub fn deadline_in(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or(now + Duration::from_secs(365 * 24 * 3600))
}

impl<'o> Deadline<'o> {
    fn new(options: &'o Options) -> Self {
        Deadline { options, end: deadline_in(options.connection_timeout) }
    }

    /// A step of the whole; if it is this one during which time runs out, the error names it.
    async fn step<T>(
        &self,
        what: &str,
        step: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        match timeout_at(self.end, step).await {
            Ok(result) => result,
            Err(_) => Err(Error::timeout(what, self.options.connection_timeout)),
        }
    }
}

/// Connects to the first address of the host that answers, and shakes hands. Errors do not name the broker: callers do.
pub(super) async fn dial(options: &Options) -> Result<Connection, Error> {
    if options.memory {
        return open_in_memory(options).await;
    }
    let deadline = Deadline::new(options);
    let connecting = connect(options, deadline.end);
    if let Some(tls) = &options.tls {
        return dial_tls(options, tls, connecting, &deadline).await;
    }
    let stream = deadline.step("dialling", connecting).await?;
    let (reader, writer) = stream.into_split();
    exchange(reader, writer, options, &deadline).await
}

/// The same over a stream that a connector opens.
pub(super) async fn dial_with(
    options: &Options,
    connector: &impl Connector,
) -> Result<Connection, Error> {
    let deadline = Deadline::new(options);
    let connecting = async { connector.connect(options).await.map_err(dialling_failed) };
    if let Some(tls) = &options.tls {
        return dial_tls(options, tls, connecting, &deadline).await;
    }
    let stream = deadline.step("dialling", connecting).await?;
    let (reader, writer) = tokio::io::split(stream);
    exchange(reader, writer, options, &deadline).await
}

#[cfg(feature = "tls")]
async fn dial_tls<S>(
    options: &Options,
    tls: &Tls,
    connecting: impl Future<Output = Result<S, Error>>,
    deadline: &Deadline<'_>,
) -> Result<Connection, Error>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    // The files first: with wrong ones there is no use in bothering the server.
    let client = deadline.step("reading the TLS files", tls::Client::new(options, tls)).await?;
    let stream = deadline.step("dialling", connecting).await?;
    let stream = deadline.step("the TLS handshake", client.shake_hands(stream)).await?;
    let session = stream.get_ref().1;
    tracing::debug!(
        version = ?session.protocol_version(),
        suite = ?session.negotiated_cipher_suite().map(|suite| suite.suite()),
        "TLS with {options:#}"
    );
    let (reader, writer) = tokio::io::split(stream);
    exchange(reader, writer, options, deadline).await
}

#[cfg(feature = "embedded")]
async fn open_in_memory(options: &Options) -> Result<Connection, Error> {
    let broker = leveret_broker::Broker::named(&options.host);
    Connection::open_over(broker.connect(), options).await
}

#[cfg(not(feature = "embedded"))]
async fn open_in_memory(_: &Options) -> Result<Connection, Error> {
    let text = "this program was built without the embedded broker; turn on the cargo feature `embedded` of leveret";
    Err(Error::new(ErrorKind::Dial, text))
}

#[cfg(not(feature = "tls"))]
async fn dial_tls<S>(
    _: &Options,
    _: &Tls,
    _: impl Future<Output = Result<S, Error>>,
    _: &Deadline<'_>,
) -> Result<Connection, Error> {
    let text = "this program was built without TLS; turn on the cargo feature `tls` of leveret";
    Err(Error::new(ErrorKind::Tls, text))
}

/// The handshake alone, over any stream.
pub(super) async fn shake_hands<R, W>(
    reader: R,
    writer: W,
    options: &Options,
) -> Result<Connection, Error>
where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    exchange(reader, writer, options, &Deadline::new(options)).await
}

async fn connect(options: &Options, end: Instant) -> Result<TcpStream, Error> {
    let addresses = lookup_host(options.address()).await.map_err(dialling_failed)?;
    let addresses: Vec<_> = addresses.collect();
    let stream = connect_to_any(&addresses, end).await.map_err(dialling_failed)?;
    stream.set_nodelay(true).map_err(dialling_failed)?;
    Ok(stream)
}

fn dialling_failed(error: io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::TimedOut => ErrorKind::Timeout,
        _ => ErrorKind::Dial,
    };
    Error::caused(kind, "dialling failed", error)
}

/// Tries each address in turn. One that does not answer leaves the others their share of the time.
async fn connect_to_any(addresses: &[SocketAddr], end: Instant) -> io::Result<TcpStream> {
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for (tried, address) in addresses.iter().enumerate() {
        let share = (end - Instant::now()) / (addresses.len() - tried) as u32;
        failed = match timeout(share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => error,
            Err(_) => {
                let text = format!("{address} did not answer for {share:?}");
                io::Error::new(io::ErrorKind::TimedOut, text)
            }
        };
    }
    Err(failed)
}

async fn exchange<R, W>(
    reader: R,
    writer: W,
    options: &Options,
    deadline: &Deadline<'_>,
) -> Result<Connection, Error>
where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    let reader = Reader { stream: reader, inbound: Inbound::new(FrameMax::DEFAULT) };
    let mut line = Line { reader, writer, outbound: Outbound::new() };

    line.outbound.protocol_header();
    let start: connection::Start<'static> =
        match deadline.step("waiting for connection.start", line.next()).await? {
            Method::ConnectionStart(start) => start,
            other => return Err(unexpected(&other, "connection.start")),
        };

    line.put(&start_ok(&start, options)?)?;
    let answer = deadline.step("waiting for connection.tune", line.next()).await;
    let tune = match answer.map_err(|error| hung_up(error, &start.server_properties))? {
        Method::ConnectionTune(tune) => tune,
        Method::ConnectionClose(close) => {
            return Err(refused(close, ErrorKind::Authentication));
        }
        Method::ConnectionSecure(_) => {
            let text =
                "the broker wants another round of authentication, which no mechanism here has";
            return Err(Error::new(ErrorKind::Authentication, text));
        }
        other => return Err(unexpected(&other, "connection.tune")),
    };
    let user = options.choose_auth(&start.mechanisms.to_str_lossy()).and_then(Auth::user);
    let (tune_ok, mut agreed) = agree(&tune, start.server_properties, options);
    agreed.user = user.map(str::to_owned);
    line.put(&tune_ok)?;
    line.reader.inbound.set_max(agreed.frame_max);

    line.put(&connection::Open { virtual_host: options.virtual_host.as_str().try_into()? })?;
    match deadline.step("waiting for connection.open-ok", line.next()).await? {
        Method::ConnectionOpenOk(_) => {}
        Method::ConnectionClose(close) => {
            return Err(refused(close, ErrorKind::VirtualHost));
        }
        other => return Err(unexpected(&other, "connection.open-ok")),
    }
    tracing::debug!(
        product = text_of(&agreed.server_properties, "product"),
        version = text_of(&agreed.server_properties, "version"),
        frame_max = agreed.frame_max.get(),
        channel_max = agreed.channel_max,
        heartbeat = ?agreed.heartbeat,
        "connected to {options:#}"
    );
    Ok(Connection::start(line.reader, line.writer, agreed, options))
}

fn text_of(table: &Table<'_>, name: &str) -> Option<String> {
    Some(String::from_utf8_lossy(table.get(name)?.as_bytes()?).into_owned())
}

/// Both directions of a stream, one method at a time.
struct Line<R, W> {
    reader: Reader<R>,
    writer: W,
    outbound: Outbound,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Line<R, W> {
    fn put(&mut self, method: &impl Encode) -> Result<(), Error> {
        Ok(self.outbound.method(0, method, FrameMax::DEFAULT)?)
    }

    /// Sends what was put, and awaits the next method.
    async fn next(&mut self) -> Result<Method<'static>, Error> {
        let Err(error) = self.send().await else {
            return self.receive().await;
        };
        // Who hangs up has often said why, and writing fails before that is read.
        match self.receive().await {
            Err(silence) if silence.kind() == ErrorKind::ConnectionLost => Err(lost(error)),
            last_words => last_words,
        }
    }

    async fn send(&mut self) -> std::io::Result<()> {
        while self.outbound.has_remaining() {
            self.writer.write_buf(&mut self.outbound).await?;
        }
        self.writer.flush().await
    }

    async fn receive(&mut self) -> Result<Method<'static>, Error> {
        loop {
            let batch = self.reader.inbound.take_one().map_err(malformed)?;
            for frame in batch.frames() {
                match (frame.kind, frame.channel) {
                    (FrameKind::Method, 0) => {
                        return Ok(Method::decode(frame.payload)?.into_owned());
                    }
                    (FrameKind::Heartbeat, _) => {}
                    (kind, channel) => {
                        let text =
                            format!("a {kind} frame on channel {channel} during the handshake");
                        return Err(Error::protocol(text));
                    }
                }
            }
            if batch.is_empty() {
                let mut space = self.reader.inbound.space();
                let read = self.reader.stream.read_buf(&mut space).await.map_err(lost)?;
                if read == 0 {
                    let text = "the broker closed the connection during the handshake";
                    return Err(Error::new(ErrorKind::ConnectionLost, text));
                }
            }
        }
    }
}

fn start_ok<'a>(
    start: &connection::Start<'_>,
    options: &'a Options,
) -> Result<connection::StartOk<'a>, Error> {
    let offered = start.mechanisms.to_str_lossy();
    let Some(auth) = options.choose_auth(&offered) else {
        let text =
            format!("the broker offers the SASL mechanisms {offered}, and none that was asked for");
        return Err(Error::new(ErrorKind::Authentication, text));
    };
    Ok(connection::StartOk {
        client_properties: client_properties(options)?,
        mechanism: ShortStr::from_static(auth.mechanism()),
        response: credentials(auth)?,
        locale: ShortStr::from_static("en_US"),
    })
}

/// What the mechanism wants to be told.
fn credentials(auth: &Auth) -> Result<Secret<'_>, Error> {
    Ok(match auth {
        Auth::Plain { user, password } => {
            Secret::new(format!("\0{user}\0{}", password.expose()).into_bytes())
        }
        Auth::AmqPlain { user, password } => {
            let fields = [("LOGIN", user.as_str().into()), ("PASSWORD", password.expose().into())];
            Secret::new(Table::from_pairs(fields)?.as_bytes().to_vec())
        }
        Auth::External => Secret::default(),
    })
}

fn client_properties(options: &Options) -> Result<Table<'static>, Error> {
    // Without these the broker stays silent about cancelled consumers, blocking and wrong passwords.
    let capabilities = Table::from_pairs(
        [
            "publisher_confirms",
            "exchange_exchange_bindings",
            "basic.nack",
            "consumer_cancel_notify",
            "connection.blocked",
            "authentication_failure_close",
        ]
        .map(|name| (name, Value::from(true))),
    )?;
    let mut properties = Table::from_pairs([
        ("product", "Leveret".into()),
        ("version", env!("CARGO_PKG_VERSION").into()),
        ("platform", "Rust".into()),
        ("capabilities", capabilities.into()),
    ])?;
    if let Some(name) = &options.connection_name {
        properties.insert("connection_name", name.as_str())?;
    }
    Ok(properties)
}

/// The lower limit of the two holds, and 0 is no limit; of the heartbeats, the shorter, unless we want none.
fn agree(
    tune: &connection::Tune,
    server_properties: Table<'static>,
    options: &Options,
) -> (connection::TuneOk, Agreed) {
    fn lower<N: Default + Ord + Copy>(a: N, b: N) -> N {
        if a == N::default() || b == N::default() { a.max(b) } else { a.min(b) }
    }
    let heartbeat = match options.heartbeat.map(whole_seconds) {
        None => tune.heartbeat.min(DEFAULT_HEARTBEAT),
        Some(0) => 0,
        Some(seconds) => lower(seconds, tune.heartbeat),
    };
    let channel_max = lower(options.channel_max, tune.channel_max);
    let frame_max = lower(options.frame_max, tune.frame_max);
    let agreed = Agreed {
        server_properties,
        channel_max: if channel_max == 0 { u16::MAX } else { channel_max },
        frame_max: FrameMax::new(frame_max).unwrap_or(FrameMax::MIN),
        heartbeat: Duration::from_secs(heartbeat.into()),
        user: None,
    };
    (connection::TuneOk { channel_max, frame_max, heartbeat }, agreed)
}

/// Rounded up: less than a second is not none.
fn whole_seconds(interval: Duration) -> u16 {
    let seconds = interval.as_secs() + u64::from(interval.subsec_nanos() > 0);
    u16::try_from(seconds).unwrap_or(u16::MAX)
}

fn refused(close: connection::Close<'_>, kind: ErrorKind) -> Error {
    let text = close.reply_text.to_str_lossy();
    let missing = text.strip_suffix(" not found").and_then(|text| text.split_once("vhost "));
    if let (ErrorKind::VirtualHost, Some((_, name))) = (kind, missing) {
        let text = match name {
            "" => "the broker has no virtual host with an empty name: leave out the slash at the end for the default one, \
                   which is \"/\""
                .to_owned(),
            name => format!("the broker has no virtual host {name:?}"),
        };
        return Error::new(kind, text);
    }
    let reason = close_reason(close.reply_code, &text, close.class_id, close.method_id);
    let kind = match close.reply_code {
        ReplyCode::ACCESS_REFUSED | ReplyCode::NOT_ALLOWED | ReplyCode::INVALID_PATH => kind,
        code => ErrorKind::ConnectionClosed(code),
    };
    Error::new(kind, format!("the broker refused the connection: {reason}"))
}

fn unexpected(method: &Method<'_>, expected: &str) -> Error {
    Error::protocol(format!("the broker sent {} where {expected} was due", method.name()))
}

/// Brokers that do not know `authentication_failure_close` just hang up on wrong credentials.
fn hung_up(error: Error, server_properties: &Table<'_>) -> Error {
    let explains = match server_properties.get("capabilities") {
        Some(Value::Table(known)) => {
            known.get("authentication_failure_close") == Some(Value::Bool(true))
        }
        _ => false,
    };
    match error.kind() {
        ErrorKind::ConnectionLost if !explains => Error::caused(
            ErrorKind::Authentication,
            "the broker hung up on the credentials, so they are most likely wrong",
            error,
        ),
        _ => error,
    }
}

/// A TLS server answers what is not TLS with an alert, and a web server what is not HTTP with `HTTP/1.1 400`.
fn malformed(error: DecodeError) -> Error {
    const TLS_ALERT: u8 = 21;
    match error.fault() {
        Fault::FrameType { found: b'H' } => {
            let text = "the port speaks HTTP, as RabbitMQ's management at 15672 does: give the port of AMQP, usually 5672, or \
                        5671 with amqps://";
            Error::caused(ErrorKind::Protocol, text, error)
        }
        Fault::FrameType { found: TLS_ALERT } => {
            let text =
                "the port speaks TLS: use amqps:// for it, or give the port for plain connections";
            Error::caused(ErrorKind::Tls, text, error)
        }
        _ => error.into(),
    }
}

fn lost(error: std::io::Error) -> Error {
    #[cfg(feature = "tls")]
    if let Some(refusal) = tls::refused_by_server(&error) {
        return refusal;
    }
    Error::caused(ErrorKind::ConnectionLost, "the connection broke during the handshake", error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_last_words_of_a_peer_that_hung_up_are_heard() {
        let (ours, mut theirs) = tokio::io::duplex(64);
        // A TLS server's: "I did not expect that."
        theirs.write_all(&[21, 3, 3, 0, 2, 2, 10]).await.unwrap();
        drop(theirs);
        let error = Connection::open_over(ours, &Options::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Tls, "{error}");
    }

    #[tokio::test]
    async fn a_peer_that_hung_up_in_silence_is_a_lost_connection() {
        let (ours, theirs) = tokio::io::duplex(64);
        drop(theirs);
        let error = Connection::open_over(ours, &Options::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionLost, "{error}");
    }

    #[cfg(not(feature = "tls"))]
    #[tokio::test]
    async fn without_the_feature_tls_it_is_named() {
        let options = Options::from_uri("amqps://localhost:1").unwrap();
        let error = Connection::open(&options).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Tls);
        assert!(error.to_string().contains("feature `tls`"), "{error}");
    }
}
