//! Publishing to a real RabbitMQ: every outcome the right one, and every misuse with its cause.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use leveret::amqp::{
    Array, Channel, Confirm, Confirmation, Connection, ConsumeOptions, DeleteExchange, DeleteQueue,
    Error, ErrorKind, ExchangeOptions, GetOptions, Outcome, Properties, Publish, QueueOptions,
    ReplyCode, Table, Tally, Value,
};
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{self, Version};
use tokio::time::timeout;

use crate::support::rabbit::{
    Dice, SOON, confirm_channel, connect, fill, next, options, queue_with, to, until_queue_has,
    with_queue, with_queue_and_channels,
};

async fn outcome(confirmation: Confirmation) -> Outcome {
    timeout(SOON, confirmation).await.expect("an outcome in time")
}

/// Publishes so many messages to a queue, many at a time, and counts what became of them.
async fn publish_and_count(channel: &Channel<Confirm>, queue: &str, count: u64) -> Tally {
    let mut tally = Tally::default();
    let mut window = VecDeque::new();
    for number in 0..count {
        window.push_back(channel.publish(&to(queue, number.to_string())).await.unwrap());
        if window.len() == 300 || number + 1 == count {
            for confirmation in window.drain(..) {
                match outcome(confirmation).await {
                    Outcome::Acked => tally.acked += 1,
                    Outcome::Nacked => tally.nacked += 1,
                    Outcome::Returned(_) => tally.returned += 1,
                    Outcome::Lost(error) => panic!("{error}"),
                }
            }
        }
    }
    assert_eq!(channel.confirmed(SOON).await.unwrap(), tally);
    tally
}

#[tokio::test]
async fn what_a_full_queue_refuses_is_nacked_and_the_rest_is_in_it() {
    const COUNT: u64 = 5000;
    let vhost = rabbitmq::vhost().await;
    let connection = connect(&vhost).await;
    for kind in ["classic", "quorum"] {
        let channel = confirm_channel(&connection).await;
        let options = queue_with([
            ("x-queue-type", kind.into()),
            ("x-max-length", 1000.into()),
            ("x-overflow", "reject-publish".into()),
        ]);
        channel.declare_queue(kind, options).await.unwrap();
        let tally = publish_and_count(&channel, kind, COUNT).await;
        assert_eq!((tally.acked + tally.nacked, tally.returned), (COUNT, 0), "{kind}");
        // A quorum queue finds out a little late that it is full.
        assert!(tally.acked >= 1000 && tally.nacked > 0, "{kind}: {tally:?}");
        until_queue_has(&channel, kind, tally.acked as u32, 0).await;
    }
}

#[tokio::test]
async fn a_queue_that_is_full_now_and_then_loses_nothing_that_it_acked() {
    const COUNT: u64 = 5000;
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    let options =
        queue_with([("x-max-length", 50.into()), ("x-overflow", "reject-publish".into())]);
    channel.declare_queue("small", options).await.unwrap();
    let reader = connection.open_channel().await.unwrap();
    let few = ConsumeOptions { prefetch: 10, ..ConsumeOptions::default() };
    let mut consumer = reader.consume("small", few).await.unwrap();
    let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
    let consuming = async {
        let mut taken = 0;
        loop {
            tokio::select! {
                biased;
                delivery = consumer.next() => {
                    delivery.unwrap().unwrap().ack().unwrap();
                    taken += 1;
                }
                _ = &mut stopped => return taken,
            }
        }
    };
    let publishing = async {
        let tally = publish_and_count(&channel, "small", COUNT).await;
        until_queue_has(&channel, "small", 0, 1).await;
        stop.send(()).unwrap();
        tally
    };
    let (tally, mut taken) = tokio::join!(publishing, consuming);
    consumer.cancel().await.unwrap();
    while let Some(delivery) = consumer.next().await {
        delivery.unwrap().ack().unwrap();
        taken += 1;
    }
    assert_eq!(tally.acked + tally.nacked, COUNT);
    assert_eq!(taken, tally.acked);
}

