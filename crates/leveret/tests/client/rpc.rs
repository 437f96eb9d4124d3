use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use leveret::amqp::{DeleteExchange, DeleteQueue, Properties};
use leveret::{
    Client, End, Error, ErrorKind, Json, Message, OnLoss, Queue, Replier, Replies, Rpc, State,
};
use leveret_broker::Broker;
use leveret_testkit::eventually;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use crate::services::{CALLS, Running, crashing, double, each_its_own, storm};
use crate::{PATIENCE, broker, builder_of, client_of, client_with, depth, soon, unsettled};

async fn numbers(client: &Client) -> Running {
    Running::start(client.service("numbers").method("double", double)).await
}

async fn call_double(rpc: &Rpc, number: u64) -> Result<u64, Error> {
    let Json(doubled): Json<u64> = soon("a reply", rpc.call("double", Json(number))).await?;
    Ok(doubled)
}

/// Calls again if a connection was lost right before.
async fn until_it_works(rpc: &Rpc) {
    eventually(PATIENCE, "a reply", async || match call_double(rpc, 4).await {
        Ok(doubled) => {
            assert_eq!(doubled, 8);
            Ok(())
        }
        Err(error) => Err(error.to_string()),
    })
    .await;
}

fn channels(broker: &Broker, connection: &str) -> usize {
    let snapshot = broker.snapshot();
    let connections = &snapshot.virtual_host("/").unwrap().connections;
    let is_it = |name: &Option<String>| name.as_ref().is_some_and(|name| name == connection);
    connections.iter().filter(|found| is_it(&found.name)).map(|found| found.channels.len()).sum()
}

