//! What who calls can count on.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use leveret::amqp::{DeleteExchange, Properties};
use leveret::{
    Binding, Client, Deliveries, Delivery, ErrorKind, Exchange, Json, Message, MsgPack, OnLoss,
    Overflow, Queue, Replies, Reply, Rpc, RpcBuilder, ServiceBuilder, Topology,
};
use leveret_testkit::{eventually, rabbitmq};

use super::{ALL_REPLIES, call_double};
use crate::support::client::{PUBLISHING, SOON, client, client_with, cut, next, publisher, soon};
use crate::support::services::{Running, double};

/// Replies to a request by hand, whether anybody is there or not.
async fn reply(client: &Client, request: &Delivery, id: Option<&str>, body: &'static str) {
    let correlation_id = id.map(|id| id.to_owned().try_into().unwrap());
    let properties = Properties { correlation_id, ..Properties::default() };
    let publisher = client.publisher("").allow_unroutable().build().await.unwrap();
    let reply_to = request.properties().reply_to.unwrap().to_string();
    let message = Message::with_properties(body, properties);
    match soon("a reply", publisher.publish(&reply_to, message)).await {
        // To a queue that is on its way out.
        Err(error) if error.kind() == ErrorKind::Nacked => {}
        published => published.unwrap(),
    }
}

fn id_of(request: &Delivery) -> String {
    request.properties().correlation_id.unwrap().to_string()
}

async fn until_strays(rpc: &Rpc, strays: u64) {
    eventually(SOON, format!("{strays} stray replies"), async || {
        let found = rpc.stray_replies();
        if found == strays { Ok(()) } else { Err(found.to_string()) }
    })
    .await;
}

/// The three styles, on either side.
fn styles(client: &Client) -> [(&'static str, ServiceBuilder, RpcBuilder); 3] {
    let service = |name: &str| client.service(name).method("double", double);
    [
        ("queue", service("plain"), client.rpc("plain")),
        (
            "own exchange",
            service("own").exchange("own-requests"),
            client.rpc("own").exchange("own-requests"),
        ),
        (
            "shared exchange",
            service("one").shared_exchange("services"),
            client.rpc("one").shared_exchange("services"),
        ),
    ]
}

#[tokio::test]
async fn a_call_gets_its_reply_in_every_style_by_every_way() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    for (style, service, rpc) in styles(&client) {
        let service = Running::start(service).await;
        for replies in ALL_REPLIES {
            let rpc = rpc.clone().replies(replies).build().await.unwrap();
            for number in 0..3 {
                let doubled = call_double(&rpc, number).await.unwrap();
                assert_eq!(doubled, 2 * number, "{style}, {replies:?}");
            }
            assert_eq!((rpc.in_flight(), rpc.stray_replies()), (0, 0));
        }
        assert_eq!(soon("the end", service.stop()).await.handled, 9);
    }
}

#[tokio::test]
async fn others_may_listen_at_an_exchange() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("audit")).await;
    let [_, (_, service, rpc), _] = styles(&client);
    let _service = Running::start(service).await;
    let bind = Topology::new().binding(Binding::to_queue("audit", "own-requests", "double"));
    soon("a binding", client.apply(&bind)).await.unwrap();
    let rpc = rpc.build().await.unwrap();
    assert_eq!(call_double(&rpc, 4).await.unwrap(), 8);
    let mut audit = client.consumer("audit").stream().await.unwrap();
    assert_eq!(next(&mut audit).await.body(), "4");
}