/// Headers with a value of every type.
fn headers_of_all_types(number: u32) -> Table<'static> {
    let array = Array::from_values([1.into(), "two".into(), Value::Void]).unwrap();
    let table = Table::from_pairs([("inner", true.into())]).unwrap();
    Table::from_pairs([
        ("bool", Value::Bool(true)),
        ("i8", Value::I8(-8)),
        ("u8", Value::U8(8)),
        ("i16", Value::I16(-16)),
        ("u16", Value::U16(16)),
        ("i32", Value::I32(-32)),
        ("u32", Value::U32(number)),
        ("i64", Value::I64(-64)),
        ("f32", Value::F32(1.5)),
        ("f64", Value::F64(-2.5)),
        ("decimal", Value::Decimal { scale: 2, value: 314 }),
        ("timestamp", Value::Timestamp(1_700_000_000)),
        ("text", "text".into()),
        ("bytes", Value::Bytes(vec![0, 255, 1].into())),
        ("array", Value::Array(array)),
        ("table", Value::Table(table)),
        ("void", Value::Void),
    ])
    .unwrap()
}

/// A message of which it is known what becomes of it.
struct Letter {
    exchange: &'static str,
    routing_key: &'static str,
    mandatory: bool,
    properties: Properties<'static>,
    body: Bytes,
    arrives: bool,
}

impl Letter {
    fn random(dice: &mut Dice, number: u32) -> Letter {
        let (exchange, routing_key, arrives) = [
            ("", "q", true),
            ("", "q", true),
            ("", "nowhere", false),
            ("topic", "known.place", true),
            ("topic", "unknown.place", false),
            ("empty", "q", false),
        ][dice.below(6)];
        let mut properties = Properties::default();
        if dice.one_in(2) {
            properties.headers = Some(headers_of_all_types(number));
        }
        if dice.one_in(3) {
            properties.message_id = Some(number.to_string().try_into().unwrap());
            properties.content_type = Some("text/plain".try_into().unwrap());
            properties.delivery_mode = Some(1 + dice.below(2) as u8);
            properties.timestamp = Some(1_700_000_000);
            properties.priority = Some(3);
        }
        // Many are alike: then their order alone tells them apart.
        let body = match dice.below(30) {
            0 => vec![number as u8; 200_000].into(),
            1..10 => Bytes::from_static(b"alike"),
            _ => Bytes::from(number.to_string()),
        };
        let mandatory = !dice.one_in(4);
        Letter { exchange, routing_key, mandatory, properties, body, arrives }
    }

