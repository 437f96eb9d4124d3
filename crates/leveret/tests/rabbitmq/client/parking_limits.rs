//! Looking into queues in which the broker counts how often a message is given back, to drop it in the end.

use leveret::{Client, ErrorKind, Filter, Message, ParkingLot, Queue, Target, Topology};
use leveret_testkit::rabbitmq;
use leveret_testkit::rabbitmq::{Version, Vhost};

use super::parking::{counts_returns, lot};
use super::parking_kinds::reader;
use crate::support::client::{client, client_with, next, publisher, soon, until_depth};

/// The delivery limit of a queue, and who has set it.
#[derive(Clone, Copy, Debug)]
enum Limit {
    Argument(u32),
    Policy(u32),
}

use Limit::{Argument, Policy};

const LIMITS: [Limit; 5] = [Argument(0), Argument(1), Argument(2), Policy(0), Policy(1)];

impl Limit {
    /// The quorum queue `q` with this limit. The embedded broker has no policies.
    async fn queue(self, vhost: &Vhost) -> Option<Queue> {
        let queue = Queue::quorum("q");
        let (queue, policy) = match self {
            Argument(limit) => return Some(queue.delivery_limit(limit)),
            Policy(limit) => (queue, limit),
        };
        if vhost.broker().is_embedded() {
            return None;
        }
        let definition = serde_json::json!({ "delivery-limit": policy });
        let policy = serde_json::json!({ "pattern": ".*", "definition": definition });
        let path = ["policies", vhost.name(), "limit"];
        vhost.broker().management().put(&path, policy).await.unwrap();
        Some(queue)
    }
}

/// Publishes messages `0`, `1` and so on to `q`.
async fn fill(client: &Client, count: u32) {
    let message = |n: u32| Message::new(n.to_string()).message_id(n.to_string()).header("n", 5);
    let publisher = publisher(client).await;
    let messages = (0..count).map(|n| ("q", message(n)));
    soon("outcomes", publisher.publish_batch(messages)).await.unwrap();
}

/// The bodies that are left, taken out one by one.
async fn drain(client: &Client) -> Vec<u32> {
    let count = client.inspect_queue("q").await.unwrap().messages;
    let mut stream = client.consumer("q").stream().await.unwrap();
    let mut all = Vec::new();
    for _ in 0..count {
        let delivery = next(&mut stream).await;
        all.push(std::str::from_utf8(delivery.body()).unwrap().parse().unwrap());
        delivery.ack().unwrap();
    }
    all
}

async fn bodies(lot: &ParkingLot) -> Vec<u32> {
    let all = soon("a list", lot.list(&Filter::new(), 100_000)).await.unwrap();
    let body = |message: &leveret::ParkedMessage| {
        std::str::from_utf8(message.body()).unwrap().parse().unwrap()
    };
    all.iter().map(body).collect()
}

/// Does something with forty messages in `q`, once for each limit, all at the same time. The client who declared the queue
/// is another than the one who looks. The last argument says whether the broker counts what is given back.
async fn with_each_limit(act: impl AsyncFn(Client, ParkingLot, Limit, bool)) {
    let act = &act;
    let one = async move |limit: Limit| {
        let vhost = rabbitmq::vhost().await;
        let Some(queue) = limit.queue(&vhost).await else { return };
        let other = client_with(&vhost, queue).await;
        other.apply(&Topology::new().queue(Queue::classic("other"))).await.unwrap();
        fill(&other, 40).await;
        act(other, client(&vhost).await.parking_lot("q"), limit, counts_returns(&vhost)).await;
    };
    let [a, b, c, d, e] = LIMITS.map(|limit| Box::pin(one(limit)));
    tokio::join!(a, b, c, d, e);
}

/// Everything that takes messages out only to put them back.
async fn look_in_every_way(lot: &ParkingLot, expected: &[u32]) {
    assert_eq!(bodies(lot).await, expected);
    let nobody = || Filter::new().message_id("nobody");
    let peeked = soon("a peek", lot.list(&Filter::new(), 2)).await.unwrap();
    assert_eq!(peeked.len(), 2);
    assert_eq!(peeked[0].message_id(), Some(expected[0].to_string()));
    assert_eq!(peeked[0].header("n"), Some(5.into()));
    let third = soon("a position", lot.list(&Filter::new().position(3), 10)).await.unwrap();
    assert_eq!(third[0].message_id(), Some(expected[2].to_string()));
    assert!(soon("a filter", lot.list(&nobody(), 10)).await.unwrap().is_empty());
    let count = expected.len() as u64;
    assert_eq!(lot.groups(&Filter::new()).await.unwrap()[0].count, count);
    let mut file = Vec::new();
    assert_eq!(soon("an export", lot.export(&mut file).run()).await.unwrap(), count);
    let dry = lot.move_to(Target::queue("other")).dry_run().run();
    let dry = soon("a dry run", dry).await.unwrap();
    assert_eq!((dry.seen, dry.selected, dry.done), (count, count, count));
    let dry = soon("a dry run", lot.purge().limit(3).dry_run().run()).await.unwrap();
    assert_eq!(dry.done, 3);
    // No way is known for any of them.
    let done = soon("a replay", lot.replay().run()).await.unwrap();
    assert_eq!((done.done, done.failed), (0, count));
    for task in [lot.move_to(Target::queue("other")), lot.purge()] {
        let done = soon("a filter", task.filter(nobody()).run()).await.unwrap();
        assert_eq!((done.seen, done.done), (count, 0));
    }
}

