//! Queues: declare, bind, purge, delete.

use std::sync::Arc;

use leveret_wire::method::queue;
use leveret_wire::{Method, ShortStr, Table, Value};

use super::exchanges::check_not_default;
use super::{ChannelId, Destination, QueueId, Vhost};
use crate::arguments::{self, QueueArguments, QueueDeclared, words};
use crate::events::Discarded;
use crate::queue::Queue;
use crate::refusal::Refusal;
use crate::time::Moment;
use crate::users::Right;

/// What names are made of.
const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// How many of them. As many as RabbitMQ's have: where it cuts a text off depends on the names in it.
const MADE: usize = 22;

/// Whether this may be what was put behind the prefix of a name.
pub(super) fn is_made(part: &[u8]) -> bool {
    part.len() == MADE && part.iter().all(|letter| LETTERS.contains(letter))
}

impl Vhost {
    /// A name that no one has.
    pub(super) fn make_name(&mut self, prefix: &str) -> ShortStr<'static> {
        use std::hash::BuildHasher;
        // Not to be guessed: a hasher's keys are random, and the count makes each one different.
        self.names_made += 1;
        let random = std::hash::RandomState::new();
        let (high, low) = (random.hash_one(self.names_made), random.hash_one(prefix));
        let mut bits = u128::from(high) << 64 | u128::from(low);
        let mut name = prefix.to_owned();
        for _ in 0..MADE {
            name.push(char::from(LETTERS[(bits % 64) as usize]));
            bits /= 64;
        }
        ShortStr::try_from(name).unwrap_or_default()
    }

    /// The name that a client means: an empty one is that of the queue it declared last.
    pub(super) fn named_queue(
        &self,
        channel: ChannelId,
        name: &ShortStr<'_>,
    ) -> Result<ShortStr<'static>, Refusal> {
        if !name.is_empty() {
            return Ok(name.borrowed().into_owned());
        }
        let last = self.channels.get(channel).and_then(|found| found.last_queue.clone());
        last.ok_or_else(words::no_last_queue)
    }

    /// The same where line breaks are taken out of names. What is nothing but line breaks is a name.
    fn declared_queue(
        &self,
        channel: ChannelId,
        name: &ShortStr<'_>,
    ) -> Result<ShortStr<'static>, Refusal> {
        let name = self.named_queue(channel, name)?;
        Ok(arguments::declared_name(&name).into_owned())
    }

    /// The queue of this name, if this connection may use it.
    pub(super) fn usable_queue(
        &self,
        channel: ChannelId,
        name: &ShortStr<'_>,
    ) -> Result<QueueId, Refusal> {
        let Some(id) = self.queue_names.get(name.as_bytes()).copied() else {
            return Err(words::no_queue(&self.name, name));
        };
        self.check_owner(channel, &self.queues[id])?;
        Ok(id)
    }

    fn check_owner(&self, channel: ChannelId, queue: &Queue) -> Result<(), Refusal> {
        let connection = self.channels.get(channel).map(|found| found.connection);
        match queue.owner {
            Some(owner) if Some(owner) != connection => {
                Err(words::owned_by_another(&self.name, &queue.name))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn declare_queue(
        &mut self,
        channel: ChannelId,
        declare: &queue::Declare<'_>,
    ) -> Result<(), Refusal> {
        self.refuse_declare_if_planned()?;
        let declared = match self.declare_replies(&declare.queue) {
            Some(declared) => declared?,
            None => self.declare_real_queue(channel, declare)?,
        };
        if let Some(found) = self.channels.get_mut(channel) {
            found.last_queue = Some(declared.queue.clone());
        }
        if !declare.nowait {
            self.reply_declared(channel, Method::QueueDeclareOk(declared));
        }
        Ok(())
    }

    fn declare_real_queue(
        &mut self,
        channel: ChannelId,
        declare: &queue::Declare<'_>,
    ) -> Result<queue::DeclareOk<'static>, Refusal> {
        let id = match declare.passive {
            true => self.declared_before(channel, &declare.queue)?,
            false => self.make_queue(channel, declare)?,
        };
        // To a quorum queue, to be declared again is no use.
        let queue = &self.queues[id];
        if !queue.arguments.is_quorum() || queue.last_used == Moment::NEVER {
            self.used(id);
        }
        let queue = &self.queues[id];
        Ok(queue::DeclareOk {
            queue: queue.name.borrowed().into_owned(),
            message_count: queue.ready.len() as u32,
            consumer_count: queue.consumer_count() as u32,
        })
    }

    fn declared_before(&self, channel: ChannelId, name: &ShortStr<'_>) -> Result<QueueId, Refusal> {
        let name = arguments::declared_name(name);
        self.check_any_access(channel, "queue", &name)?;
        self.usable_queue(channel, &name)
    }

    fn make_queue(
        &mut self,
        channel: ChannelId,
        declare: &queue::Declare<'_>,
    ) -> Result<QueueId, Refusal> {
        let name = arguments::declared_name(&declare.queue);
        let flags = QueueDeclared {
            durable: declare.durable,
            exclusive: declare.exclusive,
            auto_delete: declare.auto_delete,
            arguments: &declare.arguments,
        };
        let name = match name.is_empty() {
            true => {
                arguments::check_server_named(&declare.arguments)?;
                self.make_name("amq.gen-")
            }
            false => {
                arguments::check_queue_name(&name)?;
                name.into_owned()
            }
        };
        self.check_access(channel, Right::Configure, "queue", &name)?;
        if let Some(id) = self.queue_names.get(name.as_bytes()).copied() {
            let found = &self.queues[id];
            self.check_owner(channel, found)?;
            let current = QueueDeclared {
                durable: found.durable,
                exclusive: found.owner.is_some(),
                auto_delete: found.auto_delete,
                arguments: &found.table,
            };
            arguments::same_queue(self.profile, &self.name, &name, &current, &flags)?;
            return Ok(id);
        }
        self.check_dead_letter_access(channel, &name, &declare.arguments)?;
        let parsed = QueueArguments::parse(self.profile, &self.name, &name, &flags)?;
        let name = Arc::new(name);
        let table = declare.arguments.borrowed().into_owned();
        let mut queue = Queue::new(self.profile, Arc::clone(&name), parsed, table);
        queue.number = self.queues_made;
        self.queues_made += 1;
        queue.durable = declare.durable;
        queue.auto_delete = declare.auto_delete;
        let connection = self.channels.get(channel).map(|found| found.connection);
        queue.owner = connection.filter(|_| declare.exclusive);
        let id = self.queues.insert(queue);
        self.queue_names.insert((*name).clone(), id);
        Ok(id)
    }

    /// Who lets a queue dead-letter must be allowed to move its messages there. What else is wrong with its arguments is found
    /// later.
    fn check_dead_letter_access(
        &self,
        channel: ChannelId,
        name: &ShortStr<'_>,
        arguments: &Table<'_>,
    ) -> Result<(), Refusal> {
        let exchange = arguments.get("x-dead-letter-exchange");
        let exchange = exchange.as_ref().and_then(Value::as_str);
        if let Some(exchange) = exchange.and_then(|name| ShortStr::try_from(name).ok()) {
            self.check_access(channel, Right::Read, "queue", name)?;
            self.check_access(channel, Right::Write, "exchange", &exchange)?;
        }
        Ok(())
    }

    pub(super) fn bind_queue(
        &mut self,
        channel: ChannelId,
        bind: &queue::Bind<'_>,
    ) -> Result<(), Refusal> {
        let name = self.declared_queue(channel, &bind.queue)?;
        let source = &arguments::declared_name(&bind.exchange);
        // Neither named: the queue that was declared last, by its name.
        let key = match bind.queue.is_empty() && bind.routing_key.is_empty() {
            true => name.clone(),
            false => bind.routing_key.borrowed().into_owned(),
        };
        self.check_access(channel, Right::Write, "queue", &name)?;
        check_not_default(source)?;
        self.check_access(channel, Right::Read, "exchange", source)?;
        let exchange = self.exchange_named(source)?;
        let Some(queue) = self.queue_names.get(name.as_bytes()).copied() else {
            return Err(words::no_queue(&self.name, &name));
        };
        let kind = self.exchanges[exchange].kind;
        crate::exchange::validate(kind, self.profile, key.as_bytes(), &bind.arguments)?;
        self.check_owner(channel, &self.queues[queue])?;
        self.bind(exchange, Destination::Queue(queue), key.as_bytes(), &bind.arguments)?;
        if !bind.nowait {
            self.reply(channel, &queue::BindOk {});
        }
        Ok(())
    }

    pub(super) fn unbind_queue(
        &mut self,
        channel: ChannelId,
        unbind: &queue::Unbind<'_>,
    ) -> Result<(), Refusal> {
        let name = self.declared_queue(channel, &unbind.queue)?;
        let source = &arguments::declared_name(&unbind.exchange);
        let key = match unbind.queue.is_empty() && unbind.routing_key.is_empty() {
            true => name.clone(),
            false => unbind.routing_key.borrowed().into_owned(),
        };
        self.check_access(channel, Right::Write, "queue", &name)?;
        check_not_default(source)?;
        self.check_access(channel, Right::Read, "exchange", source)?;
        let queue = self.queue_names.get(name.as_bytes()).copied();
        let exchange = self.exchange_names.get(source.as_bytes()).copied();
        if let (Some(queue), Some(exchange)) = (queue, exchange) {
            let (to, key) = (Destination::Queue(queue), key.as_bytes());
            if self.exchanges[exchange].bindings.contains(key, &unbind.arguments, to) {
                self.check_owner(channel, &self.queues[queue])?;
            }
            self.unbind(exchange, to, key, &unbind.arguments);
        }
        self.reply(channel, &queue::UnbindOk {});
        Ok(())
    }

    pub(super) fn purge_queue(
        &mut self,
        channel: ChannelId,
        purge: &queue::Purge<'_>,
    ) -> Result<(), Refusal> {
        let name = self.named_queue(channel, &purge.queue)?;
        self.check_access(channel, Right::Read, "queue", &name)?;
        let id = self.usable_queue(channel, &name)?;
        self.expire_in_time(id);
        self.bury();
        let queue = &mut self.queues[id];
        let purged = queue.ready.drain();
        // 4.3 counts what is dead and kept, which stays.
        let kept = if self.profile.is_at_least_4() { queue.kept.count } else { 0 };
        self.look_after(id);
        self.tally.discarded += purged.len() as u64;
        self.note_discarded(&name.to_str_lossy(), &purged, Discarded::Purged);
        self.memory -= purged.iter().map(|entry| entry.message.size()).sum::<usize>();
        if !purge.nowait {
            self.reply(channel, &queue::PurgeOk { message_count: (purged.len() + kept) as u32 });
        }
        Ok(())
    }

    pub(super) fn delete_queue(
        &mut self,
        channel: ChannelId,
        delete: &queue::Delete<'_>,
    ) -> Result<(), Refusal> {
        let name = self.declared_queue(channel, &delete.queue)?;
        self.check_access(channel, Right::Configure, "queue", &name)?;
        let mut message_count = 0;
        if let Some(id) = self.queue_names.get(name.as_bytes()).copied() {
            self.check_owner(channel, &self.queues[id])?;
            let queue = &self.queues[id];
            arguments::check_queue_deletion(&self.name, &name, &queue.arguments, delete)?;
            if delete.if_empty && !queue.ready.is_empty() {
                return Err(words::queue_not_empty(&self.name, &name));
            }
            if delete.if_unused && !queue.turns.is_empty() {
                return Err(words::queue_in_use(&self.name, &name));
            }
            message_count = queue.ready.len() as u32;
            self.remove_queue(id);
        }
        if !delete.nowait {
            self.reply(channel, &queue::DeleteOk { message_count });
        }
        Ok(())
    }

    /// A queue is gone: so are its messages and bindings, and its consumers are told.
    pub(super) fn remove_queue(&mut self, id: QueueId) {
        let Some(mut queue) = self.queues.remove(id) else { return };
        self.queue_names.remove(&*queue.name);
        self.forget_kept(id, &queue.kept);
        let messages = queue.ready.drain();
        self.tally.discarded += messages.len() as u64;
        self.note_discarded(&queue.name.to_str_lossy(), &messages, Discarded::QueueDeleted);
        self.memory -= messages.iter().map(|entry| entry.message.size()).sum::<usize>();
        for consumer in queue.turns.iter() {
            self.cancel_by_broker(consumer);
        }
        self.unbind_from_all(queue.bound_to, Destination::Queue(id));
    }

    /// A queue that deletes itself does so when its last consumer has gone.
    pub(super) fn delete_if_left(&mut self, id: QueueId) {
        let queue = self.queues.get(id);
        if queue.is_some_and(|one| one.auto_delete && one.had_consumer && one.turns.is_empty()) {
            self.remove_queue(id);
        }
    }
}
