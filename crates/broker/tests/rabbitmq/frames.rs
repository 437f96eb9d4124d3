//! What frames a real RabbitMQ takes and sends: what the embedded broker has to do, too.

use leveret_broker::Profile;
use leveret_testkit::rabbitmq::{self, Version};

use crate::frames::Place;

frame_tests!(on_rabbitmq);

async fn on_rabbitmq(scenario: impl AsyncFnOnce(&Place)) {
    let profile = match Version::under_test() {
        Version::V3_10 => Profile::RabbitMq3_10,
        Version::V4_3 => Profile::RabbitMq4_3,
        Version::V4_0 => return println!("there is no profile of 4.0"),
    };
    let vhost = rabbitmq::vhost().await;
    let (addr, name) = (vhost.broker().addr(), vhost.name().to_owned());
    scenario(&Place { addr, vhost: name, profile }).await;
}
