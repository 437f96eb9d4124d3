use std::time::Duration;

use leveret::{ErrorKind, Queue, Topology};
use leveret_testkit::eventually;
use tokio::time::sleep;

use crate::{PATIENCE, broker, client_of, client_with, depth, soon};

#[tokio::test(start_paused = true)]
async fn a_queue_that_nobody_declares_again_ends_the_stream() {
    let broker = broker();
    let owner = client_with(&broker, Queue::classic("q")).await;
    let client = client_of(&broker).await;
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    owner.delete_queue("q", Default::default()).await.unwrap();
    let error = tokio::time::timeout(Duration::from_secs(120), deliveries.next())
        .await
        .expect("an end")
        .unwrap()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Missing, "{error}");
    assert!(deliveries.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_further_connection_ends_with_the_last_delivery_of_its_last_consumer() {
    let broker = broker();
    let client = crate::builder_of(&broker).max_subscriptions(2).connect().await.unwrap();
    client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let connections = || broker.snapshot().virtual_host("/").unwrap().connections.len();
    let until = async |count: usize| {
        let found = async || {
            let found = connections();
            if found == count { Ok(()) } else { Err(found.to_string()) }
        };
        eventually(PATIENCE, format!("{count} connections"), found).await;
    };
    let mut streams = Vec::new();
    for _ in 0..5 {
        streams.push(client.consumer("q").stream().await.unwrap());
    }
    until(4).await;
    // The last one alone consumes, and takes a message.
    let mut last = streams.pop().unwrap();
    drop(streams);
    until(3).await;
    publisher.publish("q", "late").await.unwrap();
    let delivery = soon("a delivery", last.next()).await.unwrap().unwrap();
    drop(last);
    assert_eq!(client.health().connections.len(), 2);
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(connections(), 3, "a delivery is not acked yet");
    delivery.ack().unwrap();
    until(2).await;
    assert_eq!(depth(&broker, "q"), Some(0));
    assert!(client.health().is_healthy());
    // Those that begin later have connections again, which the end of the client closes.
    for _ in 0..5 {
        streams_go_on(&client).await;
    }
    let streams = [client.consumer("q").stream().await, client.consumer("q").stream().await];
    let further = client.consumer("q").stream().await.unwrap();
    until(3).await;
    drop((streams, further));
    client.close().await;
    until(0).await;
}

/// Three consumers begin, get a message, and end.
async fn streams_go_on(client: &leveret::Client) {
    let publisher = client.publisher("").build().await.unwrap();
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(client.consumer("q").stream().await.unwrap());
    }
    drop(streams.drain(..2));
    publisher.publish("q", "again").await.unwrap();
    let delivery = soon("a delivery", streams[0].next()).await.unwrap().unwrap();
    delivery.ack().unwrap();
}
