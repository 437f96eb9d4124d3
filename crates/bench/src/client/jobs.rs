//! What is measured: clients, jobs, peers, and the description of one run.

use bytes::Bytes;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::message::filler;
use crate::suite;

/// How many publishes may be unconfirmed in [`Job::Confirm`].
pub(crate) const CONFIRM_WINDOW: usize = 1000;

/// How many deliveries may be unacked in [`Job::Consume`].
pub(crate) const PREFETCH: u16 = 1000;

/// How many publishes may be unconfirmed in [`Job::Returns`].
pub(crate) const RETURNS_WINDOW: usize = 400;

/// An exchange that every RabbitMQ has, and to which nothing is bound: it drops what it gets.
pub(crate) const NOWHERE: &str = "amq.fanout";

/// A queue to ask about after plain publishes. RabbitMQ answers after it has taken them all; the null peer answers
/// with how many it took on the channel.
pub(crate) const PUBLISHED: &str = "published";

/// The same for acks: the null peer answers with how many deliveries were acked on the channel.
pub(crate) const ACKED: &str = "acked";

/// The library that does the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Client {
    /// Leveret's engine, `leveret::amqp`
    Leveret,
    /// The same, with the properties that the toolkit sends: persistent, with an id and a time
    Stamped,
    /// Leveret's client, on top of the engine
    Toolkit,
    /// lapin, pipelined
    Lapin,
    /// amqprs
    Amqprs,
    /// deadpool-lapin: lapin, its connection from a pool
    Deadpool,
    /// RustStream on lapin: its publisher with confirms, and its handlers
    Ruststream,
    /// No client: sockets and frames by hand, the least that is possible on this machine
    Limit,
}

impl Client {
    pub(crate) fn is_ours(self) -> bool {
        matches!(self, Client::Leveret | Client::Stamped | Client::Toolkit)
    }

    /// Whether it is a library of another project.
    pub(crate) fn is_peer(self) -> bool {
        !self.is_ours() && self != Client::Limit
    }
}

/// What is done with the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Job {
    /// Publish, fire and forget
    Publish,
    /// Publish with confirms, at most 1000 unconfirmed
    Confirm,
    /// The same with mandatory publishes, all of them routable: the cost of recognizing returns
    Mandatory,
    /// Publish with confirms, one at a time: p50 and p99
    Latency,
    /// Consume with a prefetch of 1000 and ack each delivery
    Consume,
    /// Consume without acks
    AutoAck,
    /// Mandatory publishes with confirms, every tenth unroutable, 400 in flight: outcomes that are wrong
    Returns,
}

/// The other end of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Peer {
    /// A program that does only what the protocol requires: the client's own cost is left
    Null,
    /// A real RabbitMQ
    Rabbitmq,
}

/// What is the same for all clients that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Setting {
    pub(crate) peer: Peer,
    /// Where the peer listens on 127.0.0.1
    pub(crate) port: u16,
    /// Bytes per body
    pub(crate) size: usize,
    /// Channels, all on one connection, each with a task and an equal share of the messages
    pub(crate) channels: u64,
}

pub(crate) type Run = suite::Run<Job, Client, Setting>;

impl Run {
    /// The share of one channel.
    pub(crate) fn share(&self) -> u64 {
        self.messages / self.setting.channels
    }

    pub(crate) fn body(&self) -> Bytes {
        filler(self.setting.size)
    }

    pub(crate) fn queues(&self) -> impl Iterator<Item = String> {
        (0..self.setting.channels).map(|channel| self.queue(channel))
    }

    /// Where a channel gets its deliveries from, and confirmed publishes go to. The null peer reads from the name
    /// what it is to deliver.
    pub(crate) fn queue(&self, channel: u64) -> String {
        format!("bench.{channel}.{}.{}", self.setting.size, self.share())
    }

    /// What [`PUBLISHED`] has to say in the end: of RabbitMQ's queue of that name, nothing ever goes into it.
    pub(crate) fn published(&self) -> u64 {
        if self.setting.peer == Peer::Null { self.share() } else { 0 }
    }

    /// How many messages are in its queues on RabbitMQ once the client has gone, whatever it has counted itself.
    pub(crate) fn left(&self) -> u64 {
        match self.job {
            Job::Publish | Job::Consume | Job::AutoAck => 0,
            Job::Confirm | Job::Mandatory | Job::Latency => self.messages,
            Job::Returns => {
                (0..self.messages).filter(|number| !is_unroutable(*number)).count() as u64
            }
        }
    }

    /// Which queue to ask about after the last ack, and what the answer has to be.
    pub(crate) fn acked(&self, channel: u64) -> (String, u64) {
        match self.setting.peer {
            Peer::Null => (ACKED.to_owned(), self.share()),
            Peer::Rabbitmq => (self.queue(channel), 0),
        }
    }
}

/// What a queue's name says to the null peer: the size of the bodies and how many.
pub(crate) fn deliveries_of(queue: &str) -> Option<(usize, u64)> {
    let mut parts = queue.strip_prefix("bench.")?.split('.').skip(1);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

impl Job {
    /// Whether it makes sense with this client and peer, and with so many channels.
    pub(crate) fn exists_for(self, client: Client, at: &Setting) -> bool {
        let (peer, channels) = (at.peer, at.channels);
        match self {
            // It tells what a client can take at least, and not what a broker does.
            _ if client == Client::Limit && peer == Peer::Rabbitmq => false,
            Job::Confirm | Job::Mandatory if client == Client::Stamped => true,
            _ if client == Client::Stamped => false,
            Job::Confirm | Job::Consume => true,
            // They stand beside the toolkit, for what is promised of it.
            _ if matches!(client, Client::Deadpool | Client::Ruststream) => false,
            Job::Latency => channels == 1 && client != Client::Limit,
            // The others keep nothing to know a return by.
            Job::Mandatory => client.is_ours(),
            // amqprs hands out acks and returns as they come, and leaves the outcomes to the application.
            Job::Returns => {
                peer == Peer::Rabbitmq
                    && channels == 1
                    && matches!(client, Client::Leveret | Client::Lapin)
            }
            _ => true,
        }
    }

    /// Whether its queues are filled before the run.
    pub(crate) fn consumes(self) -> bool {
        matches!(self, Job::Consume | Job::AutoAck)
    }

    /// So many that a run takes about a second. Cost per message does not depend on their number, so a cheaper client
    /// gets more of them.
    pub(crate) fn messages(self, client: Client, at: &Setting) -> u64 {
        let large = at.size > 4096;
        match (self, at.peer) {
            (Job::Returns, _) => 20_000,
            (Job::Latency, _) => 2_000,
            (_, Peer::Rabbitmq) if large => 8_000,
            (_, Peer::Rabbitmq) => 60_000,
            (_, Peer::Null) => {
                let messages = if large { 16_000 } else { 120_000 };
                match client {
                    Client::Limit if !large => 40 * messages,
                    client if client.is_peer() => messages,
                    _ => 10 * messages,
                }
            }
        }
    }
}

/// Whether message `number` of [`Job::Returns`] goes nowhere.
pub(crate) fn is_unroutable(number: u64) -> bool {
    number % 10 == 3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_null_peer_reads_from_a_queues_name_what_to_deliver() {
        let setting = Setting { peer: Peer::Null, port: 5672, size: 1024, channels: 4 };
        let (job, candidate) = (Job::Consume, Client::Leveret);
        let run = Run { job, candidate, messages: 1000, setting };
        assert_eq!(deliveries_of(&run.queue(3)), Some((1024, 250)));
        assert_eq!(deliveries_of(PUBLISHED), None);
    }
}
