//! Parking lots on the embedded broker: faults in the middle, and time.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::Duration;

use leveret::amqp::{Array, Properties, Table, Value};
use leveret::{
    Client, ClientEvent, Failure, Filter, Message, ParkingLot, Queue, RetryPolicy, Target, Topology,
};
use leveret_broker::{Broker, Profile};
use tokio::time::Instant;

use crate::{broker, client_of, client_with, depth, soon};

const SECOND: Duration = Duration::from_secs(1);

/// A lot with messages `0`, `1` and so on that came from `q`.
async fn lot_with(broker: &Broker, count: u32) -> (Client, ParkingLot) {
    let client = client_with(broker, Queue::quorum("q")).await;
    // As it is for parked messages: RabbitMQ 4.3 counts when somebody who holds them goes away.
    let queue = Queue::quorum("lot").argument("x-delivery-limit", 1_000_000_000i64);
    client.apply(&Topology::new().queue(queue)).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let messages = (0..count).map(|n| ("lot", parked(n)));
    publisher.publish_batch(messages).await.unwrap();
    let lot = client.parking_lot("lot");
    (client, lot)
}

fn parked(n: u32) -> Message {
    let kind = if n.is_multiple_of(2) { "even" } else { "odd" };
    Message::new(n.to_string())
        .message_id(n.to_string())
        .header("x-leveret-queue", "q")
        .header("x-leveret-error-kind", kind)
}

async fn taken(client: &Client, queue: &str) -> Vec<u32> {
    let mut all = Vec::new();
    while let Some(delivery) = client.get(queue, Default::default()).await.unwrap() {
        all.push(std::str::from_utf8(delivery.body()).unwrap().parse().unwrap());
        delivery.ack().unwrap();
    }
    all
}

fn is_in_order(numbers: &[u32]) -> bool {
    let mut seen = BTreeSet::new();
    // Each comes after all before it when it comes first; doubles may follow.
    numbers.iter().filter(|n| seen.insert(**n)).is_sorted()
}

/// Does something to the broker in the middle of a replay.
type Fault = fn(&Broker);

const CUTS: [(&str, Fault); 3] = [
    ("all connections cut", |broker| broker.faults().cut_all_connections()),
    ("publishing cut", |broker| {
        broker.faults().cut_connections_named("test (publishing)");
    }),
    ("home cut", |broker| {
        broker.faults().cut_connections_named("test");
    }),
];

