//! The span of a publish, by the conventions of OpenTelemetry for messaging, and the trace context that a message takes
//! along from it.

use std::sync::Arc;

use tracing::{Span, field};

use crate::amqp::{Properties, Table};
use crate::error::Error;
use crate::trace::{self, TraceContext};

/// A publish that is traced, or nothing: then it costs nothing, either.
#[derive(Clone)]
pub(crate) struct PublishSpan(Option<Arc<Traced>>);

struct Traced {
    /// Disabled if nobody collects spans.
    span: Span,
    /// Of the span itself, for what is published within it.
    context: TraceContext,
}

macro_rules! span {
    ($name:literal, $kind:literal) => {
        tracing::info_span!(
            target: "leveret",
            $name,
            otel.name = field::Empty,
            otel.kind = $kind,
            messaging.system = "rabbitmq",
            messaging.operation.name = $name,
            messaging.operation.type = "send",
            messaging.destination.name = field::Empty,
            messaging.rabbitmq.destination.routing_key = field::Empty,
            messaging.message.id = field::Empty,
            messaging.message.conversation_id = field::Empty,
            messaging.batch.message_count = field::Empty,
            rpc.method = field::Empty,
            error.type = field::Empty,
            trace_id = field::Empty,
            span_id = field::Empty,
            parent_id = field::Empty,
        )
    };
}

impl PublishSpan {
    /// Of one message.
    #[inline]
    pub(crate) fn begin(exchange: &str, routing_key: &str) -> Self {
        PublishSpan::new(exchange, |span| {
            span.record("messaging.destination.name", format!("{exchange}:{routing_key}"));
            span.record("messaging.rabbitmq.destination.routing_key", routing_key);
        })
    }

    /// Of many.
    pub(crate) fn of_batch(exchange: &str) -> Self {
        PublishSpan::new(exchange, |span| {
            span.record("messaging.destination.name", exchange);
        })
    }

    /// Of a call: from the request to the last reply.
    #[inline]
    pub(crate) fn of_call(service: &str, method: &str) -> Self {
        let make = || span!("call", "client");
        PublishSpan::with(make, |span| {
            span.record("otel.name", format!("call {service}"));
            span.record("messaging.destination.name", service);
            span.record("rpc.method", method);
        })
    }

    /// None at all.
    pub(crate) fn none() -> Self {
        PublishSpan(None)
    }

    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_none()
    }

    #[inline]
    fn new(exchange: &str, describe: impl FnOnce(&Span)) -> Self {
        let make = || span!("publish", "producer");
        PublishSpan::with(make, |span| {
            let name = if exchange.is_empty() { "amq.default" } else { exchange };
            span.record("otel.name", format!("publish {name}"));
            describe(span);
        })
    }

    #[inline]
    fn with(make: impl FnOnce() -> Span, describe: impl FnOnce(&Span)) -> Self {
        let parent = TraceContext::current();
        if parent.is_none() && !trace::are_spans_wanted() {
            return PublishSpan(None);
        }
        let span = make();
        if span.is_disabled() && parent.is_none() {
            return PublishSpan(None);
        }
        let context = TraceContext::within(parent.as_ref());
        if !span.is_disabled() {
            describe(&span);
            context.record(&span, parent.as_ref());
        }
        PublishSpan(Some(Arc::new(Traced { span, context })))
    }

    /// Gives a message the context, unless it has one.
    #[inline]
    pub(crate) fn put_into(&self, properties: &mut Properties<'_>) {
        if let Some(traced) = &self.0 {
            traced.context.put_into(properties.headers.get_or_insert_with(Table::new));
        }
    }

    /// Gives the span what the message says of itself.
    #[inline]
    pub(crate) fn describe(&self, properties: &Properties<'_>) {
        let Some(traced) = &self.0 else { return };
        if let Some(id) = &properties.message_id {
            traced.span.record("messaging.message.id", id.to_string());
        }
        if let Some(id) = &properties.correlation_id {
            traced.span.record("messaging.message.conversation_id", id.to_string());
        }
    }

    /// How many messages the batch had.
    pub(crate) fn count(&self, messages: usize) {
        if let Some(traced) = &self.0 {
            traced.span.record("messaging.batch.message_count", messages);
        }
    }

    /// The span for the messages of a batch: they are published within it.
    pub(crate) fn for_message(&self) -> Self {
        PublishSpan(
            self.0.as_ref().map(|traced| {
                Arc::new(Traced { span: Span::none(), context: traced.context.clone() })
            }),
        )
    }

    /// How it went. It is over when the last clone is dropped.
    #[inline]
    pub(crate) fn record<T>(&self, outcome: &Result<T, Error>) {
        if let (Some(traced), Err(error)) = (&self.0, outcome) {
            traced.span.record("error.type", field::debug(error.kind()));
        }
    }
}
