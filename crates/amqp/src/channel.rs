//! A channel: every method of the protocol as a call with named options.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use leveret_wire::method::{access, basic, channel, confirm, exchange, queue, tx};
use leveret_wire::{Content, ShortStr, Table};
use tokio::time::timeout;

use super::calls::{Reply, Subject};
use super::confirm::{ConfirmSink, Returned, Tally};
use super::consumer::{Bound, Consumer, ConsumerQueue};
use super::delivery::{Acker, Delivery, DeliveryInfo, Refused, is_of_stream};
use super::error::Error;
use super::link::Link;

/// Publishes are sent and forgotten.
#[derive(Debug)]
pub struct Plain(());

/// The broker answers each publish.
#[derive(Debug)]
pub struct Confirm(());

/// The broker answers each publish, to a [`ConfirmSink`] of the channel's owner.
#[derive(Debug)]
#[doc(hidden)]
pub struct Tracked(());

/// Publishes and acks wait for a commit.
#[derive(Debug)]
pub struct Tx(());

/// A channel of a [`Connection`](super::Connection).
///
/// A channel is opened plain, and may be turned into one with confirms or with transactions; the two exclude each
/// other, and there is no way back. All calls take `&self`: a channel may be shared between tasks.
///
/// If the broker closes the channel, every call under way and every later one says why; other channels go on. A channel
/// is closed by [`Channel::close`], or when it, its consumers and their deliveries are dropped.
#[derive(Debug)]
pub struct Channel<M = Plain> {
    pub(super) link: Arc<Link>,
    mode: PhantomData<M>,
}

/// How a queue is declared. The default is a durable queue of the broker's default type.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueOptions {
    /// Survives a restart of the broker.
    pub durable: bool,
    /// For this connection alone, and gone with it.
    pub exclusive: bool,
    /// Deleted when its last consumer goes.
    pub auto_delete: bool,
    /// `x-queue-type`, `x-message-ttl` and others.
    pub arguments: Table<'static>,
}

impl Default for QueueOptions {
    fn default() -> Self {
        QueueOptions {
            durable: true,
            exclusive: false,
            auto_delete: false,
            arguments: Table::new(),
        }
    }
}

/// How an exchange is declared. The default is a durable one.
#[derive(Clone, Debug, PartialEq)]
pub struct ExchangeOptions {
    /// Survives a restart of the broker.
    pub durable: bool,
    /// Deleted when its last binding goes.
    pub auto_delete: bool,
    /// Takes messages from other exchanges only.
    pub internal: bool,
    /// `alternate-exchange` and others.
    pub arguments: Table<'static>,
}

impl Default for ExchangeOptions {
    fn default() -> Self {
        ExchangeOptions {
            durable: true,
            auto_delete: false,
            internal: false,
            arguments: Table::new(),
        }
    }
}

/// The pseudo-queue of RabbitMQ's direct replies.
#[doc(hidden)]
pub const DIRECT_REPLIES: &str = "amq.rabbitmq.reply-to";

/// What the broker says of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueInfo {
    /// Its name, also if the broker chose it.
    pub name: String,
    /// Messages ready for delivery.
    pub messages: u32,
    /// Consumers on it.
    pub consumers: u32,
}

/// When a queue may be deleted. The default is always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeleteQueue {
    /// Only if it has no consumers.
    pub if_unused: bool,
    /// Only if it has no messages.
    pub if_empty: bool,
}

/// How a queue is consumed.
#[derive(Clone, Debug, PartialEq)]
pub struct ConsumeOptions {
    /// The consumer's name on this channel; one is made if it is empty.
    pub tag: String,
    /// How many deliveries may be unsettled at a time; 0 = as many as [`Limits::consumer_buffer`](super::Limits) says. 100 by default.
    /// Without meaning with `auto_ack`.
    pub prefetch: u16,
    /// Deliveries count as settled when they are sent: fast, and lost with the connection. The broker sends them as
    /// quickly as it can, and all that holds it back is not to read from the connection; so a consumer that may be
    /// slow, or that awaits something on the same connection, should have a connection of its own.
    pub auto_ack: bool,
    /// No other consumer beside this one.
    pub exclusive: bool,
    /// Higher ones are served first; 0 is the broker's default.
    pub priority: i32,
    /// `x-stream-offset` and others.
    pub arguments: Table<'static>,
}

