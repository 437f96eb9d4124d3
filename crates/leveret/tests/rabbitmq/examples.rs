//! An example on RabbitMQ.

use leveret_testkit::rabbitmq;

use crate::support::examples::example;

#[tokio::test]
async fn it_does_what_it_says_there_too() {
    let vhost = rabbitmq::vhost().await;
    // It fails if what it counts is not what it should be.
    example("patterns", &[&vhost.url()]);
}
