//! Delayed messages for exchanges: who takes the last step, and what becomes of those that no queue is for.

use std::time::Duration;

use leveret::amqp::{Array, GetOptions, Properties};
use leveret::{Client, Exchange, Message, Queue, Target, Topology};
use leveret_broker::{Broker, Permissions};
use tokio::time::{Instant, sleep};

use crate::{
    PATIENCE, broker, broker_with_users, client_of, client_of_user, depth, soon, unsettled,
};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

const PARKED: &str = "leveret.delay.unroutable";
const RELAY: &str = "leveret.delay.relay";

fn orders() -> Topology {
    Topology::new()
        .exchange(Exchange::topic("orders"))
        .queue(Queue::classic("paid").bind("orders", "order.paid"))
        .queue(Queue::classic("lost").bind("orders", "order.lost"))
}

async fn client_with_orders(broker: &Broker) -> Client {
    let client = client_of(broker).await;
    client.apply(&orders()).await.unwrap();
    client
}

#[tokio::test(start_paused = true)]
async fn a_parked_one_can_be_replayed_once_there_is_a_queue_for_it() {
    let broker = broker();
    let client = client_with_orders(&broker).await;
    let publisher = client.publisher("orders").build().await.unwrap();
    let message = Message::new("early").header("tenant", "acme");
    publisher.publish_in("order.new", message, HOUR).await.unwrap();
    sleep(HOUR + SECOND).await;
    assert_eq!(depth(&broker, PARKED), Some(1));
    client
        .apply(&Topology::new().queue(Queue::classic("new").bind("orders", "order.new")))
        .await
        .unwrap();
    let to = leveret::Target::exchange("orders");
    client.parking_lot(PARKED).replay_to(to).run().await.unwrap();
    let replayed = client.get("new", GetOptions::default()).await.unwrap().unwrap();
    assert_eq!(replayed.body(), "early");
    let headers = replayed.properties().headers.unwrap();
    let names: Vec<String> =
        headers.iter().map(|(name, _)| name.to_str_lossy().into_owned()).collect();
    assert_eq!(names, ["tenant"]);
}

#[tokio::test(start_paused = true)]
async fn many_who_relay_share_the_work_and_double_nothing() {
    let broker = broker();
    let mut all = Vec::new();
    for n in 0..4 {
        let client = client_with_orders(&broker).await;
        let publisher = client.publisher("orders").build().await.unwrap();
        for message in 0..100 {
            let body = (n * 100 + message).to_string();
            drop(publisher.send_in("order.paid", body, HOUR).await.unwrap());
        }
        publisher.flush().await.unwrap();
        all.push((client, publisher));
    }
    sleep(HOUR + SECOND).await;
    let came = broker.peek("/", "paid", usize::MAX).unwrap();
    let bodies: std::collections::BTreeSet<_> = came.iter().map(|one| one.body.clone()).collect();
    assert_eq!((came.len(), bodies.len()), (400, 400));
}

#[tokio::test(start_paused = true)]
async fn a_relay_goes_on_after_its_broker_has_started_again() {
    let broker = broker();
    let client = client_with_orders(&broker).await;
    let publisher = client.publisher("orders").build().await.unwrap();
    publisher.publish_in("unheard.of", "nobody's", HOUR).await.unwrap();
    sleep(HOUR / 2).await;
    broker.restart().await;
    sleep(HOUR).await;
    assert_eq!(depth(&broker, PARKED), Some(1));
}

#[tokio::test(start_paused = true)]
async fn a_parked_one_still_tells_who_was_to_get_blind_copies() {
    let broker = broker();
    let client = client_with_orders(&broker).await;
    let publisher = client.publisher("orders").build().await.unwrap();
    let copies = Array::from_values(["order.late".into()]).unwrap();
    let message = Message::new("twice").header("BCC", copies.clone());
    publisher.publish_in("order.new", message, HOUR).await.unwrap();
    sleep(HOUR + SECOND).await;
    let parked = client.get(PARKED, GetOptions::default()).await.unwrap().unwrap();
    assert_eq!(parked.header("x-leveret-bcc"), Some(copies.into()));
}

