//! The fault proxy, before a server that sends back what it gets.

use std::io::ErrorKind;
use std::num::{NonZeroU64, NonZeroUsize};
use std::time::Duration;

use leveret_testkit::proxy::{Corruption, Cut, Direction, Seen};
use leveret_testkit::{FaultProxy, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};

const SOON: Duration = Duration::from_secs(60);
const A_WHILE: Duration = Duration::from_millis(200);
const BOTH: [Direction; 2] = [Direction::ToServer, Direction::ToClient];

#[tokio::test]
async fn bytes_pass_unchanged_and_are_counted() {
    let (proxy, mut client) = proxied_echo().await;
    let sent: Vec<u8> = (0..1_000_000_u32).map(|n| n as u8).collect();
    let (mut reader, mut writer) = client.split();
    let mut echoed = vec![0; sent.len()];
    let (written, read) = tokio::join!(writer.write_all(&sent), reader.read_exact(&mut echoed));
    written.unwrap();
    read.unwrap();
    assert!(echoed == sent);
    assert_eq!(
        proxy.seen(),
        Seen { connections: 1, open: 1, to_server: 1_000_000, to_client: 1_000_000 }
    );
}

#[tokio::test]
async fn an_end_of_file_passes_in_each_direction() {
    let (proxy, mut client) = proxied_echo().await;
    client.write_all(b"last words").await.unwrap();
    client.shutdown().await.unwrap();
    let mut echoed = String::new();
    timeout(SOON, client.read_to_string(&mut echoed)).await.expect("no end of file").unwrap();
    assert_eq!(echoed, "last words");
    eventually(SOON, "the connection to be closed", async || proxy.seen().open == 0).await;
}

#[tokio::test]
async fn a_finished_connection_reads_an_end_of_file() {
    let (proxy, mut client) = proxied_echo().await;
    assert_eq!(echo(&mut client, b"hello").await, b"hello");
    proxy.cut(Cut::Finish);
    assert_eq!(
        timeout(SOON, client.read(&mut [0; 8])).await.expect("the connection goes on").unwrap(),
        0
    );
    drop(client);
    eventually(SOON, "the connection to be closed", async || proxy.seen().open == 0).await;
}

