//! `call`.

use leveret::{Failure, Queue, Topology};
use tokio::sync::oneshot;

use crate::support::Place;

async fn shout(text: String) -> Result<String, Failure> {
    match text.as_str() {
        "" => Err(Failure::permanent("there is nothing to shout").kind("empty")),
        text => Ok(text.to_uppercase()),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_is_called_and_its_errors_are_told() {
    let place = Place::new().await;
    let client = place.client().await;
    let (stop, stopped) = oneshot::channel::<()>();
    let service = client.service("voices").method("shout", shout);
    client.apply(&service.topology()).await.unwrap();
    let serving = tokio::spawn(service.run_until(async { drop(stopped.await) }));

    assert_eq!(place.run(&["call", "voices", "shout", "hello"]).ok(), "HELLO\n");
    let told = place.run(&["call", "voices", "shout", "hello", "--json"]).json();
    assert_eq!(told[0]["body"], "HELLO");
    let failed = place.run_with_input(&["call", "voices", "shout"], "");
    assert_eq!(failed.status, 1);
    assert!(failed.err.contains("there is nothing to shout"), "{failed:?}");
    let unknown = place.run(&["call", "voices", "sing", "hello"]);
    assert_eq!(unknown.status, 1, "{unknown:?}");
    let nobody = place.run(&["call", "nobody", "shout", "hello"]);
    assert!(nobody.status == 1 && nobody.err.contains("no queue"), "{nobody:?}");
    assert_eq!(place.run(&["call", "voices", "shout", "hello", "--cast"]).ok(), "");

    drop(stop);
    serving.await.unwrap().unwrap();
    client.close().await;
}

/// ACAPI asks a replier for no more than the default exchange and the key `reply_to`.
#[tokio::test(flavor = "multi_thread")]
async fn a_replier_that_sends_no_correlation_id_is_called_with_a_queue_for_the_call() {
    let place = Place::new().await;
    let client = place.client().await;
    client.apply(&Topology::new().queue(Queue::classic("policies"))).await.unwrap();
    let mut requests = client.consumer("policies").stream().await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let replier = tokio::spawn(async move {
        while let Some(Ok(request)) = requests.next().await {
            let to = request.properties().reply_to.unwrap().to_str_lossy().into_owned();
            publisher.publish(&to, "the policy 17").await.unwrap();
            request.ack().unwrap();
        }
    });
    let call = ["call", "policies", "", "17", "--within", "30s"];
    let called = place.run(&[&call[..], &["--replies", "queue-per-call"]].concat());
    assert_eq!(called.ok(), "the policy 17\n");
    replier.abort();
    client.close().await;
}
