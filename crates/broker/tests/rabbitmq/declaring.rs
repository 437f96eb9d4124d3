//! What RabbitMQ accepts and refuses, and with which words: the table that the embedded broker is held against is held
//! against real nodes here.

use std::collections::HashMap;

use leveret_testkit::rabbitmq::{self, Version};

use crate::declaring::asking::Broker;
use crate::declaring::{cases, table};

/// The version under test, if it is one of those that the table is about.
fn version() -> Option<String> {
    let version = Version::under_test();
    matches!(version, Version::V3_10 | Version::V4_3).then(|| version.to_string())
}

async fn answers_as_recorded(cases: Vec<String>) {
    let Some(version) = version() else { return };
    let vhost = rabbitmq::vhost().await;
    let differences = Broker::at(&vhost.url()).differences(&version, cases).await;
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[tokio::test]
async fn rabbitmq_accepts_and_refuses_queues_as_recorded() {
    answers_as_recorded(cases::queues()).await;
}

#[tokio::test]
async fn rabbitmq_compares_queues_as_recorded() {
    answers_as_recorded(cases::redeclared_queues()).await;
}

#[tokio::test]
async fn rabbitmq_treats_names_and_owners_as_recorded() {
    answers_as_recorded(cases::names_and_access()).await;
}

#[tokio::test]
async fn rabbitmq_treats_exchanges_and_bindings_as_recorded() {
    answers_as_recorded(cases::exchanges()).await;
}

#[tokio::test]
async fn rabbitmq_treats_consumers_as_recorded() {
    answers_as_recorded(cases::consumers()).await;
}

/// Writes the answers of this version into the table; those of the other one stay as they are. The node is used as it is,
/// in its virtual host `/`.
#[tokio::test]
#[ignore = "writes the table anew, from a real node"]
async fn record() {
    let this = version().expect("a version that the table is about");
    let other = if this == "3.10" { "4.3" } else { "3.10" };
    let before: HashMap<_, _> = table::recorded(other).into_iter().collect();
    let mut broker = Broker::at(&rabbitmq::shared().await.url());
    let mut lines = String::new();
    for case in cases::all() {
        let answer = broker.answer(&case).await;
        let answers = match before.get(&*case) {
            Some(same) if *same == answer => format!("    {answer}\n"),
            Some(differs) if this == "3.10" => format!("    3.10: {answer}\n    4.3: {differs}\n"),
            Some(differs) => format!("    3.10: {differs}\n    4.3: {answer}\n"),
            None => format!("    {this}: {answer}\n"),
        };
        lines.push_str(&format!("{case}\n{answers}"));
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/declaring/answers.txt");
    std::fs::write(path, lines).expect("the table can be written");
}
