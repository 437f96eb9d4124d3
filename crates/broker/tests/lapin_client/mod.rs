//! What a client that shares no code with the broker sees of it. Each scenario takes the URL of an empty virtual host.

use std::time::Duration;

use futures_util::StreamExt;
use lapin::message::{BasicReturnMessage, Delivery};
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicGetOptions, BasicNackOptions,
    BasicPublishOptions, BasicQosOptions, BasicRejectOptions, ConfirmSelectOptions,
    ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, Consumer, ErrorKind,
    ExchangeKind,
};
use leveret_testkit::eventually;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(60);

/// Makes a test of every scenario, given the function that runs one on a broker of its choice.
macro_rules! lapin_tests {
    ($run:ident) => {
        lapin_tests! { $run:
            what_is_published_is_confirmed_consumed_and_acked,
            what_reaches_no_queue_comes_back,
            what_is_nacked_is_delivered_again,
            a_dead_letter_says_what_it_died_of,
            a_message_whose_time_is_up_is_dead_lettered,
            a_question_is_answered_by_direct_reply_to,
            a_refusal_costs_the_channel_and_not_the_connection,
            a_quiet_connection_is_kept_alive_by_heartbeats,
        }
    };
    ($run:ident: $($scenario:ident,)*) => {$(
        #[tokio::test]
        async fn $scenario() {
            $run($crate::lapin_client::$scenario).await;
        }
    )*};
}

struct Client {
    connection: Connection,
    channel: Channel,
}

impl Client {
    async fn connect(url: &str) -> Client {
        let connection = Connection::connect(url, ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        Client { connection, channel }
    }

    /// Closes it, which the broker has to agree to.
    async fn close(self) {
        let goodbye = self.connection.close(200, "done".into());
        timeout(SOON, goodbye).await.expect("an answer to the close").unwrap();
    }

    async fn declare(&self, queue: &str, arguments: FieldTable) {
        let options = QueueDeclareOptions::durable();
        self.channel.queue_declare(queue.into(), options, arguments).await.unwrap();
    }

    async fn publish(&self, exchange: &str, key: &str, body: &str) -> Confirmation {
        self.publish_with(exchange, key, body, BasicProperties::default()).await
    }

    async fn publish_with(
        &self,
        exchange: &str,
        key: &str,
        body: &str,
        properties: BasicProperties,
    ) -> Confirmation {
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let (exchange, key) = (exchange.into(), key.into());
        let publish =
            self.channel.basic_publish(exchange, key, options, body.as_bytes(), properties);
        timeout(SOON, publish.await.unwrap()).await.expect("a confirm").unwrap()
    }

    async fn consume(&self, queue: &str, no_ack: bool) -> Consumer {
        let options = BasicConsumeOptions { no_ack, ..BasicConsumeOptions::default() };
        let tag: ShortString = format!("of-{queue}").into();
        let consume = self.channel.basic_consume(queue.into(), tag, options, FieldTable::default());
        consume.await.unwrap()
    }

    /// Waits for a message in a queue, and takes it.
    async fn get(&self, queue: &str) -> Delivery {
        eventually(SOON, format!("a message in {queue}"), async || {
            let got = self.channel.basic_get(queue.into(), BasicGetOptions::default()).await;
            got.unwrap().map(|message| message.delivery)
        })
        .await
    }

    async fn count(&self, queue: &str) -> u32 {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let found = self.channel.queue_declare(queue.into(), options, FieldTable::default()).await;
        found.unwrap().message_count()
    }
}

async fn next(consumer: &mut Consumer) -> Delivery {
    let next = timeout(SOON, consumer.next()).await.expect("a delivery");
    next.expect("no end of the deliveries").unwrap()
}

fn table<const N: usize>(fields: [(&str, AMQPValue); N]) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in fields {
        table.insert(name.into(), value);
    }
    table
}

fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

