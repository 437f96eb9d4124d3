//! A document of what a program sends and receives, as AsyncAPI 3 has it.

use std::collections::BTreeMap;
use std::fmt;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value, json};

use crate::amqp::Options;
use crate::consumer::{FromIncoming, Runner};
use crate::error::Error;
use crate::events::Events;
use crate::payload;
use crate::publisher::Publisher;
use crate::rpc::{ServiceBuilder, Shapes};
use crate::topology::{Destination, Exchange, ExchangeKind, Queue, Topology};

use crate::shape::{Shape, plain};

/// A document of what a program sends and receives, by [AsyncAPI 3.0](https://www.asyncapi.com/docs/reference/specification/v3.0.0).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::BoxError> {
/// use leveret::{AsyncApi, Client, Json};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct Tick {
///     price: f64,
/// }
///
/// async fn on_tick(Json(tick): Json<Tick>) {
///     println!("{}", tick.price);
/// }
///
/// let client = Client::embedded().await?;
/// let stock = client.events("stock");
/// let subscription = stock.subscribe("prices-app", ["STOCK.IBM.#"]).handle(on_tick);
///
/// let document = AsyncApi::new("prices", "1.2.0")
///     .server("production", "amqp://rabbit.example.com/prices")?
///     .sends::<Json<Tick>>(&stock, "STOCK.{symbol}.{place}")
///     .receives(&subscription)
///     .schema::<Tick>(serde_json::json!({ "type": "object", "properties": { "price": { "type": "number" } } }));
///
/// assert_eq!(document.to_json()["operations"]["receive-prices-app"]["action"], "receive");
/// println!("{document}"); // JSON
/// # Ok(())
/// # }
/// ```
///
/// A message is named after the type of its body, which is that of the argument that a handler takes it as; how the type is
/// made up is not known, unless a [schema](Self::schema) is given. What is sent is a channel of its routing key, in which
/// `{word}` is a part that differs. What is received is a channel of its queue; `x-leveret-bindings` says which exchanges and
/// patterns lead there.
#[derive(Clone, Debug)]
#[must_use]
pub struct AsyncApi {
    info: Map<String, Value>,
    servers: Map<String, Value>,
    channels: BTreeMap<String, Channel>,
    channel_ids: Names,
    operations: BTreeMap<String, Operation>,
    operation_ids: Names,
    messages: BTreeMap<String, Message>,
    message_ids: Names,
    /// By the full name of a type, what it is called here.
    type_names: BTreeMap<&'static str, String>,
    schemas: BTreeMap<String, Value>,
}

#[derive(Clone, Debug)]
struct Channel {
    /// None if it differs from message to message, or the broker makes it.
    address: Option<String>,
    bindings: Option<Value>,
    /// Where a queue gets its messages from.
    sources: Vec<Value>,
    messages: Vec<String>,
}

#[derive(Clone, Debug)]
struct Operation {
    action: &'static str,
    channel: String,
    bindings: Value,
    messages: Vec<String>,
    reply: Option<Reply>,
}

/// What goes to the address that a message has in `reply-to`.
#[derive(Clone, Debug)]
struct Reply {
    channel: String,
    /// None if nothing is known of its body.
    message: Option<String>,
}

#[derive(Clone, Debug)]
struct Message {
    name: String,
    content_type: Option<&'static str>,
    /// What the type of its body is called.
    type_name: Option<String>,
}

/// What no name in AMQP has: so nothing that is made of two of them is the same as something else.
const APART: char = '\0';

/// The version of AsyncAPI's bindings for AMQP.
const BINDING_VERSION: &str = "0.3.0";

impl AsyncApi {
    /// A document of a program of this name and version, with nothing in it yet.
    pub fn new(title: impl Into<String>, version: impl Into<String>) -> Self {
        let mut info = Map::new();
        info.insert("title".to_owned(), title.into().into());
        info.insert("version".to_owned(), version.into().into());
        AsyncApi {
            info,
            servers: Map::new(),
            channels: BTreeMap::new(),
            channel_ids: Names::default(),
            operations: BTreeMap::new(),
            operation_ids: Names::default(),
            messages: BTreeMap::new(),
            message_ids: Names::default(),
            type_names: BTreeMap::new(),
            schemas: BTreeMap::new(),
        }
    }

