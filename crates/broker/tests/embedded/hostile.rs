//! Clients that mean no good, or do not know better: they lose their connections, and nobody else notices.

use std::time::Duration;

use bytes::Buf;
use leveret::amqp::Publish;
use leveret_broker::Broker;
use leveret_testkit::peer::{Peer, Received};
use leveret_wire::method::{basic, channel, connection, queue};
use leveret_wire::{FrameKind, FrameMax, Outbound, PROTOCOL_HEADER, Properties, ReplyCode, Secret};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::time::{Instant, timeout};

use crate::support::{SOON, broker, connect, get, peer, put, with_queue};

/// A generator of numbers that are the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        // Knuth's constants.
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn bytes(&mut self, count: u64) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

/// Others are still served.
async fn assert_serves(broker: &Broker) {
    let connection = connect(broker).await;
    let channel = with_queue(&connection).await;
    assert!(put(&channel, "q", "still there").await.is_acked());
    assert_eq!(get(&channel, "q").await.as_deref(), Some("still there"));
    connection.close().await.unwrap();
}

/// Sends these bytes and hangs up; the broker hangs up, too.
async fn send_and_leave(broker: &Broker, bytes: &[u8]) {
    let (mut reader, mut writer) = tokio::io::split(broker.connect());
    let sending = async {
        // It may not want to hear all.
        let _ = writer.write_all(bytes).await;
        let _ = writer.shutdown().await;
    };
    let hearing = async {
        let _ = reader.read_to_end(&mut Vec::new()).await;
    };
    let conversation = async { tokio::join!(sending, hearing) };
    timeout(SOON, conversation).await.expect("the broker hangs up");
}

/// All that a client may say, from the first byte on, without waiting for answers.
fn conversation() -> Vec<u8> {
    let mut out = Outbound::new();
    let max = FrameMax::DEFAULT;
    let start_ok = connection::StartOk {
        mechanism: "PLAIN".try_into().unwrap(),
        response: Secret::new(&b"\0guest\0guest"[..]),
        locale: "en_US".try_into().unwrap(),
        ..Default::default()
    };
    out.method(0, &start_ok, max).unwrap();
    let tune_ok = connection::TuneOk { channel_max: 2047, frame_max: 131_072, heartbeat: 0 };
    out.method(0, &tune_ok, max).unwrap();
    let open = connection::Open { virtual_host: "/".try_into().unwrap() };
    out.method(0, &open, max).unwrap();
    out.method(1, &channel::Open {}, max).unwrap();
    let declare = queue::Declare { queue: "hostile".try_into().unwrap(), ..Default::default() };
    out.method(1, &declare, max).unwrap();
    let publish =
        basic::Publish { routing_key: "hostile".try_into().unwrap(), ..Default::default() };
    let body = bytes::Bytes::from_static(b"hello");
    out.content(1, &publish, &Properties::default(), &body, max).unwrap();
    let get = basic::Get { queue: "hostile".try_into().unwrap(), no_ack: false };
    out.method(1, &get, max).unwrap();
    let mut bytes = PROTOCOL_HEADER.to_vec();
    bytes.extend_from_slice(&out.copy_to_bytes(out.remaining()));
    bytes
}

#[tokio::test]
async fn random_bytes_are_not_answered_for_long() {
    let broker = broker();
    let mut numbers = Numbers(1);
    for _ in 0..300 {
        let length = numbers.next() % 500;
        let mut bytes = numbers.bytes(length);
        if numbers.next().is_multiple_of(2) {
            // They get further than the door.
            let sane = conversation();
            let cut = numbers.next() as usize % sane.len();
            bytes = [&sane[..cut], &bytes].concat();
        }
        send_and_leave(&broker, &bytes).await;
    }
    assert_serves(&broker).await;
}

#[tokio::test]
async fn a_conversation_with_one_wrong_byte_does_no_harm() {
    let broker = broker();
    let sane = conversation();
    for at in 0..sane.len() {
        for flipped in [0x01, 0x80, 0xff] {
            let mut bytes = sane.clone();
            bytes[at] ^= flipped;
            send_and_leave(&broker, &bytes).await;
        }
        send_and_leave(&broker, &sane[..at]).await;
    }
    assert_serves(&broker).await;
    assert_eq!(broker.statistics().connections, 0);
}

#[tokio::test(start_paused = true)]
async fn a_handshake_that_is_never_finished_is_ended() {
    let broker = broker();
    let sane = conversation();
    // Nothing; half a header; a header; half a method; and a method too few.
    for length in [0, 4, 8, 20, 60] {
        let mut stream = broker.connect();
        stream.write_all(&sane[..length]).await.unwrap();
        let began = Instant::now();
        let mut said = Vec::new();
        stream.read_to_end(&mut said).await.unwrap();
        assert_eq!(began.elapsed().as_secs(), 10, "after {length} bytes");
    }
}

