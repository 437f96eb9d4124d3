//! lapin, a client that shares no code with the embedded broker, is served by it as by RabbitMQ: the scenarios that
//! `rabbitmq/lapin.rs` runs on real nodes.

use leveret_broker::{Broker, Profile};

async fn run_on(profile: Profile, scenario: impl AsyncFnOnce(&str)) {
    let broker = Broker::builder().profile(profile).start().unwrap();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    scenario(&format!("amqp://guest:guest@{address}/%2f")).await;
    broker.shutdown().await;
}

mod as_3_10 {
    use super::*;

    lapin_tests!(on_3_10);

    async fn on_3_10(scenario: impl AsyncFnOnce(&str)) {
        run_on(Profile::RabbitMq3_10, scenario).await;
    }
}

mod as_4_3 {
    use super::*;

    lapin_tests!(on_4_3);

    async fn on_4_3(scenario: impl AsyncFnOnce(&str)) {
        run_on(Profile::RabbitMq4_3, scenario).await;
    }
}
