//! Looking at a virtual host from outside, and misleading it.

use std::time::Duration;

use bytes::Bytes;
use leveret_wire::RawProperties;

use super::{Channel, ConsumerId, Destination, Vhost};
use crate::message::Message;
use crate::queue::Queue;
use crate::refusal::Refusal;
use crate::snapshot::{self, BindingDestination, Statistics};

/// Faults that are still to happen.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Planned {
    pub(crate) refuse_declares: usize,
    pub(crate) delay_declares: (usize, Duration),
    pub(crate) nack_publishes: usize,
    pub(crate) return_publishes: usize,
}

/// Counts one down. Says whether there was one.
pub(super) fn take_one(count: &mut usize) -> bool {
    let some = *count > 0;
    *count -= usize::from(some);
    some
}

impl Vhost {
    pub(crate) fn planned(&mut self) -> &mut Planned {
        &mut self.planned
    }

    pub(super) fn refuse_declare_if_planned(&mut self) -> Result<(), Refusal> {
        match take_one(&mut self.planned.refuse_declares) {
            true => Err(Refusal::precondition_failed("this declare is refused by request")),
            false => Ok(()),
        }
    }

    /// Adds what there is here to what there is elsewhere.
    pub(crate) fn add_to(&self, sum: &mut Statistics) {
        sum.connections += self.connections.len();
        sum.channels += self.channels.len();
        sum.queues += self.queues.len();
        sum.ready += self.queues.values().map(|queue| queue.ready.len()).sum::<usize>();
        sum.unsettled += self.queues.values().map(|queue| queue.unsettled).sum::<usize>();
        sum.tally += self.tally;
    }

    /// How much memory its messages take, about.
    pub(crate) fn memory(&self) -> usize {
        self.memory
    }

    /// Cancels all consumers of a queue, and says how many there were.
    pub(crate) fn cancel_all_consumers(&mut self, queue: &str) -> usize {
        self.end_all_consumers(queue, Vhost::cancel_by_broker)
    }

    /// The same, and says nothing of it to their clients.
    pub(crate) fn forget_all_consumers(&mut self, queue: &str) -> usize {
        self.end_all_consumers(queue, |vhost, consumer| drop(vhost.drop_consumer(consumer)))
    }

    fn end_all_consumers(&mut self, queue: &str, end: impl Fn(&mut Vhost, ConsumerId)) -> usize {
        let Some(id) = self.queue_names.get(queue.as_bytes()).copied() else { return 0 };
        let consumers: Vec<_> = self.queues[id].turns.iter().collect();
        for consumer in &consumers {
            end(self, *consumer);
            let found = &mut self.queues[id];
            found.turns.remove(*consumer);
            found.exclusive_consumer.take_if(|exclusive| exclusive == consumer);
        }
        self.used(id);
        self.delete_if_left(id);
        consumers.len()
    }

    pub(crate) fn snapshot(&self) -> snapshot::VirtualHost {
        let mut exchanges: Vec<_> = self.exchanges.values().map(exchange).collect();
        exchanges.sort_by(|a, b| a.name.cmp(&b.name));
        let mut queues: Vec<_> = self.queues.values().map(|found| self.queue(found)).collect();
        queues.sort_by(|a, b| a.name.cmp(&b.name));
        snapshot::VirtualHost {
            name: self.name.clone(),
            exchanges,
            queues,
            bindings: self.bindings(),
            connections: self.connections.values().map(|found| self.connection(found)).collect(),
            tally: self.tally,
        }
    }

    fn connection(&self, connection: &super::Connection) -> snapshot::Connection {
        let channels = connection.channels.iter().filter_map(|id| self.channels.get(*id));
        let mut channels: Vec<_> = channels.map(channel).collect();
        channels.sort_by_key(|one| one.number);
        snapshot::Connection {
            name: connection.name.clone(),
            user: connection.user.clone(),
            peer: connection.peer,
            channels,
        }
    }

    fn queue(&self, queue: &Queue) -> snapshot::Queue {
        let tags = queue.turns.iter().filter_map(|id| self.consumers.get(id));
        snapshot::Queue {
            name: queue.name.to_string(),
            kind: if queue.arguments.is_quorum() { "quorum" } else { "classic" },
            durable: queue.durable,
            auto_delete: queue.auto_delete,
            exclusive: queue.owner.is_some(),
            arguments: queue.table.clone(),
            ready: queue.ready.len(),
            unsettled: queue.unsettled,
            consumers: tags.map(|consumer| consumer.tag.to_string()).collect(),
        }
    }

    fn bindings(&self) -> Vec<snapshot::Binding> {
        let mut bindings: Vec<_> = self
            .exchanges
            .values()
            .flat_map(|source| {
                source.bindings.iter().map(|binding| snapshot::Binding {
                    source: source.name.to_string(),
                    destination: self.destination(binding.destination),
                    routing_key: String::from_utf8_lossy(binding.key).into_owned(),
                    arguments: binding.arguments.clone(),
                })
            })
            .collect();
        let key = |one: &snapshot::Binding| {
            (one.source.clone(), one.destination.clone(), one.routing_key.clone())
        };
        bindings.sort_by_key(key);
        bindings
    }

    fn destination(&self, destination: Destination) -> BindingDestination {
        match destination {
            Destination::Queue(id) => {
                let name = self.queues.get(id).map(|found| found.name.to_string());
                BindingDestination::Queue(name.unwrap_or_default())
            }
            Destination::Exchange(id) => {
                let name = self.exchanges.get(id).map(|found| found.name.to_string());
                BindingDestination::Exchange(name.unwrap_or_default())
            }
        }
    }

    /// The first messages of a queue that wait to be delivered.
    pub(crate) fn peek(&self, queue: &str, count: usize) -> Option<Vec<snapshot::Message>> {
        let queue = self.queues.get(*self.queue_names.get(queue.as_bytes())?)?;
        let messages = queue.ready.iter().take(count);
        Some(messages.map(|entry| message(&entry.message, entry.is_redelivered())).collect())
    }
}

fn channel(channel: &Channel) -> snapshot::Channel {
    let mut consumers: Vec<_> = channel.consumers.keys().map(ToString::to_string).collect();
    consumers.sort();
    snapshot::Channel {
        number: channel.number,
        consumers,
        unsettled: channel.unsettled_count(),
        prefetch: channel.prefetch,
    }
}

fn exchange(exchange: &super::Exchange) -> snapshot::Exchange {
    snapshot::Exchange {
        name: exchange.name.to_string(),
        kind: exchange.kind.name(),
        durable: exchange.durable,
        auto_delete: exchange.auto_delete,
        internal: exchange.internal,
        arguments: exchange.arguments.clone(),
    }
}

fn message(message: &Message, redelivered: bool) -> snapshot::Message {
    snapshot::Message {
        exchange: message.exchange().to_string(),
        routing_key: message.routing_key().to_string(),
        redelivered,
        properties: RawProperties::new(Bytes::copy_from_slice(message.encoded_properties())),
        body: message.body_bytes(),
    }
}