#[tokio::test]
async fn replies_are_read_as_what_is_asked_for() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let service = client
        .service("echo")
        .method("json", |Json(text): Json<String>| async move { Json(text) })
        .method("msgpack", |MsgPack(text): MsgPack<String>| async move { MsgPack(text) })
        .method("text", |text: String| async move { text })
        .method("nothing", || async {})
        .method("message", || async { Message::new("m").header("a", "b").kind("k") });
    let _service = Running::start(service).await;
    let rpc = client.rpc("echo").build().await.unwrap();
    let Json(text): Json<String> = soon("JSON", rpc.call("json", Json("ä"))).await.unwrap();
    assert_eq!(text, "ä");
    let MsgPack(text): MsgPack<String> =
        soon("MessagePack", rpc.call("msgpack", MsgPack("ä"))).await.unwrap();
    assert_eq!(text, "ä");
    let leveret::Payload(text): leveret::Payload<String> =
        soon("either", rpc.call("msgpack", MsgPack("ä"))).await.unwrap();
    assert_eq!(text, "ä");
    let text: String = soon("text", rpc.call("text", "ä")).await.unwrap();
    assert_eq!(text, "ä");
    let bytes: Bytes = soon("bytes", rpc.call("nothing", "")).await.unwrap();
    assert!(bytes.is_empty());
    soon("nothing", rpc.call::<()>("nothing", "")).await.unwrap();
    let reply: Reply = soon("a reply", rpc.call("message", "")).await.unwrap();
    assert_eq!(reply.header("a"), Some("b".into()));
    assert_eq!(reply.properties().kind, Some("k".try_into().unwrap()));
    assert_ne!(reply.properties().delivery_mode, Some(2));
    let wrong = soon("a reply", rpc.call::<Json<u64>>("text", "no number")).await.unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::Payload);
}

#[tokio::test]
async fn only_replies_to_queues_have_an_id_of_their_own() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let service = client.service("echo").method("text", |text: String| async move { text });
    let _service = Running::start(service).await;
    for replies in ALL_REPLIES {
        let rpc = client.rpc("echo").replies(replies).build().await.unwrap();
        let reply: Reply = soon("a reply", rpc.call("text", "x")).await.unwrap();
        let properties = reply.properties();
        let is_known = (properties.message_id.is_some(), properties.timestamp.is_some());
        let to_queue = replies != Replies::Direct;
        assert_eq!(is_known, (to_queue, to_queue), "{replies:?}");
        assert!(properties.correlation_id.is_some(), "{replies:?}");
    }
}

#[tokio::test]
async fn a_call_to_nobody_fails_at_once() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    for replies in ALL_REPLIES {
        let rpc = client.rpc("nobody").replies(replies).build().await.unwrap();
        for _ in 0..2 {
            let error = soon("an outcome", rpc.call::<()>("m", "")).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unroutable, "{error}");
            assert_eq!(error.returned().unwrap().routing_key, "nobody");
        }
        assert_eq!(rpc.in_flight(), 0);
    }
    let rpc = client.rpc("x").exchange("amq.direct").build().await.unwrap();
    let error = soon("an outcome", rpc.call::<()>("m", "")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unroutable, "{error}");
    let rpc = client.rpc("x").exchange("missing").build().await.unwrap();
    for _ in 0..2 {
        let error = soon("an outcome", rpc.call::<()>("m", "")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Missing, "{error}");
    }
}

/// The broker tells which request came back by no number, and writes into it: each call has to get its own outcome.
#[tokio::test]
async fn of_many_calls_those_that_reach_nobody_fail_and_no_others() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let service = client.service("one").shared_exchange("services").method("double", double);
    let _service = Running::start(service).await;
    let rpc = client.rpc("one").shared_exchange("services").build().await.unwrap();
    let calls = (0..100u64).map(|number| {
        let rpc = rpc.clone();
        tokio::spawn(async move {
            let method = if number % 3 == 0 { "nothing" } else { "double" };
            (number, rpc.call::<Json<u64>>(method, Json(7)).await)
        })
    });
    for call in calls.collect::<Vec<_>>() {
        let (number, outcome) = soon("an outcome", call).await.unwrap();
        match number % 3 {
            0 => assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unroutable),
            _ => assert_eq!(outcome.unwrap().0, 14),
        }
    }
}

