//! The handshake against a broker that does what a test says: silence, closing, nonsense, at every step.

use std::time::Duration;

use leveret_amqp::{Auth, Connection, ErrorKind, Options, ReplyCode};
use leveret_testkit::peer::PeerListener;
use leveret_wire::method::{channel, connection};
use leveret_wire::{FrameKind, ShortStr, Table};

use crate::support::{Broker, connected_with, pipe};

/// The steps of the broker's part, of which a test lets it do the first few.
async fn steps(broker: &mut Broker, count: usize) {
    if count > 0 {
        broker.expect_protocol_header().await;
        broker.send(0, &start("PLAIN AMQPLAIN")).await;
    }
    if count > 1 {
        broker.expect::<connection::StartOk<'_>>(0).await;
        broker.send(0, &connection::Tune { channel_max: 10, frame_max: 8192, heartbeat: 0 }).await;
    }
    if count > 2 {
        broker.expect::<connection::TuneOk>(0).await;
        broker.expect::<connection::Open<'_>>(0).await;
    }
}

fn start(mechanisms: &'static str) -> connection::Start<'static> {
    connection::Start {
        version_major: 0,
        version_minor: 9,
        server_properties: Table::new(),
        mechanisms: mechanisms.into(),
        locales: "en_US".into(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_broker_is_given_up_at_every_step() {
    for (count, step) in
        ["connection.start", "connection.tune", "connection.open-ok"].iter().enumerate()
    {
        let (mut broker, connecting) = pipe(Options::default());
        let (result, ()) = tokio::join!(connecting, steps(&mut broker, count));
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.to_string().contains(step), "{error}");
    }
}

#[tokio::test]
async fn a_broker_that_hangs_up_is_noticed_at_every_step() {
    let kinds = [ErrorKind::ConnectionLost, ErrorKind::Authentication, ErrorKind::ConnectionLost];
    for (count, kind) in kinds.into_iter().enumerate() {
        let (mut broker, connecting) = pipe(Options::default());
        let (result, ()) = tokio::join!(connecting, async {
            steps(&mut broker, count).await;
            drop(broker);
        });
        assert_eq!(result.unwrap_err().kind(), kind, "after {count} steps");
    }
}

#[tokio::test]
async fn a_broker_that_would_say_so_does_not_hang_up_for_wrong_credentials() {
    let (mut broker, connecting) = pipe(Options::default());
    let (result, ()) = tokio::join!(connecting, async {
        broker.expect_protocol_header().await;
        let known = Table::from_pairs([("authentication_failure_close", true.into())]).unwrap();
        let server_properties = Table::from_pairs([("capabilities", known.into())]).unwrap();
        broker.send(0, &connection::Start { server_properties, ..start("PLAIN") }).await;
        broker.expect::<connection::StartOk<'_>>(0).await;
        drop(broker);
    });
    assert_eq!(result.unwrap_err().kind(), ErrorKind::ConnectionLost);
}

#[tokio::test]
async fn a_refusal_is_told_by_what_was_refused() {
    let kinds =
        [(1, ErrorKind::Protocol), (2, ErrorKind::Authentication), (3, ErrorKind::VirtualHost)];
    for (count, kind) in kinds {
        let (mut broker, connecting) = pipe(Options::default());
        let (result, ()) = tokio::join!(connecting, async {
            // One step less: the close comes in the place of the broker's answer.
            match count {
                1 => broker.expect_protocol_header().await,
                2 => {
                    steps(&mut broker, 1).await;
                    broker.expect::<connection::StartOk<'_>>(0).await;
                }
                _ => steps(&mut broker, 3).await,
            }
            let close = connection::Close {
                reply_code: ReplyCode::ACCESS_REFUSED,
                reply_text: ShortStr::from_static("ACCESS_REFUSED - no"),
                class_id: 0,
                method_id: 0,
            };
            broker.send(0, &close).await;
        });
        let error = result.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
    }
}

#[tokio::test]
async fn nonsense_is_refused_at_every_step() {
    for count in 0..=3 {
        for nonsense in 0..4 {
            let (mut broker, connecting) = pipe(Options::default());
            let (result, _broker) = tokio::join!(connecting, async {
                if count == 0 {
                    broker.expect_protocol_header().await;
                } else {
                    steps(&mut broker, count).await;
                }
                match nonsense {
                    0 => broker.send(0, &connection::Unblocked {}).await,
                    1 => broker.send_frame(FrameKind::Body, 0, b"x").await,
                    2 => broker.send(3, &channel::OpenOk {}).await,
                    _ => broker.send_bytes(b"HTTP/1.1 400 Bad Request\r\n\r\n").await,
                }
                broker
            });
            let kind = result.unwrap_err().kind();
            assert_eq!(kind, ErrorKind::Protocol, "step {count}, nonsense {nonsense}");
        }
    }
}

#[tokio::test]
async fn a_broker_of_another_protocol_is_named() {
    let (mut broker, connecting) = pipe(Options::default());
    let (result, ()) = tokio::join!(connecting, async {
        broker.expect_protocol_header().await;
        broker.send_bytes(b"AMQP\x00\x01\x00\x00").await;
    });
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.to_string().contains("AMQP 1-0-0"), "{error}");
}

#[tokio::test]
async fn the_lower_limits_hold() {
    let mut options = Options::default();
    options.heartbeat = Some(Duration::from_secs(5));
    options.channel_max = 100;
    options.frame_max = 0;
    let tune = connection::Tune { channel_max: 7, frame_max: 8192, heartbeat: 60 };
    let (connection, _broker) = connected_with(options.clone(), tune).await;
    assert_eq!(connection.channel_max(), 7);
    assert_eq!(connection.frame_max().get(), 8192);
    assert_eq!(connection.heartbeat(), Duration::from_secs(5));

    options.heartbeat = Some(Duration::ZERO);
    let tune = connection::Tune { channel_max: 0, frame_max: 0, heartbeat: 60 };
    let (connection, _broker) = connected_with(options, tune).await;
    assert_eq!(connection.channel_max(), 100);
    assert_eq!(connection.frame_max().get(), u32::MAX);
    assert_eq!(connection.heartbeat(), Duration::ZERO);
}

#[tokio::test]
async fn credentials_are_sent_as_the_mechanism_wants_them() {
    let cases = [
        (Auth::plain("me", "pw"), "PLAIN", b"\0me\0pw".as_slice()),
        (
            Auth::AmqPlain { user: "me".into(), password: "pw".into() },
            "AMQPLAIN",
            b"\x05LOGINS\x00\x00\x00\x02me\x08PASSWORDS\x00\x00\x00\x02pw",
        ),
        (Auth::External, "EXTERNAL", b""),
    ];
    for (auth, mechanism, response) in cases {
        let mut options = Options::default();
        options.auth = auth;
        options.connection_name = Some("the name".to_owned());
        let (mut broker, connecting) = pipe(options);
        let (connection, start_ok) = tokio::join!(connecting, broker.accept_connection());
        connection.unwrap();
        assert_eq!(start_ok.mechanism, mechanism);
        assert_eq!(start_ok.response.expose(), response);
        let name = start_ok.client_properties.get("connection_name");
        assert_eq!(name.unwrap().as_str(), Some("the name"));
        let capabilities = start_ok.client_properties.get("capabilities").unwrap();
        assert!(capabilities.as_table().unwrap().get("consumer_cancel_notify").is_some());
    }
}

#[tokio::test]
async fn a_mechanism_that_is_not_offered_is_named() {
    let (mut broker, connecting) = pipe(Options::default());
    let (result, ()) = tokio::join!(connecting, async {
        broker.expect_protocol_header().await;
        broker.send(0, &start("EXTERNAL")).await;
    });
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Authentication);
    assert!(error.to_string().contains("EXTERNAL"), "{error}");
}

#[tokio::test]
async fn what_follows_the_handshake_in_the_same_bytes_is_not_lost() {
    let listener = PeerListener::bind().await;
    let options = Options::from_uri(&listener.url()).unwrap();
    let (connection, _peer) = tokio::join!(Connection::open(&options), async {
        let mut peer = listener.accept().await;
        peer.expect_protocol_header().await;
        peer.send(0, &start("PLAIN")).await;
        peer.expect::<connection::StartOk<'_>>(0).await;
        peer.send(0, &connection::Tune { channel_max: 1, frame_max: 8192, heartbeat: 0 }).await;
        peer.expect::<connection::TuneOk>(0).await;
        peer.expect::<connection::Open<'_>>(0).await;
        // open-ok and blocked in one write.
        peer.send_bytes(
            b"\x01\x00\x00\x00\x00\x00\x05\x00\x0a\x00\x29\x00\xce\
              \x01\x00\x00\x00\x00\x00\x08\x00\x0a\x00\x3c\x03low\xce",
        )
        .await;
        peer
    });
    let connection = connection.unwrap();
    let mut blocked = connection.blocked();
    let reason = blocked.wait_for(Option::is_some).await.unwrap().clone();
    assert_eq!(reason.as_deref(), Some("low"));
}
