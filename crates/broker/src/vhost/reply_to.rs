//! Direct reply-to: a reply goes straight to the channel that asked, without a queue.

use std::sync::Arc;

use bytes::Bytes;
use leveret_wire::method::{basic, queue};
use leveret_wire::{Properties, RawProperties, ReplyCode, ShortStr};

use super::channel::Replies;
use super::{ChannelId, Vhost};
use crate::arguments::{declared_name, words};
use crate::refusal::Refusal;

/// The name to consume from, and to put into `reply_to`.
const PSEUDO_QUEUE: &str = "amq.rabbitmq.reply-to";

impl Vhost {
    /// Whether a name is that of direct replies, or an address for one.
    pub(super) fn is_reply_address(&self, name: &ShortStr<'_>) -> bool {
        let rest = name.as_bytes().strip_prefix(PSEUDO_QUEUE.as_bytes());
        rest.is_some_and(|rest| rest.first() == Some(&b'.'))
    }

    /// Declares what stands for a queue of direct replies, if that is its name: it is there, or was never there. Whatever
    /// else is asked for makes no difference.
    pub(super) fn declare_replies(
        &self,
        name: &ShortStr<'_>,
    ) -> Option<Result<queue::DeclareOk<'static>, Refusal>> {
        let name = declared_name(name);
        let exists = name == PSEUDO_QUEUE || self.askers.contains_key(name.as_bytes());
        if !exists && !self.is_reply_address(&name) {
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

    /// A reply, from whoever answers, straight to who asked.
    pub(super) fn publish_reply(
        &mut self,
        from: ChannelId,
        address: &ShortStr<'_>,
        mandatory: bool,
        properties: &RawProperties,
        body: Bytes,
    ) -> Result<(), Refusal> {
        let asker = self.askers.get(address.as_bytes()).copied();
        let asker = asker.and_then(|id| self.channels.get_mut(id));
        if let Some(channel) = asker {
            let delivery_tag = channel.next_tag();
            let Some(replies) = &channel.replies else { return Ok(()) };
            let deliver = basic::Deliver {
                consumer_tag: replies.tag.borrowed(),
                delivery_tag,
                redelivered: false,
                exchange: ShortStr::default(),
                routing_key: address.borrowed(),
            };
            let put = channel.outlet.put(|outbound, max| {
                outbound.content(channel.number, &deliver, properties, &body, max)
            });
            if put {
                self.wakes.push(Arc::clone(&channel.outlet));
            }
        } else if mandatory && let Some(channel) = self.channels.get(from) {
            let returned = basic::Return {
                reply_code: ReplyCode::NO_ROUTE,
                reply_text: ShortStr::from_static("NO_ROUTE"),
                exchange: ShortStr::default(),
                routing_key: address.borrowed(),
            };
            let put = channel.outlet.put(|outbound, max| {
                outbound.content(channel.number, &returned, properties, &body, max)
            });
            if put {
                self.wakes.push(Arc::clone(&channel.outlet));
            }
        }
        self.confirm(from, true);
        Ok(())
    }
}
