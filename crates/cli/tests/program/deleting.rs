//! `topology delete` where a management API tells more than AMQP does.

use std::time::Duration;

use leveret::{Queue, Topology};
use leveret_profiles::Acapi;
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq;

use crate::support::{Place, Said};

const PATIENCE: Duration = Duration::from_secs(60);

async fn delete(place: &Place, options: &[&str]) -> Said {
    let management = rabbitmq::shared().await.management().url().to_owned();
    let mut command = place.program(&[&["topology", "delete", "jobs"], options].concat());
    command.env("LEVERET_MANAGEMENT_URL", management).output().expect("the program runs").into()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_not_acknowledged_keeps_its_queue() {
    for queue in [Queue::classic("jobs"), Queue::quorum("jobs")] {
        let (place, client) = Place::with(Topology::new().queue(queue)).await;
        client.publisher("").build().await.unwrap().publish("jobs", "job").await.unwrap();
        // As of a consumer that was cancelled, and works on.
        let held = client.get("jobs", Default::default()).await.unwrap().unwrap();
        assert_eq!(client.inspect_queue("jobs").await.unwrap().messages, 0);
        let vhost = place.url().rsplit('/').next().unwrap().to_owned();
        let management = rabbitmq::shared().await.management().clone();
        eventually(PATIENCE, "a count", async || {
            let queue = management.get(&["queues", &vhost, "jobs"]).await.unwrap();
            queue["messages_unacknowledged"] == 1
        })
        .await;
        let refused = delete(&place, &[]).await;
        assert_eq!(refused.status, 1, "{refused:?}");
        assert!(refused.err.contains("queue \"jobs\" has 1 message that consumers"), "{refused:?}");
        assert!(refused.err.contains("Nothing was deleted"), "{refused:?}");
        held.ack().unwrap();
        eventually(PATIENCE, "the end", async || {
            let deleted = delete(&place, &[]).await;
            if deleted.status == 0 { Ok(()) } else { Err(format!("{deleted:?}")) }
        })
        .await;
        client.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_of_another_design_is_not_deleted_alone() {
    let (place, client) = Place::with(Acapi::new().topology(Queue::quorum("jobs")).unwrap()).await;
    for (options, advice) in [
        (&[][..], "say --profile acapi"),
        (&["--profile", "orb"], "say --profile acapi"),
        (&["--profile", "chandra"], "say --profile acapi"),
    ] {
        let refused = delete(&place, options).await;
        assert!(refused.status == 2 && refused.err.contains(advice), "{refused:?}");
    }
    let deleted = delete(&place, &["--profile", "acapi"]).await.ok();
    assert!(deleted.ends_with("6 objects deleted\n"), "{deleted}");
    let other = Queue::quorum("jobs").dead_letter_to("dead");
    client.apply(&Topology::new().queue(other)).await.unwrap();
    let refused = delete(&place, &["--profile", "acapi"]).await;
    assert!(refused.status == 2 && refused.err.contains("--file"), "{refused:?}");
    // Its own dead letters are no matter of retrying.
    assert_eq!(delete(&place, &[]).await.ok(), "deleted queue \"jobs\"\n1 object deleted\n");
    client.close().await;
}
