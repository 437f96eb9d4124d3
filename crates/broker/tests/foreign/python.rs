//! Two clients of Python, pika and aio-pika, are served by the embedded broker as by RabbitMQ.

use std::path::Path;

use tokio::process::Command;

use super::clients::{everywhere, succeed};

/// Where `scripts/install-python-clients` puts them.
const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/foreign/python/bin/python");

/// Runs a program in which a client goes through its scenarios, each of which it reports.
async fn all_is_well(program: &str, scenarios: usize) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign");
    everywhere(async |url| {
        let said = succeed(Command::new(PYTHON).arg(folder.join(program)).arg(url)).await;
        assert_eq!(said.lines().count(), scenarios, "{said}");
        assert!(said.lines().all(|line| line.starts_with("ok ")), "{said}");
    })
    .await;
}

#[tokio::test]
async fn pika_goes_through_its_day() {
    all_is_well("with_pika.py", 7).await;
}

#[tokio::test]
async fn aio_pika_goes_through_its_day() {
    all_is_well("with_aio_pika.py", 5).await;
}
