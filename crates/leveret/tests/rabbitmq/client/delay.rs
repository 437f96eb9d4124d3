use std::collections::BTreeSet;
use std::time::Duration;

use leveret::amqp::{Array, GetOptions, Properties, Table};
use leveret::{
    Client, ClientEvent, Delivery, ErrorKind, Exchange, Message, Overflow, ParkReason, Publisher,
    Queue, QueueType, Topology,
};
use leveret_testkit::rabbitmq::{self, Version};
use tokio::time::Instant;

use crate::support::client::{
    CONSUMING, client, client_with, cut, next, publisher, soon, until_depth, until_event,
};

const TYPES: [QueueType; 2] = [QueueType::Classic, QueueType::Quorum];
const PARKED: &str = "leveret.delay.unroutable";
/// It waits in two queues.
const SHORT: Duration = Duration::from_millis(375);

/// What takes long because it waits is done for both types side by side.
async fn at_once(both: [impl Future<Output = ()>; 2]) {
    let [classic, quorum] = both;
    tokio::join!(classic, quorum);
}

fn orders() -> Topology {
    Topology::new()
        .exchange(Exchange::topic("orders"))
        .queue(Queue::classic("paid").bind("orders", "order.paid"))
        .queue(Queue::quorum("lost").bind("orders", "order.lost"))
}

/// What a client cannot send on as it is delivered: the broker removes `BCC`, and accepts a `user-id` from that user alone.
fn peculiar() -> [Message; 3] {
    let copies = Array::from_values(["order.unheard.of.too".into()]).unwrap();
    let user_id = Some("guest".try_into().unwrap());
    let signed = Properties { user_id, ..Properties::default() };
    [
        Message::new("plain"),
        Message::new("blind").header("BCC", copies),
        Message::with_properties("signed", signed),
    ]
}

/// A client with a topic exchange, two queues bound to it, and a ladder of this type.
async fn scene(vhost: &rabbitmq::Vhost, queue_type: QueueType) -> (Client, Publisher) {
    let client = client(vhost).await;
    soon("a topology", client.apply(&orders())).await.unwrap();
    soon("a ladder", client.delays().declare(queue_type)).await.unwrap();
    let publisher = soon("a publisher", client.publisher("orders").build()).await.unwrap();
    (client, publisher)
}

async fn publish_in(publisher: &Publisher, key: &str, message: impl Into<Message>) {
    soon("an outcome", publisher.publish_in(key, message.into(), SHORT)).await.unwrap();
}

/// The only message of a queue, once it is there.
async fn only(client: &Client, queue: &str) -> Delivery {
    until_depth(client, queue, 1).await;
    client.get(queue, GetOptions::default()).await.unwrap().expect("a message")
}

#[tokio::test]
async fn messages_come_in_the_order_of_their_time_and_none_is_early() {
    let both = TYPES.map(async |queue_type| {
        let vhost = rabbitmq::vhost().await;
        let client = client_with(&vhost, Queue::classic("q")).await;
        soon("a ladder", client.delays().declare(queue_type)).await.unwrap();
        let publisher = publisher(&client).await;
        let began = Instant::now();
        let send = async |milliseconds: u64| {
            let delay = Duration::from_millis(milliseconds);
            let sent = publisher.publish_in("q", milliseconds.to_string(), delay);
            soon("an outcome", sent).await.unwrap();
        };
        // All at once, and far enough from each other for a machine that is busy.
        tokio::join!(send(5250), send(250), send(10_000), send(2625));
        let mut deliveries = client.consumer("q").stream().await.unwrap();
        for milliseconds in [250, 2625, 5250, 10_000] {
            let delivery = next(&mut deliveries).await;
            assert_eq!(delivery.body(), milliseconds.to_string().as_bytes());
            assert!(began.elapsed() >= Duration::from_millis(milliseconds));
            delivery.ack().unwrap();
        }
        assert_eq!(client.delays().pending().await.unwrap(), 0);
    });
    at_once(both).await;
}