#[tokio::test]
async fn a_request_that_the_broker_cannot_take_fails() {
    let vhost = rabbitmq::vhost().await;
    let queue = Queue::classic("full").max_length(1).overflow(Overflow::RejectPublish);
    let client = client_with(&vhost, queue).await;
    let publisher = publisher(&client).await;
    publisher.publish("full", "1").await.unwrap();
    let rpc = client.rpc("full").build().await.unwrap();
    let error = soon("an outcome", rpc.call::<()>("m", "")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Nacked, "{error}");
}

/// Requests for a service that is played by the test.
async fn played(client: &Client) -> Deliveries {
    let queue = Topology::new().queue(Queue::classic("played"));
    soon("a queue", client.apply(&queue)).await.unwrap();
    client.consumer("played").stream().await.unwrap()
}

#[tokio::test]
async fn doubled_reordered_and_forged_replies_do_no_harm() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    for replies in [Replies::Direct, Replies::Queue] {
        let mut requests = played(&client).await;
        let rpc = client.rpc("played").replies(replies).build().await.unwrap();
        let call = |text: &'static str| {
            let rpc = rpc.clone();
            tokio::spawn(async move { rpc.call::<String>("m", text).await })
        };
        let first = call("1");
        let request_1 = next(&mut requests).await;
        let second = call("2");
        let request_2 = next(&mut requests).await;
        assert_eq!((request_1.body(), request_2.body()), (&Bytes::from("1"), &Bytes::from("2")));
        let (id_1, id_2) = (id_of(&request_1), id_of(&request_2));

        for forged in ["", "1", &id_1.to_uppercase(), "00000000-0000-4000-8000-000000000000"] {
            reply(&client, &request_1, Some(forged), "forged").await;
        }
        reply(&client, &request_1, None, "forged").await;
        // The other's id counts, whosever address it was sent to.
        reply(&client, &request_1, Some(&id_2), "second").await;
        reply(&client, &request_2, Some(&id_2), "second again").await;
        reply(&client, &request_2, Some(&id_1), "first").await;
        reply(&client, &request_2, Some(&id_1), "first again").await;
        assert_eq!(soon("a reply", first).await.unwrap().unwrap(), "first");
        assert_eq!(soon("a reply", second).await.unwrap().unwrap(), "second");
        until_strays(&rpc, 7).await;
        request_1.ack().unwrap();
        request_2.ack().unwrap();
    }
}

#[tokio::test]
async fn a_late_reply_is_counted_and_comes_to_nobody() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let mut requests = played(&client).await;
    let rpc = client.rpc("played").timeout(Duration::from_secs(2)).build().await.unwrap();
    let call = rpc.call::<()>("m", "").into_future();
    let (outcome, request) = tokio::join!(soon("an outcome", call), next(&mut requests));
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(rpc.in_flight(), 0);
    let (id, next_call) = (
        id_of(&request),
        tokio::spawn({
            let rpc = rpc.clone();
            async move { rpc.call::<String>("m", "").timeout(SOON).await }
        }),
    );
    let next_request = next(&mut requests).await;
    reply(&client, &request, Some(&id), "late").await;
    until_strays(&rpc, 1).await;
    reply(&client, &next_request, Some(&id_of(&next_request)), "in time").await;
    assert_eq!(soon("a reply", next_call).await.unwrap().unwrap(), "in time");
}

#[tokio::test]
async fn a_call_that_is_dropped_is_forgotten() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let mut requests = played(&client).await;
    for replies in ALL_REPLIES {
        let rpc = client.rpc("played").replies(replies).max_in_flight(1).build().await.unwrap();
        // There is room for the next one.
        for _ in 0..2 {
            let call = tokio::spawn({
                let rpc = rpc.clone();
                async move { rpc.call::<()>("m", "").await }
            });
            let request = next(&mut requests).await;
            assert_eq!(rpc.in_flight(), 1);
            call.abort();
            assert!(soon("its end", call).await.unwrap_err().is_cancelled());
            assert_eq!(rpc.in_flight(), 0);
            request.ack().unwrap();
        }
    }
}

