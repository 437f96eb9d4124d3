//! Parking lots, the same on every broker.

use std::io::Cursor;
use std::time::Duration;

use leveret::amqp::{Array, Connection, Options, Properties, Publish, RawProperties, Table, Value};
use leveret::{
    Client, ErrorKind, Exchange, Failure, Filter, Message, ParkingLot, Queue, QueueType,
    RetryPolicy, Target, Topology,
};
use leveret_testkit::rabbitmq;
use leveret_testkit::rabbitmq::{Version, Vhost};

use crate::support::client::{client, next, soon, until_depth};

const SECOND: Duration = Duration::from_secs(1);

/// Whether the broker counts what is given back to a quorum queue.
pub(super) fn counts_returns(vhost: &Vhost) -> bool {
    Version::under_test() < Version::V4_3 && !vhost.broker().is_embedded()
}

/// A quorum queue into which every broker lets others look: it has the arguments of a parking lot.
pub(super) fn lot(name: &str) -> Queue {
    Queue::quorum(name).argument("x-delivery-limit", 1_000_000_000i64)
}

/// A client with the queue `q` of this type.
async fn with_queue(vhost: &Vhost, queue: QueueType) -> Client {
    let client = client(vhost).await;
    let queue = Queue::new("q").of_type(queue);
    soon("a queue", client.apply(&Topology::new().queue(queue))).await.unwrap();
    client
}

/// Publishes messages `0`, `1` and so on to `q`, and has a handler park them.
async fn park(client: &Client, count: u32) -> ParkingLot {
    let publisher = client.publisher("").build().await.unwrap();
    let message = |n: u32| Message::new(n.to_string()).message_id(n.to_string());
    publisher.publish_batch((0..count).map(|n| ("q", message(n)))).await.unwrap();
    let handler = async |body: String| {
        let kind = if body.ends_with('0') { "round" } else { "other" };
        Err::<(), _>(Failure::permanent(format!("no {body}")).kind(kind))
    };
    let retry = RetryPolicy::fixed(SECOND).max_retries(1);
    // With a prefetch that follows from the workers, the order of failed messages depends on how long moving one takes.
    let runner = client.consumer("q").prefetch(100).retry(retry).handle(handler);
    let parked = until_depth(client, "q.parked", count);
    soon("parking", runner.run_until(parked)).await.unwrap();
    client.parking_lot("q.parked")
}

async fn bodies(lot: &ParkingLot) -> Vec<u32> {
    let all = soon("a list", lot.list(&Filter::new(), 100_000)).await.unwrap();
    all.iter()
        .map(|message| std::str::from_utf8(message.body()).unwrap().parse().unwrap())
        .collect()
}

/// Takes all messages out of a queue.
async fn drain(client: &Client, queue: &str, count: u32) -> Vec<String> {
    let mut stream = client.consumer(queue).stream().await.unwrap();
    let mut all = Vec::new();
    for _ in 0..count {
        let delivery = next(&mut stream).await;
        all.push(String::from_utf8(delivery.body().to_vec()).unwrap());
        delivery.ack().unwrap();
    }
    all
}

#[tokio::test]
async fn looking_fifty_times_changes_nothing() {
    for queue in [QueueType::Classic, QueueType::Quorum] {
        let vhost = rabbitmq::vhost().await;
        let client = with_queue(&vhost, queue).await;
        let lot = park(&client, 5).await;
        for round in 0..50 {
            assert_eq!(bodies(&lot).await, [0, 1, 2, 3, 4], "round {round} of {queue:?}");
        }
        let some = lot.list(&Filter::new(), 2).await.unwrap();
        assert_eq!(some.len(), 2);
        assert_eq!(bodies(&lot).await, [0, 1, 2, 3, 4], "{queue:?}");
    }
}

/// The header table as it is on the wire, but for what the broker counts.
fn header_table(properties: &[u8]) -> Vec<u8> {
    let raw = RawProperties::new(properties.to_vec().into());
    let mut headers = raw.get_of_any_depth().unwrap().headers.unwrap();
    headers.remove("x-delivery-count");
    headers.as_bytes().to_vec()
}