#[tokio::test(start_paused = true)]
async fn what_somebody_has_deleted_is_made_anew_to_park_a_message() {
    let broker = broker();
    let client = client_with_orders(&broker).await;
    let publisher = client.publisher("orders").build().await.unwrap();
    publisher.publish_in("unheard.of", "nobody's", HOUR).await.unwrap();
    let other = client_of(&broker).await;
    other.delete_queue(PARKED, Default::default()).await.unwrap();
    sleep(HOUR + 5 * SECOND).await;
    assert_eq!(depth(&broker, PARKED), Some(1));
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_sent_on_waits_holds_up_nobody_and_is_parked_in_the_end() {
    let broker = broker();
    let client = client_with_orders(&broker).await;
    let full = Queue::classic("full").max_length(1).argument("x-overflow", "reject-publish");
    client.apply(&Topology::new().queue(full.bind("orders", "order.full"))).await.unwrap();
    let publisher = client.publisher("orders").build().await.unwrap();
    publisher.publish("order.full", "in their way").await.unwrap();
    for _ in 0..2 {
        publisher.publish_in("order.full", "no room", HOUR).await.unwrap();
    }
    publisher.publish_in("order.paid", "in time", HOUR).await.unwrap();
    sleep(HOUR + SECOND).await;
    assert_eq!((depth(&broker, "paid"), client.delays().pending().await.unwrap()), (Some(1), 2));
    sleep(30 * SECOND).await;
    client.purge_queue("full").await.unwrap();
    sleep(HOUR).await;
    // For one there is room now.
    assert_eq!((depth(&broker, "full"), depth(&broker, PARKED)), (Some(1), Some(1)));
    let parked = client.get(PARKED, GetOptions::default()).await.unwrap().unwrap();
    assert_eq!(parked.routing_key(), "order.full");
    let sent_on = client.get("full", GetOptions::default()).await.unwrap().unwrap();
    assert!(sent_on.header("leveret-delay-tries").is_none());
}

#[tokio::test(start_paused = true)]
async fn a_relay_does_not_keep_its_client_open() {
    let broker = broker();
    let client = client_with_orders(&broker).await;
    let publisher = client.publisher("orders").build().await.unwrap();
    publisher.publish_in("order.paid", "later", HOUR).await.unwrap();
    drop((client, publisher));
    let gone = async {
        while !broker.snapshot().virtual_host("/").unwrap().connections.is_empty() {
            sleep(SECOND).await;
        }
    };
    soon("the end of the connections", gone).await;
}

#[tokio::test]
async fn what_a_relay_may_not_publish_waits_for_one_that_may() {
    let write = "^(own|leveret.*)$".to_owned();
    let (broker, address) = broker_with_users(Permissions { write, ..Permissions::all() }).await;
    let all = client_of_user(address, "all").await;
    let own = client_of_user(address, "limited").await;
    all.apply(&orders().exchange(Exchange::fanout("own"))).await.unwrap();
    own.delays().relay().await.unwrap();
    let publisher = all.publisher("orders").build().await.unwrap();
    let signed = Properties { user_id: Some("all".try_into().unwrap()), ..Properties::default() };
    let signed = Message::with_properties("one", signed);
    publisher.publish_in("order.paid", signed, 2 * SECOND).await.unwrap();
    // When it is due, the only relay is the one that may not publish it.
    all.close().await;
    let put_off = async {
        // What it has not acked would come a second time.
        while depth(&broker, "leveret.delay.03") != Some(1) || unsettled(&broker, RELAY) != Some(0)
        {
            sleep(Duration::from_millis(20)).await;
        }
    };
    soon("another wait", put_off).await;
    own.close().await;
    let all = client_of_user(address, "all").await;
    all.delays().relay().await.unwrap();
    let arrived = async {
        loop {
            if let Some(delivery) = all.get("paid", GetOptions::default()).await.unwrap() {
                return delivery;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    let arrived = soon("the message", arrived).await;
    // The broker does not take the name of this user from the other.
    let said = |name| arrived.header(name).and_then(|name| name.as_str().map(str::to_owned));
    assert_eq!(arrived.properties().user_id, None);
    assert_eq!(said("x-leveret-user-id").as_deref(), Some("all"));
    assert_eq!(depth(&broker, PARKED), Some(0));
}

#[tokio::test(start_paused = true)]
async fn a_message_is_not_late_while_somebody_relays() {
    let broker = broker();
    let client = client_with_orders(&broker).await;
    let publisher = client.publisher("orders").build().await.unwrap();
    let began = Instant::now();
    publisher.publish_in("order.paid", "later", HOUR).await.unwrap();
    let mut deliveries = client.consumer("paid").stream().await.unwrap();
    let delivery = tokio::time::timeout(HOUR + PATIENCE, deliveries.next()).await.unwrap();
    delivery.unwrap().unwrap().ack().unwrap();
    let late = began.elapsed() - HOUR;
    assert!(late < Duration::from_millis(500), "{late:?}");
}

#[tokio::test(start_paused = true)]
async fn an_alternate_that_may_be_gone_is_not_relied_on() {
    let broker = broker();
    let client = client_of(&broker).await;
    let topology = Topology::new()
        .exchange(Exchange::topic("orders").alternate("rest"))
        .exchange(Exchange::fanout("rest"))
        .queue(Queue::classic("temporary").exclusive().bind("rest", ""));
    client.apply(&topology).await.unwrap();
    let publisher = client.publisher("orders").build().await.unwrap();
    publisher.publish_in("unheard.of", "nobody's", HOUR).await.unwrap();
    client.close().await;
    sleep(2 * HOUR).await;
    assert_eq!(depth(&broker, "leveret.delay.relay"), Some(1));
}

#[tokio::test(start_paused = true)]
async fn blind_copies_are_made_when_a_parked_one_is_replayed_to_its_exchange_and_nobody_is_told() {
    for (target, copies) in [(Target::exchange("orders"), 1), (Target::queue("new"), 0)] {
        let broker = broker();
        let client = client_of(&broker).await;
        client.apply(&Topology::new().exchange(Exchange::topic("orders"))).await.unwrap();
        let publisher = client.publisher("orders").build().await.unwrap();
        let secret = Array::from_values(["order.secret".into()]).unwrap();
        let message = Message::new("1").header("BCC", secret);
        publisher.publish_in("order.new", message, HOUR).await.unwrap();
        sleep(HOUR + SECOND).await;
        let queues = Topology::new()
            .queue(Queue::classic("new").bind("orders", "order.new"))
            .queue(Queue::classic("secret").bind("orders", "order.secret"));
        client.apply(&queues).await.unwrap();
        client.parking_lot(PARKED).replay_to(target).run().await.unwrap();
        let replayed = client.get("new", GetOptions::default()).await.unwrap().unwrap();
        let told = ["BCC", "x-leveret-bcc"].map(|name| replayed.header(name).is_some());
        assert_eq!(told, [false, false]);
        assert_eq!(depth(&broker, "secret"), Some(copies));
    }
}
