//! The scripted peer, on both sides of a connection.

use std::time::Duration;

use leveret_testkit::peer::{Peer, PeerListener, Received};
use leveret_wire::method::{basic, channel, connection};
use leveret_wire::{FrameKind, Method, Properties, ShortStr, Table};

async fn pair() -> (Peer, Peer) {
    let listener = PeerListener::bind().await;
    tokio::join!(Peer::connect(listener.addr()), listener.accept())
}

async fn connected() -> (Peer, Peer) {
    let (mut client, mut server) = pair().await;
    tokio::join!(client.open_connection("/", "guest", "guest"), server.accept_connection());
    (client, server)
}

#[tokio::test]
async fn a_handshake_goes_through_and_its_limits_hold() {
    let (mut client, mut server) = pair().await;
    let tune = connection::Tune { channel_max: 5, frame_max: 4096, heartbeat: 7 };
    let properties = Table::from_pairs([("product", "test".into())]).unwrap();
    let (start, (start_ok, tune_ok)) = tokio::join!(
        client.open_connection("/", "someone", "secret"),
        server.accept_connection_with(tune, properties),
    );
    assert_eq!(start.server_properties.get("product").unwrap().as_str(), Some("test"));
    assert_eq!(start_ok.response.expose(), b"\0someone\0secret");
    assert_eq!((tune_ok.channel_max, tune_ok.frame_max), (5, 4096));

    let body = vec![7; 10_000];
    let publish = basic::Publish { routing_key: ShortStr::from_static("q"), ..Default::default() };
    client.send_content(3, &publish, &Properties::default(), body.clone()).await;
    let content = server.expect_content::<basic::Publish<'_>>(3).await;
    assert_eq!(content.method.routing_key, "q");
    assert_eq!(content.body, body);
}

#[tokio::test]
async fn heartbeats_are_passed_over_unless_they_are_awaited() {
    let (mut client, mut server) = connected().await;
    client.send_heartbeat().await;
    client.send(1, &channel::Open {}).await;
    server.expect::<channel::Open>(1).await;
    server.send_heartbeat().await;
    client.expect_heartbeat().await;
    client.expect_silence(Duration::from_millis(20)).await;
}

#[tokio::test]
async fn raw_frames_and_bytes_arrive_as_they_are() {
    let (mut client, mut server) = connected().await;
    server.send_frame(FrameKind::Method, 9, &[0, 20, 0, 41]).await;
    match client.receive().await {
        Received::Method(9, Method::ChannelCloseOk(_)) => {}
        other => panic!("{other:?}"),
    }
    // Two pieces of one frame.
    server.send_bytes(b"\x08\x00\x00\x00").await;
    server.send_bytes(b"\x00\x00\x00\xce").await;
    client.expect_heartbeat().await;
}

#[tokio::test]
async fn the_end_is_noticed_however_it_comes() {
    let (mut client, mut server) = connected().await;
    client.finish().await;
    server.expect_end().await;
    // The other half is still open.
    server.send(1, &channel::OpenOk {}).await;
    client.expect::<channel::OpenOk>(1).await;

    let (client, mut server) = connected().await;
    client.reset();
    server.expect_end().await;
}

#[tokio::test]
#[should_panic(
    expected = "awaited channel::OpenOk on channel 1; instead came on channel 2: ChannelOpenOk"
)]
async fn another_channel_is_not_what_was_awaited() {
    let (mut client, mut server) = connected().await;
    server.send(2, &channel::OpenOk {}).await;
    client.expect::<channel::OpenOk>(1).await;
}

#[tokio::test]
#[should_panic(expected = "not AMQP: malformed frame")]
async fn what_is_not_amqp_is_said_to_be_so() {
    let (mut client, mut server) = connected().await;
    server.send_bytes(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    client.receive().await;
}
