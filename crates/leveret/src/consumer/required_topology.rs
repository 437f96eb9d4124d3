//! What a consumer declares before it begins.

use std::sync::Arc;

use crate::connection::Client;
use crate::connection::core::Core;
use crate::error::Error;
use crate::topology::Topology;

/// The objects that a consumer needs, or why there cannot be such.
#[derive(Clone, Debug)]
pub(super) struct RequiredTopology {
    topology: Result<Topology, Error>,
    /// Held by the consumer and its streams, if the queue is gone with the last of them.
    pub(super) temporary: Option<Arc<Temporary>>,
}

impl Default for RequiredTopology {
    fn default() -> Self {
        RequiredTopology { topology: Ok(Topology::new()), temporary: None }
    }
}

impl RequiredTopology {
    pub(super) fn add(&mut self, more: Result<Topology, Error>) {
        self.topology = match (std::mem::replace(&mut self.topology, Ok(Topology::new())), more) {
            (Ok(known), Ok(more)) => Ok(known.and(more)),
            (Err(error), _) | (_, Err(error)) => Err(error),
        };
    }

    pub(super) fn topology(&self) -> Topology {
        self.topology.clone().unwrap_or_default()
    }

    pub(super) async fn declare(&self, client: &Client) -> Result<(), Error> {
        match &self.topology {
            Ok(topology) if topology.is_empty() => Ok(()),
            Ok(topology) => client.apply(topology).await.map(drop),
            Err(error) => Err(error.clone()),
        }
    }
}

/// A queue that this client has no use for after its consumer: without it, every reconnect would bring the queue back, and
/// nobody would take messages from it.
#[derive(Debug)]
pub(super) struct Temporary {
    core: Arc<Core>,
    queue: String,
}

impl Temporary {
    pub(super) fn new(client: &Client, queue: &str) -> Arc<Self> {
        Arc::new(Temporary { core: Arc::clone(client.core()), queue: queue.to_owned() })
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        self.core.remembered.forget_queue(&self.queue);
    }
}