    fn publish(&self) -> Publish<'_> {
        Publish {
            exchange: self.exchange,
            routing_key: self.routing_key,
            mandatory: self.mandatory,
            properties: self.properties.clone(),
            body: self.body.clone(),
        }
    }

    fn check(&self, outcome: Outcome) {
        match outcome {
            Outcome::Acked => assert!(self.arrives || !self.mandatory, "not returned"),
            Outcome::Returned(returned) => {
                assert!(self.mandatory && !self.arrives, "returned: {returned:?}");
                assert_eq!(returned.reply_code, ReplyCode::NO_ROUTE);
                assert_eq!(
                    (returned.exchange.as_str(), returned.routing_key.as_str()),
                    (self.exchange, self.routing_key)
                );
                assert!(returned.body == self.body, "the body of another message");
                let properties = returned.properties.get();
                assert_eq!(properties.message_id, self.properties.message_id);
                let number = |properties: &Properties<'_>| {
                    properties.headers.as_ref()?.get("u32").and_then(|number| number.as_i64())
                };
                assert_eq!(number(&properties), number(&self.properties));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_outcome_is_right_with_many_tasks_on_several_channels() {
    const EACH: u32 = 1000;
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    channel.declare_exchange("topic", "topic", ExchangeOptions::default()).await.unwrap();
    channel.declare_exchange("empty", "fanout", ExchangeOptions::default()).await.unwrap();
    channel.bind_queue("q", "topic", "known.#", &Table::new()).await.unwrap();
    let mut dice = Dice::seeded();
    let mut publishers = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let channel = Arc::new(confirm_channel(&connection).await);
        for task in 0..3 {
            let (channel, mut dice) = (Arc::clone(&channel), Dice::new(dice.roll()));
            publishers.spawn(async move {
                let mut arrived = 0;
                let mut window = VecDeque::new();
                for number in 0..EACH {
                    let letter = Letter::random(&mut dice, number * 3 + task);
                    arrived += u32::from(letter.arrives);
                    let confirmation = channel.publish(&letter.publish()).await.unwrap();
                    window.push_back((letter, confirmation));
                    if window.len() > dice.below(400) {
                        let (letter, confirmation) = window.pop_front().unwrap();
                        letter.check(outcome(confirmation).await);
                    }
                }
                for (letter, confirmation) in window {
                    letter.check(outcome(confirmation).await);
                }
                arrived
            });
        }
    }
    let arrived: u32 = publishers.join_all().await.into_iter().sum();
    until_queue_has(&channel, "q", arrived, 0).await;
}

#[tokio::test]
async fn a_confirmation_outlives_the_handle_of_its_channel() {
    let vhost = rabbitmq::vhost().await;
    let (connection, observer) = with_queue_and_channels(&vhost, 21).await;
    for round in 1..=20u32 {
        let channel = confirm_channel(&connection).await;
        let mut confirmations = Vec::new();
        for _ in 0..100 {
            confirmations.push(channel.publish(&to("q", "x")).await.unwrap());
        }
        let nowhere = channel.publish(&to("nowhere", "y")).await.unwrap();
        drop(channel);
        for confirmation in confirmations {
            assert!(outcome(confirmation).await.is_acked());
        }
        assert!(matches!(outcome(nowhere).await, Outcome::Returned(_)));
        until_queue_has(&observer, "q", round * 100, 0).await;
    }
    eventually(SOON, "the numbers of the channels to be free", async || {
        let mut channels = Vec::new();
        for _ in 0..20 {
            channels.push(connection.open_channel().await.map_err(|error| error.to_string())?);
        }
        Ok::<(), String>(())
    })
    .await;
}

#[tokio::test]
async fn a_confirmation_outlives_the_handles_of_its_connection() {
    let vhost = rabbitmq::vhost().await;
    let (_observing, observer) = with_queue(&vhost).await;
    let connection = connect(&vhost).await;
    let channel = confirm_channel(&connection).await;
    let mut confirmations = Vec::new();
    for _ in 0..1000 {
        confirmations.push(channel.publish(&to("q", "x")).await.unwrap());
    }
    drop((channel, connection));
    for confirmation in confirmations {
        assert!(outcome(confirmation).await.is_acked());
    }
    until_queue_has(&observer, "q", 1000, 0).await;
    eventually(SOON, "the connection to be closed", async || {
        vhost.connections().await.is_ok_and(|connections| connections.len() == 1)
    })
    .await;
}

#[tokio::test]
async fn a_message_over_the_brokers_limit_costs_its_channel_and_names_the_size() {
    if Version::under_test() < Version::V4_0 {
        // Its limit is 128 MiB: too much for a test that runs beside others.
        return;
    }
    const LIMIT: usize = 16 * 1024 * 1024;
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    let other = connection.open_channel().await.unwrap();
    let largest = channel.publish(&to("q", vec![1; LIMIT])).await.unwrap();
    assert!(outcome(largest).await.is_acked());
    let refused = channel.publish(&to("q", vec![1; LIMIT + 1])).await.unwrap();
    let Outcome::Lost(error) = outcome(refused).await else { panic!("taken") };
    assert_eq!(error.kind(), ErrorKind::ChannelClosed(ReplyCode::PRECONDITION_FAILED), "{error}");
    assert!(error.to_string().contains(&LIMIT.to_string()), "{error}");
    until_queue_has(&other, "q", 1, 0).await;
}

#[tokio::test]
async fn a_new_secret_is_taken_while_work_goes_on() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    let publishing = publish_and_count(&channel, "q", 2000);
    let updating = async {
        for _ in 0..10 {
            connection.update_secret(b"guest", "the old one expires").await.unwrap();
        }
    };
    let (tally, ()) = tokio::join!(publishing, updating);
    assert_eq!(tally.acked, 2000);
}

