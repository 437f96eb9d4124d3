//! The codec against a real RabbitMQ: what it sends is understood, what we send comes back.

use leveret_testkit::peer::{Peer, Received};
use leveret_testkit::rabbitmq::{self, Vhost};
use leveret_wire::method::{basic, channel, confirm, connection, queue};
use leveret_wire::{
    Array, Content, Fault, LongStr, MAX_DEPTH, Method, Properties, RawProperties, ReplyCode,
    ShortStr, Table, Value,
};

const QUEUE: ShortStr<'static> = ShortStr::from_static("q");

/// A connection with channel 1 open, an empty queue `q` and confirms on.
async fn channel(vhost: &Vhost) -> Peer {
    let mut peer = connect(vhost).await;
    peer.send(1, &channel::Open {}).await;
    peer.expect::<channel::OpenOk>(1).await;
    peer.send(1, &queue::Declare { queue: QUEUE, durable: true, ..Default::default() }).await;
    let declared = peer.expect::<queue::DeclareOk<'_>>(1).await;
    assert_eq!((declared.queue, declared.message_count), (QUEUE, 0));
    peer.send(1, &confirm::Select { nowait: false }).await;
    peer.expect::<confirm::SelectOk>(1).await;
    peer
}

async fn connect(vhost: &Vhost) -> Peer {
    let mut peer = Peer::connect(vhost.broker().addr()).await;
    let start = peer.open_connection(vhost.name(), "guest", "guest").await;
    assert_eq!(start.server_properties.get("product").unwrap().as_str(), Some("RabbitMQ"));
    let capabilities = start.server_properties.get("capabilities").unwrap();
    let confirms = capabilities.as_table().unwrap().get("publisher_confirms");
    assert_eq!(confirms, Some(Value::Bool(true)));
    peer
}

fn publish() -> basic::Publish<'static> {
    basic::Publish { routing_key: QUEUE, mandatory: true, ..Default::default() }
}

/// Sends a message through the queue and gives back what comes out.
async fn through(
    peer: &mut Peer,
    properties: &RawProperties,
    body: Vec<u8>,
) -> Content<basic::GetOk<'static>> {
    peer.send_content(1, &publish(), properties, body).await;
    peer.expect::<basic::Ack>(1).await;
    peer.send(1, &basic::Get { queue: QUEUE, no_ack: true }).await;
    peer.expect_content(1).await
}

/// Every type that RabbitMQ reads, at its edges, and nested. Sorted by name, because RabbitMQ 4.3 sorts headers (3.10
/// passes them on as they are).
fn every_type() -> Table<'static> {
    let deep = Table::from_pairs([("a", Value::Void)]).unwrap();
    let list =
        Array::from_values([1.into(), "x".into(), deep.clone().into(), Value::Void]).unwrap();
    Table::from_pairs([
        ("", "an empty name".into()),
        ("array", Value::Array(list)),
        ("bool", true.into()),
        ("bytes", Value::Bytes((&b"\x00\x01"[..]).into())),
        ("decimal", Value::Decimal { scale: 255, value: u32::MAX }),
        ("f32", 1.5e10f32.into()),
        ("f64", (-2.5e-300f64).into()),
        ("i16", i16::MIN.into()),
        ("i32", i32::MIN.into()),
        ("i64", i64::MIN.into()),
        ("i8", i8::MIN.into()),
        ("not text", LongStr::from(&b"\xff\xfe\x00"[..]).into()),
        ("table", deep.into()),
        ("text", "grüße".into()),
        ("timestamp", Value::Timestamp(u64::MAX)),
        ("u16", u16::MAX.into()),
        ("u32", u32::MAX.into()),
        ("u8", u8::MAX.into()),
        ("void", Value::Void),
    ])
    .unwrap()
}

#[tokio::test]
async fn a_message_with_all_properties_and_every_field_type_comes_back_byte_for_byte() {
    let vhost = rabbitmq::vhost().await;
    let mut peer = channel(&vhost).await;
    let short = ShortStr::from_static;
    let properties = Properties {
        content_type: Some(short("text/plain")),
        content_encoding: Some(short("identity")),
        headers: Some(every_type()),
        delivery_mode: Some(2),
        priority: Some(9),
        correlation_id: Some(short("correlation")),
        reply_to: Some(short("reply")),
        expiration: Some(short("60000")),
        message_id: Some(short("id")),
        timestamp: Some(1_700_000_000),
        kind: Some(short("kind")),
        user_id: Some(short("guest")),
        app_id: Some(ShortStr::from_bytes(&b"not \xff utf-8"[..]).unwrap()),
        cluster_id: Some(short("cluster")),
    };
    let sent = RawProperties::from(&properties);
    let content = through(&mut peer, &sent, b"body".to_vec()).await;
    assert_eq!(content.properties.get(), properties);
    assert_eq!(content.properties, sent);
    assert_eq!(content.body, "body");
    assert_eq!(content.method.routing_key, QUEUE);
}