#[tokio::test]
async fn what_waits_is_counted() {
    for queue_type in TYPES {
        let vhost = rabbitmq::vhost().await;
        let (client, publisher) = scene(&vhost, queue_type).await;
        assert_eq!(client.delays().pending().await.unwrap(), 0);
        for days in [1, 30, 365, 3000] {
            let delay = Duration::from_secs(days * 86_400);
            let sent = publisher.publish_in("order.paid", "later", delay);
            soon("an outcome", sent).await.unwrap();
        }
        assert_eq!(client.delays().pending().await.unwrap(), 4);
        assert_eq!(client.delays().unroutable().await.unwrap(), 0);
    }
}

#[tokio::test]
async fn an_exchange_gets_the_message_as_it_was_published() {
    for queue_type in TYPES {
        let vhost = rabbitmq::vhost().await;
        let (client, publisher) = scene(&vhost, queue_type).await;
        let message = Message::new("{}")
            .content_type("application/json")
            .header("tenant", "acme")
            .message_id("7")
            .expires_in(Duration::from_millis(1));
        publish_in(&publisher, "order.paid", message).await;
        let delivery = only(&client, "paid").await;
        assert_eq!(delivery.routing_key(), "order.paid");
        let properties = delivery.properties();
        assert_eq!(properties.content_type, Some("application/json".try_into().unwrap()));
        assert_eq!(properties.message_id, Some("7".try_into().unwrap()));
        assert_eq!(properties.delivery_mode, Some(2));
        assert_eq!(delivery.header("tenant").unwrap().as_str(), Some("acme"));
        // It did not expire on the way, and has its expiration in a header.
        assert_eq!(delivery.header("x-leveret-expiration").unwrap().as_str(), Some("1"));
        delivery.ack().unwrap();
        until_depth(&client, "lost", 0).await;
    }
}

#[tokio::test]
async fn copies_are_made_at_the_target_and_not_on_the_way() {
    for queue_type in TYPES {
        let vhost = rabbitmq::vhost().await;
        let (client, publisher) = scene(&vhost, queue_type).await;
        let copies = Array::from_values(["order.lost".into()]).unwrap();
        let message = Message::new("twice").header("CC", copies.clone());
        publish_in(&publisher, "order.paid", message.clone()).await;
        only(&client, "paid").await.ack().unwrap();
        only(&client, "lost").await.ack().unwrap();
        assert_eq!(client.delays().unroutable().await.unwrap(), 0);

        let to_queues = client.publisher("").build().await.unwrap();
        let refused = soon("an answer", to_queues.publish_in("paid", message, SHORT)).await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    }
}

#[tokio::test]
async fn a_delivered_message_can_be_delayed_again() {
    for queue_type in TYPES {
        let vhost = rabbitmq::vhost().await;
        let (client, publisher) = scene(&vhost, queue_type).await;
        let to_queue = client.publisher("").build().await.unwrap();
        publish_in(&publisher, "order.paid", "again").await;
        // To the exchange, then to the queue, and back.
        for round in 0..3 {
            let delivery = only(&client, "paid").await;
            let message = Message::with_properties(
                delivery.body().clone(),
                delivery.properties().into_owned(),
            );
            match round % 2 {
                0 => publish_in(&to_queue, "paid", message).await,
                _ => publish_in(&publisher, "order.paid", message).await,
            }
            delivery.ack().unwrap();
        }
        only(&client, "paid").await.ack().unwrap();
    }
}

