//! From a publish to queues: what is refused, what is sent back, what is confirmed.

use std::cell::LazyCell;
use std::sync::Arc;

use bytes::Bytes;
use leveret_wire::method::basic;
use leveret_wire::{EncodedProperties, RawProperties, ReplyCode, ShortStr};

use super::channel::Mode;
use super::watching::take_one;
use super::{ChannelId, ConnectionId, ExchangeId, QueueId, Vhost};
use crate::arguments::{Overflow, words};
use crate::death::Reason;
use crate::events::What;
use crate::message::{Aside, Message, Name, Parts};
use crate::outlet::Room;
use crate::profile::Profile;
use crate::queue::{Publisher, Queue};
use crate::refusal::Refusal;
use crate::users::Right;

/// A publish as it came.
#[derive(Debug)]
pub(crate) struct Incoming<'a> {
    pub(crate) exchange: ShortStr<'a>,
    pub(crate) routing_key: ShortStr<'a>,
    pub(crate) mandatory: bool,
    pub(crate) immediate: bool,
    pub(crate) properties: RawProperties,
    pub(crate) body: Bytes,
}

/// A publish that is in order, and where it goes.
#[derive(Debug)]
pub(super) struct Published {
    exchange: ExchangeId,
    message: Message,
    mandatory: bool,
    /// Where it was to go when it was published in a transaction, whatever has become of bindings since.
    routed: Option<Vec<(QueueId, Name)>>,
}

impl Published {
    /// How much memory it takes, about.
    pub(super) fn size(&self) -> usize {
        let routed = self.routed.as_ref().map_or(0, Vec::len);
        self.message.size() + routed * size_of::<(QueueId, Name)>()
    }
}

/// Flags of properties that ask for a closer look.
fn notable(profile: Profile) -> u16 {
    const ALWAYS: u16 = flag::HEADERS | flag::REPLY_TO | flag::EXPIRATION | flag::USER_ID;
    match profile {
        // It refuses modes that it does not know.
        Profile::RabbitMq3_10 => ALWAYS | flag::DELIVERY_MODE,
        Profile::RabbitMq4_3 => ALWAYS,
    }
}

mod flag {
    pub(super) const HEADERS: u16 = 1 << 13;
    pub(super) const DELIVERY_MODE: u16 = 1 << 12;
    pub(super) const REPLY_TO: u16 = 1 << 9;
    pub(super) const EXPIRATION: u16 = 1 << 8;
    pub(super) const USER_ID: u16 = 1 << 4;
}

fn flags(properties: &[u8]) -> u16 {
    match properties {
        [high, low, ..] => u16::from_be_bytes([*high, *low]),
        _ => 0,
    }
}

/// RabbitMQ breaks down over properties that it cannot read. It reads headers of any depth.
#[inline]
fn check_properties(properties: &RawProperties) -> Result<(), Refusal> {
    match properties.fault() {
        Some(error) if properties.get_of_any_depth().is_none() => {
            Err(Refusal::new(ReplyCode::INTERNAL_ERROR, error))
        }
        _ => Ok(()),
    }
}

impl Vhost {
    /// A client publishes.
    pub(crate) fn publish(
        &mut self,
        channel: ChannelId,
        incoming: Incoming<'_>,
    ) -> Result<(), Refusal> {
        if incoming.immediate {
            return Err(words::immediate());
        }
        let exchange = self.publishable(channel, &incoming.exchange)?;
        check_properties(&incoming.properties)?;
        self.tally.published += 1;
        let Incoming { routing_key, mandatory, mut properties, body, .. } = incoming;
        let (mut ttl, mut aside) = (None, Aside::default());
        if flags(properties.as_bytes()) & notable(self.profile) != 0 {
            let inspected = self.inspect(channel, &properties)?;
            (ttl, aside) = (inspected.ttl, inspected.aside);
            if let Some(altered) = inspected.altered {
                properties = altered;
            }
        }
        let parts = Parts {
            exchange: &self.exchanges[exchange].name,
            routing_key: &routing_key,
            properties: &properties,
            ttl,
            aside,
            body: self.scratch.release(body),
        };
        let message = Message::new(&mut self.scratch, parts);
        self.reply_while_routing(exchange, &message);
        let mut published = Published { exchange, message, mandatory, routed: None };
        if self.is_transactional(channel) {
            published.routed = Some(self.routed(exchange, &published.message));
            self.put_to_transaction(channel, published);
        } else {
            self.accept(channel, published)?;
        }
        Ok(())
    }

    fn is_transactional(&self, channel: ChannelId) -> bool {
        let found = self.channels.get(channel);
        found.is_some_and(|found| matches!(found.mode, Mode::Transaction(_)))
    }