impl Default for ConsumeOptions {
    fn default() -> Self {
        ConsumeOptions {
            tag: String::new(),
            prefetch: 100,
            auto_ack: false,
            exclusive: false,
            priority: 0,
            arguments: Table::new(),
        }
    }
}

impl Channel<Plain> {
    pub(super) async fn open(link: Link) -> Result<Self, Error> {
        let link = Arc::new(link);
        link.call::<channel::OpenOk>(&channel::Open {}).await?;
        Ok(Channel { link, mode: PhantomData })
    }

    /// Turns confirms on: each publish gets an outcome.
    pub async fn into_confirm(self) -> Result<Channel<Confirm>, Error> {
        self.link.call::<confirm::SelectOk>(&confirm::Select { nowait: false }).await?;
        Ok(Channel { link: self.link, mode: PhantomData })
    }

    /// The same, with a sink of the caller's in place of confirmations.
    #[doc(hidden)]
    pub async fn into_tracked(self, sink: Arc<dyn ConfirmSink>) -> Result<Channel<Tracked>, Error> {
        self.link.channel.set_sink(sink);
        self.link.call::<confirm::SelectOk>(&confirm::Select { nowait: false }).await?;
        Ok(Channel { link: self.link, mode: PhantomData })
    }

    /// Turns transactions on: publishes and acks happen when they are committed.
    pub async fn into_tx(self) -> Result<Channel<Tx>, Error> {
        self.link.channel.tx.store(true, Ordering::Relaxed);
        self.link.call::<tx::SelectOk>(&tx::Select {}).await?;
        Ok(Channel { link: self.link, mode: PhantomData })
    }

    /// Messages that were mandatory and came back, the last 1024 since the last call. That one is not among them says
    /// nothing: it may yet come back.
    pub fn take_returned(&self) -> Vec<Returned> {
        self.link.take_returned()
    }
}

impl Channel<Confirm> {
    /// Waits until every publish so far has its outcome, and says how many got which since the channel was opened.
    pub async fn confirmed(&self, patience: Duration) -> Result<Tally, Error> {
        self.link.until_confirmed(patience).await?;
        Ok(self.tally())
    }

    /// How many publishes there are from the oldest unconfirmed one on; 0 if all have their outcome.
    pub fn unconfirmed(&self) -> usize {
        self.link.channel.confirms.exact_span()
    }

    /// How many publishes there may be from the oldest unconfirmed one on, before the next one waits, on this channel
    /// instead of [`Limits::max_unconfirmed`](super::Limits::max_unconfirmed).
    pub fn limit_unconfirmed(&self, publishes: usize) {
        self.link.channel.max_unconfirmed.store(publishes.max(1), Ordering::Relaxed);
    }

    /// How many publishes got which outcome since the channel was opened, whether it still is or not.
    pub fn tally(&self) -> Tally {
        self.link.channel.confirms.tally()
    }

    /// Messages that were mandatory, came back, and were published before confirms were turned on.
    pub fn take_returned(&self) -> Vec<Returned> {
        self.link.take_returned()
    }
}

impl Channel<Tracked> {
    /// Waits until every publish so far is confirmed, rejected, returned or lost.
    #[doc(hidden)]
    pub async fn confirmed(&self, patience: Duration) -> Result<(), Error> {
        self.link.until_confirmed(patience).await
    }
}

impl Channel<Tx> {
    /// Lets the publishes and acks since the last commit happen.
    pub async fn commit(&self) -> Result<(), Error> {
        self.link.commit().await
    }

    /// Forgets the publishes and acks since the last commit. Deliveries that were acked are unsettled again, and
    /// can no longer be settled from here: [`Channel::recover`] has them delivered anew.
    pub async fn rollback(&self) -> Result<(), Error> {
        self.link.call::<tx::RollbackOk>(&tx::Rollback {}).await?;
        Ok(())
    }

    /// Messages that were mandatory and came back, the last 1024 since the last call. They come with the commit.
    pub fn take_returned(&self) -> Vec<Returned> {
        self.link.take_returned()
    }
}

impl<M> Channel<M> {
    /// Another handle to a channel that is open for a consumer.
    pub(super) fn over(link: Arc<Link>) -> Self {
        Channel { link, mode: PhantomData }
    }

    /// Its number on the connection.
    pub fn id(&self) -> u16 {
        self.link.channel.id
    }

    /// Whether it is open, or why not.
    pub fn check_open(&self) -> Result<(), Error> {
        self.link.channel.check_open()
    }

