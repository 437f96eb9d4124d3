//! A virtual host: exchanges, queues, channels and consumers as one state machine, without I/O and without a clock.

mod channel;
mod closing;
mod consuming;
mod dead_letters;
mod deadlines;
mod exchanges;
mod host;
mod inspecting;
mod methods;
mod publishing;
mod queues;
mod recording;
mod reply_to;
mod restarting;
mod routing;
mod settling;
#[cfg(test)]
mod tests;
mod timeouts;
mod unsettled;
mod watching;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use foldhash::HashSet;
use foldhash::fast::RandomState;
use leveret_wire::method::Encode;
use leveret_wire::{Method, ShortStr, Table};
use slotmap::SlotMap;

use crate::events::Record;
use crate::exchange::{Bindings, Kind};
use crate::message::{Name, Scratch};
use crate::outlet::{HIGH_WATER_MARK, Outlet};
use crate::profile::Profile;
use crate::queue::Queue;
use crate::snapshot::Tally;
use crate::time::{Clock, Moment};
use crate::users::Access;

pub(crate) use channel::{Channel, Consumer};
pub(crate) use host::Host;
pub(crate) use publishing::Incoming;
pub(crate) use watching::Planned;

slotmap::new_key_type! {
    pub(crate) struct ExchangeId;
    pub(crate) struct QueueId;
    pub(crate) struct ConsumerId;
    pub(crate) struct ChannelId;
    pub(crate) struct ConnectionId;
}

/// Where a binding leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Destination {
    Queue(QueueId),
    Exchange(ExchangeId),
}

/// An exchange.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub(crate) name: Name,
    pub(crate) kind: Kind,
    pub(crate) durable: bool,
    pub(crate) auto_delete: bool,
    pub(crate) internal: bool,
    pub(crate) arguments: Table<'static>,
    /// Where messages go that it has no binding for.
    pub(crate) alternate: Option<ShortStr<'static>>,
    pub(crate) bindings: Bindings<Destination>,
    /// The exchanges that have bindings to it.
    pub(crate) bound_to: HashSet<ExchangeId>,
}

/// Who connects.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) user: String,
    pub(crate) access: Arc<Access>,
    pub(crate) outlet: Arc<Outlet>,
    /// What it calls the connection.
    pub(crate) name: Option<String>,
    /// Where it is, unless it is in this process.
    pub(crate) peer: Option<SocketAddr>,
    /// It wants to be told when the broker cancels a consumer.
    pub(crate) hears_of_cancels: bool,
}

/// A connection, as far as the virtual host knows it.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) user: String,
    pub(crate) access: Arc<Access>,
    pub(crate) outlet: Arc<Outlet>,
    name: Option<String>,
    peer: Option<SocketAddr>,
    hears_of_cancels: bool,
    channels: Vec<ChannelId>,
    /// The numbers of channels that were closed from here, until its session is told.
    closed: Vec<u16>,
    /// The size of messages that went out when there was no room in its outlet, until the client has read them.
    unread: usize,
    /// Those of them that are direct replies.
    unread_replies: usize,
    /// Its outlet has no room: its consumers wait.
    full: bool,
}

impl Connection {
    /// How much of what is unread counts as memory. Less than an outlet has room for does not: it is not worth the connection,
    /// and nothing else would end the alarm.
    fn counted(&self) -> usize {
        if self.unread >= HIGH_WATER_MARK { self.unread } else { 0 }
    }
}

/// What a virtual host is to be like.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) profile: Profile,
    /// How long a delivery may be kept unless somebody says otherwise, in milliseconds.
    pub(crate) consumer_timeout: u64,
    /// Where events are noted, if they are.
    pub(crate) record: Option<Arc<Record>>,
}

type Names<K> = HashMap<ShortStr<'static>, K, RandomState>;

/// The state machine. See the module.
#[derive(Debug)]
pub(crate) struct Vhost {
    name: String,
    profile: Profile,
    clock: Clock,
    /// What time it is, as of this call.
    now: Moment,
    exchanges: SlotMap<ExchangeId, Exchange>,
    exchange_names: Names<ExchangeId>,
    default_exchange: ExchangeId,
    queues: SlotMap<QueueId, Queue>,
    queue_names: Names<QueueId>,
    channels: SlotMap<ChannelId, Channel>,
    consumers: SlotMap<ConsumerId, Consumer>,
    connections: SlotMap<ConnectionId, Connection>,
    deadlines: BinaryHeap<Reverse<(Moment, deadlines::Deadline)>>,
    /// How many there may be before those are looked for that nothing is there for any more.
    sweep_above: usize,
    consumer_timeout: u64,
    /// When deliveries are looked at that may have been kept for too long.
    next_timeout: Moment,
    /// What died in a queue and is yet to be dead-lettered.
    dying: VecDeque<dead_letters::Dying>,
    /// What died in a queue that keeps it until it has arrived elsewhere, and did not arrive.
    kept: Vec<dead_letters::Dying>,
    burials: dead_letters::Burials,
    /// Consumers of quorum queues with a limit, once for each delivery that needs no ack.
    to_be_acked: VecDeque<ConsumerId>,
    /// Channels with confirms that were not sent yet.
    unconfirmed: Vec<ChannelId>,
    /// Whose writers are to be woken at the end of this call.
    wakes: Vec<Arc<Outlet>>,
    scratch: Scratch,
    routes: routing::Routes,
    /// How much memory the messages in its queues take, about.
    memory: usize,
    /// Who gets the direct replies for an address.
    askers: Names<ChannelId>,
    names_made: u64,
    consumers_made: u64,
    queues_made: u64,
    /// Answers that a fault holds back.
    late: HashMap<u64, (ChannelId, Method<'static>)>,
    planned: Planned,
    tally: Tally,
    record: Option<Arc<Record>>,
}

impl Vhost {
    pub(crate) fn new(name: impl Into<String>, settings: Settings, clock: Clock) -> Self {
        let Settings { profile, consumer_timeout, record } = settings;
        let mut vhost = Vhost {
            name: name.into(),
            profile,
            clock,
            now: clock.now(),
            exchanges: SlotMap::with_key(),
            exchange_names: HashMap::default(),
            default_exchange: ExchangeId::default(),
            queues: SlotMap::with_key(),
            queue_names: HashMap::default(),
            channels: SlotMap::with_key(),
            consumers: SlotMap::with_key(),
            connections: SlotMap::with_key(),
            deadlines: BinaryHeap::new(),
            sweep_above: 0,
            consumer_timeout,
            next_timeout: Moment::NEVER,
            dying: VecDeque::new(),
            kept: Vec::new(),
            burials: dead_letters::Burials::new(),
            to_be_acked: VecDeque::new(),
            unconfirmed: Vec::new(),
            wakes: Vec::new(),
            scratch: Scratch::default(),
            routes: routing::Routes::default(),
            memory: 0,
            askers: HashMap::default(),
            names_made: 0,
            consumers_made: 0,
            queues_made: 0,
            late: HashMap::new(),
            planned: Planned::default(),
            tally: Tally::default(),
            record,
        };
        vhost.add_predeclared_exchanges();
        vhost
    }