    /// What the program is for.
    pub fn description(mut self, text: impl Into<String>) -> Self {
        self.info.insert("description".to_owned(), text.into().into());
        self
    }

    /// A broker by its URL, of which user and password are left out.
    pub fn server(mut self, name: &str, url: &str) -> Result<Self, Error> {
        let options = Options::from_uri(url)?;
        let (host, port) = options.address();
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let virtual_host = utf8_percent_encode(&options.virtual_host, NON_ALPHANUMERIC);
        let server = json!({
            "host": format!("{host}:{port}"),
            "pathname": format!("/{virtual_host}"),
            "protocol": if options.tls.is_some() { "amqps" } else { "amqp" },
            "protocolVersion": "0.9.1",
        });
        self.servers.insert(plain(name), server);
        Ok(self)
    }

    /// The program publishes these events, whose bodies a handler would take as an `M`.
    pub fn sends<M: FromIncoming>(self, events: &Events, key: &str) -> Self {
        let bindings = of_sending(false, true);
        self.sends_to(events.ingress(), key, Shape::of::<M>(), bindings)
    }

    /// The program publishes these messages, whose bodies a handler would take as an `M`.
    pub fn publishes<M: FromIncoming>(self, publisher: &Publisher, key: &str) -> Self {
        let name = publisher.exchange();
        let topology = publisher.client().topology();
        let known = topology.exchanges().iter().find(|exchange| exchange.name() == name);
        let exchange = known.cloned().unwrap_or_else(|| Exchange::direct(name));
        let bindings = of_sending(publisher.is_mandatory(), publisher.is_persistent());
        self.sends_to(&exchange, key, Shape::of::<M>(), bindings)
    }

    fn sends_to(
        mut self,
        exchange: &Exchange,
        key: &str,
        shape: Option<Shape>,
        bindings: Value,
    ) -> Self {
        let channel = Channel {
            address: Some(key.to_owned()),
            bindings: Some(json!({
                "is": "routingKey",
                "exchange": of_exchange(exchange),
                "bindingVersion": BINDING_VERSION,
            })),
            sources: Vec::new(),
            messages: Vec::new(),
        };
        let identity = format!("{}{APART}{key}", exchange.name());
        let message = self.message(shape, &identity);
        let id = self.channel(&identity, channel, Some(&message));
        self.operation(&id, Operation::new("send", &id, bindings), Some(&message));
        self
    }

    /// The program handles what this consumer gets: the queue, what it is bound to, and the type of the handler's argument
    /// for the body.
    pub fn receives(mut self, consumer: &Runner) -> Self {
        let (name, topology) = (consumer.queue(), consumer.topology());
        let known = topology.queues().iter().find(|queue| queue.name() == name);
        let queue = known.cloned().unwrap_or_else(|| Queue::new(name));
        let sources = sources(&topology, name);
        let identity = match queue.is_named_by_broker() {
            true => temporary_name(&sources),
            false => name.to_owned(),
        };
        let channel = Channel::of_queue(&queue, sources);
        let bindings = json!({ "ack": !consumer.is_auto_ack(), "bindingVersion": BINDING_VERSION });
        let message = self.message(consumer.shape(), &identity);
        let id = self.channel(&identity, channel, Some(&message));
        self.operation(&id, Operation::new("receive", &id, bindings), Some(&message));
        self
    }