/// The code and text of the refusal that an error stands for.
fn refusal(error: &lapin::Error) -> (u16, String) {
    match error.kind() {
        ErrorKind::ProtocolError(error) => (error.get_id(), error.get_message().to_string()),
        other => panic!("{other:?}"),
    }
}

/// The only entry of `x-death`.
fn only_death(delivery: &Delivery) -> FieldTable {
    let headers = delivery.properties.headers().clone().expect("headers");
    let Some(AMQPValue::FieldArray(deaths)) = headers.inner().get("x-death").cloned() else {
        panic!("no x-death in {headers:?}");
    };
    match deaths.as_slice() {
        [AMQPValue::FieldTable(death)] => death.clone(),
        other => panic!("{other:?}"),
    }
}

pub(crate) async fn what_is_published_is_confirmed_consumed_and_acked(url: &str) {
    let client = Client::connect(url).await;
    let (exchange, none) = (ShortString::from("orders"), FieldTable::default());
    let options = ExchangeDeclareOptions::default();
    let declare =
        client.channel.exchange_declare(exchange.clone(), ExchangeKind::Topic, options, none);
    declare.await.unwrap();
    client.declare("q", FieldTable::default()).await;
    let (options, none) = (QueueBindOptions::default(), FieldTable::default());
    client.channel.queue_bind("q".into(), exchange, "order.*".into(), options, none).await.unwrap();
    for body in ["1", "2", "3"] {
        let properties = BasicProperties::default()
            .with_message_id(body.into())
            .with_headers(table([("kind", text("test"))]));
        let confirmation = client.publish_with("orders", "order.new", body, properties).await;
        assert_eq!(confirmation, Confirmation::Ack(None));
    }
    client.channel.basic_qos(2, BasicQosOptions::default()).await.unwrap();
    let mut consumer = client.consume("q", false).await;
    for body in ["1", "2", "3"] {
        let delivery = next(&mut consumer).await;
        assert_eq!(delivery.data, body.as_bytes());
        assert_eq!(delivery.exchange.as_str(), "orders");
        assert_eq!(delivery.routing_key.as_str(), "order.new");
        assert!(!delivery.redelivered);
        let id = delivery.properties.message_id().as_ref().map(|id| id.as_str().to_owned());
        assert_eq!(id.as_deref(), Some(body));
        assert_eq!(*delivery.properties.headers(), Some(table([("kind", text("test"))])));
        assert!(delivery.ack(BasicAckOptions::default()).await.unwrap());
    }
    let cancel = client.channel.basic_cancel("of-q".into(), BasicCancelOptions::default());
    cancel.await.unwrap();
    assert!(timeout(SOON, consumer.next()).await.expect("an end of the deliveries").is_none());
    assert_eq!(client.count("q").await, 0);
    client.close().await;
}

pub(crate) async fn what_reaches_no_queue_comes_back(url: &str) {
    let client = Client::connect(url).await;
    let confirmation = client.publish("", "nowhere", "lost").await;
    let Confirmation::Ack(Some(BasicReturnMessage { delivery, reply_code, reply_text })) =
        confirmation
    else {
        panic!("{confirmation:?}");
    };
    assert_eq!((reply_code, reply_text.as_str()), (312, "NO_ROUTE"));
    assert_eq!(
        (delivery.data.as_slice(), delivery.routing_key.as_str()),
        (&b"lost"[..], "nowhere")
    );
    client.close().await;
}

pub(crate) async fn what_is_nacked_is_delivered_again(url: &str) {
    let client = Client::connect(url).await;
    client.declare("q", FieldTable::default()).await;
    client.publish("", "q", "again").await;
    let mut consumer = client.consume("q", false).await;
    let first = next(&mut consumer).await;
    assert!(!first.redelivered);
    first.nack(BasicNackOptions { requeue: true, ..Default::default() }).await.unwrap();
    let second = next(&mut consumer).await;
    assert!(second.redelivered);
    assert_eq!(second.data, b"again");
    second.ack(BasicAckOptions::default()).await.unwrap();
    client.close().await;
}