#[tokio::test(start_paused = true)]
async fn thousands_of_clients_that_say_nothing_keep_nobody_waiting() {
    let broker = broker();
    let mut silent: Vec<DuplexStream> = (0..3000).map(|_| broker.connect()).collect();
    assert_serves(&broker).await;
    for stream in &mut silent {
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
    }
    assert_serves(&broker).await;
}

/// The code with which the connection is closed.
async fn closed_with(peer: &mut Peer<DuplexStream>) -> ReplyCode {
    let close = peer.expect::<connection::Close<'_>>(0).await;
    peer.send(0, &connection::CloseOk {}).await;
    peer.expect_end().await;
    close.reply_code
}

/// What follows cannot be read any more, not even that the client agrees: hence the paused time.
#[tokio::test(start_paused = true)]
async fn a_frame_over_the_limit_is_refused_from_its_first_bytes() {
    let broker = broker();
    let mut peer = peer(&broker).await;
    let mut header = vec![FrameKind::Body as u8, 0, 1];
    header.extend(u32::MAX.to_be_bytes());
    peer.send_bytes(&header).await;
    assert_eq!(closed_with(&mut peer).await, ReplyCode::FRAME_ERROR);
    assert_serves(&broker).await;
}

#[tokio::test]
async fn a_channel_over_the_limit_is_refused() {
    let broker = Broker::builder().channel_max(10).start().unwrap();
    let mut peer = peer(&broker).await;
    // How many there are counts, and not what they are called.
    for number in (1..=900).step_by(100) {
        peer.send(number, &channel::Open {}).await;
        peer.expect::<channel::OpenOk>(number).await;
    }
    peer.send(2, &channel::Open {}).await;
    peer.expect::<channel::OpenOk>(2).await;
    peer.send(3, &channel::Open {}).await;
    assert_eq!(closed_with(&mut peer).await, ReplyCode::NOT_ALLOWED);
    assert_serves(&broker).await;
}

#[tokio::test]
async fn frames_of_no_channel_cost_the_connection() {
    let broker = broker();
    for kind in [FrameKind::Body, FrameKind::Header] {
        let mut peer = peer(&broker).await;
        peer.send_frame(kind, 5, b"x").await;
        assert_eq!(closed_with(&mut peer).await, ReplyCode::UNEXPECTED_FRAME);
    }
    let mut peer = peer(&broker).await;
    peer.send(5, &queue::Purge { queue: "q".try_into().unwrap(), nowait: false }).await;
    assert_eq!(closed_with(&mut peer).await, ReplyCode::CHANNEL_ERROR);
    assert_serves(&broker).await;
}

/// It is refused when it is announced, and costs its channel; what else comes of it is passed over.
#[tokio::test]
async fn a_message_over_the_limit_costs_its_channel() {
    let broker = Broker::builder().max_message_size(1000).start().unwrap();
    let mut peer = peer(&broker).await;
    for number in [1, 2] {
        peer.send(number, &channel::Open {}).await;
        peer.expect::<channel::OpenOk>(number).await;
    }
    let publish = basic::Publish { routing_key: "q".try_into().unwrap(), ..Default::default() };
    peer.send_content(1, &publish, &Properties::default(), vec![0; 1001]).await;
    let close = peer.expect::<channel::Close<'_>>(1).await;
    assert_eq!(close.reply_code, ReplyCode::PRECONDITION_FAILED);
    let text = "PRECONDITION_FAILED - message size 1001 is larger than configured max size 1000";
    assert_eq!(close.reply_text, text);
    assert_eq!((close.class_id, close.method_id), (basic::CLASS_ID, basic::Publish::ID));
    peer.send(1, &channel::CloseOk {}).await;

    peer.send_content(2, &publish, &Properties::default(), vec![0; 1000]).await;
    peer.send(2, &basic::Qos::default()).await;
    peer.expect::<basic::QosOk>(2).await;
    assert_eq!(broker.statistics().tally.published, 1);
}

#[tokio::test(start_paused = true)]
async fn a_client_without_a_sign_of_life_is_given_up() {
    let broker = Broker::builder().heartbeat(Duration::from_secs(10)).start().unwrap();
    let mut stream = broker.connect();
    let mut bytes = conversation();
    // The heartbeat is the last number of `connection.tune-ok`, which comes before `connection.open`.
    let open = bytes.windows(4).position(|ids| ids == [0, 10, 0, 40]).unwrap();
    let heartbeat = open - 7 - 1 - 1;
    assert_eq!(bytes[heartbeat - 1..=heartbeat], [0, 0]);
    bytes[heartbeat] = 10;
    stream.write_all(&bytes).await.unwrap();
    let began = Instant::now();
    stream.read_to_end(&mut Vec::new()).await.unwrap();
    assert_eq!(began.elapsed().as_secs(), 20);
    assert_eq!(broker.statistics().connections, 0);
}

