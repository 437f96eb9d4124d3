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

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::time::Duration;

use serde::de::value::Error as NotOneOfThem;
use serde::de::{DeserializeOwned, Deserializer, Error as _, IntoDeserializer};
use serde::ser::{Error as _, SerializeMap, Serializer};
use serde::{Deserialize, Serialize};
use toml::Value as Toml;

use super::arguments::Arguments;
use super::drop_repeated;
use super::{Binding, Destination, Exchange, ExchangeKind, Overflow, Queue, QueueType, Topology};
use crate::amqp::{Array, ShortStr, Table, Value};
use crate::error::{Error, ErrorKind};
use crate::text::{place, without_value};

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
        toml::from_str(text).map_err(|error| {
            let at = place(text, error.span().map_or(0, |span| span.start));
            mistake(&format!("{at}: {}", without_value(error.message())))
        })
    }

    /// Reads a topology from YAML, with the same fields.
    pub fn from_yaml(text: &str) -> Result<Topology, Error> {
        serde_saphyr::from_str(text)
            .map_err(|error| mistake(&without_value(&error.without_snippet().to_string())))
    }

    /// As TOML, from which [`Topology::from_toml`] makes the same topology.
    ///
    /// ```
    /// use leveret::{Exchange, Queue, Topology};
    ///
    /// let topology = Topology::new()
    ///     .exchange(Exchange::topic("orders"))
    ///     .queue(Queue::quorum("billing").bind("orders", "order.*"));
    /// assert_eq!(Topology::from_toml(&topology.to_toml()?)?, topology);
    /// # Ok::<(), leveret::Error>(())
    /// ```
    ///
    /// It is an error if a binding leads to a queue or exchange that is not part of the topology, or if an argument has a value
    /// for which files have no form (bytes, times, nothing).
    pub fn to_toml(&self) -> Result<String, Error> {
        toml::to_string(&File::of(self)?)
            .map_err(|error| Error::caused(ErrorKind::Invalid, "the topology as TOML", error))
    }
}

/// The text quotes no line: a file of another kind may have passwords in it.
fn mistake(text: &str) -> Error {
    Error::new(ErrorKind::Invalid, format!("the topology: {text}"))
}

/// The model of a file, for reading and writing. Writing leaves defaults out.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    exchange: Vec<FileExchange>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    queue: Vec<FileQueue>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct FileExchange {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    durable: Option<bool>,
    auto_delete: Option<bool>,
    internal: Option<bool>,
    alternate: Option<String>,
    #[serde(default, skip_serializing_if = "Arguments::is_empty")]
    arguments: Arguments,
    #[serde(default, alias = "binding", alias = "bindings", skip_serializing_if = "Vec::is_empty")]
    bind: Vec<FileBinding>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct FileQueue {
    name: String,
    #[serde(rename = "type")]
    queue_type: Option<QueueType>,
    /// For this client alone, named by the broker.
    temporary: Option<bool>,
    durable: Option<bool>,
    exclusive: Option<bool>,
    auto_delete: Option<bool>,
    message_ttl: Option<Time>,
    expires: Option<Time>,
    max_length: Option<u64>,
    max_length_bytes: Option<u64>,
    overflow: Option<Overflow>,
    dead_letter_exchange: Option<String>,
    dead_letter_routing_key: Option<String>,
    /// Sets two arguments. Writing gives those.
    dead_letter_at_least_once: Option<bool>,
    max_priority: Option<u8>,
    single_active_consumer: Option<bool>,
    delivery_limit: Option<u32>,
    #[serde(default, skip_serializing_if = "Arguments::is_empty")]
    arguments: Arguments,
    #[serde(default, alias = "binding", alias = "bindings", skip_serializing_if = "Vec::is_empty")]
    bind: Vec<FileBinding>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileBinding {
    exchange: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    key: String,
    #[serde(default, skip_serializing_if = "Arguments::is_empty")]
    arguments: Arguments,
}

impl TryFrom<File> for Topology {
    type Error = String;

    fn try_from(file: File) -> Result<Topology, String> {
        each_once("exchange", file.exchange.iter().map(|exchange| &exchange.name))?;
        each_once("queue", file.queue.iter().map(|queue| &queue.name))?;
        let mut topology = Topology::new();
        for mut exchange in file.exchange {
            let destination = Destination::Exchange(exchange.name.clone());
            topology.bindings.extend(bindings(destination, std::mem::take(&mut exchange.bind)));
            topology.exchanges.push(exchange.into());
        }
        for mut queue in file.queue {
            let destination = Destination::Queue(queue.name.clone());
            topology.bindings.extend(bindings(destination, std::mem::take(&mut queue.bind)));
            topology.queues.push(queue.into());
        }
        drop_repeated(&mut topology.bindings);
        Ok(topology)
    }
}

/// The second object of a name would silently replace the first.
fn each_once<'n>(kind: &str, mut names: impl Iterator<Item = &'n String>) -> Result<(), String> {
    let mut known = HashSet::new();
    match names.find(|name| !known.insert(*name)) {
        None => Ok(()),
        Some(name) => Err(format!(
            "{kind} {name:?} is described twice: leave one of the two out, or put all its bindings into one `bind`"
        )),
    }
}