/// Leveret does not read them; other clients may.
#[tokio::test]
async fn headers_that_are_nested_too_deep_to_be_read_are_replayed_as_they_came() {
    let array = |inside: u32| [b"A".as_slice(), &(inside * 5).to_be_bytes()].concat();
    // RabbitMQ sorts them by their names where it counts.
    let mut headers = b"\x04deep".to_vec();
    headers.extend((0..100).rev().flat_map(array));
    headers.extend_from_slice(b"\x06tenantS\0\0\0\x04acme");
    let length = u32::try_from(headers.len()).unwrap().to_be_bytes();
    let raw = [b"\x20\x80".as_slice(), &length, &headers, b"\x0217"].concat();
    let raw = RawProperties::new(raw.into());
    assert!(raw.fault().is_some());
    for queue in [QueueType::Classic, QueueType::Quorum] {
        let vhost = rabbitmq::vhost().await;
        let client = with_queue(&vhost, queue).await;
        let options = Options::from_uri(&vhost.url()).unwrap();
        let connection = soon("a connection", Connection::open(&options)).await.unwrap();
        let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
        let properties = raw.get_of_any_depth().unwrap();
        let publish = Publish {
            routing_key: "q",
            mandatory: true,
            properties,
            body: "0".into(),
            ..Publish::default()
        };
        soon("an outcome", channel.publish(&publish).await.unwrap()).await;
        let handler = async || Err::<(), _>(Failure::permanent("never"));
        let runner = client.consumer("q").retry(RetryPolicy::fixed(SECOND)).handle(handler);
        let parked = until_depth(&client, "q.parked", 1);
        soon("parking", runner.run_until(parked)).await.unwrap();

        let lot = client.parking_lot("q.parked");
        let found = soon("a list", lot.list(&Filter::new(), 10)).await.unwrap();
        assert_eq!(found[0].story().queue.as_deref(), Some("q"));
        assert_eq!(found[0].story().error.as_deref(), Some("never"));
        let kept = found[0].header("x-leveret-properties").unwrap();
        assert_eq!(header_table(kept.as_bytes().unwrap()), headers);
        // What is moved on from the lot is a parked message still.
        let other = Topology::new().queue(Queue::new("lot").of_type(queue));
        soon("a lot", client.apply(&other)).await.unwrap();
        let moved = soon("the end", lot.move_to(Target::queue("lot")).run()).await.unwrap();
        assert_eq!((moved.done, moved.failed), (1, 0), "{:?}", moved.not_done);
        let lot = client.parking_lot("lot").allow_counted_returns();
        let replay = lot.edit(|_, draft| {
            assert_eq!(draft.properties.message_id.as_ref().unwrap(), "17");
            assert!(!format!("{draft:?}").is_empty());
        });
        let replayed = soon("the end", replay.run()).await.unwrap();
        assert_eq!((replayed.done, replayed.failed), (1, 0), "{:?}", replayed.not_done);
        let back = soon("a message", client.get("q", Default::default())).await.unwrap().unwrap();
        assert_eq!(header_table(back.raw_properties().as_bytes()), headers, "{queue:?}");
        // A move of the message itself changes nothing either, but for its address.
        back.ack().unwrap();
        soon("an outcome", channel.publish(&publish).await.unwrap()).await;
        let queue = client.parking_lot("q").allow_counted_returns();
        let moved = soon("the end", queue.move_to(Target::queue("lot")).run()).await.unwrap();
        assert_eq!((moved.done, moved.failed), (1, 0), "{:?}", moved.not_done);
        let there = soon("a message", client.get("lot", Default::default())).await.unwrap();
        let mut there = there.unwrap().raw_properties().get_of_any_depth().unwrap();
        let noted = there.headers.as_mut().unwrap();
        for name in ["x-leveret-exchange", "x-leveret-routing-key"] {
            assert!(noted.remove(name).is_some(), "{name}");
        }
        noted.remove("x-delivery-count");
        assert_eq!(noted.as_bytes(), headers);
    }
}

/// Looking must not wear messages out: where the broker counts, they are not taken.
#[tokio::test]
async fn looking_fifty_times_into_a_queue_with_the_brokers_delivery_limit_loses_nothing() {
    let vhost = rabbitmq::vhost().await;
    let client = with_queue(&vhost, QueueType::Quorum).await;
    let publisher = client.publisher("").build().await.unwrap();
    for n in 0..5 {
        publisher.publish("q", n.to_string()).await.unwrap();
    }
    let lot = client.parking_lot("q");
    for round in 0..50 {
        match counts_returns(&vhost) {
            false => assert_eq!(bodies(&lot).await, [0, 1, 2, 3, 4], "round {round}"),
            true => {
                let error = lot.list(&Filter::new(), 10).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Refused, "round {round}: {error}");
            }
        }
    }
    assert_eq!(drain(&client, "q", 5).await, ["0", "1", "2", "3", "4"]);
}

