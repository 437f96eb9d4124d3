//! The short strings of a method, which have to be text.

use leveret_wire::method::{basic, channel, exchange, queue};
use leveret_wire::{Method, ShortStr};

/// Whether all short strings of a method on a channel are UTF-8. Those of `basic.publish` need not be, and are not asked
/// for here.
pub(super) fn are_utf8(method: &Method<'_>) -> bool {
    let utf8 = |texts: &[&ShortStr<'_>]| texts.iter().all(|text| text.to_str().is_ok());
    match method {
        Method::ChannelClose(channel::Close { reply_text, .. }) => utf8(&[reply_text]),

        Method::ExchangeDeclare(exchange::Declare { exchange, kind, .. }) => {
            utf8(&[exchange, kind])
        }
        Method::ExchangeDelete(exchange::Delete { exchange, .. }) => utf8(&[exchange]),
        Method::ExchangeBind(exchange::Bind { destination, source, routing_key, .. })
        | Method::ExchangeUnbind(exchange::Unbind { destination, source, routing_key, .. }) => {
            utf8(&[destination, source, routing_key])
        }

        Method::QueueDeclare(queue::Declare { queue, .. })
        | Method::QueuePurge(queue::Purge { queue, .. })
        | Method::QueueDelete(queue::Delete { queue, .. })
        | Method::BasicGet(basic::Get { queue, .. }) => utf8(&[queue]),
        Method::QueueBind(queue::Bind { queue, exchange, routing_key, .. })
        | Method::QueueUnbind(queue::Unbind { queue, exchange, routing_key, .. }) => {
            utf8(&[queue, exchange, routing_key])
        }

        Method::BasicConsume(basic::Consume { queue, consumer_tag, .. }) => {
            utf8(&[queue, consumer_tag])
        }
        Method::BasicCancel(basic::Cancel { consumer_tag, .. })
        | Method::BasicCancelOk(basic::CancelOk { consumer_tag }) => utf8(&[consumer_tag]),
        _ => true,
    }
}
