//! The embedded broker takes and sends frames as RabbitMQ does: the scenarios that `rabbitmq/frames.rs` runs on real nodes.

use leveret_broker::{Broker, Profile};

use crate::frames::Place;

async fn run_on(profile: Profile, scenario: impl AsyncFnOnce(&Place)) {
    let broker = Broker::builder().profile(profile).start().unwrap();
    let addr = broker.listen("127.0.0.1:0").await.unwrap().to_string();
    scenario(&Place { addr, vhost: "/".to_owned(), profile }).await;
}

mod as_3_10 {
    use super::*;

    frame_tests!(on_3_10);

    async fn on_3_10(scenario: impl AsyncFnOnce(&Place)) {
        run_on(Profile::RabbitMq3_10, scenario).await;
    }
}

mod as_4_3 {
    use super::*;

    frame_tests!(on_4_3);

    async fn on_4_3(scenario: impl AsyncFnOnce(&Place)) {
        run_on(Profile::RabbitMq4_3, scenario).await;
    }
}
