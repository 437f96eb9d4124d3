//! The RabbitMQ that a whole test run shares, and its virtual hosts.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use leveret_testkit::rabbitmq::{self, Management, Version, Vhost};
use leveret_testkit::{FaultProxy, eventually};
use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use crate::support::{connect, declare, publish, take};

const SOON: Duration = Duration::from_secs(60);

#[tokio::test]
async fn each_test_gets_a_virtual_host_of_its_own_that_goes_away_with_it() {
    let (one, other) = (rabbitmq::vhost().await, rabbitmq::vhost().await);
    assert_ne!(one.name(), other.name());
    assert!(one.url().ends_with(&format!("/{}", one.name())));
    let management = one.broker().management().clone();
    declare(&management, one.name(), "letters", "classic").await.unwrap();
    assert!(publish(&management, one.name(), "letters", "for one").await.unwrap());
    assert_eq!(one.queues().await.unwrap().len(), 1);
    assert_eq!(other.queues().await.unwrap().len(), 0);
    assert_eq!(take(&management, one.name(), "letters").await.unwrap().as_deref(), Some("for one"));

    let gone = one.name().to_owned();
    drop(one);
    let error =
        management.get(&["vhosts", &gone]).await.expect_err("a virtual host that should be gone");
    assert_eq!(error.status(), Some(404), "{error}");
}

#[tokio::test]
async fn the_connections_of_a_virtual_host_can_be_listed_and_closed() {
    let (vhost, other) = (rabbitmq::vhost().await, rabbitmq::vhost().await);
    let mut connection = connect(&vhost.broker().addr(), vhost.name()).await;
    let mut elsewhere = connect(&other.broker().addr(), other.name()).await;
    one_connection(&vhost).await;
    one_connection(&other).await;

    assert_eq!(vhost.close_connections().await.unwrap(), 1);
    let goodbye = timeout(SOON, connection.read_u8()).await.expect("the connection was not closed");
    assert_eq!(goodbye.unwrap(), 1, "a method frame, with connection.close in it");
    timeout(Duration::from_millis(200), elsewhere.read_u8())
        .await
        .expect_err("another test's connection was closed");
}

#[tokio::test]
async fn a_proxy_can_stand_before_the_broker() {
    let vhost = rabbitmq::vhost().await;
    let proxy = FaultProxy::to(vhost.broker().addr()).await;
    assert!(proxy.url(&vhost.url()).ends_with(&format!("@{}/{}", proxy.addr(), vhost.name())));
    let _connection = connect(&proxy.addr().to_string(), vhost.name()).await;
    assert!(proxy.seen().to_client > 0);
}

#[tokio::test]
async fn odd_names_of_virtual_hosts_are_encoded_in_urls() {
    let broker = rabbitmq::shared().await;
    assert!(broker.url_for("/").ends_with("/%2F"));
    assert!(broker.url_for("a b/c%").ends_with("/a%20b%2Fc%25"));
}

#[tokio::test]
async fn a_killed_with_servers_leaves_no_node_behind() {
    let mut program = Command::new(env!("CARGO_BIN_EXE_with-servers"))
        .args(["--rabbitmq", &Version::under_test().to_string(), "--"])
        .args(["sh", "-c", "echo $LEVERET_RABBITMQ_MANAGEMENT_URL; exec cat"])
        .env_remove("LEVERET_RABBITMQ_URL")
        // The command survives, and ends when this does.
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let url = BufReader::new(program.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    let management = Management::at(&url);
    let vm = eventually(SOON, "the node to tell its process id", || async {
        let nodes = management.get(&["nodes"]).await.ok()?;
        Some(PathBuf::from("/proc").join(nodes[0]["os_pid"].as_str()?))
    })
    .await;
    assert!(vm.exists());

    program.kill().unwrap();
    program.wait().unwrap();
    eventually(SOON, "the node to be gone", async || !vm.exists()).await;
}

async fn one_connection(vhost: &Vhost) {
    eventually(SOON, "the connection to be listed", async || {
        vhost.connections().await.unwrap().len() == 1
    })
    .await;
}
