//! The designs of retrying that have names, with paused time.

mod acapi;
mod acapi_site;
mod chandra;
mod cover_art;
mod deployments;
mod orb;
mod refusals;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::amqp::{GetOptions, Value};
use leveret::{
    Acapi, Chandra, Client, Delivery, Destination, Failure, Incoming, Retry, Summary, Topology,
};
use tokio::time::Instant;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);
/// Long after all short waits.
const LATER: Duration = Duration::from_secs(600);

/// A topology as lines, in any order: what the documents say can be written in the same form.
fn lines(topology: &Topology) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    for exchange in topology.exchanges() {
        assert!(exchange.is_durable() && !exchange.is_auto_delete() && !exchange.is_internal());
        let arguments = arguments(exchange.arguments());
        lines.insert(format!("exchange {} {}{arguments}", exchange.name(), exchange.kind()));
    }
    for queue in topology.queues() {
        assert!(queue.is_durable() && !queue.is_auto_delete() && !queue.is_exclusive());
        lines.insert(format!("queue {}{}", queue.name(), arguments(queue.arguments())));
    }
    for binding in topology.bindings() {
        let (Destination::Queue(to) | Destination::Exchange(to)) = binding.destination();
        lines.insert(format!("binding {} -> {to} [{}]", binding.source(), binding.routing_key()));
    }
    lines
}

fn arguments<'a>(arguments: impl Iterator<Item = (&'a str, &'a Value<'static>)>) -> String {
    let mut text = String::new();
    for (name, value) in arguments {
        let shown = value.as_str().map(str::to_owned).or_else(|| Some(value.as_i64()?.to_string()));
        text.push_str(&format!(" {name}={}", shown.expect("text or a number")));
    }
    text
}

/// The same, as it is written in a test.
fn listed(text: &str) -> BTreeSet<String> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// One delivery as a handler saw it.
#[derive(Clone, Debug)]
struct Seen {
    body: String,
    attempt: u32,
    /// How long after the beginning.
    at: Duration,
    incoming: Incoming,
}

/// Runs a consumer for as long as `time`, and says what its handler saw. `fate` is what becomes of a delivery.
async fn consume(
    client: &Client,
    queue: &str,
    retry: impl Into<Retry>,
    time: Duration,
    fate: impl Fn(&Seen) -> Result<(), Failure> + Send + Sync + 'static,
) -> (Vec<Seen>, Summary) {
    let began = Instant::now();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let fate = Arc::new(fate);
    let handler = {
        let seen = Arc::clone(&seen);
        move |incoming: Incoming| {
            let one = Seen {
                body: String::from_utf8_lossy(incoming.body()).into_owned(),
                attempt: incoming.attempt(),
                at: began.elapsed(),
                incoming,
            };
            let outcome = fate(&one);
            seen.lock().unwrap().push(one);
            async move { outcome }
        }
    };
    let runner = client.consumer(queue).retry(retry).handle(handler);
    let summary = runner.run_until(tokio::time::sleep(time)).await.unwrap();
    let seen = seen.lock().unwrap().clone();
    (seen, summary)
}

fn always(_: &Seen) -> Result<(), Failure> {
    Err(Failure::retry("not yet").kind("early"))
}

/// When each attempt came, in whole steps.
fn times(seen: &[Seen], step: Duration) -> Vec<(u32, u128)> {
    seen.iter().map(|seen| (seen.attempt, seen.at.as_millis() / step.as_millis())).collect()
}

async fn take(client: &Client, queue: &str) -> Delivery {
    let got = client.get(queue, GetOptions::default()).await.unwrap();
    got.unwrap_or_else(|| panic!("a message in {queue}"))
}

fn text(delivery: &Delivery, header: &str) -> String {
    let value = delivery.header(header).unwrap_or_else(|| panic!("no header {header}"));
    value.as_str().expect("text").to_owned()
}

fn number(delivery: &Delivery, header: &str) -> i64 {
    text(delivery, header).parse().expect("a number")
}

/// What every parked message says (R72).
fn check_stamp(parked: &Delivery, expected: &Stamp<'_>) {
    assert_eq!(number(parked, "x-leveret-attempts"), expected.attempts);
    assert_eq!(text(parked, "x-leveret-error"), expected.error);
    assert_eq!(text(parked, "x-leveret-error-kind"), expected.kind);
    assert_eq!(text(parked, "x-leveret-reason"), expected.reason);
    assert_eq!(text(parked, "x-leveret-queue"), expected.queue);
    assert_eq!(text(parked, "x-leveret-exchange"), expected.exchange);
    assert_eq!(text(parked, "x-leveret-routing-key"), expected.routing_key);
    for time in ["x-leveret-first-failure", "x-leveret-last-failure"] {
        assert!(text(parked, time).as_str() > "2023-11-14T22:13:20Z", "{time}");
    }
    let history = parked.header("x-leveret-history").expect("a history").into_owned();
    assert!(history.as_array().unwrap().iter().count() >= 1);
    let back = parked.header("x-leveret-return").map(Value::into_owned);
    assert_eq!(back.as_ref().and_then(|back| back.as_str()), expected.back);
    assert!(parked.header("x-death").is_none(), "it would begin with a count");
}

struct Stamp<'a> {
    attempts: i64,
    error: &'a str,
    kind: &'a str,
    reason: &'a str,
    queue: &'a str,
    exchange: &'a str,
    routing_key: &'a str,
    back: Option<&'a str>,
}

/// Collects what is logged as a warning on this thread.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() == tracing::Level::WARN
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[tokio::test(start_paused = true)]
async fn that_a_wait_is_not_heard_is_said_once() {
    let chandra = Chandra::new(leveret::Exchange::topic("orders")).interval(SECOND);
    let acapi = Acapi::new().interval(SECOND);
    let queue = || leveret::Queue::classic("q");
    let profiles: [(Topology, Retry); 2] = [
        (acapi.topology(queue()).unwrap(), acapi.into()),
        (chandra.topology(queue()).unwrap(), chandra.into()),
    ];
    for (topology, retry) in profiles {
        let warnings = Warnings::default();
        let _guard = tracing::subscriber::set_default(warnings.clone());
        let client = crate::client_of(&crate::broker()).await;
        client.apply(&topology).await.unwrap();
        let publisher = client.publisher("").build().await.unwrap();
        publisher.publish("q", "job").await.unwrap();
        let later = |_: &Seen| Err(Failure::retry_after(HOUR, "busy"));
        let (seen, _) = consume(&client, "q", retry, LATER, later).await;
        assert_eq!(times(&seen, SECOND), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5)]);
        let said = warnings.0.lock().unwrap();
        let about_it = said.iter().filter(|text| text.contains("has its own waits")).count();
        assert_eq!(about_it, 1, "{said:?}");
    }
}
