//! A queue: its messages, and whose turn it is to get one.

mod counts;
mod publishers;
mod ready;
mod turns;

pub(crate) use counts::{Way, counted};
pub(crate) use publishers::Publisher;
pub(crate) use ready::{Entry, Order, Ready};
pub(crate) use turns::{Sharing, Turn, Turns};

use foldhash::HashSet;
use leveret_wire::Table;

use crate::arguments::{Overflow, QueueArguments};
use crate::message::{Message, Name};
use crate::profile::Profile;
use crate::time::Moment;
use crate::vhost::{ConnectionId, ConsumerId, ExchangeId};
use publishers::{Level, Publishers};

fn sharing(profile: Profile, arguments: &QueueArguments) -> Sharing {
    if !arguments.single_active_consumer {
        return Sharing::Competing;
    }
    match (arguments.is_quorum(), profile) {
        (false, _) => Sharing::OneByPriority,
        (true, Profile::RabbitMq3_10) => Sharing::OneAsTheyCame,
        (true, Profile::RabbitMq4_3) => Sharing::OneOfHighestPriority,
    }
}

/// A queue.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) name: Name,
    /// In which order queues were declared.
    pub(crate) number: u64,
    pub(crate) durable: bool,
    pub(crate) auto_delete: bool,
    /// The connection that alone may use it, if it is exclusive.
    pub(crate) owner: Option<ConnectionId>,
    pub(crate) arguments: QueueArguments,
    /// The arguments as the client gave them.
    pub(crate) table: Table<'static>,
    pub(crate) ready: Ready,
    /// What is dead and has to arrive elsewhere before it is gone.
    pub(crate) kept: Kept,
    /// How many were delivered and are not settled.
    pub(crate) unsettled: usize,
    /// Of these, how many were got and not consumed.
    pub(crate) got: usize,
    /// How many consumers are gone and have not settled all they had.
    pub(crate) lingering: usize,
    pub(crate) turns: Turns,
    /// The consumer beside which there may be no other.
    pub(crate) exclusive_consumer: Option<ConsumerId>,
    /// It had a consumer once: one that deletes itself does so with the last.
    pub(crate) had_consumer: bool,
    pub(crate) last_used: Moment,
    /// The exchanges that have bindings to it.
    pub(crate) bound_to: HashSet<ExchangeId>,
    /// For when it has asked to be looked after, because a message dies then.
    pub(crate) next_look: Moment,
    next_place: u64,
    /// Of a quorum queue that refuses messages when it is full.
    pub(crate) publishers: Option<Publishers>,
}

/// Messages that count and are not there.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    pub(crate) count: usize,
    bytes: usize,
}

impl Kept {
    pub(crate) fn add(&mut self, message: &Message, of: &Ready) {
        self.count += 1;
        self.bytes += of.bytes_of(message);
    }

    pub(crate) fn remove(&mut self, message: &Message, of: &Ready) {
        self.count -= 1;
        self.bytes -= of.bytes_of(message);
    }
}

impl Queue {
    pub(crate) fn new(
        profile: Profile,
        name: Name,
        arguments: QueueArguments,
        table: Table<'static>,
    ) -> Self {
        let order = match arguments.is_quorum() {
            true => Order::Quorum(profile),
            false => Order::Classic { max_priority: arguments.max_priority.unwrap_or(0) },
        };
        let refuses_late = arguments.is_quorum() && arguments.overflow != Overflow::DropHead;
        Queue {
            name,
            number: 0,
            durable: false,
            auto_delete: false,
            owner: None,
            ready: Ready::new(order),
            kept: Kept::default(),
            unsettled: 0,
            got: 0,
            lingering: 0,
            turns: Turns::new(sharing(profile, &arguments)),
            arguments,
            table,
            exclusive_consumer: None,
            had_consumer: false,
            last_used: Moment::NEVER,
            bound_to: HashSet::default(),
            next_look: Moment::NEVER,
            next_place: 0,
            publishers: refuses_late.then(Publishers::new),
        }
    }

    /// How many consumers clients are told that there are. To a quorum queue, who has a message is one until it is settled, and
    /// who waits until another is gone is none.
    pub(crate) fn consumer_count(&self) -> usize {
        match self.arguments.is_quorum() {
            true => self.turns.active_len() + self.lingering + self.got,
            false => self.turns.len(),
        }
    }

    /// A message as it is kept here: its place, and when it dies. It may have failed elsewhere before.
    #[inline]
    pub(crate) fn admit(&mut self, message: Message, failures: u32, now: Moment) -> Entry {
        let ttl = match (self.arguments.message_ttl, message.ttl()) {
            (Some(queue), Some(own)) => Some(queue.min(own)),
            (queue, own) => queue.or(own),
        };
        let expires = ttl.map_or(Moment::NEVER, |ttl| now.after_millis(ttl));
        self.next_place += 1;
        Entry { message, place: self.next_place, expires, failures, returns: 0 }
    }

    /// Whether it does not take a message, because it is full and rather refuses new ones than to drop old ones. A quorum
    /// queue takes what nobody waits for.
    pub(crate) fn refuses(&mut self, message: &Message, from: Option<Publisher>) -> bool {
        if let Some(publishers) = &mut self.publishers {
            return from.is_some_and(|from| publishers.is_stopped(from));
        }
        let drops = self.arguments.overflow == Overflow::DropHead || self.arguments.is_quorum();
        !drops && self.is_over_limit(1, message.body_len())
    }

    /// Publishers stop or go on, if they are to.
    #[inline]
    pub(crate) fn tell_publishers(&mut self) {
        if self.publishers.is_none() {
            return;
        }
        let level = match (self.is_over_limit(0, 0), self.is_low()) {
            (true, _) => Level::Full,
            (false, true) => Level::Low,
            (false, false) => Level::High,
        };
        if let Some(publishers) = &mut self.publishers {
            publishers.tell(level);
        }
    }

    /// Whether it has at most four fifths of what it may have.
    fn is_low(&self) -> bool {
        let low = |limit: Option<u64>, value: usize| {
            limit.is_none_or(|limit| u128::from(limit) * 4 / 5 >= value as u128)
        };
        low(self.arguments.max_length, self.ready.len() + self.kept.count)
            && low(self.arguments.max_length_bytes, self.ready.bytes() + self.kept.bytes)
    }

    /// Takes out a message that there is no room for.
    pub(crate) fn pop_over_limit(&mut self) -> Option<Entry> {
        let drops = self.arguments.overflow == Overflow::DropHead;
        if drops && self.is_over_limit(0, 0) { self.ready.pop() } else { None }
    }

    /// Whether there are more messages, or more bytes of them, than it may have, with that many more.
    fn is_over_limit(&self, messages: usize, bytes: usize) -> bool {
        let over =
            |limit: Option<u64>, value: usize| limit.is_some_and(|limit| value as u64 > limit);
        over(self.arguments.max_length, self.ready.len() + self.kept.count + messages)
            || over(self.arguments.max_length_bytes, self.ready.bytes() + self.kept.bytes + bytes)
    }
}