fn bindings(destination: Destination, bind: Vec<FileBinding>) -> impl Iterator<Item = Binding> {
    bind.into_iter().map(move |FileBinding { exchange, key, arguments }| Binding {
        source: exchange,
        destination: destination.clone(),
        routing_key: key,
        arguments,
    })
}

impl File {
    fn of(topology: &Topology) -> Result<File, Error> {
        let mut bind: HashMap<&Destination, Vec<FileBinding>> = HashMap::new();
        for Binding { source, destination, routing_key, arguments } in &topology.bindings {
            bind.entry(destination).or_default().push(FileBinding {
                exchange: source.clone(),
                key: routing_key.clone(),
                arguments: arguments.clone(),
            });
        }
        let mut bind_of = |destination| bind.remove(&destination).unwrap_or_default();
        let exchange = |exchange: &Exchange| {
            FileExchange::of(exchange, bind_of(Destination::Exchange(exchange.name.clone())))
        };
        let exchange = topology.exchanges.iter().map(exchange).collect();
        let queue =
            |queue: &Queue| FileQueue::of(queue, bind_of(Destination::Queue(queue.name.clone())));
        let queue = topology.queues.iter().map(queue).collect();
        match topology.bindings.iter().find(|binding| bind.contains_key(&binding.destination)) {
            None => Ok(File { exchange, queue }),
            Some(binding) => {
                let text =
                    format!("{binding} leads out of the topology, which a file has no form for");
                Err(Error::new(ErrorKind::Invalid, text))
            }
        }
    }
}

impl From<FileExchange> for Exchange {
    fn from(file: FileExchange) -> Exchange {
        let mut exchange = Exchange::new(file.name, ExchangeKind::from(file.kind.as_str()));
        exchange.durable = file.durable.unwrap_or(true);
        exchange.auto_delete = file.auto_delete == Some(true);
        exchange.internal = file.internal == Some(true);
        if let Some(alternate) = file.alternate {
            exchange = exchange.alternate(alternate);
        }
        exchange.arguments.0.extend(file.arguments.0);
        exchange
    }
}

impl FileExchange {
    fn of(exchange: &Exchange, bind: Vec<FileBinding>) -> Self {
        let mut arguments = exchange.arguments.clone();
        FileExchange {
            name: exchange.name.clone(),
            kind: exchange.kind.to_string(),
            durable: (!exchange.durable).then_some(false),
            auto_delete: exchange.auto_delete.then_some(true),
            internal: exchange.internal.then_some(true),
            alternate: arguments.take("alternate-exchange", text),
            arguments,
            bind,
        }
    }
}

