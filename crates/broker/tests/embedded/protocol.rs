//! Answers that no client library shows: as differential runs saw them from RabbitMQ 4.3.

use leveret_testkit::peer::Peer;
use leveret_wire::method::{basic, channel, connection, queue};
use leveret_wire::{FrameKind, Properties, ReplyCode};
use tokio::io::DuplexStream;

use crate::support::{broker, peer};

/// A client with a channel 1 and a queue `q`.
async fn with_queue(broker: &leveret_broker::Broker) -> Peer<DuplexStream> {
    let mut peer = peer(broker).await;
    peer.send(1, &channel::Open {}).await;
    peer.expect::<channel::OpenOk>(1).await;
    peer.send(1, &queue::Declare { queue: "q".try_into().unwrap(), ..Default::default() }).await;
    peer.expect::<queue::DeclareOk<'_>>(1).await;
    peer
}

async fn publish(peer: &mut Peer<DuplexStream>, properties: Properties<'_>) {
    let publish = basic::Publish { routing_key: "q".try_into().unwrap(), ..Default::default() };
    peer.send_content(1, &publish, &properties, "x").await;
}

#[tokio::test]
async fn a_prefetch_for_all_is_one_for_each_new_consumer() {
    let broker = broker();
    let mut peer = with_queue(&broker).await;
    peer.send(1, &basic::Qos { prefetch_count: 1, global: true, ..Default::default() }).await;
    peer.expect::<basic::QosOk>(1).await;
    for _ in 0..4 {
        publish(&mut peer, Properties::default()).await;
    }
    for _ in 0..2 {
        let consume = basic::Consume { queue: "q".try_into().unwrap(), ..Default::default() };
        peer.send(1, &consume).await;
        peer.expect::<basic::ConsumeOk<'_>>(1).await;
        peer.expect_content::<basic::Deliver<'_>>(1).await;
    }
    assert_eq!(broker.statistics().ready, 2);
}

#[tokio::test]
async fn what_is_due_behind_what_is_got_is_not_counted() {
    let mut peer = with_queue(&broker()).await;
    publish(&mut peer, Properties::default()).await;
    let expiration = Some("0".try_into().unwrap());
    publish(&mut peer, Properties { expiration, ..Properties::default() }).await;
    peer.send(1, &basic::Get { queue: "q".try_into().unwrap(), no_ack: true }).await;
    assert_eq!(peer.expect_content::<basic::GetOk<'_>>(1).await.method.message_count, 0);
}

#[tokio::test]
async fn what_only_a_broker_says_costs_the_connection() {
    let mut peer = with_queue(&broker()).await;
    peer.send(1, &queue::DeclareOk::default()).await;
    let close = peer.expect::<connection::Close<'_>>(0).await;
    assert_eq!(close.reply_text, "COMMAND_INVALID - unimplemented method");
    assert_eq!((close.class_id, close.method_id), (queue::CLASS_ID, queue::DeclareOk::ID));

    let mut peer = with_queue(&broker()).await;
    peer.send(1, &basic::Deliver::default()).await;
    let close = peer.expect::<connection::Close<'_>>(0).await;
    assert_eq!(close.reply_code, ReplyCode::UNEXPECTED_FRAME);
    let text = "expected content header for class 60, got non content header frame instead";
    assert_eq!(close.reply_text, *format!("UNEXPECTED_FRAME - {text}"));
    assert_eq!((close.class_id, close.method_id), (basic::CLASS_ID, basic::Deliver::ID));
}

#[tokio::test]
async fn a_name_that_is_not_text_costs_the_connection() {
    let mut peer = with_queue(&broker()).await;
    let tag = leveret_wire::ShortStr::from_bytes(&b"\xff"[..]).unwrap();
    peer.send(1, &basic::Cancel { consumer_tag: tag, nowait: false }).await;
    let close = peer.expect::<connection::Close<'_>>(0).await;
    assert_eq!(close.reply_text, "FRAME_ERROR - Malformed UTF-8 in shortstr");
    assert_eq!((close.class_id, close.method_id), (0, 0));
}

/// A frame of that kind on that channel, after a publish of so many bytes was begun on channel 1, if any.
struct Misplaced {
    begun: Option<u64>,
    frame: (FrameKind, u16, &'static [u8]),
    said: (u16, &'static str, (u16, u16)),
}

#[tokio::test]
async fn frames_in_the_wrong_place_are_refused_in_the_words_of_rabbitmq() {
    const HEADER: &[u8] = b"\0\x3c\0\0\0\0\0\0\0\0\0\x03\0\0";
    const OF_QUEUE: &[u8] = b"\0\x32\0\0\0\0\0\0\0\0\0\x03\0\0";
    const OPEN: &[u8] = b"\0\x0a\0\x28\x01/\0\0";
    let no_method = "expected method frame, got non method frame instead";
    let no_header = "expected content header for class 60, got non content header frame instead";
    let no_body = "expected content body, got non content body frame instead";
    let publish = (60, 40);
    for Misplaced { begun, frame: (kind, channel, payload), said: (code, text, method) } in [
        Misplaced {
            begun: None,
            frame: (FrameKind::Body, 1, b"x"),
            said: (505, no_method, (0, 0)),
        },
        Misplaced {
            begun: None,
            frame: (FrameKind::Header, 7, HEADER),
            said: (505, no_method, (0, 0)),
        },
        Misplaced {
            begun: Some(3),
            frame: (FrameKind::Header, 1, HEADER),
            said: (505, no_body, publish),
        },
        Misplaced {
            begun: Some(0),
            frame: (FrameKind::Body, 1, b"x"),
            said: (505, no_header, publish),
        },
        Misplaced {
            begun: Some(0),
            frame: (FrameKind::Header, 1, OF_QUEUE),
            said: (
                505,
                "expected content header for class 60, got one for class 50 instead",
                publish,
            ),
        },
        Misplaced {
            begun: Some(3),
            frame: (FrameKind::Body, 1, b"xxxx"),
            said: (501, "content body frame exceeds remaining content size", publish),
        },
        Misplaced {
            begun: None,
            frame: (FrameKind::Heartbeat, 1, b""),
            said: (505, "type 8, all octets = <<>>", (0, 0)),
        },
        Misplaced {
            begun: None,
            frame: (FrameKind::Body, 0, b"abcdefghijklmnopq"),
            said: (505, "type 3, first 16 octets = <<\"abcdefghijklmnop\">>", (0, 0)),
        },
        Misplaced {
            begun: None,
            frame: (FrameKind::Header, 0, HEADER),
            said: (505, "type 2, all octets = <<0,60,0,0,0,0,0,0,0,0,0,3,0,0>>", (0, 0)),
        },
        Misplaced {
            begun: None,
            frame: (FrameKind::Method, 0, OPEN),
            said: (504, "unexpected method in connection state running", (10, 40)),
        },
    ] {
        let mut peer = with_queue(&broker()).await;
        if let Some(bytes) = begun {
            let publish =
                basic::Publish { routing_key: "q".try_into().unwrap(), ..Default::default() };
            peer.send(1, &publish).await;
            if bytes > 0 {
                peer.send_frame(FrameKind::Header, 1, HEADER).await;
            }
        }
        peer.send_frame(kind, channel, payload).await;
        let close = peer.expect::<connection::Close<'_>>(0).await;
        let name = close.reply_code.name().unwrap();
        assert_eq!(
            (close.reply_code.0, &*close.reply_text.to_string()),
            (code, &*format!("{name} - {text}"))
        );
        assert_eq!((close.class_id, close.method_id), method, "{text}");
    }
}