    pub(crate) fn profile(&self) -> Profile {
        self.profile
    }

    // ---- connections and channels

    pub(crate) fn connect(&mut self, client: Client) -> ConnectionId {
        let Client { user, access, outlet, name, peer, hears_of_cancels } = client;
        self.connections.insert(Connection {
            user,
            access,
            outlet,
            name,
            peer,
            hears_of_cancels,
            channels: Vec::new(),
            closed: Vec::new(),
            unread: 0,
            unread_replies: 0,
            full: false,
        })
    }

    /// A connection is gone: its channels, consumers and exclusive queues go with it.
    pub(crate) fn disconnect(&mut self, connection: ConnectionId) {
        let channels = self.connections.get(connection).map(|one| one.channels.clone());
        self.end_channels(&channels.unwrap_or_default());
        let owned = |queue: &Queue| queue.owner == Some(connection);
        let exclusive: Vec<_> =
            self.queues.iter().filter(|(_, queue)| owned(queue)).map(|(id, _)| id).collect();
        for queue in exclusive {
            self.remove_queue(queue);
        }
        if let Some(gone) = self.connections.remove(connection) {
            self.memory -= gone.counted();
        }
    }

    pub(crate) fn open_channel(&mut self, connection: ConnectionId, number: u16) -> ChannelId {
        let outlet = match self.connections.get(connection) {
            Some(found) => Arc::clone(&found.outlet),
            None => Arc::new(Outlet::new()),
        };
        let id = self.channels.insert(Channel::new(connection, number, outlet));
        if let Some(found) = self.connections.get_mut(connection) {
            found.channels.push(id);
        }
        id
    }

    /// There is room again in a connection's outlet.
    pub(crate) fn drained(&mut self, connection: ConnectionId) {
        let Some(found) = self.connections.get_mut(connection) else { return };
        found.full = false;
        if found.unread > 0 {
            // Some went out since, and are still in the outlet. What found room there was not counted.
            self.memory -= found.counted();
            found.unread = found.unread.min(found.outlet.remaining_if_full());
            found.unread_replies = found.unread_replies.min(found.unread);
            self.memory += found.counted();
        }
        for channel in found.channels.clone() {
            self.resume_channel(channel);
        }
    }

    // ---- what goes out

    /// A message went out and there is no room for more: it counts until its client has read it, even if that has acked it before.
    pub(super) fn count_unread(&mut self, connection: ConnectionId, size: usize) {
        if let Some(connection) = self.connections.get_mut(connection) {
            connection.full = true;
            self.memory -= connection.counted();
            connection.unread += size;
            self.memory += connection.counted();
        }
    }

    /// Whether messages that count wait for a client to read them.
    pub(crate) fn has_unread(&self, connection: ConnectionId) -> bool {
        self.connections.get(connection).is_some_and(|found| found.counted() > 0)
    }

    /// Whether an outlet has no room for more messages.
    pub(crate) fn is_full(&self, connection: ConnectionId) -> bool {
        self.connections.get(connection).is_some_and(|found| found.full)
    }

    /// Sends a method on a channel.
    fn reply(&mut self, channel: ChannelId, method: &(impl Encode + ?Sized)) {
        if let Some(channel) = self.channels.get(channel)
            && channel.outlet.put(|outbound, max| outbound.method(channel.number, method, max))
        {
            self.wakes.push(Arc::clone(&channel.outlet));
        }
    }

    /// Answers a declare, at once unless a fault is asked for.
    fn reply_declared(&mut self, channel: ChannelId, declared: Method<'static>) {
        let (count, delay) = &mut self.planned.delay_declares;
        if watching::take_one(count) {
            let (at, number) = (self.now.after_millis(delay.as_millis() as u64), self.names_made);
            self.names_made += 1;
            self.late.insert(number, (channel, declared));
            self.set_deadline(at, deadlines::Deadline::Reply(number));
        } else {
            self.reply(channel, &declared);
        }
    }

    /// Sends what was held back to go out together, and says whom to wake for it.
    pub(crate) fn finish(&mut self) -> Vec<Arc<Outlet>> {
        for channel in std::mem::take(&mut self.unconfirmed) {
            self.flush_confirms(channel);
        }
        std::mem::take(&mut self.wakes)
    }

    /// A call begins.
    pub(crate) fn set_now(&mut self, now: Moment) {
        self.now = now;
        self.burials.renew();
    }
}
