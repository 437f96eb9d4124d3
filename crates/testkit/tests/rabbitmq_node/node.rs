//! Nodes of a test's own: what one can do to them.

use std::path::PathBuf;
use std::time::Duration;

use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::support::{declare, publish, take};

const SOON: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_node_is_the_version_it_was_asked_to_be() {
    let version = Version::under_test();
    let node = RabbitNode::start(version).await;

    let overview = node.management().get(&["overview"]).await.unwrap();
    let running = overview["rabbitmq_version"].as_str().unwrap();
    assert!(running.starts_with(&format!("{version}.")), "{running} for {version}");
    assert!(node.ctl(&["status"]).await.contains(running));
}

#[tokio::test]
async fn a_message_survives_stop_kill_and_restart() {
    let mut node = RabbitNode::start(Version::under_test()).await;
    let (port, vhost) = (node.port(), node.vhost().await);
    declare(node.management(), vhost.name(), "letters", "classic").await.unwrap();
    assert!(publish(node.management(), vhost.name(), "letters", "still here").await.unwrap());

    node.stop().await;
    TcpStream::connect(("127.0.0.1", port)).await.expect_err("a stopped node listens");
    node.start_again().await;
    node.kill().await;
    TcpStream::connect(("127.0.0.1", port)).await.expect_err("a killed node listens");
    node.start_again().await;
    node.restart().await;

    assert_eq!(node.port(), port);
    let message = eventually(SOON, "the queue to have recovered", || {
        take(node.management(), vhost.name(), "letters")
    })
    .await;
    assert_eq!(message.as_deref(), Some("still here"));
}

#[tokio::test]
async fn a_suspended_node_answers_again_when_it_is_resumed() {
    let node = RabbitNode::start(Version::under_test()).await;

    node.suspend().await;
    // The kernel still accepts the connection; nobody greets back.
    let mut stream = TcpStream::connect(("127.0.0.1", node.port())).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut stream, b"AMQP\x00\x00\x09\x01").await.unwrap();
    timeout(Duration::from_millis(500), stream.read_u8())
        .await
        .expect_err("a suspended node answered");

    node.resume();
    timeout(SOON, stream.read_u8()).await.expect("no answer after resuming").unwrap();
}

#[tokio::test]
async fn a_suspended_node_can_be_stopped() {
    let mut node = RabbitNode::start(Version::under_test()).await;
    node.suspend().await;
    node.stop().await;
    assert!(!node.is_running());
}

#[tokio::test]
async fn a_memory_alarm_can_be_raised_and_cleared() {
    let node = RabbitNode::start(Version::under_test()).await;
    let alarms = ["health", "checks", "alarms"];

    node.raise_memory_alarm().await;
    let error = node.management().get(&alarms).await.expect_err("no alarm");
    assert_eq!(error.status(), Some(503), "{error}");

    node.clear_memory_alarm().await;
    node.management().get(&alarms).await.unwrap();
}

#[tokio::test]
async fn two_nodes_run_side_by_side_and_leave_nothing_behind() {
    let version = Version::under_test();
    let (one, other) = tokio::join!(
        RabbitNode::start(version),
        RabbitNode::builder(version).config("default_vhost = elsewhere").start()
    );
    assert_ne!(one.port(), other.port());
    let has_elsewhere =
        async |node: &RabbitNode| node.management().get(&["vhosts", "elsewhere"]).await.is_ok();
    assert!(!has_elsewhere(&one).await);
    assert!(has_elsewhere(&other).await, "the configured line had no effect");

    let processes = [one.pid(), other.pid()].map(|pid| PathBuf::from(format!("/proc/{pid}")));
    let folders = [one.data_folder().to_owned(), other.data_folder().to_owned()];
    assert!(processes.iter().chain(&folders).all(|path| path.exists()));
    drop((one, other));
    assert!(processes.iter().chain(&folders).all(|path| !path.exists()), "something survived");
}

#[tokio::test]
async fn a_node_that_cannot_start_says_why() {
    let start = RabbitNode::builder(Version::under_test()).config("no_such_setting = 1").start();
    let panic = tokio::spawn(start)
        .await
        .expect_err("a node started with a setting that does not exist")
        .into_panic();
    let message = panic.downcast_ref::<String>().expect("a panic with a message");
    assert!(message.contains("ended while starting"), "{message}");
    assert!(message.contains("no_such_setting"), "{message}");
}
