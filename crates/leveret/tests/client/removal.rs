use leveret::{ErrorKind, Queue, Retry, Topology};

use crate::{broker, client_of, soon};

/// The broker deletes a classic queue only while it is empty: what is confirmed meanwhile is there. RabbitMQ may confirm a message
/// that was routed before and comes to the queue after that, so this is for the embedded broker alone.
#[tokio::test(start_paused = true)]
async fn what_is_confirmed_while_a_classic_queue_is_deleted_is_not_lost() {
    let client = client_of(&broker()).await;
    let publisher = soon("a publisher", client.publisher("").build()).await.unwrap();
    let mut kept = 0;
    for round in 0..60 {
        let jobs = Topology::new().queue(Queue::classic("jobs"));
        soon("a queue", client.apply(&jobs)).await.unwrap();
        let removal = client.queue_removal("jobs").retry(Retry::discard());
        let publish = async {
            for _ in 0..round {
                tokio::task::yield_now().await;
            }
            publisher.publish("jobs", "job").await
        };
        let (removed, published) =
            soon("both", async { tokio::join!(removal.run(), publish) }).await;
        let left = soon("a count", client.inspect_queue("jobs")).await;
        match published {
            Ok(()) => {
                kept += 1;
                assert_eq!(removed.unwrap_err().kind(), ErrorKind::Conflict, "round {round}");
                assert_eq!(left.unwrap().messages, 1, "round {round}");
                soon("an end", client.delete_queue("jobs", Default::default())).await.unwrap();
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unroutable, "{error}");
                assert_eq!(removed.unwrap()[0].messages, 0, "round {round}");
                assert!(left.is_err(), "round {round}");
            }
        }
    }
    assert!(kept > 0);
}