#[tokio::test]
async fn what_comes_after_a_refusal_is_passed_over() {
    let broker = broker();
    let mut peer = peer(&broker).await;
    peer.send(1, &channel::Open {}).await;
    peer.expect::<channel::OpenOk>(1).await;
    peer.send(1, &basic::Get { queue: "missing".try_into().unwrap(), no_ack: true }).await;
    peer.send(1, &queue::Declare { queue: "late".try_into().unwrap(), ..Default::default() }).await;
    peer.expect::<channel::Close<'_>>(1).await;
    peer.send(1, &channel::CloseOk {}).await;
    // The number is free again.
    peer.send(1, &channel::Open {}).await;
    match peer.receive().await {
        Received::Method(1, leveret_wire::Method::ChannelOpenOk(_)) => {}
        other => panic!("{other:?}"),
    }
    assert!(broker.snapshot().virtual_host("/").unwrap().queue("late").is_none());
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_the_answers_is_cut_off_and_takes_little_memory() {
    let broker = broker();
    let mut stream = broker.connect();
    stream.write_all(&conversation()).await.unwrap();
    let mut questions = Outbound::new();
    questions.method(9, &channel::Open {}, FrameMax::DEFAULT).unwrap();
    for _ in 0..10_000 {
        questions.method(9, &basic::Qos::default(), FrameMax::DEFAULT).unwrap();
    }
    let questions = questions.copy_to_bytes(questions.remaining());
    stream.write_all(&questions).await.unwrap();
    let mut asked = 1;
    // Each is longer than its answer: what the broker takes of them bounds what it keeps.
    while timeout(SOON, stream.write_all(&questions[13..])).await.is_ok_and(|sent| sent.is_ok()) {
        asked += 1;
        assert!(asked * questions.len() < 16 * 1024 * 1024, "it takes more and more");
    }
    assert_eq!(broker.statistics().connections, 1);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(broker.statistics().connections, 0);
    assert_serves(&broker).await;
}

/// None of them is accepted before all have connected.
#[tokio::test]
async fn hundreds_of_clients_may_connect_at_once() {
    let broker = broker();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    let connect = |_| std::net::TcpStream::connect_timeout(&address, SOON).unwrap();
    let clients: Vec<_> = (0..200).map(connect).collect();
    assert_serves(&broker).await;
    drop(clients);
}

#[tokio::test]
async fn what_waits_for_a_commit_counts_as_memory() {
    let broker = broker();
    let connection = connect(&broker).await;
    let channel = connection.open_channel().await.unwrap().into_tx().await.unwrap();
    let publish = Publish { routing_key: "q", body: vec![0; 100_000].into(), ..Publish::default() };
    for _ in 0..3 {
        channel.publish(&publish).await.unwrap();
        channel.prefetch_for_all(0).await.unwrap();
        assert!(broker.statistics().memory >= 100_000);
        channel.rollback().await.unwrap();
        assert_eq!(broker.statistics().memory, 0);
    }
    channel.publish(&publish).await.unwrap();
    channel.close().await.unwrap();
    assert_eq!(broker.statistics().memory, 0);
}

/// It has filled a queue of its own, which nobody else can empty, and is not read from any more.
#[tokio::test(start_paused = true)]
async fn a_blocked_client_keeps_an_exclusive_queue_no_longer_than_a_consumer_may_keep_a_delivery() {
    let timeout = Duration::from_secs(3600);
    let builder = Broker::builder().memory_limit(100_000).consumer_timeout(timeout);
    for exclusive in [false, true] {
        let broker = builder.clone().start().unwrap();
        let mut peer = peer(&broker).await;
        peer.send(1, &channel::Open {}).await;
        peer.expect::<channel::OpenOk>(1).await;
        let queue = "own".try_into().unwrap();
        peer.send(1, &queue::Declare { queue, exclusive, ..Default::default() }).await;
        peer.expect::<queue::DeclareOk<'_>>(1).await;
        let publish =
            basic::Publish { routing_key: "own".try_into().unwrap(), ..Default::default() };
        peer.send_content(1, &publish, &Properties::default(), vec![7; 120_000]).await;
        peer.expect::<connection::Blocked<'_>>(0).await;
        // Nothing of this is read.
        peer.send(1, &queue::Purge { queue: "own".try_into().unwrap(), nowait: true }).await;
        tokio::time::sleep(timeout - Duration::from_secs(5)).await;
        assert_eq!(broker.statistics().connections, 1);
        if exclusive {
            assert_eq!(closed_with(&mut peer).await, ReplyCode::RESOURCE_ERROR);
            assert_eq!((broker.statistics().queues, broker.statistics().memory), (0, 0));
            assert_serves(&broker).await;
        } else {
            // Others can make room.
            tokio::time::sleep(Duration::from_secs(60)).await;
            assert_eq!(broker.statistics().connections, 1);
        }
    }
}