#[tokio::test]
async fn what_finds_its_target_gone_is_parked() {
    let both = TYPES.map(async |queue_type| {
        let vhost = rabbitmq::vhost().await;
        let (client, publisher) = scene(&vhost, queue_type).await;
        let to_queue = client.publisher("").build().await.unwrap();
        // Long enough for the targets to be deleted before it is over.
        let delay = Duration::from_secs(8);
        soon("an outcome", publisher.publish_in("order.paid", "one", delay)).await.unwrap();
        soon("an outcome", to_queue.publish_in("paid", "two", delay)).await.unwrap();
        client.delete_exchange("orders", Default::default()).await.unwrap();
        client.delete_queue("paid", Default::default()).await.unwrap();
        until_depth(&client, PARKED, 2).await;
        assert_eq!(client.delays().unroutable().await.unwrap(), 2);
        assert_eq!(client.delays().pending().await.unwrap(), 0);
        let mut parked = BTreeSet::new();
        for _ in 0..2 {
            let delivery = client.get(PARKED, GetOptions::default()).await.unwrap().unwrap();
            let body = String::from_utf8_lossy(delivery.body()).into_owned();
            parked.insert((delivery.routing_key().to_string(), body));
            delivery.ack().unwrap();
        }
        let expected = [("order.paid", "one"), ("paid", "two")];
        let expected = expected.map(|(key, body)| (key.to_owned(), body.to_owned()));
        assert_eq!(parked, BTreeSet::from(expected));

        let missing = soon("an answer", publisher.publish_in("order.paid", "three", delay)).await;
        assert_eq!(missing.unwrap_err().kind(), ErrorKind::Missing);
        let missing = soon("an answer", to_queue.publish_in("paid", "four", delay)).await;
        assert_eq!(missing.unwrap_err().kind(), ErrorKind::Missing);

        // Both are found again once they are declared again.
        soon("a topology", client.apply(&orders())).await.unwrap();
        publish_in(&publisher, "order.paid", "five").await;
        publish_in(&to_queue, "paid", "six").await;
        until_depth(&client, "paid", 2).await;
        assert_eq!(client.delays().unroutable().await.unwrap(), 0);
    });
    at_once(both).await;
}

#[tokio::test]
async fn messages_that_the_target_exchange_has_no_queue_for_hold_up_nobody() {
    for queue_type in TYPES {
        let vhost = rabbitmq::vhost().await;
        let (client, publisher) = scene(&vhost, queue_type).await;
        // At-least-once dead-lettering stops at 32 messages that it can route nowhere.
        for _ in 0..50 {
            publish_in(&publisher, "order.unheard.of", "nobody's").await;
        }
        publish_in(&publisher, "order.paid", "somebody's").await;
        assert_eq!(only(&client, "paid").await.body(), "somebody's");
    }
}

#[tokio::test]
async fn what_the_target_exchange_has_no_queue_for_is_parked() {
    for queue_type in TYPES {
        let vhost = rabbitmq::vhost().await;
        let (client, publisher) = scene(&vhost, queue_type).await;
        let mut events = client.watch();
        for n in 0..300 {
            let key = if n % 3 == 0 { "order.paid" } else { "order.unheard.of" };
            drop(soon("room", publisher.send_in(key, n.to_string(), SHORT)).await.unwrap());
        }
        soon("outcomes", publisher.flush()).await.unwrap();
        until_depth(&client, "paid", 100).await;
        until_depth(&client, PARKED, 200).await;
        let parked = client.get(PARKED, GetOptions::default()).await.unwrap().unwrap();
        assert_eq!(parked.routing_key(), "order.unheard.of");
        assert_eq!(parked.header("x-leveret-exchange").unwrap().as_str(), Some("orders"));
        assert_eq!(parked.header("x-leveret-reason").unwrap().as_str(), Some("unroutable"));
        parked.requeue().unwrap();
        let is_parked = |event: &ClientEvent| {
            matches!(event, ClientEvent::Parked { reason: ParkReason::Unroutable, .. })
        };
        until_event(&mut events, "a parked message", is_parked).await;
        assert_eq!(client.delays().pending().await.unwrap(), 0);
        // The order of those that were taken together is kept.
        let mut deliveries = client.consumer("paid").stream().await.unwrap();
        for n in 0..100 {
            let delivery = next(&mut deliveries).await;
            assert_eq!(delivery.body(), (n * 3).to_string().as_bytes());
            delivery.ack().unwrap();
        }
    }
}

#[tokio::test]
async fn with_nobody_there_messages_wait_for_somebody_and_none_is_dropped() {
    for queue_type in TYPES {
        let vhost = rabbitmq::vhost().await;
        let (gone, publisher) = scene(&vhost, queue_type).await;
        for message in peculiar() {
            publish_in(&publisher, "order.unheard.of", message.clone()).await;
            publish_in(&publisher, "order.paid", message).await;
        }
        soon("the end", gone.close()).await;
        let client = client(&vhost).await;
        until_depth(&client, "leveret.delay.relay", 6).await;
        assert_eq!(client.delays().pending().await.unwrap(), 6);
        soon("a relay", client.delays().relay()).await.unwrap();
        until_depth(&client, "paid", 3).await;
        until_depth(&client, PARKED, 3).await;
        assert_eq!(client.delays().pending().await.unwrap(), 0);
    }
}