pub(crate) async fn a_dead_letter_says_what_it_died_of(url: &str) {
    let client = Client::connect(url).await;
    client.declare("dead", FieldTable::default()).await;
    let arguments =
        table([("x-dead-letter-exchange", text("")), ("x-dead-letter-routing-key", text("dead"))]);
    client.declare("q", arguments).await;
    client.publish("", "q", "bad").await;
    let delivery = client.get("q").await;
    delivery.reject(BasicRejectOptions { requeue: false }).await.unwrap();
    let dead = client.get("dead").await;
    let death = only_death(&dead);
    assert_eq!(death.inner().get("reason"), Some(&text("rejected")));
    assert_eq!(death.inner().get("queue"), Some(&text("q")));
    assert_eq!(death.inner().get("count"), Some(&AMQPValue::LongLongInt(1)));
    assert!(matches!(death.inner().get("time"), Some(AMQPValue::Timestamp(_))));
    client.close().await;
}

pub(crate) async fn a_message_whose_time_is_up_is_dead_lettered(url: &str) {
    let client = Client::connect(url).await;
    client.declare("dead", FieldTable::default()).await;
    let arguments = table([
        ("x-dead-letter-exchange", text("")),
        ("x-dead-letter-routing-key", text("dead")),
        ("x-message-ttl", AMQPValue::LongInt(50)),
    ]);
    client.declare("q", arguments).await;
    client.publish("", "q", "late").await;
    let dead = client.get("dead").await;
    assert_eq!(only_death(&dead).inner().get("reason"), Some(&text("expired")));
    assert_eq!(client.count("q").await, 0);
    client.close().await;
}

pub(crate) async fn a_question_is_answered_by_direct_reply_to(url: &str) {
    let client = Client::connect(url).await;
    client.declare("questions", FieldTable::default()).await;
    let mut replies = client.consume("amq.rabbitmq.reply-to", true).await;
    let mut questions = client.consume("questions", true).await;
    let properties = BasicProperties::default()
        .with_reply_to("amq.rabbitmq.reply-to".into())
        .with_correlation_id("7".into());
    client.publish_with("", "questions", "why?", properties).await;
    let question = next(&mut questions).await;
    let reply_to = question.properties.reply_to().clone().expect("an address");
    let properties = BasicProperties::default().with_correlation_id("7".into());
    client.publish_with("", reply_to.as_str(), "because", properties).await;
    let reply = next(&mut replies).await;
    assert_eq!(reply.data, b"because");
    assert_eq!(reply.properties.correlation_id().clone().unwrap().as_str(), "7");
    client.close().await;
}

pub(crate) async fn a_refusal_costs_the_channel_and_not_the_connection(url: &str) {
    let client = Client::connect(url).await;
    client.declare("q", FieldTable::default()).await;
    let other = client.connection.create_channel().await.unwrap();
    let ttl = table([("x-message-ttl", AMQPValue::LongInt(1000))]);
    let refused = other.queue_declare("q".into(), QueueDeclareOptions::durable(), ttl).await;
    let (code, said) = refusal(&refused.unwrap_err());
    assert_eq!(code, 406);
    let expected = "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost";
    assert!(said.starts_with(expected), "{said}");
    assert!(said.ends_with("but current is none"), "{said}");
    assert!(!other.status().connected());
    assert_eq!(client.publish("", "q", "still here").await, Confirmation::Ack(None));
    client.close().await;
}

pub(crate) async fn a_quiet_connection_is_kept_alive_by_heartbeats(url: &str) {
    let client = Client::connect(&format!("{url}?heartbeat=1")).await;
    client.declare("q", FieldTable::default()).await;
    // Either side gives up after two intervals without a word.
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(client.publish("", "q", "still here").await, Confirmation::Ack(None));
    client.close().await;
}
