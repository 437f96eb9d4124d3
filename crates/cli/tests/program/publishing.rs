//! `publish`, `get`, `tail`, `status`.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Duration;

use leveret::{Exchange, Queue, Topology};
use leveret_testkit::eventually;

use crate::support::{Killed, Place};

#[tokio::test(flavor = "multi_thread")]
async fn what_is_published_is_shown_and_stays_until_it_is_taken() {
    let (place, client) = Place::with(Topology::new().queue(Queue::quorum("jobs"))).await;
    let job = [
        "publish",
        "jobs",
        r#"{"n":1}"#,
        "--message-id",
        "17",
        "-H",
        "region=eu",
        "-H",
        "tries:=3",
    ];
    assert_eq!(place.run(&job).ok(), "1 message published\n");

    // Brokers before 4.3 count what is given back.
    let shown = place.run(&["get", "jobs", "--allow-counted-returns"]).ok();
    for line in [
        "exchange        (default)",
        "message id      17",
        "  region: eu",
        "  tries: 3",
        "  \"n\": 1",
    ] {
        assert!(shown.contains(line), "{line:?} is not in:\n{shown}");
    }
    let told = place.run(&["get", "jobs", "--json", "--allow-counted-returns"]).json();
    assert_eq!(
        (told[0]["body"].as_str(), told[0]["routing_key"].as_str()),
        (Some("{\"n\":1}"), Some("jobs"))
    );
    assert_eq!(place.run(&["get", "jobs", "--take", "--raw"]).ok(), "{\"n\":1}\n");
    let none = place.run(&["get", "jobs", "--allow-counted-returns"]);
    assert_eq!((none.status, none.out.as_str()), (0, ""));
    assert!(none.err.contains("no message"), "{none:?}");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_line_can_be_a_message() {
    let (place, client) = Place::with(Topology::new().queue(Queue::classic("jobs"))).await;
    let lines: String = (0..3000).map(|line| format!("line {line}\n")).collect();
    let published = place.run_with_input(&["publish", "jobs", "--lines", "--json"], &lines).json();
    assert_eq!(published[0], serde_json::json!({ "published": 3000, "failed": 0 }));
    let raw = place.run(&["get", "jobs", "-n", "5000", "--raw"]).ok();
    assert_eq!(raw, lines);
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_queue_gets_is_an_error_unless_that_is_allowed() {
    let place = Place::new().await;
    let lost = place.run(&["publish", "nowhere", "x"]);
    assert_eq!(lost.status, 1);
    assert!(lost.err.contains("reached no queue"), "{lost:?}");
    place.run(&["publish", "nowhere", "x", "--allow-unroutable"]).ok();
    let lines = place.run_with_input(&["publish", "nowhere", "--lines", "--json"], "a\nb\n");
    assert_eq!((lines.status, lines.out.as_str()), (1, "{\"published\":0,\"failed\":2}\n"));
    assert!(lines.err.contains("line 2"), "{lines:?}");
    let gone = place.run(&["publish", "key", "x", "--exchange", "nowhere"]);
    assert_eq!(gone.status, 1);
    assert!(gone.err.contains("nowhere"), "{gone:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_can_come_later() {
    let (place, client) = Place::with(Topology::new().queue(Queue::quorum("later"))).await;
    place.run(&["publish", "later", "x", "--in", "1s"]).ok();
    place.run(&["publish", "later", "y", "--at", "2020-01-01T00:00:00Z"]).ok();
    place.until_has(&client, "later", 2).await;
    client.close().await;
}

/// The program, as soon as it says that it listens.
fn listening(place: &Place, arguments: &[&str]) -> Killed {
    let mut command = place.program(arguments);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = Killed(child.expect("the program runs"));
    let mut said = String::new();
    BufReader::new(child.0.stderr.take().unwrap()).read_line(&mut said).unwrap();
    assert!(said.contains("listening"), "{said}");
    child
}

#[tokio::test(flavor = "multi_thread")]
async fn who_tails_an_exchange_sees_what_comes() {
    let (place, client) = Place::with(Topology::new().exchange(Exchange::topic("events"))).await;
    let mut child = listening(&place, &["tail", "events", "order.*", "-n", "2", "--json"]);
    for key in ["order.new", "other", "order.paid"] {
        place.run(&["publish", key, key, "--exchange", "events", "--allow-unroutable"]).ok();
    }
    let lines: Vec<String> =
        BufReader::new(child.0.stdout.take().unwrap()).lines().map(Result::unwrap).collect();
    let keys: Vec<_> = lines
        .iter()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["routing_key"].clone())
        .collect();
    assert_eq!(keys, ["order.new", "order.paid"]);
    assert!(child.0.wait().unwrap().success());
    let missing = place.run(&["tail", "nowhere"]);
    assert!(missing.status == 1 && missing.err.contains("nowhere"), "{missing:?}");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_went_away_is_no_error() {
    let (place, client) = Place::with(Topology::new().exchange(Exchange::fanout("news"))).await;
    let mut child = listening(&place, &["tail", "news"]);
    drop(child.0.stdout.take());
    place.run(&["publish", "", "x", "--exchange", "news"]).ok();
    let ended = eventually(Duration::from_secs(60), "the end of the program", || {
        let ended = child.0.try_wait().unwrap();
        async move { ended }
    });
    assert!(ended.await.success());
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn status_tells_of_brokers_and_queues() {
    let (place, client) = Place::with(Topology::new().queue(Queue::classic("jobs"))).await;
    place.run(&["publish", "jobs", "x"]).ok();
    place.until_has(&client, "jobs", 1).await;
    let well = place.run(&["status", "jobs", "--json"]).json();
    assert_eq!(well[0]["queues"][0]["messages"], 1);
    assert!(well[0]["brokers"][0]["product"].as_str().unwrap().starts_with("RabbitMQ"), "{well:?}");
    let ill = place.run(&["status", "jobs", "nowhere"]);
    assert_eq!(ill.status, 1);
    assert!(ill.out.contains("nowhere") && ill.out.contains("there is no queue"), "{ill:?}");
    // A standby that answers is enough to go on, but not to be well.
    let urls = format!("amqp://127.0.0.1:1,{}", place.url());
    let half = place.run(&["status", "jobs", "--url", &urls]);
    assert_eq!(half.status, 1, "{half:?}");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_has_its_own_status_and_is_not_told() {
    let place = Place::new().await;
    let at = place.url().split('@').next_back().unwrap().trim_start_matches("amqp://").to_owned();
    let said = place.run(&["get", "q", "--url", &format!("amqp://guest:wr0ng@{at}")]);
    assert_eq!(said.status, 77, "{said:?}");
    assert!(!said.err.contains("wr0ng"), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_benchmark_counts_what_came_and_leaves_nothing_behind() {
    let place = Place::new().await;
    let small = ["bench", "-n", "2000", "--publishers", "2", "--subscribers", "2", "--json"];
    for options in [&["--queue", "classic"][..], &["--queue", "quorum"], &["--embedded"]] {
        let report = place.run(&[&small, options].concat()).json();
        assert_eq!(
            (report[0]["came"].as_u64(), report[0]["failed"].as_u64()),
            (Some(2000), Some(0))
        );
    }
    assert!(place.run(&["bench", "-n", "100"]).ok().contains("100 came"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_is_too_long_ends_it_and_those_before_are_published() {
    let (place, client) = Place::with(Topology::new().queue(Queue::classic("jobs"))).await;
    let lines = ["publish", "jobs", "--lines", "--max-line", "5"];
    let said = place.run_with_input(&lines, "one\r\n12345\r\n123456\nfour\n");
    assert_eq!((said.status, said.out.as_str()), (1, "2 messages published\n"), "{said:?}");
    assert!(said.err.contains("line 3") && said.err.contains("--max-line"), "{said:?}");
    place.until_has(&client, "jobs", 2).await;
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_go_over_several_channels_confirmed_or_not() {
    let (place, client) = Place::with(Topology::new().queue(Queue::classic("jobs"))).await;
    let bodies: String = (0..500).map(|number| format!("{number}\n")).collect();
    let pooled = ["publish", "jobs", "--lines", "--mq-publisher-channel-pool-size", "25"];
    assert_eq!(place.run_with_input(&pooled, &bodies).ok(), "500 messages published\n");
    let hoping = [&pooled[..], &["--mq-publisher-confirm-delivery", "false"]].concat();
    assert_eq!(place.run_with_input(&hoping, &bodies).ok(), "500 messages sent, none confirmed\n");
    place.until_has(&client, "jobs", 1000).await;
    // What is not confirmed may go nowhere, and nobody knows.
    place.run(&["publish", "nowhere", "x", "--publisher-confirm-delivery", "false"]).ok();
    let none = place.run(&["publish", "jobs", "x", "--publisher-channel-pool-size", "0"]);
    assert!(none.status == 2 && none.err.contains("1..=1000"), "{none:?}");
    client.close().await;
}
