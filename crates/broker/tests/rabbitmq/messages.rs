//! What a real RabbitMQ does with messages: what the embedded broker has to do, too.

use leveret::amqp::{Connection, Options};
use leveret_broker::Profile;
use leveret_testkit::rabbitmq::{self, Version};

message_tests!(on_rabbitmq);

async fn on_rabbitmq(scenario: impl AsyncFnOnce(&Connection, Profile)) {
    let profile = match Version::under_test() {
        Version::V3_10 => Profile::RabbitMq3_10,
        Version::V4_3 => Profile::RabbitMq4_3,
        Version::V4_0 => return println!("there is no profile of 4.0"),
    };
    let vhost = rabbitmq::vhost().await;
    let options = Options::from_uri(&vhost.url()).unwrap();
    let connection = Connection::open(&options).await.unwrap();
    scenario(&connection, profile).await;
}
