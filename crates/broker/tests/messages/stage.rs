//! A channel to put messages into queues and to take them out.

use std::time::Duration;

use leveret::amqp::{
    Channel, Confirm, Connection, Delivery, GetOptions, Outcome, Properties, Publish, QueueOptions,
    Table, Value,
};
use leveret_broker::Profile;
use leveret_testkit::eventually;

pub(super) const SOON: Duration = Duration::from_secs(60);

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

    /// Declares a queue of a type.
    pub(super) async fn queue(&self, name: &str, kind: &str, more: &[(&str, Value<'_>)]) {
        let kind = ("x-queue-type", Value::from(kind));
        let arguments = std::iter::once(kind).chain(more.iter().cloned());
        let arguments = Table::from_pairs(arguments).unwrap();
        let options = QueueOptions { arguments, ..QueueOptions::default() };
        self.channel.declare_queue(name, options).await.unwrap();
    }

    pub(super) async fn put(&self, queue: &str, body: &str, properties: Properties<'_>) -> Outcome {
        let body = body.to_owned().into();
        let publish = Publish { routing_key: queue, properties, body, ..Publish::default() };
        self.channel.publish(&publish).await.unwrap().await
    }

    /// Puts messages into a queue whose bodies are these numbers.
    pub(super) async fn fill(&self, queue: &str, numbers: std::ops::RangeInclusive<u32>) {
        for number in numbers {
            let outcome = self.put(queue, &number.to_string(), Properties::default()).await;
            assert!(outcome.is_acked(), "{queue}: {outcome:?}");
        }
    }

    pub(super) async fn take(&self, queue: &str) -> Delivery {
        take(&self.channel, queue).await
    }

    /// Waits until that many messages are ready, and takes all out. (RabbitMQ moves some of them only after it has
    /// answered.)
    pub(super) async fn take_all(&self, queue: &str, count: u32) -> Vec<String> {
        eventually(SOON, format!("{count} messages in {queue}"), async || {
            self.channel.inspect_queue(queue).await.unwrap().messages == count
        })
        .await;
        let mut bodies = Vec::new();
        for _ in 0..count {
            let delivery = self.take(queue).await;
            bodies.push(body(&delivery));
            delivery.ack().unwrap();
        }
        bodies
    }
}

pub(super) async fn take<M>(channel: &Channel<M>, queue: &str) -> Delivery {
    eventually(SOON, format!("a message in {queue}"), async || {
        channel.get(queue, GetOptions::default()).await.unwrap()
    })
    .await
}

pub(super) fn body(delivery: &Delivery) -> String {
    String::from_utf8(delivery.body().to_vec()).unwrap()
}

/// The headers of a delivery in order, with their types on the wire.
pub(super) fn headers(delivery: &Delivery) -> String {
    let Some(headers) = delivery.properties().headers else { return "none".to_owned() };
    let header =
        |(name, value): (_, Value<'_>)| format!("{name}={}:{value:?}", value.tag() as char);
    headers.iter().map(header).collect::<Vec<_>>().join(" ")
}

pub(super) fn with_headers(headers: &[(&str, Value<'_>)]) -> Properties<'static> {
    let headers = Some(Table::from_pairs(headers.iter().cloned()).unwrap());
    Properties { headers, ..Properties::default() }
}
