//! Sessions that are run here, so that a panic of theirs is one of the test.

use std::net::SocketAddr;

use bytes::Buf;
use leveret_wire::method::{channel, connection};
use leveret_wire::{FrameMax, Inbound, Method, Outbound, Secret, ShortStr};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex, split};
use tokio::task::JoinHandle;

use crate::Broker;

/// A client that has shaken hands and opened a channel without having read anything, and its session.
async fn client(broker: &Broker) -> (DuplexStream, JoinHandle<()>) {
    let (mut client, ours) = duplex(64 * 1024);
    let (reader, writer) = split(ours);
    let session = tokio::spawn(super::run(broker.shared(), reader, writer, None));
    let mut out = Outbound::new();
    out.protocol_header();
    let max = FrameMax::MIN;
    let start_ok = connection::StartOk {
        mechanism: ShortStr::from_static("PLAIN"),
        response: Secret::new(&b"\0guest\0guest"[..]),
        ..Default::default()
    };
    out.method(0, &start_ok, max).unwrap();
    let tune_ok = connection::TuneOk { channel_max: 10, frame_max: 4096, heartbeat: 0 };
    out.method(0, &tune_ok, max).unwrap();
    let open = connection::Open { virtual_host: ShortStr::from_static("/") };
    out.method(0, &open, max).unwrap();
    out.method(1, &channel::Open {}, max).unwrap();
    client.write_all(&out.copy_to_bytes(out.remaining())).await.unwrap();
    while broker.statistics().channels == 0 {
        tokio::task::yield_now().await;
    }
    (client, session)
}

#[tokio::test]
async fn a_client_that_is_gone_when_it_is_refused_ends_its_session_without_a_panic() {
    let broker = Broker::builder().start().unwrap();
    // Whether it is first noticed by reading or by writing is left to chance.
    for _ in 0..100 {
        let (mut client, session) = client(&broker).await;
        client.write_all(b"\x09\0\x01\0\0\0\0\xce").await.unwrap();
        drop(client);
        session.await.unwrap();
        assert_eq!(broker.statistics().connections, 0);
    }
}

/// What a client hears from there after it has said that it is `guest`.
async fn guest_from(broker: &Broker, peer: &str) -> Option<Method<'static>> {
    let (mut client, ours) = duplex(64 * 1024);
    let (reader, writer) = split(ours);
    let peer: SocketAddr = peer.parse().unwrap();
    let session = tokio::spawn(super::run(broker.shared(), reader, writer, Some(peer)));
    let mut out = Outbound::new();
    out.protocol_header();
    let start_ok = connection::StartOk {
        mechanism: ShortStr::from_static("PLAIN"),
        response: Secret::new(&b"\0guest\0guest"[..]),
        ..Default::default()
    };
    out.method(0, &start_ok, FrameMax::MIN).unwrap();
    client.write_all(&out.copy_to_bytes(out.remaining())).await.unwrap();
    client.shutdown().await.unwrap();
    let mut said = Vec::new();
    client.read_to_end(&mut said).await.unwrap();
    session.await.unwrap();
    let mut inbound = Inbound::new(FrameMax::DEFAULT);
    inbound.extend_from_slice(&said);
    let batch = inbound.take().unwrap();
    let mut methods = batch.frames().map(|frame| Method::decode(frame.payload).unwrap());
    assert!(matches!(methods.next(), Some(Method::ConnectionStart(_))));
    methods.next().map(Method::into_owned)
}

#[tokio::test]
async fn guest_is_let_in_from_this_machine_alone() {
    let broker = Broker::builder().start().unwrap();
    for here in ["127.0.0.1:1", "[::1]:1"] {
        let said = guest_from(&broker, here).await;
        assert!(matches!(said, Some(Method::ConnectionTune(_))), "{here}: {said:?}");
    }
    for elsewhere in ["192.0.2.1:1", "[2001:db8::1]:1"] {
        assert_eq!(guest_from(&broker, elsewhere).await, None, "{elsewhere}");
    }
}