/// Where that may cost messages, nothing is taken: every look is refused.
async fn is_refused_in_every_way(lot: &ParkingLot) {
    let some = || Filter::new().message_id("1");
    assert_eq!(lot.list(&some(), 1).await.unwrap_err().kind(), ErrorKind::Refused);
    assert_eq!(lot.groups(&some()).await.unwrap_err().kind(), ErrorKind::Refused);
    assert_eq!(lot.export(&mut Vec::new()).run().await.unwrap_err().kind(), ErrorKind::Refused);
    let to_other = || lot.move_to(Target::queue("other"));
    for task in [to_other().dry_run(), to_other().filter(some()), lot.purge().filter(some())] {
        assert_eq!(task.run().await.unwrap_err().kind(), ErrorKind::Refused);
    }
}

#[tokio::test]
async fn looking_loses_nothing_to_a_delivery_limit_that_no_client_knows() {
    with_each_limit(async |other, lot, limit, counts| {
        let all: Vec<u32> = (0..40).collect();
        for _ in 0..3 {
            match counts {
                true => is_refused_in_every_way(&lot).await,
                false => look_in_every_way(&lot, &all).await,
            }
        }
        assert_eq!(drain(&other).await, all, "{limit:?}");
    })
    .await;
}

#[tokio::test]
async fn what_is_not_meant_is_not_lost_to_a_delivery_limit_and_keeps_its_order() {
    with_each_limit(async |other, lot, limit, counts| {
        let mut rest: Vec<u32> = (0..40).collect();
        if !counts {
            for id in [7, 20, 39] {
                let one = Filter::new().message_id(id.to_string());
                let moved = lot.move_to(Target::queue("other")).filter(one).run();
                assert_eq!(soon("a move", moved).await.unwrap().done, 1, "{limit:?}");
                rest.retain(|n| *n != id);
            }
            let purged = lot.purge().filter(Filter::new().position(2)).run();
            assert_eq!(soon("a purge", purged).await.unwrap().done, 1, "{limit:?}");
            rest.remove(1);
        }
        let moved = soon("a move", lot.move_to(Target::queue("other")).limit(4).run()).await;
        match counts {
            true => assert_eq!(moved.unwrap_err().kind(), ErrorKind::Refused, "{limit:?}"),
            false => {
                assert_eq!(moved.unwrap().done, 4, "{limit:?}");
                rest.drain(..4);
                // What the target does not take stays at its place.
                let refused = lot.move_to(Target::exchange("amq.direct")).limit(3).run();
                assert_eq!(soon("a move", refused).await.unwrap().failed, 3, "{limit:?}");
            }
        }
        assert_eq!(drain(&other).await, rest, "{limit:?}");
    })
    .await;
}

/// Quorum queues of 4.0 hand out high priorities first.
#[tokio::test]
async fn messages_with_priorities_are_seen_once() {
    let vhost = rabbitmq::vhost().await;
    let other = client_with(&vhost, lot("q")).await;
    let publisher = publisher(&other).await;
    for n in 0..60u32 {
        let priority = if n.is_multiple_of(3) { 7 } else { 1 };
        let message = Message::new(n.to_string()).priority(priority);
        soon("an outcome", publisher.publish("q", message)).await.unwrap();
    }
    let lot = client(&vhost).await.parking_lot("q");
    let all: Vec<u32> = (0..60).collect();
    let sorted = |mut found: Vec<u32>| {
        found.sort();
        found
    };
    let of_lane = |found: &[u32], is_high: bool| -> Vec<u32> {
        found.iter().copied().filter(|n| n.is_multiple_of(3) == is_high).collect()
    };
    for _ in 0..3 {
        let found = bodies(&lot).await;
        assert!(of_lane(&found, true).is_sorted() && of_lane(&found, false).is_sorted());
        assert_eq!(sorted(found), all);
    }
    assert_eq!(sorted(drain(&other).await), all);
}

/// Without permissions the client cannot find out that looking costs nothing.
#[tokio::test]
async fn who_may_not_publish_is_told_before_anything_is_lost() {
    let vhost = rabbitmq::vhost().await;
    if vhost.broker().is_embedded() {
        return;
    }
    let other = client_with(&vhost, Queue::quorum("q").delivery_limit(0)).await;
    fill(&other, 5).await;
    let looker = reader(&vhost).await;
    let looked = soon("a list", looker.parking_lot("q").list(&Filter::new(), 10)).await;
    match Version::under_test() {
        Version::V4_3 => assert_eq!(looked.unwrap().len(), 5),
        _ => assert_eq!(looked.unwrap_err().kind(), ErrorKind::Refused),
    }
    let to_other = looker.parking_lot("q").move_to(Target::queue("other")).run();
    let moved = soon("a move", to_other).await;
    assert_eq!(moved.unwrap_err().kind(), ErrorKind::Refused);
    looker.close().await;
    until_depth(&other, "q", 5).await;
    assert_eq!(drain(&other).await, [0, 1, 2, 3, 4]);
}
