//! What counts as memory, and what is bounded otherwise: nothing that clients send is kept uncounted.

use std::time::Duration;

use bytes::{Buf, Bytes};
use leveret_broker::snapshot::Tally;
use leveret_broker::{Broker, Profile};
use leveret_testkit::eventually;
use leveret_testkit::peer::{Peer, Received};
use leveret_wire::method::{Encode, basic, channel, connection, exchange, queue, tx};
use leveret_wire::{
    Array, FrameMax, Method, Outbound, Properties, ReplyCode, ShortStr, Table, Value,
};
use tokio::io::DuplexStream;
use tokio::time::sleep;

use crate::support::{SOON, broker, peer};

const Q: ShortStr<'static> = ShortStr::from_static("q");

const PROFILES: [Profile; 2] = [Profile::RabbitMq3_10, Profile::RabbitMq4_3];

/// With a channel.
async fn client(broker: &Broker) -> Peer<DuplexStream> {
    let mut peer = peer(broker).await;
    peer.send(1, &channel::Open {}).await;
    peer.expect::<channel::OpenOk>(1).await;
    peer
}

async fn declare(peer: &mut Peer<DuplexStream>, arguments: Table<'static>) {
    peer.send(1, &queue::Declare { queue: Q, arguments, ..Default::default() }).await;
    peer.expect::<queue::DeclareOk<'_>>(1).await;
}

async fn purge(peer: &mut Peer<DuplexStream>) {
    peer.send(1, &queue::Purge { queue: Q, nowait: false }).await;
    peer.expect::<queue::PurgeOk>(1).await;
}

/// Returns when all was done that was said before.
async fn fence(peer: &mut Peer<DuplexStream>) {
    peer.send(1, &basic::Qos::default()).await;
    peer.expect::<basic::QosOk>(1).await;
}

fn to(routing_key: impl Into<String>) -> basic::Publish<'static> {
    let routing_key = ShortStr::try_from(routing_key.into()).unwrap();
    basic::Publish { routing_key, ..Default::default() }
}

fn blind_copies(keys: usize) -> Properties<'static> {
    let keys = Array::from_values((0..keys).map(|_| Value::from("k"))).unwrap();
    let headers = Some(Table::from_pairs([("BCC", keys.into())]).unwrap());
    Properties { headers, ..Properties::default() }
}

#[tokio::test]
async fn a_message_that_is_rejected_again_and_again_takes_no_more_memory() {
    for profile in PROFILES {
        let broker = Broker::builder().profile(profile).start().unwrap();
        let mut peer = client(&broker).await;
        let back =
            [("x-dead-letter-exchange", "".into()), ("x-dead-letter-routing-key", "q".into())];
        declare(&mut peer, Table::from_pairs(back).unwrap()).await;
        peer.send_content(1, &to("q"), &Properties::default(), "round and round").await;
        let mut after_two = 0;
        for delivery_tag in 1..=10_000 {
            peer.send(1, &basic::Get { queue: Q, no_ack: false }).await;
            peer.expect_content::<basic::GetOk<'_>>(1).await;
            peer.send(1, &basic::Reject { delivery_tag, requeue: false }).await;
            if delivery_tag == 2 {
                fence(&mut peer).await;
                after_two = broker.statistics().memory;
            }
        }
        fence(&mut peer).await;
        assert_eq!(broker.statistics().memory, after_two, "{profile:?}");
        purge(&mut peer).await;
        assert_eq!(broker.statistics().memory, 0, "{profile:?}");
    }
}

#[tokio::test]
async fn routing_keys_count() {
    let broker = broker();
    let mut peer = client(&broker).await;
    declare(&mut peer, Table::new()).await;
    peer.send_content(1, &to("q"), &blind_copies(15_000), "b").await;
    fence(&mut peer).await;
    let memory = broker.statistics().memory;
    assert!(memory > 1_000_000, "{memory} bytes");
    purge(&mut peer).await;
    assert_eq!(broker.statistics().memory, 0);
}

#[tokio::test]
async fn the_queues_that_a_transaction_is_for_count() {
    const QUEUES: usize = 2000;
    let broker = broker();
    let mut peer = client(&broker).await;
    for number in 0..QUEUES {
        let queue = ShortStr::try_from(format!("q{number}")).unwrap();
        let exchange = ShortStr::from_static("amq.fanout");
        let declare = queue::Declare { queue: queue.clone(), nowait: true, ..Default::default() };
        peer.send(1, &declare).await;
        peer.send(1, &queue::Bind { queue, exchange, nowait: true, ..Default::default() }).await;
    }
    peer.send(1, &tx::Select {}).await;
    peer.expect::<tx::SelectOk>(1).await;
    let exchange = ShortStr::from_static("amq.fanout");
    let publish = basic::Publish { exchange, ..Default::default() };
    for _ in 0..100 {
        peer.send_content(1, &publish, &Properties::default(), "b").await;
    }
    fence(&mut peer).await;
    let memory = broker.statistics().memory;
    assert!(memory > 100 * QUEUES * 16, "{memory} bytes");
    peer.send(1, &tx::Rollback {}).await;
    peer.expect::<tx::RollbackOk>(1).await;
    assert_eq!(broker.statistics().memory, 0);
}

