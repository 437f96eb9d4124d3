//! Queues that are full.

use leveret::amqp::{Connection, ErrorKind, Properties, Publish, Refused, ReplyCode, Value};
use leveret_broker::Profile;

use super::stage::{Stage, with_headers};

/// A queue for two messages, whose dead letters go to the queue `dead`.
async fn queue_for_two(stage: &Stage, name: &str, kind: &str, overflow: &str) {
    stage.queue("dead", "classic", &[]).await;
    let arguments = [
        ("x-max-length", Value::from(2)),
        ("x-overflow", overflow.into()),
        ("x-dead-letter-exchange", "".into()),
        ("x-dead-letter-routing-key", "dead".into()),
    ];
    stage.queue(name, kind, &arguments).await;
}

pub(crate) async fn a_full_queue_that_drops_its_head(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    // What a quorum queue cannot do, it does not refuse to be asked for.
    for (kind, overflow) in
        [("classic", "drop-head"), ("quorum", "drop-head"), ("quorum", "reject-publish-dlx")]
    {
        let name = format!("{kind} {overflow}");
        queue_for_two(&stage, &name, kind, overflow).await;
        stage.fill(&name, 1..=4).await;
        assert_eq!(stage.take_all("dead", 2).await, ["1", "2"], "{name}");
        assert_eq!(stage.take_all(&name, 2).await, ["3", "4"], "{name}");
    }
}

/// A quorum queue takes one too many.
pub(crate) async fn a_full_queue_that_refuses(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    for (kind, overflow, room, dead) in [
        ("classic", "reject-publish", 2, 0),
        ("classic", "reject-publish-dlx", 2, 1),
        ("quorum", "reject-publish", 3, 0),
    ] {
        let name = format!("{kind} {overflow}");
        queue_for_two(&stage, &name, kind, overflow).await;
        stage.fill(&name, 1..=room).await;
        // A quorum queue tells publishers that it is full after it has confirmed what made it so.
        leveret_testkit::eventually(super::stage::SOON, format!("{name} to refuse"), async || {
            !stage.put(&name, "late", Properties::default()).await.is_acked()
        })
        .await;
        assert_eq!(stage.take_all("dead", dead).await.len(), dead as usize, "{name}");
        assert_eq!(stage.take_all(&name, room).await.len(), room as usize, "{name}");
        stage.fill(&name, 1..=1).await;
    }
}

pub(crate) async fn what_comes_back_to_a_full_queue_makes_it_drop_its_head(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    for kind in ["classic", "quorum"] {
        queue_for_two(&stage, kind, kind, "drop-head").await;
        stage.fill(kind, 1..=1).await;
        let held = stage.take(kind).await;
        stage.fill(kind, 2..=3).await;
        held.nack(Refused::Requeue).unwrap();
        // In a quorum queue of 3.10 it came back behind the others.
        let last = kind == "quorum" && stage.is_3_10();
        assert_eq!(stage.take_all("dead", 1).await, [if last { "2" } else { "1" }], "{kind}");
        let left = if last { ["3", "1"] } else { ["2", "3"] };
        assert_eq!(stage.take_all(kind, 2).await, left, "{kind}");
    }
}

pub(crate) async fn a_quorum_queue_of_4_3_counts_the_bytes_of_properties(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    let header = with_headers(&[("a", 2.into())]);
    for (name, properties, size) in [("plain", Properties::default(), 3), ("header", header, 14)] {
        let sizes = [("classic", 1), ("quorum", if stage.is_3_10() { 1 } else { size })];
        for (kind, size) in sizes {
            for (limit, count) in [(size, 1), (size - 1, 0)] {
                let queue = format!("{name} {kind} {limit}");
                stage.queue(&queue, kind, &[("x-max-length-bytes", limit.into())]).await;
                assert!(stage.put(&queue, "1", properties.clone()).await.is_acked());
                assert_eq!(stage.take_all(&queue, count).await.len(), count as usize);
            }
        }
    }
}

pub(crate) async fn a_commit_that_a_full_queue_refuses_costs_the_channel(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    queue_for_two(&stage, "q", "classic", "reject-publish").await;
    let channel = connection.open_channel().await.unwrap().into_tx().await.unwrap();
    for _ in 0..3 {
        channel.publish(&Publish { routing_key: "q", ..Publish::default() }).await.unwrap();
    }
    let error = channel.commit().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ChannelClosed(ReplyCode::PRECONDITION_FAILED));
    assert!(error.to_string().ends_with("partial tx completion"), "{error}");
    // What was taken stays.
    assert_eq!(stage.take_all("q", 2).await.len(), 2);
}
