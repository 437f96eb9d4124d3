//! Deleting queues with what belongs to them, on whatever broker.

// It is a part of two kinds of tests.
#![allow(dead_code, unreachable_pub)]

use std::time::Duration;

use leveret::{
    Belonging, Binding, Client, ErrorKind, Exchange, Failure, Queue, Retry, RetryPolicy, Topology,
};
pub use leveret_testkit::soon;
use leveret_testkit::{SOON, eventually};

pub fn there(belongings: &[Belonging]) -> Vec<String> {
    let there = belongings.iter().filter(|belonging| belonging.is_there);
    let mut names: Vec<_> = there.map(ToString::to_string).collect();
    names.sort();
    names
}

pub fn is_empty(belongings: &[Belonging]) -> bool {
    there(belongings).is_empty()
}

async fn until_parked(client: &Client, queue: &str, retry: Retry, parked: &str) {
    let publisher = soon("a publisher", client.publisher("").build()).await.unwrap();
    soon("an outcome", publisher.publish(queue, "job")).await.unwrap();
    let consumer = client.consumer(queue).retry(retry);
    let runner = consumer.handle(async || Err::<(), _>(Failure::permanent("never")));
    let done = eventually(SOON, "a parked message", async || {
        client.inspect_queue(parked).await.is_ok_and(|lot| lot.messages == 1)
    });
    soon("the end", runner.run_until(done)).await.unwrap();
    eventually(SOON, "no consumer", async || {
        client.inspect_queue(queue).await.is_ok_and(|queue| queue.consumers == 0)
    })
    .await;
}

/// A queue `jobs` with what a design puts beside it, of which an exchange `shop` is the application's.
pub async fn all_that_belongs_to_a_queue(
    client: &Client,
    topology: Topology,
    retry: Retry,
    parked: &str,
    objects: &[&str],
) {
    soon("objects", client.apply(&topology)).await.unwrap();
    until_parked(client, "jobs", retry.clone(), parked).await;
    let removal = client.queue_removal("jobs").retry(retry);
    assert_eq!(there(&soon("a plan", removal.plan()).await.unwrap()), objects);
    let refused = soon("a refusal", removal.run()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused}");
    let text = format!("queue {parked:?} has 1 message");
    assert!(refused.to_string().contains(&text), "{refused}");
    assert_eq!(there(&soon("a plan", removal.plan()).await.unwrap()), objects);
    soon("an empty lot", client.purge_queue(parked)).await.unwrap();
    assert_eq!(there(&soon("the removal", removal.run()).await.unwrap()), objects);
    assert!(is_empty(&soon("a plan", removal.plan()).await.unwrap()));
    // It is not declared again after a reconnect either.
    let left = client.topology();
    assert!(left.queues().is_empty(), "{left:?}");
    let names: Vec<_> = left.exchanges().iter().map(Exchange::name).collect();
    assert!(names.is_empty() || names == ["shop"], "{names:?}");
}

pub async fn with_the_default_design(client: &Client) {
    let objects = [
        r#"exchange "jobs.parked""#,
        r#"exchange "jobs.return""#,
        r#"exchange "jobs.wait""#,
        r#"queue "jobs""#,
        r#"queue "jobs.parked""#,
        r#"queue "jobs.wait.10s""#,
    ];
    let topology = Topology::new().queue(Queue::quorum("jobs"));
    let retry = RetryPolicy::fixed(Duration::from_secs(10)).into();
    all_that_belongs_to_a_queue(client, topology, retry, "jobs.parked", &objects).await;
}

/// A wait queue that the policy does not name keeps the queue, until it is named.
pub async fn a_wait_queue_of_another_policy(client: &Client) {
    let retry = || Retry::from(RetryPolicy::fixed(Duration::from_secs(10)));
    soon("a queue", client.apply(&Topology::new().queue(Queue::quorum("jobs")))).await.unwrap();
    until_parked(client, "jobs", retry(), "jobs.parked").await;
    soon("an empty lot", client.purge_queue("jobs.parked")).await.unwrap();
    let other = Topology::new().queue(Queue::quorum("jobs.wait.7s")).binding(Binding::to_queue(
        "jobs.wait.7s",
        "jobs.wait",
        "",
    ));
    soon("a wait queue", client.apply(&other)).await.unwrap();
    let removal = || client.queue_removal("jobs").retry(retry());
    let refused = soon("a refusal", removal().run()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused}");
    assert!(refused.to_string().contains("jobs.wait"), "{refused}");
    assert!(soon("the queue", client.inspect_queue("jobs")).await.is_ok());
    soon("the removal", removal().also("jobs.wait.7s").run()).await.unwrap();
    let left = soon("a plan", removal().also("jobs.wait.7s").plan()).await.unwrap();
    assert!(is_empty(&left), "{left:?}");
}

pub async fn a_consumed_queue(client: &Client) {
    soon("a queue", client.apply(&Topology::new().queue(Queue::quorum("jobs")))).await.unwrap();
    let deliveries = soon("a stream", client.consumer("jobs").stream()).await.unwrap();
    let refused = soon("a refusal", client.queue_removal("jobs").run()).await.unwrap_err();
    assert!(refused.to_string().contains("1 consumer"), "{refused}");
    drop(deliveries);
}
