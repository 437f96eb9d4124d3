//! Direct reply-to: a reply goes straight to the channel that asked, without a queue.

use std::sync::Arc;

use leveret_wire::method::{basic, queue};
use leveret_wire::{EncodedProperties, Properties, ShortStr};

use super::channel::Replies;
use super::queues::is_made;
use super::{ChannelId, ExchangeId, Vhost};
use crate::arguments::{declared_name, words};
use crate::message::Message;
use crate::outlet::Room;
use crate::profile::Profile;
use crate::refusal::Refusal;

/// How much a client may leave unread before it gets no more direct replies: they are for those who wait for them, and nothing
/// else holds back a service that answers. Far more than calls at the same time ask for.
const MOST_UNREAD: usize = 64 * 1024 * 1024;

/// The name to consume from, and to put into `reply_to`.
const PSEUDO_QUEUE: &str = "amq.rabbitmq.reply-to";

/// What tells one address from others, if a name seems to be one.
fn secret_part<'n>(name: &'n ShortStr<'_>) -> Option<&'n [u8]> {
    name.as_bytes().strip_prefix(PSEUDO_QUEUE.as_bytes())?.strip_prefix(b".")
}

/// Whether someone may have got this address.
fn is_well_formed(name: &ShortStr<'_>) -> bool {
    secret_part(name).is_some_and(is_made)
}

impl Vhost {
    /// Declares what stands for a queue of direct replies, if that is its name: it is there, or was never there. Whatever
    /// else is asked for makes no difference.
    pub(super) fn declare_replies(
        &self,
        name: &ShortStr<'_>,
    ) -> Option<Result<queue::DeclareOk<'static>, Refusal>> {
        let name = declared_name(name);
        let exists = name == PSEUDO_QUEUE || self.askers.contains_key(name.as_bytes());
        if !exists && secret_part(&name).is_none() {
            return None;
        }
        Some(match exists {
            true => Ok(queue::DeclareOk {
                queue: name.into_owned(),
                message_count: 0,
                consumer_count: 1,
            }),
            false => Err(words::no_queue(&self.name, &name)),
        })
    }

    /// Begins to consume direct replies, if that is what is asked for.
    pub(super) fn consume_replies(
        &mut self,
        channel: ChannelId,
        consume: &basic::Consume<'_>,
    ) -> Option<Result<(), Refusal>> {
        (consume.queue == PSEUDO_QUEUE).then(|| self.begin_replies(channel, consume))
    }

    fn begin_replies(
        &mut self,
        channel: ChannelId,
        consume: &basic::Consume<'_>,
    ) -> Result<(), Refusal> {
        let tag = self.new_consumer_tag(channel, &consume.consumer_tag)?;
        if !consume.no_ack {
            return Err(words::replies_cannot_be_acked());
        }
        if self.channels.get(channel).is_some_and(|found| found.replies.is_some()) {
            return Err(words::replies_already_consumed());
        }
        let address = self.make_name("amq.rabbitmq.reply-to.");
        if let Some(found) = self.channels.get_mut(channel) {
            self.askers.insert(address.clone(), channel);
            found.replies = Some(Replies { tag: tag.clone(), address });
        }
        if !consume.nowait {
            self.reply(channel, &basic::ConsumeOk { consumer_tag: tag });
        }
        Ok(())
    }

    /// The address that goes into `reply_to`, if a direct reply is asked for.
    pub(super) fn direct_reply_address(
        &self,
        channel: ChannelId,
        properties: &Properties<'_>,
    ) -> Result<Option<ShortStr<'static>>, Refusal> {
        if properties.reply_to.as_ref().is_none_or(|reply_to| *reply_to != PSEUDO_QUEUE) {
            return Ok(None);
        }
        let replies = self.channels.get(channel).and_then(|found| found.replies.as_ref());
        match replies {
            Some(replies) => Ok(Some(replies.address.clone())),
            None => Err(Refusal::precondition_failed("fast reply consumer does not exist")),
        }
    }

    /// 3.10 sends direct replies while it looks for queues: in a transaction, too, and whether or not there are queues.
    pub(super) fn reply_while_routing(&mut self, exchange: ExchangeId, message: &Message) {
        if self.profile == Profile::RabbitMq3_10 {
            self.reply_directly(&self.reply_addresses(exchange, message), message);
        }
    }

    /// To 4.3 an address is a queue like others, even if nobody is there any more.
    pub(super) fn replies_routed<'m>(
        &self,
        exchange: ExchangeId,
        message: &'m Message,
    ) -> Vec<ShortStr<'m>> {
        match self.profile {
            Profile::RabbitMq3_10 => Vec::new(),
            Profile::RabbitMq4_3 => self.reply_addresses(exchange, message),
        }
    }

    /// The addresses of direct replies among the routing keys of a message.
    fn reply_addresses<'m>(&self, exchange: ExchangeId, message: &'m Message) -> Vec<ShortStr<'m>> {
        if exchange != self.default_exchange {
            return Vec::new();
        }
        let copies = message.aside().map_or(&[][..], |aside| &aside.copies);
        let keys = std::iter::once(message.routing_key());
        let keys = keys.chain(copies.iter().map(ShortStr::borrowed));
        let mut addresses: Vec<_> = keys.filter(is_well_formed).collect();
        addresses.sort_by(|one, other| one.as_bytes().cmp(other.as_bytes()));
        addresses.dedup();
        addresses
    }

    /// A reply, from whoever answers, straight to those who asked, are still there, and read.
    pub(super) fn reply_directly(&mut self, addresses: &[ShortStr<'_>], message: &Message) {
        for address in addresses {
            let asker = self.askers.get(address.as_bytes()).copied();
            let Some(id) = asker else { continue };
            let Some(channel) = self.channels.get_mut(id) else { continue };
            let connection = self.connections.get(channel.connection);
            if connection.is_none_or(|connection| connection.unread_replies >= MOST_UNREAD) {
                continue;
            }
            let delivery_tag = channel.next_tag();
            let Some(replies) = &channel.replies else { continue };
            let deliver = basic::Deliver {
                consumer_tag: replies.tag.borrowed(),
                delivery_tag,
                redelivered: false,
                exchange: ShortStr::default(),
                routing_key: message.routing_key(),
            };
            let properties = EncodedProperties::new(message.encoded_properties());
            let (wake, room) = channel.outlet.deliver(|outbound, max| {
                outbound.relayed_content(channel.number, &deliver, &properties, message.body(), max)
            });
            if wake {
                self.wakes.push(Arc::clone(&channel.outlet));
            }
            if room == Room::None {
                let connection = channel.connection;
                self.count_unread(connection, message.size());
                if let Some(connection) = self.connections.get_mut(connection) {
                    connection.unread_replies += message.size();
                }
            }
        }
    }
}