    /// The program offers this service: its queue, and for each of its methods, the fallback included, what it gets and what
    /// it replies.
    pub fn serves(mut self, service: &ServiceBuilder) -> Self {
        let topology = service.topology();
        let Some(queue) = topology.queues().first() else { return self };
        let name = queue.name();
        let channel = Channel::of_queue(queue, sources(&topology, name));
        let id = self.channel(name, channel, None);
        let replies = self.channel(&format!("{name}{APART}replies"), Channel::of_replies(), None);
        let replying = |message| {
            let bindings = json!({ "ack": true, "bindingVersion": BINDING_VERSION });
            let reply = Some(Reply { channel: replies.clone(), message });
            Operation { reply, ..Operation::new("receive", &id, bindings) }
        };
        if let Some(shapes) = service.fallback_shapes() {
            let request = self.message(shapes.request, name);
            self.channel_has(&id, &request);
            let reply = self.reply(&replies, shapes, name);
            self.operation(&id, replying(reply), Some(&request));
        }
        for (method, shapes) in service.shapes() {
            let method_name = format!("{name}.{method}");
            let request = self.message_ids.one(&format!("{name}{APART}{method}"), &method_name);
            self.describe(request.clone(), method.clone(), shapes.request);
            self.channel_has(&id, &request);
            let reply = self.reply(&replies, *shapes, &method_name);
            self.operation(&request, replying(reply), Some(&request));
        }
        self
    }

    /// Writes down what a method replies, if it is known, and says what it is called.
    fn reply(&mut self, channel: &str, shapes: Shapes, method: &str) -> Option<String> {
        let reply = self.message(Some(shapes.reply?), method);
        self.channel_has(channel, &reply);
        Some(reply)
    }

    /// How values of a type are made up, as JSON Schema (draft 7). Its references to parts of its own (`#/definitions/…`)
    /// lead there in the document as well; those to `#/components/…` are left as they are.
    pub fn schema<T: ?Sized>(mut self, schema: Value) -> Self {
        let name = self.name_of(std::any::type_name::<T>());
        // What fits everything or nothing, in the form that AsyncAPI takes.
        let mut schema = match schema {
            Value::Bool(true) => json!({}),
            Value::Bool(false) => json!({ "not": {} }),
            schema => schema,
        };
        move_references(&mut schema, &format!("/components/schemas/{name}"));
        self.schemas.insert(name, schema);
        self
    }

    /// Adds a channel, which may be there already, with a message, and says what it is called.
    fn channel(&mut self, identity: &str, channel: Channel, message: Option<&str>) -> String {
        let id = self.channel_ids.one(identity, identity);
        self.channels.entry(id.clone()).or_insert(channel);
        if let Some(message) = message {
            self.channel_has(&id, message);
        }
        id
    }

    fn channel_has(&mut self, id: &str, message: &str) {
        if let Some(channel) = self.channels.get_mut(id) {
            add_once(&mut channel.messages, message);
        }
    }

    /// Adds an operation, which may be there already, with a message.
    fn operation(&mut self, name: &str, operation: Operation, message: Option<&str>) {
        let Operation { action, channel, reply, .. } = &operation;
        let identity = format!("{action}{APART}{channel}{APART}{name}{APART}{}", reply.is_some());
        let id = self.operation_ids.one(&identity, &format!("{action}-{name}"));
        let operation = self.operations.entry(id).or_insert(operation);
        if let Some(message) = message {
            add_once(&mut operation.messages, message);
        }
    }

    /// What a type is called: its own name, or its path if another type has that.
    fn name_of(&mut self, type_name: &'static str) -> String {
        if let Some(name) = self.type_names.get(type_name) {
            return name.clone();
        }
        let short = plain(type_name);
        let is_taken = self.type_names.values().any(|taken| *taken == short);
        let name = if is_taken { plain(&type_name.replace("::", ".")) } else { short };
        self.type_names.insert(type_name, name.clone());
        name
    }

    /// Writes down a message that is named after its type, or else after its channel, and says what it is called.
    fn message(&mut self, shape: Option<Shape>, identity: &str) -> String {
        let (wanted, name) = match shape {
            None => (format!("{identity}.message"), plain(identity)),
            Some(Shape { content_type, type_name }) => {
                let name = self.name_of(type_name);
                match content_type {
                    Some(payload::JSON) | None => (name.clone(), name),
                    Some(other) => (format!("{name} {other}"), name),
                }
            }
        };
        let id = self.message_ids.one(&wanted, &wanted);
        self.describe(id.clone(), name, shape);
        id
    }

