//! `status`, where the management API answers.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use leveret::{Queue, Topology};
use leveret_testkit::{eventually, rabbitmq};

use crate::support::{Killed, Place};

#[tokio::test(flavor = "multi_thread")]
async fn status_counts_the_messages_that_wait_for_a_retry() {
    let (place, client) = Place::with(Topology::new().queue(Queue::quorum("jobs"))).await;
    let management = rabbitmq::shared().await.management().clone();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("service.toml");
    let text = "[[consumer]]\nqueue = \"jobs\"\ncommand = [\"false\"]\nretry = { wait = \"1h\", times = 3 }\n";
    fs::write(&file, text).unwrap();
    let mut running = place.program(&["run", file.to_str().unwrap()]);
    let running = running.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let _running = Killed(running.unwrap());
    let jobs = "job\n".repeat(7);
    place.run_with_input(&["publish", "jobs", "--lines"], &jobs).ok();
    eventually(Duration::from_secs(60), "seven messages that wait", || async {
        let mut status = place.program(&["status", "jobs", "--json"]);
        status.env("LEVERET_MANAGEMENT_URL", management.url());
        let said = crate::support::Said::from(status.output().unwrap()).json();
        said[0]["queues"][0]["waiting"] == 7 && said[0]["queues"][0]["messages"] == 0
    })
    .await;
    client.close().await;
}
