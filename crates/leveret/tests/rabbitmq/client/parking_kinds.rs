//! Queues of all types are looked into, unless that could cost messages.

use std::time::Duration;

use leveret::{
    Client, ErrorKind, Exchange, Filter, Overflow, ParkedMessage, ParkingLot, Queue, QueueType,
    Topology,
};
use leveret_testkit::rabbitmq;
use leveret_testkit::rabbitmq::{Version, Vhost};

use super::parking::counts_returns;
use crate::support::client::{client, client_with, publisher, soon, until_depth};

/// A client whose user may read from everything, and nothing else.
pub(super) async fn reader(vhost: &Vhost) -> Client {
    let management = vhost.broker().management();
    let user = serde_json::json!({ "password": "carrot", "tags": "" });
    management.put(&["users", "looker"], user).await.unwrap();
    let allowed = serde_json::json!({ "configure": "", "write": "", "read": ".*" });
    management.put(&["permissions", vhost.name(), "looker"], allowed).await.unwrap();
    let url = vhost.url().replacen("guest:guest@", "looker:carrot@", 1);
    soon("a client", Client::connect(url)).await.unwrap()
}

/// The queue `q` with a hundred messages that came through the exchange `jobs`.
async fn fill(vhost: &Vhost, queue: Queue) -> Client {
    let owner = client(vhost).await;
    let topology = Topology::new().exchange(Exchange::fanout("jobs")).queue(queue.bind("jobs", ""));
    soon("a queue", owner.apply(&topology)).await.unwrap();
    let jobs = soon("a publisher", owner.publisher("jobs").build()).await.unwrap();
    let messages = (0..100).map(|n| ("key", n.to_string()));
    soon("outcomes", jobs.publish_batch(messages)).await.unwrap();
    owner
}

/// Looks twice, and says whether all are there and came as they were.
async fn is_left_as_it_is(lot: &ParkingLot) -> bool {
    let mut is_as_it_was = true;
    for _ in 0..2 {
        let found = soon("a list", lot.list(&Filter::new(), 1000)).await.unwrap();
        let body = |message: &ParkedMessage| String::from_utf8(message.body().to_vec()).unwrap();
        let expected = (0..100).map(|n| n.to_string());
        assert!(found.iter().map(body).eq(expected), "{} are there", found.len());
        is_as_it_was &= (found[0].exchange(), found[0].routing_key()) == ("jobs", "key");
    }
    is_as_it_was
}

/// Classic queues with all sorts of arguments.
fn classic_queues() -> Vec<Queue> {
    let plain = || Queue::classic("q");
    vec![
        plain(),
        plain().transient(),
        plain().message_ttl(Duration::from_secs(600)).max_length(100),
        plain().dead_letter_to("dead").dead_letter_key("").overflow(Overflow::RejectPublish),
        plain().expires(Duration::from_secs(600)).single_active_consumer(),
        Queue::new("q").of_type(QueueType::Classic).max_priority(5),
        Queue::new("q").max_priority(5).message_ttl(Duration::from_secs(600)),
    ]
}

/// A classic queue counts nothing, whatever arguments it has.
#[tokio::test]
async fn messages_of_classic_queues_are_given_back_as_they_are() {
    for queue in classic_queues() {
        let vhost = rabbitmq::vhost().await;
        let told = format!("{queue:?}");
        let _owner = fill(&vhost, queue).await;
        let lot = client(&vhost).await.parking_lot("q").queue_type(QueueType::Classic);
        assert!(is_left_as_it_is(&lot).await, "{told}");
    }
}

#[tokio::test]
async fn who_may_only_read_looks_into_every_classic_queue() {
    let mut queues = classic_queues();
    // This user is not told that it deletes itself.
    queues.push(Queue::classic("q").auto_delete());
    for queue in queues {
        let vhost = rabbitmq::vhost().await;
        if vhost.broker().is_embedded() {
            return;
        }
        let told = format!("{queue:?}");
        let owner = fill(&vhost, queue).await;
        let looker = reader(&vhost).await;
        let lot = looker.parking_lot("q").queue_type(QueueType::Classic);
        assert!(is_left_as_it_is(&lot).await, "{told}");
        looker.close().await;
        until_depth(&owner, "q", 100).await;
    }
}

