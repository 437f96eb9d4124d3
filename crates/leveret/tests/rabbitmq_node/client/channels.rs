use leveret::{ClientEvent, ErrorKind, Queue};
use leveret_testkit::rabbitmq::{RabbitNode, Version};

use crate::support::client::{client_with, next, publisher, soon, until_event, until_healthy};

#[tokio::test]
async fn a_delivery_that_is_not_acked_in_time_comes_again_and_the_consumer_goes_on() {
    let version = Version::under_test();
    let node = RabbitNode::start(version).await;
    let set = "application:set_env(rabbit, consumer_timeout, 1000), \
               application:set_env(rabbit, channel_tick_interval, 500).";
    node.ctl(&["eval", set]).await;
    let vhost = node.vhost().await;
    let client = client_with(&vhost, Queue::quorum("q")).await;
    let mut events = client.watch();
    let mut deliveries = client.consumer("q").prefetch(1).stream().await.unwrap();
    let publisher = publisher(&client).await;
    soon("an outcome", publisher.publish("q", "slow")).await.unwrap();
    soon("an outcome", publisher.publish("q", "quick")).await.unwrap();
    let kept = next(&mut deliveries).await;
    let again = next(&mut deliveries).await;
    let lost = |event: &ClientEvent| matches!(event, ClientEvent::ConsumerLost { .. });
    until_event(&mut events, "the loss", lost).await;
    assert!(again.redelivered());
    assert_eq!((kept.body(), again.body()), (&"slow".into(), &"slow".into()));
    let late = kept.ack().map_err(|error| error.kind());
    if version < Version::V4_3 {
        assert_eq!(late, Err(ErrorKind::Stale));
    } else {
        // It cancels the consumer and leaves the channel alone: the ack can be sent, and is of no meaning.
        assert_eq!(late, Ok(()));
    }
    again.ack().unwrap();
    let quick = next(&mut deliveries).await;
    assert_eq!(quick.body(), "quick");
    quick.ack().unwrap();
    until_healthy(&client).await;
}
