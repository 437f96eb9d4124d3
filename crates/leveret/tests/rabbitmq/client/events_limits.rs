//! What limits of a subscriber's queue do to others, and to a topology file.

use leveret::{ErrorKind, Overflow, Queue, Topology};
use leveret_testkit::rabbitmq;

use crate::support::client::{client, soon, until_depth};

#[tokio::test]
async fn one_full_queue_that_refuses_makes_an_event_fail_that_all_others_have() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    for queue in [Queue::quorum("slow"), Queue::classic("slow-classic")] {
        let slow = queue.name().to_owned();
        let (exchange, other) = (format!("to-{slow}"), format!("beside-{slow}"));
        let events = client.events(exchange);
        let queue = queue.max_length(1).overflow(Overflow::RejectPublish);
        soon("a queue", events.subscribe_queue(queue, ["#"]).declare()).await.unwrap();
        soon("a queue", events.subscribe(other.as_str(), ["#"]).declare()).await.unwrap();
        // A quorum queue takes one or two more than its limit.
        let (mut published, mut refused) = (0, None);
        while refused.is_none() && published < 10 {
            published += 1;
            refused = soon("an outcome", events.publish("k", "event")).await.err();
        }
        let refused = refused.expect("a full queue");
        assert_eq!(refused.kind(), ErrorKind::Nacked, "{refused}");
        until_depth(&client, &other, published).await;
    }
}

#[tokio::test]
async fn one_full_queue_that_drops_its_oldest_leaves_publishers_alone() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let events = client.events("events");
    let slow = Queue::quorum("slow").max_length(1);
    soon("a queue", events.subscribe_queue(slow, ["#"]).declare()).await.unwrap();
    soon("a queue", events.subscribe("other", ["#"]).declare()).await.unwrap();
    for _ in 0..10 {
        soon("an outcome", events.publish("k", "event")).await.unwrap();
    }
    until_depth(&client, "other", 10).await;
    until_depth(&client, "slow", 1).await;
}

#[tokio::test]
async fn a_file_with_the_queue_of_a_subscription_names_its_delivery_limit() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let subscription = client.events("events").subscribe("shipping", ["#"]);
    soon("a queue", subscription.declare()).await.unwrap();
    let apply = async |queue: &str| {
        let file = format!("[[queue]]\nname = \"shipping\"\ntype = \"quorum\"\n{queue}");
        let topology = Topology::from_toml(&file).unwrap();
        soon("an answer", client.apply(&topology)).await
    };
    let refused = apply("").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused}");
    assert_eq!(refused.conflicts()[0].argument, "x-delivery-limit");
    apply("arguments = { x-delivery-limit = 1000000 }").await.unwrap();
    // The other way round: the file's queue as it is.
    let plain = Queue::quorum("plain");
    soon("a queue", client.apply(&Topology::new().queue(plain.clone()))).await.unwrap();
    let subscription = client.events("events").subscribe_queue(plain, ["#"]);
    soon("a subscription", subscription.declare()).await.unwrap();
}
