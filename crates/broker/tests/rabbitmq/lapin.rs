//! What lapin sees of a real RabbitMQ: what it has to see of the embedded broker, too.

use leveret_testkit::rabbitmq;

lapin_tests!(on_rabbitmq);

async fn on_rabbitmq(scenario: impl AsyncFnOnce(&str)) {
    let vhost = rabbitmq::vhost().await;
    scenario(&vhost.url()).await;
}