    fn put_to_transaction(&mut self, channel: ChannelId, published: Published) {
        if let Some(Mode::Transaction(transaction)) =
            self.channels.get_mut(channel).map(|found| &mut found.mode)
        {
            self.memory += published.size();
            transaction.published.push(published);
        }
    }

    /// The queues that a message reaches now.
    fn routed(&mut self, exchange: ExchangeId, message: &Message) -> Vec<(QueueId, Name)> {
        let mut routes = std::mem::take(&mut self.routes);
        self.route_message(&mut routes, exchange, message);
        let named = |id: &QueueId| Some((*id, Name::clone(&self.queues.get(*id)?.name)));
        let routed = routes.queues.iter().filter_map(named).collect();
        self.routes = routes;
        routed
    }

    /// The queues of these names now, and whether all take the message. 3.10 passes over those that are gone, 4.3 breaks off.
    /// In 4.3 a classic queue that was deleted and declared again does not take what was meant for the former.
    fn still_there(&self, routed: &[(QueueId, Name)]) -> Result<(Vec<QueueId>, bool), Refusal> {
        let (mut there, mut all) = (Vec::new(), true);
        for (before, name) in routed {
            let now = self.queue_names.get(name.as_bytes()).copied();
            let Some(now) = now else {
                if self.profile.is_at_least_4() {
                    return Err(words::queue_gone(self.profile, &self.name, name));
                }
                continue;
            };
            let is_the_same = now == *before || self.queues[now].arguments.is_quorum();
            if is_the_same || !self.profile.is_at_least_4() {
                there.push(now);
            } else {
                all = false;
            }
        }
        Ok((there, all))
    }

    /// The exchange of this name, if the client may publish to it.
    #[inline]
    fn publishable(
        &mut self,
        channel: ChannelId,
        name: &ShortStr<'_>,
    ) -> Result<ExchangeId, Refusal> {
        let last = self.channels.get(channel).and_then(|found| found.last_exchange);
        if let Some(id) = last
            && self.exchanges.get(id).is_some_and(|exchange| *exchange.name == *name)
        {
            return Ok(id);
        }
        self.check_access(channel, Right::Write, "exchange", name)?;
        let id = self.exchange_named(name)?;
        if self.exchanges[id].internal {
            return Err(words::internal_exchange(&self.name, name));
        }
        if let Some(found) = self.channels.get_mut(channel) {
            found.last_exchange = Some(id);
        }
        Ok(id)
    }

    /// Routes a message, puts it into its queues, and answers for it. Says whether all of them took it.
    pub(super) fn accept(
        &mut self,
        channel: ChannelId,
        published: Published,
    ) -> Result<bool, Refusal> {
        let Published { exchange, message, mandatory, routed } = published;
        let still_there = routed.map(|routed| self.still_there(&routed)).transpose()?;
        let mut routes = std::mem::take(&mut self.routes);
        let mut taken = true;
        match still_there {
            Some((queues, all)) => (routes.queues, taken) = (queues, all),
            None => self.route_message(&mut routes, exchange, &message),
        }
        let mut replies = self.replies_routed(exchange, &message);
        if take_one(&mut self.planned.return_publishes) {
            routes.queues.clear();
            replies.clear();
        }
        let unroutable = routes.queues.is_empty() && replies.is_empty() && taken;
        self.note(&message, |vhost| {
            let mut to = vhost.queue_names_of(&routes.queues);
            to.extend(replies.iter().map(ToString::to_string));
            What::Published { to, returned: mandatory && unroutable }
        });
        if unroutable {
            self.tally.unroutable += 1;
            if mandatory {
                self.tally.returned += 1;
                self.send_back(channel, &message);
            }
        }
        if take_one(&mut self.planned.nack_publishes) {
            taken = false;
            routes.queues.clear();
            replies.clear();
            self.note(&message, |_| What::Refused { queue: None });
        }
        self.reply_directly(&replies, &message);
        for queue in &routes.queues {
            let took = self.enqueue(*queue, &message, 0, Some(Publisher::Client(channel)));
            if !took {
                let full = |vhost: &Vhost| What::Refused { queue: Some(vhost.queue_name(*queue)) };
                self.note(&message, full);
            }
            taken &= took;
        }
        self.routes = routes;
        self.bury();
        self.tally.nacked += u64::from(!taken);
        self.confirm(channel, taken);
        Ok(taken)
    }