#[tokio::test]
async fn bodies_of_all_sizes_come_back_whole() {
    let vhost = rabbitmq::vhost().await;
    let mut peer = channel(&vhost).await;
    let none = RawProperties::default();
    for size in [0, 1, 4095, 4096, 131_063, 131_064, 131_065, 262_128, 3_000_000] {
        let body: Vec<u8> = (0..size).map(|n| (n % 251) as u8).collect();
        let content = through(&mut peer, &none, body.clone()).await;
        assert!(content.body == body, "a body of {size} bytes came back as {}", content.body.len());
    }
}

#[tokio::test]
async fn an_unroutable_message_is_returned_before_it_is_acked() {
    let vhost = rabbitmq::vhost().await;
    let mut peer = channel(&vhost).await;
    let lost = basic::Publish { routing_key: ShortStr::from_static("nowhere"), ..publish() };
    peer.send_content(1, &lost, &Properties::default(), "lost").await;
    let returned = peer.expect_content::<basic::Return<'_>>(1).await;
    assert_eq!(returned.method.reply_code, ReplyCode::NO_ROUTE);
    assert_eq!(returned.body, "lost");
    assert_eq!(peer.expect::<basic::Ack>(1).await.delivery_tag, 1);
}

/// Why a table refuses such numbers: the broker cannot read them, and takes the whole connection down.
#[tokio::test]
async fn a_number_that_is_not_finite_costs_the_connection() {
    let vhost = rabbitmq::vhost().await;
    let mut peer = channel(&vhost).await;
    let header = [b"\x01nd".as_slice(), &f64::NAN.to_be_bytes()].concat();
    let encoded = [b"\x20\x00\x00\x00\x00\x0b".as_slice(), &header].concat();
    let properties = RawProperties::new(encoded.into());
    assert_eq!(properties.fault().unwrap().fault(), &Fault::NotFinite);
    peer.send_content(1, &publish(), &properties, "x").await;
    let close = peer.expect::<connection::Close<'_>>(0).await;
    assert_eq!(close.reply_code, ReplyCode::INTERNAL_ERROR);
}

/// What is odd and passes through RabbitMQ must not cost a consumer its connection: it would come again and again.
#[tokio::test]
async fn odd_properties_that_rabbitmq_delivers_are_read_or_at_least_kept() {
    let vhost = rabbitmq::vhost().await;
    let mut peer = channel(&vhost).await;

    // A flag of no property, and a content type.
    let odd_flag = RawProperties::new((&b"\x80\x02\x01a"[..]).into());
    let content = through(&mut peer, &odd_flag, b"1".to_vec()).await;
    assert_eq!(content.properties.get().content_type.unwrap(), "a");

    // Arrays nested deeper than we read.
    let depth = MAX_DEPTH + 36;
    let arrays = (0..depth as u32)
        .rev()
        .flat_map(|inside| [b"A".as_slice(), &(inside * 5).to_be_bytes()].concat());
    let field: Vec<u8> = b"\x01n".iter().copied().chain(arrays).collect();
    let length = u32::try_from(field.len()).unwrap().to_be_bytes();
    let too_deep = RawProperties::new([b"\x20\x00".as_slice(), &length, &field].concat().into());
    let content = through(&mut peer, &too_deep, b"2".to_vec()).await;
    assert_eq!(content.properties.fault().unwrap().fault(), &Fault::TooDeep);
    assert_eq!(content.properties.as_bytes(), too_deep.as_bytes());
    assert_eq!(content.body, "2");
}

#[tokio::test]
async fn what_is_refused_says_which_method_was_at_fault() {
    let vhost = rabbitmq::vhost().await;
    let mut peer = channel(&vhost).await;
    let missing = queue::Declare {
        queue: "missing".try_into().unwrap(),
        passive: true,
        ..Default::default()
    };
    peer.send(1, &missing).await;
    let close = peer.expect::<channel::Close<'_>>(1).await;
    assert_eq!(close.reply_code, ReplyCode::NOT_FOUND);
    assert_eq!(Method::name_of(close.class_id, close.method_id), Some("queue.declare"));
    peer.send(1, &channel::CloseOk {}).await;

    // The codec refuses what the broker refuses: a frame that does not end as it should.
    peer.send_bytes(b"\x01\x00\x01\x00\x00\x00\x04\x00\x14\x00\x0a\x00").await;
    match peer.receive().await {
        Received::Method(0, Method::ConnectionClose(close)) => {
            assert_eq!(close.reply_code, ReplyCode::FRAME_ERROR);
        }
        other => panic!("{other:?}"),
    }
}