impl From<FileQueue> for Queue {
    fn from(file: FileQueue) -> Queue {
        let mut queue = match file.temporary {
            Some(true) => Queue::temporary(file.name),
            _ => Queue::new(file.name),
        };
        queue.durable = file.durable.unwrap_or(queue.durable);
        queue.exclusive |= file.exclusive == Some(true);
        queue.auto_delete |= file.auto_delete == Some(true);
        let queue = given(queue, file.queue_type, Queue::of_type);
        let queue = given(queue, file.message_ttl, |queue, ttl| queue.message_ttl(ttl.0));
        let queue = given(queue, file.expires, |queue, after| queue.expires(after.0));
        let queue = given(queue, file.max_length, Queue::max_length);
        let queue = given(queue, file.max_length_bytes, Queue::max_length_bytes);
        let queue = given(queue, file.overflow, Queue::overflow);
        let queue = given(queue, file.dead_letter_exchange, Queue::dead_letter_to);
        let queue = given(queue, file.dead_letter_routing_key, Queue::dead_letter_key);
        let queue = given(queue, is_so(file.dead_letter_at_least_once), |queue, ()| {
            queue.dead_letter_at_least_once()
        });
        let queue = given(queue, file.max_priority, Queue::max_priority);
        let queue = given(queue, is_so(file.single_active_consumer), |queue, ()| {
            queue.single_active_consumer()
        });
        let mut queue = given(queue, file.delivery_limit, Queue::delivery_limit);
        queue.arguments.0.extend(file.arguments.0);
        queue
    }
}

/// With what the file says, if it says anything.
fn given<T>(queue: Queue, value: Option<T>, set: impl FnOnce(Queue, T) -> Queue) -> Queue {
    match value {
        Some(value) => set(queue, value),
        None => queue,
    }
}

fn is_so(field: Option<bool>) -> Option<()> {
    (field == Some(true)).then_some(())
}

impl FileQueue {
    fn of(queue: &Queue, bind: Vec<FileBinding>) -> Self {
        let is_temporary = queue.named_by_broker;
        let mut arguments = queue.arguments.clone();
        FileQueue {
            name: queue.name.clone(),
            temporary: is_temporary.then_some(true),
            durable: (queue.durable == is_temporary).then_some(queue.durable),
            exclusive: (queue.exclusive && !is_temporary).then_some(true),
            auto_delete: (queue.auto_delete && !is_temporary).then_some(true),
            queue_type: arguments.take("x-queue-type", one_of),
            message_ttl: arguments.take("x-message-ttl", time),
            expires: arguments.take("x-expires", time),
            max_length: arguments.take("x-max-length", number),
            max_length_bytes: arguments.take("x-max-length-bytes", number),
            overflow: arguments.take("x-overflow", one_of),
            dead_letter_exchange: arguments.take("x-dead-letter-exchange", text),
            dead_letter_routing_key: arguments.take("x-dead-letter-routing-key", text),
            dead_letter_at_least_once: None,
            max_priority: arguments.take("x-max-priority", number),
            single_active_consumer: arguments.take("x-single-active-consumer", truth),
            delivery_limit: arguments.take("x-delivery-limit", number),
            arguments,
            bind,
        }
    }
}

impl Arguments {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes an argument and returns its value, if the field of a file can hold that.
    fn take<T>(&mut self, name: &str, read: impl FnOnce(&Value<'_>) -> Option<T>) -> Option<T> {
        let value = read(self.0.get(name)?)?;
        self.0.remove(name);
        Some(value)
    }
}

fn text(value: &Value<'_>) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn number<N: TryFrom<i64>>(value: &Value<'_>) -> Option<N> {
    N::try_from(value.as_i64()?).ok()
}

fn time(value: &Value<'_>) -> Option<Time> {
    Some(Time(Duration::from_millis(number(value)?)))
}

/// A field that is false sets no argument, so an argument that is false stays one.
fn truth(value: &Value<'_>) -> Option<bool> {
    value.as_bool().filter(|truth| *truth)
}

fn one_of<T: DeserializeOwned>(value: &Value<'_>) -> Option<T> {
    T::deserialize(IntoDeserializer::<NotOneOfThem>::into_deserializer(value.as_str()?)).ok()
}

/// `4h`, `1500ms`; see [`crate::duration`].
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct Time(Duration);

impl TryFrom<String> for Time {
    type Error = String;

    fn try_from(text: String) -> Result<Time, String> {
        crate::duration::parse(&text).map(Time)
    }
}

impl From<Time> for String {
    fn from(time: Time) -> String {
        crate::duration::write(time.0)
    }
}

/// Through the values of TOML, which are those of YAML without `null`.
impl<'de> Deserialize<'de> for Arguments {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let read = |(name, value)| match read(value) {
            Ok(value) => Ok((name, value)),
            Err(wrong) => Err(D::Error::custom(format_args!("argument {name:?}: {wrong}"))),
        };
        let arguments = BTreeMap::<String, Toml>::deserialize(deserializer)?;
        arguments.into_iter().map(read).collect::<Result<_, _>>().map(Arguments)
    }
}

