use std::time::Duration;

use leveret::{BatchOptions, Client, Incoming, Message, Publisher, Queue, State, TraceContext};
use metrics_util::debugging::{DebugValue, DebuggingRecorder};

use crate::{broker, client_with, soon};

/// Counts of one name, over all labels.
fn count(snapshot: &[(metrics_util::CompositeKey, u64)], name: &str) -> u64 {
    snapshot.iter().filter(|(key, _)| key.key().name() == name).map(|(_, value)| value).sum()
}

#[tokio::test(start_paused = true)]
async fn what_is_published_and_handled_is_counted() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    // Of this thread alone: other tests count, too.
    let _guard = metrics::set_default_local_recorder(&recorder);
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch((0..5).map(|n| ("q", n.to_string()))).await.unwrap();
    publisher.publish("nowhere", "lost").await.unwrap_err();
    broker.faults().nack_publishes(1);
    publisher.publish("q", "nacked").await.unwrap_err();
    let handler = |body: String| async move { if body == "3" { Err("no") } else { Ok(()) } };
    let stop = tokio::time::sleep(Duration::from_millis(500));
    soon("the end", client.consumer("q").handle(handler).run_until(stop)).await.unwrap();

    let counters: Vec<_> = snapshotter
        .snapshot()
        .into_vec()
        .into_iter()
        .filter_map(|(key, _, _, value)| match value {
            DebugValue::Counter(value) => Some((key, value)),
            _ => None,
        })
        .collect();
    let all =
        ["published", "confirmed", "nacked", "returned", "lost", "consumed", "acked", "failed"]
            .map(|name| count(&counters, &format!("leveret_{name}_total")));
    assert_eq!(all[..5], [7, 5, 1, 1, 0]);
    assert_eq!(all[5..], [5, 4, 1]);
    assert_eq!(count(&counters, "leveret_retried_total"), 1);

    // A handler that is given up is no longer at work.
    publisher.publish("q", "stuck").await.unwrap();
    let stop = tokio::time::sleep(Duration::from_millis(500));
    let stuck = client.consumer("q").drain(Duration::from_secs(1));
    let handling = stuck.handle(|_: Incoming| std::future::pending::<()>()).run_until(stop);
    let summary = soon("the end", handling).await.unwrap();
    assert_eq!(summary.abandoned, 1);
    publisher.publish_batch((0..3).map(|n| ("q", n.to_string()))).await.unwrap();
    let options = BatchOptions { size: 4, within: Duration::from_secs(1) };
    let stop = tokio::time::sleep(Duration::from_secs(5));
    let batches = client.consumer("q").handle_batches(options, |_| async {}).run_until(stop);
    let summary = soon("the end", batches).await.unwrap();
    assert_eq!(summary.handled, 5);
    let mut acked = 0;
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        match (key.key().name(), value) {
            ("leveret_in_flight", DebugValue::Gauge(at_work)) => assert_eq!(*at_work, 0.0),
            ("leveret_acked_total", DebugValue::Counter(count)) => acked += count,
            _ => {}
        }
    }
    assert_eq!(acked, 5, "since the last time it was looked at");
}

async fn published_context(client: &Client) -> Option<String> {
    let got = client.get("out", Default::default()).await.unwrap().expect("a message");
    let context = got.header("traceparent").and_then(|value| value.as_str().map(str::to_owned));
    got.ack().unwrap();
    context
}

#[tokio::test(start_paused = true)]
async fn a_trace_goes_through_a_handler_to_what_it_publishes() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    client.apply(&leveret::Topology::new().queue(Queue::classic("out"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    publisher.publish("q", Message::new("1").header("traceparent", trace)).await.unwrap();
    publisher.publish("q", Message::new("2").header("traceparent", "nonsense")).await.unwrap();
    let handler = |_: Incoming, State(publisher): State<Publisher>| async move {
        publisher.publish("out", "done").await
    };
    let stop = tokio::time::sleep(Duration::from_secs(1));
    let runner = client.consumer("q").state(publisher.clone()).handle(handler);
    soon("the end", runner.run_until(stop)).await.unwrap();

    let context: TraceContext = published_context(&client).await.unwrap().parse().unwrap();
    assert_eq!(context.trace_id(), "0af7651916cd43dd8448eb211c80319c");
    assert_ne!(context.span_id(), "b7ad6b7169203331");
    // It belongs to no trace, or, if another test collects spans at the same time, to one of its own.
    let other = published_context(&client).await;
    assert!(!other.is_some_and(|other| other.contains(&context.trace_id())));

    let root = TraceContext::root();
    root.clone().scope(publisher.publish("out", "3")).await.unwrap();
    let context: TraceContext = published_context(&client).await.unwrap().parse().unwrap();
    assert_eq!(context.trace_id(), root.trace_id());
}
