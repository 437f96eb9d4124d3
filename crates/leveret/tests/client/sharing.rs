use std::time::Duration;

use leveret::{Client, ConsumerBuilder, Queue, Retry};
use leveret_broker::Broker;
use leveret_testkit::eventually;

use crate::{PATIENCE, broker, client_of, client_with, sharing, soon, unsettled};

async fn two() -> (Broker, Client, Client) {
    let broker = broker();
    let (one, other) = (client_of(&broker).await, client_of(&broker).await);
    (broker, one, other)
}

#[tokio::test(start_paused = true)]
async fn a_pool_handles_as_many_messages_at_a_time_as_it_has_subscribers() {
    let (_broker, client, _) = two().await;
    sharing::a_pool(&client).await;
}

#[tokio::test(start_paused = true)]
async fn waiting_messages_are_shared_by_two_clients() {
    let (_broker, one, other) = two().await;
    sharing::two_clients(&one, &other).await;
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_are_shared_by_two_instances_of_a_service() {
    let (_broker, one, other) = two().await;
    sharing::two_instances_of_a_service(&one, &other).await;
}

#[tokio::test(start_paused = true)]
async fn waiting_events_are_shared_by_two_subscribers() {
    let (_broker, one, other) = two().await;
    sharing::two_subscribers_of_events(&one, &other).await;
}

#[tokio::test(start_paused = true)]
async fn waiting_batches_are_shared_by_two_clients() {
    let (_broker, one, other) = two().await;
    sharing::two_clients_with_batches(&one, &other).await;
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
