//! The handle of a client, which every feature adds its own methods to.

use std::sync::Arc;

use tokio::task::JoinHandle;

use super::core::Core;
use super::managed::LiveConnection;
use crate::amqp::{self, Channel, deadline_in};
use crate::error::Error;

/// A client of one broker, of a cluster, or of a broker and its standby.
///
/// It clones cheaply, and all clones are one client. It keeps a connection for consuming and, once something is
/// published, one for publishing; it makes them again when they are lost, restores the topology that was applied, and
/// then publishers and consumers go on. It is closed by [`Client::close`], or when the last clone, publisher and
/// consumer are dropped.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use leveret::{Client, Queue, Topology};
///
/// let client = Client::embedded().await?; // or Client::connect("amqp://localhost")
/// client.apply(&Topology::new().queue(Queue::quorum("letters"))).await?;
///
/// let publisher = client.publisher("").build().await?;
/// publisher.publish("letters", "hello").await?;
///
/// let mut letters = client.consumer("letters").stream().await?;
/// let letter = letters.next().await.expect("a letter")?;
/// assert_eq!(letter.body(), "hello");
/// letter.ack()?;
/// client.close().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Client {
    owner: Arc<Owner>,
}

/// Ends everything when the last handle is gone.
#[derive(Debug)]
struct Owner {
    core: Arc<Core>,
    /// None in the hands of the client's own tasks, which do not keep it open.
    checkup: Option<JoinHandle<()>>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(checkup) = &self.checkup {
            self.core.begin_close();
            checkup.abort();
        }
    }
}

impl Client {
    /// The owner of a core, which is closed with its last clone.
    pub(crate) fn new(core: Arc<Core>, checkup: JoinHandle<()>) -> Self {
        Client { owner: Arc::new(Owner { core, checkup: Some(checkup) }) }
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.owner.core
    }

    /// A handle for a task of the client itself, which ends when the client is closed and does not keep it open.
    pub(crate) fn unowned(&self) -> Client {
        Client { owner: Arc::new(Owner { core: Arc::clone(self.core()), checkup: None }) }
    }

    /// Does something on a channel that is thrown away, again if the connection went meanwhile.
    pub(crate) async fn on_channel<T, F>(
        &self,
        what: &str,
        call: impl Fn(Channel) -> F,
    ) -> Result<T, Error>
    where
        // Not `AsyncFn`: a future that calls one cannot be spawned.
        F: Future<Output = Result<T, amqp::Error>>,
    {
        let core = self.core();
        core.check_open()?;
        let (patience, call) = (core.options.timeout, &call);
        let attempt = |up: LiveConnection| async move {
            // Dropped, the channel closes by itself once what came out of it is dropped, too.
            call(up.connection.open_channel().await?).await
        };
        core.home().attempt(what, deadline_in(patience), patience, attempt).await
    }
}