impl Serialize for Arguments {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in self.iter() {
            match written(value) {
                Some(value) => map.serialize_entry(name, &value)?,
                None => {
                    let text = "which a file has no form for";
                    return Err(S::Error::custom(format_args!(
                        "argument {name:?} is {value:?}, {text}"
                    )));
                }
            }
        }
        map.end()
    }
}

/// The value of an argument, in the types that AMQP has.
fn read(value: Toml) -> Result<Value<'static>, String> {
    Ok(match value {
        Toml::String(text) => text.into(),
        Toml::Integer(number) => number.into(),
        Toml::Float(number) => number.into(),
        Toml::Boolean(truth) => truth.into(),
        Toml::Datetime(time) => return Err(format!("write {time} in quotes, as text")),
        Toml::Array(values) => {
            let mut array = Array::new();
            for value in values {
                array.push(read(value)?).map_err(|error| error.to_string())?;
            }
            array.into()
        }
        Toml::Table(pairs) => {
            let mut table = Table::new();
            for (name, value) in pairs {
                table.insert(name, read(value)?).map_err(|error| error.to_string())?;
            }
            table.into()
        }
    })
}

/// `None` for bytes, times and void.
fn written(value: &Value<'_>) -> Option<Toml> {
    Some(match value {
        Value::Bool(truth) => (*truth).into(),
        Value::F32(number) => f64::from(*number).into(),
        Value::F64(number) => (*number).into(),
        Value::Str(text) => text.to_str().ok()?.into(),
        Value::Array(array) => {
            Toml::Array(array.iter().map(|value| written(&value)).collect::<Option<_>>()?)
        }
        Value::Table(table) => {
            let pair = |(name, value): (ShortStr<'_>, Value<'_>)| {
                Some((name.to_str().ok()?.to_owned(), written(&value)?))
            };
            Toml::Table(table.iter().map(pair).collect::<Option<_>>()?)
        }
        other => other.as_i64()?.into(),
    })
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
            (
                "[[queue]]\nname = \"q\"\narguments = { x-a = 2000-01-01 }",
                ["line 3", "x-a", "in quotes"],
            ),
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

    #[test]
    fn what_is_written_is_read_as_the_same() {
        let topology = Topology::new()
            .exchange(Exchange::topic("orders").alternate("unrouted").argument("x-a", 5i64))
            .exchange(Exchange::fanout("audit").transient().internal().bind("orders", "#"))
            .queue(
                Queue::quorum("billing")
                    .message_ttl(Duration::from_millis(90_500))
                    .expires(Duration::from_secs(7200))
                    .max_length(1000)
                    .max_length_bytes(1 << 40)
                    .overflow(Overflow::RejectPublish)
                    .dead_letter_to("failed")
                    .dead_letter_key("billing")
                    .dead_letter_at_least_once()
                    .delivery_limit(5)
                    .single_active_consumer()
                    .bind("orders", "order.*")
                    .bind("orders", "bill.\"#\""),
            )
            .binding(Binding::to_queue("billing", "orders", "").argument("x-match", "all"))
            .queue(Queue::classic("other").max_priority(9).transient().auto_delete())
            // What its fields cannot have stays among the arguments.
            .queue(
                Queue::new("odd")
                    .argument("x-queue-type", "later")
                    .argument("x-overflow", 5i64)
                    .argument("x-max-length", -1i64)
                    .argument("x-single-active-consumer", false),
            )
            .queue(Queue::temporary("mine"));
        let text = topology.to_toml().unwrap();
        assert!(text.contains("message-ttl = \"90500ms\""), "{text}");
        assert_eq!(Topology::from_toml(&text).unwrap().to_toml().unwrap(), text);
        assert_eq!(Topology::from_toml(&text).unwrap(), topology, "{text}");
        assert_eq!(Topology::new().to_toml().unwrap(), "");
    }

    #[test]
    fn what_has_no_form_is_an_error() {
        let leading_out = Topology::new().binding(Binding::to_queue("q", "x", "k"));
        let of_nothing = Topology::new().queue(Queue::classic("q").argument("x-a", Value::Void));
        for topology in [leading_out, of_nothing] {
            assert_eq!(topology.to_toml().unwrap_err().kind(), ErrorKind::Invalid);
        }
    }
}