/// The broker adds where it has waited to its headers, and does not ask whether that fits into a frame: nobody could take it.
#[tokio::test]
async fn headers_that_would_outgrow_a_frame_are_refused_and_others_arrive() {
    let vhost = rabbitmq::vhost().await;
    let (client, publisher) = scene(&vhost, QueueType::Classic).await;
    let to_queue = client.publisher("").build().await.unwrap();
    let message = |size: usize| Message::new("large").header("blob", "x".repeat(size));
    for size in [131_072 - 600, 131_072 - 900] {
        let refused = soon("an answer", publisher.publish_in("order.paid", message(size), SHORT));
        assert_eq!(refused.await.unwrap_err().kind(), ErrorKind::Invalid);
        let refused = soon("an answer", to_queue.publish_in("paid", message(size), SHORT));
        assert_eq!(refused.await.unwrap_err().kind(), ErrorKind::Invalid);
    }
    publish_in(&publisher, "order.paid", message(131_072 - 8000)).await;
    publish_in(&to_queue, "lost", message(131_072 - 8000)).await;
    only(&client, "paid").await.ack().unwrap();
    only(&client, "lost").await.ack().unwrap();
}

#[tokio::test]
async fn blind_copies_are_made_and_stay_blind() {
    for queue_type in TYPES {
        let vhost = rabbitmq::vhost().await;
        let (client, publisher) = scene(&vhost, queue_type).await;
        let copies = Array::from_values(["order.lost".into()]).unwrap();
        publish_in(&publisher, "order.paid", Message::new("twice").header("BCC", copies)).await;
        for queue in ["paid", "lost"] {
            let delivery = only(&client, queue).await;
            let disclosed = ["BCC", "x-leveret-bcc"].map(|name| delivery.header(name).is_some());
            assert_eq!(disclosed, [false, false], "{queue}");
            delivery.ack().unwrap();
        }
    }
}

#[tokio::test]
async fn a_connection_that_is_lost_while_messages_are_due_loses_none() {
    for queue_type in TYPES {
        let vhost = rabbitmq::vhost().await;
        let (client, publisher) = scene(&vhost, queue_type).await;
        for n in 0..500 {
            let delay = Duration::from_millis(1000 + 4 * n);
            drop(
                soon("room", publisher.send_in("order.paid", n.to_string(), delay)).await.unwrap(),
            );
        }
        soon("outcomes", publisher.flush()).await.unwrap();
        cut(&vhost, &client, CONSUMING).await;
        let mut missing: BTreeSet<u64> = (0..500).collect();
        let mut deliveries = client.consumer("paid").stream().await.unwrap();
        while !missing.is_empty() {
            // What the relay had sent and not acked comes a second time.
            let delivery = next(&mut deliveries).await;
            missing.remove(&std::str::from_utf8(delivery.body()).unwrap().parse().unwrap());
            delivery.ack().unwrap();
        }
    }
}

#[tokio::test]
async fn to_an_exchange_with_an_alternate_the_broker_takes_the_last_step() {
    for queue_type in TYPES {
        let vhost = rabbitmq::vhost().await;
        let (gone, _) = scene(&vhost, queue_type).await;
        let events = Topology::new()
            .exchange(Exchange::topic("events").alternate(PARKED))
            .queue(Queue::classic("heard").bind("events", "heard.of"))
            .queue(Queue::classic("copy").bind("events", "copy"));
        gone.apply(&events).await.unwrap();
        let publisher = gone.publisher("events").build().await.unwrap();
        let copies = Array::from_values(["copy".into()]).unwrap();
        // At-least-once dead-lettering stops at 32 messages that it can route nowhere.
        for _ in 0..50 {
            publish_in(&publisher, "unheard.of", "nobody's").await;
        }
        publish_in(&publisher, "heard.of", Message::new("twice").header("BCC", copies)).await;
        for message in peculiar() {
            publish_in(&publisher, "unheard.of", message.clone()).await;
            publish_in(&publisher, "heard.of", message).await;
        }
        soon("the end", gone.close()).await;
        let client = client(&vhost).await;
        until_depth(&client, "heard", 4).await;
        only(&client, "copy").await.ack().unwrap();
        until_depth(&client, PARKED, 53).await;
    }
}

