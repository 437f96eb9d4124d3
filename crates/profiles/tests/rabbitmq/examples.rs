//! The examples of the seed documents on RabbitMQ.

use leveret_testkit::rabbitmq;

use crate::examples::example;

#[tokio::test]
async fn they_do_what_they_say_there_too() {
    let vhost = rabbitmq::vhost().await;
    for name in ["acapi", "cover_art", "orb", "chandra"] {
        // It fails if what it counts is not what it should be.
        example(name, &[&vhost.url()]);
    }
}
