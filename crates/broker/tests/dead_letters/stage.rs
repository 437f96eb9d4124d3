//! A virtual host to die in.

use std::panic::Location;
use std::time::Duration;

use leveret::amqp::{
    Channel, Confirm, Connection, Delivery, ExchangeOptions, GetOptions, Outcome, Properties,
    Publish, QueueOptions, Refused, Table, Value,
};
use leveret_broker::Profile;
use leveret_testkit::eventually;

use super::letter::{Letter, spelled};

const SOON: Duration = Duration::from_secs(60);

/// Names and values of arguments or headers.
pub(super) type Pairs<'a> = Vec<(&'a str, Value<'a>)>;

pub(super) struct Stage {
    pub(super) profile: Profile,
    pub(super) channel: Channel<Confirm>,
}

impl Stage {
    pub(super) async fn new(connection: &Connection, profile: Profile) -> Stage {
        let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
        Stage { profile, channel }
    }

    pub(super) fn is_3_10(&self) -> bool {
        self.profile == Profile::RabbitMq3_10
    }

    pub(super) async fn queue(&self, name: &str, arguments: Pairs<'_>) {
        let arguments = Table::from_pairs(arguments).unwrap();
        let options = QueueOptions { arguments, ..QueueOptions::default() };
        self.channel.declare_queue(name, options).await.unwrap();
    }

    /// A fanout exchange, with queues behind it.
    pub(super) async fn fanout(&self, name: &str, queues: &[&str]) {
        self.channel.declare_exchange(name, "fanout", ExchangeOptions::default()).await.unwrap();
        for queue in queues {
            self.bind(queue, name, "").await;
        }
    }

    pub(super) async fn exchange(&self, name: &str, kind: &str, arguments: Pairs<'_>) {
        let arguments = Table::from_pairs(arguments).unwrap();
        let options = ExchangeOptions { arguments, ..ExchangeOptions::default() };
        self.channel.declare_exchange(name, kind, options).await.unwrap();
    }

    pub(super) async fn bind(&self, queue: &str, exchange: &str, key: &str) {
        self.channel.bind_queue(queue, exchange, key, &Table::new()).await.unwrap();
    }

    pub(super) async fn publish(
        &self,
        exchange: &str,
        routing_key: &str,
        properties: Properties<'_>,
    ) -> Outcome {
        let publish = Publish { exchange, routing_key, properties, ..Publish::default() };
        self.channel.publish(&publish).await.unwrap().await
    }

    /// Publishes straight to a queue.
    pub(super) async fn put(&self, queue: &str, properties: Properties<'_>) {
        let outcome = self.publish("", queue, properties).await;
        assert!(outcome.is_acked(), "{queue}: {outcome:?}");
    }

    pub(super) async fn take(&self, queue: &str) -> Delivery {
        eventually(SOON, format!("a message in {queue}"), async || {
            self.channel.get(queue, GetOptions::default()).await.unwrap()
        })
        .await
    }

    /// Waits until nothing is left in a queue that gives its messages up by itself.
    pub(super) async fn until_empty(&self, queue: &str) {
        eventually(SOON, format!("{queue} to be empty"), async || {
            self.channel.inspect_queue(queue).await.unwrap().messages == 0
        })
        .await;
    }

    pub(super) async fn reject(&self, queue: &str) {
        self.take(queue).await.reject(Refused::Discard).unwrap();
    }

    pub(super) async fn requeue(&self, queue: &str) {
        self.take(queue).await.reject(Refused::Requeue).unwrap();
    }

    /// Takes a message out of the queue that must look like this.
    #[track_caller]
    pub(super) fn expect(&self, queue: &str, letter: &Letter<'_>) -> impl Future<Output = ()> {
        let delivery = self.take_such(queue, letter);
        async { delivery.await.ack().unwrap() }
    }

    /// Rejects a message that must look like this.
    #[track_caller]
    pub(super) fn expect_and_reject(
        &self,
        queue: &str,
        letter: &Letter<'_>,
    ) -> impl Future<Output = ()> {
        let delivery = self.take_such(queue, letter);
        async { delivery.await.reject(Refused::Discard).unwrap() }
    }

    #[track_caller]
    fn take_such(&self, queue: &str, letter: &Letter<'_>) -> impl Future<Output = Delivery> {
        let expected = letter.spelled(self.profile);
        let asked_at = Location::caller();
        async move {
            let found = self.take(queue).await;
            assert_eq!(spelled(&found), expected, "in {queue}, awaited at {asked_at}");
            found
        }
    }

    /// Nothing is in the queue, and nothing that was sent there before is under way.
    #[track_caller]
    pub(super) fn expect_nothing(&self, queue: &str) -> impl Future<Output = ()> {
        let asked_at = Location::caller();
        async move {
            let marker = ("marker", Value::from(true));
            self.put(queue, with_headers(vec![marker])).await;
            let found = self.take(queue).await;
            let is_marker =
                found.properties().headers.is_some_and(|headers| headers.get("marker").is_some());
            assert!(is_marker, "in {queue}, asked at {asked_at}: {}", spelled(&found));
            found.ack().unwrap();
        }
    }
}

/// Arguments of a queue with a dead-letter exchange.
pub(super) fn dying_to(exchange: &str) -> Pairs<'_> {
    vec![("x-dead-letter-exchange", exchange.into())]
}

/// Arguments of a queue whose dead letters go straight to another.
pub(super) fn dying_into(queue: &str) -> Pairs<'_> {
    vec![("x-dead-letter-exchange", "".into()), ("x-dead-letter-routing-key", queue.into())]
}

pub(super) fn and<'a>(mut arguments: Pairs<'a>, more: Pairs<'a>) -> Pairs<'a> {
    arguments.extend(more);
    arguments
}

pub(super) fn quorum() -> Pairs<'static> {
    vec![("x-queue-type", "quorum".into())]
}

pub(super) fn with_headers(headers: Pairs<'_>) -> Properties<'static> {
    let headers = Some(Table::from_pairs(headers).unwrap());
    Properties { headers, ..Properties::default() }
}

pub(super) fn expiring(milliseconds: &str) -> Properties<'_> {
    let expiration = Some(milliseconds.try_into().unwrap());
    Properties { expiration, ..Properties::default() }
}
