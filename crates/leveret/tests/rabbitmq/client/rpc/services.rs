//! What a service does with requests, and where its replies go.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leveret::amqp::Properties;
use leveret::{
    BoxError, Client, End, Error, ErrorKind, Exchange, Failure, Incoming, Json, Message, OnLoss,
    Queue, Replier, Replies, RetryPolicy, State, Topology,
};
use leveret_testkit::{eventually, rabbitmq};
use tokio::sync::{Barrier, Notify, mpsc};

use super::{ALL_REPLIES, call_double};
use crate::support::client::{SOON, client, client_with, next, publisher, soon, until_depth};
use crate::support::services::{Running, double};

async fn numbers(client: &Client) -> Running {
    Running::start(client.service("numbers").method("double", double)).await
}

#[tokio::test]
async fn errors_come_back_with_their_kind_and_text() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let service = client
        .service("bank")
        .method("charge", |Json(cents): Json<u64>| async move {
            match cents {
                0 => Err(Failure::permanent("nothing to charge").kind("empty")),
                _ => Ok(()),
            }
        })
        .method("parse", |text: String| async move { text.parse::<u32>().map(Json) })
        .method("say", |text: String| async move { Err::<(), BoxError>(text.into()) })
        .method("panic", || async { panic!("on purpose") as () })
        .method("odd", || async { Message::new("").kind("k".repeat(256)) });
    let service = Running::start(service).await;
    let rpc = client.rpc("bank").build().await.unwrap();
    for (method, request, kind, text) in [
        ("charge", "0", "empty", "nothing to charge"),
        ("charge", "no number", "undecodable", "not the expected JSON"),
        ("parse", "x", "ParseIntError", "invalid digit"),
        ("say", "just text", "error", "just text"),
        ("panic", "", "panic", "on purpose"),
        ("odd", "", "unencodable", "type"),
        ("missing", "", "unknown-method", "has no method \"missing\""),
    ] {
        let error = soon("a reply", rpc.call::<()>(method, request)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Remote, "{method}: {error}");
        let remote = error.remote().unwrap();
        assert_eq!(remote.kind, kind, "{method}");
        assert!(remote.text.contains(text), "{method}: {remote}");
        assert!(error.to_string().contains(text), "{error}");
    }
    soon("a reply", rpc.call::<()>("charge", Json(1))).await.unwrap();
    // An error that was told is done with.
    until_depth(&client, "bank", 0).await;
    assert_eq!(soon("the end", service.stop()).await.handled, 8);
}

#[tokio::test]
async fn what_no_method_is_for_goes_to_the_fallback() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let say = |incoming: Incoming| async move { incoming.routing_key().to_string() };
    let service = client.service("any").shared_exchange("services").fallback(say);
    let _service = Running::start(service).await;
    let rpc = client.rpc("any").shared_exchange("services").build().await.unwrap();
    let key: String = soon("a reply", rpc.call("what.ever", "")).await.unwrap();
    assert_eq!(key, "any.what.ever");
}

#[tokio::test]
async fn instances_of_a_service_share_its_requests() {
    let vhost = rabbitmq::vhost().await;
    let client_1 = client(&vhost).await;
    let client_2 = client(&vhost).await;
    // Neither goes on before both are at work.
    let both = Arc::new(Barrier::new(2));
    let meet = |State(both): State<Arc<Barrier>>| async move {
        both.wait().await;
    };
    let service = |client: &Client| {
        client.service("meet").workers(1).prefetch(1).state(Arc::clone(&both)).method("m", meet)
    };
    let first = Running::start(service(&client_1)).await;
    let second = Running::start(service(&client_2)).await;
    let rpc = client_1.rpc("meet").build().await.unwrap();
    for _ in 0..5 {
        let (one, other) = tokio::join!(
            soon("a reply", rpc.call::<()>("m", "")),
            soon("a reply", rpc.call::<()>("m", ""))
        );
        one.and(other).unwrap();
    }
    let (first, second) = tokio::join!(first.stop(), second.stop());
    assert_eq!((first.handled, second.handled), (5, 5));
}

