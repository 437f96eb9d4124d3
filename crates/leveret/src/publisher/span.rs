//! The span of a publish, by the conventions of OpenTelemetry for messaging, and the trace context that a message takes
//! along from it.

use tracing::{Span, field};

use crate::amqp::{Properties, Table};
use crate::error::Error;
use crate::trace::TraceContext;

/// A publish that is traced, or nothing: then it costs nothing, either.
pub(super) struct PublishSpan(Option<Box<Traced>>);

struct Traced {
    /// Disabled if nobody collects spans.
    span: Span,
    /// Of the span itself, for what is published within it.
    context: TraceContext,
}

impl PublishSpan {
    /// Of one message.
    #[inline]
    pub(super) fn begin(exchange: &str, routing_key: &str) -> Self {
        PublishSpan::new(exchange, |span| {
            span.record("messaging.destination.name", format!("{exchange}:{routing_key}"));
            span.record("messaging.rabbitmq.destination.routing_key", routing_key);
        })
    }

    /// Of many.
    pub(super) fn of_batch(exchange: &str) -> Self {
        PublishSpan::new(exchange, |span| {
            span.record("messaging.destination.name", exchange);
        })
    }

    #[inline]
    fn new(exchange: &str, describe: impl FnOnce(&Span)) -> Self {
        let span = tracing::info_span!(
            target: "leveret",
            "publish",
            otel.name = field::Empty,
            otel.kind = "producer",
            messaging.system = "rabbitmq",
            messaging.operation.name = "publish",
            messaging.operation.type = "send",
            messaging.destination.name = field::Empty,
            messaging.rabbitmq.destination.routing_key = field::Empty,
            messaging.message.id = field::Empty,
            messaging.message.conversation_id = field::Empty,
            messaging.batch.message_count = field::Empty,
            error.type = field::Empty,
            trace_id = field::Empty,
            span_id = field::Empty,
            parent_id = field::Empty,
        );
        let parent = TraceContext::current();
        if span.is_disabled() && parent.is_none() {
            return PublishSpan(None);
        }
        let context = TraceContext::within(parent.as_ref());
        if !span.is_disabled() {
            let name = if exchange.is_empty() { "amq.default" } else { exchange };
            span.record("otel.name", format!("publish {name}"));
            describe(&span);
            context.record(&span, parent.as_ref());
        }
        PublishSpan(Some(Box::new(Traced { span, context })))
    }

    /// Gives a message the context, unless it has one.
    #[inline]
    pub(super) fn put_into(&self, properties: &mut Properties<'_>) {
        if let Some(traced) = &self.0 {
            traced.context.put_into(properties.headers.get_or_insert_with(Table::new));
        }
    }

    /// Gives the span what the message says of itself.
    #[inline]
    pub(super) fn describe(&self, properties: &Properties<'_>) {
        let Some(traced) = &self.0 else { return };
        if let Some(id) = &properties.message_id {
            traced.span.record("messaging.message.id", id.to_string());
        }
        if let Some(id) = &properties.correlation_id {
            traced.span.record("messaging.message.conversation_id", id.to_string());
        }
    }

    /// How many messages the batch had.
    pub(super) fn count(&self, messages: usize) {
        if let Some(traced) = &self.0 {
            traced.span.record("messaging.batch.message_count", messages);
        }
    }

    /// The span for the messages of a batch: they are published within it.
    pub(super) fn for_message(&self) -> Self {
        PublishSpan(
            self.0.as_ref().map(|traced| {
                Box::new(Traced { span: Span::none(), context: traced.context.clone() })
            }),
        )
    }

    /// It is over.
    #[inline]
    pub(super) fn end<T>(self, outcome: &Result<T, Error>) {
        if let (Some(traced), Err(error)) = (&self.0, outcome) {
            traced.span.record("error.type", field::debug(error.kind()));
        }
    }
}
