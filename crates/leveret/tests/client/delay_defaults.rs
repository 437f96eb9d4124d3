//! What is promised of delayed messages, with default settings.

use std::time::Duration;

use leveret::amqp::Value;
use leveret::{Client, ErrorKind, Exchange, Filter, Message, Overflow, Queue, QueueType, Topology};
use leveret_broker::{Broker, Permissions, Profile, snapshot};
use leveret_testkit::eventually;
use tokio::time::sleep;

use crate::client::failover::Log;
use crate::{broker, broker_with_users, client_of, client_of_user, client_with, depth};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const PARKED: &str = "leveret.delay.unroutable";
/// A little more than what RabbitMQ waits before it sends a dead letter again.
const RESENT: Duration = Duration::from_secs(181);

fn both() -> [Broker; 2] {
    [Profile::RabbitMq3_10, Profile::RabbitMq4_3]
        .map(|profile| Broker::builder().profile(profile).start().unwrap())
}

/// The queues whose names begin like this.
fn queues(broker: &Broker, prefix: &str) -> Vec<snapshot::Queue> {
    let snapshot = broker.snapshot();
    let all = &snapshot.virtual_host("/").unwrap().queues;
    all.iter().filter(|queue| queue.name.starts_with(prefix)).cloned().collect()
}

#[tokio::test(start_paused = true)]
async fn messages_wait_in_quorum_queues_that_dead_letter_at_least_once() {
    for broker in both() {
        let client = client_with(&broker, Queue::classic("q")).await;
        let topology = Topology::new().exchange(Exchange::topic("orders"));
        client.apply(&topology).await.unwrap();
        let (to_queue, to_exchange) =
            (client.publisher("").build(), client.publisher("orders").build());
        to_queue.await.unwrap().publish_in("q", "later", HOUR).await.unwrap();
        to_exchange.await.unwrap().publish_in("order.paid", "later", HOUR).await.unwrap();

        let all = queues(&broker, "leveret.delay");
        assert_eq!(all.len(), 18, "15 levels, exit, relay, unroutable");
        for queue in all {
            assert_eq!(queue.kind, "quorum", "{}", queue.name);
            let leads_on = queue.arguments.get("x-dead-letter-exchange").is_some();
            let strategy = queue.arguments.get("x-dead-letter-strategy");
            let expected = leads_on.then(|| Value::from("at-least-once"));
            assert_eq!(strategy, expected, "{}", queue.name);
        }
    }
}

/// A classic wait queue would drop it.
#[tokio::test(start_paused = true)]
async fn a_message_whose_target_is_full_arrives_when_there_is_room() {
    for broker in both() {
        let full = Queue::quorum("q").max_length(1).overflow(Overflow::RejectPublish);
        let client = client_with(&broker, full).await;
        let publisher = client.publisher("").build().await.unwrap();
        publisher.publish("q", "in the way").await.unwrap();
        publisher.publish("q", "in the way, too").await.unwrap();
        publisher.publish_in("q", "later", HOUR).await.unwrap();
        sleep(HOUR + SECOND).await;
        client.purge_queue("q").await.unwrap();
        sleep(RESENT).await;
        assert_eq!(depth(&broker, "q"), Some(1));
    }
}

#[tokio::test(start_paused = true)]
async fn classic_queues_are_an_explicit_choice() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    client.delays().declare(QueueType::Classic).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_in("q", "later", HOUR).await.unwrap();
    let all = queues(&broker, "leveret.delay");
    assert_eq!(all.len(), 34);
    assert!(all.iter().all(|queue| queue.kind == "classic"));
}