#[tokio::test]
async fn the_broker_knows_the_connection_by_its_name() {
    let vhost = rabbitmq::vhost().await;
    let mut options = options(&vhost);
    options.connection_name = Some("order importer".to_owned());
    let connection = Connection::open(&options).await.unwrap();
    let described = eventually(SOON, "the connection in the management API", async || {
        vhost.connections().await.ok().and_then(|mut connections| connections.pop())
    })
    .await;
    let properties = &described["client_properties"];
    assert_eq!(properties["connection_name"], "order importer", "{described}");
    assert_eq!(properties["capabilities"]["consumer_cancel_notify"], true, "{described}");
    connection.close().await.unwrap();
}

/// What may be done wrong, the code with which RabbitMQ closes the channel for it, and what its words contain.
const MISUSES: [(&str, ReplyCode, &str); 31] = [
    ("inspect a missing queue", ReplyCode::NOT_FOUND, "no queue \"missing\""),
    ("consume a missing queue", ReplyCode::NOT_FOUND, "no queue \"missing\""),
    ("get from a missing queue", ReplyCode::NOT_FOUND, "no queue \"missing\""),
    ("purge a missing queue", ReplyCode::NOT_FOUND, "no queue \"missing\""),
    ("bind a missing queue", ReplyCode::NOT_FOUND, "no queue \"missing\""),
    ("bind to a missing exchange", ReplyCode::NOT_FOUND, "no exchange \"missing\""),
    ("bind exchanges that are missing", ReplyCode::NOT_FOUND, "no exchange \"missing\""),
    ("inspect a missing exchange", ReplyCode::NOT_FOUND, "no exchange \"missing\""),
    ("publish to a missing exchange", ReplyCode::NOT_FOUND, "no exchange \"missing\""),
    ("declare a queue with a reserved name", ReplyCode::ACCESS_REFUSED, "amq.mine"),
    ("declare an exchange with a reserved name", ReplyCode::ACCESS_REFUSED, "amq.mine"),
    ("bind to the default exchange", ReplyCode::ACCESS_REFUSED, "default exchange"),
    ("delete the default exchange", ReplyCode::ACCESS_REFUSED, "default exchange"),
    ("delete an exchange of the broker", ReplyCode::ACCESS_REFUSED, "amq.direct"),
    ("publish to an internal exchange", ReplyCode::ACCESS_REFUSED, "internal exchange 'inner'"),
    ("inspect a queue of another connection", ReplyCode::RESOURCE_LOCKED, "'locked'"),
    ("consume a queue of another connection", ReplyCode::RESOURCE_LOCKED, "'locked'"),
    ("delete a queue of another connection", ReplyCode::RESOURCE_LOCKED, "'locked'"),
    ("declare a queue with another durability", ReplyCode::PRECONDITION_FAILED, "durable"),
    ("declare a queue with other arguments", ReplyCode::PRECONDITION_FAILED, "x-max-length"),
    ("declare a queue with a wrong argument", ReplyCode::PRECONDITION_FAILED, "x-message-ttl"),
    ("declare a queue of an unknown type", ReplyCode::PRECONDITION_FAILED, "queue"),
    ("declare an exchange of another type", ReplyCode::PRECONDITION_FAILED, "type"),
    ("delete a queue that is not empty", ReplyCode::PRECONDITION_FAILED, "not empty"),
    ("delete a queue that is in use", ReplyCode::PRECONDITION_FAILED, "in use"),
    ("delete an exchange that is in use", ReplyCode::PRECONDITION_FAILED, "in use"),
    ("publish as somebody else", ReplyCode::PRECONDITION_FAILED, "user_id"),
    ("publish with a wrong expiration", ReplyCode::PRECONDITION_FAILED, "expiration"),
    ("publish with a wrong CC header", ReplyCode::PRECONDITION_FAILED, "CC"),
    ("ask for replies that nobody consumes", ReplyCode::PRECONDITION_FAILED, "reply consumer"),
    ("consume replies without auto-ack", ReplyCode::PRECONDITION_FAILED, "reply consumer"),
];

