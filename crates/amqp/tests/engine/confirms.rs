//! Confirmations and their channel, on a scripted broker.

use std::time::Duration;

use leveret_amqp::{Outcome, Publish, Tally};
use leveret_wire::method::{basic, channel};
use tokio::time::timeout;

use crate::support::{confirming, connected};

/// How long anything may take before it counts as hanging.
const SOON: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn a_confirmation_holds_its_channel_open() {
    let (connection, mut broker) = connected().await;
    let channel = confirming(&connection, &mut broker).await;
    let id = channel.id();
    let confirmation = channel.publish(&Publish::default()).await.unwrap();
    let kept = channel.publish(&Publish::default()).await.unwrap();
    drop(channel);
    for _ in 0..2 {
        broker.expect_content::<basic::Publish<'_>>(id).await;
    }
    broker.send(id, &basic::Ack { delivery_tag: 1, multiple: false }).await;
    assert!(timeout(SOON, confirmation).await.unwrap().is_acked());
    assert!(kept.outcome().is_none());
    drop(kept);
    broker.expect::<channel::Close<'_>>(id).await;
}

#[tokio::test(start_paused = true)]
async fn the_tally_counts_every_outcome_and_outlives_the_channel() {
    let (connection, mut broker) = connected().await;
    let channel = confirming(&connection, &mut broker).await;
    let id = channel.id();
    let mut confirmations = Vec::new();
    for _ in 0..4 {
        confirmations.push(channel.publish(&Publish::default()).await.unwrap());
    }
    assert_eq!(channel.tally(), Tally::default());
    broker.send(id, &basic::Ack { delivery_tag: 1, multiple: false }).await;
    broker.send(id, &basic::Nack { delivery_tag: 2, multiple: true, requeue: false }).await;
    assert!(matches!(confirmations.remove(1).await, Outcome::Nacked));
    assert_eq!(channel.tally(), Tally { acked: 1, nacked: 1, ..Tally::default() });
    drop(broker);
    for confirmation in confirmations.drain(1..) {
        assert!(matches!(timeout(SOON, confirmation).await.unwrap(), Outcome::Lost(_)));
    }
    assert!(channel.check_open().is_err());
    assert_eq!(channel.tally(), Tally { acked: 1, nacked: 1, returned: 0, lost: 2 });
}
