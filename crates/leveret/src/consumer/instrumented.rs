//! A handler that is counted and traced.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::FutureExt as _;
use tracing::{Instrument as _, Span};

use super::handler_tasks::Abandoned;
use super::incoming::Incoming;
use super::service::{Call, CatchPanic};
use crate::error::BoxError;
use crate::inbox::once::Passed;
use crate::telemetry::{Consumed, InFlight};
use crate::trace::{self, TraceContext};

/// A handler that is counted and traced.
pub(crate) struct InstrumentedHandler {
    call: Call,
    counts: Arc<Consumed>,
}

impl InstrumentedHandler {
    pub(crate) fn new(call: Call, counts: Arc<Consumed>) -> Self {
        InstrumentedHandler { call, counts }
    }

    /// Calls the handler and polls it once. Most wait for nothing: then no guard has to count them.
    #[inline]
    pub(super) fn start(&self, incoming: &Incoming) -> Started {
        let began = self.counts.enter(1);
        let mut handling = self.handling(incoming);
        match (&mut handling).now_or_never() {
            Some(outcome) => {
                if let Some((handled, failed)) = counted(&outcome) {
                    self.counts.end(began, handled, failed);
                }
                self.counts.leave(1);
                Started::Ended(outcome)
            }
            None => {
                let in_flight = self.counts.keep(began, 1);
                Started::Running(InstrumentedCall { handling, in_flight })
            }
        }
    }

    /// Calls the handler.
    pub(crate) fn call(&self, incoming: &Incoming) -> InstrumentedCall {
        let in_flight = self.counts.begin(1);
        InstrumentedCall { handling: self.handling(incoming), in_flight }
    }

    /// The handler, within the trace of the message if it has one.
    #[inline]
    fn handling(&self, incoming: &Incoming) -> CatchPanic<()> {
        let parent = TraceContext::of(incoming.raw_properties());
        if parent.is_none() && !trace::are_spans_wanted() {
            return self.call.call(incoming);
        }
        let span = process_span(incoming);
        if span.is_disabled() && parent.is_none() {
            return self.call.call(incoming);
        }
        let context = TraceContext::within(parent.as_ref());
        context.record(&span, parent.as_ref());
        let (call, incoming) = (self.call.clone(), incoming.clone());
        let handling = async move { call.call(&incoming).await };
        CatchPanic::new(|| Box::pin(context.scope(handling.instrument(span))))
    }
}

/// A handler that was polled once.
pub(super) enum Started {
    Ended(Result<(), BoxError>),
    Running(InstrumentedCall),
}

/// How many messages were handled and how many failed; `None` if the handler was abandoned.
#[inline]
fn counted(outcome: &Result<(), BoxError>) -> Option<(u64, u64)> {
    match outcome {
        Err(error) if error.is::<Abandoned>() => None,
        Err(error) if Passed::of(error).is_none() => Some((0, 1)),
        _ => Some((1, 0)),
    }
}

/// A call of a handler. Dropped, it no longer counts as in flight.
pub(crate) struct InstrumentedCall {
    handling: CatchPanic<()>,
    in_flight: InFlight,
}

impl Future for InstrumentedCall {
    type Output = Result<(), BoxError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = ready!(self.handling.poll_unpin(context));
        if let Some((handled, failed)) = counted(&outcome) {
            self.in_flight.end(handled, failed);
        }
        Poll::Ready(outcome)
    }
}

/// By the conventions of OpenTelemetry for messaging.
fn process_span(incoming: &Incoming) -> Span {
    if !trace::are_spans_wanted() {
        return Span::none();
    }
    let span = tracing::info_span!(
        target: "leveret",
        "process",
        otel.name = tracing::field::Empty,
        otel.kind = "consumer",
        messaging.system = "rabbitmq",
        messaging.operation.name = "process",
        messaging.operation.type = "process",
        messaging.destination.name = tracing::field::Empty,
        messaging.rabbitmq.destination.routing_key = tracing::field::Empty,
        messaging.rabbitmq.message.delivery_tag = incoming.delivery_tag(),
        messaging.message.id = tracing::field::Empty,
        messaging.message.conversation_id = tracing::field::Empty,
        trace_id = tracing::field::Empty,
        span_id = tracing::field::Empty,
        parent_id = tracing::field::Empty,
    );
    if span.is_disabled() {
        return span;
    }
    let (exchange, key) = (incoming.exchange(), incoming.routing_key());
    let destination = format!("{exchange}:{key}:{}", incoming.queue());
    span.record("otel.name", format!("process {}", incoming.queue()));
    span.record("messaging.destination.name", destination);
    span.record("messaging.rabbitmq.destination.routing_key", key.to_string());
    let properties = incoming.properties();
    if let Some(id) = properties.message_id {
        span.record("messaging.message.id", id.to_string());
    }
    if let Some(id) = properties.correlation_id {
        span.record("messaging.message.conversation_id", id.to_string());
    }
    span
}