#[tokio::test]
async fn a_high_priority_holds_up_nobody() {
    let both = TYPES.map(async |queue_type| {
        let vhost = rabbitmq::vhost().await;
        let client = client_with(&vhost, Queue::classic("q")).await;
        soon("a ladder", client.delays().declare(queue_type)).await.unwrap();
        let publisher = publisher(&client).await;
        // Both wait in the queue of four seconds.
        let (first, second) = (Duration::from_secs(4), Duration::from_millis(7875));
        soon("an outcome", publisher.publish_in("q", "normal", first)).await.unwrap();
        let high = Message::new("high").priority(9);
        soon("an outcome", publisher.publish_in("q", high, second)).await.unwrap();
        let mut deliveries = client.consumer("q").stream().await.unwrap();
        let delivery = next(&mut deliveries).await;
        assert_eq!(delivery.body(), "normal");
        delivery.ack().unwrap();
        let delivery = next(&mut deliveries).await;
        let kept = delivery.header("x-leveret-priority").and_then(|value| value.as_i64());
        // A quorum queue of 4.0 would let it hold up the other one.
        let expected = match (queue_type, Version::under_test()) {
            (QueueType::Quorum, Version::V4_0) => (Some(4), Some(9)),
            _ => (Some(9), None),
        };
        assert_eq!((delivery.properties().priority, kept), expected);
        delivery.ack().unwrap();
    });
    at_once(both).await;
}

