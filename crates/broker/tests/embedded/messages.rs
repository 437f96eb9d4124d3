//! The embedded broker treats messages as RabbitMQ does: the scenarios that `rabbitmq/messages.rs` runs on real nodes.

use leveret::amqp::{Connection, Options};
use leveret_broker::{Broker, Profile};

async fn run_on(profile: Profile, scenario: impl AsyncFnOnce(&Connection, Profile)) {
    let broker = Broker::builder().profile(profile).start().unwrap();
    let connection = Connection::open_over(broker.connect(), &Options::default()).await.unwrap();
    scenario(&connection, profile).await;
}

mod as_3_10 {
    use super::*;

    message_tests!(on_3_10);

    async fn on_3_10(scenario: impl AsyncFnOnce(&Connection, Profile)) {
        run_on(Profile::RabbitMq3_10, scenario).await;
    }
}

mod as_4_3 {
    use super::*;

    message_tests!(on_4_3);

    async fn on_4_3(scenario: impl AsyncFnOnce(&Connection, Profile)) {
        run_on(Profile::RabbitMq4_3, scenario).await;
    }
}
