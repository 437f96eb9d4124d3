//! Deleting queues with the objects of a design, on any broker.

// It is a part of two kinds of tests.
#![allow(unreachable_pub)]

use leveret::{Binding, Client, ErrorKind, Exchange, Queue};
use leveret_profiles::{Acapi, Chandra};

use crate::removal::{all_that_belongs_to_a_queue, is_empty, soon, there};

pub async fn of_acapi_and_chandra(client: &Client) {
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
    let acapi = Acapi::new();
    let topology = acapi.topology(Queue::quorum("jobs")).unwrap();
    all_that_belongs_to_a_queue(client, topology, acapi.into(), "jobs-error", &of_acapi).await;
    let chandra = Chandra::new(Exchange::topic("shop"));
    let (topology, lot) = (chandra.topology(Queue::quorum("jobs")).unwrap(), "jobs.parking_lot");
    all_that_belongs_to_a_queue(client, topology, chandra.into(), lot, &of_chandra).await;
}

/// A queue that dead-letters goes before the exchange to which it does, and an error says what is gone.
pub async fn a_removal_that_ends_half_way(client: &Client) {
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
