//! The AMQP bindings of AsyncAPI, version 0.3.0: the protocol's part of a description. Those of a channel describe an exchange or a queue,
//! those of an operation how it publishes or acks.

use leveret::{Exchange, ExchangeKind, Queue};
use serde_json::{Value, json};

const VERSION: &str = "0.3.0";

/// Of an exchange that the program has not declared, only the name is known.
pub(crate) fn of_exchange(name: &str, declared: Option<&Exchange>) -> Value {
    let mut described = json!({ "name": name });
    if name.is_empty() {
        described["type"] = "default".into();
    } else if let Some(exchange) = declared {
        described["durable"] = exchange.is_durable().into();
        described["autoDelete"] = exchange.is_auto_delete().into();
        match exchange.kind() {
            // AsyncAPI has the types of AMQP only.
            ExchangeKind::Other(kind) => described["x-leveret-type"] = kind.as_str().into(),
            kind => described["type"] = kind.as_str().into(),
        }
    }
    amqp(json!({ "is": "routingKey", "exchange": described }))
}

/// Of a queue that the program has not declared, only the name is known; of one that the broker names, all but the name.
pub(crate) fn of_queue(name: Option<&str>, declared: Option<&Queue>) -> Value {
    let mut described = json!({});
    if let Some(name) = name {
        described["name"] = name.into();
    }
    if let Some(queue) = declared {
        described["durable"] = queue.is_durable().into();
        described["exclusive"] = queue.is_exclusive().into();
        described["autoDelete"] = queue.is_auto_delete().into();
    }
    amqp(json!({ "is": "queue", "queue": described }))
}

pub(crate) fn of_publishing(mandatory: bool, persistent: bool) -> Value {
    amqp(json!({ "deliveryMode": if persistent { 2 } else { 1 }, "mandatory": mandatory }))
}

pub(crate) fn of_consuming(ack: bool) -> Value {
    amqp(json!({ "ack": ack }))
}

fn amqp(mut bindings: Value) -> Value {
    bindings["bindingVersion"] = VERSION.into();
    json!({ "amqp": bindings })
}
