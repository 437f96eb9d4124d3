//! The embedded broker accepts and refuses what RabbitMQ does, with its words: the table that `rabbitmq/declaring.rs` holds
//! against real nodes.

use leveret_broker::{Broker, Profile};

use crate::declaring::{asking, cases};

async fn answers_as_rabbitmq(profile: Profile, version: &str) {
    let broker = Broker::builder().profile(profile).start().unwrap();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    let mut asked = asking::Broker::at(&format!("amqp://{address}"));
    let differences = asked.differences(version, cases::all()).await;
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.join("\n"));
}

#[tokio::test]
async fn everything_is_answered_as_rabbitmq_3_10_does() {
    answers_as_rabbitmq(Profile::RabbitMq3_10, "3.10").await;
}

#[tokio::test]
async fn everything_is_answered_as_rabbitmq_4_3_does() {
    answers_as_rabbitmq(Profile::RabbitMq4_3, "4.3").await;
}
