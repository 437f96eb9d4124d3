//! Declaring objects, on channels that may be thrown away.

use std::collections::BTreeMap;
use std::fmt;

use super::binding::{Binding, Destination};
use super::exchange::Exchange;
use super::queue::Queue;
use crate::amqp::{self, Channel, Connection, ExchangeOptions, QueueInfo, QueueOptions, ReplyCode};
use crate::error::{Conflict, Error};

/// One object of a topology.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Object<'a> {
    Exchange(&'a Exchange),
    Queue(&'a Queue),
    Binding(&'a Binding),
}

impl fmt::Display for Object<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Object::Exchange(exchange) => write!(f, "exchange {:?}", exchange.name),
            Object::Queue(queue) => write!(f, "queue {:?}", queue.name),
            Object::Binding(binding) => binding.fmt(f),
        }
    }
}

/// What the broker said of the queues that were declared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    queues: BTreeMap<String, QueueInfo>,
}

impl Applied {
    /// Of a queue of the topology: its name on the broker, and how many messages and consumers it has.
    pub fn queue(&self, name: &str) -> Option<&QueueInfo> {
        self.queues.get(name)
    }

    pub(crate) fn add(&mut self, name: &str, info: QueueInfo) {
        self.queues.insert(name.to_owned(), info);
    }
}

/// Declares one object after the other. The channel on which one is refused is closed by the broker; the next object
/// gets a new one.
pub(crate) struct Declaring<'a> {
    connection: &'a Connection,
    channel: Option<Channel>,
    /// What the broker calls the queues that it names.
    names: BTreeMap<String, String>,
    naming: Naming,
}

/// What to do with a queue to which the broker has given a name before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Naming {
    /// It is still there.
    Keep,
    /// It is gone: the broker gives the next one another name.
    Anew,
}

impl<'a> Declaring<'a> {
    /// With the names that the broker has given to queues before.
    pub(crate) fn new(
        connection: &'a Connection,
        names: BTreeMap<String, String>,
        naming: Naming,
    ) -> Self {
        Declaring { connection, channel: None, names, naming }
    }

    /// Declares an object. Of a queue, what the broker says of it.
    pub(crate) async fn declare(&mut self, object: Object<'_>) -> Result<Option<QueueInfo>, Error> {
        let channel = match self.channel.take() {
            Some(channel) => channel,
            None => self.connection.open_channel().await.map_err(|error| failed(object, error))?,
        };
        let declared = match object {
            Object::Exchange(exchange) => declare_exchange(&channel, exchange).await.map(|()| None),
            Object::Queue(queue) => self.declare_queue(&channel, queue).await.map(Some),
            Object::Binding(binding) => self.bind(&channel, binding).await.map(|()| None),
        };
        if channel.check_open().is_ok() {
            self.channel = Some(channel);
        }
        declared.map_err(|failure| match failure {
            Failure::Amqp(error) => failed(object, error),
            Failure::Invalid(error) => error,
        })
    }

    async fn declare_queue(
        &mut self,
        channel: &Channel,
        queue: &Queue,
    ) -> Result<QueueInfo, Failure> {
        let options = QueueOptions {
            durable: queue.durable,
            exclusive: queue.exclusive,
            auto_delete: queue.auto_delete,
            arguments: queue.arguments.to_table()?,
        };
        if !queue.named_by_broker {
            return Ok(channel.declare_queue(&queue.name, options).await?);
        }
        match self.names.get(&queue.name) {
            // A name of the broker's own making can be asked for, not declared.
            Some(name) if self.naming == Naming::Keep => Ok(channel.inspect_queue(name).await?),
            _ => {
                let info = channel.declare_queue("", options).await?;
                self.names.insert(queue.name.clone(), info.name.clone());
                Ok(info)
            }
        }
    }

    async fn bind(&self, channel: &Channel, binding: &Binding) -> Result<(), Failure> {
        let Binding { source, destination, routing_key, arguments } = binding;
        let arguments = &arguments.to_table()?;
        match destination {
            Destination::Queue(queue) => {
                let queue = self.names.get(queue).unwrap_or(queue);
                channel.bind_queue(queue, source, routing_key, arguments).await?;
            }
            Destination::Exchange(exchange) => {
                channel.bind_exchange(exchange, source, routing_key, arguments).await?;
            }
        }
        Ok(())
    }

    /// Whether the connection is still there.
    pub(crate) fn is_connected(&self) -> bool {
        self.connection.is_usable()
    }

    /// Waits for the broker to close the channel that was used; what it has begun is done then.
    pub(crate) async fn finish(self) -> BTreeMap<String, String> {
        if let Some(channel) = self.channel {
            // Nothing depends on it: the connection may just have gone.
            let _ = channel.close().await;
        }
        self.names
    }
}

async fn declare_exchange(channel: &Channel, exchange: &Exchange) -> Result<(), Failure> {
    let options = ExchangeOptions {
        durable: exchange.durable,
        auto_delete: exchange.auto_delete,
        internal: exchange.internal,
        arguments: exchange.arguments.to_table()?,
    };
    channel.declare_exchange(&exchange.name, exchange.kind.as_str(), options).await?;
    Ok(())
}

enum Failure {
    Amqp(amqp::Error),
    Invalid(Error),
}

impl From<amqp::Error> for Failure {
    fn from(error: amqp::Error) -> Self {
        Failure::Amqp(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Invalid(error)
    }
}

fn failed(object: Object<'_>, error: amqp::Error) -> Error {
    let refused = error.reply_code() == Some(ReplyCode::PRECONDITION_FAILED);
    let conflict = refused.then(|| Conflict::read(&object.to_string(), &error.to_string()));
    match conflict.flatten() {
        Some(conflict) => {
            let text = format!(
                "cannot declare {conflict}. The broker never changes an existing object: keep what it has, or delete it \
                 or choose another name"
            );
            Error::conflicting(text, vec![conflict])
        }
        None => Error::from_amqp(format!("cannot declare {object}"), error),
    }
}
