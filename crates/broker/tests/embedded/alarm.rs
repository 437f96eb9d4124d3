//! Too many messages: publishers are stopped, and consumers are not.

use leveret::amqp::ConsumeOptions;
use leveret_broker::Broker;
use leveret_testkit::eventually;
use leveret_wire::Properties;
use leveret_wire::method::{basic, channel};

use crate::support::{SOON, connect, get, peer, put, with_queue};

#[tokio::test]
async fn publishers_wait_while_memory_is_short_and_consumers_go_on() {
    let broker = Broker::builder().memory_limit(100_000).start().unwrap();
    let published = || broker.statistics().tally.published;
    let publisher = connect(&broker).await;
    let channel = with_queue(&publisher).await;
    let mut careless = peer(&broker).await;
    careless.send(1, &channel::Open {}).await;
    careless.expect::<channel::OpenOk>(1).await;

    let large = "x".repeat(60_000);
    let mut blocked = publisher.blocked();
    assert!(put(&channel, "q", &large).await.is_acked());
    assert!(put(&channel, "q", &large).await.is_acked());
    blocked.wait_for(|reason| reason.as_deref() == Some("low on memory")).await.unwrap();
    // One who does not care is not read from, as soon as it has published.
    let publish = basic::Publish { routing_key: "q".try_into().unwrap(), ..Default::default() };
    careless.send_content(1, &publish, &Properties::default(), "third").await;
    eventually(SOON, "the third publish", async || published() == 3).await;
    careless.send_content(1, &publish, &Properties::default(), "fourth").await;

    // Whoever does not publish is not stopped, and may do everything else.
    let other = connect(&broker).await;
    let consuming = other.open_channel().await.unwrap();
    assert_eq!(consuming.inspect_queue("q").await.unwrap().messages, 3);
    let mut consumer = consuming.consume("q", ConsumeOptions::default()).await.unwrap();
    let first = consumer.next().await.unwrap().unwrap();
    assert!(other.blocked().borrow().is_none());
    assert_eq!(published(), 3);
    first.ack().unwrap();

    blocked.wait_for(Option::is_none).await.unwrap();
    for _ in 0..3 {
        consumer.next().await.unwrap().unwrap().ack().unwrap();
    }
    assert!(put(&channel, "q", "fifth").await.is_acked());
    consumer.next().await.unwrap().unwrap().ack().unwrap();
    assert_eq!(get(&consuming, "q").await, None);
    assert_eq!((published(), broker.statistics().memory), (5, 0));
}
