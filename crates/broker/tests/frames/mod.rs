//! What brokers do with frames that no library sends, byte for byte: each scenario takes a broker and an empty virtual host.

use std::time::Duration;

use bytes::Bytes;
use leveret_broker::Profile;
use leveret_testkit::eventually;
use leveret_testkit::peer::{Peer, Received};
use leveret_wire::method::{basic, channel, confirm, connection, exchange, queue, tx};
use leveret_wire::{
    Method, PROTOCOL_HEADER, Properties, RawProperties, ReplyCode, Secret, ShortStr, Table,
};

/// Makes a test of every scenario, given the function that runs one on a broker of its choice.
macro_rules! frame_tests {
    ($run:ident) => {
        frame_tests! { $run:
            malformed_properties_cost_the_connection,
            odd_properties_that_can_be_read_are_taken,
            deep_headers_hide_no_other_property,
            an_exchange_that_is_missing_is_told_before_malformed_properties,
            a_header_that_is_larger_than_a_frame_is_delivered,
            a_handshake_takes_frames_up_to_a_limit,
            a_prefetch_for_all_is_shared_fairly_by_queues,
            a_commit_to_a_queue_that_is_gone,
            a_commit_to_a_queue_that_was_declared_again,
        }
    };
    ($run:ident: $($scenario:ident,)*) => {$(
        #[tokio::test]
        async fn $scenario() {
            $run($crate::frames::$scenario).await;
        }
    )*};
}

/// Where a broker listens, and an empty virtual host of it.
pub(crate) struct Place {
    pub(crate) addr: String,
    pub(crate) vhost: String,
    pub(crate) profile: Profile,
}

const SOON: Duration = Duration::from_secs(60);

const ACKED: ShortStr<'static> = ShortStr::from_static("acked");
const OTHER: ShortStr<'static> = ShortStr::from_static("other");
const Q: ShortStr<'static> = ShortStr::from_static("q");

impl Place {
    fn is_3_10(&self) -> bool {
        self.profile == Profile::RabbitMq3_10
    }

    /// A client with the channel 1.
    async fn client(&self) -> Peer {
        let mut peer = Peer::connect(&self.addr).await;
        peer.open_connection(&self.vhost, "guest", "guest").await;
        open_channel(&mut peer, 1).await;
        peer
    }

    /// The same with an empty queue `q`, and confirms.
    async fn publisher(&self) -> Peer {
        let mut peer = self.client().await;
        declare(&mut peer, 1, Q, "classic").await;
        peer.send(1, &queue::Purge { queue: Q, nowait: false }).await;
        peer.expect::<queue::PurgeOk>(1).await;
        peer.send(1, &confirm::Select { nowait: false }).await;
        peer.expect::<confirm::SelectOk>(1).await;
        peer
    }

    /// How many messages are in a queue.
    async fn count(&self, name: ShortStr<'static>) -> u32 {
        let mut peer = self.client().await;
        peer.send(1, &queue::Declare { queue: name, passive: true, ..Default::default() }).await;
        peer.expect::<queue::DeclareOk<'_>>(1).await.message_count
    }
}

async fn open_channel(peer: &mut Peer, number: u16) {
    peer.send(number, &channel::Open {}).await;
    peer.expect::<channel::OpenOk>(number).await;
}

async fn declare(peer: &mut Peer, on: u16, name: ShortStr<'static>, kind: &str) {
    let arguments = Table::from_pairs([("x-queue-type", kind.into())]).unwrap();
    let declare = queue::Declare { queue: name, durable: true, arguments, ..Default::default() };
    peer.send(on, &declare).await;
    peer.expect::<queue::DeclareOk<'_>>(on).await;
}

fn publish() -> basic::Publish<'static> {
    basic::Publish { routing_key: Q, ..Default::default() }
}

/// The code with which the connection is closed, before anything else comes. `None` if it just ends.
async fn closed_with(peer: &mut Peer) -> Option<ReplyCode> {
    match peer.receive().await {
        Received::Method(0, Method::ConnectionClose(close)) => Some(close.reply_code),
        Received::End => None,
        other => panic!("awaited connection.close; instead came {other:?}"),
    }
}

/// Headers of these bytes, whatever they are.
fn headers(fields: &[u8]) -> RawProperties {
    let length = u32::try_from(fields.len()).unwrap().to_be_bytes();
    RawProperties::new([b"\x20\0".as_slice(), &length, fields].concat().into())
}

fn raw(bytes: &'static [u8]) -> RawProperties {
    RawProperties::new(Bytes::from_static(bytes))
}

