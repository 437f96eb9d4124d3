//! The tables of `docs/on-the-wire.md`: what the broker has and gets.

// It is a part of several tests, and each uses some of it.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fmt::Write as _;

use leveret::amqp::Value;
use leveret::{Client, Failure, Json, Retry, RpcBuilder, Runner, Topology};
use leveret_broker::Broker;
use leveret_broker::snapshot::{BindingDestination, Message};
use leveret_testkit::eventually;

use crate::embedded::{PATIENCE, broker, client_of, depth, soon};

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
pub(crate) fn objects(broker: &Broker, series: bool) -> String {
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
pub(crate) fn properties(message: &Message) -> String {
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

pub(crate) fn peek(broker: &Broker, queue: &str) -> Message {
    let messages = broker.peek("/", queue, 1).unwrap_or_else(|| panic!("there is no {queue}"));
    messages.into_iter().next().unwrap_or_else(|| panic!("{queue} is empty"))
}

pub(crate) fn first(broker: &Broker, queue: &str) -> String {
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

/// Of a design of retrying: its objects, and a message that waits and one that is parked. Some need a service beside them.
pub(crate) async fn retrying(
    topology: Topology,
    retry: Retry,
    names: [&str; 3],
    beside: Option<fn(&Client) -> Runner>,
) -> String {
    let [work, wait, parked] = names;
    let broker = broker();
    let client = client_of(&broker).await;
    client.apply(&topology).await.unwrap();
    let service = beside.map(|service| tokio::spawn(service(&client).run()));
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

/// The objects while a call waits for its reply, and its request.
pub(crate) async fn called(broker: &Broker, rpc: RpcBuilder, method: &str, queue: &str) -> String {
    let rpc = rpc.build().await.unwrap();
    let method = method.to_owned();
    let calling = tokio::spawn(async move { rpc.call::<Json<i64>>(&method, Json(1)).await });
    eventually(PATIENCE, "the request", async || depth(broker, queue) == Some(1)).await;
    let text = format!("{}\n{}", objects(broker, false), first(broker, queue));
    calling.abort();
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

/// Compares sections of `docs/on-the-wire.md` with these. With LEVERET_WRITE_DOCS set, they are written.
pub(crate) fn check(sections: &[(&str, String)]) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/on-the-wire.md");
    let page = std::fs::read_to_string(path).unwrap();
    let right = with_sections(&page, sections);
    if std::env::var_os("LEVERET_WRITE_DOCS").is_some() {
        return std::fs::write(path, &right).unwrap();
    }
    assert!(
        page == right,
        "docs/on-the-wire.md differs: run this test with LEVERET_WRITE_DOCS=1\n{right}"
    );
}
