//! `docs/on-the-wire.md`: its tables are what the broker has and gets. With LEVERET_WRITE_DOCS set, they are written.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use leveret::amqp::Value;
use leveret::inbox::{Sequence, numbered, release};
use leveret::{
    Acapi, AcapiSite, Chandra, CoverArt, End, Error, Exchange, Failure, Json, Message as Outgoing,
    Orb, Queue, Replier, Replies, Retry, RetryPolicy, RpcBuilder, Topology,
};
use leveret_broker::Broker;
use leveret_broker::snapshot::{BindingDestination, Message};
use leveret_testkit::eventually;

use crate::{PATIENCE, broker, client_of, depth, soon};

const SECOND: Duration = Duration::from_secs(1);

/// Numbers in names that belong together are one: `leveret.delay.17` and its like.
fn in_series(text: &str) -> String {
    let mut general = String::new();
    for one in text.chars() {
        match one.is_ascii_digit() {
            true if general.ends_with('#') => {}
            true => general.push('#'),
            false => general.push(one),
        }
    }
    general
}

fn shown(value: &Value<'_>) -> String {
    match value {
        Value::Bool(value) => value.to_string(),
        Value::Table(_) => "a table".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        value => match (value.as_str(), value.as_i64()) {
            (Some(text), _) => text.to_owned(),
            (None, Some(number)) => number.to_string(),
            _ => format!("{value:?}"),
        },
    }
}

fn arguments(table: &leveret::amqp::Table<'_>) -> String {
    let all = table.iter().map(|(name, value)| format!("`{name}={}`", shown(&value)));
    let mut all: Vec<_> = all.collect();
    all.sort();
    all.join(" ")
}

/// A kind, and where an object is not durable, or gone with a connection or with its users.
fn kind(kind: &str, [durable, exclusive, auto_delete]: [bool; 3]) -> String {
    let mut kind = kind.to_owned();
    for (word, is_so) in
        [("not durable", !durable), ("exclusive", exclusive), ("auto-delete", auto_delete)]
    {
        if is_so {
            kind += &format!(", {word}");
        }
    }
    kind
}

/// The broker gives some queues a random name.
fn name(name: &str) -> &str {
    if name.starts_with("amq.gen-") { "amq.gen-…" } else { name }
}

/// All objects of a broker but those that every broker has. `series` has numbered ones in one row.
fn objects(broker: &Broker, series: bool) -> String {
    let snapshot = broker.snapshot();
    let host = snapshot.virtual_host("/").expect("the usual virtual host");
    let mut rows: BTreeMap<(u8, String), usize> = BTreeMap::new();
    let mut row = |kind, text: String| {
        let text = if series { in_series(&text) } else { text };
        *rows.entry((kind, text)).or_default() += 1;
    };
    for one in host.exchanges.iter().filter(|one| !one.name.is_empty()) {
        if !one.name.starts_with("amq.") {
            let kind = kind(one.kind, [one.durable, false, one.auto_delete]);
            row(0, format!("exchange | `{}` | {kind} | {}", one.name, arguments(&one.arguments)));
        }
    }
    for one in &host.queues {
        let kind = kind(one.kind, [one.durable, one.exclusive, one.auto_delete]);
        let (name, arguments) = (name(&one.name), arguments(&one.arguments));
        row(1, format!("queue | `{name}` | {kind} | {arguments}"));
    }
    for one in host.bindings.iter().filter(|one| !one.source.is_empty()) {
        let (BindingDestination::Queue(to) | BindingDestination::Exchange(to)) = &one.destination;
        let key = match one.routing_key.as_str() {
            "" => "no key".to_owned(),
            key => format!("key `{key}`"),
        };
        let (to, arguments) = (name(to), arguments(&one.arguments));
        row(2, format!("binding | `{}` → `{to}` | {key} | {arguments}", one.source));
    }
    let mut text = "| object | name | kind | arguments |\n|---|---|---|---|\n".to_owned();
    for ((_, row), count) in rows {
        let times = if count > 1 { format!(" ({count} of them)") } else { String::new() };
        let _ = writeln!(text, "| {}{times} |", row.trim_end());
    }
    text
}

