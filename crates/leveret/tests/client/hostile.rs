//! Calls, services and events, used as they are not meant to be.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leveret::amqp::{Properties, ShortStr, Table, Value};
use leveret::{
    Client, ClientEvent, End, Error, ErrorKind, Exchange, Json, Message, Queue, Replier, Replies,
    State, Topology,
};
use leveret_broker::Broker;
use leveret_testkit::eventually;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use crate::drops::after_polls;
use crate::services::{Running, double};
use crate::{PATIENCE, broker, builder_of, client_of, client_with, depth, soon};

fn queues(broker: &Broker) -> usize {
    broker.snapshot().virtual_host("/").unwrap().queues.len()
}

/// A request by hand.
async fn request(client: &Client, service: &str, message: Message) {
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish(service, message).await.unwrap();
}

fn counted() -> (Arc<AtomicU64>, State<Arc<AtomicU64>>) {
    let count = Arc::new(AtomicU64::new(0));
    (Arc::clone(&count), State(count))
}

/// A method that gives up on being called over and over, so that a test ends.
async fn fill(Json(bytes): Json<usize>, State(calls): State<Arc<AtomicU64>>) -> String {
    if calls.fetch_add(1, Ordering::Relaxed) > 20 {
        std::future::pending::<()>().await;
    }
    "x".repeat(bytes)
}

#[tokio::test(start_paused = true)]
async fn replies_that_the_broker_refuses_do_not_stop_a_transactional_service() {
    let broker = Broker::builder().max_message_size(1000).start().unwrap();
    let client = client_of(&broker).await;
    let internal = Exchange::topic("internal").internal();
    client.apply(&Topology::new().exchange(internal)).await.unwrap();
    let (calls, State(state)) = counted();
    let service = client.service("tx").transactional().method("fill", fill).state(state);
    let service = Running::start(service).await;
    let rpc = client.rpc("tx").build().await.unwrap();

    // Who asks gets an error in place of what cannot be sent.
    let error = soon("an error", rpc.call::<String>("fill", Json(2000))).await.unwrap_err();
    assert_eq!(error.remote().expect("an answer").kind, "unsendable", "{error}");
    assert_eq!(calls.load(Ordering::Relaxed), 1);

    // Nothing can be said to one who wants it said where nobody may.
    let nowhere = Message::new("1").kind("fill").reply_to("topic://internal/k");
    request(&client, "tx", nowhere.correlation_id("a").message_id("b")).await;
    let text = soon("a reply", rpc.call::<String>("fill", Json(3))).await.unwrap();
    assert_eq!((&*text, calls.load(Ordering::Relaxed)), ("xxx", 3));
    soon("the end", service.stop()).await;
    assert_eq!(depth(&broker, "tx"), Some(0));
}

#[tokio::test(start_paused = true)]
async fn a_transactional_service_survives_the_loss_of_its_connections() {
    let broker = broker();
    let (server, caller) = (client_of(&broker).await, builder_of(&broker).name("caller"));
    let caller = caller.connect().await.unwrap();
    let slowly = |Json(number): Json<u64>| async move {
        sleep(Duration::from_millis(20)).await;
        Json(number * 2)
    };
    let service = server.service("tx").transactional().method("double", slowly);
    let service = Running::start(service).await;
    let rpc = caller.rpc("tx").build().await.unwrap();
    for number in 0..20 {
        let cutting = async {
            sleep(Duration::from_millis(number)).await;
            broker.faults().cut_connections_named("test (consuming)");
        };
        let call = soon("a reply", rpc.call::<Json<u64>>("double", Json(number)));
        let (doubled, ()) = tokio::join!(call, cutting);
        assert_eq!(doubled.unwrap().0, number * 2);
    }
    soon("the end", service.stop()).await;
}

#[tokio::test(start_paused = true)]
async fn calls_that_are_dropped_leave_no_queues_behind() {
    let broker = broker();
    let client = client_of(&broker).await;
    let _service = Running::start(client.service("numbers").method("double", double)).await;
    let before = queues(&broker);
    for replies in [Replies::QueuePerCall, Replies::Queue] {
        for polls in 0..24 {
            let rpc = client.rpc("numbers").replies(replies).build().await.unwrap();
            // The channel is there in time for some of them.
            for _ in 0..2 {
                after_polls(polls, rpc.call::<()>("double", Json(1)).into_future()).await;
            }
        }
    }
    sleep(Duration::from_secs(600)).await;
    assert_eq!(queues(&broker), before);
}