    fn describe(&mut self, id: String, name: String, shape: Option<Shape>) {
        let type_name = shape.map(|shape| self.name_of(shape.type_name));
        let content_type = shape.and_then(|shape| shape.content_type);
        self.messages.insert(id, Message { name, content_type, type_name });
    }

    /// The document.
    pub fn to_json(&self) -> Value {
        let channels: Map<_, _> =
            self.channels.iter().map(|(id, channel)| (id.clone(), channel.to_json())).collect();
        let operations: Map<_, _> =
            self.operations.iter().map(|(id, one)| (id.clone(), one.to_json())).collect();
        let messages: Map<_, _> =
            self.messages.iter().map(|(id, one)| (id.clone(), self.of_message(one))).collect();
        json!({
            "asyncapi": "3.0.0",
            "info": self.info,
            "defaultContentType": "application/json",
            "servers": self.servers,
            "channels": channels,
            "operations": operations,
            "components": { "messages": messages, "schemas": self.schemas },
        })
    }

    /// A message with the schema of its type, if there is one.
    fn of_message(&self, message: &Message) -> Value {
        let mut described = json!({ "name": message.name });
        if let Some(content_type) = message.content_type {
            described["contentType"] = content_type.into();
        }
        if let Some(type_name) = &message.type_name {
            described["title"] = type_name.as_str().into();
            if self.schemas.contains_key(type_name) {
                described["payload"] = reference(&format!("#/components/schemas/{type_name}"));
            }
        }
        described
    }
}

/// As JSON.
impl fmt::Display for AsyncApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.to_json())
    }
}

/// What things are called in the document, by what they are.
#[derive(Clone, Debug, Default)]
struct Names(BTreeMap<String, String>);

impl Names {
    /// The name of this one, which no other has.
    fn one(&mut self, identity: &str, wanted: &str) -> String {
        if let Some(name) = self.0.get(identity) {
            return name.clone();
        }
        let wanted = plain(wanted);
        let mut name = wanted.clone();
        for number in 2.. {
            if !self.0.values().any(|taken| *taken == name) {
                break;
            }
            name = format!("{wanted}-{number}");
        }
        self.0.insert(identity.to_owned(), name.clone());
        name
    }
}

impl Channel {
    /// The addresses of those who ask.
    fn of_replies() -> Self {
        Channel { address: None, bindings: None, sources: Vec::new(), messages: Vec::new() }
    }

    fn of_queue(queue: &Queue, sources: Vec<Value>) -> Self {
        let bindings = json!({
            "is": "queue",
            "queue": of_queue(queue),
            "bindingVersion": BINDING_VERSION,
        });
        let address = (!queue.is_named_by_broker()).then(|| queue.name().to_owned());
        Channel { address, bindings: Some(bindings), sources, messages: Vec::new() }
    }

    fn to_json(&self) -> Value {
        let messages: Map<_, _> = self
            .messages
            .iter()
            .map(|name| (name.clone(), reference(&format!("#/components/messages/{name}"))))
            .collect();
        let mut channel = json!({
            "address": self.address,
            "messages": messages,
        });
        if let Some(bindings) = &self.bindings {
            channel["bindings"] = json!({ "amqp": bindings });
        }
        let parameters = parameters(self.address.as_deref().unwrap_or_default());
        if !parameters.is_empty() {
            channel["parameters"] = parameters.into();
        }
        if !self.sources.is_empty() {
            channel["x-leveret-bindings"] = self.sources.clone().into();
        }
        channel
    }
}

impl Operation {
    fn new(action: &'static str, channel: &str, bindings: Value) -> Self {
        Operation {
            action,
            channel: channel.to_owned(),
            bindings,
            messages: Vec::new(),
            reply: None,
        }
    }

    fn to_json(&self) -> Value {
        let messages = self.messages.iter().map(|name| message_of(&self.channel, name));
        let mut operation = json!({
            "action": self.action,
            "channel": reference(&format!("#/channels/{}", self.channel)),
            "messages": messages.collect::<Vec<_>>(),
            "bindings": { "amqp": self.bindings },
        });
        if let Some(reply) = &self.reply {
            operation["reply"] = reply.to_json();
        }
        operation
    }
}