pub(crate) async fn malformed_properties_cost_the_connection(place: &Place) {
    let cases = [
        ("nothing at all", raw(b"")),
        ("half of the flags", raw(b"\0")),
        ("a flag without its field", raw(b"\x80\0")),
        ("all flags and no field", raw(b"\xff\xff")),
        ("a field cut short", raw(b"\x80\0\x05ab")),
        ("a number cut short", raw(b"\0\x40\0\0\0")),
        ("something behind no fields", raw(b"\0\0xyz")),
        ("something behind a field", raw(b"\x80\0\x01agarbage")),
        ("more flags", raw(b"\0\x01\0\0")),
        ("the length of a table cut short", raw(b"\x20\0\0\0\0")),
        ("a table cut short", raw(b"\x20\0\0\0\0\x10\x01a")),
        ("an unknown type", headers(b"\x01k?\x01")),
        ("a type that only others have", headers(b"\x01kU\0\x01")),
        ("a header without a type", headers(b"\x01k")),
        ("a name cut short", headers(b"\x05k")),
        ("a value cut short", headers(b"\x01kI\0\0")),
        ("a string of 4 GiB", headers(b"\x01kS\xff\xff\xff\xffabc")),
        ("an inner table cut short", headers(b"\x01kF\0\0\0\x09\x01aI")),
        ("an unknown type in a table", headers(b"\x01kF\0\0\0\x03\x01a?")),
        ("an array cut short", headers(b"\x01kA\0\0\0\x09I")),
        ("an unknown type in an array", headers(b"\x01kA\0\0\0\x01?")),
        ("not a number", headers(b"\x01kd\x7f\xf8\0\0\0\0\0\0")),
        ("an unknown type in the innermost array", headers(&nested(b"A", DEEP, b"?"))),
        ("an unknown type in the innermost table", headers(&nested(b"\x01nF", DEEP, b"\x01k?"))),
        (
            "an unknown type behind a deep array",
            headers(&[&deep_array(), b"\x01k?".as_slice()].concat()),
        ),
        (
            "a value cut short behind a deep array",
            headers(&[&deep_array(), b"\x01kI\0".as_slice()].concat()),
        ),
        ("something behind deep headers", with_deep_headers(0, b"garbage")),
        ("a flag without its field behind deep headers", with_deep_headers(MESSAGE_ID, b"")),
    ];
    for (what, properties) in cases {
        let mut peer = place.publisher().await;
        peer.send_content(1, &publish(), &properties, "x").await;
        assert_eq!(closed_with(&mut peer).await, Some(ReplyCode::INTERNAL_ERROR), "{what}");
        assert_eq!(place.count(Q).await, 0, "{what}");
    }
    // In a transaction, not only at its end; and for a message that nobody would get.
    let mut peer = place.client().await;
    peer.send(1, &tx::Select {}).await;
    peer.expect::<tx::SelectOk>(1).await;
    peer.send_content(1, &publish(), &raw(b"\x80\0"), "x").await;
    assert_eq!(closed_with(&mut peer).await, Some(ReplyCode::INTERNAL_ERROR));
    let mut peer = place.client().await;
    let nowhere =
        basic::Publish { routing_key: ShortStr::from_static("nowhere"), ..Default::default() };
    peer.send_content(1, &nowhere, &raw(b"\x80\0"), "x").await;
    assert_eq!(closed_with(&mut peer).await, Some(ReplyCode::INTERNAL_ERROR));
}

/// More levels than the broker looks into.
const DEEP: usize = 65;

/// Values inside each other, each in what opens the next, and these bytes in the innermost.
fn nested(opening: &[u8], depth: usize, innermost: &[u8]) -> Vec<u8> {
    let width = opening.len() + 4;
    let level = |inside: usize| {
        let length = u32::try_from(inside * width + innermost.len()).unwrap();
        [opening, &length.to_be_bytes()].concat()
    };
    let levels = (0..depth).rev().flat_map(level).collect::<Vec<_>>();
    // Only the outermost value of an array has a name.
    let name: &[u8] = if opening.len() == 1 { b"\x01n" } else { b"" };
    [name, &levels, innermost].concat()
}

fn deep_array() -> Vec<u8> {
    nested(b"A", DEEP, b"")
}

const EXPIRATION: u16 = 1 << 8;
const MESSAGE_ID: u16 = 1 << 7;
const USER_ID: u16 = 1 << 4;