#[tokio::test]
async fn a_request_whose_service_crashed_is_handled_by_another_who_knows() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let (sender, mut seen) = mpsc::channel(10);
    let hang = move |incoming: Incoming| {
        let sender = sender.clone();
        async move {
            sender.send(incoming.redelivered()).await.unwrap();
            std::future::pending::<()>().await;
        }
    };
    let crashes = Running::start(client.service("s").method("m", hang)).await;
    let rpc = client.rpc("s").build().await.unwrap();
    let call = tokio::spawn({
        let rpc = rpc.clone();
        async move { rpc.call::<Json<bool>>("m", "").await }
    });
    assert!(!soon("a request", seen.recv()).await.unwrap());
    drop(crashes);
    let tell = |incoming: Incoming| async move { Json(incoming.redelivered()) };
    let _service = Running::start(client.service("s").method("m", tell)).await;
    assert!(soon("a reply", call).await.unwrap().unwrap().0);
}

fn soon_again() -> RetryPolicy {
    RetryPolicy::fixed(Duration::from_millis(100)).max_retries(2)
}

#[tokio::test]
async fn a_cast_that_fails_is_tried_again_and_parked() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let (sender, mut attempts) = mpsc::channel(10);
    let fail = move |leveret::Attempt(attempt): leveret::Attempt| {
        let sender = sender.clone();
        async move {
            sender.send(attempt).await.unwrap();
            Err::<(), _>("no")
        }
    };
    let service = client.service("work").retry(soon_again()).method("m", fail);
    let service = Running::start(service).await;
    let rpc = client.rpc("work").build().await.unwrap();
    soon("a cast", rpc.cast("m", "1")).await.unwrap();
    for attempt in 1..=3 {
        assert_eq!(soon("an attempt", attempts.recv()).await, Some(attempt));
    }
    until_depth(&client, "work.parked", 1).await;
    // Nobody will ever know what to do with it.
    soon("a cast", rpc.cast("unknown", "2")).await.unwrap();
    until_depth(&client, "work.parked", 2).await;
    // Whoever asks for a reply gets the error at once.
    let error = soon("a reply", rpc.call::<()>("m", "3")).await.unwrap_err();
    assert_eq!(error.remote().unwrap().text, "no");
    let summary = soon("the end", service.stop()).await;
    assert_eq!((summary.retried, summary.parked), (2, 2));
}

#[tokio::test]
async fn calls_are_tried_again_too_if_so_chosen() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let third = |leveret::Attempt(attempt): leveret::Attempt, text: String| async move {
        match (text.as_str(), attempt) {
            ("never", _) => Err(Failure::retry("not yet").kind("impatient")),
            ("done", _) => Err(Failure::done("nothing to do").kind("done")),
            (_, 1 | 2) => Err(Failure::retry("not yet")),
            _ => Ok(Json(attempt)),
        }
    };
    let service = client.service("work").retry(soon_again()).retry_calls().method("m", third);
    let service = Running::start(service).await;
    let rpc = client.rpc("work").build().await.unwrap();
    let Json(attempt): Json<u32> = soon("a reply", rpc.call("m", "")).await.unwrap();
    assert_eq!(attempt, 3);
    let error = soon("a reply", rpc.call::<()>("m", "never")).await.unwrap_err();
    let remote = error.remote().unwrap();
    assert_eq!((&*remote.kind, &*remote.text), ("impatient", "not yet"));
    let error = soon("a reply", rpc.call::<()>("m", "done")).await.unwrap_err();
    assert_eq!(error.remote().unwrap().kind, "done");
    assert_eq!(soon("the end", service.stop()).await.parked, 1);
}

async fn count(Json(to): Json<u64>, mut replier: Replier) -> Result<End, BoxError> {
    for number in 1..=to {
        replier.send(Json(number)).await?;
        if number == 13 {
            return Err("bad luck".into());
        }
    }
    Ok(End)
}

