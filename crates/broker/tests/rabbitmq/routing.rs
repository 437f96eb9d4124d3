//! Who gets a message, on a real RabbitMQ: what the unit tests of `exchange` are compared with is right.

use std::fmt::Debug;
use std::time::Duration;

use leveret::amqp::{
    Array, Channel, Confirm, Connection, ConsumeOptions, ErrorKind, ExchangeOptions, Options,
    Properties, Publish, QueueOptions, ReplyCode, Table, Value,
};
use leveret_broker::Profile;
use leveret_testkit::peer::Peer;
use leveret_testkit::rabbitmq::{self, Vhost};
use leveret_wire::method::{basic, channel, connection, queue};
use leveret_wire::{RawProperties, ShortStr};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use tokio::time::timeout;

use crate::routing::{self, headers_match, table, topic_matches};

const SOON: Duration = Duration::from_secs(60);
const BINDINGS: usize = 200;
const MESSAGES: usize = 300;
const NO_ARGUMENTS: Table<'static> = Table::new();

async fn connect(vhost: &Vhost) -> (Connection, Channel<Confirm>) {
    let options = Options::from_uri(&vhost.url()).unwrap();
    let connection = Connection::open(&options).await.unwrap();
    let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
    (connection, channel)
}

fn version(connection: &Connection) -> String {
    let version = connection.server_properties().get("version").unwrap();
    version.as_str().unwrap().to_owned()
}

fn profile(connection: &Connection) -> Profile {
    match version(connection).starts_with("3.") {
        true => Profile::RabbitMq3_10,
        false => Profile::RabbitMq4_3,
    }
}

fn sample<T: Debug>(strategy: impl Strategy<Value = T>, count: usize) -> Vec<T> {
    let mut runner = TestRunner::default();
    (0..count).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect()
}

/// An exchange `x`, and as many queues, `0` and up.
async fn declare(channel: &Channel<Confirm>, kind: &str, queues: usize) {
    channel.declare_exchange("x", kind, ExchangeOptions::default()).await.unwrap();
    for n in 0..queues {
        let options = QueueOptions { durable: false, exclusive: true, ..Default::default() };
        channel.declare_queue(&n.to_string(), options).await.unwrap();
    }
}

/// Sends a message to `x`, with its number as body.
async fn publish(channel: &Channel<Confirm>, number: usize, key: &str, headers: Table<'_>) {
    let properties = Properties { headers: Some(headers), ..Default::default() };
    let body = number.to_string().into();
    let publish =
        Publish { exchange: "x", routing_key: key, properties, body, ..Default::default() };
    drop(channel.publish(&publish).await.unwrap());
}

/// The numbers of the messages in a queue, once all have arrived.
async fn messages(channel: &Channel<Confirm>, queue: usize) -> Vec<usize> {
    channel.confirmed(SOON).await.unwrap();
    let queue = queue.to_string();
    let count = channel.inspect_queue(&queue).await.unwrap().messages;
    let options = ConsumeOptions { auto_ack: true, ..Default::default() };
    let mut consumer = channel.consume(&queue, options).await.unwrap();
    let mut messages = Vec::new();
    for _ in 0..count {
        let delivery = timeout(SOON, consumer.next()).await.expect("a delivery in time");
        let body = delivery.unwrap().unwrap().body().clone();
        messages.push(std::str::from_utf8(&body).unwrap().parse().unwrap());
    }
    messages
}

#[tokio::test]
async fn a_topic_exchange_routes_as_the_reference_does() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = connect(&vhost).await;
    let hashes = match profile(&connection) {
        Profile::RabbitMq3_10 => usize::MAX,
        Profile::RabbitMq4_3 => 2,
    };
    let patterns = sample(routing::patterns(hashes), BINDINGS);
    let keys = sample(routing::keys(), MESSAGES);
    declare(&channel, "topic", BINDINGS).await;
    for (n, pattern) in patterns.iter().enumerate() {
        channel.bind_queue(&n.to_string(), "x", pattern, &NO_ARGUMENTS).await.unwrap();
    }
    for (n, key) in keys.iter().enumerate() {
        publish(&channel, n, key, Table::new()).await;
    }
    for (n, pattern) in patterns.iter().enumerate() {
        let matches = |n: &usize| topic_matches(pattern.as_bytes(), keys[*n].as_bytes());
        let expected: Vec<_> = (0..MESSAGES).filter(matches).collect();
        assert_eq!(messages(&channel, n).await, expected, "pattern {pattern:?}, keys {keys:?}");
    }
}

