//! Calls that nobody waits for to the end, and handles that are dropped at any moment, on a real RabbitMQ.

use std::time::Duration;

use leveret::amqp::{
    Channel, Confirm, Connection, ConsumeOptions, DeleteExchange, DeleteQueue, ErrorKind,
    ExchangeOptions, GetOptions, Publish, QueueOptions, Table,
};
use leveret_testkit::{eventually, rabbitmq};
use tokio::time::timeout;

use crate::support::rabbit::{
    Dice, SOON, connect, fill, next, options, polled, take, to, until_queue_has, with_queue,
};

/// A future's output, if it comes before it is abandoned: at once, after some turns, or after some microseconds.
async fn abandoned<F: Future>(dice: &mut Dice, future: F) -> Option<F::Output> {
    if dice.one_in(2) {
        polled(dice.below(5), future).await
    } else {
        timeout(Duration::from_micros(dice.roll() % 3000), future).await.ok()
    }
}

/// All calls of a channel that wait for the broker, one at random, and given up.
async fn abandon_any_call(dice: &mut Dice, channel: &Channel<Confirm>) {
    let none = &Table::new();
    let consume = ConsumeOptions { prefetch: 20, ..ConsumeOptions::default() };
    match dice.below(16) {
        0 => drop(abandoned(dice, channel.declare_queue("q", QueueOptions::default())).await),
        1 => drop(abandoned(dice, channel.inspect_queue("q")).await),
        2 => drop(abandoned(dice, channel.bind_queue("side", "amq.topic", "a.#", none)).await),
        3 => drop(abandoned(dice, channel.unbind_queue("side", "amq.topic", "a.#", none)).await),
        4 => drop(abandoned(dice, channel.purge_queue("side")).await),
        5 => drop(abandoned(dice, channel.delete_queue("gone", DeleteQueue::default())).await),
        6 => drop(abandoned(dice, channel.declare_queue("gone", QueueOptions::default())).await),
        7 => {
            let declare = channel.declare_exchange("e", "direct", ExchangeOptions::default());
            drop(abandoned(dice, declare).await);
        }
        8 => drop(abandoned(dice, channel.delete_exchange("e", DeleteExchange::Always)).await),
        9 => drop(abandoned(dice, channel.recover()).await),
        10 => drop(abandoned(dice, channel.prefetch_for_all(0)).await),
        11 => drop(abandoned(dice, channel.confirmed(SOON)).await),
        12 => drop(abandoned(dice, channel.get("q", GetOptions::default())).await),
        _ => {
            if let Some(consumer) = abandoned(dice, channel.consume("q", consume)).await {
                let mut consumer = consumer.unwrap();
                let mut held = Vec::new();
                for _ in 0..dice.below(30) {
                    if let Some(delivery) = abandoned(dice, consumer.next()).await {
                        held.push(delivery.unwrap().unwrap());
                    }
                }
                drop(abandoned(dice, consumer.cancel()).await);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_are_abandoned_at_any_moment_cost_the_channel_nothing() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    channel.declare_queue("side", QueueOptions::default()).await.unwrap();
    fill(&channel, "q", 300).await;
    let mut dice = Dice::seeded();
    for _ in 0..3000 {
        abandon_any_call(&mut dice, &channel).await;
    }
    until_queue_has(&channel, "q", 300, 0).await;
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    for _ in 0..300 {
        next(&mut consumer).await.ack().unwrap();
    }
    until_queue_has(&channel, "q", 0, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishes_and_commits_that_are_abandoned_are_neither_lost_nor_doubled() {
    let vhost = rabbitmq::vhost().await;
    let (connection, channel) = with_queue(&vhost).await;
    channel.declare_queue("tx", QueueOptions::default()).await.unwrap();
    let tx = connection.open_channel().await.unwrap().into_tx().await.unwrap();
    let mut dice = Dice::seeded();
    let (mut sent, mut committed) = (0u32, 0u32);
    for _ in 0..1500 {
        let publish = Publish { mandatory: dice.one_in(2), ..to("q", vec![0; dice.below(30_000)]) };
        if let Some(confirmation) = abandoned(&mut dice, channel.publish(&publish)).await {
            sent += 1;
            if let Some(outcome) = abandoned(&mut dice, confirmation.unwrap()).await {
                assert!(outcome.is_acked(), "{outcome:?}");
            }
        }
        if let Some(published) = abandoned(&mut dice, tx.publish(&to("tx", "x"))).await {
            published.unwrap();
            committed += 1;
        }
        if dice.one_in(4) {
            drop(abandoned(&mut dice, tx.commit()).await);
        }
        if dice.one_in(100) {
            drop(abandoned(&mut dice, connection.update_secret(b"guest", "again")).await);
        }
    }
    let tally = channel.confirmed(SOON).await.unwrap();
    assert_eq!(tally.acked, u64::from(sent));
    until_queue_has(&channel, "q", sent, 0).await;
    tx.commit().await.unwrap();
    until_queue_has(&channel, "tx", committed, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn channels_and_connections_that_are_abandoned_at_any_moment_are_closed() {
    const CHANNELS: u16 = 30;
    let vhost = rabbitmq::vhost().await;
    let mut options = options(&vhost);
    options.channel_max = CHANNELS;
    let connection = Connection::open(&options).await.unwrap();
    let mut dice = Dice::seeded();
    for _ in 0..1500 {
        match abandoned(&mut dice, connection.open_channel()).await {
            // Those that were abandoned are given back once the broker agrees.
            Some(Err(error)) => assert_eq!(error.kind(), ErrorKind::ChannelLimit, "{error}"),
            Some(Ok(channel)) => match dice.below(4) {
                0 => drop(abandoned(&mut dice, channel.into_confirm()).await),
                1 => drop(abandoned(&mut dice, channel.into_tx()).await),
                2 => drop(abandoned(&mut dice, channel.close()).await),
                _ => drop(channel),
            },
            None => {}
        }
        if dice.one_in(20) {
            // Under way to the broker, or there, or not begun.
            if let Some(another) = abandoned(&mut dice, Connection::open(&options)).await {
                let another = another.unwrap();
                drop(abandoned(&mut dice, another.ended()).await);
                drop(abandoned(&mut dice, another.close()).await);
            }
        }
    }
    let channels = eventually(SOON, "all channels to be free", async || {
        let mut channels = Vec::new();
        for _ in 0..CHANNELS {
            channels.push(connection.open_channel().await?);
        }
        Ok::<_, leveret::amqp::Error>(channels)
    })
    .await;
    let full = connection.open_channel().await.unwrap_err();
    assert_eq!(full.kind(), ErrorKind::ChannelLimit);
    for channel in channels {
        channel.close().await.unwrap();
    }
    let what = "that connection alone, without channels, in the management API";
    eventually(SOON, what, async || {
        let connections = vhost.connections().await.map_err(|error| error.to_string())?;
        let channels = connections.iter().map(|one| one["channels"].as_u64());
        let channels: Vec<Option<u64>> = channels.collect();
        if channels == [Some(0)] { Ok(()) } else { Err(format!("{channels:?}")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acked_before_everything_is_dropped_does_not_come_again() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    for _ in 0..30 {
        fill(&channel, "q", 200).await;
        let connection = connect(&vhost).await;
        let dropped = connection.open_channel().await.unwrap();
        let options = ConsumeOptions { prefetch: 200, ..ConsumeOptions::default() };
        let mut consumer = dropped.consume("q", options).await.unwrap();
        for delivery in take(&mut consumer, 200).await {
            delivery.ack().unwrap();
        }
        drop((consumer, dropped, connection));
        until_queue_has(&channel, "q", 0, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_published_before_everything_is_dropped_arrives() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    for round in 1..=30 {
        let connection = connect(&vhost).await;
        let dropped = connection.open_channel().await.unwrap();
        for _ in 0..500 {
            dropped.publish(&to("q", "x")).await.unwrap();
        }
        drop((dropped, connection));
        until_queue_has(&channel, "q", round * 500, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_acked_while_another_task_closes_the_connection_does_not_come_again() {
    let vhost = rabbitmq::vhost().await;
    let (_connection, channel) = with_queue(&vhost).await;
    for _ in 0..40 {
        fill(&channel, "q", 300).await;
        let connection = connect(&vhost).await;
        let mut takers = tokio::task::JoinSet::new();
        for _ in 0..3 {
            let connection = connection.clone();
            takers.spawn(async move {
                // Channels come and go, until there are none to be had.
                let mut acked = 0;
                while let Ok(channel) = connection.open_channel().await {
                    while let Ok(Some(delivery)) = channel.get("q", GetOptions::default()).await {
                        acked += u32::from(delivery.ack().is_ok());
                        if acked % 5 == 0 {
                            break;
                        }
                    }
                }
                acked
            });
        }
        eventually(SOON, "some to be taken", async || {
            channel.inspect_queue("q").await.unwrap().messages < 250
        })
        .await;
        connection.close().await.unwrap();
        let acked: u32 = takers.join_all().await.into_iter().sum();
        until_queue_has(&channel, "q", 300 - acked, 0).await;
        channel.purge_queue("q").await.unwrap();
    }
}
