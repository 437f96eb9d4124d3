//! Connections that are cut again and again, under the hands of many who send, on several threads: nobody is told.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leveret::{Backoff, Json, OnLoss, Queue, Topology};
use leveret_broker::Broker;
use tokio::task::JoinSet;

use crate::builder_of;

const CUTS: usize = 100;
const TASKS: u64 = 4;

async fn echo(Json(number): Json<u64>) -> Json<u64> {
    Json(number)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn whoever_publishes_or_calls_is_not_told_of_cuts() {
    let broker = Broker::builder().start().unwrap();
    let moment = Duration::from_millis(1);
    let backoff = Backoff { initial: moment, multiplier: 1.0, max: moment };
    let client = builder_of(&broker).backoff(backoff).connect().await.unwrap();
    client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let service = client.service("s").method("echo", echo);
    service.declare().await.unwrap();
    let serving = tokio::spawn(service.run());
    let publisher = client.publisher("").build().await.unwrap();
    let unconfirmed = client.publisher("").build_unconfirmed().await.unwrap();
    let rpc = client.rpc("s").on_loss(OnLoss::Replay).build().await.unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let mut senders = JoinSet::new();
    for _ in 0..TASKS {
        let (publisher, is_over) = (publisher.clone(), Arc::clone(&is_over));
        senders.spawn(async move {
            while !is_over.load(Ordering::Relaxed) {
                publisher.publish("q", "job").await.expect("a publish");
            }
        });
    }
    let unconfirmed = Arc::new(unconfirmed);
    for _ in 0..TASKS {
        let (unconfirmed, is_over) = (Arc::clone(&unconfirmed), Arc::clone(&is_over));
        senders.spawn(async move {
            while !is_over.load(Ordering::Relaxed) {
                unconfirmed.publish("q", "job").await.expect("an unconfirmed publish");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
    }
    for task in 0..TASKS {
        let (rpc, is_over) = (rpc.clone(), Arc::clone(&is_over));
        senders.spawn(async move {
            for number in (0..).map(|n| n * TASKS + task) {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                let Json(echoed): Json<u64> =
                    rpc.call("echo", Json(number)).await.expect("a reply");
                assert_eq!(echoed, number);
            }
        });
    }
    for _ in 0..CUTS {
        tokio::time::sleep(Duration::from_millis(20)).await;
        broker.faults().cut_all_connections();
        client.purge_queue("q").await.unwrap();
    }
    is_over.store(true, Ordering::Relaxed);
    let all = senders.join_all();
    tokio::time::timeout(Duration::from_secs(60), all).await.expect("all come to their end");
    serving.abort();
    client.close().await;
}
