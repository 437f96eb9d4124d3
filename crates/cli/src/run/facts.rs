//! What a handler outside of this program is told of a message, beside its body.

use leveret::Incoming;
use leveret::amqp::ShortStr;

use crate::message::property_facts;

/// Names and values: `routing-key`, `order.new`. Those that a message does not have are left out.
pub(super) fn facts(message: &Incoming) -> Vec<(&'static str, String)> {
    let owned = |text: &ShortStr<'_>| text.to_str_lossy().into_owned();
    let mut facts = vec![
        ("queue", message.queue().to_owned()),
        ("exchange", owned(&message.exchange())),
        ("routing-key", owned(&message.routing_key())),
        ("attempt", message.attempt().to_string()),
        ("redelivered", message.redelivered().to_string()),
    ];
    facts.extend(property_facts(&message.properties()));
    facts
}
