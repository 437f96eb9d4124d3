//! A virtual host per test.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::timeout;

use super::{Broker, ManagementError};
use crate::name::unique_name;

/// How long [`Vhost`]'s drop may take at most: a node that is suspended does not answer.
const GOODBYE: Duration = Duration::from_secs(3);

/// A virtual host of its own, on which the broker's user may do everything.
///
/// Dropping it deletes it with all its queues and connections. That blocks for some milliseconds,
/// and a failure is ignored: the node may be down on purpose, and takes the virtual host along when
/// it ends.
#[derive(Debug)]
pub struct Vhost {
    name: String,
    broker: Broker,
}

impl Vhost {
    pub(super) async fn create(broker: Broker) -> Vhost {
        let name = unique_name();
        if broker.is_embedded() {
            return Vhost { name, broker };
        }
        let made = make(&broker, &name).await;
        made.unwrap_or_else(|error| {
            panic!("could not make the virtual host {name} on {}: {error}", broker.url())
        });
        Vhost { name, broker }
    }

    /// Its name: that of the test and a random number.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The AMQP URL that leads here.
    pub fn url(&self) -> String {
        self.broker.url_for(&self.name)
    }

    /// The broker it is on.
    pub fn broker(&self) -> &Broker {
        &self.broker
    }

    /// Its queues as the management API describes them. Counts may be half a second old.
    pub async fn queues(&self) -> Result<Vec<Value>, ManagementError> {
        Ok(list(self.broker.management().get(&["queues", &self.name]).await?))
    }

    /// Its connections as the management API describes them. The list may be a second old.
    pub async fn connections(&self) -> Result<Vec<Value>, ManagementError> {
        Ok(list(self.broker.management().get(&["vhosts", &self.name, "connections"]).await?))
    }

    /// Has the broker close every connection that [`connections`](Self::connections) lists; how
    /// many there were. The embedded broker, which needs no list, cuts them.
    pub async fn close_connections(&self) -> Result<usize, ManagementError> {
        if self.broker.is_embedded() {
            let embedded = leveret_broker::Broker::named(&self.name);
            let connections = embedded.statistics().connections;
            embedded.faults().cut_all_connections();
            return Ok(connections);
        }
        let connections = self.connections().await?;
        for connection in &connections {
            let name = connection["name"].as_str().unwrap_or_default();
            match self.broker.management().delete(&["connections", name]).await {
                // It was gone already, or went while it was asked to, which RabbitMQ fails at.
                Err(error) if matches!(error.status(), Some(404 | 500)) => {}
                other => drop(other?),
            }
        }
        Ok(connections.len())
    }
}

impl Drop for Vhost {
    fn drop(&mut self) {
        if self.broker.is_embedded() {
            return;
        }
        let broker = self.broker.clone();
        let name = std::mem::take(&mut self.name);
        // The runtime of the test cannot be waited for from here; another one, on another thread,
        // can.
        let goodbye = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let delete = async { broker.management().delete(&["vhosts", &name]).await };
            runtime.map(|runtime| runtime.block_on(async { timeout(GOODBYE, delete).await }))
        });
        let _ = goodbye.join();
    }
}

async fn make(broker: &Broker, name: &str) -> Result<(), ManagementError> {
    let everything = json!({ "configure": ".*", "write": ".*", "read": ".*" });
    broker.management().put(&["vhosts", name], json!({})).await?;
    broker.management().put(&["permissions", name, broker.user()], everything).await?;
    Ok(())
}

fn list(value: Value) -> Vec<Value> {
    match value {
        Value::Array(items) => items,
        other => panic!("RabbitMQ answered {other} where a list was expected"),
    }
}
