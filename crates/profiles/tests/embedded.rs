//! The designs on the embedded broker, with paused time.

mod designs {
    mod acapi;
    mod acapi_site;
    mod chandra;
    mod cover_art;
    mod deployments;
    mod examples;
    mod on_the_wire;
    mod orb;
    mod public_api;
    mod refusals;
    mod removal;
    mod troubles;
}

#[path = "support/deployments.rs"]
mod deployments;
#[path = "../../leveret/tests/support/embedded.rs"]
mod embedded;
#[path = "../../leveret/tests/support/examples.rs"]
mod examples;
#[path = "../../leveret/tests/support/on_the_wire.rs"]
mod on_the_wire;
#[path = "../../leveret/tests/support/removal.rs"]
mod removal;
#[path = "support/removing.rs"]
mod removing;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::amqp::{GetOptions, Value};
use leveret::{Client, Delivery, Destination, Failure, Incoming, Retry, Summary, Topology};
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
