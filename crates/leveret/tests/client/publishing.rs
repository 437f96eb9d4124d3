use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use leveret::amqp::Properties;
use leveret::{ClientEvent, ErrorKind, Exchange, Message, OnLoss, Queue, Topology};
use leveret_broker::Broker;

use crate::{broker, client_of, client_with, depth, soon};

/// What is on its way out of a connection that failed may take its time to be given up. Time is paused, so it would stand still
/// if anybody tried again and again meanwhile.
#[tokio::test(start_paused = true)]
async fn nobody_runs_in_circles_while_a_connection_that_failed_is_given_up() {
    let broker = Broker::builder().heartbeat(Duration::from_secs(1)).start().unwrap();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    broker.faults().freeze();
    // More than a pipe to the broker holds.
    let ticket = publisher.send("q", vec![b'x'; 1 << 20]).await.unwrap();
    soon("the end of the connection", async {
        let is_lost = |event: &ClientEvent| matches!(event, ClientEvent::Lost { connection, .. } if connection.contains("publishing"));
        let mut events = client.watch();
        while !events.next().await.is_some_and(|event| is_lost(&event)) {}
    })
    .await;
    broker.faults().thaw();
    soon("a confirmation", ticket).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_publisher_that_is_to_fail_reports_the_loss() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").on_loss(OnLoss::Fail).build().await.unwrap();
    broker.faults().freeze();
    let ticket = publisher.send("q", "1").await.unwrap();
    broker.faults().cut_all_connections();
    tokio::time::sleep(Duration::from_millis(10)).await;
    broker.faults().thaw();
    let error = soon("an outcome", ticket).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    soon("a publish", publisher.publish("q", "2")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_ticket_says_the_same_when_it_is_awaited_again() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    for (queue, is_confirmed) in [("q", true), ("nowhere", false)] {
        let mut ticket = publisher.send(queue, "1").await.unwrap();
        for _ in 0..3 {
            assert_eq!(soon("an outcome", &mut ticket).await.is_ok(), is_confirmed);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_publish_that_is_never_confirmed_times_out() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let timeout = Duration::from_secs(5);
    let publisher = client.publisher("").timeout(timeout).build().await.unwrap();
    broker.faults().freeze();
    let error = soon("an outcome", publisher.publish("q", "1")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    broker.faults().thaw();
    soon("a publish", publisher.publish("q", "2")).await.unwrap();
}

/// The broker closes the channel because of a message, and the publisher has its next one before the flush looks again.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn flushing_ends_when_messages_have_cost_the_channel() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").timeout(Duration::from_secs(600)).build().await.unwrap();
    tokio::spawn(async move {
        for _ in 0..20 {
            let properties =
                Properties { user_id: Some("nobody".try_into().unwrap()), ..Properties::default() };
            let refused = Message::with_properties("refused", properties);
            let ticket = publisher.send("q", refused).await.unwrap();
            let good = publisher.send("q", "good").await.unwrap();
            soon("outcomes", publisher.flush()).await.unwrap();
            assert!(ticket.await.is_err());
            good.await.unwrap();
        }
    })
    .await
    .unwrap();
    assert_eq!(depth(&broker, "q"), Some(20));
}

#[tokio::test(start_paused = true)]
async fn a_publish_that_waits_and_is_not_polled_keeps_one_place_and_no_more() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").window(2).build().await.unwrap();
    broker.faults().freeze();
    let tickets =
        [publisher.send("q", "1").await.unwrap(), publisher.send("q", "2").await.unwrap()];
    let mut unpolled = Box::pin(publisher.send("q", "3"));
    assert!(tokio::time::timeout(Duration::from_millis(1), &mut unpolled).await.is_err());
    broker.faults().thaw();
    for ticket in tickets {
        soon("an outcome", ticket).await.unwrap();
    }
    for _ in 0..10 {
        soon("an outcome", publisher.publish("q", "another")).await.unwrap();
    }
    soon("a place", unpolled).await.unwrap().await.unwrap();
    assert_eq!(depth(&broker, "q"), Some(13));
}

#[tokio::test(start_paused = true)]
async fn what_is_not_confirmed_in_time_is_sent_again_with_the_same_id() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client
        .publisher("")
        .resend_after(Duration::from_secs(1))
        .timeout(Duration::from_secs(50))
        .build()
        .await
        .unwrap();
    broker.faults().freeze();
    let ticket = publisher.send("q", "1").await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    broker.faults().thaw();
    soon("a confirmation", ticket).await.unwrap();
    let ids: Vec<_> = broker
        .peek("/", "q", 10)
        .unwrap()
        .iter()
        .map(|message| message.properties.get().message_id.map(|id| id.to_string()))
        .collect();
    assert_eq!(ids.len(), 2, "what went over the first channel, and what was sent again");
    assert!(ids[0].is_some() && ids[0] == ids[1], "{ids:?}");
}

/// Counts how often a future is polled.
struct Counting<F> {
    future: Pin<Box<F>>,
    polls: Arc<AtomicUsize>,
}

impl<F: Future> Future for Counting<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        self.polls.fetch_add(1, Ordering::Relaxed);
        self.future.as_mut().poll(context)
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_publishers_are_served_in_order_and_wake_only_when_it_is_their_turn() {
    const TASKS: usize = 3000;
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").window(10).build().await.unwrap();
    let polls = Arc::default();
    let tasks: Vec<_> = (0..TASKS)
        .map(|number| {
            let publisher = publisher.clone();
            let publish = async move { publisher.publish("q", number.to_string()).await };
            let future = Box::pin(publish);
            tokio::spawn(Counting { future, polls: Arc::clone(&polls) })
        })
        .collect();
    for task in tasks {
        soon("an outcome", task).await.unwrap().unwrap();
    }
    // Begun, served, confirmed; and some more for a full outbound buffer.
    let polls = polls.load(Ordering::Relaxed);
    assert!(polls < 6 * TASKS, "{polls} polls for {TASKS} messages");
    let messages = broker.peek("/", "q", TASKS).unwrap();
    let bodies = messages.iter().map(|message| String::from_utf8_lossy(&message.body).into_owned());
    let numbers: Vec<usize> = bodies.map(|body| body.parse().unwrap()).collect();
    assert!(numbers.is_sorted(), "{numbers:?}");
    assert_eq!(numbers.len(), TASKS);
}

#[tokio::test(start_paused = true)]
async fn a_publish_that_is_dropped_while_it_waits_lets_others_through_and_is_not_sent() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").window(1).build().await.unwrap();
    broker.faults().freeze();
    let first = publisher.send("q", "first").await.unwrap();
    let waiting = |body: &'static str| {
        let publisher = publisher.clone();
        tokio::spawn(async move { publisher.publish("q", body).await })
    };
    let (dropped, second) = (waiting("dropped"), waiting("second"));
    tokio::time::sleep(Duration::from_millis(10)).await;
    dropped.abort();
    broker.faults().thaw();
    soon("an outcome", first).await.unwrap();
    soon("an outcome", second).await.unwrap().unwrap();
    assert_eq!(depth(&broker, "q"), Some(2));
}