    /// Whether the channel is gone or about to be: with a connection that is lost, sending fails a moment before its channels
    /// tell so.
    #[doc(hidden)]
    pub fn is_gone(&self) -> bool {
        !self.link.connection.core.sender.is_open() || self.check_open().is_err()
    }

    /// Waits until the channel is closed, by whomever, and says why.
    pub async fn ended(&self) -> Error {
        self.link.channel.ended().await
    }

    /// Declares a queue; with an empty name, the broker chooses one.
    pub async fn declare_queue(
        &self,
        name: &str,
        options: QueueOptions,
    ) -> Result<QueueInfo, Error> {
        let declare = queue::Declare {
            queue: name.try_into()?,
            passive: false,
            durable: options.durable,
            exclusive: options.exclusive,
            auto_delete: options.auto_delete,
            nowait: false,
            arguments: options.arguments,
        };
        self.link.call::<queue::DeclareOk<'_>>(&declare).await.map(QueueInfo::from)
    }

    /// Asks about a queue. If there is none, the broker closes the channel with 404.
    pub async fn inspect_queue(&self, name: &str) -> Result<QueueInfo, Error> {
        let declare =
            queue::Declare { queue: name.try_into()?, passive: true, ..Default::default() };
        self.link.call::<queue::DeclareOk<'_>>(&declare).await.map(QueueInfo::from)
    }

    /// Has messages flow from an exchange to a queue.
    pub async fn bind_queue(
        &self,
        queue: &str,
        exchange: &str,
        routing_key: &str,
        arguments: &Table<'_>,
    ) -> Result<(), Error> {
        let bind = queue::Bind {
            queue: queue.try_into()?,
            exchange: exchange.try_into()?,
            routing_key: routing_key.try_into()?,
            nowait: false,
            arguments: arguments.borrowed(),
        };
        self.link.call::<queue::BindOk>(&bind).await?;
        Ok(())
    }

    /// Undoes [`Channel::bind_queue`].
    pub async fn unbind_queue(
        &self,
        queue: &str,
        exchange: &str,
        routing_key: &str,
        arguments: &Table<'_>,
    ) -> Result<(), Error> {
        let unbind = queue::Unbind {
            queue: queue.try_into()?,
            exchange: exchange.try_into()?,
            routing_key: routing_key.try_into()?,
            arguments: arguments.borrowed(),
        };
        self.link.call::<queue::UnbindOk>(&unbind).await?;
        Ok(())
    }

    /// Drops all messages of a queue that are ready for delivery, and says how many.
    pub async fn purge_queue(&self, queue: &str) -> Result<u32, Error> {
        let purge = queue::Purge { queue: queue.try_into()?, nowait: false };
        Ok(self.link.call::<queue::PurgeOk>(&purge).await?.message_count)
    }

    /// Deletes a queue, and says how many messages went with it. Deleting one that does not exist is no error.
    pub async fn delete_queue(&self, queue: &str, when: DeleteQueue) -> Result<u32, Error> {
        let DeleteQueue { if_unused, if_empty } = when;
        let delete = queue::Delete { queue: queue.try_into()?, if_unused, if_empty, nowait: false };
        Ok(self.link.call::<queue::DeleteOk>(&delete).await?.message_count)
    }

    /// Declares an exchange of a type: `direct`, `fanout`, `topic`, `headers`, or a plugin's.
    pub async fn declare_exchange(
        &self,
        name: &str,
        kind: &str,
        options: ExchangeOptions,
    ) -> Result<(), Error> {
        let declare = exchange::Declare {
            exchange: name.try_into()?,
            kind: kind.try_into()?,
            passive: false,
            durable: options.durable,
            auto_delete: options.auto_delete,
            internal: options.internal,
            nowait: false,
            arguments: options.arguments,
        };
        self.link.call::<exchange::DeclareOk>(&declare).await?;
        Ok(())
    }

    /// Asks whether an exchange exists. If not, the broker closes the channel with 404.
    pub async fn inspect_exchange(&self, name: &str) -> Result<(), Error> {
        let declare =
            exchange::Declare { exchange: name.try_into()?, passive: true, ..Default::default() };
        self.link.call::<exchange::DeclareOk>(&declare).await?;
        Ok(())
    }

    /// Deletes an exchange. Deleting one that does not exist is no error.
    pub async fn delete_exchange(&self, name: &str, when: DeleteExchange) -> Result<(), Error> {
        let if_unused = when == DeleteExchange::IfUnused;
        let delete = exchange::Delete { exchange: name.try_into()?, if_unused, nowait: false };
        self.link.call::<exchange::DeleteOk>(&delete).await?;
        Ok(())
    }

