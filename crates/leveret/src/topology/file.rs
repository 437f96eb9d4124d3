//! Topologies from files, in TOML or YAML.
//!
//! ```toml
//! [[exchange]]
//! name = "orders"
//! type = "topic"
//! alternate = "unrouted"
//!
//! [[queue]]
//! name = "billing"
//! type = "quorum"
//! message-ttl = "4h"
//! dead-letter-exchange = "failed"
//! arguments = { x-delivery-limit = 5 }
//! bind = [{ exchange = "orders", key = "order.*" }]
//! ```

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};

use super::{Binding, Exchange, ExchangeKind, Overflow, Queue, QueueType, Topology, drop_repeated};
use crate::amqp::{Array, Table, Value};
use crate::error::{Error, ErrorKind};
use crate::text::without_value;

impl Topology {
    /// Reads a topology from a file: TOML, or YAML if its name ends in `.yaml` or `.yml`.
    ///
    /// The error names the file, the line, the field and what is allowed.
    pub fn read(path: impl AsRef<Path>) -> Result<Topology, Error> {
        let path = path.as_ref();
        let named = |error| Error::caused(ErrorKind::Invalid, path.display().to_string(), error);
        let text = std::fs::read_to_string(path)
            .map_err(|error| named(Box::new(error) as Box<dyn std::error::Error + Send + Sync>))?;
        let is_yaml = path.extension().is_some_and(|ending| {
            ending.eq_ignore_ascii_case("yaml") || ending.eq_ignore_ascii_case("yml")
        });
        let read = if is_yaml { Topology::from_yaml(&text) } else { Topology::from_toml(&text) };
        read.map_err(|error| named(Box::new(error)))
    }

    /// Reads a topology from TOML.
    ///
    /// ```
    /// use leveret::Topology;
    ///
    /// let topology = Topology::from_toml(
    ///     r#"
    ///     [[exchange]]
    ///     name = "orders"
    ///     type = "topic"
    ///
    ///     [[queue]]
    ///     name = "billing"
    ///     type = "quorum"
    ///     message-ttl = "4h"
    ///     bind = [{ exchange = "orders", key = "order.*" }]
    ///     "#,
    /// )?;
    /// assert_eq!(topology.bindings()[0].routing_key(), "order.*");
    /// # Ok::<(), leveret::Error>(())
    /// ```
    pub fn from_toml(text: &str) -> Result<Topology, Error> {
        let file: File = toml::from_str(text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start);
            let before = text.get(..start).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
            mistake(line, column, &without_value(error.message()))
        })?;
        Ok(file.into())
    }

    /// Reads a topology from YAML, with the same fields.
    pub fn from_yaml(text: &str) -> Result<Topology, Error> {
        let file: File = serde_saphyr::from_str(text).map_err(|error| {
            let error = without_value(&error.without_snippet().to_string());
            Error::new(ErrorKind::Invalid, format!("the topology: {error}"))
        })?;
        Ok(file.into())
    }
}

/// What is wrong with a file, and where. The line itself is not quoted: a file of another kind may have passwords in it.
fn mistake(line: usize, column: usize, message: &str) -> Error {
    let text = format!("the topology: line {line}, column {column}: {message}");
    Error::new(ErrorKind::Invalid, text)
}

/// As part of a larger file, with the same fields.
impl<'de> Deserialize<'de> for Topology {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        File::deserialize(deserializer).map(Topology::from)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default, deserialize_with = "each_once")]
    exchange: Vec<FileExchange>,
    #[serde(default, deserialize_with = "each_once")]
    queue: Vec<FileQueue>,
}

/// An object that the file describes under a name.
trait Named {
    const KIND: &'static str;

    fn name(&self) -> &str;
}

impl Named for FileExchange {
    const KIND: &'static str = "exchange";

    fn name(&self) -> &str {
        &self.name
    }
}

impl Named for FileQueue {
    const KIND: &'static str = "queue";

    fn name(&self) -> &str {
        &self.name
    }
}