async fn count_and_sum(Json(to): Json<u64>, mut replier: Replier) -> Result<Json<u64>, Error> {
    for number in 1..=to {
        replier.send(Json(number)).await?;
    }
    Ok(Json((1..=to).sum()))
}

#[tokio::test]
async fn a_method_may_have_many_replies() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let service = client.service("s").method("count", count).method("sum", count_and_sum);
    let service = Running::start(service).await;
    for replies in ALL_REPLIES {
        let rpc = client.rpc("s").replies(replies).build().await.unwrap();
        let all = async |method: &str, to: u64| {
            let mut stream = soon("a stream", rpc.stream::<Json<u64>>(method, Json(to))).await?;
            let mut all = Vec::new();
            while let Some(number) = soon("a reply", stream.next()).await {
                all.push(number.map(|Json(number)| number).map_err(|error| error.kind()));
            }
            assert!(stream.next().await.is_none());
            Ok::<_, Error>(all)
        };
        assert_eq!(all("count", 3).await.unwrap(), [Ok(1), Ok(2), Ok(3)]);
        assert_eq!(all("count", 0).await.unwrap(), []);
        assert_eq!(all("sum", 3).await.unwrap(), [Ok(1), Ok(2), Ok(3), Ok(6)]);
        assert_eq!(all("count", 200).await.unwrap().last(), Some(&Err(ErrorKind::Remote)));
        assert_eq!(all("sum", 200).await.unwrap().len(), 201);
        assert_eq!(all("nothing", 1).await.unwrap(), [Err(ErrorKind::Remote)]);
        // Who wants one reply passes over the others.
        let Json(sum): Json<u64> = soon("a reply", rpc.call("sum", Json(4))).await.unwrap();
        assert_eq!(sum, 10);
        let error = soon("a reply", rpc.call::<()>("count", Json(2))).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Payload, "{error}");
        assert_eq!((rpc.in_flight(), rpc.stray_replies()), (0, 0), "{replies:?}");
    }
    let nobody = client.rpc("nobody").build().await.unwrap();
    let mut stream = soon("a stream", nobody.stream::<()>("m", "")).await.unwrap();
    let error = soon("an outcome", stream.next()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unroutable);
    assert_eq!(soon("the end", service.stop()).await.handled, 24);
}

#[tokio::test]
async fn a_stream_that_is_not_read_ends_with_an_error() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let _service = Running::start(client.service("s").method("sum", count_and_sum)).await;
    let rpc = client.rpc("s").build().await.unwrap();
    let stream = rpc.stream::<Json<u64>>("sum", Json(100u64)).buffer(10);
    let mut stream = soon("a stream", stream).await.unwrap();
    // All of its replies are here before that of the next call.
    soon("a reply", rpc.call::<()>("sum", Json(0u64))).await.unwrap();
    until_depth(&client, "s", 0).await;
    for number in 1..=10 {
        assert_eq!(soon("a reply", stream.next()).await.unwrap().unwrap().0, number);
    }
    let error = soon("the end", stream.next()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    assert!(stream.next().await.is_none());
}

/// Asks as anybody may, and gives the reply that comes to a queue.
async fn ask(client: &Client, service: &str, reply_to: &str, id: Option<&[u8]>) {
    let publisher = publisher(client).await;
    let correlation_id = id.map(|id| leveret::amqp::ShortStr::from_bytes(id.to_vec()).unwrap());
    let properties = Properties {
        reply_to: Some(reply_to.to_owned().try_into().unwrap()),
        correlation_id,
        kind: Some("double".try_into().unwrap()),
        ..Properties::default()
    };
    let request = Message::with_properties("21", properties);
    soon("a request", publisher.publish(service, request)).await.unwrap();
}