#[tokio::test]
async fn a_headers_exchange_routes_as_the_reference_does() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = connect(&vhost).await;
    let profile = profile(&connection);
    let bindings = sample(routing::arguments(), BINDINGS);
    let headers = sample(routing::headers(), MESSAGES);
    declare(&channel, "headers", BINDINGS).await;
    for (n, arguments) in bindings.iter().enumerate() {
        channel.bind_queue(&n.to_string(), "x", "", &table(arguments)).await.unwrap();
    }
    for (n, headers) in headers.iter().enumerate() {
        publish(&channel, n, "", table(headers)).await;
    }
    for (n, arguments) in bindings.iter().enumerate() {
        let routed = messages(&channel, n).await;
        for (number, headers) in headers.iter().enumerate() {
            let expected = headers_match(arguments, headers, profile);
            let found = routed.contains(&number);
            assert_eq!(found, expected, "arguments {arguments:?}, headers {headers:?}");
        }
    }
}

#[tokio::test]
async fn bindings_are_told_apart_by_key_destination_and_arguments() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = connect(&vhost).await;
    let table = |fields: &routing::Fields| table(fields);
    for kind in ["direct", "fanout", "topic", "headers"] {
        declare(&channel, kind, 1).await;
        let nested = |tag: &[u8]| {
            let inner = [b"\x01k", tag, &7u64.to_be_bytes()].concat();
            let length = (inner.len() as u32).to_be_bytes();
            let bytes = [b"\x01aF", &length[..], &inner].concat();
            Table::decode(&bytes).unwrap().into_owned()
        };
        let array = |n: i32| Value::Array(Array::from_values([n.into(), 2.into()]).unwrap());
        let different = [
            table(&vec![]),
            table(&vec![("a", 1i32.into()), ("b", 2i32.into())]),
            table(&vec![("a", 1i64.into()), ("b", 2i32.into())]),
            table(&vec![("a", 1f64.into())]),
            table(&vec![("a", "1".into())]),
            table(&vec![("a", Value::Bytes((&b"1"[..]).into()))]),
            table(&vec![("a", 1i32.into()), ("a", 2i32.into())]),
            table(&vec![("a", 2i32.into()), ("a", 1i32.into())]),
            table(&vec![("a", array(1))]),
            table(&vec![("a", array(2))]),
            nested(b"l"),
        ];
        let the_same = [
            table(&vec![("b", 2i32.into()), ("a", 1i32.into())]),
            table(&vec![("b", 2i32.into()), ("a", 1i64.into())]),
            nested(b"L"),
        ];
        for arguments in different.iter().chain(&the_same) {
            channel.bind_queue("0", "x", "k", arguments).await.unwrap();
        }
        assert_eq!(count_bindings(&vhost).await, different.len(), "{kind}");
        // As long as one is left, messages come.
        for arguments in &different[1..] {
            channel.unbind_queue("0", "x", "k", arguments).await.unwrap();
        }
        assert_eq!(count_bindings(&vhost).await, 1, "{kind}");
        publish(&channel, 7, "k", Table::new()).await;
        assert_eq!(messages(&channel, 0).await, [7], "{kind}");
        channel.unbind_queue("0", "x", "k", &NO_ARGUMENTS).await.unwrap();
        publish(&channel, 7, "k", Table::new()).await;
        assert!(messages(&channel, 0).await.is_empty(), "{kind}");
        channel.delete_exchange("x", Default::default()).await.unwrap();
    }
}

async fn count_bindings(vhost: &Vhost) -> usize {
    let path = ["exchanges", vhost.name(), "x", "bindings", "source"];
    let bindings = vhost.broker().management().get(&path).await.unwrap();
    bindings.as_array().unwrap().len()
}

