//! Looking into a lot while others take messages from it, add some, and look as well; and what of that can be seen afterwards.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use leveret::amqp::{Properties, Table, Value};
use leveret::{Client, Message, ParkedMessage, ParkingLot};
use leveret_testkit::rabbitmq;

use super::parking::{counts_returns, lot};
use crate::support::client::{client, client_with, next, publisher, soon};

const COUNT: u32 = 1500;

/// What others do with the lot while it is looked into.
#[derive(Clone, Copy, Debug)]
struct Others {
    take: u32,
    park: u32,
    /// How many messages of a high priority there are for each of a low one, if they have one.
    high_for_low: Option<u32>,
}

impl Others {
    fn message(self, n: u32) -> Message {
        let message = Message::new(n.to_string());
        match self.high_for_low {
            None => message,
            Some(high) if n.is_multiple_of(high + 1) => message.priority(1),
            Some(_) => message.priority(9),
        }
    }

    async fn fill(self, client: &Client) {
        let publisher = publisher(client).await;
        let messages = (0..COUNT).map(|n| ("q", self.message(n)));
        soon("outcomes", publisher.publish_batch(messages)).await.unwrap();
    }

    /// Takes messages out as long as somebody looks; which.
    async fn take(self, client: &Client, is_over: &AtomicBool) -> Vec<u32> {
        let mut taken = Vec::new();
        while (taken.len() as u32) < self.take && !is_over.load(Ordering::Relaxed) {
            if let Some(delivery) = client.get("q", Default::default()).await.unwrap() {
                taken.push(number(delivery.body()));
                delivery.ack().unwrap();
            }
        }
        taken
    }

    /// Adds messages as long as somebody looks; how many.
    async fn park(self, client: &Client, is_over: &AtomicBool) -> u32 {
        let publisher = publisher(client).await;
        let mut parked = 0;
        while parked < self.park && !is_over.load(Ordering::Relaxed) {
            let message = self.message(COUNT + parked);
            soon("an outcome", publisher.publish("q", message)).await.unwrap();
            parked += 1;
        }
        parked
    }
}

fn number(body: &[u8]) -> u32 {
    std::str::from_utf8(body).unwrap().parse().unwrap()
}

/// How often each message was seen.
type Counts = BTreeMap<u32, u32>;

async fn look(lot: &ParkingLot) -> Counts {
    let mut shown = Counts::new();
    let look = |message: &ParkedMessage| {
        *shown.entry(number(message.body())).or_default() += 1;
        ControlFlow::Continue(())
    };
    soon("a look", lot.look(look).run()).await.unwrap();
    shown
}

async fn drain(client: &Client) -> Counts {
    let count = client.inspect_queue("q").await.unwrap().messages;
    let mut stream = client.consumer("q").stream().await.unwrap();
    let mut found = Counts::new();
    for _ in 0..count {
        let delivery = next(&mut stream).await;
        assert_eq!(delivery.routing_key(), "q");
        *found.entry(number(delivery.body())).or_default() += 1;
        delivery.ack().unwrap();
    }
    found
}

fn twice(counts: &Counts) -> Vec<u32> {
    counts.iter().filter(|(_, count)| **count > 1).map(|(n, _)| *n).collect()
}

async fn all_that_stay_are_shown_once(others: Others) {
    let vhost = rabbitmq::vhost().await;
    let owner = client_with(&vhost, lot("q")).await;
    others.fill(&owner).await;
    let lot = client(&vhost).await.parking_lot("q");
    let (taker, parker) = (client(&vhost).await, client(&vhost).await);
    let is_over = AtomicBool::new(false);
    let looking = async {
        let shown = look(&lot).await;
        is_over.store(true, Ordering::Relaxed);
        shown
    };
    let (taking, parking) = (others.take(&taker, &is_over), others.park(&parker, &is_over));
    let (shown, taken, parked) = tokio::join!(looking, taking, parking);
    assert!(others.take == 0 || !taken.is_empty(), "{others:?}: nobody has taken anything");
    assert!(others.park == 0 || parked > 0, "{others:?}: nobody has added anything");

    assert_eq!(twice(&shown), [0; 0], "{others:?}: shown twice");
    let stayed = |n: &u32| !taken.contains(n);
    let missed: Vec<u32> = (0..COUNT).filter(|n| stayed(n) && !shown.contains_key(n)).collect();
    assert!(missed.is_empty(), "{others:?}: {} were not shown: {missed:?}", missed.len());
    let left = drain(&owner).await;
    assert_eq!(twice(&left), [0; 0], "{others:?}: there twice");
    assert!(left.keys().copied().eq((0..COUNT + parked).filter(stayed)), "{others:?}: {left:?}");
}

