//! A shutdown ends, whatever clients do.

use std::time::Duration;

use leveret::amqp::ErrorKind;
use leveret_wire::method::{basic, channel, connection, queue};
use leveret_wire::{Properties, ReplyCode};
use tokio::time::Instant;

use crate::support::{broker, connect, peer};

/// How long clients get to agree.
const PATIENCE: Duration = Duration::from_secs(5);

#[tokio::test(start_paused = true)]
async fn clients_that_do_not_answer_are_cut_off() {
    let broker = broker();
    // One that does not agree, and one that has not even shaken hands.
    let mut deaf = peer(&broker).await;
    let _silent = broker.connect();
    let polite = connect(&broker).await;
    let began = Instant::now();
    broker.shutdown().await;
    assert!(began.elapsed() <= PATIENCE, "{:?}", began.elapsed());
    let close = deaf.expect::<connection::Close<'_>>(0).await;
    assert_eq!(close.reply_code, ReplyCode::CONNECTION_FORCED);
    let closed = ErrorKind::ConnectionClosed(ReplyCode::CONNECTION_FORCED);
    assert_eq!(polite.ended().await.kind(), closed);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_nothing_is_cut_off() {
    let broker = broker();
    let mut stuck = peer(&broker).await;
    stuck.send(1, &channel::Open {}).await;
    stuck.expect::<channel::OpenOk>(1).await;
    let name = || "q".try_into().unwrap();
    stuck.send(1, &queue::Declare { queue: name(), ..Default::default() }).await;
    stuck.expect::<queue::DeclareOk<'_>>(1).await;
    let publish = basic::Publish { routing_key: name(), ..Default::default() };
    for _ in 0..20 {
        stuck.send_content(1, &publish, &Properties::default(), vec![0; 100_000]).await;
    }
    let consume = basic::Consume { queue: name(), no_ack: true, ..Default::default() };
    stuck.send(1, &consume).await;
    // The pipe is full, and the writer waits.
    while broker.statistics().tally.delivered < 10 {
        tokio::task::yield_now().await;
    }
    let began = Instant::now();
    broker.shutdown().await;
    assert!(began.elapsed() <= PATIENCE, "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_broker_with_polite_clients_stops_at_once_and_twice() {
    let broker = broker();
    let _clients = [connect(&broker).await, connect(&broker).await];
    let began = Instant::now();
    broker.shutdown().await;
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    broker.shutdown().await;
    broker.restart().await;
}