/// Properties with a deep header, another flag, and these bytes behind the headers.
fn with_deep_headers(flag: u16, behind: &[u8]) -> RawProperties {
    let mut bytes = headers(&deep_array()).as_bytes().to_vec();
    let flags = u16::from_be_bytes([bytes[0], bytes[1]]) | flag;
    bytes[..2].copy_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(behind);
    RawProperties::new(bytes.into())
}

pub(crate) async fn odd_properties_that_can_be_read_are_taken(place: &Place) {
    let same: Option<&[u8]> = None;
    let cases = [
        ("no flags", raw(b"\0\0"), same),
        ("a text that is none", raw(b"\x80\0\x01\xff"), same),
        ("a name that is no text", headers(b"\x01\xffV"), same),
        ("no name", headers(b"\0V"), same),
        ("arrays in arrays", headers(&nested(b"A", 20_000, b"")), same),
        ("tables in tables", headers(&nested(b"\x01nF", 15_000, b"")), same),
        ("another true", headers(b"\x01kt\x02"), Some(b"\x20\0\0\0\0\x04\x01kt\x01")),
    ];
    for (what, properties, in_4_3) in cases {
        let mut peer = place.publisher().await;
        peer.send_content(1, &publish(), &properties, "x").await;
        peer.expect::<basic::Ack>(1).await;
        peer.send(1, &basic::Get { queue: Q, no_ack: true }).await;
        let got = peer.expect_content::<basic::GetOk<'_>>(1).await;
        let changed = in_4_3.filter(|_| !place.is_3_10());
        let expected = changed.unwrap_or(properties.as_bytes());
        assert!(got.properties.as_bytes() == expected, "{what}: {:?}", got.properties);
    }
}

pub(crate) async fn deep_headers_hide_no_other_property(place: &Place) {
    for refused in
        [with_deep_headers(USER_ID, b"\x05admin"), with_deep_headers(EXPIRATION, b"\x04soon")]
    {
        let mut peer = place.publisher().await;
        peer.send_content(1, &publish(), &refused, "x").await;
        let close = peer.expect::<channel::Close<'_>>(1).await;
        assert_eq!(close.reply_code, ReplyCode::PRECONDITION_FAILED, "{}", close.reply_text);
        assert_eq!(place.count(Q).await, 0);
    }
    let mut peer = place.publisher().await;
    peer.send_content(1, &publish(), &with_deep_headers(EXPIRATION, b"\x010"), "x").await;
    peer.expect::<basic::Ack>(1).await;
    peer.send(1, &basic::Get { queue: Q, no_ack: true }).await;
    peer.expect::<basic::GetEmpty>(1).await;

    let mut peer = place.publisher().await;
    declare(&mut peer, 1, OTHER, "classic").await;
    let blind =
        headers(&[&deep_array(), b"\x03BCCA\0\0\0\x0aS\0\0\0\x05other".as_slice()].concat());
    peer.send_content(1, &publish(), &blind, "x").await;
    peer.expect::<basic::Ack>(1).await;
    for queue in [Q, OTHER] {
        peer.send(1, &basic::Get { queue, no_ack: true }).await;
        let got = peer.expect_content::<basic::GetOk<'_>>(1).await;
        assert!(got.properties.as_bytes() == headers(&deep_array()).as_bytes());
    }
}

pub(crate) async fn an_exchange_that_is_missing_is_told_before_malformed_properties(place: &Place) {
    let mut peer = place.client().await;
    let missing =
        basic::Publish { exchange: ShortStr::from_static("missing"), ..Default::default() };
    peer.send_content(1, &missing, &raw(b"\x80\0"), "x").await;
    let close = peer.expect::<channel::Close<'_>>(1).await;
    assert_eq!(close.reply_code, ReplyCode::NOT_FOUND);
}

