use std::time::Duration;

use leveret::{ClientEvent, ConsumerBuilder, Queue, Retry};
use leveret_testkit::eventually;
use tokio::sync::mpsc;

use crate::{PATIENCE, broker, client_with, soon, unsettled};

/// The broker takes no publishes, so that nothing can be moved; but what can be handled is, which may be what frees its memory.
#[tokio::test(start_paused = true)]
async fn a_failed_message_does_not_stop_a_consumer_while_the_broker_blocks_publishers() {
    let broker = broker();
    let client = client_with(&broker, Queue::quorum("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch(["bad", "bad", "bad", "good"].map(|body| ("q", body))).await.unwrap();
    broker.faults().block("low on memory");
    let (sender, mut good) = mpsc::channel(1);
    let handler = move |body: String| {
        let sender = sender.clone();
        async move {
            if body == "bad" {
                return Err("not now");
            }
            sender.try_send(()).unwrap();
            Ok(())
        }
    };
    let runner = client.consumer("q").drain(Duration::ZERO).handle(handler);
    let summary = soon("the good one", runner.run_until(good.recv())).await.unwrap();
    assert_eq!(summary.handled, 1);
}

/// How many of 300 messages a consumer holds that can handle and move none.
async fn held_by(options: impl FnOnce(ConsumerBuilder) -> ConsumerBuilder) -> usize {
    let broker = broker();
    let client = client_with(&broker, Queue::quorum("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch((0..300).map(|number| ("q", number.to_string()))).await.unwrap();
    broker.faults().block("low on memory");
    let runner = options(client.consumer("q")).handle(async || Err::<(), _>("not now"));
    let running = tokio::spawn(runner.run());
    // It is blocked by the first publish, and gives up the next ones after half a minute.
    tokio::time::sleep(Duration::from_secs(20)).await;
    let held = unsettled(&broker, "q").unwrap();
    running.abort();
    held
}

#[tokio::test(start_paused = true)]
async fn messages_that_cannot_be_moved_are_held_beside_the_default_prefetch_up_to_a_limit() {
    assert_eq!(held_by(|consumer| consumer).await, 33);
    assert_eq!(held_by(|consumer| consumer.workers(20)).await, 60);
    // One that was set is kept to.
    assert_eq!(held_by(|consumer| consumer.prefetch(2)).await, 2);
    assert_eq!(held_by(ConsumerBuilder::exclusive).await, 100);
}

/// How many of 300 messages a consumer takes whose handlers do not end.
async fn taken_by(queue: Queue, options: impl FnOnce(ConsumerBuilder) -> ConsumerBuilder) -> usize {
    let broker = broker();
    let client = client_with(&broker, queue).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch((0..300).map(|number| ("q", number.to_string()))).await.unwrap();
    let runner = options(client.consumer("q")).handle(std::future::pending::<()>);
    let running = tokio::spawn(runner.run());
    // With a clock that stands still unless all wait, this is once the broker has sent all that it may.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let taken = unsettled(&broker, "q").unwrap();
    running.abort();
    taken
}

#[tokio::test(start_paused = true)]
async fn the_default_prefetch_follows_from_the_workers() {
    let classic = || Queue::classic("q");
    assert_eq!(taken_by(classic(), |consumer| consumer).await, 1);
    assert_eq!(taken_by(classic(), |consumer| consumer.workers(16)).await, 16);
    assert_eq!(taken_by(classic(), |consumer| consumer.workers(2).subscribers(3)).await, 6);
    assert_eq!(taken_by(classic(), |consumer| consumer.workers(4).prefetch(9)).await, 9);
}

#[tokio::test(start_paused = true)]
async fn messages_that_no_other_consumer_could_handle_are_taken_in_large_pieces() {
    let exclusive = Queue::classic("q").exclusive();
    assert_eq!(taken_by(exclusive, |consumer| consumer).await, 100);
    let single = || Queue::quorum("q").single_active_consumer();
    assert_eq!(taken_by(single(), |consumer| consumer).await, 100);
    assert_eq!(taken_by(single(), |consumer| consumer.workers(80)).await, 160);
    let classic = || Queue::classic("q");
    assert_eq!(taken_by(classic(), ConsumerBuilder::exclusive).await, 100);
    // Failed messages stay with it and take up its prefetch.
    let in_place = |consumer: ConsumerBuilder| consumer.retry(Retry::in_place(Duration::ZERO));
    assert_eq!(taken_by(classic(), in_place).await, 100);
}

#[tokio::test(start_paused = true)]
async fn a_stream_takes_a_hundred_messages_at_a_time_by_default() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch((0..300).map(|number| ("q", number.to_string()))).await.unwrap();
    let deliveries = soon("a stream", client.consumer("q").stream()).await.unwrap();
    eventually(PATIENCE, "a hundred deliveries", async || unsettled(&broker, "q") == Some(100))
        .await;
    drop(deliveries);
}

/// The consumer is lost while a failed message uses up the default prefetch and is being moved.
#[tokio::test(start_paused = true)]
async fn a_consumer_that_is_lost_beside_a_failed_message_resumes() {
    for workers in [1, 2] {
        let broker = broker();
        let client = client_with(&broker, Queue::quorum("q").bind("amq.direct", "q")).await;
        let publisher = client.publisher("").build().await.unwrap();
        publisher.publish_batch(vec![("q", "bad"); workers]).await.unwrap();
        let mut events = client.watch();
        let (failed, mut has_failed) = mpsc::channel(workers);
        let handler = move || {
            failed.try_send(()).unwrap();
            async { Err::<(), _>("not now") }
        };
        let running = tokio::spawn(client.consumer("q").workers(workers).handle(handler).run());
        for _ in 0..workers {
            has_failed.recv().await.unwrap();
        }
        broker.faults().freeze();
        soon("the loss", async {
            while !matches!(events.next().await.unwrap(), ClientEvent::ConsumerLost { .. }) {}
        })
        .await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        broker.faults().thaw();
        soon("the consumer", async {
            while !matches!(events.next().await.unwrap(), ClientEvent::ConsumerResumed { .. }) {}
        })
        .await;
        running.abort();
    }
}