#[tokio::test]
async fn replies_go_where_reply_to_says() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let topology = Topology::new()
        .exchange(Exchange::fanout("f"))
        .exchange(Exchange::topic("t"))
        .exchange(Exchange::direct("d"))
        .queue(Queue::classic("replies").bind("f", "").bind("t", "a.#").bind("d", "k"));
    soon("a topology", client.apply(&topology)).await.unwrap();
    let service = numbers(&client).await;
    let mut replies = client.consumer("replies").stream().await.unwrap();
    for reply_to in
        ["replies", "direct:///replies", "fanout://f/k", "topic://t/a.b/c", "direct://d/k"]
    {
        for id in [Some(&b"any \xff id"[..]), None] {
            ask(&client, "numbers", reply_to, id).await;
            let reply = next(&mut replies).await;
            assert_eq!(reply.body(), "42");
            let correlation_id = reply.properties().correlation_id;
            assert_eq!(correlation_id.as_ref().map(|id| id.as_bytes()), id, "{reply_to}");
            reply.ack().unwrap();
        }
    }
    // Who is not there to get a reply is no reason to do it again, nor to fail others.
    for reply_to in [
        "nowhere",
        "direct://missing/k",
        "direct://d/other",
        "amq.rabbitmq.reply-to.forged",
        "fanout://missing too/k",
        "replies",
    ] {
        ask(&client, "numbers", reply_to, None).await;
    }
    assert_eq!(next(&mut replies).await.body(), "42");
    eventually(SOON, "an empty queue", async || {
        let info = client.inspect_queue("numbers").await.map_err(|error| error.to_string())?;
        if info.messages == 0 { Ok(()) } else { Err(format!("{info:?}")) }
    })
    .await;
    let summary = soon("the end", service.stop()).await;
    assert_eq!((summary.handled, summary.failed), (16, 0));
    until_depth(&client, "numbers", 0).await;
}

#[tokio::test]
async fn a_service_that_is_stopped_answers_what_it_has_begun() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let wait = |State((begun, go_on)): State<(Arc<Notify>, Arc<Notify>)>| async move {
        begun.notify_one();
        go_on.notified().await;
        "done"
    };
    let state = (Arc::clone(&begun), Arc::clone(&go_on));
    let service = client.service("s").workers(2).state(state).method("wait", wait);
    let mut service = Running::start(service).await;
    let rpc = client.rpc("s").build().await.unwrap();
    let call = tokio::spawn({
        let rpc = rpc.clone();
        async move { rpc.call::<String>("wait", "").await }
    });
    soon("the begin", begun.notified()).await;
    service.begin_stop();
    go_on.notify_one();
    assert_eq!(soon("a reply", call).await.unwrap().unwrap(), "done");
    let summary = soon("the end", service.stop()).await;
    assert_eq!((summary.handled, summary.abandoned), (1, 0));
}

#[tokio::test]
async fn an_error_of_a_layer_is_answered_like_one_of_a_method() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let hang = || async { std::future::pending::<()>().await };
    let layer = tower::timeout::TimeoutLayer::new(Duration::from_millis(50));
    let _service = Running::start(client.service("s").layer(layer).method("hang", hang)).await;
    let rpc = client.rpc("s").build().await.unwrap();
    let error = soon("a reply", rpc.call::<()>("hang", "")).await.unwrap_err();
    assert!(error.remote().unwrap().text.contains("timed out"), "{error}");
}