/// A message grows by dying, and takes the size of frames of its publisher's connection along.
pub(crate) async fn a_header_that_is_larger_than_a_frame_is_delivered(place: &Place) {
    const DEAD: ShortStr<'static> = ShortStr::from_static("dead");
    let mut peer = place.client().await;
    declare(&mut peer, 1, DEAD, "classic").await;
    let arguments = Table::from_pairs([
        ("x-message-ttl", 0.into()),
        ("x-dead-letter-exchange", "".into()),
        ("x-dead-letter-routing-key", "dead".into()),
    ]);
    let arguments = arguments.unwrap();
    peer.send(1, &queue::Declare { queue: Q, arguments, ..Default::default() }).await;
    peer.expect::<queue::DeclareOk<'_>>(1).await;
    let text = "x".repeat(131_000);
    let table = Table::from_pairs([("k", text.as_str().into())]).unwrap();
    let properties = Properties { headers: Some(table), ..Properties::default() };
    for _ in 0..3 {
        peer.send_content(1, &publish(), &properties, "body").await;
    }
    eventually(SOON, "three dead letters", async || place.count(DEAD).await == 3).await;

    peer.accept_frames_of_any_size();
    peer.send(1, &basic::Get { queue: DEAD, no_ack: true }).await;
    let got = peer.expect_content::<basic::GetOk<'_>>(1).await;
    assert!(got.properties.as_bytes().len() > 131_072);
    assert_eq!(got.properties.header("k").unwrap().as_str(), Some(text.as_str()));
    assert_eq!(got.body, "body");
    for no_ack in [false, true] {
        let consume = basic::Consume { queue: DEAD, no_ack, ..Default::default() };
        peer.send(1, &basic::Qos { prefetch_count: 1, ..Default::default() }).await;
        peer.expect::<basic::QosOk>(1).await;
        peer.send(1, &consume).await;
        let consumer_tag = peer.expect::<basic::ConsumeOk<'_>>(1).await.consumer_tag;
        let delivered = peer.expect_content::<basic::Deliver<'_>>(1).await;
        assert!(delivered.properties.header("x-death").is_some());
        peer.send(1, &basic::Cancel { consumer_tag, nowait: false }).await;
        peer.expect::<basic::CancelOk<'_>>(1).await;
    }
}

/// 4096 octets in 3.10 and 8192 in 4.3, without those of framing.
pub(crate) async fn a_handshake_takes_frames_up_to_a_limit(place: &Place) {
    let limit = if place.is_3_10() { 4096 } else { 8192 };
    for (size, is_taken) in [(limit, true), (limit + 1, false)] {
        let mut peer = Peer::connect(&place.addr).await;
        peer.send_bytes(&PROTOCOL_HEADER).await;
        peer.expect::<connection::Start<'_>>(0).await;
        let start_ok = |padding: usize| connection::StartOk {
            client_properties: Table::from_pairs([("padding", "x".repeat(padding).into())])
                .unwrap(),
            mechanism: ShortStr::from_static("PLAIN"),
            response: Secret::new(&b"\0guest\0guest"[..]),
            locale: ShortStr::from_static("en_US"),
        };
        // Class and method; a table with a name, a type and a text; and three more values. Each has its length before it.
        let others = 4 + (4 + 1 + 7 + 1 + 4) + (1 + 5) + (4 + 12) + (1 + 5);
        peer.send(0, &start_ok(size - others)).await;
        if is_taken {
            peer.expect::<connection::Tune>(0).await;
        } else {
            // RabbitMQ just hangs up.
            let closed = closed_with(&mut peer).await;
            assert!(matches!(closed, None | Some(ReplyCode::FRAME_ERROR)), "{closed:?}");
        }
    }
}

/// With room for one message at a time, all queues of a channel have their turn. (In 4.3 each consumer has that room.)
pub(crate) async fn a_prefetch_for_all_is_shared_fairly_by_queues(place: &Place) {
    const MESSAGES: u32 = 100;
    let queues = ["one", "two", "three"].map(ShortStr::from_static);
    let mut peer = place.client().await;
    for name in &queues {
        declare(&mut peer, 1, name.clone(), "classic").await;
        let publish = basic::Publish { routing_key: name.clone(), ..Default::default() };
        for _ in 0..MESSAGES {
            peer.send_content(1, &publish, &Properties::default(), "x").await;
        }
    }
    let qos = basic::Qos { prefetch_count: 1, global: true, ..Default::default() };
    peer.send(1, &qos).await;
    peer.expect::<basic::QosOk>(1).await;
    for queue in &queues {
        let consume = basic::Consume { queue: queue.clone(), nowait: true, ..Default::default() };
        peer.send(1, &consume).await;
    }
    for _ in 0..MESSAGES - 1 {
        let delivery = peer.expect_content::<basic::Deliver<'_>>(1).await;
        let delivery_tag = delivery.method.delivery_tag;
        peer.send(1, &basic::Ack { delivery_tag, multiple: false }).await;
    }
    for name in &queues {
        assert!(place.count(name.clone()).await < MESSAGES, "nothing of {name} was delivered");
    }
}