#[tokio::test]
async fn two_who_look_at_the_same_time_lose_nothing() {
    for queue in [QueueType::Classic, QueueType::Quorum] {
        let vhost = rabbitmq::vhost().await;
        let client = with_queue(&vhost, queue).await;
        let lot = park(&client, 40).await;
        for _ in 0..5 {
            let all = Filter::new();
            let (one, two) = tokio::join!(lot.list(&all, 7), lot.list(&all, 30));
            // What one of them has at the moment, the other does not see.
            assert!(one.unwrap().len() <= 7 && two.unwrap().len() <= 30);
        }
        until_depth(&client, "q.parked", 40).await;
        let mut found = bodies(&lot).await;
        found.sort();
        assert_eq!(found, (0..40).collect::<Vec<_>>(), "{queue:?}");
    }
}

#[tokio::test]
async fn all_are_replayed_in_order_and_as_they_were() {
    for queue in [QueueType::Classic, QueueType::Quorum] {
        let vhost = rabbitmq::vhost().await;
        let client = with_queue(&vhost, queue).await;
        let lot = park(&client, 1500).await;
        let told = lot.list(&Filter::new(), 1).await.unwrap();
        let story = told[0].story();
        assert_eq!((story.queue.as_deref(), story.attempts), (Some("q"), Some(1)));
        assert_eq!(story.error.as_deref(), Some("no 0"));

        let done = soon("a replay", lot.replay().run()).await.unwrap();
        assert_eq!((done.total, done.done, done.failed), (1500, 1500, 0));
        let mut stream = client.consumer("q").stream().await.unwrap();
        for n in 0..1500 {
            let delivery = next(&mut stream).await;
            assert_eq!(delivery.body(), n.to_string().as_str());
            let names: Vec<String> = match delivery.properties().headers {
                None => Vec::new(),
                Some(headers) => headers.iter().map(|(name, _)| name.to_string()).collect(),
            };
            let noted = names.iter().any(|name| name.contains("leveret") || name.contains("death"));
            assert!(!noted, "{names:?}");
            delivery.ack().unwrap();
        }
        assert_eq!(lot.depth().await.unwrap(), 0);
    }
}

#[tokio::test]
async fn what_is_not_meant_keeps_its_place() {
    for queue in [QueueType::Classic, QueueType::Quorum] {
        let vhost = rabbitmq::vhost().await;
        let client = with_queue(&vhost, queue).await;
        let lot = park(&client, 50).await;
        let round = || Filter::new().kind("round");
        let would = lot.replay().filter(round()).dry_run().run().await.unwrap();
        assert_eq!((would.selected, would.done), (5, 5));
        assert_eq!(lot.depth().await.unwrap(), 50);

        let done = lot.replay().filter(round()).limit(3).run().await.unwrap();
        assert_eq!((done.selected, done.done), (3, 3));
        assert_eq!(drain(&client, "q", 3).await, ["0", "10", "20"]);
        let rest: Vec<u32> = (0..50).filter(|n| n % 10 != 0 || *n > 20).collect();
        assert_eq!(bodies(&lot).await, rest, "{queue:?}");

        let purged = lot.purge().filter(Filter::new().message_id("7")).run().await.unwrap();
        assert_eq!(purged.done, 1);
        let rest: Vec<u32> = rest.into_iter().filter(|n| *n != 7).collect();
        assert_eq!(bodies(&lot).await, rest, "{queue:?}");
        let purged = lot.purge().run().await.unwrap();
        assert_eq!((purged.done, lot.depth().await.unwrap()), (46, 0));
    }
}

#[tokio::test]
async fn errors_are_counted_in_groups() {
    let vhost = rabbitmq::vhost().await;
    let client = with_queue(&vhost, QueueType::Quorum).await;
    let lot = park(&client, 30).await;
    let groups = lot.groups(&Filter::new()).await.unwrap();
    let told: Vec<_> = groups.iter().map(|g| (g.kind.as_deref().unwrap(), g.count)).collect();
    assert_eq!(told, [("other", 27), ("round", 3)]);
    assert!(groups.iter().all(|group| group.error.as_deref() == Some("no #")));
    assert!(groups.iter().all(|group| group.first.is_some() && group.first <= group.last));
}

