use std::collections::BTreeSet;
use std::time::Duration;

use leveret::{ConsumerBuilder, Deliveries, ErrorKind, Events, Failure, Incoming, Queue};
use leveret_profiles::{Acapi, AcapiSite};
use leveret_testkit::rabbitmq;

use crate::client::{SOON, client, next, soon, until_depth};

/// The keys of the events in a queue, which are acked.
async fn keys(deliveries: &mut Deliveries, count: usize) -> Vec<String> {
    let mut keys = Vec::new();
    for _ in 0..count {
        let delivery = next(deliveries).await;
        keys.push(delivery.routing_key().to_string());
        delivery.ack().unwrap();
    }
    keys
}

async fn declared(subscription: &ConsumerBuilder) {
    soon("a subscription", subscription.declare()).await.unwrap();
}

async fn publish(events: &Events, key: &str, event: &'static str) {
    soon("an outcome", events.publish(key, event)).await.unwrap();
}

#[tokio::test]
async fn events_of_acapi_go_through_the_fanout_to_whoever_is_bound_anywhere() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let retry = Acapi::new().interval(Duration::from_millis(50)).max_retries(1);
    let site = AcapiSite::new("dc0", "qa").retry(retry);
    let (topic, direct, all) =
        (site.events(&client), site.direct_events(&client), site.all_events(&client));
    let patterns =
        site.subscribe(&topic, "ledger", "patterns", ["info.policy.#", "info.#"]).unwrap();
    let keys_only = site.subscribe(&direct, "ledger", "keys", ["info.policy.created"]).unwrap();
    let everything = site.subscribe(&all, "graylog", "all", ["#"]).unwrap();
    for subscription in [&patterns, &keys_only, &everything] {
        declared(subscription).await;
    }
    for (events, key) in [
        (&topic, "info.policy.created"),
        (&direct, "info.policy.ended"),
        (&all, "error.policy.created"),
    ] {
        publish(events, key, "{}").await;
    }
    let mut everything = soon("a stream", everything.stream()).await.unwrap();
    let expected = ["info.policy.created", "info.policy.ended", "error.policy.created"];
    assert_eq!(keys(&mut everything, 3).await, expected);
    let mut keys_only = soon("a stream", keys_only.stream()).await.unwrap();
    assert_eq!(keys(&mut keys_only, 1).await, expected[..1]);
    // Both patterns fit, and it comes once; and fails for good.
    let failing = async || Err::<(), _>(Failure::retry("not now"));
    let parked = until_depth(&client, "dc0.qa.q.ledger.patterns-error", 2);
    let summary = soon("the end", patterns.handle(failing).run_until(parked)).await.unwrap();
    assert_eq!((summary.failed, summary.retried, summary.parked), (4, 2, 2));
    for queue in ["dc0.qa.q.ledger.patterns", "dc0.qa.q.ledger.keys", "dc0.qa.q.graylog.all"] {
        until_depth(&client, queue, 0).await;
    }
}

#[tokio::test]
async fn a_queue_that_is_bound_in_two_ways_gets_an_event_once() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let site = AcapiSite::new("dc0", "qa");
    let (topic, direct) = (site.events(&client), site.direct_events(&client));
    declared(&site.subscribe(&topic, "app", "q", ["info.#"]).unwrap()).await;
    declared(&site.subscribe(&direct, "app", "q", ["info.created"]).unwrap()).await;
    publish(&topic, "info.created", "{}").await;
    publish(&topic, "info.other", "{}").await;
    until_depth(&client, &site.queue_name("app", "q"), 2).await;
}

#[tokio::test]
async fn requests_of_acapi_are_replied_to_by_a_queue_for_each() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let site = AcapiSite::new("dc0", "qa");
    let method = async |incoming: Incoming, id: String| {
        let reply_to = incoming.properties().reply_to.map(|queue| queue.to_string());
        format!("{id} by {}", reply_to.unwrap_or_default())
    };
    let serving = site.serve(&client, "ledger", "policies", ["resource.policy.*"], method);
    let service = soon("a service", serving).await.unwrap();
    soon("a queue", service.declare()).await.unwrap();
    let auditor = client.consumer("audit").declaring(
        site.topology().queue(Queue::classic("audit").bind("dc0.qa.e.fanout.requests", "")),
    );
    declared(&auditor).await;
    let calling = async {
        let requests = site.requests(&client).build().await.unwrap();
        let mut replies = BTreeSet::new();
        for id in ["17", "17"] {
            let reply: String =
                requests.call("resource.policy.get", id).timeout(SOON).await.unwrap();
            assert!(reply.starts_with("17 by "), "{reply}");
            replies.insert(reply);
        }
        assert_eq!(replies.len(), 2, "a queue for each");
        // It reaches the auditor, and nobody who replies.
        let patience = Duration::from_millis(300);
        let nobody = requests.call::<String>("resource.other", "18").timeout(patience).await;
        assert_eq!(nobody.unwrap_err().kind(), ErrorKind::TimedOut);
        until_depth(&client, "audit", 3).await;
    };
    soon("the end", service.run_until(calling)).await.unwrap();
}
