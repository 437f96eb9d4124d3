//! Messages whose bodies have not come yet, or not all of them.

use leveret_broker::Broker;
use leveret_testkit::eventually;
use leveret_testkit::peer::Peer;
use leveret_wire::method::{basic, channel, connection, queue};
use leveret_wire::{FrameKind, ReplyCode};
use tokio::io::DuplexStream;

use crate::support::{SOON, peer};

const PIECE: usize = 100_000;
const PIECES: usize = 10;

async fn open(peer: &mut Peer<DuplexStream>, channel: u16) {
    peer.send(channel, &channel::Open {}).await;
    peer.expect::<channel::OpenOk>(channel).await;
}

/// A publish to `q`, and all of its body but for the last pieces.
async fn begin(peer: &mut Peer<DuplexStream>, channel: u16, pieces_left: usize) {
    peer.send(
        channel,
        &basic::Publish { routing_key: "q".try_into().unwrap(), ..Default::default() },
    )
    .await;
    let mut header = vec![0, 60, 0, 0];
    header.extend(((PIECE * PIECES) as u64).to_be_bytes());
    header.extend([0, 0]);
    peer.send_frame(FrameKind::Header, channel, &header).await;
    for _ in pieces_left..PIECES {
        peer.send_frame(FrameKind::Body, channel, &[7; PIECE]).await;
    }
}

#[tokio::test]
async fn of_too_many_unfinished_messages_the_connection_with_the_most_is_refused() {
    let limit = 10 * PIECE * PIECES;
    let builder = Broker::builder().memory_limit(limit);
    let broker = builder.max_message_size((PIECE * PIECES) as u64).start().unwrap();
    let memory = || broker.statistics().memory;
    let mut modest = peer(&broker).await;
    open(&mut modest, 1).await;
    modest.send(1, &queue::Declare { queue: "q".try_into().unwrap(), ..Default::default() }).await;
    modest.expect::<queue::DeclareOk<'_>>(1).await;
    begin(&mut modest, 1, 7).await;
    eventually(SOON, "a part of a message to count", async || memory() >= 3 * PIECE).await;

    let mut greedy = peer(&broker).await;
    for number in 1..=4 {
        open(&mut greedy, number).await;
        begin(&mut greedy, number, 1).await;
    }
    eventually(SOON, "all to count", async || memory() >= (3 + 4 * 9) * PIECE).await;
    assert_eq!(broker.statistics().connections, 2);
    for number in 5..=7 {
        open(&mut greedy, number).await;
    }
    begin(&mut greedy, 5, 0).await;
    for number in 6..=7 {
        begin(&mut greedy, number, 1).await;
    }
    let close = greedy.expect::<connection::Close<'_>>(0).await;
    assert_eq!(close.reply_code, ReplyCode::RESOURCE_ERROR, "{}", close.reply_text);
    greedy.send(0, &connection::CloseOk {}).await;
    greedy.expect_end().await;

    // The message that came to its end is there, and nothing of the others.
    eventually(SOON, "the connection to go", async || broker.statistics().connections == 1).await;
    assert_eq!(broker.statistics().ready, 1);
    assert!(memory() < (PIECES + 4) * PIECE, "{}", memory());
    for _ in 0..7 {
        modest.send_frame(FrameKind::Body, 1, &[7; PIECE]).await;
    }
    eventually(SOON, "the modest one's message", async || broker.statistics().ready == 2).await;
    modest.send(1, &queue::Purge { queue: "q".try_into().unwrap(), nowait: false }).await;
    modest.expect::<queue::PurgeOk>(1).await;
    assert_eq!(memory(), 0);
}

#[tokio::test(start_paused = true)]
async fn many_connections_of_one_user_count_together() {
    let builder = Broker::builder().memory_limit(10 * PIECE * PIECES).user("one", "");
    let builder = builder.user("many", "").max_message_size((PIECE * PIECES) as u64);
    let broker = builder.start().unwrap();
    let client = async |user| {
        let mut peer = Peer::over(broker.connect());
        peer.open_connection("/", user, "").await;
        open(&mut peer, 1).await;
        peer
    };
    let mut one = client("one").await;
    one.send(1, &queue::Declare { queue: "q".try_into().unwrap(), ..Default::default() }).await;
    one.expect::<queue::DeclareOk<'_>>(1).await;
    begin(&mut one, 1, 1).await;
    let memory = || broker.statistics().memory;
    eventually(SOON, "a part of a message to count", async || memory() >= 9 * PIECE).await;
    let mut many = Vec::new();
    for _ in 0..6 {
        let mut peer = client("many").await;
        begin(&mut peer, 1, 2).await;
        many.push(peer);
    }
    // Less than the one has sent, each of them.
    let refused = async || broker.statistics().connections == 6;
    eventually(SOON, "one of the many to be refused", refused).await;
    drop(many);
    one.send_frame(FrameKind::Body, 1, &[7; PIECE]).await;
    eventually(SOON, "the message of the one", async || broker.statistics().ready == 1).await;
}

#[tokio::test]
async fn an_unfinished_message_no_longer_counts_when_its_connection_is_gone() {
    let broker = Broker::builder().start().unwrap();
    let mut peer = peer(&broker).await;
    for number in 1..=100 {
        open(&mut peer, number).await;
        begin(&mut peer, number, PIECES - 1).await;
    }
    let counts = async || broker.statistics().memory >= 100 * PIECE;
    eventually(SOON, "all to count", counts).await;
    // Not the reads that they came with, which are larger.
    assert!(broker.statistics().memory < 101 * PIECE);
    drop(peer);
    eventually(SOON, "nothing to count", async || broker.statistics().memory == 0).await;
}