    fn route_message(
        &self,
        routes: &mut super::routing::Routes,
        exchange: ExchangeId,
        message: &Message,
    ) {
        let aside = message.aside();
        let copies = aside.map_or(&[][..], |aside| &aside.copies);
        let key = message.routing_key();
        let properties = LazyCell::new(|| message.properties());
        let own = || aside.and_then(|aside| aside.headers.as_ref());
        let headers = || own().or_else(|| properties.headers.as_ref());
        if copies.is_empty() {
            self.route(routes, exchange, std::slice::from_ref(&key), &headers);
        } else {
            let keys: Vec<_> =
                std::iter::once(key).chain(copies.iter().map(ShortStr::borrowed)).collect();
            self.route(routes, exchange, &keys, &headers);
        }
    }

    /// Puts a message into a queue, or hands it to a consumer at once. Says whether it was taken.
    pub(super) fn enqueue(
        &mut self,
        id: QueueId,
        message: &Message,
        failures: u32,
        from: Option<Publisher>,
    ) -> bool {
        let now = self.now;
        if from.is_some_and(|from| self.is_new_publisher(id, from)) {
            self.forget_publishers(id);
        }
        let Some(queue) = self.queues.get_mut(id) else { return true };
        if queue.refuses(message, from) {
            if queue.arguments.overflow == Overflow::RejectPublishDlx {
                let entry = queue.admit(message.clone(), failures, now);
                self.memory += message.size();
                self.die(id, entry, Reason::MaxLen);
            }
            return false;
        }
        let quorum = queue.arguments.is_quorum();
        let entry = queue.admit(message.clone(), failures, now);
        self.memory += message.size();
        self.tally.enqueued += 1;
        if queue.ready.is_empty()
            && let Some(consumer) = self.next_consumer(id)
        {
            // A classic queue hands it on as new, even if it was in others before.
            let redelivered = quorum && entry.is_redelivered();
            self.deliver(id, consumer, entry, redelivered);
            self.ack_for_consumers();
            return true;
        }
        let Some(queue) = self.queues.get_mut(id) else { return true };
        queue.ready.push(entry);
        // A classic queue looks for what is due if its head has changed, as far as it can tell: not if a message of a higher
        // priority came.
        let alone = queue.ready.len() == 1 || quorum;
        if self.make_room(id) || alone {
            self.expire(id);
        }
        true
    }

    #[inline]
    fn is_new_publisher(&self, id: QueueId, publisher: Publisher) -> bool {
        let publishers = self.queues.get(id).and_then(|queue| queue.publishers.as_ref());
        publishers.is_some_and(|publishers| !publishers.knows(publisher))
    }

    /// A queue forgets those of its publishers that are gone.
    fn forget_publishers(&mut self, id: QueueId) {
        let publishers = self.queues.get_mut(id).and_then(|queue| queue.publishers.take());
        let Some(mut publishers) = publishers else { return };
        publishers.retain(|publisher| match publisher {
            Publisher::Client(channel) => self.channels.contains_key(channel),
            Publisher::DeadLetters(queue) => self.queues.contains_key(queue),
        });
        if let Some(queue) = self.queues.get_mut(id) {
            queue.publishers = Some(publishers);
        }
    }

    /// The oldest messages die that a queue has no room for. Says whether there were any.
    pub(super) fn make_room(&mut self, id: QueueId) -> bool {
        let mut dropped = false;
        while let Some(head) = self.queues.get_mut(id).and_then(Queue::pop_over_limit) {
            self.die(id, head, Reason::MaxLen);
            dropped = true;
        }
        if let Some(queue) = self.queues.get_mut(id) {
            queue.tell_publishers();
        }
        dropped
    }

    /// A message reached no queue, and its publisher wants to know.
    fn send_back(&mut self, channel: ChannelId, message: &Message) {
        let Some(found) = self.channels.get(channel) else { return };
        let returned = basic::Return {
            reply_code: ReplyCode::NO_ROUTE,
            reply_text: ShortStr::from_static("NO_ROUTE"),
            exchange: message.exchange().borrowed(),
            routing_key: message.routing_key(),
        };
        let properties = EncodedProperties::new(message.encoded_properties());
        let (wake, room) = found.outlet.deliver(|outbound, max| {
            outbound.relayed_content(found.number, &returned, &properties, message.body(), max)
        });
        if wake {
            self.wakes.push(Arc::clone(&found.outlet));
        }
        if room == Room::None {
            self.count_unread(found.connection, message.size());
        }
    }

    /// Who is connected on a channel.
    pub(super) fn user_of(&self, channel: ChannelId) -> &str {
        let channel = self.channels.get(channel);
        channel.map_or("", |found| self.user(found.connection))
    }

    pub(crate) fn user(&self, connection: ConnectionId) -> &str {
        self.connections.get(connection).map_or("", |connection| &connection.user)
    }
}