/// A few bytes that reach many queues each: others are served in between, and publishers wait when memory is short.
#[tokio::test]
async fn messages_for_thousands_of_queues_are_not_all_taken_at_once() {
    const QUEUES: usize = 2000;
    const MESSAGES: u64 = 200;
    let broker = Broker::builder().memory_limit(20 * QUEUES * 200).start().unwrap();
    let published = || broker.statistics().tally.published;
    let mut peer = client(&broker).await;
    let exchange = ShortStr::from_static("amq.fanout");
    for number in 0..QUEUES {
        let queue = ShortStr::try_from(format!("q{number}")).unwrap();
        let declare = queue::Declare { queue: queue.clone(), nowait: true, ..Default::default() };
        peer.send(1, &declare).await;
        let bind =
            queue::Bind { queue, exchange: exchange.clone(), nowait: true, ..Default::default() };
        peer.send(1, &bind).await;
    }
    fence(&mut peer).await;
    let mut other = client(&broker).await;
    let publish = basic::Publish { exchange, ..Default::default() };
    let mut all = Outbound::new();
    for _ in 0..MESSAGES {
        let body = Bytes::from_static(b"b");
        all.content(1, &publish, &Properties::default(), &body, FrameMax::DEFAULT).unwrap();
    }
    peer.send_bytes(&all.copy_to_bytes(all.remaining())).await;
    fence(&mut other).await;
    eventually(SOON, "the first to be taken", async || published() > 0).await;
    fence(&mut other).await;
    assert!(published() < MESSAGES / 2, "{} published", published());
}

