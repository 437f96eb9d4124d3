//! [`AsyncApi`] collects servers, channels, operations and messages from the objects of a program. It decides which of them are the same, and
//! so stand in the document once.

use std::any::type_name;
use std::fmt;

use leveret::amqp::Options;
use leveret::{
    Destination, Error, Events, Exchange, Publisher, Queue, Runner, ServiceBuilder, Topology,
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};

use crate::bindings;
use crate::body::{Body, BodyType, JSON};
use crate::document::{
    Action, Channel, Document, Message, Operation, Reply, Server, Source, schema_path,
};
use crate::identifiers::{Identifiers, identifier, without_paths};
use crate::methods::Methods;
use crate::schema;

/// An [AsyncAPI 3.0](https://www.asyncapi.com/docs/reference/specification/v3.0.0) document of what a program sends and receives. See the
/// [crate](crate) for an example.
///
/// A [`Body`] names a message; `()` says nothing about it. The document has the structure of a value only if a
/// [schema](Self::schema) is given.
///
/// Sending is an operation on the channel of a routing key, in which `{word}` is a parameter. Receiving is one on the channel of a queue;
/// `x-leveret-bindings` has the exchanges and routing keys or patterns that it is bound to.
#[derive(Clone, Debug)]
#[must_use]
pub struct AsyncApi {
    document: Document,
    channels: Identifiers<ChannelKey>,
    operations: Identifiers<OperationKey>,
    messages: Identifiers<MessageKey>,
    /// By the full name of a type.
    types: Identifiers<&'static str>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ChannelKey {
    RoutingKey {
        exchange: String,
        key: String,
    },
    Queue(String),
    /// A queue that the broker names, by what it is bound to.
    TemporaryQueue(String),
    /// The replies to the requests of a queue.
    Replies(String),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct OperationKey {
    channel: String,
    role: Role,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Publisher,
    Consumer,
    Method(String),
    Fallback,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum MessageKey {
    /// The message of a channel of which nothing is known.
    Unknown {
        channel: String,
    },
    Body(BodyType),
    Request {
        channel: String,
        method: String,
    },
}

impl AsyncApi {
    /// A document without content, for a program of this name and version.
    pub fn new(title: impl Into<String>, version: impl Into<String>) -> Self {
        AsyncApi {
            document: Document::new(title.into(), version.into()),
            channels: Identifiers::default(),
            operations: Identifiers::default(),
            messages: Identifiers::default(),
            types: Identifiers::default(),
        }
    }

    /// The purpose of the program.
    pub fn description(mut self, text: impl Into<String>) -> Self {
        self.document.info.description = Some(text.into());
        self
    }

    /// A broker by its URL. The document leaves out user and password.
    pub fn server(mut self, name: &str, url: &str) -> Result<Self, Error> {
        let options = Options::from_uri(url)?;
        let (host, port) = options.address();
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let virtual_host = utf8_percent_encode(&options.virtual_host, NON_ALPHANUMERIC);
        let server = Server {
            host: format!("{host}:{port}"),
            pathname: format!("/{virtual_host}"),
            protocol: if options.tls.is_some() { "amqps" } else { "amqp" },
            protocol_version: "0.9.1",
        };
        self.document.servers.insert(identifier(name), server);
        Ok(self)
    }

    /// The program publishes these events, with bodies of this type.
    pub fn sends<B: Body>(self, events: &Events, key: &str) -> Self {
        let bindings = bindings::of_publishing(false, true);
        let exchange = events.ingress();
        self.sends_to(exchange.name(), Some(exchange), key, BodyType::of::<B>(), bindings)
    }

    /// The program publishes by this publisher, with bodies of this type.
    pub fn publishes<B: Body>(self, publisher: &Publisher, key: &str) -> Self {
        let name = publisher.exchange();
        let topology = publisher.client().topology();
        let declared = topology.exchanges().iter().find(|exchange| exchange.name() == name);
        let bindings = bindings::of_publishing(publisher.is_mandatory(), publisher.is_persistent());
        self.sends_to(name, declared, key, BodyType::of::<B>(), bindings)
    }

    fn sends_to(
        mut self,
        exchange: &str,
        declared: Option<&Exchange>,
        key: &str,
        body: Option<BodyType>,
        bindings: Value,
    ) -> Self {
        let description = bindings::of_exchange(exchange, declared);
        let channel = Channel::new(Some(key.to_owned()), Some(description));
        let (exchange, key) = (exchange.to_owned(), key.to_owned());
        let channel = self.channel(ChannelKey::RoutingKey { exchange, key }, channel);
        let message = self.message(body, &channel);
        let operation = Operation::new(Action::Send, &channel, bindings);
        self.operation(&channel, Role::Publisher, operation, &message);
        self
    }

    /// The program handles what this consumer gets, with bodies of this type.
    pub fn receives<B: Body>(mut self, consumer: &Runner) -> Self {
        let channel = self.queue(consumer.queue(), &consumer.topology());
        let message = self.message(BodyType::of::<B>(), &channel);
        let bindings = bindings::of_consuming(!consumer.is_auto_ack());
        let operation = Operation::new(Action::Receive, &channel, bindings);
        self.operation(&channel, Role::Consumer, operation, &message);
        self
    }

    /// The program offers this service: each of its methods and its fallback are operations with replies, whether they are
    /// described or not.
    ///
    /// Fails if the service lacks a method that is described.
    pub fn serves(mut self, service: &ServiceBuilder, methods: Methods) -> Result<Self, Error> {
        methods.check(service)?;
        let topology = service.topology();
        // A service has one queue.
        for name in topology.queues().iter().map(Queue::name) {
            let channel = self.queue(name, &topology);
            let replies = ChannelKey::Replies(name.to_owned());
            let replies = self.channel(replies, Channel::new(None, None));
            if service.has_fallback() {
                let bodies = methods.of_fallback();
                let request = self.message(bodies.request, &channel);
                self.answers(&channel, Role::Fallback, &request, &replies, bodies.reply);
            }
            for name in service.method_names() {
                let bodies = methods.of(&name);
                let key = MessageKey::Request { channel: channel.clone(), method: name.clone() };
                let wanted = format!("{channel}.{name}");
                let request = self.add_message(key, &wanted, name.clone(), bodies.request);
                self.answers(&channel, Role::Method(name), &request, &replies, bodies.reply);
            }
        }
        Ok(self)
    }

    /// Adds an operation that receives a request and replies.
    fn answers(
        &mut self,
        channel: &str,
        role: Role,
        request: &str,
        replies: &str,
        reply: Option<BodyType>,
    ) {
        let reply = reply.map(|body| self.message(Some(body), replies));
        if let Some(reply) = &reply {
            self.document.add_to_channel(replies, reply);
        }
        let mut operation = Operation::new(Action::Receive, channel, bindings::of_consuming(true));
        operation.reply = Some(Reply::new(replies, reply.as_deref()));
        self.operation(channel, role, operation, request);
    }

    /// The structure of values of a type, as JSON Schema (draft 7). References within the schema (`#/definitions/…`) stay
    /// valid in the document. References to `#/components/…` are to the document itself.
    pub fn schema<T: ?Sized>(mut self, schema: Value) -> Self {
        let id = self.type_id(type_name::<T>());
        let schema = schema::embed(schema, &schema_path(&id));
        self.document.components.schemas.insert(id, schema);
        self
    }

    /// The document as JSON. [`Display`](fmt::Display) writes the same.
    pub fn to_json(&self) -> Value {
        let mut document = self.document.clone();
        document.link_payloads();
        json!(document)
    }

    /// Adds the channel of a queue, unless the document has it.
    fn queue(&mut self, name: &str, topology: &Topology) -> String {
        let sources = sources(topology, name);
        let declared = topology.queues().iter().find(|queue| queue.name() == name);
        let (key, address) = match declared.is_some_and(Queue::is_named_by_broker) {
            true => (ChannelKey::temporary(&sources), None),
            false => (ChannelKey::Queue(name.to_owned()), Some(name)),
        };
        let description = bindings::of_queue(address, declared);
        let mut channel = Channel::new(address.map(str::to_owned), Some(description));
        channel.sources = sources;
        self.channel(key, channel)
    }

    /// Adds a channel, unless the document has it.
    fn channel(&mut self, key: ChannelKey, channel: Channel) -> String {
        let wanted = key.to_string();
        let id = self.channels.assign(key, &[&wanted]);
        self.document.channels.entry(id.clone()).or_insert(channel);
        id
    }

    /// Adds an operation, unless the document has it, and its message.
    fn operation(&mut self, channel: &str, role: Role, operation: Operation, message: &str) {
        self.document.add_to_channel(channel, message);
        let wanted = match &role {
            Role::Publisher => format!("send-{channel}"),
            Role::Consumer | Role::Fallback => format!("receive-{channel}"),
            Role::Method(method) => format!("receive-{channel}.{method}"),
        };
        let id =
            self.operations.assign(OperationKey { channel: channel.to_owned(), role }, &[&wanted]);
        self.document.operations.entry(id).or_insert(operation).add_message(message);
    }

    /// A message that is named after its value, or after its channel if nothing is known.
    fn message(&mut self, body: Option<BodyType>, channel: &str) -> String {
        let Some(known) = body else {
            let key = MessageKey::Unknown { channel: channel.to_owned() };
            return self.add_message(key, &format!("{channel}.message"), channel.to_owned(), None);
        };
        let name = self.type_id(known.value);
        let wanted = match known.content_type {
            None | Some(JSON) => name.clone(),
            Some(other) => format!("{name} {other}"),
        };
        self.add_message(MessageKey::Body(known), &wanted, name, body)
    }

    fn add_message(
        &mut self,
        key: MessageKey,
        wanted: &str,
        name: String,
        body: Option<BodyType>,
    ) -> String {
        let id = self.messages.assign(key, &[wanted]);
        let content_type = body.and_then(|body| body.content_type);
        let title = body.map(|body| self.type_id(body.value));
        let message = Message::new(name, content_type, title);
        self.document.components.messages.insert(id.clone(), message);
        id
    }

    /// The name of a type, or its path if another type has that name.
    fn type_id(&mut self, type_name: &'static str) -> String {
        self.types.assign(type_name, &[&without_paths(type_name), &type_name.replace("::", ".")])
    }
}

/// As JSON.
impl fmt::Display for AsyncApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.to_json())
    }
}

impl ChannelKey {
    /// The broker's name of the queue differs in each run, its bindings do not.
    fn temporary(sources: &[Source]) -> Self {
        let sources = sources.iter().map(|one| format!("{} {}", one.exchange, one.routing_key));
        ChannelKey::TemporaryQueue(sources.collect::<Vec<_>>().join(" "))
    }
}

/// As the channel is to be called.
impl fmt::Display for ChannelKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChannelKey::RoutingKey { exchange, key } => write!(f, "{exchange} {key}"),
            ChannelKey::Queue(name) => f.write_str(name),
            ChannelKey::TemporaryQueue(sources) => write!(f, "temporary {sources}"),
            ChannelKey::Replies(queue) => write!(f, "{queue} replies"),
        }
    }
}

/// The exchanges and routing keys or patterns that a queue is bound to.
fn sources(topology: &Topology, queue: &str) -> Vec<Source> {
    let to_queue = Destination::Queue(queue.to_owned());
    let bindings = topology.bindings().iter().filter(|binding| *binding.destination() == to_queue);
    let source = |binding: &leveret::Binding| Source {
        exchange: binding.source().to_owned(),
        routing_key: binding.routing_key().to_owned(),
    };
    bindings.map(source).collect()
}