/// One that counts what is given back, and takes it back when a channel is closed.
fn counting() -> Broker {
    Broker::builder().profile(Profile::RabbitMq3_10).start().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_look_that_is_cut_off_shows_all_loses_nothing_and_keeps_the_order() {
    for (what, fault) in CUTS {
        for at in [1, 20, 800] {
            let broker = counting();
            let (client, lot) = lot_with(&broker, 800).await;
            let mut shown = Vec::new();
            let mut is_done = false;
            let look = |message: &leveret::ParkedMessage| {
                if message.position() == 1 {
                    shown.clear();
                }
                shown.push(message.message_id().unwrap().parse::<u32>().unwrap());
                if shown.len() == at && !is_done {
                    is_done = true;
                    fault(&broker);
                }
                ControlFlow::Continue(())
            };
            soon("a look", lot.look(look).run()).await.unwrap();
            let all: Vec<u32> = (0..800).collect();
            assert!(shown == all, "{what} at {at}: {} were shown", shown.len());
            let found = taken(&client, "lot").await;
            assert!(found == all, "{what} at {at}: {} are there", found.len());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_fault_in_the_middle_of_a_filtered_replay_loses_nothing() {
    for (what, fault) in CUTS {
        for at in [1, 10, 400] {
            let broker = counting();
            let (client, lot) = lot_with(&broker, 800).await;
            let mut is_done = false;
            let progress = |progress: &leveret::Progress| {
                if progress.done == at && !is_done {
                    is_done = true;
                    fault(&broker);
                }
            };
            let replay = lot.replay().filter(Filter::new().kind("odd")).progress(progress);
            soon("a replay", replay.run()).await.unwrap();
            for (queue, parity) in [("q", 1), ("lot", 0)] {
                let found = taken(&client, queue).await;
                let found: BTreeSet<u32> = found.into_iter().collect();
                let expected: BTreeSet<u32> = (0..800).filter(|n| n % 2 == parity).collect();
                let missing: Vec<_> = expected.difference(&found).collect();
                assert!(missing.is_empty(), "{missing:?} of {queue}, {what} at {at}");
                assert_eq!(found.len(), expected.len(), "{queue}, {what} at {at}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_fault_in_the_middle_of_a_replay_loses_nothing_and_keeps_the_order() {
    for (what, fault) in CUTS {
        for at in [1, 10, 700, 1999] {
            let broker = broker();
            let (client, lot) = lot_with(&broker, 2000).await;
            let mut is_done = false;
            let progress = |progress: &leveret::Progress| {
                if progress.done == at && !is_done {
                    is_done = true;
                    fault(&broker);
                }
            };
            let done = soon("a replay", lot.replay().progress(progress).run()).await.unwrap();
            assert_eq!(done.failed, 0, "{what} at {at}: {done:?}");
            assert_eq!(depth(&broker, "lot"), Some(0), "{what} at {at}: {done:?}");
            let arrived = taken(&client, "q").await;
            let all: BTreeSet<u32> = arrived.iter().copied().collect();
            assert_eq!(all.len(), 2000, "{what} at {at}");
            assert!(is_in_order(&arrived), "{what} at {at}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_broker_refuses_in_the_middle_stays_at_its_place() {
    let faults: [(&str, Fault); 2] = [
        ("a nack", |broker| broker.faults().nack_publishes(3)),
        ("a return", |broker| broker.faults().return_publishes(3)),
    ];
    for (what, fault) in faults {
        let broker = broker();
        let (client, lot) = lot_with(&broker, 100).await;
        // The first page has few messages, so the fault meets some of the next.
        let mut is_done = false;
        let progress = |progress: &leveret::Progress| {
            if progress.seen == 40 && !is_done {
                is_done = true;
                fault(&broker);
            }
        };
        let done =
            soon("a replay", lot.replay().rate(1000.0).progress(progress).run()).await.unwrap();
        assert_eq!((done.done, done.failed), (97, 3), "{what}: {done:?}");
        let stayed = lot.list(&Filter::new(), 100).await.unwrap();
        let stayed: Vec<String> = stayed.iter().map(|m| m.message_id().unwrap()).collect();
        let named: Vec<String> =
            done.not_done.iter().map(|n| n.message_id.clone().unwrap()).collect();
        assert_eq!(stayed, named, "{what}");
        let arrived = taken(&client, "q").await;
        assert_eq!(arrived.len(), 97, "{what}");
        assert!(arrived.is_sorted(), "{what}");
    }
}

/// The broker closes the channel over it, and with that goes what is known of the messages beside it.
#[tokio::test(start_paused = true)]
async fn a_message_that_costs_the_channel_stays_and_all_others_are_sent() {
    let broker = Broker::builder().max_message_size(1000).start().unwrap();
    let (client, lot) = lot_with(&broker, 100).await;
    let edit = |message: &leveret::ParkedMessage, draft: &mut leveret::Draft| {
        if [30, 31, 70].contains(&message.message_id().unwrap().parse().unwrap()) {
            draft.body = vec![b'x'; 2000].into();
        }
    };
    let done = soon("a replay", lot.edit(edit).run()).await.unwrap();
    assert_eq!((done.done, done.failed), (97, 3), "{done:?}");
    let named: Vec<String> = done.not_done.iter().map(|n| n.message_id.clone().unwrap()).collect();
    assert_eq!(named, ["30", "31", "70"]);
    assert_eq!(depth(&broker, "lot"), Some(3));
    let arrived = taken(&client, "q").await;
    let doubled = arrived.len() as u64 - 97;
    assert!(doubled <= done.possibly_duplicated, "{doubled} are there twice: {done:?}");
    assert_eq!(arrived.into_iter().collect::<BTreeSet<u32>>().len(), 97);
}

#[tokio::test(start_paused = true)]
async fn a_task_that_is_dropped_leaves_everything_at_its_place() {
    let broker = broker();
    let (_client, lot) = lot_with(&broker, 50).await;
    for _ in 0..30 {
        let slow = lot.replay().filter(Filter::new().kind("nobody")).rate(0.001).run();
        let _ = tokio::time::timeout(Duration::from_millis(1), slow).await;
        let look = lot.look(|_| ControlFlow::Continue(())).run();
        tokio::select! { biased; _ = look => {}, () = tokio::task::yield_now() => {} }
    }
    let back = async {
        while depth(&broker, "lot") != Some(50) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("all messages back in the lot", back).await;
    let all = lot.list(&Filter::new(), 100).await.unwrap();
    let ids: Vec<String> = all.iter().map(|message| message.message_id().unwrap()).collect();
    assert_eq!(ids, (0..50).map(|n: u32| n.to_string()).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn what_fails_again_is_not_replayed_again() {
    let broker = broker();
    let client = client_with(&broker, Queue::quorum("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch((0..20).map(|n| ("q", n.to_string()))).await.unwrap();
    let handler = async || Err::<(), _>(Failure::permanent("never"));
    let retry = RetryPolicy::fixed(SECOND).max_retries(1);
    let replaying = async {
        while depth(&broker, "q.parked") != Some(20) {
            tokio::time::sleep(SECOND).await;
        }
        // Slow enough for each to be parked again before the next one goes.
        let done = client.parking_lot("q.parked").replay().rate(1.0).run().await.unwrap();
        assert_eq!((done.total, done.done), (20, 20));
        while depth(&broker, "q.parked") != Some(20) {
            tokio::time::sleep(SECOND).await;
        }
    };
    let runner = client.consumer("q").retry(retry).handle(handler);
    let summary = soon("replaying", runner.run_until(replaying)).await.unwrap();
    assert_eq!(summary.parked, 40);
}

#[tokio::test(start_paused = true)]
async fn a_rate_is_kept() {
    let broker = broker();
    let (_client, lot) = lot_with(&broker, 30).await;
    let began = Instant::now();
    let mut exported = Vec::new();
    assert_eq!(lot.export(&mut exported).rate(2.0).limit(21).run().await.unwrap(), 21);
    assert!((10..12).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    let began = Instant::now();
    let replaying = lot.clone();
    // It can be a task of its own.
    let replay = tokio::spawn(async move { replaying.replay().rate(2.0).limit(21).run().await });
    let done = replay.await.unwrap().unwrap();
    assert_eq!(done.done, 21);
    assert!((10..12).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    for rate in [0.0, -1.0, f64::NAN] {
        let error = lot.replay().rate(rate).run().await.unwrap_err();
        assert_eq!(error.kind(), leveret::ErrorKind::Invalid);
    }
}

#[tokio::test(start_paused = true)]
async fn progress_is_told() {
    let broker = broker();
    let (_client, lot) = lot_with(&broker, 100).await;
    let mut told = Vec::new();
    let task = lot.replay().filter(Filter::new().kind("odd"));
    task.progress(|progress| told.push((progress.total, progress.done))).run().await.unwrap();
    assert_eq!(told.last(), Some(&(100, 50)));
    assert!(told.iter().map(|(_, done)| done).is_sorted());
}

#[tokio::test(start_paused = true)]
async fn a_replayed_message_may_expire_again() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("q", Message::new("job").expires_in(60 * SECOND)).await.unwrap();
    let handler = async || Err::<(), _>(Failure::permanent("never"));
    let stop = tokio::time::sleep(SECOND);
    client
        .consumer("q")
        .retry(RetryPolicy::default())
        .handle(handler)
        .run_until(stop)
        .await
        .unwrap();
    tokio::time::sleep(600 * SECOND).await;
    assert_eq!(depth(&broker, "q.parked"), Some(1));
    client.parking_lot("q.parked").replay().run().await.unwrap();
    assert_eq!(depth(&broker, "q"), Some(1));
    tokio::time::sleep(61 * SECOND).await;
    assert_eq!(depth(&broker, "q"), Some(0));
}

#[tokio::test(start_paused = true)]
async fn a_replayed_message_is_what_was_published_and_nobody_else_gets_a_copy() {
    let broker = broker();
    let client = client_with(&broker, Queue::quorum("q")).await;
    client.apply(&Topology::new().queue(Queue::classic("other"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let text = |text: &'static str| Some(text.try_into().unwrap());
    let copies = Array::from_values([Value::from("other")]).unwrap();
    let headers = [("CC", Value::Array(copies)), ("n", 5.into()), ("tenant", "acme".into())];
    let original = Properties {
        headers: Some(Table::from_pairs(headers).unwrap()),
        delivery_mode: Some(2),
        correlation_id: text("c"),
        expiration: text("3000000"),
        message_id: text("m"),
        user_id: text("guest"),
        ..Properties::default()
    };
    let message = Message::with_properties("job", original.clone());
    publisher.publish("q", message).await.unwrap();
    let handler = async || Err::<(), _>("no");
    let retry = RetryPolicy::fixed(SECOND).max_retries(2);
    let stop = tokio::time::sleep(60 * SECOND);
    client.consumer("q").retry(retry).handle(handler).run_until(stop).await.unwrap();

    let lot = client.parking_lot("q.parked");
    assert_eq!(lot.list(&Filter::new(), 1).await.unwrap()[0].story().history.len(), 3);
    assert_eq!(lot.replay().run().await.unwrap().done, 1);
    assert_eq!(depth(&broker, "other"), Some(1), "the copy that was made at first");
    let delivery = client.get("q", Default::default()).await.unwrap().expect("the job");
    let mut properties = delivery.properties().into_owned();
    // In the order of names, as the broker may change it.
    properties.headers = properties.headers.map(sorted);
    assert_eq!(properties, original);
    delivery.ack().unwrap();
}

fn sorted(table: Table<'_>) -> Table<'static> {
    let mut fields: Vec<_> = table.iter().map(|(name, value)| (name.to_string(), value)).collect();
    fields.sort_by(|one, other| one.0.cmp(&other.0));
    Table::from_pairs(fields.iter().map(|(name, value)| (name.as_str(), value.clone()))).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_message_without_a_story_needs_a_target() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    client.apply(&Topology::new().queue(Queue::classic("x.failed"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let headers = Table::from_pairs([("mb-retries", Value::from(0)), ("n", 1.into())]).unwrap();
    let properties = Properties { headers: Some(headers), ..Properties::default() };
    publisher.publish("x.failed", Message::with_properties("job", properties)).await.unwrap();
    let lot = client.parking_lot("x.failed");
    let done = lot.replay().run().await.unwrap();
    assert_eq!((done.done, done.failed), (0, 1));
    assert!(done.not_done[0].error.to_string().contains("name a target"), "{done:?}");
    let done = lot.replay_to(Target::queue("q")).run().await.unwrap();
    assert_eq!((done.done, done.failed), (1, 0));
    let delivery = client.get("q", Default::default()).await.unwrap().expect("the job");
    assert_eq!((delivery.header("mb-retries"), delivery.header("n")), (None, Some(1.into())));
    let error = lot.move_to(Target::Origin).run().await.unwrap_err();
    assert_eq!(error.kind(), leveret::ErrorKind::Invalid);
}

#[tokio::test(start_paused = true)]
async fn other_consumers_take_messages_meanwhile_and_the_end_is_found() {
    let broker = broker();
    let (client, lot) = lot_with(&broker, 3000).await;
    let other = client_of(&broker).await;
    let mut stream = other.consumer("lot").prefetch(100).stream().await.unwrap();
    let taking = async {
        for _ in 0..1000 {
            stream.next().await.unwrap().unwrap().ack().unwrap();
        }
        std::future::pending::<()>().await;
    };
    let done = tokio::select! {
        done = lot.replay().run() => done.unwrap(),
        () = taking => unreachable!(),
    };
    drop(stream);
    assert!(done.done >= 1000 && done.done <= 3000, "{done:?}");
    assert!(is_in_order(&taken(&client, "q").await));
}

#[tokio::test(start_paused = true)]
async fn a_lot_that_fills_is_announced_once() {
    let broker = broker();
    let (client, lot) = lot_with(&broker, 3).await;
    let mut events = client.watch();
    let publisher = client.publisher("").build().await.unwrap();
    let watched = lot.clone();
    let watch = tokio::spawn(async move { watched.watch(4, 10 * SECOND).await });
    tokio::time::sleep(60 * SECOND).await;
    for n in 0..3 {
        publisher.publish("lot", parked(n)).await.unwrap();
    }
    tokio::time::sleep(60 * SECOND).await;
    lot.purge().run().await.unwrap();
    tokio::time::sleep(60 * SECOND).await;
    client.close().await;
    soon("the end of the watch", watch).await.unwrap();
    let mut told = Vec::new();
    loop {
        match soon("an event", events.next()).await.unwrap() {
            ClientEvent::LotFilled { queue, depth, threshold } => {
                told.push((queue, depth, threshold))
            }
            ClientEvent::LotDrained { queue, depth } => told.push((queue, depth, 0)),
            ClientEvent::Closed => break,
            _ => {}
        }
    }
    assert_eq!(told, [("lot".to_owned(), 6, 4), ("lot".to_owned(), 0, 0)]);
}

#[tokio::test(start_paused = true)]
async fn the_lowest_rates_are_rates_too() {
    for rate in [1e-6, 1e-19, 1e-300, f64::MIN_POSITIVE] {
        let broker = broker();
        let (_client, lot) = lot_with(&broker, 3).await;
        let slow = lot.replay().rate(rate).run();
        let ended = tokio::time::timeout(Duration::from_secs(3600), slow).await;
        assert!(ended.is_err(), "{rate}: {ended:?}");
        assert_eq!(depth(&broker, "q"), Some(1), "{rate}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_finds_what_cannot_be_sent() {
    let broker = broker();
    let (_client, lot) = lot_with(&broker, 10).await;
    let spoilt = |parked: &leveret::ParkedMessage, draft: &mut leveret::Draft| {
        match parked.position() {
            // Headers have to fit into a frame, and a key into 255 bytes.
            3 => draft.set_header("crowd", "x".repeat(200_000)).unwrap(),
            7 => {
                let routing_key = Some("k".repeat(256));
                draft.target = Target::Exchange { name: "amq.topic".to_owned(), routing_key };
            }
            _ => {}
        }
    };
    let would = lot.edit(spoilt).dry_run().run().await.unwrap();
    assert_eq!((would.done, would.failed), (8, 2), "{would:?}");
    assert_eq!((depth(&broker, "lot"), depth(&broker, "q")), (Some(10), Some(0)));
    let did = lot.edit(spoilt).run().await.unwrap();
    assert_eq!((did.done, did.failed), (would.done, would.failed));
    let named = |progress: &leveret::Progress| -> Vec<u64> {
        progress.not_done.iter().map(|not_done| not_done.position).collect()
    };
    assert_eq!((named(&would), named(&did)), (vec![3, 7], vec![3, 7]));

    let line = |headers: usize| {
        let properties = serde_json::json!({ "headers": { "crowd": "x".repeat(headers) } });
        serde_json::json!({ "exchange": "", "routing_key": "q", "properties": properties, "body": "" })
    };
    let file = format!("{}\n{}\n", line(10), line(200_000));
    let would = lot.import(&mut file.as_bytes()).dry_run().run().await.unwrap();
    assert_eq!((would.imported, would.failed), (1, 1), "{would:?}");
    assert_eq!(would.bad_lines[0].0, 2);
}
