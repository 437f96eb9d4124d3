//! The record of what happened to messages.

use std::time::Duration;

use leveret::amqp::{ConsumeOptions, GetOptions, Properties, QueueOptions, Refused, Table};
use leveret_broker::Broker;
use leveret_broker::events::{Death, Discarded, Settled, What};
use tokio::time::sleep;

use crate::support::{broker, connect, put, put_with, with_queue};

/// What happened since this was asked last: message, and what became of it.
fn happened(broker: &Broker) -> Vec<(String, What)> {
    let events = broker.take_events().into_iter();
    events.map(|event| (event.message_id.unwrap_or_default(), event.what)).collect()
}

fn named(id: &str) -> Properties<'_> {
    Properties { message_id: Some(id.try_into().unwrap()), ..Properties::default() }
}

fn delivered(queue: &str, consumer: Option<&str>, redelivered: bool) -> What {
    let (queue, consumer) = (queue.to_owned(), consumer.map(str::to_owned));
    What::Delivered { queue, consumer, redelivered, auto_ack: false }
}

fn settled(queue: &str, how: Settled) -> What {
    What::Settled { queue: queue.to_owned(), how }
}

fn published(to: &[&str]) -> What {
    What::Published { to: to.iter().map(ToString::to_string).collect(), returned: false }
}

#[tokio::test]
async fn the_way_of_a_message_through_queues_is_told() {
    let broker = Broker::builder().record(100).start().unwrap();
    let connection = connect(&broker).await;
    let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
    channel.declare_queue("dead", QueueOptions::default()).await.unwrap();
    let arguments = Table::from_pairs([
        ("x-dead-letter-exchange", "".into()),
        ("x-dead-letter-routing-key", "dead".into()),
    ]);
    let options = QueueOptions { arguments: arguments.unwrap(), ..QueueOptions::default() };
    channel.declare_queue("q", options).await.unwrap();
    put_with(&channel, "q", "x", named("a")).await;
    let tagged = ConsumeOptions { tag: "reader".to_owned(), ..ConsumeOptions::default() };
    let mut consumer = channel.consume("q", tagged).await.unwrap();
    consumer.next().await.unwrap().unwrap().reject(Refused::Requeue).unwrap();
    consumer.next().await.unwrap().unwrap().reject(Refused::Discard).unwrap();
    consumer.cancel().await.unwrap();
    channel.get("dead", GetOptions::default()).await.unwrap().unwrap().ack().unwrap();
    channel.inspect_queue("q").await.unwrap();

    let way = [
        published(&["q"]),
        delivered("q", Some("reader"), false),
        settled("q", Settled::Requeued),
        delivered("q", Some("reader"), true),
        settled("q", Settled::Discarded),
        What::Died { queue: "q".to_owned(), why: Death::Rejected },
        What::DeadLettered { from: "q".to_owned(), to: vec!["dead".to_owned()] },
        // A failure counts on in the next queue.
        delivered("dead", None, true),
        settled("dead", Settled::Acked),
    ];
    assert_eq!(happened(&broker), way.map(|what| ("a".to_owned(), what)));
}

#[tokio::test(start_paused = true)]
async fn it_is_told_why_a_message_went() {
    let broker = Broker::builder().record(100).start().unwrap();
    let connection = connect(&broker).await;
    let channel = with_queue(&connection).await;
    let queue = || "q".to_owned();

    put_with(&channel, "nowhere", "x", named("lost")).await;
    let returned = What::Published { to: vec![], returned: true };
    assert_eq!(happened(&broker), [("lost".to_owned(), returned)]);

    let expiration = Some("50".try_into().unwrap());
    put_with(&channel, "q", "x", Properties { expiration, ..named("late") }).await;
    sleep(Duration::from_millis(60)).await;
    let expired = What::Died { queue: queue(), why: Death::Expired };
    let late = [published(&["q"]), expired].map(|what| ("late".to_owned(), what));
    assert_eq!(happened(&broker), late);

    broker.faults().nack_publishes(1);
    put_with(&channel, "q", "x", named("nacked")).await;
    let nacked = [published(&["q"]), What::Refused { queue: None }];
    assert_eq!(happened(&broker), nacked.map(|what| ("nacked".to_owned(), what)));

    put(&channel, "q", "x").await;
    channel.purge_queue("q").await.unwrap();
    put(&channel, "q", "x").await;
    channel.delete_queue("q", Default::default()).await.unwrap();
    let discarded = |why| What::Discarded { queue: queue(), why };
    let went = [
        published(&["q"]),
        discarded(Discarded::Purged),
        published(&["q"]),
        discarded(Discarded::QueueDeleted),
    ];
    assert_eq!(happened(&broker), went.map(|what| (String::new(), what)));
}

#[tokio::test]
async fn what_is_left_behind_and_what_a_restart_costs_is_told() {
    let broker = Broker::builder().record(100).start().unwrap();
    let connection = connect(&broker).await;
    let channel = with_queue(&connection).await;
    put(&channel, "q", "x").await;
    let held = channel.get("q", GetOptions::default()).await.unwrap().unwrap();
    broker.restart().await;
    drop(held);
    let events = happened(&broker);
    let lost = What::Discarded { queue: "q".to_owned(), why: Discarded::Restarted };
    let way =
        [published(&["q"]), delivered("q", None, false), settled("q", Settled::Abandoned), lost];
    assert_eq!(events, way.map(|what| (String::new(), what)));
}

#[tokio::test]
async fn the_newest_are_kept_and_the_others_are_missed_by_their_numbers() {
    let broker = Broker::builder().record(3).start().unwrap();
    let channel = with_queue(&connect(&broker).await).await;
    for id in ["0", "1", "2", "3", "4"] {
        put_with(&channel, "q", "x", named(id)).await;
    }
    let events = broker.events();
    let numbers: Vec<_> = events.iter().map(|event| event.number).collect();
    assert_eq!(numbers, [2, 3, 4]);
    assert!(events.iter().all(|event| event.message_id == Some(event.number.to_string())));
    assert_eq!((&*events[0].virtual_host, &*events[0].routing_key), ("/", "q"));
}

#[tokio::test]
async fn nothing_is_recorded_unless_it_is_asked_for() {
    let broker = broker();
    let channel = with_queue(&connect(&broker).await).await;
    put(&channel, "q", "x").await;
    assert!(broker.events().is_empty());
}