#[tokio::test]
async fn what_is_there_all_the_time_is_shown_once_while_others_take_and_add_messages() {
    for (take, park) in [(400, 0), (0, 400), (400, 400)] {
        all_that_stay_are_shown_once(Others { take, park, high_for_low: None }).await;
    }
}

#[tokio::test]
async fn messages_of_all_priorities_are_shown_once_while_others_take_some() {
    // Others of a high priority that are added come before the last of a low one, and as many are shown as there were.
    for high in [1, 10] {
        let high_for_low = Some(high);
        all_that_stay_are_shown_once(Others { take: 400, park: 0, high_for_low }).await;
    }
}

/// They do not see what the other one has just taken, and see nothing twice.
#[tokio::test]
async fn two_who_look_at_once_are_shown_nothing_twice() {
    let vhost = rabbitmq::vhost().await;
    let owner = client_with(&vhost, lot("q")).await;
    Others { take: 0, park: 0, high_for_low: None }.fill(&owner).await;
    let (one, other) = (client(&vhost).await, client(&vhost).await);
    let (one, other) = (one.parking_lot("q"), other.parking_lot("q"));
    for _ in 0..2 {
        let (one, other) = tokio::join!(look(&one), look(&other));
        assert_eq!((twice(&one), twice(&other)), (vec![], vec![]));
    }
    let left = drain(&owner).await;
    assert!(left.keys().copied().eq(0..COUNT), "{} are there", left.len());
    assert_eq!(twice(&left), [0; 0]);
}

fn with_headers(headers: Option<Table<'static>>) -> Properties<'static> {
    let message_id = Some("17".try_into().unwrap());
    Properties { headers, message_id, delivery_mode: Some(2), ..Properties::default() }
}

/// The properties, without what the broker itself adds for quorum queues.
fn own(properties: Properties<'_>) -> Properties<'static> {
    let mut properties = properties.into_owned();
    if let Some(headers) = &mut properties.headers {
        headers.remove("x-delivery-count");
        headers.remove("x-acquired-count");
    }
    properties
}

#[tokio::test]
async fn nothing_of_a_look_is_to_be_seen_afterwards() {
    let vhost = rabbitmq::vhost().await;
    let owner = client_with(&vhost, lot("q")).await;
    let publisher = publisher(&owner).await;
    let some = Table::from_pairs([("n", Value::from(5)), ("tenant", "acme".into())]).unwrap();
    let all = [None, Some(Table::new()), Some(some)].map(with_headers);
    for properties in &all {
        let message = Message::with_properties("job", properties.clone());
        soon("an outcome", publisher.publish("q", message)).await.unwrap();
    }
    let lot = client(&vhost).await.parking_lot("q");
    let mut exported = Vec::new();
    for _ in 0..3 {
        let mut file = Vec::new();
        soon("an export", lot.export(&mut file).run()).await.unwrap();
        exported.push(String::from_utf8(file).unwrap());
    }
    // Looking is counted in a header.
    let uncounted = |file: &String| -> Vec<serde_json::Value> {
        let read = |line: &str| {
            let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
            if let Some(headers) = line["properties"]["headers"].as_object_mut() {
                headers.remove("x-delivery-count");
                headers.remove("x-acquired-count");
            }
            line["properties"]["headers"]
                .as_object()
                .is_some_and(|headers| headers.is_empty())
                .then(|| line["properties"]["headers"].take());
            line
        };
        file.lines().map(read).collect()
    };
    assert_eq!(uncounted(&exported[2]), uncounted(&exported[1]), "{}", counts_returns(&vhost));
    let mut stream = soon("a consumer", owner.consumer("q").stream()).await.unwrap();
    for properties in &all {
        let delivery = next(&mut stream).await;
        assert_eq!(delivery.exchange(), "");
        assert_eq!(delivery.routing_key(), "q");
        let found = own(delivery.properties());
        // 3.10 adds to the headers of those that have none, and 4.0 takes `BCC` from them: an empty table is left.
        let is_empty = |headers: &Option<Table<'_>>| headers.as_ref().is_none_or(Table::is_empty);
        match is_empty(&properties.headers) {
            true => assert!(is_empty(&found.headers), "{found:?}"),
            false => assert_eq!(&found, properties),
        }
        delivery.ack().unwrap();
    }
}
