use std::time::Duration;

use leveret::{Exchange, Queue, Topology};

use super::{Running, until_lines};
use crate::support::Place;

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_runs_as_many_commands_at_a_time_as_it_has_subscribers() {
    let place = Place::new().await;
    let client = place.client().await;
    client.apply(&Topology::new().queue(Queue::quorum("operations"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch((0..9).map(|n| ("operations", n.to_string()))).await.unwrap();
    // Each command waits until two others have begun beside it: with the messages of one round.
    let file = r#"
[[consumer]]
queue = "operations"
pool = "op"
command = ["sh", "-c", """
    n=$(cat); echo x >> FOLDER/begun
    until [ $(wc -l < FOLDER/begun) -ge $(( (n / 3 + 1) * 3 )) ]; do sleep 0.05; done
"""]
"#;
    let running = Running::start(&place, file, &["--mq-op-pool", "3"]);
    until_lines(&running.path("begun"), 9).await;
    place.until_has(&client, "operations", 0).await;
    assert_eq!(running.stop(), "stopped: 9 messages handled\n");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_names_the_objects_of_a_deployment_that_is_there() {
    let place = Place::new().await;
    let client = place.client().await;
    let work = Queue::quorum("billing").dead_letter_to("dead").dead_letter_key("again.billing");
    let wait =
        Queue::quorum("billing-wait").message_ttl(Duration::from_millis(50)).dead_letter_to("shop");
    let there = Topology::new()
        .exchange(Exchange::direct("shop"))
        .exchange(Exchange::direct("dead"))
        .queue(work.bind("shop", "paid").bind("shop", "again.billing"))
        .queue(wait.bind("dead", "again.billing"))
        .queue(Queue::quorum("graveyard").bind("dead", "never"));
    client.apply(&there).await.unwrap();
    let file = r#"
[[topology.queue]]
name = "billing"
type = "quorum"
dead-letter-exchange = "dead"
dead-letter-routing-key = "again.billing"

[[consumer]]
queue = "billing"
command = ["sh", "-c", "cat >> FOLDER/seen; echo >> FOLDER/seen; exit 75"]

[consumer.retry]
profile = "chandra"
exchange = "shop"
exchange-type = "direct"
plain-arguments = true
wait = "50ms"
times = 2

[consumer.retry.names]
dead-letter-exchange = "dead"
dead-letter-exchange-type = "direct"
retry-queue = "billing-wait"
retry-key = "again.billing"
parking-queue = "graveyard"
parking-key = "never"
"#;
    let running = Running::start(&place, file, &[]);
    place.run(&["publish", "--exchange", "shop", "paid", "x"]).ok();
    place.until_has(&client, "graveyard", 1).await;
    assert_eq!(until_lines(&running.path("seen"), 3).await, ["x", "x", "x"]);
    running.stop();
    client.close().await;
}
