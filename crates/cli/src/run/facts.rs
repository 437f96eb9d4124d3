//! What a handler outside of this program is told of a message, beside its body.

use leveret::Incoming;
use leveret::amqp::ShortStr;

/// Names and values: `routing-key`, `order.new`. Those that a message does not have are left out.
pub(super) fn facts(message: &Incoming) -> Vec<(&'static str, String)> {
    let properties = message.properties();
    let owned = |text: &ShortStr<'_>| text.to_str_lossy().into_owned();
    let text =
        |name, value: &Option<ShortStr<'_>>| value.as_ref().map(|value| (name, owned(value)));
    [
        Some(("queue", message.queue().to_owned())),
        Some(("exchange", owned(&message.exchange()))),
        Some(("routing-key", owned(&message.routing_key()))),
        Some(("attempt", message.attempt().to_string())),
        Some(("redelivered", message.redelivered().to_string())),
        text("message-id", &properties.message_id),
        text("content-type", &properties.content_type),
        text("correlation-id", &properties.correlation_id),
        text("reply-to", &properties.reply_to),
        text("type", &properties.kind),
        text("app-id", &properties.app_id),
        properties.timestamp.map(|seconds| ("timestamp", seconds.to_string())),
        properties.priority.map(|priority| ("priority", priority.to_string())),
    ]
    .into_iter()
    .flatten()
    .collect()
}