/// As earlier versions have declared them.
#[tokio::test(start_paused = true)]
async fn queues_of_the_brokers_default_type_are_used_as_they_are() {
    for broker in both() {
        let client = client_with(&broker, Queue::classic("q")).await;
        let earlier = client_of(&broker).await;
        let levels = (0..4).fold(Topology::new(), |topology, level: u8| {
            let below = match level {
                0 => "leveret.delay.out".to_owned(),
                level => format!("leveret.delay.{:02}", level - 1),
            };
            let ttl = Duration::from_millis(125 << level);
            let name = format!("leveret.delay.{level:02}");
            topology.queue(Queue::new(name).message_ttl(ttl).dead_letter_to(below))
        });
        earlier.apply(&levels.queue(Queue::new(PARKED))).await.unwrap();

        let publisher = client.publisher("").build().await.unwrap();
        let log = Log::default();
        let logging = log.collect();
        publisher.publish_in("q", "soon", SECOND).await.unwrap();
        publisher.publish_in("q", "later", HOUR).await.unwrap();
        drop(logging);
        let warning = log.text();
        for named in ["WARN", "leveret.delay.00", "leveret.delay.03", PARKED] {
            assert!(warning.contains(named), "{named} is not in {warning}");
        }
        assert!(!warning.contains("leveret.delay.04"), "{warning}");
        assert_eq!(client.delays().pending().await.unwrap(), 2);
        sleep(HOUR + SECOND).await;
        assert_eq!(depth(&broker, "q"), Some(2));
        let kinds = queues(&broker, "leveret.delay.0").into_iter().map(|queue| queue.kind);
        assert_eq!(kinds.filter(|kind| *kind == "classic").count(), 4);
    }
}

/// On RabbitMQ 4.0 to 4.2 it has to wait without it.
#[tokio::test(start_paused = true)]
async fn a_message_keeps_its_priority() {
    for broker in both() {
        let client = client_with(&broker, Queue::classic("q").max_priority(9)).await;
        let publisher = client.publisher("").build().await.unwrap();
        publisher.publish_in("q", Message::new("later").priority(9), HOUR).await.unwrap();
        sleep(HOUR + SECOND).await;
        let message = broker.peek("/", "q", 1).unwrap().pop().expect("a message");
        assert_eq!(message.properties.get().priority, Some(9));
    }
}

/// A queue and an exchange, and a message for each that is due in an hour.
async fn delayed(client: &Client) -> Topology {
    let topology = Topology::new()
        .exchange(Exchange::fanout("orders").alternate(PARKED))
        .queue(Queue::quorum("q"))
        .queue(Queue::quorum("paid").bind("orders", ""));
    client.apply(&topology).await.unwrap();
    let (to_queue, to_exchange) =
        (client.publisher("").build(), client.publisher("orders").build());
    to_queue.await.unwrap().publish_in("q", "one", HOUR).await.unwrap();
    to_exchange.await.unwrap().publish_in("order.paid", "two", HOUR).await.unwrap();
    topology
}

#[tokio::test(start_paused = true)]
async fn a_consumed_target_that_another_client_deletes_gets_what_was_delayed_before() {
    let broker = broker();
    let client = client_of(&broker).await;
    delayed(&client).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    let other = client_of(&broker).await;
    other.delete_queue("q", Default::default()).await.unwrap();
    let delivery = deliveries.next().await.unwrap().unwrap();
    assert_eq!(delivery.body(), "one");
    delivery.ack().unwrap();
}

/// The client that has delayed the message is gone, so that nothing restores the binding.
#[tokio::test(start_paused = true)]
async fn what_missed_its_target_goes_there_by_a_replay() {
    let broker = broker();
    let client = client_of(&broker).await;
    delayed(&client).await;
    client.close().await;
    let other = client_of(&broker).await;
    other.delete_queue("q", Default::default()).await.unwrap();
    other.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
    sleep(HOUR + SECOND).await;
    assert_eq!((depth(&broker, "q"), depth(&broker, PARKED)), (Some(0), Some(1)));

    let lot = other.parking_lot(PARKED);
    let parked = lot.list(&Filter::new().queue("q"), 10).await.unwrap();
    assert_eq!(parked.len(), 1, "it tells which queue it was for");
    let done = lot.replay().run().await.unwrap();
    assert_eq!((done.done, done.failed), (1, 0), "{:?}", done.not_done);
    assert_eq!((depth(&broker, "q"), depth(&broker, PARKED)), (Some(1), Some(0)));
    let replayed = broker.peek("/", "q", 1).unwrap().pop().unwrap();
    assert!(replayed.properties.get().headers.unwrap_or_default().get("x-death").is_none());
}

