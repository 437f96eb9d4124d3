//! The embedded broker dead-letters as RabbitMQ does: the scenarios that `rabbitmq/dead_letters.rs` runs on real nodes.

use std::time::Duration;

use leveret::amqp::{
    Connection, GetOptions, Options, Publish, QueueOptions, Refused, Table, Value,
};
use leveret_broker::{Broker, Profile};
use leveret_testkit::eventually;

async fn run_on(profile: Profile, scenario: impl AsyncFnOnce(&Connection, Profile)) {
    let broker = Broker::builder().profile(profile).start().unwrap();
    let connection = connect(&broker).await;
    scenario(&connection, profile).await;
}

async fn connect(broker: &Broker) -> Connection {
    Connection::open_over(broker.connect(), &Options::default()).await.unwrap()
}

mod as_3_10 {
    use super::*;

    dead_letter_tests!(on_3_10);

    async fn on_3_10(scenario: impl AsyncFnOnce(&Connection, Profile)) {
        run_on(Profile::RabbitMq3_10, scenario).await;
    }
}

mod as_4_3 {
    use super::*;

    dead_letter_tests!(on_4_3);

    async fn on_4_3(scenario: impl AsyncFnOnce(&Connection, Profile)) {
        run_on(Profile::RabbitMq4_3, scenario).await;
    }
}

/// Once rejected in `d`, the message expires in `e` and `f` by turns, and the cycle rule of 3.10 does not see it.
#[tokio::test]
async fn a_message_that_goes_round_for_ever_does_not_keep_others_waiting() {
    let broker = Broker::builder().profile(Profile::RabbitMq3_10).start().unwrap();
    let connection = connect(&broker).await;
    let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
    for (queue, next, ttl) in [("d", "e", None), ("e", "f", Some(0)), ("f", "e", Some(0))] {
        let mut arguments = vec![
            ("x-dead-letter-exchange", Value::from("")),
            ("x-dead-letter-routing-key", next.into()),
        ];
        arguments.extend(ttl.map(|ttl| ("x-message-ttl", Value::I32(ttl))));
        let arguments = Table::from_pairs(arguments).unwrap();
        let options = QueueOptions { arguments, ..QueueOptions::default() };
        channel.declare_queue(queue, options).await.unwrap();
    }
    let publish = Publish { routing_key: "d", ..Publish::default() };
    assert!(channel.publish(&publish).await.unwrap().await.is_acked());
    let delivery = channel.get("d", GetOptions::default()).await.unwrap().unwrap();
    delivery.reject(Refused::Discard).unwrap();

    let expired = || broker.statistics().tally.expired;
    let long = Duration::from_secs(20);
    eventually(long, "it to go round", async || expired() > 5000).await;
    let other = connect(&broker).await.open_channel().await.unwrap();
    assert_eq!(other.inspect_queue("d").await.unwrap().messages, 0);
    let so_far = expired();
    eventually(long, "it to go on", async || expired() > so_far).await;
    // It ends with one of its queues.
    other.delete_queue("e", Default::default()).await.unwrap();
    let statistics = async || {
        let before = broker.statistics();
        tokio::time::sleep(Duration::from_millis(50)).await;
        (broker.statistics() == before).then_some(before)
    };
    let end = eventually(long, "it to end", statistics).await;
    assert_eq!((end.ready, end.memory, end.tally.gone), (0, 0, 1));
}