/// From 3.11 on a virtual host may have a type for queues that name none.
#[tokio::test]
async fn the_type_that_a_virtual_host_gives_to_queues_is_the_one_that_counts() {
    for default in [None, Some("classic"), Some("quorum")] {
        let vhost = rabbitmq::vhost().await;
        if vhost.broker().is_embedded() {
            return;
        }
        let management = vhost.broker().management();
        if let Some(default) = default {
            let settings = serde_json::json!({ "default_queue_type": default });
            management.put(&["vhosts", vhost.name()], settings).await.unwrap();
        }
        let queues = [Queue::new("q"), Queue::new("q").max_length(1000)];
        for queue in queues {
            let told = format!("{queue:?} with {default:?}");
            let owner = fill(&vhost, queue).await;
            let given = management.get(&["queues", vhost.name(), "q"]).await.unwrap();
            if default == Some("quorum") && Version::under_test() > Version::V3_10 {
                assert_eq!(given["type"], "quorum", "{told}");
            }
            let lot = client(&vhost).await.parking_lot("q");
            // The type of a queue without arguments is found out.
            let is_known =
                given["type"] == "classic" && given["arguments"]["x-max-length"].is_null();
            match is_known || Version::under_test() >= Version::V4_3 {
                true => assert!(is_left_as_it_is(&lot).await, "{told}: {given}"),
                false => {
                    let error = soon("an answer", lot.list(&Filter::new(), 10)).await.unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Refused, "{told}: {given}");
                }
            }
            soon("deletion", owner.delete_queue("q", Default::default())).await.unwrap();
        }
    }
}

/// Our consumer would be its last one.
#[tokio::test]
async fn a_queue_that_deletes_itself_is_not_looked_into() {
    for queue in [Queue::classic("q"), Queue::classic("q").transient().max_length(500)] {
        let vhost = rabbitmq::vhost().await;
        let other = client_with(&vhost, queue.auto_delete()).await;
        let publisher = publisher(&other).await;
        soon("an outcome", publisher.publish("q", "job")).await.unwrap();
        let lot = client(&vhost).await.parking_lot("q");
        let error = soon("an answer", lot.list(&Filter::new(), 10)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("deletes itself"), "{error}");
        until_depth(&other, "q", 1).await;
    }
}

/// What is read of a stream stays there: nothing could be given back or replayed.
#[tokio::test]
async fn a_stream_is_not_looked_into() {
    let vhost = rabbitmq::vhost().await;
    if vhost.broker().is_embedded() {
        return;
    }
    let client = client_with(&vhost, Queue::stream("q")).await;
    let publisher = publisher(&client).await;
    soon("an outcome", publisher.publish("q", "job")).await.unwrap();
    let error = soon("an answer", client.parking_lot("q").list(&Filter::new(), 10)).await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains("is a stream"), "{error}");
}

/// What is remembered of a queue must not cost messages when there is another of its name.
#[tokio::test]
async fn a_queue_that_is_made_anew_may_be_of_another_kind() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    let lot = client.parking_lot("q");
    for limit in [None, Some(0), None, Some(0)] {
        soon("deletion", client.delete_queue("q", Default::default())).await.unwrap();
        let missing = soon("an answer", lot.list(&Filter::new(), 10)).await.unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::Missing);
        let queue = match limit {
            None => Queue::classic("q"),
            Some(limit) => Queue::quorum("q").delivery_limit(limit),
        };
        soon("a queue", client.apply(&Topology::new().queue(queue))).await.unwrap();
        soon("an outcome", publisher.publish("q", "job")).await.unwrap();
        for _ in 0..3 {
            let found = soon("a list", lot.list(&Filter::new(), 10)).await;
            match limit.is_some() && counts_returns(&vhost) {
                true => assert_eq!(found.unwrap_err().kind(), ErrorKind::Refused),
                false => assert_eq!(found.unwrap().len(), 1, "{limit:?}"),
            }
        }
        until_depth(&client, "q", 1).await;
    }
}