#[tokio::test]
async fn a_transactional_service_answers_and_settles_at_once() {
    let vhost = rabbitmq::vhost().await;
    let failed = Queue::classic("failed");
    let client = client_with(&vhost, failed).await;
    let queue = Queue::classic("tx").dead_letter_to("").dead_letter_key("failed");
    let service = client
        .service("tx")
        .queue(queue)
        .transactional()
        .method("double", double)
        .method("sum", count_and_sum)
        .method("fail", |text: String| async move { Err::<(), BoxError>(text.into()) });
    let service = Running::start(service).await;
    for replies in ALL_REPLIES {
        let rpc = client.rpc("tx").replies(replies).build().await.unwrap();
        assert_eq!(call_double(&rpc, 21).await.unwrap(), 42);
        let error = soon("a reply", rpc.call::<()>("fail", "no")).await.unwrap_err();
        assert_eq!(error.remote().unwrap().text, "no");
        let mut stream = soon("a stream", rpc.stream::<Json<u64>>("sum", Json(2))).await.unwrap();
        for number in [1, 2, 3] {
            assert_eq!(soon("a reply", stream.next()).await.unwrap().unwrap().0, number);
        }
        assert!(soon("the end", stream.next()).await.is_none());
    }
    let rpc = client.rpc("tx").build().await.unwrap();
    soon("a cast", rpc.cast("fail", "1")).await.unwrap();
    until_depth(&client, "failed", 1).await;
    for reply_to in ["nowhere", "direct://missing/k"] {
        ask(&client, "tx", reply_to, None).await;
    }
    assert_eq!(call_double(&rpc, 1).await.unwrap(), 2);
    let summary = soon("the end", service.stop()).await;
    assert_eq!((summary.handled, summary.failed), (12, 1));
    until_depth(&client, "tx", 0).await;
}

#[tokio::test]
async fn a_transaction_that_is_not_committed_has_not_happened() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    type Gate = (Arc<Notify>, Arc<Notify>);
    let twice = |mut replier: Replier, State((begun, go_on)): State<Gate>, incoming: Incoming| async move {
        replier.send(Json(incoming.redelivered())).await?;
        begun.notify_one();
        go_on.notified().await;
        Ok::<_, Error>(Json(incoming.redelivered()))
    };
    let state = (Arc::clone(&begun), Arc::clone(&go_on));
    let service = client.service("s").transactional().state(state).method("twice", twice);
    // RabbitMQ 3.10 lets direct replies out at once.
    for replies in [Replies::Queue, Replies::QueuePerCall] {
        let rpc = client.rpc("s").replies(replies).build().await.unwrap();
        let crashes = Running::start(service.clone()).await;
        let stream = rpc.stream::<Json<bool>>("twice", "");
        let mut stream = soon("a stream", stream).await.unwrap();
        soon("the begin", begun.notified()).await;
        drop(crashes);
        let service = Running::start(service.clone()).await;
        soon("the begin", begun.notified()).await;
        go_on.notify_one();
        for _ in 0..2 {
            let Json(redelivered) = soon("a reply", stream.next()).await.unwrap().unwrap();
            assert!(redelivered, "{replies:?}: a reply of the one that crashed");
        }
        assert!(soon("the end", stream.next()).await.is_none());
        assert_eq!(rpc.stray_replies(), 0);
        assert_eq!(soon("the end", service.stop()).await.handled, 1);
    }
}

