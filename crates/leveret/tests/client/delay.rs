use std::time::{Duration, SystemTime};

use leveret::amqp::GetOptions;
use leveret::{
    Attempt, Binding, Client, ErrorKind, Exchange, Message, Queue, QueueType, RetryPolicy, Topology,
};
use leveret_broker::{Broker, Profile};
use proptest::prelude::*;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use crate::{broker, client_of, client_with, depth, soon};

const SECOND: Duration = Duration::from_secs(1);
const STEP: Duration = Duration::from_millis(125);
const HOUR: Duration = Duration::from_secs(3600);
const YEAR: Duration = Duration::from_secs(365 * 86_400);

const PARKED: &str = "leveret.delay.unroutable";

/// Publishes a message for queue `q`, and closes the client: time passes faster without it.
async fn publish_and_leave(broker: &Broker, delay: Duration) {
    let client = client_with(broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_in("q", "later", delay).await.unwrap();
    client.close().await;
}

#[tokio::test(start_paused = true)]
async fn a_message_comes_when_it_is_due_and_not_before() {
    let odd = Duration::from_millis(5_370_000_875);
    for delay in [STEP, SECOND - STEP, SECOND, 77 * SECOND, HOUR, odd, YEAR, 8 * YEAR] {
        let broker = broker();
        let began = Instant::now();
        publish_and_leave(&broker, delay).await;
        sleep_until(began + delay - Duration::from_millis(1)).await;
        assert_eq!(depth(&broker, "q"), Some(0), "early by {delay:?}");
        let step = if delay > 600 * SECOND { SECOND } else { STEP };
        sleep_until(began + delay + step).await;
        assert_eq!(depth(&broker, "q"), Some(1), "not there after {delay:?}");
    }
}

/// Publishes messages with these delays, and gives those of them in the order in which they came, and when they did.
async fn arrivals(delays: &[Duration], queue_type: QueueType) -> Vec<(Duration, Duration)> {
    let client = client_with(&broker(), Queue::classic("q")).await;
    client.delays().declare(queue_type).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let began = Instant::now();
    let mut tickets = Vec::new();
    for delay in delays {
        let body = delay.as_nanos().to_string();
        tickets.push(publisher.send_in("q", body, *delay).await.unwrap());
    }
    publisher.flush().await.unwrap();
    for ticket in tickets {
        ticket.await.unwrap();
    }
    assert_eq!(publisher.unconfirmed(), 0);
    assert_eq!(client.delays().pending().await.unwrap(), delays.len() as u64);
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    let mut arrived = Vec::new();
    while arrived.len() < delays.len() {
        let delivery = deliveries.next().await.unwrap().unwrap();
        let nanos = std::str::from_utf8(delivery.body()).unwrap().parse().unwrap();
        arrived.push((Duration::from_nanos(nanos), began.elapsed()));
        delivery.ack().unwrap();
    }
    assert_eq!(client.delays().pending().await.unwrap(), 0);
    arrived
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    #[test]
    fn many_at_once_come_each_in_its_time(
        delays in prop::collection::vec((1..7_200_000u64, 0..20u32), 1..120),
        is_quorum in any::<bool>(),
    ) {
        let delays: Vec<Duration> =
            delays.iter().map(|(most, shift)| Duration::from_millis((most >> shift).max(1))).collect();
        let queue_type = if is_quorum { QueueType::Quorum } else { QueueType::Classic };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        let arrived = runtime.block_on(arrivals(&delays, queue_type));
        for (delay, at) in arrived {
            let step = if delay > 600 * SECOND { SECOND } else { STEP };
            // What the client's own timers add to the time at which it was published.
            let slack = Duration::from_millis(50);
            prop_assert!(at >= delay && at < delay + step + slack, "{delay:?} came at {at:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_waits_survives_a_restart_of_the_broker() {
    for queue_type in [QueueType::Classic, QueueType::Quorum] {
        let broker = broker();
        let client = client_with(&broker, Queue::quorum("q")).await;
        client.delays().declare(queue_type).await.unwrap();
        let publisher = client.publisher("").build().await.unwrap();
        let began = Instant::now();
        publisher.publish_in("q", "later", HOUR + SECOND).await.unwrap();
        sleep(HOUR / 2).await;
        broker.restart().await;
        assert_eq!(soon("a count", client.delays().pending()).await.unwrap(), 1);
        let mut deliveries = client.consumer("q").stream().await.unwrap();
        let delivery = deliveries.next().await.unwrap().unwrap();
        assert_eq!(delivery.body(), "later");
        assert!(began.elapsed() >= HOUR + SECOND);
        delivery.ack().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_due_at_once_or_was_in_the_past_does_not_wait() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_in("q", "now", Duration::ZERO).await.unwrap();
    let past = SystemTime::now() - HOUR;
    publisher.publish_at("q", "belated", past).await.unwrap();
    assert_eq!(depth(&broker, "q"), Some(2));
    assert_eq!(depth(&broker, PARKED), None, "the ladder is not needed for that");

    let soon = SystemTime::now() + 2 * SECOND;
    publisher.publish_at("q", "soon", soon).await.unwrap();
    assert_eq!((depth(&broker, "q"), client.delays().pending().await.unwrap()), (Some(2), 1));
    sleep(3 * SECOND).await;
    assert_eq!((depth(&broker, "q"), client.delays().pending().await.unwrap()), (Some(3), 0));
}

#[tokio::test(start_paused = true)]
async fn only_as_much_of_the_ladder_is_made_as_is_needed() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_in("q", "soon", SECOND).await.unwrap();
    assert_eq!(depth(&broker, "leveret.delay.03"), Some(1));
    assert_eq!(depth(&broker, "leveret.delay.04"), None);
    publisher.publish_in("q", "later", 3 * SECOND).await.unwrap();
    assert_eq!(depth(&broker, "leveret.delay.04"), Some(1));
    sleep(4 * SECOND).await;
    assert_eq!(depth(&broker, "q"), Some(2));
}

#[tokio::test(start_paused = true)]
async fn a_delay_that_is_too_long_is_refused_with_the_limit() {
    let client = client_with(&broker(), Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    let error = publisher.publish_in("q", "never", 9 * YEAR).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("268435455 seconds"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_message_can_be_delayed_again_and_again() {
    for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
        let broker = Broker::builder().profile(profile).start().unwrap();
        let client = client_with(&broker, Queue::classic("q")).await;
        let publisher = client.publisher("").build().await.unwrap();
        publisher.publish_in("q", "again", 7 * SECOND).await.unwrap();
        let mut deliveries = client.consumer("q").stream().await.unwrap();
        for delay in [7 * SECOND, 7 * SECOND, SECOND, 3 * HOUR] {
            let delivery = soon("a delivery", deliveries.next()).await.unwrap().unwrap();
            let began = Instant::now();
            let message = Message::with_properties(
                delivery.body().clone(),
                delivery.properties().into_owned(),
            );
            publisher.publish_in("q", message, delay).await.unwrap();
            delivery.ack().unwrap();
            sleep_until(began + delay - Duration::from_millis(1)).await;
            assert_eq!(client.delays().pending().await.unwrap(), 1, "{profile} {delay:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_delay_is_no_retry() {
    let client = client_with(&broker(), Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_in("q", "job", 7 * SECOND).await.unwrap();
    let (sender, mut seen) = mpsc::channel(10);
    let handler = move |Attempt(attempt): Attempt| {
        let sender = sender.clone();
        async move {
            sender.send(attempt).await.unwrap();
            if attempt < 3 { Err("not yet") } else { Ok(()) }
        }
    };
    let stop = async {
        for attempt in 1..=3 {
            assert_eq!(seen.recv().await, Some(attempt));
        }
    };
    let policy = RetryPolicy::fixed(SECOND).max_retries(2);
    client.consumer("q").retry(policy).handle(handler).run_until(stop).await.unwrap();
    assert_eq!(client.inspect_queue("q.parked").await.unwrap().messages, 0);
}

#[tokio::test(start_paused = true)]
async fn a_target_that_somebody_else_made_anew_is_bound_again() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_in("q", "one", SECOND).await.unwrap();
    sleep(2 * SECOND).await;
    let other = client_of(&broker).await;
    other.delete_queue("q", Default::default()).await.unwrap();
    other.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    sleep(61 * SECOND).await;
    publisher.publish_in("q", "two", SECOND).await.unwrap();
    sleep(2 * SECOND).await;
    assert_eq!(depth(&broker, "q"), Some(1));
}

#[tokio::test(start_paused = true)]
async fn a_deleted_ladder_is_an_error_once_and_then_made_anew() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_in("q", "one", SECOND).await.unwrap();
    sleep(2 * SECOND).await;
    let other = client_of(&broker).await;
    other.delete_queue("leveret.delay.03", Default::default()).await.unwrap();
    let error = publisher.publish_in("q", "two", SECOND).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unroutable);
    publisher.publish_in("q", "three", SECOND).await.unwrap();
    // Without its exchange a publisher makes the ladder's entry anew by itself.
    other.delete_exchange("leveret.delay", Default::default()).await.unwrap();
    publisher.publish_in("q", "four", SECOND).await.unwrap();
    sleep(2 * SECOND).await;
    assert_eq!(depth(&broker, "q"), Some(3));
}

#[tokio::test(start_paused = true)]
async fn what_should_wait_in_a_queue_that_is_gone_is_parked_and_not_early() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_in("q", "three seconds", 3 * SECOND).await.unwrap();
    client.delete_queue("leveret.delay.03", Default::default()).await.unwrap();
    sleep(4 * SECOND).await;
    assert_eq!((depth(&broker, "q"), depth(&broker, PARKED)), (Some(0), Some(1)));
}

#[tokio::test(start_paused = true)]
async fn after_a_move_to_a_standby_messages_find_their_way_too() {
    let (first, standby) = (broker(), broker());
    let client = Client::builder().broker(&first).broker(&standby).connect().await.unwrap();
    client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_in("q", "one", SECOND).await.unwrap();
    first.shutdown().await;
    soon("a publish", publisher.publish_in("q", "two", SECOND)).await.unwrap();
    sleep(2 * SECOND).await;
    assert_eq!(depth(&standby, "q"), Some(1));
}

#[tokio::test(start_paused = true)]
async fn a_deleted_ladder_is_made_anew_also_for_those_who_hold_tickets() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_in("q", "one", SECOND).await.unwrap();
    let other = client_of(&broker).await;
    other.delete_queue("leveret.delay.03", Default::default()).await.unwrap();
    let error = publisher.send_in("q", "two", SECOND).await.unwrap().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unroutable);
    publisher.send_in("q", "three", SECOND).await.unwrap().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn many_who_wait_for_the_ladder_do_not_wait_one_after_the_other() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    broker.faults().freeze();
    let began = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let publisher = publisher.clone();
        tasks.spawn(async move { publisher.publish_in("q", "x", SECOND).await });
    }
    while let Some(done) = tasks.join_next().await {
        assert_eq!(done.unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
    }
    // Twice the client's timeout at most: for the others, and for itself.
    assert!(began.elapsed() <= 61 * SECOND, "{:?}", began.elapsed());
}

/// Programs that read headers of text and lists alone have to be able to take delayed messages: the broker's own `x-death` is a list.
#[tokio::test(start_paused = true)]
async fn what_a_delayed_message_carries_is_text() {
    for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
        let broker = Broker::builder().profile(profile).start().unwrap();
        let client = client_of(&broker).await;
        let queue = Queue::classic("q").bind("orders", "#");
        let topology = Topology::new().exchange(Exchange::topic("orders")).queue(queue);
        client.apply(&topology).await.unwrap();
        for exchange in ["", "orders"] {
            let publisher = client.publisher(exchange).build().await.unwrap();
            let message = Message::new("later").priority(9);
            publisher.publish_in("q", message, 7 * SECOND).await.unwrap();
            sleep(8 * SECOND).await;
            let arrived = client.get("q", GetOptions::default()).await.unwrap().expect("a message");
            let properties = arrived.properties();
            let headers = properties.headers.unwrap_or_default();
            for (name, value) in headers.iter() {
                let is_plain = value.as_str().is_some() || value.as_array().is_some();
                assert!(is_plain, "{profile} {exchange:?}: {name:?} is {value:?}");
            }
            assert_eq!(headers.is_empty(), exchange == "orders", "{profile}: {headers:?}");
            arrived.ack().unwrap();
        }
    }
}

/// Earlier versions wrote numbers and truth values, and bound the queues by those.
#[tokio::test(start_paused = true)]
async fn messages_of_earlier_versions_arrive_beside_those_of_this_one() {
    for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
        let broker = Broker::builder().profile(profile).start().unwrap();
        let client = client_with(&broker, Queue::classic("q")).await;
        let publisher = client.publisher("").build().await.unwrap();
        publisher.publish_in("q", "this", 5 * STEP).await.unwrap();
        let earlier = Topology::new()
            .binding(
                Binding::to_queue("leveret.delay.02", "leveret.delay", "")
                    .argument("leveret-delay-level", 2i64),
            )
            .binding(
                Binding::to_exchange("leveret.delay.00", "leveret.delay.01", "")
                    .argument("leveret-delay-01", false),
            )
            .binding(
                Binding::to_queue("leveret.delay.00", "leveret.delay.00", "")
                    .argument("leveret-delay-00", true),
            );
        client.apply(&earlier).await.unwrap();
        let message = Message::new("earlier")
            .header("leveret-delay-level", 2i64)
            .header("leveret-delay-01", false)
            .header("leveret-delay-00", true)
            .header("leveret-delay-queue", "q");
        let ladder = client.publisher("leveret.delay").build().await.unwrap();
        ladder.publish("q", message).await.unwrap();
        sleep(SECOND).await;
        assert_eq!((depth(&broker, "q"), depth(&broker, PARKED)), (Some(2), Some(0)), "{profile}");
    }
}