#[tokio::test]
async fn a_reset_connection_reads_an_error() {
    let (proxy, mut client) = proxied_echo().await;
    assert_eq!(echo(&mut client, b"hello").await, b"hello");
    proxy.cut(Cut::Reset);
    let error =
        timeout(SOON, client.read(&mut [0; 8])).await.expect("the connection goes on").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_cut_does_not_concern_later_connections() {
    let (proxy, _client) = proxied_echo().await;
    proxy.cut(Cut::Reset);
    let mut next = TcpStream::connect(proxy.addr()).await.unwrap();
    assert_eq!(echo(&mut next, b"hello").await, b"hello");
    assert_eq!(proxy.seen().connections, 2);
}

#[tokio::test]
async fn new_connections_can_be_refused_while_open_ones_go_on() {
    let (proxy, mut client) = proxied_echo().await;
    proxy.refuse().await;
    let error = TcpStream::connect(proxy.addr()).await.expect_err("a connection while refusing");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    assert_eq!(echo(&mut client, b"still here").await, b"still here");

    proxy.accept().await;
    let mut next = TcpStream::connect(proxy.addr()).await.unwrap();
    assert_eq!(echo(&mut next, b"hello").await, b"hello");
}

#[tokio::test]
async fn a_stall_holds_bytes_back_until_it_is_over() {
    for direction in BOTH {
        let (proxy, mut client) = proxied_echo().await;
        assert_eq!(echo(&mut client, b"hello").await, b"hello");
        proxy.stall(direction);
        client.write_all(b"patience").await.unwrap();
        timeout(A_WHILE, client.read_u8()).await.expect_err("bytes passed a stall");

        let seen = proxy.seen();
        let passed = match direction {
            Direction::ToServer => seen.to_server,
            Direction::ToClient => seen.to_client,
        };
        assert_eq!(passed, 5, "the proxy reads while it stalls {direction:?}");

        proxy.unstall(direction);
        let mut echoed = [0; 8];
        timeout(SOON, client.read_exact(&mut echoed))
            .await
            .expect("nothing after the stall")
            .unwrap();
        assert_eq!(&echoed, b"patience");
    }
}

#[tokio::test]
async fn a_stalled_connection_can_be_cut() {
    let (proxy, mut client) = proxied_echo().await;
    assert_eq!(echo(&mut client, b"hello").await, b"hello");
    BOTH.into_iter().for_each(|direction| proxy.stall(direction));
    client.write_all(b"patience").await.unwrap();
    proxy.cut(Cut::Reset);
    timeout(SOON, client.read(&mut [0; 8])).await.expect("the connection goes on").unwrap_err();
}

#[tokio::test]
async fn a_delay_is_added_to_each_direction_it_is_set_for() {
    let (proxy, mut client) = proxied_echo().await;
    BOTH.into_iter().for_each(|direction| proxy.delay(direction, A_WHILE));
    let begin = Instant::now();
    assert_eq!(echo(&mut client, b"slow").await, b"slow");
    assert!(begin.elapsed() >= A_WHILE * 2, "{:?}", begin.elapsed());
}

#[tokio::test]
async fn split_bytes_arrive_in_order() {
    let (proxy, mut client) = proxied_echo().await;
    BOTH.into_iter().for_each(|direction| proxy.split(direction, NonZeroUsize::MIN));
    let sent: Vec<u8> = (0..2000_u32).map(|n| n as u8).collect();
    client.write_all(&sent).await.unwrap();
    let mut first = [0; 1000];
    let length = client.read(&mut first).await.unwrap();
    assert!(length < 1000, "{length} bytes at once");
    let mut rest = vec![0; sent.len() - length];
    client.read_exact(&mut rest).await.unwrap();
    assert_eq!([&first[..length], &rest].concat(), sent);
}

#[tokio::test]
async fn one_byte_at_an_offset_of_the_stream_can_be_corrupted() {
    let (proxy, mut client) = proxied_echo().await;
    proxy.corrupt(Direction::ToServer, Corruption::At(7));
    assert_eq!(echo(&mut client, &[0; 5]).await, [0; 5]);
    assert_eq!(echo(&mut client, &[0; 5]).await, [0, 0, 0xFF, 0, 0]);
    assert_eq!(echo(&mut client, &[0; 5]).await, [0; 5]);
}

#[tokio::test]
async fn every_nth_byte_can_be_corrupted() {
    let (proxy, mut client) = proxied_echo().await;
    proxy.corrupt(Direction::ToClient, Corruption::Every(NonZeroU64::new(3).unwrap()));
    assert_eq!(echo(&mut client, &[0; 4]).await, [0, 0, 0xFF, 0]);
    assert_eq!(echo(&mut client, &[0; 4]).await, [0, 0xFF, 0, 0]);
}

#[tokio::test]
async fn healing_takes_every_fault_back() {
    let (proxy, mut client) = proxied_echo().await;
    for direction in BOTH {
        proxy.stall(direction);
        proxy.delay(direction, SOON * 10);
        proxy.corrupt(direction, Corruption::Every(NonZeroU64::MIN));
    }
    proxy.refuse().await;
    proxy.heal().await;
    assert_eq!(
        timeout(SOON, echo(&mut client, b"hello")).await.expect("a fault was left"),
        b"hello"
    );
    TcpStream::connect(proxy.addr()).await.unwrap();
}

#[tokio::test]
async fn a_server_that_is_away_resets_the_client() {
    let (address, server) = echo_server().await;
    server.abort();
    eventually(SOON, "the server to be away", async || TcpStream::connect(address).await.is_err())
        .await;
    let proxy = FaultProxy::to(address).await;
    let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
    timeout(SOON, client.read(&mut [0; 8])).await.expect("the connection goes on").unwrap_err();
}

#[tokio::test]
async fn a_dropped_proxy_takes_listener_and_connections_along() {
    let (proxy, mut client) = proxied_echo().await;
    assert_eq!(echo(&mut client, b"hello").await, b"hello");
    let addr = proxy.addr();
    drop(proxy);
    let end = timeout(SOON, client.read(&mut [0; 8])).await.expect("the connection goes on");
    assert!(matches!(end, Ok(0) | Err(_)));
    eventually(SOON, "the listener to be gone", async || TcpStream::connect(addr).await.is_err())
        .await;
}

#[tokio::test]
async fn a_url_keeps_all_but_host_and_port() {
    let (address, _server) = echo_server().await;
    let proxy = FaultProxy::to(address).await;
    let url = proxy.url("amqp://guest:secret@broker.example:1234/a%2Fb?heartbeat=5");
    assert_eq!(url, format!("amqp://guest:secret@{}/a%2Fb?heartbeat=5", proxy.addr()));
    assert_eq!(proxy.url("amqp://localhost"), format!("amqp://{}", proxy.addr()));
}

async fn proxied_echo() -> (FaultProxy, TcpStream) {
    let (address, _server) = echo_server().await;
    let proxy = FaultProxy::to(address).await;
    let client = TcpStream::connect(proxy.addr()).await.unwrap();
    client.set_nodelay(true).unwrap();
    (proxy, client)
}

async fn echo_server() -> (std::net::SocketAddr, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let (mut reader, mut writer) = stream.split();
                // An error is a connection that was reset, which these tests do on purpose.
                let _ = tokio::io::copy(&mut reader, &mut writer).await;
                let _ = writer.shutdown().await;
            });
        }
    });
    (address, server)
}

async fn echo(client: &mut TcpStream, bytes: &[u8]) -> Vec<u8> {
    client.write_all(bytes).await.unwrap();
    let mut echoed = vec![0; bytes.len()];
    client.read_exact(&mut echoed).await.unwrap();
    echoed
}
