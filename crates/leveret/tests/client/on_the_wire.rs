//! `docs/on-the-wire.md`: its tables are what the broker has and gets. Those of the profiles are checked where they are.

use std::fmt::Write as _;
use std::time::Duration;

use leveret::inbox::{Sequence, numbered, release};
use leveret::{
    End, Error, Exchange, Failure, Json, Message as Outgoing, Queue, Replier, Replies, RetryPolicy,
    Topology,
};
use leveret_testkit::eventually;

use crate::on_the_wire::{called, check, first, objects, peek, properties, retrying};
use crate::{PATIENCE, broker, client_of, depth, soon};

const SECOND: Duration = Duration::from_secs(1);

async fn by_default() -> String {
    let retry = RetryPolicy::steps([2 * SECOND, 60 * SECOND]);
    let topology = Topology::new().queue(Queue::quorum("Q"));
    retrying(topology, retry.into(), ["Q", "Q.wait.2s", "Q.parked"], None).await
}

async fn delays() -> String {
    let broker = broker();
    let client = client_of(&broker).await;
    client.apply(&Topology::new().queue(Queue::quorum("Q"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_in("Q", "later", 5 * SECOND).await.unwrap();
    eventually(PATIENCE, "the message", async || depth(&broker, "Q") == Some(1)).await;
    format!("{}\n{}", objects(&broker, true), first(&broker, "Q"))
}

/// Messages that were delayed to an exchange: one has arrived, one is put off, and one is parked.
async fn relayed() -> String {
    let broker = broker();
    let client = client_of(&broker).await;
    let full = Queue::classic("full").max_length(0).argument("x-overflow", "reject-publish");
    let topology = Topology::new()
        .exchange(Exchange::topic("orders"))
        .queue(Queue::quorum("Q").bind("orders", "order.*"))
        .queue(full.bind("orders", "full"));
    client.apply(&topology).await.unwrap();
    let publisher = client.publisher("orders").build().await.unwrap();
    let mut text = String::new();
    for (key, queue) in [
        ("order.paid", "Q"),
        ("full", "leveret.delay.03"),
        ("unheard.of", "leveret.delay.unroutable"),
    ] {
        publisher.publish_in(key, "later", SECOND / 8).await.unwrap();
        let there = async || depth(&broker, queue) == Some(1);
        eventually(PATIENCE, format!("the message in {queue}"), there).await;
        text += &first(&broker, queue);
    }
    text
}

async fn calls() -> String {
    let mut text = String::new();
    for (heading, replies) in [
        ("", Replies::Direct),
        ("\nWith `Replies::Queue`:\n\n", Replies::Queue),
        ("\nWith `Replies::QueuePerCall`:\n\n", Replies::QueuePerCall),
    ] {
        let broker = broker();
        let client = client_of(&broker).await;
        let service = client.service("sums").method("add", async |Json(n): Json<i64>| Json(n));
        service.declare().await.unwrap();
        text += heading;
        text += &called(&broker, client.rpc("sums").replies(replies), "add", "sums").await;
        if replies == Replies::Direct {
            client.purge_queue("sums").await.unwrap();
            client.rpc("sums").build().await.unwrap().cast("add", Json(1)).await.unwrap();
            text += "\nA cast:\n\n";
            text += &first(&broker, "sums");
        }
    }
    text
}

/// What a service sends to a queue, for the methods of each kind.
async fn replies() -> String {
    let broker = broker();
    let client = client_of(&broker).await;
    client.apply(&Topology::new().queue(Queue::classic("replies"))).await.unwrap();
    let count = async |mut replier: Replier| -> Result<End, Error> {
        replier.send("1").await?;
        Ok(End)
    };
    let service = client
        .service("sums")
        .method("value", async || "3")
        .method("error", async || Err::<(), _>(Failure::permanent("no").kind("declined")))
        .method("stream", count);
    service.declare().await.unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let service = tokio::spawn(service.run_until(stopped));
    let publisher = client.publisher("").build().await.unwrap();
    let mut text = String::new();
    for (method, names) in [
        ("value", &["a value"][..]),
        ("error", &["an error"]),
        ("stream", &["one of several values", "the end of several values"]),
    ] {
        let request = Outgoing::new("").kind(method).reply_to("replies").correlation_id("7");
        publisher.publish("sums", request).await.unwrap();
        for what in names {
            eventually(PATIENCE, *what, async || depth(&broker, "replies") > Some(0)).await;
            let _ = writeln!(text, "- {what}: {}", properties(&peek(&broker, "replies")));
            let reply = client.get("replies", Default::default()).await.unwrap().expect("a reply");
            reply.ack().unwrap();
        }
    }
    drop(stop);
    soon("the end", service).await.unwrap().unwrap();
    text
}

/// What senders write for the inboxes of receivers.
async fn inboxes() -> String {
    let broker = broker();
    let client = client_of(&broker).await;
    client.apply(&Topology::new().queue(Queue::classic("Q"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let sequence = Sequence::fresh("app");
    sequence.stamp("1").await.unwrap();
    sequence.give_up(1..=1).await;
    let mut text = String::new();
    for (what, message) in [
        ("a numbered message", numbered("1", "app", 1).unwrap()),
        ("the first one after numbers that were given up", sequence.stamp("2").await.unwrap()),
        ("a release of ids", release(["job 1"])),
    ] {
        publisher.publish("Q", message).await.unwrap();
        let _ = writeln!(text, "- {what}: {}", properties(&peek(&broker, "Q")));
        client.purge_queue("Q").await.unwrap();
    }
    text
}

async fn events() -> String {
    let broker = broker();
    let client = client_of(&broker).await;
    let events = client.events("shop");
    events.subscribe("stock", ["order.*"]).declare().await.unwrap();
    events.publish("order.new", "1").await.unwrap();
    events.listen(["order.#"]).declare().await.unwrap();
    let answer = async || "12 €";
    events.respond("offers", ["offer.*"], answer).await.unwrap().declare().await.unwrap();
    let asking = tokio::spawn({
        let events = events.clone();
        async move { events.gather::<String>("offer.wanted", "a book").await }
    });
    eventually(PATIENCE, "the question", async || depth(&broker, "offers") == Some(1)).await;
    let messages = first(&broker, "stock") + &first(&broker, "offers");
    let text = format!("{}\n{messages}", objects(&broker, false));
    asking.abort();
    text
}

#[tokio::test(start_paused = true)]
async fn the_page_of_objects_on_the_wire_is_what_the_broker_has() {
    let sections = [
        ("default", by_default().await),
        ("delays", delays().await),
        ("relayed", relayed().await),
        ("calls", calls().await),
        ("replies", replies().await),
        ("inboxes", inboxes().await),
        ("events", events().await),
    ];
    check(&sections);
}
