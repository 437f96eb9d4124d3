//! What tests share that kill a node with messages in it.

use std::time::Duration;

use leveret::Client;
use leveret_testkit::rabbitmq::{RabbitNode, Version};

use super::client::soon;

/// RabbitMQ resends a dead letter that the next queue does not confirm, as one may not that is just starting. Nodes of the test kit
/// do so every half minute.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// How many messages: `LEVERET_CHAOS_MESSAGES`, or so many.
pub fn count(usual: u64) -> u64 {
    let wanted = std::env::var("LEVERET_CHAOS_MESSAGES").ok();
    wanted.and_then(|text| text.parse().ok()).unwrap_or(usual)
}

pub async fn connect(node: &RabbitNode) -> Client {
    soon("a client", Client::connect(node.url())).await.unwrap()
}

/// Kills the node with SIGKILL and starts it again.
pub async fn kill_and_restart(node: &mut RabbitNode) {
    node.write_down_declarations().await;
    node.kill().await;
    node.start_again().await;
}

/// Before 4.3, a killed node may leave a quorum queue without a leader until it is started once more: its messages are on disk, and
/// stay there.
pub async fn unstick(node: &mut RabbitNode, what: &str) {
    assert!(node.version() < Version::V4_3, "{what}");
    eprintln!("{what}: the node is started once more");
    node.restart().await;
}
