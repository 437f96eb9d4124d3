//! At least once: what is not acknowledged, by the broker or by who gets it, is sent again.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leveret::inbox::{MemoryInbox, Remember};
use leveret::{
    Attempt, BatchOptions, Client, Delivery, ErrorKind, Failure, Incoming, Message, Queue,
    RetryPolicy, State, Topology,
};
use leveret_testkit::proxy::{Cut, Direction};
use leveret_testkit::{FaultProxy, eventually, rabbitmq};
use tokio::sync::Notify;

use crate::support::client::{SOON, client_with, next, publisher, soon, until_depth};

/// So soon that something is sent again before anybody has had time for an answer, and not so soon that it is all there is to do.
const AGAIN: Duration = Duration::from_millis(200);

fn id(delivery: &Delivery) -> String {
    delivery.properties().message_id.expect("an id").to_string()
}

fn by_id() -> MemoryInbox {
    MemoryInbox::new(Remember::ids_for(Duration::from_secs(3600)))
}

#[tokio::test]
async fn a_message_is_sent_again_with_the_same_id_until_its_receiver_acknowledges_it() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let rpc = client.rpc("q").build().await.unwrap();
    let replies = publisher(&client).await;
    let sending = rpc.call::<String>("m", "question").resend_after(AGAIN);
    let receiving = async {
        let mut copies = client.consumer("q").stream().await.unwrap();
        let mut ids = BTreeSet::new();
        // The first ones are taken from the queue, and nobody tells of it.
        for _ in 0..2 {
            let copy = next(&mut copies).await;
            ids.insert(id(&copy));
            copy.ack().unwrap();
        }
        let copy = next(&mut copies).await;
        ids.insert(id(&copy));
        let properties = copy.properties();
        let to = properties.reply_to.unwrap().to_string();
        let reply = Message::new("done");
        let reply = reply.correlation_id(properties.correlation_id.unwrap().to_string());
        // To who is there: RabbitMQ 3.10 says of direct replies that they reach nobody.
        let _ = replies.publish(&to, reply).await;
        copy.ack().unwrap();
        assert_eq!(ids.len(), 1, "the same message: {ids:?}");
    };
    let (answer, ()) = soon("an answer", async { tokio::join!(sending, receiving) }).await;
    assert_eq!(answer.unwrap(), "done");
}

#[tokio::test]
async fn a_sender_that_loses_its_connection_sends_again_and_is_told_when_it_is_done() {
    let vhost = rabbitmq::vhost().await;
    if vhost.broker().is_embedded() {
        return;
    }
    let client = client_with(&vhost, Queue::classic("q")).await;
    let proxy = FaultProxy::to(vhost.broker().addr()).await;
    let sender = soon("a client", Client::connect(proxy.url(&vhost.url()))).await.unwrap();
    let rpc = sender.rpc("q").build().await.unwrap();
    let (handled, is_told) = (Arc::<AtomicU32>::default(), Notify::new());
    let count = async |State(handled): State<Arc<AtomicU32>>| {
        handled.fetch_add(1, Ordering::SeqCst);
    };
    let sending = rpc.call::<()>("m", "work").resend_after(AGAIN);
    let receiving = async {
        eventually(SOON, "the first one", async || {
            client.inspect_queue("q").await.unwrap().messages > 0
        })
        .await;
        // With it goes the way back that the first one has.
        proxy.cut(Cut::Reset);
        let consumer = client.consumer("q").state(Arc::clone(&handled)).tell_senders();
        let consumer = consumer.exactly_once(by_id()).handle(count);
        consumer.run_until(is_told.notified()).await.unwrap()
    };
    let both = async {
        let telling = async {
            sending.await.unwrap();
            is_told.notify_one();
        };
        tokio::join!(receiving, telling).0
    };
    let summary = soon("it to be told", both).await;
    assert_eq!((summary.handled, handled.load(Ordering::SeqCst)), (1, 1), "{summary:?}");
    assert!(summary.duplicates > 0, "it was sent again: {summary:?}");
}