#[tokio::test]
async fn a_message_can_be_changed_and_sent_elsewhere() {
    let vhost = rabbitmq::vhost().await;
    let client = with_queue(&vhost, QueueType::Quorum).await;
    client.apply(&Topology::new().queue(Queue::quorum("slow"))).await.unwrap();
    let lot = park(&client, 3).await;
    let edit = lot.edit(|message, draft| {
        draft.body = format!("{} again", message.position()).into();
        draft.set_header("edited", true).unwrap();
        draft.target = Target::queue("slow");
    });
    let done = edit.filter(Filter::new().position(2)).run().await.unwrap();
    assert_eq!((done.done, done.failed), (1, 0));
    let mut stream = client.consumer("slow").stream().await.unwrap();
    let delivery = next(&mut stream).await;
    assert_eq!(delivery.body(), "2 again");
    assert_eq!(delivery.header("edited"), Some(true.into()));
    delivery.ack().unwrap();
    assert_eq!(bodies(&lot).await, [0, 2]);
}

#[tokio::test]
async fn a_moved_message_keeps_its_story_and_gets_back_from_there() {
    let vhost = rabbitmq::vhost().await;
    let client = with_queue(&vhost, QueueType::Quorum).await;
    let topology = Topology::new()
        .queue(lot("attic"))
        .exchange(Exchange::topic("orders"))
        .queue(Queue::new("q").of_type(QueueType::Quorum).bind("orders", "order.*"));
    client.apply(&topology).await.unwrap();
    let orders = client.publisher("orders").build().await.unwrap();
    orders.publish("order.paid", "order").await.unwrap();
    let lot = client.parking_lot("q.parked");
    let handler = async || Err::<(), _>(Failure::permanent("no"));
    let parked = async { until_depth(&client, "q.parked", 1).await };
    client
        .consumer("q")
        .retry(RetryPolicy::default())
        .handle(handler)
        .run_until(parked)
        .await
        .unwrap();

    let moved = lot.move_to(Target::queue("attic")).run().await.unwrap();
    assert_eq!(moved.done, 1);
    let attic = client.parking_lot("attic");
    let told = attic.list(&Filter::new(), 10).await.unwrap();
    let story = told[0].story();
    assert_eq!(
        (story.error.as_deref(), story.routing_key.as_deref()),
        (Some("no"), Some("order.paid"))
    );
    assert_eq!(attic.replay().run().await.unwrap().done, 1);
    let mut stream = client.consumer("q").stream().await.unwrap();
    let delivery = next(&mut stream).await;
    assert_eq!(
        (delivery.body().as_ref(), delivery.routing_key().to_string().as_str()),
        (b"order".as_ref(), "order.paid")
    );
    delivery.ack().unwrap();
}

/// The queue in which it was looked at has counted that, and the one that it comes to has not.
#[tokio::test]
async fn a_moved_message_does_not_tell_how_often_it_was_looked_at() {
    let vhost = rabbitmq::vhost().await;
    let client = with_queue(&vhost, QueueType::Quorum).await;
    let attic = Topology::new().queue(Queue::classic("attic"));
    client.apply(&attic).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("q", "job").await.unwrap();
    let lot = client.parking_lot("q").allow_counted_returns();
    for _ in 0..3 {
        assert_eq!(soon("a list", lot.list(&Filter::new(), 10)).await.unwrap().len(), 1);
    }
    let moved = soon("a move", lot.move_to(Target::queue("attic")).run()).await.unwrap();
    assert_eq!(moved.done, 1);
    let mut stream = client.consumer("attic").stream().await.unwrap();
    let delivery = next(&mut stream).await;
    for count in ["x-acquired-count", "x-delivery-count"] {
        assert_eq!(delivery.header(count), None, "{count}");
    }
    delivery.ack().unwrap();
}

/// What Sneakers and others leave in a queue has no headers of ours.
#[tokio::test]
async fn dead_letters_of_other_systems_go_back_to_the_queue_in_which_they_died() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let topology = Topology::new()
        .exchange(Exchange::fanout("jobs-error"))
        .queue(Queue::classic("jobs-error").bind("jobs-error", ""))
        .queue(Queue::classic("jobs").dead_letter_to("jobs-error"))
        .queue(Queue::classic("copies"));
    client.apply(&topology).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let copies = Array::from_values(["copies".into()]).unwrap();
    let message = Message::new("job").header("CC", Value::Array(copies)).header("n", 5);
    publisher.publish("jobs", message).await.unwrap();
    until_depth(&client, "copies", 1).await;
    let delivery = client.get("jobs", Default::default()).await.unwrap().expect("a job");
    delivery.discard().unwrap();
    until_depth(&client, "jobs-error", 1).await;

    let lot = client.parking_lot("jobs-error");
    let told = lot.list(&Filter::new(), 10).await.unwrap();
    let story = told[0].story();
    assert_eq!((story.queue.as_deref(), story.reason.as_deref()), (Some("jobs"), Some("rejected")));
    assert_eq!(story.attempts, Some(1));
    let done = lot.replay().run().await.unwrap();
    assert_eq!((done.done, done.failed), (1, 0), "{done:?}");
    until_depth(&client, "jobs", 1).await;
    until_depth(&client, "copies", 1).await;
    let delivery = client.get("jobs", Default::default()).await.unwrap().expect("the job again");
    assert_eq!(delivery.header("x-death"), None);
    assert_eq!(delivery.header("n"), Some(5.into()));
    delivery.ack().unwrap();
}