    /// Has messages flow from one exchange to another.
    pub async fn bind_exchange(
        &self,
        destination: &str,
        source: &str,
        routing_key: &str,
        arguments: &Table<'_>,
    ) -> Result<(), Error> {
        let bind = exchange::Bind {
            destination: destination.try_into()?,
            source: source.try_into()?,
            routing_key: routing_key.try_into()?,
            nowait: false,
            arguments: arguments.borrowed(),
        };
        self.link.call::<exchange::BindOk>(&bind).await?;
        Ok(())
    }

    /// Undoes [`Channel::bind_exchange`].
    pub async fn unbind_exchange(
        &self,
        destination: &str,
        source: &str,
        routing_key: &str,
        arguments: &Table<'_>,
    ) -> Result<(), Error> {
        let unbind = exchange::Unbind {
            destination: destination.try_into()?,
            source: source.try_into()?,
            routing_key: routing_key.try_into()?,
            nowait: false,
            arguments: arguments.borrowed(),
        };
        self.link.call::<exchange::UnbindOk>(&unbind).await?;
        Ok(())
    }

    /// Consumes a queue.
    pub async fn consume(&self, queue: &str, options: ConsumeOptions) -> Result<Consumer, Error> {
        let limits = &self.link.connection.core.limits;
        let prefetch = match options.prefetch {
            0 => u16::try_from(limits.consumer_buffer).unwrap_or(u16::MAX),
            prefetch => prefetch,
        };
        let bound = match options.auto_ack {
            true => Bound { messages: limits.consumer_buffer, bytes: limits.consumer_buffer_bytes },
            // The broker sees to it: there are never more than the prefetch, or those that a recover sent twice.
            false => Bound { messages: usize::MAX, bytes: usize::MAX },
        };
        let tag = match options.tag.as_str() {
            "" => ShortStr::try_from(self.link.connection.core.next_consumer_tag())?,
            tag => ShortStr::try_from(tag)?.into_owned(),
        };
        let mut arguments = options.arguments;
        if options.priority != 0 {
            arguments.insert("x-priority", options.priority)?;
        }
        let consume = basic::Consume {
            queue: queue.try_into()?,
            consumer_tag: tag.borrowed(),
            no_local: false,
            no_ack: options.auto_ack,
            exclusive: options.exclusive,
            nowait: false,
            arguments,
        };
        let replies = queue == DIRECT_REPLIES;
        let waiting = ConsumerQueue::new(tag.clone(), options.auto_ack, replies, bound);
        let waiting = Arc::new(waiting);
        // Should this future be dropped, the consumer goes with it, and what the broker has begun is cancelled.
        let consumer = Consumer::new(Arc::clone(&self.link), Arc::clone(&waiting));
        // The prefetch that is set is that of the next consumer, so there must be no other in between.
        let _alone = self.link.channel.consuming.lock().await;
        self.link.channel.add_consumer(&waiting)?;
        if !options.auto_ack {
            self.link.channel.takes.store(true, Ordering::Relaxed);
            let qos = basic::Qos { prefetch_size: 0, prefetch_count: prefetch, global: false };
            self.link.call::<basic::QosOk>(&qos).await?;
            // RabbitMQ takes that for the end of the limit for all, as long as it has one.
            let limit = self.link.channel.prefetch_for_all.load(Ordering::Relaxed);
            if limit > 0 && self.link.connection.core.agreed.has_prefetch_for_all() {
                self.prefetch_for_all(limit).await?;
            }
        }
        let subject = Subject::Consumer(tag.clone(), Some(waiting));
        self.link.request(&consume, subject).await?;
        Ok(consumer)
    }

    /// Takes one message from a queue, if it has one.
    pub async fn get(&self, queue: &str, options: GetOptions) -> Result<Option<Delivery>, Error> {
        let get = basic::Get { queue: queue.try_into()?, no_ack: options.auto_ack };
        self.link.channel.takes.fetch_or(!options.auto_ack, Ordering::Relaxed);
        let subject = Subject::Get { auto_ack: options.auto_ack };
        let Reply::Got(got) = self.link.request(&get, subject).await? else { return Ok(None) };
        let Some(content) = got.take() else { return Ok(None) };
        let Content { method, properties, body } = *content;
        let link = (!options.auto_ack).then(|| Arc::clone(&self.link));
        let acker = Acker::new(link, method.delivery_tag, is_of_stream(&properties));
        let content = Content { method: DeliveryInfo::of_get(&method), properties, body };
        Ok(Some(Delivery::new(acker, content)))
    }