#[tokio::test]
async fn what_was_got_without_ack_counts_until_it_is_read() {
    const MESSAGES: usize = 40;
    const SIZE: usize = 100_000;
    let broker = broker();
    let mut peer = client(&broker).await;
    declare(&mut peer, Table::new()).await;
    for _ in 0..MESSAGES {
        peer.send_content(1, &to("q"), &Properties::default(), vec![7; SIZE]).await;
    }
    fence(&mut peer).await;
    for _ in 0..MESSAGES {
        peer.send(1, &basic::Get { queue: Q, no_ack: true }).await;
    }
    eventually(SOON, "all to be got", async || broker.statistics().ready == 0).await;
    // But for those that there was room for.
    let memory = broker.statistics().memory;
    assert!(memory > (MESSAGES - 20) * SIZE, "{memory} bytes");
    for _ in 0..MESSAGES {
        peer.expect_content::<basic::GetOk<'_>>(1).await;
    }
    eventually(SOON, "nothing to count", async || broker.statistics().memory == 0).await;

    peer.send_content(1, &to("q"), &Properties::default(), "still there").await;
    peer.send(1, &basic::Get { queue: Q, no_ack: true }).await;
    assert_eq!(peer.expect_content::<basic::GetOk<'_>>(1).await.body, "still there");
}

/// Sends all of it at once.
async fn send_all(peer: &mut Peer<DuplexStream>, mut all: Outbound) {
    peer.send_bytes(&all.copy_to_bytes(all.remaining())).await;
}

fn ask(all: &mut Outbound, method: &impl Encode) {
    all.method(1, method, FrameMax::DEFAULT).unwrap();
}

/// Returns when the broker has done something of what a client sent, and has served another client since.
async fn until_others_were_served(broker: &Broker, has_begun: impl Fn(Tally) -> bool) {
    let mut other = client(broker).await;
    eventually(SOON, "the first to be done", async || has_begun(broker.statistics().tally)).await;
    fence(&mut other).await;
}

#[tokio::test]
async fn a_client_that_does_not_read_gets_no_more_than_a_few_messages() {
    const GETS: u64 = 400;
    let broker = broker();
    let mut peer = client(&broker).await;
    declare(&mut peer, Table::new()).await;
    let text = "x".repeat(100_000);
    let headers = Some(Table::from_pairs([("h", text.as_str().into())]).unwrap());
    let properties = Properties { headers, ..Properties::default() };
    peer.send_content(1, &to("q"), &properties, "b").await;
    let mut all = Outbound::new();
    for delivery_tag in 1..=GETS {
        ask(&mut all, &basic::Get { queue: Q, no_ack: false });
        ask(&mut all, &basic::Nack { delivery_tag, multiple: false, requeue: true });
    }
    send_all(&mut peer, all).await;
    until_others_were_served(&broker, |tally| tally.delivered > 0).await;
    let delivered = broker.statistics().tally.delivered;
    assert!(delivered < GETS / 2, "{delivered} delivered");
    for _ in 0..GETS {
        peer.expect_content::<basic::GetOk<'_>>(1).await;
    }
    eventually(SOON, "nothing unread", async || broker.statistics().memory < 200_000).await;
}

#[tokio::test]
async fn what_was_got_counts_until_it_is_read_even_if_it_is_acked() {
    const MESSAGES: u64 = 8;
    const SIZE: usize = 1024 * 1024;
    let broker = broker();
    let mut peer = client(&broker).await;
    declare(&mut peer, Table::new()).await;
    let mut all = Outbound::new();
    for delivery_tag in 1..=MESSAGES {
        peer.send_content(1, &to("q"), &Properties::default(), vec![7; SIZE]).await;
        ask(&mut all, &basic::Get { queue: Q, no_ack: false });
        ask(&mut all, &basic::Ack { delivery_tag, multiple: false });
    }
    fence(&mut peer).await;
    send_all(&mut peer, all).await;
    until_others_were_served(&broker, |tally| tally.acked > 0).await;
    let memory = broker.statistics().memory;
    assert!(memory >= MESSAGES as usize * SIZE, "{memory} bytes");
    for _ in 0..MESSAGES {
        assert_eq!(peer.expect_content::<basic::GetOk<'_>>(1).await.body.len(), SIZE);
    }
    eventually(SOON, "nothing to count", async || broker.statistics().memory == 0).await;
}

#[tokio::test]
async fn messages_that_a_commit_returns_count_until_they_are_read() {
    const MESSAGES: u64 = 8;
    const SIZE: usize = 1024 * 1024;
    let broker = broker();
    let mut peer = client(&broker).await;
    peer.send(1, &tx::Select {}).await;
    peer.expect::<tx::SelectOk>(1).await;
    let publish = basic::Publish { mandatory: true, ..to("nowhere") };
    for _ in 0..MESSAGES {
        peer.send_content(1, &publish, &Properties::default(), vec![7; SIZE]).await;
    }
    peer.send(1, &tx::Commit {}).await;
    until_others_were_served(&broker, |tally| tally.returned == MESSAGES).await;
    let memory = broker.statistics().memory;
    assert!(memory >= MESSAGES as usize * SIZE, "{memory} bytes");
    for _ in 0..MESSAGES {
        peer.expect_content::<basic::Return<'_>>(1).await;
    }
    peer.expect::<tx::CommitOk>(1).await;
    eventually(SOON, "nothing to count", async || broker.statistics().memory == 0).await;
}

#[tokio::test]
async fn a_commit_that_fails_keeps_no_memory() {
    const GONE: ShortStr<'static> = ShortStr::from_static("gone");
    let broker = Broker::builder().profile(Profile::RabbitMq4_3).start().unwrap();
    let mut other = client(&broker).await;
    declare(&mut other, Table::new()).await;
    other.send_content(1, &to("q"), &Properties::default(), "to be acked").await;
    other.send(1, &queue::Declare { queue: GONE, ..Default::default() }).await;
    other.expect::<queue::DeclareOk<'_>>(1).await;

    let mut peer = client(&broker).await;
    peer.send(1, &tx::Select {}).await;
    peer.expect::<tx::SelectOk>(1).await;
    peer.send(1, &basic::Get { queue: Q, no_ack: false }).await;
    let delivery_tag = peer.expect_content::<basic::GetOk<'_>>(1).await.method.delivery_tag;
    peer.send(1, &basic::Ack { delivery_tag, multiple: false }).await;
    peer.send_content(1, &to("gone"), &Properties::default(), "lost").await;
    fence(&mut peer).await;
    other.send(1, &queue::Delete { queue: GONE, ..Default::default() }).await;
    other.expect::<queue::DeleteOk>(1).await;
    peer.send(1, &tx::Commit {}).await;
    let close = peer.expect::<connection::Close<'_>>(0).await;
    assert_eq!(close.reply_code, ReplyCode::RESOURCE_ERROR, "{}", close.reply_text);

    let statistics = broker.statistics();
    assert_eq!((statistics.ready, statistics.unsettled), (1, 0));
    purge(&mut other).await;
    assert_eq!(broker.statistics().memory, 0);
}

/// Each publish passes thousands of exchanges, and is put into no queue.
#[tokio::test]
async fn others_are_served_while_messages_pass_thousands_of_exchanges() {
    const EXCHANGES: usize = 5000;
    const MESSAGES: u64 = 2000;
    let name = |number: usize| ShortStr::try_from(format!("x{number}")).unwrap();
    let broker = broker();
    let mut peer = client(&broker).await;
    let mut all = Outbound::new();
    for number in 0..EXCHANGES {
        let next = name(number + 1).to_string();
        let declare = exchange::Declare {
            exchange: name(number),
            kind: ShortStr::from_static("fanout"),
            nowait: true,
            arguments: Table::from_pairs([("alternate-exchange", next.into())]).unwrap(),
            ..Default::default()
        };
        ask(&mut all, &declare);
    }
    send_all(&mut peer, all).await;
    fence(&mut peer).await;
    let publish = basic::Publish { exchange: name(0), ..Default::default() };
    let mut all = Outbound::new();
    for _ in 0..MESSAGES {
        let body = Bytes::new();
        all.content(1, &publish, &Properties::default(), &body, FrameMax::DEFAULT).unwrap();
    }
    send_all(&mut peer, all).await;
    until_others_were_served(&broker, |tally| tally.published > 0).await;
    let published = broker.statistics().tally.published;
    assert!(published < MESSAGES, "{published} published");
}

/// A client that waits for direct replies, and where they go.
async fn asker(broker: &Broker, service: &mut Peer<DuplexStream>) -> (Peer<DuplexStream>, String) {
    let mut asker = client(broker).await;
    let pseudo_queue = ShortStr::from_static("amq.rabbitmq.reply-to");
    let consume =
        basic::Consume { queue: pseudo_queue.clone(), no_ack: true, ..Default::default() };
    asker.send(1, &consume).await;
    asker.expect::<basic::ConsumeOk<'_>>(1).await;
    let properties = Properties { reply_to: Some(pseudo_queue), ..Properties::default() };
    asker.send_content(1, &to("q"), &properties, "a question").await;
    fence(&mut asker).await;
    service.send(1, &basic::Get { queue: Q, no_ack: true }).await;
    let question = service.expect_content::<basic::GetOk<'_>>(1).await;
    let address = question.properties.get().reply_to.unwrap().to_string();
    (asker, address)
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_its_direct_replies_is_cut_off_while_memory_is_short() {
    const REPLIES: usize = 4;
    const SIZE: usize = 1024 * 1024;
    let builder = Broker::builder().heartbeat(Duration::ZERO);
    for is_short in [false, true] {
        let limit = if is_short { REPLIES * SIZE } else { 2 * REPLIES * SIZE };
        let broker = builder.clone().memory_limit(limit).start().unwrap();
        let mut service = client(&broker).await;
        declare(&mut service, Table::new()).await;
        let (_asker, address) = asker(&broker, &mut service).await;
        for _ in 0..REPLIES {
            let body = vec![7; SIZE];
            service.send_content(1, &to(&address), &Properties::default(), body).await;
        }
        let counts = async || broker.statistics().memory >= REPLIES * SIZE;
        eventually(SOON, "all to count", counts).await;
        sleep(Duration::from_secs(50)).await;
        assert_eq!(broker.statistics().connections, 2);
        sleep(Duration::from_secs(20)).await;
        let statistics = broker.statistics();
        let is_cut_off = (statistics.connections, statistics.memory) == (1, 0);
        assert_eq!(is_cut_off, is_short, "{statistics:?}");
    }
}

/// Whether it has to ack them makes no difference, nor whether it has.
#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_its_deliveries_is_cut_off_while_memory_is_short() {
    const SIZE: usize = 4 * 1024 * 1024;
    for no_ack in [true, false] {
        let builder = Broker::builder().heartbeat(Duration::ZERO);
        let broker = builder.memory_limit(SIZE).start().unwrap();
        let mut slow = client(&broker).await;
        declare(&mut slow, Table::new()).await;
        slow.send(1, &basic::Consume { queue: Q, no_ack, ..Default::default() }).await;
        slow.expect::<basic::ConsumeOk<'_>>(1).await;
        let mut publisher = client(&broker).await;
        publisher.send_content(1, &to("q"), &Properties::default(), vec![7; SIZE]).await;
        let tally = || broker.statistics().tally;
        eventually(SOON, "the delivery", async || tally().delivered == 1).await;
        if !no_ack {
            slow.send(1, &basic::Ack { delivery_tag: 1, multiple: false }).await;
            eventually(SOON, "the ack", async || tally().acked == 1).await;
        }
        assert!(broker.statistics().memory > SIZE);
        sleep(Duration::from_secs(70)).await;
        assert_eq!((broker.statistics().connections, broker.statistics().memory), (1, 0));
    }
}

/// Clients that read nothing are not cut off for little, so that must not raise an alarm either: nothing would end it.
#[tokio::test]
async fn what_a_client_leaves_unread_counts_from_a_mebibyte_on() {
    let broker = Broker::builder().memory_limit(1_000_000).start().unwrap();
    let mut slow = client(&broker).await;
    declare(&mut slow, Table::new()).await;
    slow.send(1, &basic::Consume { queue: Q, no_ack: true, ..Default::default() }).await;
    slow.expect::<basic::ConsumeOk<'_>>(1).await;
    let mut publisher = client(&broker).await;
    for delivered in 1..=3 {
        publisher.send_content(1, &to("q"), &Properties::default(), vec![7; 600_000]).await;
        let tally = || broker.statistics().tally;
        eventually(SOON, "a delivery", async || tally().delivered == delivered).await;
        eventually(SOON, "nothing to count", async || broker.statistics().memory == 0).await;
    }
}

/// One reply fills the buffer, another comes while that is written: both count no longer when the client has read them.
#[tokio::test]
async fn nothing_counts_when_a_client_has_read_all() {
    let broker = broker();
    let mut service = client(&broker).await;
    declare(&mut service, Table::new()).await;
    let (mut asker, address) = asker(&broker, &mut service).await;
    for size in [1_500_000, 100_000] {
        let body = vec![7; size];
        service.send_content(1, &to(&address), &Properties::default(), body).await;
        fence(&mut service).await;
    }
    assert!(broker.statistics().memory > 0);
    for size in [1_500_000, 100_000] {
        assert_eq!(asker.expect_content::<basic::Deliver<'_>>(1).await.body.len(), size);
    }
    eventually(SOON, "nothing to count", async || broker.statistics().memory == 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_its_deliveries_is_not_cut_off() {
    let broker = Broker::builder().heartbeat(Duration::ZERO).start().unwrap();
    let mut slow = client(&broker).await;
    declare(&mut slow, Table::new()).await;
    slow.send(1, &basic::Consume { queue: Q, no_ack: true, ..Default::default() }).await;
    slow.expect::<basic::ConsumeOk<'_>>(1).await;
    let mut publisher = client(&broker).await;
    for _ in 0..40 {
        let body = vec![7; 100_000];
        publisher.send_content(1, &to("q"), &Properties::default(), body).await;
    }
    fence(&mut publisher).await;
    sleep(Duration::from_secs(3600)).await;
    for _ in 0..40 {
        assert_eq!(slow.expect_content::<basic::Deliver<'_>>(1).await.body.len(), 100_000);
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_gets_no_more_direct_replies() {
    const REPLIES: usize = 48;
    const SIZE: usize = 2 * 1024 * 1024;
    const LIMIT: usize = 64 * 1024 * 1024;
    for profile in PROFILES {
        let broker = Broker::builder().profile(profile).start().unwrap();
        let mut service = client(&broker).await;
        declare(&mut service, Table::new()).await;
        let (mut asker, address) = asker(&broker, &mut service).await;
        let (gone, gones) = self::asker(&broker, &mut service).await;
        for _ in 0..REPLIES {
            let body = vec![7; SIZE];
            service.send_content(1, &to(&address), &Properties::default(), body).await;
        }
        for _ in 0..3 {
            service.send_content(1, &to(&gones), &Properties::default(), vec![7; SIZE]).await;
        }
        fence(&mut service).await;
        let memory = broker.statistics().memory;
        assert!((LIMIT..LIMIT + 4 * SIZE).contains(&memory), "{memory} bytes");
        drop(gone);
        eventually(SOON, "it to go", async || broker.statistics().connections == 2).await;
        assert!(broker.statistics().memory < memory);

        asker.send(1, &basic::Qos::default()).await;
        let mut replies = 0;
        while let Received::Content(..) = asker.receive().await {
            replies += 1;
        }
        assert!((LIMIT / SIZE..REPLIES).contains(&replies), "{replies} replies");
        eventually(SOON, "nothing to count", async || broker.statistics().memory == 0).await;
        service.send_content(1, &to(&address), &Properties::default(), "again").await;
        match asker.receive().await {
            Received::Content(_, content) => {
                assert!(matches!(content.method, Method::BasicDeliver(_)));
                assert_eq!(content.body, "again");
            }
            other => panic!("{other:?}"),
        }
    }
}