#[tokio::test]
async fn a_ladder_of_another_type_is_used_as_it_is() {
    let vhost = rabbitmq::vhost().await;
    let (first, _) = scene(&vhost, QueueType::Quorum).await;
    let second = client(&vhost).await;
    let publisher = second.publisher("orders").build().await.unwrap();
    publish_in(&publisher, "order.paid", "hello").await;
    only(&first, "paid").await.ack().unwrap();
    let error = soon("an answer", second.delays().declare(QueueType::Classic)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    let error = soon("an answer", second.delays().declare(QueueType::Stream)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

#[tokio::test]
async fn what_a_client_says_of_deaths_is_not_believed() {
    let vhost = rabbitmq::vhost().await;
    let (client, publisher) = scene(&vhost, QueueType::Classic).await;
    // As if it had been in every queue of the ladder.
    let death = |level: u8| {
        let queue = format!("leveret.delay.{level:02}");
        let fields = [
            ("queue", queue.clone().into()),
            ("reason", "expired".into()),
            ("exchange", queue.into()),
            ("count", 1i64.into()),
            ("routing-keys", Array::from_values(["k".into()]).unwrap().into()),
        ];
        Table::from_pairs(fields).unwrap().into()
    };
    let deaths = Array::from_values((0..31).map(death)).unwrap();
    let message = Message::new("alive").header("x-death", deaths);
    publish_in(&publisher, "order.paid", message).await;
    assert_eq!(only(&client, "paid").await.body(), "alive");
}

#[tokio::test]
async fn a_full_target_holds_others_up_until_there_is_room_and_then_gets_what_was_delayed() {
    // Every three minutes, RabbitMQ resends what a queue refused at least three minutes ago. Nodes of the test kit do so every
    // half minute.
    const RESENT: Duration = Duration::from_secs(420);
    let vhost = rabbitmq::vhost().await;
    // It does not hold others up.
    if vhost.broker().is_embedded() {
        return;
    }
    let full = Queue::quorum("full").max_length(40).overflow(Overflow::RejectPublish);
    let client = client_with(&vhost, full).await;
    let topology = Topology::new().queue(Queue::quorum("free"));
    soon("a queue", client.apply(&topology)).await.unwrap();
    let publisher = publisher(&client).await;
    // A quorum queue takes one more than its limit before it says that it is full.
    while soon("an outcome", publisher.publish("full", "in the way")).await.is_ok() {}
    for n in 0..32 {
        let sent = publisher.publish_in("full", n.to_string(), SHORT);
        soon("an outcome", sent).await.unwrap();
    }
    // When the last of these has left the first queue, the next one has all 32 and waits.
    tokio::time::sleep(Duration::from_secs(5)).await;
    soon("an outcome", publisher.publish_in("free", "behind them", SHORT)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(client.inspect_queue("free").await.unwrap().messages, 0);
    client.purge_queue("full").await.unwrap();
    let mut missing: std::collections::HashSet<u32> = (0..32).collect();
    let mut deliveries = soon("a consumer", client.consumer("full").stream()).await.unwrap();
    while !missing.is_empty() {
        let delivery = tokio::time::timeout(RESENT, deliveries.next()).await;
        let delivery =
            delivery.expect("the delayed messages").expect("the stream goes on").unwrap();
        if let Ok(number) = std::str::from_utf8(delivery.body()).unwrap().parse() {
            missing.remove(&number);
        }
        delivery.ack().unwrap();
    }
    assert_eq!(only(&client, "free").await.body(), "behind them");
}

#[tokio::test]
async fn a_target_that_is_deleted_and_declared_again_gets_what_was_delayed_before() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let topology = Topology::new()
        .exchange(Exchange::fanout("orders").alternate(PARKED))
        .queue(Queue::quorum("q"))
        .queue(Queue::quorum("paid").bind("orders", ""));
    soon("a topology", client.apply(&topology)).await.unwrap();
    let to_queue = publisher(&client).await;
    let to_exchange = soon("a publisher", client.publisher("orders").build()).await.unwrap();
    // Long enough for the targets to be deleted and declared before it is over.
    let delay = Duration::from_secs(8);
    soon("an outcome", to_queue.publish_in("q", "one", delay)).await.unwrap();
    soon("an outcome", to_exchange.publish_in("order.paid", "two", delay)).await.unwrap();
    client.delete_queue("q", Default::default()).await.unwrap();
    client.delete_exchange("orders", Default::default()).await.unwrap();
    soon("a topology", client.apply(&topology)).await.unwrap();
    assert_eq!(only(&client, "q").await.body(), "one");
    assert_eq!(only(&client, "paid").await.body(), "two");
    assert_eq!(client.delays().unroutable().await.unwrap(), 0);
}

/// As docs/delay.md names them.
#[tokio::test]
async fn the_permissions_for_the_delay_queues_and_their_targets_suffice() {
    let vhost = rabbitmq::vhost().await;
    // It has no management API; see the test of the same name for it.
    if vhost.broker().is_embedded() {
        return;
    }
    let owner = client(&vhost).await;
    let topology = Topology::new()
        .exchange(Exchange::fanout("orders"))
        .queue(Queue::quorum("q").bind("orders", ""));
    soon("a topology", owner.apply(&topology)).await.unwrap();
    let management = vhost.broker().management();
    let user = serde_json::json!({ "password": "carrot", "tags": "" });
    management.put(&["users", "delayer"], user).await.unwrap();
    let (delays, targets) = (r"leveret\.delay.*", r"leveret\.delay.*|q|orders");
    let allowed = serde_json::json!({ "configure": delays, "write": targets, "read": delays });
    management.put(&["permissions", vhost.name(), "delayer"], allowed).await.unwrap();
    let url = vhost.url().replacen("guest:guest@", "delayer:carrot@", 1);
    let limited = soon("a client", Client::connect(url)).await.unwrap();
    let to_queue = publisher(&limited).await;
    let to_exchange = soon("a publisher", limited.publisher("orders").build()).await.unwrap();
    soon("an outcome", to_queue.publish_in("q", "one", SHORT)).await.unwrap();
    soon("an outcome", to_exchange.publish_in("", "two", SHORT)).await.unwrap();
    until_depth(&owner, "q", 2).await;
    management.delete(&["users", "delayer"]).await.unwrap();
}
