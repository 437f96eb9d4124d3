//! What goes wrong around messages that are tried again.

use std::sync::atomic::{AtomicU32, Ordering};

use leveret::{Exchange, Message, Queue};
use leveret_broker::Broker;
use leveret_profiles::{Acapi, Chandra, Orb};
use tokio::time::sleep;

use crate::embedded::{broker, client_of, client_with, depth};
use crate::*;

/// The bodies of all messages in these queues.
fn bodies(broker: &Broker, queues: &[&str]) -> BTreeSet<String> {
    let peek = |queue: &&str| broker.peek("/", queue, usize::MAX).unwrap_or_default();
    let messages = queues.iter().flat_map(peek);
    messages.map(|message| String::from_utf8_lossy(&message.body).into_owned()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_redelivery_service_whose_broker_fails_loses_nothing() {
    let broker = broker();
    let client = client_of(&broker).await;
    let orb = Orb::new().max_attempts(3);
    client.apply(&orb.topology(Queue::quorum("q")).unwrap()).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    for n in 0..100 {
        publisher.publish("q", n.to_string()).await.unwrap();
    }
    let trouble = async {
        let faults = broker.faults();
        for _ in 0..20 {
            sleep(SECOND / 3).await;
            faults.cut_all_connections();
            sleep(SECOND / 3).await;
            faults.nack_publishes(5);
            faults.return_publishes(3);
        }
        sleep(DAY).await;
    };
    let service = orb.redelivery(&client).run_until(sleep(DAY));
    let runner = client.consumer("q").workers(4).retry(orb).handle(async || Err::<(), _>("no"));
    let (service, consumer, ()) = tokio::join!(service, runner.run_until(sleep(DAY)), trouble);
    service.unwrap();
    consumer.unwrap();
    assert_eq!(bodies(&broker, &["orb.parked"]).len(), 100);
    for queue in ["q", "orb.redelivery", "orb.wait"] {
        assert_eq!(depth(&broker, queue), Some(0), "{queue}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_redelivery_service_that_is_told_to_stop_while_it_starts_does() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    broker.faults().freeze();
    let began = Instant::now();
    let summary = Orb::new().redelivery(&client).run_until(sleep(SECOND)).await.unwrap();
    assert_eq!(summary, Summary::default());
    assert!(began.elapsed() < 2 * SECOND, "{:?}", began.elapsed());
}

/// As large as a message can be that is delivered in a frame.
fn crowded(message: Message) -> Message {
    message.header("crowd", "x".repeat(131_072 - 300))
}

#[tokio::test(start_paused = true)]
async fn a_message_with_no_room_for_its_story_is_parked_once() {
    let broker = broker();
    let client = client_of(&broker).await;
    let retry = Chandra::new(Exchange::topic("orders")).interval(SECOND);
    let queue = Queue::classic("billing").bind("orders", "order.*");
    client.apply(&retry.topology(queue).unwrap()).await.unwrap();
    let publisher = client.publisher("orders").build().await.unwrap();
    // This key would lead a message in the dead-letter exchange to the retry queue.
    let copies = leveret::amqp::Array::from_values(["retry.billing".into()]).unwrap();
    let message = Message::new("job").header("CC", copies);
    publisher.publish("order.paid", crowded(message)).await.unwrap();
    let seen = Arc::new(AtomicU32::new(0));
    let handler = {
        let seen = Arc::clone(&seen);
        move || {
            seen.fetch_add(1, Ordering::Relaxed);
            async { Err::<(), _>(Failure::permanent("x".repeat(3000)).kind("k".repeat(100))) }
        }
    };
    let runner = client.consumer("billing").retry(Retry::from(retry)).handle(handler);
    let summary = runner.run_until(sleep(DAY)).await.unwrap();
    assert_eq!((seen.load(Ordering::Relaxed), summary.parked), (1, 1));
    assert_eq!(depth(&broker, "billing.parking_lot"), Some(1));
    let parked = client.get("billing.parking_lot", GetOptions::default()).await.unwrap().unwrap();
    let headers = parked.properties().headers.unwrap().into_owned();
    let names: Vec<_> = headers.iter().map(|(name, _)| name.to_str_lossy().into_owned()).collect();
    assert_eq!(names, ["crowd"]);
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
    let chandra = Chandra::new(Exchange::topic("orders")).interval(SECOND);
    let acapi = Acapi::new().interval(SECOND);
    let queue = || Queue::classic("q");
    let profiles: [(Topology, Retry); 2] = [
        (acapi.topology(queue()).unwrap(), acapi.into()),
        (chandra.topology(queue()).unwrap(), chandra.into()),
    ];
    for (topology, retry) in profiles {
        let warnings = Warnings::default();
        let _guard = tracing::subscriber::set_default(warnings.clone());
        let client = client_of(&broker()).await;
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
