//! Deleting queues with what belongs to them.

use std::time::Duration;

use leveret::{
    Acapi, Belonging, Binding, Chandra, Client, ErrorKind, Exchange, Failure, Queue, Retry,
    RetryPolicy, Topology,
};
use leveret_testkit::{eventually, rabbitmq};

use crate::support::client::{SOON, client, soon};

fn there(belongings: &[Belonging]) -> Vec<String> {
    let there = belongings.iter().filter(|belonging| belonging.is_there);
    let mut names: Vec<_> = there.map(ToString::to_string).collect();
    names.sort();
    names
}

fn is_empty(belongings: &[Belonging]) -> bool {
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

/// Of the three designs whose objects belong to one queue.
#[tokio::test]
async fn a_queue_is_deleted_with_all_that_belongs_to_it_once_no_message_is_in_it() {
    let vhost = rabbitmq::vhost().await;
    let client = &client(&vhost).await;
    let fixed = || RetryPolicy::fixed(Duration::from_secs(10));
    let shop = || Exchange::topic("shop");
    let of_default = [
        r#"exchange "jobs.parked""#,
        r#"exchange "jobs.return""#,
        r#"exchange "jobs.wait""#,
        r#"queue "jobs""#,
        r#"queue "jobs.parked""#,
        r#"queue "jobs.wait.10s""#,
    ];
    let of_acapi = [
        r#"exchange "jobs-error""#,
        r#"exchange "jobs-retry""#,
        r#"exchange "jobs-retry-requeue""#,
        r#"queue "jobs""#,
        r#"queue "jobs-error""#,
        r#"queue "jobs-retry""#,
    ];
    let of_chandra = [
        r#"exchange "jobs.dlx""#,
        r#"queue "jobs""#,
        r#"queue "jobs.parking_lot""#,
        r#"queue "jobs.retry""#,
    ];
    let jobs = || Queue::quorum("jobs");
    let plain = Topology::new().queue(jobs());
    let acapi = Acapi::new().topology(jobs()).unwrap();
    let chandra = Chandra::new(shop()).topology(jobs()).unwrap();
    let designs: [(Topology, Retry, &str, &[&str]); 3] = [
        (plain, fixed().into(), "jobs.parked", &of_default),
        (acapi, Acapi::new().into(), "jobs-error", &of_acapi),
        (chandra, Chandra::new(shop()).into(), "jobs.parking_lot", &of_chandra),
    ];
    for (topology, retry, parked, objects) in designs {
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
}

/// A wait queue that the policy does not name keeps the queue, until it is named.
#[tokio::test]
async fn a_wait_queue_that_the_policy_does_not_name_keeps_its_queue() {
    let vhost = rabbitmq::vhost().await;
    let client = &client(&vhost).await;
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

#[tokio::test]
async fn a_queue_with_a_consumer_is_not_deleted() {
    let vhost = rabbitmq::vhost().await;
    let client = &client(&vhost).await;
    soon("a queue", client.apply(&Topology::new().queue(Queue::quorum("jobs")))).await.unwrap();
    let deliveries = soon("a stream", client.consumer("jobs").stream()).await.unwrap();
    let refused = soon("a refusal", client.queue_removal("jobs").run()).await.unwrap_err();
    assert!(refused.to_string().contains("1 consumer"), "{refused}");
    drop(deliveries);
}

/// A queue that dead-letters goes before the exchange to which it does, and an error says what is gone.
#[tokio::test]
async fn a_queue_that_dead_letters_goes_first_and_an_error_says_what_is_gone() {
    let vhost = rabbitmq::vhost().await;
    let client = &client(&vhost).await;
    let acapi = Acapi::new().topology(Queue::quorum("jobs")).unwrap();
    let other = Binding::to_queue("other", "jobs-retry", "#");
    let topology = acapi.queue(Queue::quorum("other")).binding(other);
    soon("objects", client.apply(&topology)).await.unwrap();
    let removal = || client.queue_removal("jobs").retry(Acapi::new());
    let plan = soon("a plan", removal().plan()).await.unwrap();
    assert_eq!((plan[0].is_queue, plan[0].name.as_str()), (true, "jobs"));
    let refused = soon("a refusal", removal().run()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused}");
    let text = refused.to_string();
    assert!(text.contains(r#"is deleted: queue "jobs", queue "jobs-retry". "#), "{text}");
    assert!(text.contains(r#"exchange "jobs-retry" stays"#), "{text}");
    let left = [
        r#"exchange "jobs-error""#,
        r#"exchange "jobs-retry""#,
        r#"exchange "jobs-retry-requeue""#,
        r#"queue "jobs-error""#,
    ];
    assert_eq!(there(&soon("a plan", removal().plan()).await.unwrap()), left);
    soon("the removal", removal().also("other").run()).await.unwrap();
    assert!(is_empty(&soon("a plan", removal().plan()).await.unwrap()));
}