#[tokio::test]
async fn what_cannot_be_bound_is_refused_in_these_words() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = connect(&vhost).await;
    declare(&channel, "headers", 1).await;
    let filled = Value::Array(Array::from_values(["a".into(), 1.into()]).unwrap());
    let nested = Value::Table(table(&vec![("k", 1i64.into())]));
    let japanese = match profile(&connection) {
        Profile::RabbitMq3_10 => "<<230,151,165,230,156,172>>",
        Profile::RabbitMq4_3 => "<<\"日本\"/utf8>>",
    };
    let strings = [
        ("none", "<<\"none\">>"),
        ("", "<<>>"),
        ("ALL", "<<\"ALL\">>"),
        ("a\n\"\\ \x1b", "<<\"a\\n\\\"\\\\ \\e\">>"),
        ("\x01\x02", "<<1,2>>"),
        ("日本", japanese),
    ];
    let others: [(Value<'_>, &str, &str); _] = [
        (Value::Bytes((&b"all"[..]).into()), "binary", "<<\"all\">>"),
        (true.into(), "bool", "true"),
        (Value::Void, "void", "undefined"),
        (1i8.into(), "byte", "1"),
        (1u8.into(), "unsignedbyte", "1"),
        (1i16.into(), "short", "1"),
        (1u16.into(), "unsignedshort", "1"),
        (1i32.into(), "signedint", "1"),
        (1u32.into(), "unsignedint", "1"),
        (1i64.into(), "long", "1"),
        (1.5f32.into(), "float", "1.5"),
        (1e22.into(), "double", "1.0e22"),
        (Value::Timestamp(5), "timestamp", "5"),
        (Value::Decimal { scale: 2, value: 314 }, "decimal", "{2,314}"),
        (Value::Array(Array::new()), "array", "[]"),
        (filled, "array", "[{longstr,<<\"a\">>},{signedint,1}]"),
        (nested, "table", "[{<<\"k\">>,long,1}]"),
    ];
    let strings = strings.map(|(value, shown)| {
        let expected = "expected all, any, all-with-x, or any-with-x";
        (Value::from(value), format!("Invalid x-match field value {shown}; {expected}"))
    });
    let others = others.map(|(value, kind, shown)| {
        (value, format!("Invalid x-match field type {kind} (value {shown}); expected longstr"))
    });
    for (value, words) in strings.into_iter().chain(others) {
        let arguments = Table::from_pairs([("x-match", value)]).unwrap();
        let text = refusal(&connection, "", &arguments).await;
        assert!(text.ends_with(&words), "{words}: {text}");
        // Unbinding is not.
        channel.unbind_queue("0", "x", "", &arguments).await.unwrap();
    }

    channel.delete_exchange("x", Default::default()).await.unwrap();
    declare(&channel, "topic", 0).await;
    channel.bind_queue("0", "x", "#.a.#", &NO_ARGUMENTS).await.unwrap();
    channel.unbind_queue("0", "x", "#.a.#.b.#", &NO_ARGUMENTS).await.unwrap();
    match version(&connection).starts_with("4.3") {
        true => {
            let text = refusal(&connection, "#.a.#.b.#", &NO_ARGUMENTS).await;
            let words = "Topic binding key '#.a.#.b.#' uses 3 '#' wildcards, at most 2 are allowed";
            assert!(text.ends_with(words), "{text}");
        }
        false => channel.bind_queue("0", "x", "#.a.#.b.#", &NO_ARGUMENTS).await.unwrap(),
    }
}

/// What RabbitMQ says when queue `0` is bound like this.
async fn refusal(connection: &Connection, key: &str, arguments: &Table<'_>) -> String {
    let channel = connection.open_channel().await.unwrap();
    let error = channel.bind_queue("0", "x", key, arguments).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ChannelClosed(ReplyCode::PRECONDITION_FAILED));
    error.to_string()
}

#[tokio::test]
async fn a_key_that_is_no_text_may_be_published_with_but_not_bound_with() {
    let vhost = rabbitmq::vhost().await;
    let mut peer = open(&vhost).await;
    let queue = ShortStr::from_static("q");
    let exchange = ShortStr::from_static("amq.topic");
    peer.send(1, &queue::Declare { queue: queue.clone(), exclusive: true, ..Default::default() })
        .await;
    peer.expect::<queue::DeclareOk<'_>>(1).await;
    let bind = queue::Bind {
        queue: queue.clone(),
        exchange: exchange.clone(),
        routing_key: ShortStr::from_static("*.a"),
        ..Default::default()
    };
    peer.send(1, &bind).await;
    peer.expect::<queue::BindOk>(1).await;
    let keys = [&b"\xff.a"[..], b"\xc3.a", b"\xff.\xff.a", b"\xff", b"\x00.a"];
    for key in keys {
        let routing_key = ShortStr::from_bytes(key).unwrap();
        let publish =
            basic::Publish { exchange: exchange.clone(), routing_key, ..Default::default() };
        peer.send_content(1, &publish, &RawProperties::default(), "x").await;
    }
    peer.send(1, &queue::Purge { queue, ..Default::default() }).await;
    let expected = keys.into_iter().filter(|key| topic_matches(b"*.a", key)).count();
    assert_eq!(peer.expect::<queue::PurgeOk>(1).await.message_count, expected as u32);

    let bind = queue::Bind { routing_key: ShortStr::from_bytes(&b"\xff"[..]).unwrap(), ..bind };
    peer.send(1, &bind).await;
    let close = peer.expect::<connection::Close<'_>>(0).await;
    assert_eq!(close.reply_code, ReplyCode::FRAME_ERROR);
    assert_eq!(close.reply_text, "FRAME_ERROR - Malformed UTF-8 in shortstr");
}

/// A connection byte by byte, with channel 1 open.
async fn open(vhost: &Vhost) -> Peer {
    let mut peer = Peer::connect(vhost.broker().addr()).await;
    peer.open_connection(vhost.name(), "guest", "guest").await;
    peer.send(1, &channel::Open {}).await;
    peer.expect::<channel::OpenOk>(1).await;
    peer
}