#[tokio::test]
async fn senders_are_told_what_was_handled_whether_it_is_a_copy_and_what_is_parked() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let answers = Topology::new().queue(Queue::classic("answers"));
    soon("a queue", client.apply(&answers)).await.unwrap();
    let publisher = publisher(&client).await;
    let handler = async |body: String, Attempt(attempt): Attempt| match body.as_str() {
        "fails at first" if attempt < 3 => Err(Failure::retry("not yet")),
        "gone" => Err(Failure::done("there is nothing to do")),
        "wrong" => Err(Failure::permanent("it makes no sense").kind("senseless")),
        _ => Ok(()),
    };
    let retry = RetryPolicy::fixed(Duration::from_millis(50)).max_retries(5);
    let consumer = client.consumer("q").retry(retry).tell_senders();
    let consumer = consumer.exactly_once(by_id()).handle(handler);
    let story = async {
        let mut answers = client.consumer("answers").stream().await.unwrap();
        for (body, error) in [
            ("fine", None),
            ("fine", None),
            ("fails at first", None),
            ("gone", None),
            ("wrong", Some("senseless")),
        ] {
            let message = Message::new(body).message_id(body).correlation_id(body);
            publisher.publish("q", message.reply_to("answers")).await.unwrap();
            let answer = next(&mut answers).await;
            assert_eq!(answer.properties().correlation_id.unwrap().to_string(), body);
            let told = answer.header("leveret-error");
            assert_eq!(told.as_ref().and_then(|kind| kind.as_str()), error, "{body}");
            assert_eq!(answer.body().is_empty(), error.is_none(), "{body}");
            answer.ack().unwrap();
        }
        // One that does not ask is not answered.
        publisher.publish("q", Message::new("fine").message_id("silent")).await.unwrap();
        until_depth(&client, "q", 0).await;
        until_depth(&client, "answers", 0).await;
    };
    let summary = soon("the end", consumer.run_until(story)).await.unwrap();
    let outcomes = (summary.handled, summary.duplicates, summary.failed, summary.parked);
    assert_eq!(outcomes, (4, 1, 3, 1), "{summary:?}");
}

#[tokio::test]
async fn what_would_pass_over_messages_without_a_word_cannot_tell_senders() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let consumer = || client.consumer("q").tell_senders();
    let refused = [consumer().auto_ack(), consumer().at_most_once(), consumer().deduplicate(AGAIN)];
    for consumer in refused {
        let refused = soon("an error", consumer.handle(async || {}).run()).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    }
    let batches = consumer()
        .handle_batches(BatchOptions { size: 10, within: AGAIN }, async |_: Vec<Incoming>| {});
    let refused = soon("an error", batches.run_until(std::future::pending::<()>())).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn what_the_broker_does_not_confirm_in_time_is_published_again_with_the_same_id() {
    let vhost = rabbitmq::vhost().await;
    if vhost.broker().is_embedded() {
        return;
    }
    let client = client_with(&vhost, Queue::classic("q")).await;
    let proxy = FaultProxy::to(vhost.broker().addr()).await;
    let sender = soon("a client", Client::connect(proxy.url(&vhost.url()))).await.unwrap();
    let publisher = sender.publisher("").resend_after(AGAIN).build().await.unwrap();
    proxy.stall(Direction::ToClient);
    let ticket = publisher.send("q", "1").await.unwrap();
    until_depth(&client, "q", 1).await;
    // It does not hear that it is there, and asks for another channel.
    let sent = proxy.seen().to_server;
    eventually(SOON, "another channel to be asked for", async || proxy.seen().to_server > sent)
        .await;
    proxy.unstall(Direction::ToClient);
    soon("a confirmation", ticket).await.unwrap();
    until_depth(&client, "q", 2).await;
    let mut copies = client.consumer("q").stream().await.unwrap();
    let (first, second) = (next(&mut copies).await, next(&mut copies).await);
    assert_eq!(id(&first), id(&second));
    assert_eq!(first.body(), second.body());
}