/// A client with a transaction on channel 1 that published to `q` and through `f` to `q` and `other`; and the channel 2.
async fn in_transaction(place: &Place, kind: &str) -> Peer {
    let mut peer = place.client().await;
    open_channel(&mut peer, 2).await;
    let fanout = ShortStr::from_static("f");
    let declare_exchange = exchange::Declare {
        exchange: fanout.clone(),
        kind: ShortStr::from_static("fanout"),
        ..Default::default()
    };
    peer.send(2, &declare_exchange).await;
    peer.expect::<exchange::DeclareOk>(2).await;
    for (name, kind) in [(Q, kind), (OTHER, "classic")] {
        declare(&mut peer, 2, name.clone(), kind).await;
        let bind = queue::Bind { queue: name, exchange: fanout.clone(), ..Default::default() };
        peer.send(2, &bind).await;
        peer.expect::<queue::BindOk>(2).await;
    }
    peer.send(1, &tx::Select {}).await;
    peer.expect::<tx::SelectOk>(1).await;
    let none = Properties::default();
    let other = basic::Publish { routing_key: OTHER, ..Default::default() };
    peer.send_content(1, &other, &none, "first").await;
    let both = basic::Publish { exchange: fanout, mandatory: true, ..Default::default() };
    peer.send_content(1, &both, &none, "to both").await;
    peer.send_content(1, &other, &none, "last").await;
    peer.send(1, &basic::Qos::default()).await;
    peer.expect::<basic::QosOk>(1).await;
    peer.send(2, &queue::Delete { queue: Q, ..Default::default() }).await;
    peer.expect::<queue::DeleteOk>(2).await;
    peer
}

async fn delete_all(place: &Place) {
    let mut peer = place.client().await;
    for queue in [Q, OTHER, ACKED] {
        peer.send(1, &queue::Delete { queue, ..Default::default() }).await;
        peer.expect::<queue::DeleteOk>(1).await;
    }
}

/// 3.10 passes over the queue. 4.3 breaks off: what comes before is committed, and the rest is lost with the connection. So are
/// acks: their messages go back to their queues.
pub(crate) async fn a_commit_to_a_queue_that_is_gone(place: &Place) {
    for kind in ["classic", "quorum"] {
        let mut peer = in_transaction(place, kind).await;
        declare(&mut peer, 2, ACKED, kind).await;
        let publish = basic::Publish { routing_key: ACKED, ..Default::default() };
        peer.send_content(2, &publish, &Properties::default(), "to be acked").await;
        eventually(SOON, "the message", async || place.count(ACKED).await == 1).await;
        peer.send(1, &basic::Get { queue: ACKED, no_ack: false }).await;
        let got = peer.expect_content::<basic::GetOk<'_>>(1).await;
        let delivery_tag = got.method.delivery_tag;
        peer.send(1, &basic::Ack { delivery_tag, multiple: false }).await;
        peer.send(1, &tx::Commit {}).await;
        let (committed, acked) = if place.is_3_10() {
            peer.expect::<tx::CommitOk>(1).await;
            (3, true)
        } else {
            let close = peer.expect::<connection::Close<'_>>(0).await;
            assert_eq!(close.reply_code, ReplyCode::RESOURCE_ERROR);
            assert_eq!((close.class_id, close.method_id), (90, 20));
            let text = "RESOURCE_ERROR - failed to deliver message: {not_found,";
            assert!(close.reply_text.to_string().starts_with(text), "{}", close.reply_text);
            (1, false)
        };
        assert_eq!(place.count(OTHER).await, committed, "{kind}");
        eventually(SOON, "the message to be acked or back", async || {
            place.count(ACKED).await == u32::from(!acked)
        })
        .await;
        delete_all(place).await;
    }
}

/// 3.10 goes by the name. In 4.3 a classic queue is another one then, and a quorum queue is the same.
pub(crate) async fn a_commit_to_a_queue_that_was_declared_again(place: &Place) {
    for kind in ["classic", "quorum"] {
        let mut peer = in_transaction(place, kind).await;
        declare(&mut peer, 2, Q, kind).await;
        peer.send(1, &tx::Commit {}).await;
        let is_taken = place.is_3_10() || kind == "quorum";
        if is_taken {
            peer.expect::<tx::CommitOk>(1).await;
        } else {
            let close = peer.expect::<channel::Close<'_>>(1).await;
            assert_eq!(close.reply_code, ReplyCode::PRECONDITION_FAILED);
            assert!(close.reply_text.to_string().ends_with("partial tx completion"));
        }
        assert_eq!(place.count(Q).await, u32::from(is_taken), "{kind}");
        assert_eq!(place.count(OTHER).await, 3, "{kind}");
        delete_all(place).await;
    }
}