#[tokio::test]
async fn no_address_of_a_reply_stops_a_service() {
    let vhost = rabbitmq::vhost().await;
    // RabbitMQ 3.10 closes the connection over some of them, which is that of the service.
    let (asking, client) = (client(&vhost).await, client(&vhost).await);
    let internal = Exchange::topic("internal").internal();
    soon("an exchange", client.apply(&Topology::new().exchange(internal))).await.unwrap();
    let long = "r".repeat(255);
    let addresses = [
        "amq.rabbitmq.reply-to.",
        "amq.rabbitmq.reply-to.odd",
        "amq.rabbitmq.reply-to.g1hkAA==.AAAA",
        "direct:///amq.rabbitmq.reply-to.odd",
        "topic://internal/k",
        "topic://amq.rabbitmq.trace/k",
        "direct://amq.default/k",
        "direct:///",
        &long,
    ];
    for service in [client.service("tx").transactional(), client.service("confirmed")] {
        let name = if format!("{service:?}").contains("tx") { "tx" } else { "confirmed" };
        let calls = Arc::new(AtomicU64::new(0));
        let count = |State(calls): State<Arc<AtomicU64>>| async move {
            // Who is called over and over gives up.
            if calls.fetch_add(1, Ordering::Relaxed) > 50 {
                std::future::pending::<()>().await;
            }
        };
        let service = service.method("double", count).state(Arc::clone(&calls));
        let service = Running::start(service).await;
        for (before, reply_to) in addresses.into_iter().enumerate() {
            ask(&asking, name, reply_to, Some(b"id")).await;
            let is_called = async || calls.load(Ordering::Relaxed) > before as u64;
            eventually(SOON, format!("a call for {reply_to:?}"), is_called).await;
        }
        let rpc = asking.rpc(name).build().await.unwrap();
        soon("a reply", rpc.call::<()>("double", Json(1))).await.unwrap();
        let summary = soon("the end", service.stop()).await;
        assert_eq!((name, summary.handled), (name, addresses.len() as u64 + 1));
        // In a transaction, one for which the connection is closed is called once more: it may have been another's doing.
        let (calls, least) = (calls.load(Ordering::Relaxed), addresses.len() as u64 + 1);
        let most = if name == "tx" { least + 1 } else { least };
        assert!((least..=most).contains(&calls), "{name}: {calls} calls");
        until_depth(&client, name, 0).await;
    }
}

#[tokio::test]
async fn what_does_not_go_together_is_refused() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let service = || client.service("s").method("m", double);
    for service in [
        service().transactional().workers(2),
        service().transactional().prefetch(2),
        service().transactional().subscribers(2),
        service().transactional().retry(soon_again()),
        service().transactional().retry_calls(),
        service().queue(Queue::quorum("other")),
        service().method("a.#", double),
        service().method("m", double),
        service().method(&"m".repeat(256), double),
        client.service("").method("m", double),
        client.service("s").exchange("x").queue(Queue::classic("")).method("m", double),
    ] {
        let error = soon("an outcome", service.run()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    let rpc = client.rpc("s").replies(Replies::QueuePerCall).on_loss(OnLoss::Replay).build().await;
    assert_eq!(rpc.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn an_error_that_cannot_be_sent_is_told_in_short() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    // It goes into a header, which has to fit into one frame.
    let fail = || async { Err::<(), _>(Failure::permanent("no").kind("k".repeat(200_000))) };
    for service in [client.service("tx").transactional(), client.service("confirmed")] {
        let name = if format!("{service:?}").contains("tx") { "tx" } else { "confirmed" };
        let service = Running::start(service.method("fail", fail)).await;
        for replies in ALL_REPLIES {
            let rpc = client.rpc(name).replies(replies).build().await.unwrap();
            let error = soon("an outcome", rpc.call::<()>("fail", "")).await.unwrap_err();
            assert_eq!(error.remote().expect("an error of the service").kind, "unsendable");
        }
        assert_eq!(soon("the end", service.stop()).await.handled, 3);
    }
}

#[tokio::test]
async fn nothing_is_sent_after_the_last_reply() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    for service in [client.service("tx").transactional(), client.service("confirmed")] {
        let name = if format!("{service:?}").contains("tx") { "tx" } else { "confirmed" };
        let (sender, mut kept) = mpsc::channel::<Replier>(1);
        let keep = move |mut replier: Replier| {
            let sender = sender.clone();
            async move {
                replier.send("first").await?;
                sender.send(replier).await?;
                Ok::<_, BoxError>("last")
            }
        };
        let _service = Running::start(service.method("keep", keep)).await;
        let rpc = client.rpc(name).build().await.unwrap();
        let mut replies = soon("replies", rpc.stream::<String>("keep", "")).await.unwrap();
        for expected in ["first", "last"] {
            let reply = soon("a reply", replies.next()).await.expect("a reply");
            assert_eq!(reply.unwrap(), expected);
        }
        let mut replier = soon("what the method kept", kept.recv()).await.unwrap();
        let error = soon("an outcome", replier.send("late")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}
