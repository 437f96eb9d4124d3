//! Three RabbitMQ nodes joined into one cluster.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::epmd::Epmd;
use super::installation::Installation;
use super::{Builder, RabbitNode, Version, Vhost};
use crate::eventually;

/// How many nodes a cluster has: the fewest with which a quorum queue survives the loss of one.
const SIZE: usize = 3;
const MEMBERSHIP_DEADLINE: Duration = Duration::from_secs(60);

/// A cluster of three nodes, which end when it is dropped or the test process dies.
#[derive(Debug)]
pub struct RabbitCluster {
    nodes: [RabbitNode; SIZE],
}

impl RabbitCluster {
    /// Starts a cluster and waits until every node serves clients and knows all others.
    ///
    /// # Panics
    /// If this version is not installed, or a node does not start.
    pub async fn start(version: Version) -> RabbitCluster {
        let installation = Installation::find(version);
        let epmd = Arc::new(Epmd::start(&installation).await);
        let names: [String; SIZE] =
            std::array::from_fn(|index| format!("rabbit-{}@localhost", index + 1));
        let builder = joining(RabbitNode::builder(version), &names);
        let start = |name| builder.clone().start_among(installation.clone(), epmd.clone(), name);
        let [first, second, third] = &names;
        let cluster =
            RabbitCluster { nodes: tokio::join!(start(first), start(second), start(third)).into() };
        cluster.await_running(SIZE).await;
        cluster
    }

    /// The nodes.
    pub fn nodes(&self) -> &[RabbitNode] {
        &self.nodes
    }

    /// One of the nodes: 0, 1 or 2.
    pub fn node(&self, index: usize) -> &RabbitNode {
        &self.nodes[index]
    }

    /// One of the nodes, to be stopped, killed or started again.
    pub fn node_mut(&mut self, index: usize) -> &mut RabbitNode {
        &mut self.nodes[index]
    }

    /// The AMQP URLs of a virtual host, one per node.
    pub fn urls_for(&self, vhost: &str) -> Vec<String> {
        self.nodes.iter().map(|node| node.url_for(vhost)).collect()
    }

    /// Makes a fresh virtual host. Its URL leads to node 0; see [`urls_for`](Self::urls_for) for
    /// the others.
    pub async fn vhost(&self) -> Vhost {
        self.nodes[0].vhost().await
    }

    /// Waits until so many nodes serve clients and each of them sees that many running. A suspended
    /// node counts for the others until they give it up, about a minute later.
    pub async fn await_running(&self, count: usize) {
        eventually(
            MEMBERSHIP_DEADLINE,
            format!("{count} running nodes, seen by each of them"),
            || async {
                let mut seen = Vec::new();
                for node in self.nodes.iter().filter(|node| node.is_running()) {
                    seen.push(running_seen_by(node).await);
                }
                let agreed = seen.len() == count && seen.iter().all(|one| *one == Ok(count));
                if agreed { Ok(()) } else { Err(format!("{seen:?}")) }
            },
        )
        .await;
    }
}

/// Every node is told all names, and they find each other while they start.
fn joining(builder: Builder, names: &[String]) -> Builder {
    let builder = builder.config("cluster_formation.peer_discovery_backend = classic_config");
    names.iter().enumerate().fold(builder, |builder, (index, name)| {
        builder.config(format!("cluster_formation.classic_config.nodes.{} = {name}", index + 1))
    })
}

async fn running_seen_by(node: &RabbitNode) -> Result<usize, String> {
    let nodes = node.management().get(&["nodes"]).await.map_err(|error| error.to_string())?;
    let nodes = nodes.as_array().map(Vec::as_slice).unwrap_or_default();
    Ok(nodes.iter().filter(|node| node["running"] == Value::Bool(true)).count())
}
