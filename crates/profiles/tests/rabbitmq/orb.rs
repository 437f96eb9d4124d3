use std::time::Duration;

use leveret::Queue;
use leveret_profiles::Orb;
use leveret_testkit::rabbitmq::{self, Version};

use super::traps::take;
use crate::client::{client, publisher, soon, until_depth};

/// The redelivery queue of Orb is of the broker's default type, unless it is told one.
#[tokio::test]
async fn what_orbs_service_cannot_send_back_for_long_is_not_lost() {
    let vhost = rabbitmq::vhost().await;
    if !vhost.broker().is_embedded() {
        let quorum = serde_json::json!({ "default_queue_type": "quorum" });
        vhost.broker().management().put(&["vhosts", vhost.name()], quorum).await.unwrap();
    }
    let client = client(&vhost).await;
    let orb = Orb::new();
    let full = Queue::classic("q").max_length(1).argument("x-overflow", "reject-publish");
    client.apply(&orb.topology(full).unwrap()).await.unwrap();
    let publisher = publisher(&client).await;
    soon("an outcome", publisher.publish("q", "job")).await.unwrap();
    take(&client, "q").await.discard().unwrap();
    until_depth(&client, "orb.redelivery", 1).await;
    soon("an outcome", publisher.publish("q", "in its way")).await.unwrap();
    // It comes back each second, and 4.0 drops what has come back 20 times.
    let tries = if Version::under_test() == Version::V4_0 { 25 } else { 3 };
    let stop = async {
        tokio::time::sleep(Duration::from_secs(tries)).await;
        take(&client, "q").await.ack().unwrap();
        until_depth(&client, "q", 1).await;
        let back = take(&client, "q").await;
        assert_eq!(back.body(), "job");
        back.ack().unwrap();
    };
    let redelivered = orb.redelivery(&client).run_until(stop).await.unwrap();
    assert_eq!((redelivered.retried, redelivered.parked), (1, 0));
}
