//! Faults on request, for tests of what a client does about them.

use std::sync::Arc;
use std::time::Duration;

use crate::broker::Shared;
use crate::vhost::Planned;

/// Makes a broker misbehave. From [`Broker::faults`](crate::Broker::faults).
///
/// What counts ("the next three") counts in each virtual host on its own.
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let broker = leveret_broker::Broker::builder().start()?;
/// broker.faults().nack_publishes(3);
/// broker.faults().cut_all_connections();
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Faults {
    shared: Arc<Shared>,
}

impl Faults {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Faults { shared }
    }

    fn plan(&self, change: impl Fn(&mut Planned)) {
        for host in self.shared.hosts() {
            host.with(|vhost| change(vhost.planned()));
        }
    }

    /// Cuts every connection without a word.
    pub fn cut_all_connections(&self) {
        self.shared.cut(|_| true);
    }

    /// Cuts the connections that gave themselves this name, without a word. Says how many there were.
    pub fn cut_connections_named(&self, name: &str) -> usize {
        self.shared.cut(|found| found == Some(name))
    }

    /// Refuses the next declares of queues and exchanges: the channel is closed with 406 `PRECONDITION_FAILED`.
    pub fn refuse_declares(&self, count: usize) {
        self.plan(|planned| planned.refuse_declares = count);
    }

    /// Answers the next declares of queues and exchanges that much later. They are carried out at once.
    pub fn delay_declares(&self, count: usize, delay: Duration) {
        self.plan(|planned| planned.delay_declares = (count, delay));
    }

    /// Drops the next publishes on channels with confirms, and says so.
    pub fn nack_publishes(&self, count: usize) {
        self.plan(|planned| planned.nack_publishes = count);
    }

    /// Sends the next publishes back as if they reached no queue, if they are mandatory; else they vanish.
    pub fn return_publishes(&self, count: usize) {
        self.plan(|planned| planned.return_publishes = count);
    }

    /// Stops publishers as if memory were short, until [`Faults::unblock`].
    pub fn block(&self, reason: impl Into<String>) {
        self.shared.alarm().wish(Some(reason.into()));
    }

    /// Lets publishers go on.
    pub fn unblock(&self) {
        self.shared.alarm().wish(None);
    }

    /// Cancels all consumers of a queue, as if its node had failed. Says how many there were.
    pub fn cancel_consumers(&self, virtual_host: &str, queue: &str) -> usize {
        let host = self.shared.host(virtual_host);
        host.map_or(0, |host| host.with(|vhost| vhost.cancel_all_consumers(queue)))
    }

    /// Forgets all consumers of a queue, and says nothing of it to their clients. Says how many there were.
    pub fn forget_consumers(&self, virtual_host: &str, queue: &str) -> usize {
        let host = self.shared.host(virtual_host);
        host.map_or(0, |host| host.with(|vhost| vhost.forget_all_consumers(queue)))
    }

    /// Neither reads nor writes, on any connection, until [`Faults::thaw`]. New connections are accepted and get no answer. Time goes
    /// on.
    pub fn freeze(&self) {
        self.shared.set_frozen(true);
    }

    /// Goes on where [`Faults::freeze`] stopped.
    pub fn thaw(&self) {
        self.shared.set_frozen(false);
    }
}