/// Those that are sent again have other delivery tags than before, with gaps where others were confirmed.
#[tokio::test(start_paused = true)]
async fn each_ticket_gets_its_own_outcome_after_a_reconnect_and_messages_keep_their_order() {
    let broker = broker();
    let client = client_of(&broker).await;
    let queue = Queue::classic("q").bind("jobs", "a");
    let topology = Topology::new().exchange(Exchange::direct("jobs")).queue(queue);
    client.apply(&topology).await.unwrap();
    let publisher = client.publisher("jobs").build().await.unwrap();
    broker.faults().freeze();
    let mut tickets = Vec::new();
    for number in 0..100 {
        // Every third one reaches no queue.
        let key = if number % 3 == 0 { "nowhere" } else { "a" };
        tickets.push(publisher.send(key, number.to_string()).await.unwrap());
    }
    assert_eq!(publisher.unconfirmed(), 100);
    // The last is awaited first, and some not at all.
    let late = tickets.split_off(50);
    drop(tickets.split_off(40));
    broker.faults().cut_all_connections();
    broker.faults().thaw();
    for (number, ticket) in (50..100).zip(late).rev() {
        check_outcome(number, soon("an outcome", ticket).await);
    }
    let fresh = publisher.send("nowhere", "100").await.unwrap();
    for (number, ticket) in (0..).zip(tickets) {
        check_outcome(number, soon("an outcome", ticket).await);
    }
    assert_eq!(soon("an outcome", fresh).await.unwrap_err().kind(), ErrorKind::Unroutable);
    assert_eq!(publisher.unconfirmed(), 0);
    // They were sent again in their order, after those that the broker had got before.
    let arrived = broker.peek("/", "q", 200).unwrap();
    let arrived: Vec<_> = arrived.iter().map(|message| message.body.clone()).collect();
    let expected: Vec<_> = (0..100).filter(|n| n % 3 != 0).map(|n| n.to_string()).collect();
    assert_eq!(arrived[arrived.len() - expected.len()..], expected[..]);
}

fn check_outcome(number: usize, outcome: Result<(), leveret::Error>) {
    match outcome {
        Ok(()) => assert_ne!(number % 3, 0),
        Err(error) => {
            assert_eq!((number % 3, error.kind()), (0, ErrorKind::Unroutable), "{error}");
            let returned = error.returned().expect("the message");
            assert_eq!(returned.body, number.to_string());
        }
    }
}
