use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use leveret::{BatchOptions, Incoming, Json, Message, Publisher, Queue, State, TraceContext};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Dispatch, Event, Metadata, Span, Subscriber};

use crate::services::{Running, double};
use crate::{broker, client_of, client_with, soon};

/// Collects spans, each by its fields.
#[derive(Clone, Default)]
struct Collected(Arc<Mutex<Vec<Fields>>>);

#[derive(Clone, Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Fields {
    #[track_caller]
    fn get(&self, name: &str) -> &str {
        self.0.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", self.0))
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl Subscriber for Collected {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target() == "leveret"
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let mut spans = self.0.lock().unwrap();
        spans.push(fields);
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        values.record(&mut self.0.lock().unwrap()[span.into_u64() as usize - 1]);
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// With a single collector, `tracing` takes it that a span which another test is the first to make, in its own thread, is
/// collected by nobody. So there is always another one.
static OTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(Collected::default()));

impl Collected {
    /// Collects what this thread does.
    fn here() -> (Self, DefaultGuard) {
        LazyLock::force(&OTHER);
        let spans = Collected::default();
        (spans.clone(), tracing::subscriber::set_default(spans))
    }

    fn named(&self, name: &str) -> Vec<Fields> {
        let spans = self.0.lock().unwrap();
        spans.iter().filter(|span| span.get("otel.name") == name).cloned().collect()
    }
}

#[tokio::test(start_paused = true)]
async fn a_publish_and_its_handler_are_spans_of_one_trace() {
    let (spans, _collecting) = Collected::here();
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    client.apply(&leveret::Topology::new().queue(Queue::classic("out"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let message = Message::new("1").message_id("m").correlation_id("c");
    publisher.publish("q", message).await.unwrap();
    let handler = |_: Incoming, State(publisher): State<Publisher>| async move {
        publisher.publish("nowhere", "2").await
    };
    let stop = tokio::time::sleep(Duration::from_millis(500));
    let runner = client.consumer("q").state(publisher).handle(handler);
    soon("the end", runner.run_until(stop)).await.unwrap();

    let publishes = spans.named("publish amq.default");
    let processes = spans.named("process q");
    let [first, second] = &publishes[..] else { panic!("two publishes, not {}", publishes.len()) };
    let [process] = &processes[..] else { panic!("one process, not {}", processes.len()) };
    assert_eq!(first.get("otel.kind"), "producer");
    assert_eq!(first.get("messaging.operation.type"), "send");
    assert_eq!(first.get("messaging.destination.name"), ":q");
    assert_eq!(first.get("messaging.rabbitmq.destination.routing_key"), "q");
    assert_eq!(first.get("messaging.message.id"), "m");
    assert_eq!(first.get("messaging.message.conversation_id"), "c");
    assert_eq!(second.get("error.type"), "Unroutable");
    assert_eq!(process.get("messaging.destination.name"), ":q:q");
    // The handler works because of the first, and the second is published by the handler.
    let trace = first.get("trace_id");
    assert_eq!((process.get("trace_id"), second.get("trace_id")), (trace, trace));
    assert_eq!(process.get("parent_id"), first.get("span_id"));
    assert_eq!(second.get("parent_id"), process.get("span_id"));
}

#[tokio::test(start_paused = true)]
async fn a_call_its_method_and_its_reply_are_spans_of_one_trace() {
    let (spans, _collecting) = Collected::here();
    let broker = broker();
    let client = client_of(&broker).await;
    let _service = Running::start(client.service("numbers").method("double", double)).await;
    let rpc = client.rpc("numbers").build().await.unwrap();
    soon("a reply", rpc.call::<Json<u64>>("double", Json(1))).await.unwrap();
    soon("a reply", rpc.call::<()>("unknown", "")).await.unwrap_err();

    let calls = spans.named("call numbers");
    let processes = spans.named("process numbers");
    let replies = spans.named("publish amq.default");
    let [call, failed] = &calls[..] else { panic!("two calls, not {}", calls.len()) };
    assert_eq!((call.get("otel.kind"), call.get("rpc.method")), ("client", "double"));
    assert_eq!(failed.get("error.type"), "Remote");
    assert_eq!(processes[0].get("parent_id"), call.get("span_id"));
    assert_eq!(
        processes[0].get("messaging.message.conversation_id"),
        call.get("messaging.message.conversation_id")
    );
    assert_eq!(replies[0].get("parent_id"), processes[0].get("span_id"));
    assert_eq!(replies[0].get("trace_id"), call.get("trace_id"));
    assert_ne!(failed.get("trace_id"), call.get("trace_id"));
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_one_span_with_links_to_its_messages() {
    let (spans, _collecting) = Collected::here();
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch([("q", "1"), ("q", "2")]).await.unwrap();
    publisher.publish("q", "3").await.unwrap();
    let options = BatchOptions { size: 3, within: Duration::from_secs(1) };
    let stop = tokio::time::sleep(Duration::from_secs(5));
    let runner = client.consumer("q").handle_batches(options, |_| async {});
    soon("the end", runner.run_until(stop)).await.unwrap();

    let publishes = spans.named("publish amq.default");
    let [batch, single] = &publishes[..] else { panic!("two publishes, not {}", publishes.len()) };
    assert_eq!(batch.get("messaging.batch.message_count"), "2");
    let processes = spans.named("process q");
    let [process] = &processes[..] else { panic!("one process, not {}", processes.len()) };
    assert_eq!(process.get("messaging.batch.message_count"), "3");
    let link = |of: &Fields| format!("00-{}-{}-01", of.get("trace_id"), of.get("span_id"));
    let links: Vec<&str> = process.get("links").split(' ').collect();
    assert_eq!(links, [link(batch), link(batch), link(single)]);
    assert_ne!(process.get("trace_id"), batch.get("trace_id"));
}

#[tokio::test(start_paused = true)]
async fn a_handler_is_called_in_its_span_and_not_only_awaited_there() {
    LazyLock::force(&OTHER);
    let _collecting = tracing::subscriber::set_default(tracing_subscriber::registry());
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    // One after the other, in tasks of their own, and a batch.
    for kind in 0..3 {
        publisher.publish("q", "1").await.unwrap();
        let (sender, mut traced) = tokio::sync::mpsc::channel(10);
        let tell = move || {
            let _ = sender.try_send((TraceContext::current(), Span::current().id()));
        };
        let stop = tokio::time::sleep(Duration::from_secs(5));
        let consumer = client.consumer("q");
        if kind == 2 {
            let handler = move |_: Vec<Incoming>| {
                tell();
                let tell = tell.clone();
                async move { tell() }
            };
            let options = BatchOptions { size: 1, within: Duration::from_secs(1) };
            consumer.handle_batches(options, handler).run_until(stop).await.unwrap();
        } else {
            let handler = move |_: Incoming| {
                tell();
                let tell = tell.clone();
                async move { tell() }
            };
            consumer.workers(kind + 1).handle(handler).run_until(stop).await.unwrap();
        }
        let (called, awaited) = (traced.recv().await.unwrap(), traced.recv().await.unwrap());
        assert!(called.0.is_some() && called.1.is_some(), "{kind}: {called:?}");
        assert_eq!(called, awaited, "{kind}");
    }
}