#[tokio::test]
async fn a_request_says_what_is_needed_and_nothing_else() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let mut requests = played(&client).await;
    let rpc = client.rpc("played").build().await.unwrap();
    let message = Message::new("hello").app_id("test").header("a", 1);
    soon("a cast", rpc.cast("greet", message.clone())).await.unwrap();
    let cast = next(&mut requests).await;
    let properties = cast.properties();
    assert_eq!((properties.reply_to, properties.correlation_id), (None, None));
    assert_eq!(properties.kind, Some("greet".try_into().unwrap()));
    assert_eq!(properties.app_id, Some("test".try_into().unwrap()));
    assert_eq!(properties.delivery_mode, Some(2));
    assert_eq!(cast.header("a"), Some(1.into()));
    cast.ack().unwrap();

    let call = tokio::select! {
        outcome = rpc.call::<()>("greet", message) => panic!("nobody replies: {outcome:?}"),
        call = next(&mut requests) => call,
    };
    let properties = call.properties();
    assert_eq!(properties.correlation_id, properties.message_id);
    assert_eq!(properties.correlation_id.unwrap().len(), 36);
    assert!(properties.reply_to.unwrap().to_string().starts_with("amq.rabbitmq.reply-to."));
    assert_eq!(properties.kind, Some("greet".try_into().unwrap()));
    assert_eq!(properties.delivery_mode, Some(1));
    assert_eq!(properties.headers.unwrap().len(), 1);
    call.ack().unwrap();
    let error = soon("an outcome", client.rpc("no").build().await.unwrap().cast("m", "")).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Unroutable);
}

#[tokio::test]
async fn a_call_is_sent_again_if_somebody_else_has_cost_it_its_connection() {
    let vhost = rabbitmq::vhost().await;
    let server = client(&vhost).await;
    let caller = client(&vhost).await;
    let mut requests = played(&server).await;
    let rpc = caller.rpc("played").on_loss(OnLoss::Replay).build().await.unwrap();
    let guilty = caller.publisher("").build().await.unwrap();
    for _ in 0..3 {
        let mut call = tokio::spawn({
            let rpc = rpc.clone();
            async move { rpc.call::<String>("m", "1").await }
        });
        let request = next(&mut requests).await;
        // RabbitMQ 3.10 breaks down over it (541). Later ones pass it over.
        let _ = soon("an outcome", guilty.publish("amq.rabbitmq.reply-to.g1hkAA==.AAAA", "")).await;
        // To an address that is gone, on 3.10.
        reply(&server, &request, Some(&id_of(&request)), "reply").await;
        request.ack().unwrap();
        let replied = soon("a reply", async {
            loop {
                tokio::select! {
                    replied = &mut call => break replied,
                    request = next(&mut requests) => {
                        reply(&server, &request, Some(&id_of(&request)), "reply").await;
                        request.ack().unwrap();
                    }
                }
            }
        });
        assert_eq!(replied.await.unwrap().unwrap(), "reply");
    }
}

