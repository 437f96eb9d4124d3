//! A queue is migrated by one at a time: two would move messages against each other, and one delete what the other has filled.

use std::time::{Duration, Instant};

use leveret::amqp::{
    Channel, Connection, DeleteExchange, DeleteQueue, Error, Options, QueueOptions, ReplyCode,
    Table, Value,
};

use super::step::Names;
use crate::failure::Failure;

/// How long the broker may take to notice that one who was killed is gone.
const PATIENCE: Duration = Duration::from_secs(3);
/// How often it is asked.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// A connection, and on it a queue that nobody else can have as long as the connection is there. Queues are deleted and declared
/// on this connection, so that nobody does so who has lost it.
pub(super) struct Hold<'a> {
    connection: Connection,
    names: &'a Names,
}

impl<'a> Hold<'a> {
    /// Connects, and holds nothing yet.
    pub(super) async fn open(options: &Options, names: &'a Names) -> Result<Self, Failure> {
        let connection = Connection::open(options).await?;
        Ok(Hold { connection, names })
    }

    /// Takes hold of the queue, unless somebody else has.
    pub(super) async fn take(&self) -> Result<(), Failure> {
        let Names { queue, lock, trial, .. } = self.names;
        let began = Instant::now();
        loop {
            let mine = QueueOptions {
                durable: false,
                exclusive: true,
                auto_delete: false,
                arguments: classic()?,
            };
            let channel = self.channel().await?;
            match channel.declare_queue(lock, mine).await {
                Ok(_) => {
                    // Of one who was killed.
                    let gone = channel.delete_exchange(trial, DeleteExchange::default()).await;
                    gone.map_err(|error| self.failed("cannot delete what was tried out", error))?;
                    return self.delete(&channel, trial).await;
                }
                Err(error) if error.reply_code() == Some(ReplyCode::RESOURCE_LOCKED) => {}
                Err(error) => return Err(self.failed("cannot take hold of it", error)),
            }
            if began.elapsed() >= PATIENCE {
                return Err(Failure::new(format_args!(
                    "somebody else is migrating queue {queue:?}: wait for that to end, or stop it. If it was cut off from the \
                     broker, wait until the broker has noticed, a minute or two"
                )));
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
    }

    /// Whether the broker would take a queue that is declared so. Otherwise that would be known only when the old one is deleted.
    pub(super) async fn try_out(&self, declaration: QueueOptions) -> Result<(), Failure> {
        let Names { queue, trial, .. } = self.names;
        let channel = self.channel().await?;
        match channel.declare_queue(trial, declaration).await {
            Ok(_) => self.delete(&channel, trial).await,
            Err(error) if error.reply_code() == Some(ReplyCode::PRECONDITION_FAILED) => {
                Err(Failure::wrong(format_args!(
                    "the broker does not take queue {queue:?} as the file has it: {error}"
                )))
            }
            Err(error) => Err(self.failed("cannot try out what the file has", error)),
        }
    }

    /// Declares a durable queue. Not by the management API: if the program is killed, that stops half-way, and leaves a quorum queue
    /// without a process.
    pub(super) async fn declare(
        &self,
        queue: &str,
        arguments: &[(String, Value<'static>)],
    ) -> Result<(), Failure> {
        let pairs = arguments.iter().map(|(name, value)| (name.as_str(), value.clone()));
        let options = QueueOptions {
            durable: true,
            exclusive: false,
            auto_delete: false,
            arguments: Table::from_pairs(pairs).map_err(Failure::new)?,
        };
        let declared = self.channel().await?.declare_queue(queue, options).await;
        let what = format!("cannot declare queue {queue:?}");
        declared.map(drop).map_err(|error| self.failed(&what, error))
    }

    /// A channel, if it still holds what it held.
    pub(super) async fn channel(&self) -> Result<Channel, Failure> {
        let opened = self.connection.open_channel().await;
        opened.map_err(|error| self.failed("the connection is lost", error))
    }

    /// It is an error if somebody else may be at it by now.
    pub(super) fn check(&self) -> Result<(), Failure> {
        match self.connection.is_closed() {
            false => Ok(()),
            true => Err(Failure::new(format_args!(
                "queue {:?}: the connection was lost, and somebody else may be at it",
                self.names.queue
            ))),
        }
    }

    /// What the broker calls its cluster.
    pub(super) fn cluster(&self) -> Option<String> {
        let name = self.connection.server_properties().get("cluster_name")?;
        name.as_str().map(str::to_owned)
    }

    /// Lets go, whatever has become of it.
    pub(super) async fn release(self) {
        // Before the answer to the closing, and not some time after it.
        if let Ok(channel) = self.connection.open_channel().await {
            let _ = channel.delete_queue(&self.names.lock, DeleteQueue::default()).await;
        }
        let _ = self.connection.close().await;
    }

    async fn delete(&self, channel: &Channel, queue: &str) -> Result<(), Failure> {
        let deleted = channel.delete_queue(queue, DeleteQueue::default()).await;
        deleted.map(drop).map_err(|error| self.failed("cannot delete what was tried out", error))
    }

    fn failed(&self, what: &str, error: Error) -> Failure {
        let text = format!("queue {:?}: {what}: {error}", self.names.queue);
        match error.reply_code() {
            Some(ReplyCode::ACCESS_REFUSED) => Failure::not_allowed(text),
            _ => Failure::new(text),
        }
    }
}

/// Whatever the virtual host makes of queues that do not say.
fn classic() -> Result<Table<'static>, Failure> {
    Table::from_pairs([("x-queue-type", "classic".into())]).map_err(Failure::new)
}