#[tokio::test(start_paused = true)]
async fn nothing_is_opened_before_the_first_call_and_nothing_stays_open() {
    let broker = broker();
    let server = client_of(&broker).await;
    let caller = builder_of(&broker).name("caller").connect().await.unwrap();
    let _service = numbers(&server).await;
    let rpc = caller.rpc("numbers").build().await.unwrap();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(channels(&broker, "caller (publishing)"), 0);
    let clone = rpc.clone();
    assert_eq!(call_double(&rpc, 21).await.unwrap(), 42);
    assert_eq!(channels(&broker, "caller (publishing)"), 1);
    drop(rpc);
    assert_eq!(call_double(&clone, 21).await.unwrap(), 42);
    assert_eq!(channels(&broker, "caller (publishing)"), 1);
    drop(clone);
    eventually(PATIENCE, "no channel", async || channels(&broker, "caller (publishing)") == 0)
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_forgotten_consumer_of_replies_is_found_and_begins_again() {
    let broker = broker();
    let server = client_of(&broker).await;
    let client = client_of(&broker).await;
    let _service = numbers(&server).await;
    let building = client.rpc("numbers").replies(Replies::Queue).on_loss(OnLoss::Replay);
    let rpc = building.timeout(Duration::from_secs(300)).build().await.unwrap();
    assert_eq!(call_double(&rpc, 1).await.unwrap(), 2);
    assert_eq!(client.health().consumers.len(), 0, "it is none of the application's");
    // Long enough for the broker to have been asked once.
    sleep(Duration::from_secs(1)).await;
    let snapshot = broker.snapshot();
    let queues = &snapshot.virtual_host("/").unwrap().queues;
    let of_replies = queues.iter().find(|queue| queue.name.starts_with("amq.gen")).unwrap();
    assert_eq!(broker.faults().forget_consumers("/", &of_replies.name), 1);
    assert_eq!(call_double(&rpc, 2).await.unwrap(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_queue_for_a_call_is_gone_with_it() {
    let broker = broker();
    let client = client_of(&broker).await;
    let _service = numbers(&client).await;
    let queues = || broker.snapshot().virtual_host("/").unwrap().queues.len();
    let before = queues();
    let rpc = client.rpc("numbers").replies(Replies::QueuePerCall).build().await.unwrap();
    for _ in 0..3 {
        assert_eq!(call_double(&rpc, 1).await.unwrap(), 2);
    }
    eventually(PATIENCE, "no queue more", async || queues() == before).await;
    let rpc = client.rpc("numbers").replies(Replies::Queue).build().await.unwrap();
    for _ in 0..3 {
        assert_eq!(call_double(&rpc, 1).await.unwrap(), 2);
    }
    assert_eq!(queues(), before + 1);
    drop(rpc);
    eventually(PATIENCE, "no queue more", async || queues() == before).await;
}

#[tokio::test(start_paused = true)]
async fn a_queue_for_a_call_names_it_and_its_reply_needs_no_id() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("plain")).await;
    let mut requests = client.consumer("plain").stream().await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    tokio::spawn(async move {
        while let Some(Ok(request)) = requests.next().await {
            let reply_to = request.properties().reply_to.unwrap().to_string();
            publisher.publish(&reply_to, request.body().clone()).await.unwrap();
            request.ack().unwrap();
        }
    });
    let rpc = client.rpc("plain").replies(Replies::QueuePerCall).build().await.unwrap();
    let calls = ["a", "b", "c"].map(|body| {
        let rpc = rpc.clone();
        async move { soon("a reply", rpc.call::<String>("m", body)).await.unwrap() }
    });
    assert_eq!(futures_util::future::join_all(calls).await, ["a", "b", "c"]);
    assert_eq!((rpc.in_flight(), rpc.stray_replies()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_cast_changes_nothing_that_the_message_says() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("plain")).await;
    let rpc = client.rpc("plain").build().await.unwrap();
    let long_ago = std::time::UNIX_EPOCH + Duration::from_secs(7);
    let own = || {
        let message = Message::new("own").message_id("1").correlation_id("2").reply_to("3");
        message.timestamp(long_ago).transient().content_type("text/plain").header("n", 1)
    };
    let take = async || {
        let got = client.get("plain", Default::default()).await.unwrap().expect("a request");
        let properties = got.properties().into_owned();
        got.ack().unwrap();
        properties
    };
    let sent = |message: Message| message.into_parts().unwrap().1;
    // The method is a part of the address, and without one there is none.
    for (method, message, expected) in [
        ("m", own(), own().kind("m")),
        ("m", own().kind("m"), own().kind("m")),
        ("", own(), own()),
        ("", own().kind("theirs"), own().kind("theirs")),
    ] {
        soon("an outcome", rpc.cast(method, message)).await.unwrap();
        assert_eq!(take().await, sent(expected));
    }
    soon("an outcome", rpc.cast("", "bare")).await.unwrap();
    let bare = take().await;
    assert_eq!((bare.kind, bare.correlation_id, bare.delivery_mode), (None, None, Some(2)));
    assert!(bare.message_id.is_some() && bare.timestamp.is_some());
    // Two names for one place.
    let theirs = || own().kind("theirs");
    let cast = soon("an outcome", rpc.cast("m", theirs())).await;
    let call = soon("an outcome", rpc.call::<()>("m", theirs())).await;
    for error in [cast.unwrap_err(), call.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("theirs"), "{error}");
    }
    assert_eq!((rpc.in_flight(), depth(&broker, "plain")), (0, Some(0)));
}

#[tokio::test(start_paused = true)]
async fn a_service_with_one_function_serves_requests_that_name_no_method() {
    let broker = broker();
    let client = client_of(&broker).await;
    let upper = async |text: String| text.to_uppercase();
    let _service = Running::start(client.service("one").fallback(upper)).await;
    let rpc = client.rpc("one").build().await.unwrap();
    for method in ["", "any"] {
        let reply: String = soon("a reply", rpc.call(method, "hello")).await.unwrap();
        assert_eq!(reply, "HELLO");
    }
    let _numbers = numbers(&client).await;
    let rpc = client.rpc("numbers").build().await.unwrap();
    let error = soon("a reply", rpc.call::<()>("", "1")).await.unwrap_err();
    let remote = error.remote().unwrap();
    assert_eq!(remote.kind, "unknown-method");
    assert!(remote.text.contains("fallback"), "{remote}");
}

#[tokio::test(start_paused = true)]
async fn a_call_takes_no_longer_than_it_may() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("silent")).await;
    let rpc = client.rpc("silent").timeout(Duration::from_secs(3600)).build().await.unwrap();
    for (timeout, takes) in [(None, 3600), (Some(Duration::from_secs(5)), 5)] {
        let began = Instant::now();
        let mut call = rpc.call::<()>("m", "");
        if let Some(timeout) = timeout {
            call = call.timeout(timeout);
        }
        let error = call.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert_eq!(began.elapsed().as_secs(), takes);
    }
    let stream = rpc.stream::<()>("m", "").timeout(Duration::from_secs(7));
    let mut stream = soon("a stream", stream).await.unwrap();
    let began = Instant::now();
    let error = stream.next().await.unwrap().unwrap_err();
    assert_eq!((error.kind(), began.elapsed().as_secs()), (ErrorKind::TimedOut, 7));
    assert!(stream.next().await.is_none());
    assert_eq!(rpc.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn each_of_many_calls_takes_no_longer_than_it_may() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("silent")).await;
    let rpc = client.rpc("silent").build().await.unwrap();
    let first = rpc.call::<()>("m", "").timeout(Duration::from_millis(1)).await;
    assert_eq!(first.unwrap_err().kind(), ErrorKind::TimedOut);
    let began = Instant::now();
    let calls = [7_000, 3_000, 3_000, 9_000, 0, 1_000, 1_400, 8_000].map(|time| {
        let call = rpc.call::<()>("m", "").timeout(Duration::from_millis(time));
        async move {
            let error = call.await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
            assert!(error.to_string().contains(&format!("{:?}", Duration::from_millis(time))));
            let late = began.elapsed().checked_sub(Duration::from_millis(time));
            // Timers are as precise as that, and there may be two.
            assert!(late.is_some_and(|late| late.as_millis() <= 3), "{late:?} after {time} ms");
        }
    });
    let patient = rpc.call::<()>("m", "");
    let patient = tokio::time::timeout(Duration::from_secs(20), patient);
    let (late, _) = tokio::join!(patient, futures_util::future::join_all(calls));
    late.unwrap_err();
    assert_eq!((rpc.in_flight(), began.elapsed().as_secs()), (0, 20));
    // There is time for the next one, whoever was forgotten before.
    let forgotten = rpc.call::<()>("m", "").timeout(Duration::from_secs(5));
    tokio::time::timeout(Duration::from_secs(1), forgotten).await.unwrap_err();
    let began = Instant::now();
    let next = rpc.call::<()>("m", "").timeout(Duration::from_secs(30)).await;
    assert_eq!(next.unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(began.elapsed().as_secs(), 30);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_to_be_sent_again_takes_no_longer_than_it_may_while_there_is_no_broker() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("silent")).await;
    let rpc = client.rpc("silent").on_loss(OnLoss::Replay).build().await.unwrap();
    // So that there is a channel.
    rpc.call::<()>("m", "").timeout(Duration::from_secs(1)).await.unwrap_err();
    let began = Instant::now();
    let mut call = pin!(rpc.call::<()>("m", "").timeout(Duration::from_secs(20)).into_future());
    assert!((&mut call).now_or_never().is_none());
    assert_eq!(rpc.in_flight(), 1);
    broker.shutdown().await;
    let error = call.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(began.elapsed().as_secs(), 20);
    assert_eq!(rpc.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_next_reply_of_a_stream_has_its_own_time() {
    let broker = broker();
    let client = client_of(&broker).await;
    let count = |mut replier: Replier| async move {
        for number in 0..5 {
            sleep(Duration::from_secs(2)).await;
            replier.send(Json(number)).await?;
        }
        sleep(Duration::from_secs(4)).await;
        Ok::<_, Error>(End)
    };
    let _service = Running::start(client.service("s").method("count", count)).await;
    let rpc = client.rpc("s").build().await.unwrap();
    let stream = rpc.stream::<Json<u64>>("count", "").timeout(Duration::from_secs(3));
    let mut stream = soon("a stream", stream).await.unwrap();
    for number in 0..5 {
        assert_eq!(soon("a reply", stream.next()).await.unwrap().unwrap().0, number);
    }
    let error = soon("the end", stream.next()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
}

/// However the service ends: its time is over, or it is dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_method_that_computes_beyond_the_end_of_its_service_is_answered() {
    for is_dropped in [false, true] {
        let broker = broker();
        let client = client_of(&broker).await;
        let begun = Arc::new(Notify::new());
        let begin = Arc::clone(&begun);
        let (release, released) = std::sync::mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let compute = move |Json(number): Json<u64>| {
            let (begin, released) = (Arc::clone(&begin), Arc::clone(&released));
            async move {
                begin.notify_one();
                let _ = released.lock().unwrap().recv();
                Json(2 * number)
            }
        };
        let service = client.service("numbers").workers(2).drain(Duration::ZERO);
        let service = Running::start(service.method("double", compute)).await;
        let rpc = client.rpc("numbers").build().await.unwrap();
        let call = tokio::spawn(async move { call_double(&rpc, 21).await });
        soon("a request", begun.notified()).await;
        match is_dropped {
            true => drop(service),
            false => assert_eq!(soon("the end", service.stop()).await.abandoned, 1),
        }
        // Its task is dropped a little later than what owns it. A reply that goes out before that may come twice.
        eventually(PATIENCE, "the service is gone", async || {
            let snapshot = broker.snapshot();
            snapshot.virtual_host("/").unwrap().queue("numbers").unwrap().consumers.is_empty()
        })
        .await;
        release.send(()).unwrap();
        assert_eq!(soon("a reply", call).await.unwrap().unwrap(), 42);
        eventually(PATIENCE, "nothing is left", async || {
            (depth(&broker, "numbers"), unsettled(&broker, "numbers")) == (Some(0), Some(0))
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn calls_wait_while_the_broker_blocks_publishers() {
    let broker = broker();
    let client = client_of(&broker).await;
    // Otherwise its replies would be blocked with the requests.
    let server = builder_of(&broker).name("server").connect().await.unwrap();
    let _service = numbers(&server).await;
    let rpc = client.rpc("numbers").build().await.unwrap();
    assert_eq!(call_double(&rpc, 1).await.unwrap(), 2);
    broker.faults().block("no memory");
    // What is on its way when the block begins is let through.
    let first = rpc.call::<Json<u64>>("double", Json(2)).timeout(Duration::from_secs(1)).await;
    let began = Instant::now();
    let error = rpc.call::<Json<u64>>("double", Json(2)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}, after {first:?}");
    assert_eq!(error.blocked_by_broker(), Some("no memory"));
    assert_eq!(began.elapsed().as_secs(), 30);
    let call = tokio::spawn({
        let rpc = rpc.clone();
        async move { rpc.call::<Json<u64>>("double", Json(3)).await }
    });
    sleep(Duration::from_secs(1)).await;
    broker.faults().unblock();
    assert_eq!(soon("a reply", call).await.unwrap().unwrap().0, 6);
    assert_eq!(rpc.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn no_more_calls_are_under_way_than_allowed() {
    let broker = broker();
    let client = client_of(&broker).await;
    let go_on = Arc::new(Notify::new());
    let wait = |State(go_on): State<Arc<Notify>>| async move { go_on.notified().await };
    let service = client.service("s").state(Arc::clone(&go_on)).method("wait", wait);
    let _service = Running::start(service).await;
    let rpc = client.rpc("s").max_in_flight(3).build().await.unwrap();
    let calls: Vec<_> = (0..10)
        .map(|_| {
            let rpc = rpc.clone();
            tokio::spawn(async move { rpc.call::<()>("wait", "").await })
        })
        .collect();
    sleep(Duration::from_millis(10)).await;
    // What cannot be sent does not wait for room to be told so.
    let unsendable = leveret::Message::new("").kind("x".repeat(256));
    let error = rpc.call::<()>("wait", unsendable).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
    for left in (0..10).rev() {
        sleep(Duration::from_millis(10)).await;
        assert_eq!(rpc.in_flight(), 3.min(left + 1));
        go_on.notify_one();
    }
    for call in calls {
        soon("a reply", call).await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn who_has_had_the_last_reply_takes_no_room_from_others() {
    let broker = broker();
    let client = client_of(&broker).await;
    let _service = numbers(&client).await;
    for replies in [Replies::Direct, Replies::Queue, Replies::QueuePerCall] {
        let rpc = client.rpc("numbers").replies(replies).max_in_flight(1).build().await.unwrap();
        let mut numbers = rpc.stream::<Json<u64>>("double", Json(2)).await.unwrap();
        assert_eq!(rpc.in_flight(), 1);
        assert_eq!(soon("a reply", numbers.next()).await.unwrap().unwrap().0, 4);
        assert_eq!(rpc.in_flight(), 0);
        // The stream is still there, and there is room for one.
        assert_eq!(call_double(&rpc, 3).await.unwrap(), 6);
        assert!(numbers.next().await.is_none());
        drop(numbers);
        let _silent = rpc.stream::<()>("double", Json(4)).await.unwrap();
        let mut next = pin!(call_double(&rpc, 5));
        assert!(next.as_mut().now_or_never().is_none());
        assert_eq!(rpc.in_flight(), 1, "one has room, and no more");
    }
}

#[tokio::test(start_paused = true)]
async fn a_reply_survives_the_connection_that_it_is_sent_over() {
    let broker = broker();
    let server = builder_of(&broker).name("server").connect().await.unwrap();
    let caller = builder_of(&broker).name("caller").connect().await.unwrap();
    let cut = |name: &str| {
        assert_eq!(broker.faults().cut_connections_named(name), 1, "{name}");
    };
    let gate = Gate::default();
    let Gate { begun, go_on } = gate.clone();
    let _service = Running::start(server.service("s").state(gate).method("wait", wait)).await;
    let rpc = caller.rpc("s").build().await.unwrap();
    let call = tokio::spawn({
        let rpc = rpc.clone();
        async move { rpc.call::<String>("wait", "").await }
    });
    soon("the begin", begun.notified()).await;
    broker.faults().freeze();
    go_on.notify_one();
    // The reply is in the hands of the server, and not in those of the broker.
    sleep(Duration::from_millis(10)).await;
    broker.faults().thaw();
    cut("server (publishing)");
    assert_eq!(soon("a reply", call).await.unwrap().unwrap(), "done");

    // A service that cannot ack gets the request again, and its second reply is a stray.
    let call = tokio::spawn({
        let rpc = rpc.clone();
        async move { rpc.call::<String>("wait", "").await }
    });
    soon("the begin", begun.notified()).await;
    cut("server (consuming)");
    soon("the begin", begun.notified()).await;
    go_on.notify_one();
    go_on.notify_one();
    assert_eq!(soon("a reply", call).await.unwrap().unwrap(), "done");
    sleep(Duration::from_secs(1)).await;
    go_on.notify_one();
    eventually(PATIENCE, "a stray reply", async || rpc.stray_replies() == 1).await;
    eventually(PATIENCE, "an ack", async || depth(&broker, "s") == Some(0)).await;
}

/// A method that tells when it begins, and goes on when it is told to.
async fn wait(State(Gate { begun, go_on }): State<Gate>) -> &'static str {
    begun.notify_one();
    go_on.notified().await;
    "done"
}

#[derive(Clone, Default)]
struct Gate {
    begun: Arc<Notify>,
    go_on: Arc<Notify>,
}

#[tokio::test(start_paused = true)]
async fn a_request_is_acked_when_its_reply_is_confirmed_and_not_before() {
    let broker = broker();
    let client = client_of(&broker).await;
    let gate = Gate::default();
    let _service =
        Running::start(client.service("s").state(gate.clone()).method("wait", wait)).await;
    let rpc = client.rpc("s").build().await.unwrap();
    let call = tokio::spawn(async move { rpc.call::<String>("wait", "").await });
    soon("the begin", gate.begun.notified()).await;
    broker.faults().block("no memory");
    // A connection is blocked when it publishes.
    let publisher = client.publisher("").allow_unroutable().build().await.unwrap();
    let _ = tokio::time::timeout(Duration::from_secs(1), publisher.publish("nobody", "")).await;
    gate.go_on.notify_one();
    sleep(Duration::from_secs(5)).await;
    let unsettled = || {
        let snapshot = broker.snapshot();
        snapshot.virtual_host("/").unwrap().queue("s").unwrap().unsettled
    };
    assert_eq!(unsettled(), 1);
    broker.faults().unblock();
    assert_eq!(soon("a reply", call).await.unwrap().unwrap(), "done");
    eventually(PATIENCE, "an ack", async || unsettled() == 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_reply_queue_that_somebody_deletes_is_made_again() {
    let broker = broker();
    let client = client_of(&broker).await;
    let hang = || async { std::future::pending::<()>().await };
    let service = client.service("s").method("hang", hang).method("double", double);
    let _service = Running::start(service).await;
    for on_loss in [OnLoss::Fail, OnLoss::Replay] {
        let rpc = client.rpc("s").replies(Replies::Queue).on_loss(on_loss).build().await.unwrap();
        assert_eq!(call_double(&rpc, 1).await.unwrap(), 2);
        let call = tokio::spawn({
            let rpc = rpc.clone();
            async move { rpc.call::<()>("hang", "").await }
        });
        eventually(PATIENCE, "a call", async || rpc.in_flight() == 1).await;
        sleep(Duration::from_millis(10)).await;
        let snapshot = broker.snapshot();
        let queues = &snapshot.virtual_host("/").unwrap().queues;
        let queue = queues.iter().find(|queue| queue.exclusive).expect("a reply queue");
        assert_eq!(broker.faults().cancel_consumers("/", &queue.name), 1);
        if on_loss == OnLoss::Fail {
            let error = soon("an outcome", call).await.unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
        }
        assert_eq!(call_double(&rpc, 2).await.unwrap(), 4);
    }
}

#[tokio::test(start_paused = true)]
async fn an_exchange_that_somebody_deletes_is_declared_again() {
    let broker = broker();
    let client = client_of(&broker).await;
    let service = client.service("s").exchange("x").method("double", double);
    let _service = Running::start(service).await;
    let rpc = client.rpc("s").exchange("x").build().await.unwrap();
    assert_eq!(call_double(&rpc, 1).await.unwrap(), 2);
    let other = client_of(&broker).await;
    other.delete_exchange("x", DeleteExchange::Always).await.unwrap();
    let error = call_double(&rpc, 1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Missing, "{error}");
    assert_eq!(call_double(&rpc, 1).await.unwrap(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_reply_that_cannot_be_sent_is_an_error_for_its_caller_alone() {
    let broker = Broker::builder().max_message_size(1000).start().unwrap();
    let client = client_of(&broker).await;
    let fill = |Json(bytes): Json<usize>| async move { "x".repeat(bytes) };
    let _service = Running::start(client.service("s").method("fill", fill)).await;
    let rpc = client.rpc("s").build().await.unwrap();
    let call = |bytes: usize| {
        let rpc = rpc.clone();
        tokio::spawn(async move { rpc.call::<String>("fill", Json(bytes)).await })
    };
    let calls = [10, 2000, 20].map(call);
    let mut lengths = Vec::new();
    for call in calls {
        lengths.push(match soon("a reply", call).await.unwrap() {
            Ok(text) => Ok(text.len()),
            Err(error) => Err(error.remote().map(|remote| remote.kind.clone())),
        });
    }
    assert_eq!(lengths, [Ok(10), Err(Some("unsendable".to_owned())), Ok(20)]);
    // A request that cannot be sent takes its channel along.
    let error = soon("an outcome", rpc.call::<()>("fill", "x".repeat(2000))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Broker, "{error}");
    assert_eq!(soon("a reply", call(5)).await.unwrap().unwrap(), "xxxxx");
}

#[tokio::test(start_paused = true)]
async fn calls_end_with_their_client() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("silent")).await;
    for on_loss in [OnLoss::Fail, OnLoss::Replay] {
        let caller = client_of(&broker).await;
        let rpc = caller.rpc("silent").on_loss(on_loss).build().await.unwrap();
        let call = tokio::spawn({
            let rpc = rpc.clone();
            async move { rpc.call::<()>("m", "").await }
        });
        eventually(PATIENCE, "a call", async || rpc.in_flight() == 1).await;
        caller.close().await;
        let error = soon("an outcome", call).await.unwrap().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Closed | ErrorKind::Lost), "{error:?}");
        let error = soon("an outcome", rpc.call::<()>("m", "")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "{error:?}");
        assert!(caller.rpc("silent").build().await.is_err());
    }
    drop(client);
}

#[tokio::test(start_paused = true)]
async fn calls_that_are_dropped_at_any_point_leave_nothing_behind() {
    let broker = broker();
    let client = client_of(&broker).await;
    let _service = numbers(&client).await;
    for replies in [Replies::Direct, Replies::Queue, Replies::QueuePerCall] {
        let rpc = client.rpc("numbers").replies(replies).max_in_flight(1).build().await.unwrap();
        for polls in 0..24 {
            crate::drops::after_polls(polls, rpc.call::<()>("double", Json(1)).into_future()).await;
            if polls % 8 == 7 {
                broker.faults().cut_all_connections();
            }
            assert_eq!(rpc.in_flight(), 0, "after {polls} polls");
        }
        until_it_works(&rpc).await;
    }
}

#[tokio::test(start_paused = true)]
async fn calls_and_replies_are_counted() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    // Of this thread alone: other tests count, too.
    let _guard = metrics::set_default_local_recorder(&recorder);
    let broker = broker();
    let client = client_with(&broker, Queue::classic("silent")).await;
    let _service = numbers(&client).await;
    let rpc = client.rpc("numbers").build().await.unwrap();
    for number in 0..3 {
        call_double(&rpc, number).await.unwrap();
    }
    soon("a reply", rpc.call::<()>("unknown", "")).await.unwrap_err();
    let nobody = client.rpc("nobody").build().await.unwrap();
    soon("an outcome", nobody.call::<()>("m", "")).await.unwrap_err();
    let silent = client.rpc("silent").timeout(Duration::from_secs(1)).build().await.unwrap();
    soon("an outcome", silent.call::<()>("m", "")).await.unwrap_err();
    let gone = leveret::Message::new("1").kind("double").reply_to("gone");
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("numbers", gone).await.unwrap();
    publisher.publish("silent", "").await.unwrap();
    sleep(Duration::from_secs(1)).await;

    let snapshot = snapshotter.snapshot().into_vec();
    let counted = |name: &str, label: &str| -> u64 {
        let is_it = |key: &metrics_util::CompositeKey| {
            key.key().name() == name && key.key().labels().any(|one| one.value() == label)
        };
        let count = |value: &DebugValue| match value {
            DebugValue::Counter(count) => *count,
            DebugValue::Histogram(values) => values.len() as u64,
            DebugValue::Gauge(_) => 0,
        };
        snapshot.iter().filter(|(key, ..)| is_it(key)).map(|(.., value)| count(value)).sum()
    };
    let calls = ["reply", "remote", "unroutable", "timed-out", "lost"];
    assert_eq!(calls.map(|label| counted("leveret_calls_total", label)), [3, 1, 1, 1, 0]);
    let replies = ["value", "error", "undeliverable"];
    assert_eq!(replies.map(|label| counted("leveret_replies_total", label)), [4, 1, 1]);
    assert_eq!(counted("leveret_call_seconds", "numbers"), 4);
}

#[tokio::test(start_paused = true)]
async fn in_a_storm_every_call_gets_its_own_reply_or_is_told_why_not() {
    for on_loss in [OnLoss::Fail, OnLoss::Replay] {
        let broker = broker();
        let server = builder_of(&broker).name("server").connect().await.unwrap();
        let caller = builder_of(&broker).name("caller").connect().await.unwrap();
        server.service("storm").declare().await.unwrap();
        let services = crashing(&server);
        let rpc = caller.rpc("storm").on_loss(on_loss).build().await.unwrap();
        let disturbing = async {
            sleep(Duration::from_millis(100)).await;
            broker.restart().await;
            sleep(Duration::from_millis(200)).await;
            broker.faults().cut_connections_named("server (publishing)");
            sleep(Duration::from_millis(200)).await;
            broker.faults().cut_connections_named("caller (publishing)");
        };
        let (outcomes, ()) = tokio::join!(soon("all outcomes", storm(&rpc)), disturbing);
        let replies = each_its_own(&outcomes);
        match on_loss {
            OnLoss::Fail => assert!(replies < CALLS, "nothing was disturbed"),
            OnLoss::Replay => assert_eq!(replies, CALLS),
        }
        assert_eq!(rpc.in_flight(), 0);
        until_it_works(&rpc).await;
        services.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_copy_that_reaches_nobody_says_nothing_of_the_others() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let mut requests = client.consumer("q").stream().await.unwrap();
    let rpc = client.rpc("q").build().await.unwrap();
    let call = |rpc: &Rpc| {
        let rpc = rpc.clone();
        tokio::spawn(async move {
            rpc.call::<String>("m", "").resend_after(Duration::from_secs(1)).await
        })
    };
    let calling = call(&rpc);
    let request = soon("a request", requests.next()).await.unwrap().unwrap();
    drop(requests);
    client.delete_queue("q", DeleteQueue::default()).await.unwrap();
    // Some copies are sent, and come back.
    sleep(Duration::from_secs(60)).await;
    assert!(!calling.is_finished());
    let Properties { reply_to, correlation_id, .. } = request.properties();
    let id = correlation_id.unwrap().to_string();
    let publisher = client.publisher("").allow_unroutable().build().await.unwrap();
    let reply = Message::new("done").correlation_id(id);
    publisher.publish(&reply_to.unwrap().to_string(), reply).await.unwrap();
    assert_eq!(soon("a reply", calling).await.unwrap().unwrap(), "done");
    // If nobody can have got any, that is told at once.
    let error = soon("an outcome", call(&rpc)).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unroutable, "{error}");
}