    /// Acks a delivery that was let go of without settling it.
    #[doc(hidden)]
    pub fn ack(&self, tag: u64) -> Result<(), Error> {
        self.link.ack(tag)
    }

    /// This delivery and all before it that are not settled go back to their queues.
    #[doc(hidden)]
    pub fn requeue_through(&self, tag: u64) -> Result<(), Error> {
        self.link.nack_through(tag, Refused::Requeue)
    }

    /// Has all deliveries of this channel that are not settled delivered anew, to whoever is free. The old ones can
    /// no longer be settled: doing so sends nothing.
    pub async fn recover(&self) -> Result<(), Error> {
        self.link.recover().await
    }

    /// The same as [`Channel::recover`], by `basic.recover-async`, which the broker does not answer: this resolves when it
    /// is in the outbound buffer. From then on no delivery can be settled until the first new one has come. Obsolete,
    /// as the specification has it.
    pub async fn recover_async(&self) -> Result<(), Error> {
        self.link.recover_async()
    }

    /// Limits how much may be delivered to all consumers of the channel together. (From 4.3 on, RabbitMQ accepts this
    /// and does not do it.)
    pub async fn prefetch_for_all(&self, prefetch: u16) -> Result<(), Error> {
        self.link.channel.prefetch_for_all.store(prefetch, Ordering::Relaxed);
        let qos = basic::Qos { prefetch_size: 0, prefetch_count: prefetch, global: true };
        self.link.call::<basic::QosOk>(&qos).await?;
        Ok(())
    }

    /// Asks the broker to pause deliveries on this channel, or to go on. (RabbitMQ closes the connection with 540 when
    /// asked to pause: there, cancel the consumers.)
    pub async fn flow(&self, flow: Flow) -> Result<(), Error> {
        let active = flow == Flow::Resume;
        self.link.channel.deliveries_paused.store(!active, Ordering::Relaxed);
        self.link.call::<channel::FlowOk>(&channel::Flow { active }).await?;
        Ok(())
    }

    /// Closes the channel without waiting for anything: what is not confirmed is lost.
    pub fn close_now(&self) {
        self.link.connection.core.close_channel(&self.link.channel, &super::link::closed_here());
    }

    /// Asks for access to a realm, and gives the ticket for it. Obsolete: no method has needed a ticket since AMQP 0-8,
    /// and RabbitMQ says yes to everybody. What a user may do is told by its permissions.
    pub async fn request_access(&self, realm: &str, access: Access) -> Result<u16, Error> {
        let request = access::Request {
            realm: realm.try_into()?,
            exclusive: access.exclusive,
            passive: access.passive,
            active: access.active,
            write: access.write,
            read: access.read,
        };
        Ok(self.link.call::<access::RequestOk>(&request).await?.ticket)
    }

    /// Closes the channel: waits for outstanding confirms, then for the broker's agreement, each up to a deadline.
    ///
    /// Closing twice is no error. If the channel was closed before by the broker, or by a call without a reply, that
    /// is the error.
    pub async fn close(&self) -> Result<(), Error> {
        let patience = self.link.connection.core.limits.reply_timeout;
        let _ = timeout(patience, self.link.channel.until_confirmed()).await;
        self.link.close().await
    }
}

/// When an exchange may be deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeleteExchange {
    /// Whatever is bound to it.
    #[default]
    Always,
    /// Only if nothing is bound to it.
    IfUnused,
}

/// Whether deliveries are wanted on a channel, for [`Channel::flow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// They are.
    Resume,
    /// Not now.
    Pause,
}

/// What is asked for with [`Channel::request_access`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Nobody else shall have it.
    pub exclusive: bool,
    /// To ask about what there is.
    pub passive: bool,
    /// To declare and delete.
    pub active: bool,
    /// To publish.
    pub write: bool,
    /// To consume.
    pub read: bool,
}

/// How a message is taken by [`Channel::get`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GetOptions {
    /// It counts as settled when it is sent.
    pub auto_ack: bool,
}

impl From<queue::DeclareOk<'_>> for QueueInfo {
    fn from(declared: queue::DeclareOk<'_>) -> Self {
        QueueInfo {
            name: declared.queue.to_string(),
            messages: declared.message_count,
            consumers: declared.consumer_count,
        }
    }
}