/// The properties and headers of a message, without their values.
fn properties(message: &Message) -> String {
    let found = message.properties.get();
    let mut names = Vec::new();
    for (name, is_there) in [
        ("content_type", found.content_type.is_some()),
        ("content_encoding", found.content_encoding.is_some()),
        ("delivery_mode", found.delivery_mode.is_some()),
        ("priority", found.priority.is_some()),
        ("correlation_id", found.correlation_id.is_some()),
        ("reply_to", found.reply_to.is_some()),
        ("expiration", found.expiration.is_some()),
        ("message_id", found.message_id.is_some()),
        ("timestamp", found.timestamp.is_some()),
        ("type", found.kind.is_some()),
        ("user_id", found.user_id.is_some()),
        ("app_id", found.app_id.is_some()),
    ] {
        if is_there {
            names.push(format!("`{name}`"));
        }
    }
    let mut headers = Vec::new();
    for (name, value) in found.headers.iter().flat_map(|headers| headers.iter()) {
        let kind = match value {
            Value::Table(_) => "table",
            Value::Array(_) => "array",
            Value::Timestamp(_) => "timestamp",
            Value::Bool(_) => "bool",
            Value::I32(_) => "32-bit integer",
            Value::I64(_) => "64-bit integer",
            value if value.as_str().is_some() => "text",
            other => panic!("{name:?} has a value that the page has no word for: {other:?}"),
        };
        headers.push(format!("`{name}` ({kind})"));
    }
    headers.sort();
    let listed = |all: Vec<String>| match all.is_empty() {
        true => "none".to_owned(),
        false => all.join(", "),
    };
    format!("properties {}; headers {}", listed(names), listed(headers))
}

fn peek(broker: &Broker, queue: &str) -> Message {
    let messages = broker.peek("/", queue, 1).unwrap_or_else(|| panic!("there is no {queue}"));
    messages.into_iter().next().unwrap_or_else(|| panic!("{queue} is empty"))
}

fn first(broker: &Broker, queue: &str) -> String {
    let message = peek(broker, queue);
    let from = match message.exchange.as_str() {
        "" => "the default exchange".to_owned(),
        exchange => format!("`{exchange}`"),
    };
    format!("- in `{queue}`, by {from}: {}\n", properties(&message))
}

async fn fail(body: String) -> Result<(), Failure> {
    match body.as_str() {
        "later" => Err(Failure::retry("the bank does not answer").kind("offline")),
        _ => Err(Failure::permanent("the card is stolen").kind("declined")),
    }
}

/// Of a design of retrying: its objects, and a message that waits and one that is parked.
async fn retrying(topology: Topology, retry: Retry, names: [&str; 3], orb: Option<Orb>) -> String {
    let [work, wait, parked] = names;
    let broker = broker();
    let client = client_of(&broker).await;
    client.apply(&topology).await.unwrap();
    let service = orb.map(|orb| tokio::spawn(orb.redelivery(&client).run()));
    let publisher = client.publisher("").build().await.unwrap();
    let mut text = String::new();
    for (body, queue) in [("later", wait), ("never", parked)] {
        publisher.publish(work, body).await.unwrap();
        let runner = client.consumer(work).retry(retry.clone()).handle(fail);
        let there = eventually(PATIENCE, format!("a message in {queue}"), async || {
            depth(&broker, queue).is_some_and(|depth| depth > 0)
        });
        soon("the end", runner.run_until(there)).await.unwrap();
        text += &first(&broker, queue);
    }
    if let Some(service) = service {
        service.abort();
    }
    client.close().await;
    format!("{}\n{text}", objects(&broker, false))
}

async fn by_default() -> String {
    let retry = RetryPolicy::steps([2 * SECOND, 60 * SECOND]);
    let topology = Topology::new().queue(Queue::quorum("Q"));
    retrying(topology, retry.into(), ["Q", "Q.wait.2s", "Q.parked"], None).await
}

