//! Trace context: which trace a message belongs to, in its headers as W3C has it (`traceparent`, `tracestate`,
//! `baggage`).
//!
//! A handler runs within the context of its message, and what it publishes carries it on. Elsewhere a context is entered
//! with [`TraceContext::scope`]: from an incoming HTTP request, for example.

use std::fmt;
use std::str::FromStr;

use tracing::level_filters::LevelFilter;
use tracing::{Level, Span};

use crate::amqp::{RawProperties, Table};
use crate::random;

const PARENT: &str = "traceparent";
const STATE: &str = "tracestate";
const BAGGAGE: &str = "baggage";

tokio::task_local! {
    static CURRENT: TraceContext;
}

/// The place of something in a trace, by the [W3C recommendation](https://www.w3.org/TR/trace-context/).
///
/// ```
/// use leveret::TraceContext;
///
/// let context: TraceContext = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".parse().unwrap();
/// assert_eq!(context.trace_id(), "0af7651916cd43dd8448eb211c80319c");
/// assert_eq!(context.child().trace_id(), context.trace_id());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    trace_id: u128,
    span_id: u64,
    flags: u8,
    state: Option<String>,
    baggage: Option<String>,
}

impl TraceContext {
    /// The beginning of a new trace, which is to be recorded.
    pub fn root() -> Self {
        let trace_id = random::id();
        let (state, baggage) = (None, None);
        TraceContext { trace_id: trace_id.max(1), span_id: new_span(), flags: 1, state, baggage }
    }

    /// Something that happens because of this, in the same trace.
    pub fn child(&self) -> Self {
        TraceContext { span_id: new_span(), ..self.clone() }
    }

    /// The context that the caller runs in, if it runs in one.
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Clone::clone).ok()
    }

    /// Runs a future in this context: what it publishes belongs to the trace.
    pub async fn scope<F: Future>(self, future: F) -> F::Output {
        CURRENT.scope(self, future).await
    }

    /// The trace, as 32 hexadecimal digits.
    pub fn trace_id(&self) -> String {
        format!("{:032x}", self.trace_id)
    }

    /// The place in it, as 16 hexadecimal digits.
    pub fn span_id(&self) -> String {
        format!("{:016x}", self.span_id)
    }

    /// Whether the trace is recorded.
    pub fn is_sampled(&self) -> bool {
        self.flags & 1 == 1
    }

    /// The context in the headers of a message, if it has a sound one.
    #[inline]
    pub(crate) fn of(properties: &RawProperties) -> Option<Self> {
        if properties.has_headers() { TraceContext::read(properties) } else { None }
    }

    fn read(properties: &RawProperties) -> Option<Self> {
        let mut context: TraceContext = properties.header(PARENT)?.as_str()?.parse().ok()?;
        let text = |name| properties.header(name)?.as_str().map(str::to_owned);
        (context.state, context.baggage) = (text(STATE), text(BAGGAGE));
        Some(context)
    }

    /// The context of what is made of a message with this one, or of the beginning of a trace.
    pub(crate) fn within(parent: Option<&TraceContext>) -> Self {
        parent.map_or_else(TraceContext::root, TraceContext::child)
    }

    /// Says in a span which place in which trace it has.
    pub(crate) fn record(&self, span: &Span, parent: Option<&TraceContext>) {
        span.record("trace_id", self.trace_id());
        span.record("span_id", self.span_id());
        if let Some(parent) = parent {
            span.record("parent_id", parent.span_id());
        }
    }

    /// Puts it into the headers of a message, unless they have one. Whatever publishes in a context does this by itself; it is
    /// for whoever keeps a message to be published later, elsewhere.
    pub fn put_into(&self, headers: &mut Table<'_>) {
        if headers.get(PARENT).is_some() {
            return;
        }
        // Text of this length always fits.
        let _ = headers.insert(PARENT, self.to_string());
        for (name, text) in [(STATE, &self.state), (BAGGAGE, &self.baggage)] {
            if let Some(text) = text {
                let _ = headers.insert(name, text.clone());
            }
        }
    }
}

/// Whether anybody may want the span of a message: known before it is made, because one that is disabled still costs its
/// fields.
#[inline]
pub(crate) fn are_spans_wanted() -> bool {
    LevelFilter::current() >= Level::INFO
}

fn new_span() -> u64 {
    random::number().max(1)
}

/// As `traceparent` has it.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, self.flags)
    }
}

/// A text that is no `traceparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidTraceContext;

impl fmt::Display for InvalidTraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a traceparent: version, trace, span and flags in hexadecimal digits, with dashes between them")
    }
}

impl std::error::Error for InvalidTraceContext {}

impl FromStr for TraceContext {
    type Err = InvalidTraceContext;

    fn from_str(text: &str) -> Result<Self, InvalidTraceContext> {
        let mut parts = text.split('-');
        let mut part = |length: usize| {
            let part = parts.next().filter(|part| part.len() == length);
            let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            part.filter(|part| part.bytes().all(is_hex)).ok_or(InvalidTraceContext)
        };
        let version = part(2)?;
        let (trace, span, flags) = (part(32)?, part(16)?, part(2)?);
        // Later versions may append more; this one has exactly these parts.
        if version == "ff" || (version == "00" && parts.next().is_some()) {
            return Err(InvalidTraceContext);
        }
        let number = |digits| u128::from_str_radix(digits, 16).map_err(|_| InvalidTraceContext);
        let (trace_id, span_id) = (number(trace)?, number(span)? as u64);
        if trace_id == 0 || span_id == 0 {
            return Err(InvalidTraceContext);
        }
        let flags = number(flags)? as u8;
        Ok(TraceContext { trace_id, span_id, flags, state: None, baggage: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amqp::Properties;

    const TEXT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn it_comes_back_as_it_went() {
        let context: TraceContext = TEXT.parse().unwrap();
        assert_eq!(context.to_string(), TEXT);
        assert!(context.is_sampled());
        let root = TraceContext::root();
        assert_eq!(root.to_string().parse(), Ok(root));
    }

    #[test]
    fn what_is_not_sound_is_refused() {
        for text in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        ] {
            assert_eq!(text.parse::<TraceContext>(), Err(InvalidTraceContext), "{text}");
        }
        assert!(
            "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more"
                .parse::<TraceContext>()
                .is_ok()
        );
    }

    #[test]
    fn headers_carry_it_unless_they_have_one() {
        let context: TraceContext = TEXT.parse().unwrap();
        let mut headers = Table::new();
        context.put_into(&mut headers);
        context.child().put_into(&mut headers);
        let properties = Properties { headers: Some(headers), ..Properties::default() };
        assert_eq!(TraceContext::of(&RawProperties::from(&properties)), Some(context));
        assert_eq!(TraceContext::of(&RawProperties::default()), None);
    }
}