#[tokio::test]
async fn calls_that_lose_their_connection_fail_or_are_sent_again() {
    let vhost = rabbitmq::vhost().await;
    let server = client(&vhost).await;
    let caller = client(&vhost).await;
    let mut requests = played(&server).await;
    for replies in [Replies::Direct, Replies::Queue] {
        for on_loss in [OnLoss::Fail, OnLoss::Replay] {
            let rpc = caller.rpc("played").replies(replies).on_loss(on_loss).build().await.unwrap();
            let call = tokio::spawn({
                let rpc = rpc.clone();
                async move { rpc.call::<String>("m", "1").await }
            });
            let request = next(&mut requests).await;
            let id = id_of(&request);
            drop(request);
            cut(&vhost, &caller, PUBLISHING).await;
            if on_loss == OnLoss::Fail {
                let error = soon("an outcome", call).await.unwrap().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
                drain(&mut requests).await;
            } else {
                // The one before, delivered again, and the one that was sent again.
                let mut addresses = BTreeSet::new();
                while addresses.len() < 2 {
                    let again = next(&mut requests).await;
                    assert_eq!(id_of(&again), id);
                    assert_eq!(again.properties().message_id, again.properties().correlation_id);
                    addresses.insert(again.properties().reply_to.unwrap().to_string());
                    reply(&server, &again, Some(&id), "again").await;
                    again.ack().unwrap();
                }
                assert_eq!(soon("a reply", call).await.unwrap().unwrap(), "again");
            }
            // It works as before.
            let call = tokio::spawn({
                let rpc = rpc.clone();
                async move { rpc.call::<String>("m", "2").await }
            });
            let request = soon("the request", async {
                loop {
                    let request = next(&mut requests).await;
                    if request.body() == "2" {
                        return request;
                    }
                    request.ack().unwrap();
                }
            });
            let request = request.await;
            reply(&server, &request, Some(&id_of(&request)), "fine").await;
            assert_eq!(soon("a reply", call).await.unwrap().unwrap(), "fine");
            request.ack().unwrap();
        }
    }
}

/// Acks what is delivered again.
async fn drain(requests: &mut Deliveries) {
    next(requests).await.ack().unwrap();
}

#[tokio::test]
async fn copies_of_a_request_are_one_call_and_need_room_for_one() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let rpc = client.rpc("q").max_in_flight(1).build().await.unwrap();
    let mut requests = soon("a consumer", client.consumer("q").stream()).await.unwrap();
    let call = rpc.call::<String>("m", "one").resend_after(Duration::from_millis(10));
    let answer = async {
        let lost = next(&mut requests).await;
        lost.ack().unwrap();
        let copy = next(&mut requests).await;
        reply(&client, &copy, Some(&id_of(&copy)), "done").await;
        copy.ack().unwrap();
    };
    let (answered, ()) = soon("a reply", async { tokio::join!(call, answer) }).await;
    assert_eq!(answered.unwrap(), "done");
    assert_eq!(rpc.in_flight(), 0);
    // There is room for the next one.
    let call = rpc.call::<String>("m", "two");
    let answer = async {
        loop {
            let request = next(&mut requests).await;
            let is_it = request.body() == "two";
            reply(&client, &request, Some(&id_of(&request)), "done").await;
            request.ack().unwrap();
            if is_it {
                return;
            }
        }
    };
    let (answered, ()) = soon("a reply", async { tokio::join!(call, answer) }).await;
    assert_eq!(answered.unwrap(), "done");
}

#[tokio::test]
async fn a_call_is_not_said_to_have_reached_nobody_because_another_has() {
    let vhost = rabbitmq::vhost().await;
    let (client, other) = (client(&vhost).await, client(&vhost).await);
    let topology = Topology::new()
        .exchange(Exchange::direct("x"))
        .queue(Queue::classic("q").bind("x", "long").bind("x", "short"));
    soon("a queue", other.apply(&topology)).await.unwrap();
    let mut requests = soon("a consumer", other.consumer("q").stream()).await.unwrap();
    let rpc = client.rpc("s").exchange("x").build().await.unwrap();
    let call = |method: &'static str| {
        let rpc = rpc.clone();
        tokio::spawn(async move { rpc.call::<String>(method, "").await })
    };
    let long = call("long");
    let _at_work = next(&mut requests).await;
    // When this one is answered, the broker has long confirmed the other.
    let short = call("short");
    let request = next(&mut requests).await;
    reply(&other, &request, Some(&id_of(&request)), "done").await;
    request.ack().unwrap();
    assert_eq!(soon("a reply", short).await.unwrap().unwrap(), "done");
    other.delete_exchange("x", DeleteExchange::Always).await.unwrap();
    let error = soon("an outcome", call("short")).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Missing, "{error}");
    let error = soon("an outcome", long).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
}
