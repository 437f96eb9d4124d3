//! What is in a broker at a moment, to look at.

use std::net::SocketAddr;

use bytes::Bytes;
use leveret_wire::{RawProperties, Table};

/// Everything in a broker, at the moment it was taken. From [`Broker::snapshot`](crate::Broker::snapshot).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Snapshot {
    /// By name.
    pub virtual_hosts: Vec<VirtualHost>,
    /// How much memory messages take, about.
    pub memory: usize,
}

impl Snapshot {
    /// A virtual host by its name.
    pub fn virtual_host(&self, name: &str) -> Option<&VirtualHost> {
        self.virtual_hosts.iter().find(|found| found.name == name)
    }
}

/// What a broker has to do, in numbers. From [`Broker::statistics`](crate::Broker::statistics).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Connections in all virtual hosts.
    pub connections: usize,
    /// Their channels.
    pub channels: usize,
    /// Queues in all virtual hosts.
    pub queues: usize,
    /// Messages in them that wait to be delivered.
    pub ready: usize,
    /// Messages of theirs that were delivered and are not settled.
    pub unsettled: usize,
    /// How much memory messages take, about.
    pub memory: usize,
    /// What happened in all virtual hosts together.
    pub tally: Tally,
}

/// A virtual host.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct VirtualHost {
    /// Its name.
    pub name: String,
    /// By name.
    pub exchanges: Vec<Exchange>,
    /// By name.
    pub queues: Vec<Queue>,
    /// By source, destination and key.
    pub bindings: Vec<Binding>,
    /// In no order.
    pub connections: Vec<Connection>,
    /// What happened in it since the broker was started.
    pub tally: Tally,
}

impl VirtualHost {
    /// A queue by its name.
    pub fn queue(&self, name: &str) -> Option<&Queue> {
        self.queues.iter().find(|found| found.name == name)
    }
}

/// A connection.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Connection {
    /// What its client calls it.
    pub name: Option<String>,
    /// As whom the client has logged in.
    pub user: String,
    /// Where the client is, unless it is in this process.
    pub peer: Option<SocketAddr>,
    /// By number.
    pub channels: Vec<Channel>,
}

/// A channel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Channel {
    /// Its number on its connection.
    pub number: u16,
    /// The tags of its consumers, sorted.
    pub consumers: Vec<String>,
    /// How many messages were delivered on it and are not settled.
    pub unsettled: usize,
    /// The prefetch of the next consumer; 0 is no limit.
    pub prefetch: u16,
}

/// An exchange.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Exchange {
    /// Its name; empty for the default exchange.
    pub name: String,
    /// `direct`, `fanout`, `topic` or `headers`.
    pub kind: &'static str,
    /// Survives a restart.
    pub durable: bool,
    /// Deleted with its last binding.
    pub auto_delete: bool,
    /// Takes messages from other exchanges only.
    pub internal: bool,
    /// As it was declared.
    pub arguments: Table<'static>,
}

/// A queue.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Queue {
    /// Its name.
    pub name: String,
    /// `classic` or `quorum`.
    pub kind: &'static str,
    /// Survives a restart.
    pub durable: bool,
    /// Deleted with its last consumer.
    pub auto_delete: bool,
    /// For one connection alone.
    pub exclusive: bool,
    /// As it was declared.
    pub arguments: Table<'static>,
    /// Messages that wait to be delivered.
    pub ready: usize,
    /// Messages that were delivered and are not settled.
    pub unsettled: usize,
    /// The tags of its consumers, in the order they came.
    pub consumers: Vec<String>,
}

/// A binding.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Binding {
    /// The exchange that messages come from.
    pub source: String,
    /// Where they go.
    pub destination: BindingDestination,
    /// The routing key, or the pattern.
    pub routing_key: String,
    /// As it was bound.
    pub arguments: Table<'static>,
}

/// Where a binding leads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BindingDestination {
    /// To the queue of this name.
    Queue(String),
    /// To the exchange of this name.
    Exchange(String),
}

/// A message in a queue. From [`Broker::peek`](crate::Broker::peek).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Message {
    /// The exchange it was published to.
    pub exchange: String,
    /// The routing key it was published with.
    pub routing_key: String,
    /// Whether it was delivered before.
    pub redelivered: bool,
    /// Its properties.
    pub properties: RawProperties,
    /// Its body.
    pub body: Bytes,
}

/// What happened in a virtual host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// Messages that clients published.
    pub published: u64,
    /// Of these, how many reached no queue.
    pub unroutable: u64,
    /// Of those, how many were sent back.
    pub returned: u64,
    /// Publishes that were not taken: a queue was full, or a fault was asked for.
    pub nacked: u64,
    /// Messages put into queues: one that reaches three counts three times.
    pub enqueued: u64,
    /// Messages handed to clients, by consuming or by `get`.
    pub delivered: u64,
    /// Of these, how many need no ack.
    pub delivered_settled: u64,
    /// Deliveries that were acked.
    pub acked: u64,
    /// Deliveries that went back to their queues.
    pub requeued: u64,
    /// Messages that died: rejected.
    pub rejected: u64,
    /// Messages that died: their time was up.
    pub expired: u64,
    /// Messages that died: their queue was full.
    pub over_length: u64,
    /// Messages that died: they failed too often.
    pub over_delivery_limit: u64,
    /// Of those that died, how many reached another queue.
    pub dead_lettered: u64,
    /// Of those that died, how many had nowhere to go and are gone.
    pub gone: u64,
    /// Messages that went with their queue, or were purged.
    pub discarded: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.published += other.published;
        self.unroutable += other.unroutable;
        self.returned += other.returned;
        self.nacked += other.nacked;
        self.enqueued += other.enqueued;
        self.delivered += other.delivered;
        self.delivered_settled += other.delivered_settled;
        self.acked += other.acked;
        self.requeued += other.requeued;
        self.rejected += other.rejected;
        self.expired += other.expired;
        self.over_length += other.over_length;
        self.over_delivery_limit += other.over_delivery_limit;
        self.dead_lettered += other.dead_lettered;
        self.gone += other.gone;
        self.discarded += other.discarded;
    }
}
