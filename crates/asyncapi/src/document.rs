//! The objects of AsyncAPI 3.0 that the document has, serialized under the names of the specification. References between them are paths
//! from the document's root.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use crate::body::JSON;
use crate::identifiers::identifier;

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Document {
    asyncapi: &'static str,
    pub(crate) info: Info,
    default_content_type: &'static str,
    pub(crate) servers: BTreeMap<String, Server>,
    pub(crate) channels: BTreeMap<String, Channel>,
    pub(crate) operations: BTreeMap<String, Operation>,
    pub(crate) components: Components,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Info {
    pub(crate) title: String,
    pub(crate) version: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) description: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Server {
    pub(crate) host: String,
    pub(crate) pathname: String,
    pub(crate) protocol: &'static str,
    pub(crate) protocol_version: &'static str,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Channel {
    /// `None` if it differs from message to message, or the broker chooses it.
    address: Option<String>,
    messages: BTreeMap<String, Reference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bindings: Option<Value>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    parameters: BTreeMap<String, Parameter>,
    #[serde(rename = "x-leveret-bindings", skip_serializing_if = "Vec::is_empty")]
    pub(crate) sources: Vec<Source>,
}

/// A part of an address that differs from message to message.
#[derive(Clone, Debug, Serialize)]
struct Parameter {}

/// Where a queue gets its messages from.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Source {
    pub(crate) exchange: String,
    pub(crate) routing_key: String,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Operation {
    action: Action,
    channel: Reference,
    messages: Vec<Reference>,
    bindings: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reply: Option<Reply>,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Action {
    Send,
    Receive,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Reply {
    address: ReplyAddress,
    channel: Reference,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    messages: Vec<Reference>,
}

#[derive(Clone, Debug, Serialize)]
struct ReplyAddress {
    location: &'static str,
    description: &'static str,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Components {
    pub(crate) messages: BTreeMap<String, Message>,
    pub(crate) schemas: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Message {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content_type: Option<&'static str>,
    /// The identifier of the type of its value, under which the schema is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) title: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Reference>,
}

/// A path to another object of the document.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Reference {
    #[serde(rename = "$ref")]
    path: String,
}

impl Document {
    pub(crate) fn new(title: String, version: String) -> Self {
        Document {
            asyncapi: "3.0.0",
            info: Info { title, version, description: None },
            default_content_type: JSON,
            servers: BTreeMap::new(),
            channels: BTreeMap::new(),
            operations: BTreeMap::new(),
            components: Components::default(),
        }
    }

    /// Adds a message of the components to a channel.
    pub(crate) fn add_to_channel(&mut self, channel: &str, message: &str) {
        let to_message = Reference::new(format!("#/components/messages/{message}"));
        if let Some(channel) = self.channels.get_mut(channel) {
            channel.messages.insert(message.to_owned(), to_message);
        }
    }

    /// Points the messages to the schemas of their values.
    pub(crate) fn link_payloads(&mut self) {
        let Components { messages, schemas } = &mut self.components;
        for message in messages.values_mut() {
            let value = message.title.as_ref().filter(|title| schemas.contains_key(*title));
            message.payload = value.map(|title| Reference::new(format!("#{}", schema_path(title))));
        }
    }
}

impl Channel {
    pub(crate) fn new(address: Option<String>, bindings: Option<Value>) -> Self {
        let parameters = parameters(address.as_deref().unwrap_or_default());
        Channel { address, messages: BTreeMap::new(), bindings, parameters, sources: Vec::new() }
    }
}

impl Operation {
    pub(crate) fn new(action: Action, channel: &str, bindings: Value) -> Self {
        let channel = Reference::to_channel(channel);
        Operation { action, channel, messages: Vec::new(), bindings, reply: None }
    }

    /// Adds a message of the operation's channel.
    pub(crate) fn add_message(&mut self, message: &str) {
        let reference = self.channel.to_message(message);
        if !self.messages.contains(&reference) {
            self.messages.push(reference);
        }
    }
}

impl Reply {
    /// With a message of this channel, if its body is known.
    pub(crate) fn new(channel: &str, message: Option<&str>) -> Self {
        let channel = Reference::to_channel(channel);
        Reply {
            address: ReplyAddress {
                location: "$message.header#/replyTo",
                description: "The property reply-to of the request. A request without it gets no reply.",
            },
            messages: message.map(|message| channel.to_message(message)).into_iter().collect(),
            channel,
        }
    }
}

impl Message {
    pub(crate) fn new(
        name: String,
        content_type: Option<&'static str>,
        title: Option<String>,
    ) -> Self {
        Message { name, content_type, title, payload: None }
    }
}

impl Reference {
    fn new(path: String) -> Self {
        Reference { path }
    }

    fn to_channel(id: &str) -> Self {
        Reference::new(format!("#/channels/{id}"))
    }

    /// From the reference of a channel to one of its messages.
    fn to_message(&self, id: &str) -> Self {
        Reference::new(format!("{}/messages/{id}", self.path))
    }
}

pub(crate) fn schema_path(id: &str) -> String {
    format!("/components/schemas/{id}")
}

/// The parts of an address in braces.
fn parameters(address: &str) -> BTreeMap<String, Parameter> {
    let parts = address.split('{').skip(1).filter_map(|part| part.split_once('}'));
    let is_name = |name: &str| !name.is_empty() && identifier(name) == name && !name.contains('.');
    let names = parts.map(|(name, _)| name).filter(|name| is_name(name));
    names.map(|name| (name.to_owned(), Parameter {})).collect()
}