async fn acapi() -> String {
    let profile = Acapi::new();
    let topology = profile.topology(Queue::quorum("Q")).unwrap();
    retrying(topology, profile.into(), ["Q", "Q-retry", "Q-error"], None).await
}

async fn chandra() -> String {
    let profile = Chandra::new(Exchange::topic("orders"));
    let topology = profile.topology(Queue::quorum("Q").bind("orders", "order.*")).unwrap();
    retrying(topology, profile.into(), ["Q", "Q.retry", "Q.parking_lot"], None).await
}

async fn cover_art() -> String {
    let profile = CoverArt::new().name("art").jobs(["index"]);
    let topology = profile.topology().unwrap();
    retrying(topology, profile.into(), ["art.index", "art.retry", "art.failed"], None).await
}

async fn orb() -> String {
    let orb = Orb::new();
    let topology = orb.topology(Queue::new("Q")).unwrap();
    let names = ["Q", "orb.wait", "orb.parked"];
    retrying(topology, orb.clone().into(), names, Some(orb)).await
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

/// The exchanges and queues of a site, while a call waits for its reply.
async fn acapi_site() -> String {
    let broker = broker();
    let client = client_of(&broker).await;
    let site = AcapiSite::new("dc0", "preprod");
    client.apply(&site.topology()).await.unwrap();
    let events = site.events(&client);
    let ledger = Queue::classic(site.queue_name("ledger", "policies"));
    let subscription = site.subscribe_queue(&events, ledger, ["info.#"]);
    subscription.declare().await.unwrap();
    let method = async || ();
    let service = site.serve(&client, "ledger", "requests", ["resource.#"], method).await.unwrap();
    service.declare().await.unwrap();
    events.publish("info.changed", "{}").await.unwrap();
    let queue = site.queue_name("ledger", "requests");
    let called = called(&broker, site.requests(&client), "resource.policy", &queue).await;
    called + &first(&broker, &site.queue_name("ledger", "policies"))
}

/// The objects while a call waits for its reply, and its request.
async fn called(broker: &Broker, rpc: RpcBuilder, method: &str, queue: &str) -> String {
    let rpc = rpc.build().await.unwrap();
    let method = method.to_owned();
    let calling = tokio::spawn(async move { rpc.call::<Json<i64>>(&method, Json(1)).await });
    eventually(PATIENCE, "the request", async || depth(broker, queue) == Some(1)).await;
    let text = format!("{}\n{}", objects(broker, false), first(broker, queue));
    calling.abort();
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

/// The page with these sections in place of those that it has.
fn with_sections(page: &str, sections: &[(&str, String)]) -> String {
    let mut page = page.to_owned();
    for (name, text) in sections {
        let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->"));
        let from = page.find(&begin).unwrap_or_else(|| panic!("no section {name}")) + begin.len();
        let to = page.find(&end).unwrap_or_else(|| panic!("no end of {name}"));
        page.replace_range(from..to, &format!("\n{text}\n"));
    }
    page
}

#[tokio::test(start_paused = true)]
async fn the_page_of_objects_on_the_wire_is_what_the_broker_has() {
    let sections = [
        ("default", by_default().await),
        ("acapi", acapi().await),
        ("acapi-site", acapi_site().await),
        ("chandra", chandra().await),
        ("cover-art", cover_art().await),
        ("orb", orb().await),
        ("delays", delays().await),
        ("relayed", relayed().await),
        ("calls", calls().await),
        ("replies", replies().await),
        ("inboxes", inboxes().await),
        ("events", events().await),
    ];
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/on-the-wire.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let right = with_sections(&page, &sections);
    if std::env::var_os("LEVERET_WRITE_DOCS").is_some() {
        std::fs::write(&path, &right).unwrap();
        return;
    }
    assert!(
        page == right,
        "docs/on-the-wire.md differs: run this test with LEVERET_WRITE_DOCS=1\n{right}"
    );
}