#[tokio::test(start_paused = true)]
async fn a_short_delay_does_not_wait_behind_a_long_one() {
    for broker in both() {
        let client = client_with(&broker, Queue::quorum("q")).await;
        let publisher = client.publisher("").build().await.unwrap();
        // They share queues.
        for seconds in [7, 6, 5, 4] {
            let delay = seconds * SECOND;
            publisher.publish_in("q", seconds.to_string(), delay).await.unwrap();
        }
        let mut deliveries = client.consumer("q").stream().await.unwrap();
        for expected in ["4", "5", "6", "7"] {
            let delivery = deliveries.next().await.unwrap().unwrap();
            assert_eq!(delivery.body(), expected);
            delivery.ack().unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_target_that_is_not_there_is_an_error_and_nothing_is_published() {
    for broker in both() {
        let client = client_of(&broker).await;
        for exchange in ["", "orders"] {
            let publisher = client.publisher(exchange).build().await;
            // A publisher needs its exchange.
            let Ok(publisher) = publisher else { continue };
            let error = publisher.publish_in("nowhere", "x", HOUR).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Missing, "{error}");
        }
        assert_eq!(client.delays().pending().await.unwrap(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_whose_target_is_gone_is_parked() {
    for broker in both() {
        let client = client_of(&broker).await;
        delayed(&client).await;
        client.delete_queue("q", Default::default()).await.unwrap();
        client.delete_exchange("orders", Default::default()).await.unwrap();
        sleep(HOUR + SECOND).await;
        assert_eq!(client.delays().unroutable().await.unwrap(), 2);
        assert_eq!(client.delays().pending().await.unwrap(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_restart_of_the_broker_loses_none_of_thousands_of_messages_that_move() {
    const MESSAGES: u32 = 3000;
    for broker in both() {
        let client = client_with(&broker, Queue::quorum("q")).await;
        let publisher = client.publisher("").build().await.unwrap();
        let mut tickets = Vec::new();
        for n in 1..=MESSAGES {
            let delay = 10 * SECOND * n / MESSAGES;
            tickets.push(publisher.send_in("q", n.to_string(), delay).await.unwrap());
        }
        for ticket in tickets {
            ticket.await.unwrap();
        }
        for _ in 0..4 {
            sleep(2 * SECOND).await;
            broker.restart().await;
        }
        sleep(RESENT).await;
        assert_eq!(depth(&broker, "q"), Some(MESSAGES as usize));
        assert_eq!(client.delays().unroutable().await.unwrap(), 0);
    }
}

/// As docs/delay.md names them.
#[tokio::test]
async fn the_permissions_for_the_delay_queues_and_their_targets_suffice() {
    let permissions = Permissions {
        configure: r"leveret\.delay.*".to_owned(),
        write: r"leveret\.delay.*|q|orders".to_owned(),
        read: r"leveret\.delay.*".to_owned(),
    };
    let (broker, address) = broker_with_users(permissions).await;
    let owner = client_of_user(address, "all").await;
    let queue = Queue::quorum("q").bind("orders", "");
    let topology = Topology::new().exchange(Exchange::fanout("orders")).queue(queue);
    owner.apply(&topology).await.unwrap();
    let limited = client_of_user(address, "limited").await;
    let to_queue = limited.publisher("").build().await.unwrap();
    let to_exchange = limited.publisher("orders").build().await.unwrap();
    to_queue.publish_in("q", "one", SECOND).await.unwrap();
    to_exchange.publish_in("", "two", SECOND).await.unwrap();
    eventually(MINUTE, "both messages", async || depth(&broker, "q") == Some(2)).await;
}