async fn misuse(what: &str, channel: &Channel<Confirm>) -> Error {
    let none = &Table::new();
    let publish = async |publish: Publish<'_>| match channel.publish(&publish).await {
        Ok(confirmation) => match outcome(confirmation).await {
            Outcome::Lost(error) => Err(error),
            other => panic!("{what}: {other:?}"),
        },
        Err(error) => Err(error),
    };
    let with = |properties| Publish { properties, ..to("q", "x") };
    let queue = |arguments| queue_with([arguments]);
    let consume = ConsumeOptions::default();
    let text = |text: &'static str| Some(text.try_into().unwrap());
    let done = match what {
        "inspect a missing queue" => channel.inspect_queue("missing").await.map(drop),
        "consume a missing queue" => channel.consume("missing", consume).await.map(drop),
        "get from a missing queue" => channel.get("missing", GetOptions::default()).await.map(drop),
        "purge a missing queue" => channel.purge_queue("missing").await.map(drop),
        "bind a missing queue" => channel.bind_queue("missing", "e", "", none).await,
        "bind to a missing exchange" => channel.bind_queue("q", "missing", "", none).await,
        "bind exchanges that are missing" => channel.bind_exchange("e", "missing", "", none).await,
        "inspect a missing exchange" => channel.inspect_exchange("missing").await,
        "publish to a missing exchange" => {
            publish(Publish { exchange: "missing", ..to("q", "x") }).await
        }
        "declare a queue with a reserved name" => {
            channel.declare_queue("amq.mine", QueueOptions::default()).await.map(drop)
        }
        "declare an exchange with a reserved name" => {
            channel.declare_exchange("amq.mine", "direct", ExchangeOptions::default()).await
        }
        "bind to the default exchange" => channel.bind_queue("q", "", "key", none).await,
        "delete the default exchange" => channel.delete_exchange("", DeleteExchange::Always).await,
        "delete an exchange of the broker" => {
            channel.delete_exchange("amq.direct", DeleteExchange::Always).await
        }
        "publish to an internal exchange" => {
            publish(Publish { exchange: "inner", ..to("q", "x") }).await
        }
        "inspect a queue of another connection" => channel.inspect_queue("locked").await.map(drop),
        "consume a queue of another connection" => {
            channel.consume("locked", consume).await.map(drop)
        }
        "delete a queue of another connection" => {
            channel.delete_queue("locked", DeleteQueue::default()).await.map(drop)
        }
        "declare a queue with another durability" => {
            let options = QueueOptions { durable: false, ..QueueOptions::default() };
            channel.declare_queue("q", options).await.map(drop)
        }
        "declare a queue with other arguments" => {
            channel.declare_queue("q", queue(("x-max-length", 5.into()))).await.map(drop)
        }
        "declare a queue with a wrong argument" => {
            channel.declare_queue("new", queue(("x-message-ttl", "soon".into()))).await.map(drop)
        }
        "declare a queue of an unknown type" => {
            channel.declare_queue("new", queue(("x-queue-type", "fancy".into()))).await.map(drop)
        }
        "declare an exchange of another type" => {
            channel.declare_exchange("e", "fanout", ExchangeOptions::default()).await
        }
        "delete a queue that is not empty" => {
            let when = DeleteQueue { if_empty: true, ..DeleteQueue::default() };
            channel.delete_queue("q", when).await.map(drop)
        }
        "delete a queue that is in use" => {
            let when = DeleteQueue { if_unused: true, ..DeleteQueue::default() };
            channel.delete_queue("used", when).await.map(drop)
        }
        "delete an exchange that is in use" => {
            channel.delete_exchange("e", DeleteExchange::IfUnused).await
        }
        "publish as somebody else" => {
            publish(with(Properties { user_id: text("nobody"), ..Default::default() })).await
        }
        "publish with a wrong expiration" => {
            publish(with(Properties { expiration: text("soon"), ..Default::default() })).await
        }
        "publish with a wrong CC header" => {
            let headers = Some(Table::from_pairs([("CC", "no list".into())]).unwrap());
            publish(with(Properties { headers, ..Default::default() })).await
        }
        "ask for replies that nobody consumes" => {
            let reply_to = text("amq.rabbitmq.reply-to");
            publish(with(Properties { reply_to, ..Default::default() })).await
        }
        "consume replies without auto-ack" => {
            channel.consume("amq.rabbitmq.reply-to", consume).await.map(drop)
        }
        other => panic!("no misuse: {other}"),
    };
    done.expect_err(what)
}