#[tokio::test]
async fn what_cannot_be_replayed_stays_and_is_named() {
    let vhost = rabbitmq::vhost().await;
    let client = with_queue(&vhost, QueueType::Quorum).await;
    let lot = park(&client, 3).await;
    client.delete_queue("q", Default::default()).await.unwrap();
    let done = lot.replay().run().await.unwrap();
    assert_eq!((done.done, done.failed), (0, 3));
    assert!(done.not_done[0].error.to_string().contains("\"q\""), "{done:?}");
    assert_eq!(bodies(&lot).await, [0, 1, 2]);
    let nowhere = lot.replay_to(Target::exchange("nowhere")).run().await.unwrap();
    assert_eq!((nowhere.done, nowhere.failed), (0, 3));

    let error = client.parking_lot("missing").list(&Filter::new(), 1).await.unwrap_err();
    assert_eq!(error.kind(), leveret::ErrorKind::Missing);
}

#[tokio::test]
async fn what_is_exported_is_imported_as_it_was() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let topology = Topology::new().queue(lot("one")).queue(lot("two"));
    client.apply(&topology).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let inner =
        Table::from_pairs([("deep", Value::Array(Array::from_values([1i8.into()]).unwrap()))]);
    let headers = Table::from_pairs([
        ("bytes", Value::Bytes(vec![0, 255].into())),
        ("long", i64::MIN.into()),
        ("short", 7i16.into()),
        ("table", Value::Table(inner.unwrap())),
        ("when", Value::Timestamp(1_700_000_000)),
    ]);
    let properties = Properties {
        headers: Some(headers.unwrap()),
        message_id: Some("m".try_into().unwrap()),
        timestamp: Some(5),
        priority: Some(3),
        delivery_mode: Some(2),
        ..Properties::default()
    };
    for body in [b"text".as_slice(), b"\xff\x00"] {
        let message = Message::with_properties(body, properties.clone());
        publisher.publish("one", message).await.unwrap();
    }
    let (one, two) = (client.parking_lot("one"), client.parking_lot("two"));
    let mut file = Vec::new();
    assert_eq!(one.export(&mut file).run().await.unwrap(), 2);
    assert_eq!(one.depth().await.unwrap(), 2);
    file.extend_from_slice(b"\n{\"body\":5}\n");

    let checked = two.import(&mut Cursor::new(&file)).dry_run().run().await.unwrap();
    assert_eq!((checked.imported, checked.failed, two.depth().await.unwrap()), (2, 1, 0));
    let mut reports = Vec::new();
    let report = |so_far: &leveret::Imported| reports.push(so_far.imported + so_far.failed);
    let mut lines = Cursor::new(&file);
    let imported = two.import(&mut lines).rate(50.0).progress(report).run().await.unwrap();
    assert_eq!((reports.len(), reports.last()), (4, Some(&3)));
    assert_eq!((imported.imported, imported.failed), (2, 1));
    assert_eq!(imported.bad_lines[0].0, 4);
    until_depth(&client, "two", 2).await;
    let before = one.list(&Filter::new(), 10).await.unwrap();
    let after = two.list(&Filter::new(), 10).await.unwrap();
    // Where it came from is noted, since it has another address here.
    let noted =
        ["x-leveret-exchange", "x-leveret-routing-key", "x-delivery-count", "x-acquired-count"];
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(before.body(), after.body());
        let own = |message: &leveret::ParkedMessage| {
            let mut own = message.properties().into_owned();
            for name in noted {
                own.headers.as_mut().unwrap().remove(name);
            }
            own
        };
        assert_eq!(own(before), own(after));
        assert_eq!(own(after), properties);
        assert_eq!(after.story().routing_key.as_deref(), Some("one"));
    }
}
