//! The embedded broker as a client sees it, with time that can be paused.

use std::time::Duration;

use leveret::amqp::{
    Channel, Confirm, Connection, ConsumeOptions, Consumer, Delivery, ErrorKind, ExchangeOptions,
    GetOptions, Options, Properties, Publish, QueueOptions, Refused, Table, Value,
};
use leveret_broker::Broker;

fn broker() -> Broker {
    Broker::builder().start().unwrap()
}

async fn connect(broker: &Broker) -> Connection {
    Connection::open_over(broker.connect(), &Options::default()).await.unwrap()
}

async fn confirming(broker: &Broker) -> (Connection, Channel<Confirm>) {
    let connection = connect(broker).await;
    let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
    (connection, channel)
}

async fn next(consumer: &mut Consumer) -> Delivery {
    consumer.next().await.unwrap().unwrap()
}

fn with_arguments<'v>(pairs: impl IntoIterator<Item = (&'v str, Value<'v>)>) -> QueueOptions {
    QueueOptions { arguments: Table::from_pairs(pairs).unwrap(), ..QueueOptions::default() }
}

#[tokio::test]
async fn a_message_goes_through_a_queue() {
    let broker = broker();
    let (_connection, channel) = confirming(&broker).await;
    channel.declare_queue("q", QueueOptions::default()).await.unwrap();
    for number in 0..1000 {
        let body = number.to_string();
        let publish = Publish { routing_key: "q", body: body.into(), ..Publish::default() };
        drop(channel.publish(&publish).await.unwrap());
    }
    assert_eq!(channel.confirmed(Duration::from_secs(60)).await.unwrap().acked, 1000);
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    for number in 0..1000 {
        let delivery = next(&mut consumer).await;
        assert_eq!(delivery.body(), number.to_string().as_bytes());
        assert_eq!(delivery.routing_key(), "q");
        delivery.ack().unwrap();
    }
    assert_eq!(channel.inspect_queue("q").await.unwrap().messages, 0);
}

#[tokio::test(start_paused = true)]
async fn four_hours_pass_at_once() {
    let broker = broker();
    let (_connection, channel) = confirming(&broker).await;
    channel.declare_exchange("retry", "fanout", ExchangeOptions::default()).await.unwrap();
    let work = with_arguments([("x-dead-letter-exchange", "retry".into())]);
    channel.declare_queue("work", work).await.unwrap();
    let wait = with_arguments([
        ("x-message-ttl", Value::I32(4 * 3600 * 1000)),
        ("x-dead-letter-exchange", "".into()),
        ("x-dead-letter-routing-key", "work".into()),
    ]);
    channel.declare_queue("wait", wait).await.unwrap();
    channel.bind_queue("wait", "retry", "", &Table::new()).await.unwrap();
    let publish = Publish {
        routing_key: "work",
        mandatory: true,
        properties: Properties { delivery_mode: Some(2), ..Properties::default() },
        body: "cover".into(),
        ..Publish::default()
    };
    assert!(channel.publish(&publish).await.unwrap().await.is_acked());
    let mut consumer = channel.consume("work", ConsumeOptions::default()).await.unwrap();
    next(&mut consumer).await.nack(Refused::Discard).unwrap();
    let began = tokio::time::Instant::now();
    let again = next(&mut consumer).await;
    assert_eq!(began.elapsed().as_secs(), 4 * 3600);
    assert_eq!(again.body(), "cover");
    let deaths = again.properties().headers.unwrap().get("x-death").unwrap().into_owned();
    assert_eq!(deaths.as_array().unwrap().iter().count(), 2);
    again.ack().unwrap();
}

#[tokio::test]
async fn a_wrong_password_is_refused() {
    let broker = Broker::builder().user("me", "secret").start().unwrap();
    let mut options = Options::default();
    options.auth = leveret::amqp::Auth::plain("me", "guess");
    let error = Connection::open_over(broker.connect(), &options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Authentication, "{error}");
    options.auth = leveret::amqp::Auth::plain("me", "secret");
    Connection::open_over(broker.connect(), &options).await.unwrap();
}

#[tokio::test]
async fn it_listens_and_shuts_down() {
    let broker = broker();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    let options = Options::from_uri(&format!("amqp://{address}")).unwrap();
    let connection = Connection::open(&options).await.unwrap();
    let channel = connection.open_channel().await.unwrap();
    assert!(channel.get("missing", GetOptions::default()).await.is_err());
    let ended = tokio::spawn({
        let connection = connection.clone();
        async move { connection.ended().await }
    });
    broker.shutdown().await;
    assert!(matches!(ended.await.unwrap().kind(), ErrorKind::ConnectionClosed(_)));
    assert!(Connection::open(&options).await.is_err());
}

#[tokio::test]
async fn a_broker_in_memory_is_found_by_its_name() {
    let publisher = Connection::open(&Options::from_uri("memory://shop").unwrap()).await.unwrap();
    let channel = publisher.open_channel().await.unwrap().into_confirm().await.unwrap();
    channel.declare_queue("q", QueueOptions::default()).await.unwrap();
    let publish = Publish { routing_key: "q", body: "hello".into(), ..Publish::default() };
    assert!(channel.publish(&publish).await.unwrap().await.is_acked());
    publisher.close().await.unwrap();

    let other = Connection::open(&Options::from_uri("memory://elsewhere").unwrap()).await.unwrap();
    let other = other.open_channel().await.unwrap();
    assert!(other.get("q", GetOptions::default()).await.is_err());
    let consumer = Connection::open(&Options::from_uri("memory://shop").unwrap()).await.unwrap();
    let channel = consumer.open_channel().await.unwrap();
    let got = channel.get("q", GetOptions::default()).await.unwrap().unwrap();
    assert_eq!(got.body(), "hello");
    got.ack().unwrap();
    assert_eq!(Broker::named("shop").snapshot().virtual_host("/").unwrap().tally.published, 1);
}

#[tokio::test]
async fn it_listens_on_ipv4_and_ipv6_at_once() {
    let broker = Broker::builder().start().unwrap();
    for address in ["127.0.0.1:0", "[::1]:0"] {
        let address = broker.listen(address).await.unwrap();
        let options = Options::from_uri(&format!("amqp://{address}")).unwrap();
        let connection = Connection::open(&options).await.unwrap();
        connection.close().await.unwrap();
    }
}