#[tokio::test]
async fn every_misuse_closes_its_channel_with_the_cause_and_no_other() {
    let vhost = rabbitmq::vhost().await;
    let (connection, observer) = with_queue_and_channels(&vhost, 2).await;
    fill(&observer, "q", 1).await;
    observer.declare_exchange("e", "direct", ExchangeOptions::default()).await.unwrap();
    observer.bind_queue("q", "e", "q", &Table::new()).await.unwrap();
    let inner = ExchangeOptions { internal: true, ..ExchangeOptions::default() };
    observer.declare_exchange("inner", "direct", inner).await.unwrap();
    observer.declare_queue("used", QueueOptions::default()).await.unwrap();
    let mut using = observer.consume("used", ConsumeOptions::default()).await.unwrap();
    let elsewhere = connect(&vhost).await;
    let exclusive = QueueOptions { exclusive: true, ..QueueOptions::default() };
    let owner = elsewhere.open_channel().await.unwrap();
    owner.declare_queue("locked", exclusive).await.unwrap();

    let mut id = None;
    for (what, code, words) in MISUSES {
        let channel = confirm_channel(&connection).await;
        assert_eq!(channel.id(), *id.get_or_insert(channel.id()), "{what}: its number is free");
        let error = misuse(what, &channel).await;
        assert_eq!(error.kind(), ErrorKind::ChannelClosed(code), "{what}: {error}");
        assert!(error.to_string().contains(words), "{what}: {error}");
        // Every later call says the same.
        let later = channel.inspect_queue("q").await.unwrap_err();
        assert_eq!(later.to_string(), error.to_string(), "{what}");
        let later = channel.publish(&to("q", "x")).await.unwrap_err();
        assert_eq!(later.kind(), error.kind(), "{what}");
        assert_eq!(channel.close().await.unwrap_err().kind(), error.kind(), "{what}");
        // The others go on.
        assert!(outcome(observer.publish(&to("used", what)).await.unwrap()).await.is_acked());
        let delivery = next(&mut using).await;
        assert_eq!(delivery.body(), what);
        delivery.ack().unwrap();
    }
    until_queue_has(&observer, "q", 1, 0).await;
}

#[tokio::test]
async fn an_unknown_exchange_type_is_refused_by_name() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    let declared = channel.declare_exchange("e", "fancy", ExchangeOptions::default()).await;
    let error = declared.unwrap_err();
    let expected = match Version::under_test() {
        Version::V3_10 => ErrorKind::ConnectionClosed(ReplyCode::COMMAND_INVALID),
        _ => ErrorKind::ChannelClosed(ReplyCode::PRECONDITION_FAILED),
    };
    assert_eq!(error.kind(), expected, "{error}");
    assert!(error.to_string().contains("fancy"), "{error}");
    assert_eq!(connection.open_channel().await.is_err(), error.is_connection_error());
}

#[tokio::test]
async fn exactly_the_publishes_from_the_wrong_one_on_are_lost() {
    let vhost = rabbitmq::vhost().await;
    let (connection, observer) = with_queue(&vhost).await;
    for round in 1..=10u32 {
        let channel = confirm_channel(&connection).await;
        let mut confirmations = Vec::new();
        let mut refused = None;
        for number in 0..500 {
            let exchange = if number == 300 { "missing" } else { "" };
            let publish = Publish { exchange, ..to("q", number.to_string()) };
            match channel.publish(&publish).await {
                Ok(confirmation) => confirmations.push(confirmation),
                // The broker may have been that quick.
                Err(error) => refused = Some(error),
            }
        }
        for (number, confirmation) in confirmations.into_iter().enumerate() {
            match outcome(confirmation).await {
                Outcome::Acked => assert!(number < 300, "{number}"),
                // Acks that the broker owes when it closes a channel it does not send.
                Outcome::Lost(error) => {
                    assert_eq!(error.reply_code(), Some(ReplyCode::NOT_FOUND), "{number}");
                }
                other => panic!("{number}: {other:?}"),
            }
        }
        if let Some(error) = refused {
            assert_eq!(error.reply_code(), Some(ReplyCode::NOT_FOUND));
        }
        until_queue_has(&observer, "q", round * 300, 0).await;
    }
}