#[tokio::test(start_paused = true)]
async fn gathering_ends_in_time_whoever_goes_on_answering() {
    let broker = broker();
    let client = client_of(&broker).await;
    let events = client.events("questions");
    // One answer each 100 ms, for ever.
    let chatter = async |mut replier: Replier| -> Result<End, Error> {
        for number in 1.. {
            sleep(Duration::from_millis(100)).await;
            replier.send(Json(number)).await?;
        }
        Ok(End)
    };
    let service = events.respond("chatter", ["ask"], chatter).await.unwrap();
    let asking = async {
        let gather = events.gather::<Json<u32>>("ask", "?").within(Duration::from_secs(5));
        let mut answers = gather.stream().await.unwrap();
        let mut last = 0;
        while let Some(answer) = answers.next().await {
            last = answer.unwrap().0;
            assert!(last <= 50, "an answer that came after the time was over");
            sleep(Duration::from_millis(200)).await;
        }
        assert!(last >= 40, "{last}");
    };
    let service = service.drain(Duration::ZERO).run_until(soon("the end", asking));
    service.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn who_reads_a_queue_of_its_own_is_sent_no_more_than_it_takes() {
    let broker = broker();
    let client = client_of(&broker).await;
    let count = async |Json(to): Json<u32>, mut replier: Replier| -> Result<End, Error> {
        for number in 1..=to {
            replier.send(Json(number)).await?;
        }
        Ok(End)
    };
    let _service = Running::start(client.service("s").method("count", count)).await;
    let rpc = client.rpc("s").replies(Replies::QueuePerCall).build().await.unwrap();
    let stream = rpc.stream::<Json<u32>>("count", Json(100)).buffer(1);
    let mut stream = soon("a stream", stream).await.unwrap();
    for number in 1..=100 {
        sleep(Duration::from_secs(1)).await;
        assert_eq!(soon("a reply", stream.next()).await.unwrap().unwrap().0, number);
    }
    assert!(soon("the end", stream.next()).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_reply_that_was_not_waited_for_is_not_forgotten() {
    let broker = Arc::new(broker());
    let client = client_of(&broker).await;
    let (sent, mut outcome) = mpsc::unbounded_channel();
    let method = {
        let broker = Arc::clone(&broker);
        move |mut replier: Replier| {
            let (broker, sent) = (Arc::clone(&broker), sent.clone());
            async move {
                broker.faults().freeze();
                broker.faults().return_publishes(1);
                // Until one has to wait, which is not waited for.
                while timeout(Duration::from_millis(10), replier.send("")).await.is_ok() {}
                broker.faults().thaw();
                sleep(Duration::from_secs(1)).await;
                let _ = sent.send(replier.send("").await);
                End
            }
        }
    };
    let _service = Running::start(client.service("s").method("m", method)).await;
    let rpc = client.rpc("s").replies(Replies::Queue).build().await.unwrap();
    let _stream = soon("a stream", rpc.stream::<()>("m", "")).await.unwrap();
    let outcome = soon("an outcome", outcome.recv()).await.unwrap();
    assert_eq!(outcome.map_err(|error| error.kind()), Err(ErrorKind::Unroutable));
}

#[tokio::test(start_paused = true)]
async fn a_service_of_a_shared_exchange_is_not_named_by_a_pattern() {
    let broker = broker();
    let client = client_of(&broker).await;
    for name in ["#", "a.*", "*.b"] {
        let service = client.service(name).method("m", double);
        let error = service.clone().shared_exchange("x").declare().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        service.declare().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn odd_requests_are_answered_or_passed_over() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("replies")).await;
    let echo = |body: bytes::Bytes| async move { body };
    let service = client.service("odd").method("echo", echo).method("", echo);
    let service = Running::start(service).await;
    let odd = |bytes: Vec<u8>| Some(ShortStr::from_bytes(bytes).unwrap());
    let headers = Table::from_pairs([
        ("leveret-reply", Value::from(17)),
        ("leveret-reply-number", Value::from("x")),
        ("leveret-error", Value::from(true)),
        ("traceparent", Value::from(1.5)),
        ("x-death", Value::from("never")),
    ]);
    let headers = headers.unwrap();
    let kind = || odd(b"echo".to_vec());
    let to = || odd(b"replies".to_vec());
    let all = [
        Properties { kind: kind(), reply_to: to(), ..Properties::default() },
        Properties { reply_to: to(), ..Properties::default() },
        Properties { kind: kind(), reply_to: odd(vec![b'r'; 255]), ..Properties::default() },
        Properties { kind: kind(), reply_to: odd(vec![0xff; 255]), ..Properties::default() },
        Properties { kind: odd(vec![0xff; 255]), reply_to: to(), ..Properties::default() },
        Properties { kind: kind(), reply_to: odd(b"topic:///".to_vec()), ..Properties::default() },
        Properties {
            kind: kind(),
            reply_to: odd(b"amq.rabbitmq.reply-to.odd".to_vec()),
            ..Properties::default()
        },
        Properties {
            kind: kind(),
            reply_to: to(),
            correlation_id: odd(vec![0xff; 255]),
            message_id: odd(vec![0]),
            headers: Some(headers),
            ..Properties::default()
        },
    ];
    let sent = all.len() as u64;
    for properties in all {
        request(&client, "odd", Message::with_properties("", properties)).await;
    }
    let rpc = client.rpc("odd").build().await.unwrap();
    let large = vec![7; 10 << 20];
    let echoed = soon("a reply", rpc.call::<bytes::Bytes>("echo", large.clone())).await.unwrap();
    assert!(echoed == large);
    for method in ["m".repeat(256), "m".repeat(100_000)] {
        let error = soon("an outcome", rpc.call::<()>(&method, "")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        let error = soon("an outcome", rpc.cast(&method, "")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    let heavy = Message::new("").header("h", "x".repeat(1 << 20));
    let error = soon("an outcome", rpc.call::<()>("echo", heavy)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert_eq!(soon("a reply", rpc.call::<String>("echo", "1")).await.unwrap(), "1");
    assert_eq!(rpc.in_flight(), 0);
    let summary = soon("the end", service.stop()).await;
    assert_eq!((summary.handled, summary.failed), (sent + 2, 0));
    assert_eq!(depth(&broker, "replies"), Some(4));
}

#[tokio::test(start_paused = true)]
async fn a_listener_hears_again_after_a_reconnect() {
    let broker = broker();
    let client = client_of(&broker).await;
    let events = client.events("amq.topic");
    let mut heard = events.listen(["a.#", "b"]).stream().await.unwrap();
    for _ in 0..3 {
        broker.faults().cut_all_connections();
        for key in ["a.1", "b"] {
            let hearing = async {
                loop {
                    events.publish(key, key).await.unwrap();
                    let next = timeout(Duration::from_secs(1), heard.next()).await;
                    if let Ok(Some(Ok(event))) = next
                        && event.body() == key
                    {
                        return event.ack().unwrap();
                    }
                }
            };
            soon("an event", hearing).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn callers_that_come_and_go_leave_nothing_behind() {
    let broker = broker();
    let client = client_of(&broker).await;
    let _service = Running::start(client.service("numbers").method("double", double)).await;
    let mut happenings = client.watch();
    for replies in [Replies::Direct, Replies::Queue, Replies::QueuePerCall] {
        for number in 0..100 {
            let rpc = client.rpc("numbers").replies(replies).build().await.unwrap();
            let call = rpc.call::<Json<u64>>("double", Json(number));
            assert_eq!(soon("a reply", call).await.unwrap().0, number * 2);
        }
    }
    eventually(PATIENCE, "few channels", async || {
        let snapshot = broker.snapshot();
        let connections = &snapshot.virtual_host("/").unwrap().connections;
        connections.iter().map(|one| one.channels.len()).sum::<usize>() < 10
    })
    .await;
    while let Ok(Some(event)) = timeout(Duration::from_secs(1), happenings.next()).await {
        assert!(matches!(event, ClientEvent::Connected { again: false, .. }), "{event:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_is_drained_ends_well_and_one_that_is_not_begins_anew() {
    let broker = broker();
    let client = client_of(&broker).await;
    let count = async |mut replier: Replier| -> Result<End, Error> {
        for number in 1..=10 {
            sleep(Duration::from_secs(1)).await;
            replier.send(Json(number)).await?;
        }
        Ok(End)
    };
    for drain in [Duration::from_secs(60), Duration::from_secs(1)] {
        let service = || client.service("s").drain(drain).method("count", count);
        let mut service = (Running::start(service()).await, service());
        let rpc = client.rpc("s").build().await.unwrap();
        let mut stream = soon("a stream", rpc.stream::<Json<u32>>("count", "")).await.unwrap();
        for number in 1..=10 {
            assert_eq!(soon("a reply", stream.next()).await.unwrap().unwrap().0, number);
            if number == 5 {
                service.0.begin_stop();
            }
            if number == 5 && drain < Duration::from_secs(10) {
                service.0 = Running::start(service.1.clone()).await;
            }
        }
        assert!(soon("the end", stream.next()).await.is_none());
    }
}