/// Objects of which no two have the same name: the second one would silently replace the first.
fn each_once<'de, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: Named + Deserialize<'de>,
    D: Deserializer<'de>,
{
    let objects = Vec::<T>::deserialize(deserializer)?;
    let mut names = HashSet::new();
    match objects.iter().map(Named::name).find(|name| !names.insert(*name)) {
        None => Ok(objects),
        Some(name) => Err(de::Error::custom(format_args!(
            "{} {name:?} is described twice: leave one of the two out, or put all its bindings into one `bind`",
            T::KIND
        ))),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct FileExchange {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default = "yes")]
    durable: bool,
    #[serde(default)]
    auto_delete: bool,
    #[serde(default)]
    internal: bool,
    alternate: Option<String>,
    #[serde(default)]
    arguments: Arguments,
    #[serde(default, alias = "binding", alias = "bindings")]
    bind: Vec<FileBinding>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct FileQueue {
    name: String,
    #[serde(rename = "type")]
    queue_type: Option<FileQueueType>,
    /// For this client alone, named by the broker.
    #[serde(default)]
    temporary: bool,
    durable: Option<bool>,
    #[serde(default)]
    exclusive: bool,
    #[serde(default)]
    auto_delete: bool,
    message_ttl: Option<Time>,
    expires: Option<Time>,
    max_length: Option<u64>,
    max_length_bytes: Option<u64>,
    overflow: Option<FileOverflow>,
    dead_letter_exchange: Option<String>,
    dead_letter_routing_key: Option<String>,
    #[serde(default)]
    dead_letter_at_least_once: bool,
    max_priority: Option<u8>,
    #[serde(default)]
    single_active_consumer: bool,
    delivery_limit: Option<u32>,
    #[serde(default)]
    arguments: Arguments,
    #[serde(default, alias = "binding", alias = "bindings")]
    bind: Vec<FileBinding>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FileQueueType {
    Classic,
    Quorum,
    Stream,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FileOverflow {
    DropHead,
    RejectPublish,
    RejectPublishDlx,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileBinding {
    exchange: String,
    #[serde(default)]
    key: String,
    #[serde(default)]
    arguments: Arguments,
}

type Arguments = BTreeMap<String, Argument>;

fn yes() -> bool {
    true
}

/// The names are known to differ, so nothing is looked for among many objects.
impl From<File> for Topology {
    fn from(file: File) -> Topology {
        let mut topology = Topology::new();
        for exchange in file.exchange {
            topology.bindings.extend(exchange.bindings());
            topology.exchanges.push(exchange.into());
        }
        for queue in file.queue {
            topology.bindings.extend(queue.bindings());
            topology.queues.push(queue.into());
        }
        topology
    }
}

/// Each once. Those of different objects differ anyway.
fn bindings_of(bind: &[FileBinding], to: impl Fn(String, String) -> Binding) -> Vec<Binding> {
    let mut bindings = bind.iter().map(|binding| binding.to(&to)).collect();
    drop_repeated(&mut bindings);
    bindings
}

impl FileBinding {
    fn to(&self, binding: impl FnOnce(String, String) -> Binding) -> Binding {
        let binding = binding(self.exchange.clone(), self.key.clone());
        self.arguments
            .iter()
            .fold(binding, |binding, (name, value)| binding.argument(name.clone(), value.0.clone()))
    }
}

impl FileExchange {
    fn bindings(&self) -> Vec<Binding> {
        bindings_of(&self.bind, |source, key| Binding::to_exchange(self.name.clone(), source, key))
    }
}

impl FileQueue {
    fn bindings(&self) -> Vec<Binding> {
        bindings_of(&self.bind, |source, key| Binding::to_queue(self.name.clone(), source, key))
    }
}

impl From<FileExchange> for Exchange {
    fn from(file: FileExchange) -> Exchange {
        let mut exchange = Exchange::new(file.name, ExchangeKind::from(file.kind.as_str()));
        exchange.durable = file.durable;
        exchange.auto_delete = file.auto_delete;
        exchange.internal = file.internal;
        if let Some(alternate) = file.alternate {
            exchange = exchange.alternate(alternate);
        }
        file.arguments
            .into_iter()
            .fold(exchange, |exchange, (name, value)| exchange.argument(name, value.0))
    }
}

impl From<FileQueue> for Queue {
    fn from(file: FileQueue) -> Queue {
        let mut queue =
            if file.temporary { Queue::temporary(file.name) } else { Queue::new(file.name) };
        queue.durable = file.durable.unwrap_or(queue.durable);
        queue.exclusive |= file.exclusive;
        queue.auto_delete |= file.auto_delete;
        let queue = given(queue, file.queue_type, |queue, kind| queue.of_type(kind.into()));
        let queue = given(queue, file.message_ttl, |queue, ttl| queue.message_ttl(ttl.0));
        let queue = given(queue, file.expires, |queue, after| queue.expires(after.0));
        let queue = given(queue, file.max_length, Queue::max_length);
        let queue = given(queue, file.max_length_bytes, Queue::max_length_bytes);
        let queue = given(queue, file.overflow, |queue, overflow| queue.overflow(overflow.into()));
        let queue = given(queue, file.dead_letter_exchange, Queue::dead_letter_to);
        let queue = given(queue, file.dead_letter_routing_key, Queue::dead_letter_key);
        let at_least_once = file.dead_letter_at_least_once.then_some(());
        let queue = given(queue, at_least_once, |queue, ()| queue.dead_letter_at_least_once());
        let queue = given(queue, file.max_priority, Queue::max_priority);
        let one_at_a_time = file.single_active_consumer.then_some(());
        let queue = given(queue, one_at_a_time, |queue, ()| queue.single_active_consumer());
        let queue = given(queue, file.delivery_limit, Queue::delivery_limit);
        file.arguments.into_iter().fold(queue, |queue, (name, value)| queue.argument(name, value.0))
    }
}

/// With what the file says, if it says anything.
fn given<T>(queue: Queue, value: Option<T>, set: impl FnOnce(Queue, T) -> Queue) -> Queue {
    match value {
        Some(value) => set(queue, value),
        None => queue,
    }
}

impl From<FileQueueType> for QueueType {
    fn from(file: FileQueueType) -> QueueType {
        match file {
            FileQueueType::Classic => QueueType::Classic,
            FileQueueType::Quorum => QueueType::Quorum,
            FileQueueType::Stream => QueueType::Stream,
        }
    }
}

impl From<FileOverflow> for Overflow {
    fn from(file: FileOverflow) -> Overflow {
        match file {
            FileOverflow::DropHead => Overflow::DropHead,
            FileOverflow::RejectPublish => Overflow::RejectPublish,
            FileOverflow::RejectPublishDlx => Overflow::RejectPublishDlx,
        }
    }
}

/// `4h`, `1500ms`; see [`crate::duration`].
struct Time(Duration);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        crate::duration::parse(&text).map(Time).map_err(de::Error::custom)
    }
}

/// The value of an argument, in the types that AMQP has.
struct Argument(Value<'static>);

impl<'de> Deserialize<'de> for Argument {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ArgumentVisitor)
    }
}

struct ArgumentVisitor;

impl<'de> Visitor<'de> for ArgumentVisitor {
    type Value = Argument;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text, a number, true or false, a list or a table")
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Argument, E> {
        Ok(Argument(value.into()))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Argument, E> {
        Ok(Argument(value.into()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Argument, E> {
        let value = i64::try_from(value).map_err(|_| E::custom("a number beyond 63 bits"))?;
        Ok(Argument(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Argument, E> {
        Ok(Argument(value.into()))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Argument, E> {
        Ok(Argument(value.to_owned().into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Argument, A::Error> {
        let mut array = Array::new();
        while let Some(Argument(value)) = list.next_element()? {
            array.push(value).map_err(de::Error::custom)?;
        }
        Ok(Argument(array.into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Argument, A::Error> {
        let mut table = Table::new();
        while let Some((name, Argument(value))) = map.next_entry::<String, Argument>()? {
            table.insert(name, value).map_err(de::Error::custom)?;
        }
        Ok(Argument(table.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOML: &str = r##"
        [[exchange]]
        name = "orders"
        type = "topic"
        alternate = "unrouted"

        [[exchange]]
        name = "audit"
        type = "fanout"
        durable = false
        internal = true
        bind = [{ exchange = "orders", key = "#" }]

        [[queue]]
        name = "billing"
        type = "quorum"
        message-ttl = "4h"
        max-length = 1000
        overflow = "reject-publish"
        dead-letter-exchange = "failed"
        delivery-limit = 5
        arguments = { x-custom = [1, "two", { three = true }] }
        bind = [{ exchange = "orders", key = "order.*", arguments = { x-match = "all" } }]

        [[queue]]
        name = "mine"
        temporary = true
    "##;

    const YAML: &str = r##"
exchange:
  - name: orders
    type: topic
    alternate: unrouted
  - name: audit
    type: fanout
    durable: false
    internal: true
    bind:
      - { exchange: orders, key: "#" }
queue:
  - name: billing
    type: quorum
    message-ttl: 4h
    max-length: 1000
    overflow: reject-publish
    dead-letter-exchange: failed
    delivery-limit: 5
    arguments:
      x-custom: [1, two, { three: true }]
    bind:
      - { exchange: orders, key: order.*, arguments: { x-match: all } }
  - name: mine
    temporary: true
"##;

    #[test]
    fn a_file_says_what_the_code_says() {
        let custom = Array::from_values([
            1i64.into(),
            "two".into(),
            Table::from_pairs([("three", true.into())]).unwrap().into(),
        ]);
        let expected = Topology::new()
            .exchange(Exchange::topic("orders").alternate("unrouted"))
            .exchange(Exchange::fanout("audit").transient().internal().bind("orders", "#"))
            .queue(
                Queue::quorum("billing")
                    .message_ttl(Duration::from_secs(4 * 3600))
                    .max_length(1000)
                    .overflow(Overflow::RejectPublish)
                    .dead_letter_to("failed")
                    .delivery_limit(5)
                    .argument("x-custom", custom.unwrap()),
            )
            .binding(Binding::to_queue("billing", "orders", "order.*").argument("x-match", "all"))
            .queue(Queue::temporary("mine"));
        assert_eq!(Topology::from_toml(TOML).unwrap(), expected);
        assert_eq!(Topology::from_yaml(YAML).unwrap(), expected);
    }

    #[test]
    fn bindings_may_be_called_bindings() {
        let topology = |word: &str| {
            let text =
                format!("[[queue]]\nname = \"q\"\n{word} = [{{ exchange = \"x\", key = \"k\" }}]");
            Topology::from_toml(&text).unwrap()
        };
        assert_eq!(topology("bind").bindings().len(), 1);
        assert_eq!(topology("bindings"), topology("bind"));
    }

    #[test]
    fn a_mistake_is_named_with_its_line_and_what_is_allowed() {
        let wrong = [
            ("[[queue]]\nname = \"q\"\ntyp = \"quorum\"", ["line 3", "typ", "type"]),
            ("[[queue]]\nname = \"q\"\ntype = \"quorom\"", ["line 3", "quorom", "quorum"]),
            ("[[queue]]\nname = \"q\"\nmessage-ttl = \"4 hours\"", ["line 3", "4 hours", "4h"]),
            ("[[queue]]\ntype = \"quorum\"", ["line 1", "name", "missing"]),
        ];
        for (text, expected) in wrong {
            let error = Topology::from_toml(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            for part in expected {
                assert!(error.to_string().contains(part), "{part:?} is not in: {error}");
            }
        }
        let error = Topology::from_toml(
            "[[queue]]\nname = \"q\"\n[[queue]]\nname = \"q\"\ntype = \"quorum\"",
        );
        assert!(error.unwrap_err().to_string().contains("queue \"q\" is described twice"));
        let error = Topology::from_yaml("queue:\n  - name: q\n    type: quorom\n").unwrap_err();
        for part in ["line 3", "quorom", "quorum"] {
            assert!(error.to_string().contains(part), "{part:?} is not in: {error}");
        }
    }

    #[test]
    fn a_mistake_is_named_without_quoting_its_line() {
        let line = "url: \"amqp://shop:sesame@rabbit\"";
        for error in [
            Topology::from_toml(&line.replacen(':', " =", 1)).unwrap_err(),
            Topology::from_yaml(line).unwrap_err(),
        ] {
            let text = format!("{error} {error:?}");
            assert!(text.contains("url") && !text.contains("sesame"), "{text}");
        }
    }
}