impl Reply {
    fn to_json(&self) -> Value {
        let mut reply = json!({
            "address": {
                "location": "$message.header#/replyTo",
                "description": "The property reply-to of the request; one without it gets no reply.",
            },
            "channel": reference(&format!("#/channels/{}", self.channel)),
        });
        if let Some(message) = &self.message {
            reply["messages"] = json!([message_of(&self.channel, message)]);
        }
        reply
    }
}

/// Where a message of a channel is described.
fn message_of(channel: &str, message: &str) -> Value {
    reference(&format!("#/channels/{channel}/messages/{message}"))
}

fn reference(path: &str) -> Value {
    json!({ "$ref": path })
}

/// References are to the whole document; those of a schema that becomes a part of it have to say which.
fn move_references(part: &mut Value, to: &str) {
    let is_of_document = |path: &str| path.starts_with("#/components/");
    match part {
        Value::Object(parts) => {
            for (name, part) in parts {
                match part {
                    Value::String(path)
                        if name == "$ref" && path.starts_with('#') && !is_of_document(path) =>
                    {
                        path.insert_str(1, to);
                    }
                    part => move_references(part, to),
                }
            }
        }
        Value::Array(parts) => parts.iter_mut().for_each(|part| move_references(part, to)),
        _ => {}
    }
}

fn add_once(names: &mut Vec<String>, name: &str) {
    if !names.iter().any(|known| known == name) {
        names.push(name.to_owned());
    }
}

/// The parts of an address in braces.
fn parameters(address: &str) -> Map<String, Value> {
    let parts = address.split('{').skip(1).filter_map(|part| part.split_once('}'));
    let is_name = |name: &str| !name.is_empty() && plain(name) == name && !name.contains('.');
    let names = parts.map(|(name, _)| name).filter(|name| is_name(name));
    names.map(|name| (name.to_owned(), json!({}))).collect()
}

fn of_sending(mandatory: bool, persistent: bool) -> Value {
    json!({
        "deliveryMode": if persistent { 2 } else { 1 },
        "mandatory": mandatory,
        "bindingVersion": BINDING_VERSION,
    })
}

fn of_exchange(exchange: &Exchange) -> Value {
    let mut described = json!({
        "name": exchange.name(),
        "durable": exchange.is_durable(),
        "autoDelete": exchange.is_auto_delete(),
    });
    match (exchange.name(), exchange.kind()) {
        ("", _) => described["type"] = "default".into(),
        // AsyncAPI knows those of AMQP only.
        (_, ExchangeKind::Other(kind)) => described["x-leveret-type"] = kind.as_str().into(),
        (_, kind) => described["type"] = kind.as_str().into(),
    }
    described
}

fn of_queue(queue: &Queue) -> Value {
    let mut described = json!({
        "durable": queue.is_durable(),
        "exclusive": queue.is_exclusive(),
        "autoDelete": queue.is_auto_delete(),
    });
    if !queue.is_named_by_broker() {
        described["name"] = queue.name().into();
    }
    described
}

/// Which exchanges and patterns lead to a queue.
fn sources(topology: &Topology, queue: &str) -> Vec<Value> {
    let to_queue = Destination::Queue(queue.to_owned());
    let bindings = topology.bindings().iter().filter(|binding| *binding.destination() == to_queue);
    let described = bindings.map(
        |binding| json!({ "exchange": binding.source(), "routingKey": binding.routing_key() }),
    );
    described.collect()
}

/// A name for a queue that has another one in each run.
fn temporary_name(sources: &[Value]) -> String {
    let text = |source: &Value, name: &str| source[name].as_str().unwrap_or_default().to_owned();
    let parts =
        sources.iter().map(|source| text(source, "exchange") + " " + &text(source, "routingKey"));
    format!("temporary {}", parts.collect::<Vec<_>>().join(" "))
}
