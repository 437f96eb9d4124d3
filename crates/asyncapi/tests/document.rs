//! Documents, validated by the JSON Schema that the AsyncAPI Initiative publishes.

use boon::{Compiler, Schemas};
use leveret::{
    BoxError, Bytes, Client, ErrorKind, Exchange, ExchangeKind, Incoming, Json, MsgPack, Payload,
    Queue, Topology,
};
use leveret_asyncapi::{AsyncApi, Methods};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

#[derive(Serialize, Deserialize)]
struct Tick {
    price: f64,
}

mod other {
    #[derive(serde::Serialize, serde::Deserialize)]
    pub(super) struct Tick {
        pub(super) name: String,
    }
}

/// The document as it is read. Fails the test if it violates the specification.
#[track_caller]
fn valid(document: &AsyncApi) -> Value {
    let document: Value = serde_json::from_str(&document.to_string()).unwrap();
    if let Err(error) = validated(&document) {
        panic!("{error}\n{document:#}");
    }
    document
}

fn validated(document: &Value) -> Result<(), String> {
    let schema: Value = serde_json::from_str(include_str!("schema/3.0.0.json")).unwrap();
    let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
    compiler.add_resource("asyncapi.json", schema).unwrap();
    let schema = compiler.compile("asyncapi.json", &mut schemas).unwrap();
    schemas.validate(document, schema).map_err(|error| format!("{error:#}"))?;
    resolved(document, document)
}

/// Fails if a reference has no target, which the schema does not check.
fn resolved(document: &Value, part: &Value) -> Result<(), String> {
    if let Some(path) = part.get("$ref").and_then(Value::as_str) {
        let found = document.pointer(path.strip_prefix('#').expect("a path in the document"));
        return found.map(drop).ok_or(format!("{path} leads nowhere"));
    }
    let parts: Vec<&Value> = match part {
        Value::Array(parts) => parts.iter().collect(),
        Value::Object(parts) => parts.values().collect(),
        _ => Vec::new(),
    };
    parts.into_iter().try_for_each(|part| resolved(document, part))
}

async fn embedded() -> Client {
    Client::embedded().await.expect("a client of the embedded broker")
}

#[tokio::test]
async fn sent_and_received_events_are_in_the_document() {
    let client = embedded().await;
    let stock = client.events("stock");
    let subscription = stock.subscribe("prices-app", ["STOCK.IBM.#", "STOCK.KO.#"]);
    let runner = subscription.handle(async |_: Incoming, Json(_): Json<Tick>| ());
    let document = AsyncApi::new("prices", "1.2.0")
        .description("Prices of shares.")
        .server("production", "amqps://user:secret@rabbit.example.com/prices")
        .unwrap()
        .sends::<Json<Tick>>(&stock, "STOCK.{symbol}.{place}")
        .receives::<Json<Tick>>(&runner)
        .schema::<Tick>(json!({ "type": "object", "required": ["price"] }));
    let expected = json!({
        "asyncapi": "3.0.0",
        "info": { "title": "prices", "version": "1.2.0", "description": "Prices of shares." },
        "defaultContentType": "application/json",
        "servers": { "production": {
            "host": "rabbit.example.com:5671",
            "pathname": "/prices",
            "protocol": "amqps",
            "protocolVersion": "0.9.1",
        } },
        "channels": {
            "prices-app": {
                "address": "prices-app",
                "messages": { "Tick": { "$ref": "#/components/messages/Tick" } },
                "bindings": { "amqp": {
                    "is": "queue",
                    "queue": {
                        "name": "prices-app", "durable": true, "exclusive": false, "autoDelete": false,
                    },
                    "bindingVersion": "0.3.0",
                } },
                "x-leveret-bindings": [
                    { "exchange": "stock", "routingKey": "STOCK.IBM.#" },
                    { "exchange": "stock", "routingKey": "STOCK.KO.#" },
                ],
            },
            "stock_STOCK._symbol_._place": {
                "address": "STOCK.{symbol}.{place}",
                "parameters": { "symbol": {}, "place": {} },
                "messages": { "Tick": { "$ref": "#/components/messages/Tick" } },
                "bindings": { "amqp": {
                    "is": "routingKey",
                    "exchange": {
                        "name": "stock", "type": "topic", "durable": true, "autoDelete": false,
                    },
                    "bindingVersion": "0.3.0",
                } },
            },
        },
        "operations": {
            "receive-prices-app": {
                "action": "receive",
                "channel": { "$ref": "#/channels/prices-app" },
                "messages": [{ "$ref": "#/channels/prices-app/messages/Tick" }],
                "bindings": { "amqp": { "ack": true, "bindingVersion": "0.3.0" } },
            },
            "send-stock_STOCK._symbol_._place": {
                "action": "send",
                "channel": { "$ref": "#/channels/stock_STOCK._symbol_._place" },
                "messages": [{ "$ref": "#/channels/stock_STOCK._symbol_._place/messages/Tick" }],
                "bindings": { "amqp": {
                    "deliveryMode": 2, "mandatory": false, "bindingVersion": "0.3.0",
                } },
            },
        },
        "components": {
            "messages": { "Tick": {
                "name": "Tick",
                "title": "Tick",
                "contentType": "application/json",
                "payload": { "$ref": "#/components/schemas/Tick" },
            } },
            "schemas": { "Tick": { "type": "object", "required": ["price"] } },
        },
    });
    let written = valid(&document);
    assert_eq!(written, expected, "{written:#}");
}

#[tokio::test]
async fn publishers_and_consumers_of_queues_are_in_the_document() {
    let client = embedded().await;
    let topology = Topology::new()
        .exchange(Exchange::fanout("news"))
        .queue(Queue::classic("readers").bind("news", ""));
    client.apply(&topology).await.unwrap();
    let news = client.publisher("news").build().await.unwrap();
    let default = client.publisher("").build().await.unwrap();
    let other = client.publisher("amq.topic").build().await.unwrap();
    let readers = client.consumer("readers").auto_ack().handle(async |_: String| ());
    let unknown = client.consumer("not declared here").handle(async || ());
    let document = AsyncApi::new("news", "1")
        .publishes::<String>(&news, "")
        .publishes::<MsgPack<Tick>>(&default, "readers")
        .receives::<String>(&readers)
        .publishes::<String>(&other, "key")
        .receives::<()>(&unknown);
    let document = valid(&document);
    let operations = &document["operations"];
    assert_eq!(operations["send-news"]["bindings"]["amqp"]["mandatory"], true);
    assert_eq!(operations["receive-readers-2"]["bindings"]["amqp"]["ack"], false);
    let known = |channel: &str, object: &str| {
        document["channels"][channel]["bindings"]["amqp"][object].clone()
    };
    assert_eq!(operations["receive-not_declared_here"]["action"], "receive");
    assert_eq!(known("not_declared_here", "queue"), json!({ "name": "not declared here" }));
    assert_eq!(known("amq.topic_key", "exchange"), json!({ "name": "amq.topic" }));
    assert_eq!(known("news", "exchange")["type"], "fanout");
    assert_eq!(known("readers", "exchange"), json!({ "name": "", "type": "default" }));
    let messages = &document["components"]["messages"];
    assert_eq!(messages["String_text_plain"]["contentType"], "text/plain");
    assert_eq!(messages["Tick_application_msgpack"]["name"], "Tick");
}

#[tokio::test]
async fn types_of_the_same_name_have_different_messages() {
    let client = embedded().await;
    let events = client.events("events");
    let document = AsyncApi::new("events", "1")
        .sends::<Json<Tick>>(&events, "tick")
        .sends::<MsgPack<Tick>>(&events, "tick")
        .sends::<Payload<other::Tick>>(&events, "tick")
        .sends::<Json<Vec<Tick>>>(&events, "ticks")
        .sends::<Bytes>(&events, "raw")
        .receives::<()>(&events.listen(["#"]).handle(async |_: Incoming| ()))
        .schema::<other::Tick>(json!({ "type": "object" }));
    let document = valid(&document);
    let messages = document["channels"]["events_tick"]["messages"].as_object().unwrap();
    assert_eq!(messages.len(), 3);
    let other = messages.keys().find(|name| name.ends_with("other.Tick")).expect("the other one");
    let schema = &document["components"]["messages"][other]["payload"]["$ref"];
    assert_eq!(*schema, format!("#/components/schemas/{other}"));
    assert!(document["components"]["messages"]["Tick"].get("payload").is_none());
    assert!(messages.contains_key("Tick") && messages.contains_key("Tick_application_msgpack"));
    assert!(document["components"]["messages"].get("Vec_Tick").is_some());
    // The broker's name of the queue differs in each run, the document does not.
    let listening = &document["channels"]["temporary_events"];
    assert_eq!(listening["address"], Value::Null);
    assert_eq!(listening["bindings"]["amqp"]["queue"]["exclusive"], true);
}

#[tokio::test]
async fn the_methods_of_a_service_are_operations_with_replies() {
    let client = embedded().await;
    let prices = client
        .service("prices")
        .shared_exchange("services")
        .method("quote", async |Json(_): Json<Tick>| "1")
        .method("list", async || Ok::<_, BoxError>(Json(Vec::<Tick>::new())))
        .method("forget", async || ());
    let methods = Methods::new()
        .method::<Json<Tick>, &str>("quote")
        .method::<(), Json<Vec<Tick>>>("list")
        .method::<(), ()>("forget");
    let document = AsyncApi::new("prices", "1").serves(&prices, methods.clone()).unwrap();
    let document = valid(&document.schema::<Tick>(json!({})));
    let operation = |method: &str| &document["operations"][format!("receive-prices.{method}")];
    let request = json!([{ "$ref": "#/channels/prices/messages/prices.quote" }]);
    assert_eq!(operation("quote")["messages"], request);
    let replies =
        [("quote", Some("String_text_plain")), ("list", Some("Vec_Tick")), ("forget", None)];
    for (method, message) in replies {
        let reply = &operation(method)["reply"];
        assert_eq!(reply["address"]["location"], "$message.header#/replyTo");
        assert_eq!(reply["channel"]["$ref"], "#/channels/prices_replies");
        let path = message.map(|name| format!("#/channels/prices_replies/messages/{name}"));
        assert_eq!(reply["messages"][0]["$ref"].as_str(), path.as_deref(), "{method}");
    }
    // A consumer of a queue that is named like a method is an operation of its own.
    let like_it = client.consumer("prices.quote").handle(async || ());
    let both = valid(
        &AsyncApi::new("prices", "1").receives::<()>(&like_it).serves(&prices, methods).unwrap(),
    );
    assert_eq!(both["operations"].as_object().unwrap().len(), 4);
    let messages = &document["components"]["messages"];
    let quote = json!({
        "name": "quote",
        "title": "Tick",
        "contentType": "application/json",
        "payload": { "$ref": "#/components/schemas/Tick" },
    });
    assert_eq!(
        (&messages["prices.quote"], &messages["prices.list"]),
        (&quote, &json!({ "name": "list" }))
    );
    let bindings = document["channels"]["prices"]["x-leveret-bindings"].as_array().unwrap();
    assert!(bindings.contains(&json!({ "exchange": "services", "routingKey": "prices.quote" })));
}

#[tokio::test]
async fn the_fallback_of_a_service_is_in_the_document() {
    let client = embedded().await;
    let methods = || Methods::new().fallback::<String, String>();
    let service = client.service("prices").fallback(async |body: String| body);
    let alone = valid(&AsyncApi::new("prices", "1").serves(&service, methods()).unwrap());
    let service = service.method("quote", async |Json(_): Json<Tick>| ());
    let methods = methods().method::<Json<Tick>, ()>("quote");
    let beside = valid(&AsyncApi::new("prices", "1").serves(&service, methods).unwrap());
    for document in [&alone, &beside] {
        let other = &document["operations"]["receive-prices"];
        let text = "String_text_plain";
        let request = format!("#/channels/prices/messages/{text}");
        assert_eq!(other["messages"], json!([{ "$ref": request }]), "{document:#}");
        let reply = format!("#/channels/prices_replies/messages/{text}");
        assert_eq!(other["reply"]["messages"], json!([{ "$ref": reply }]));
    }
    let count = |document: &Value| document["operations"].as_object().map(|them| them.len());
    assert_eq!((count(&alone), count(&beside)), (Some(1), Some(2)));
}

#[tokio::test]
async fn methods_that_are_not_described_are_in_the_document() {
    let client = embedded().await;
    let handler = async |body: String| body;
    let service = client.service("prices").method("quote", handler).fallback(handler);
    let document = valid(&AsyncApi::new("prices", "1").serves(&service, Methods::new()).unwrap());
    let operations = &document["operations"];
    for (operation, message) in
        [("receive-prices.quote", "prices.quote"), ("receive-prices", "prices.message")]
    {
        let request = format!("#/channels/prices/messages/{message}");
        assert_eq!(operations[operation]["messages"], json!([{ "$ref": request }]));
        assert_eq!(operations[operation]["reply"]["messages"], Value::Null);
    }
    let messages = &document["components"]["messages"];
    assert_eq!(messages["prices.quote"], json!({ "name": "quote" }));
    assert_eq!(messages["prices.message"], json!({ "name": "prices" }));
}

#[tokio::test]
async fn a_description_that_does_not_fit_the_service_is_refused() {
    let client = embedded().await;
    let service = client.service("prices").method("quote", async |body: String| body);
    for (methods, reason) in [
        (Methods::new().method::<(), ()>("qoute"), "no method \"qoute\""),
        (Methods::new().method::<(), ()>("quote").method::<(), String>("quote"), "twice"),
        (Methods::new().fallback::<(), ()>(), "no fallback"),
    ] {
        let error = AsyncApi::new("prices", "1").serves(&service, methods).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[tokio::test]
async fn names_that_differ_in_forbidden_characters_have_different_identifiers() {
    let client = embedded().await;
    let (one, other) = (client.events("a"), client.events("a b"));
    let handler = async |_: Incoming| ();
    let queues = ["a b c", "a b", "~1/%{", "ä", "é", "#/$ref", "\"", "a::b", "x::b", "q{1}{ }{}"];
    let mut document = AsyncApi::new("\"\\\u{1}", "{}")
        .sends::<String>(&one, "b c")
        .sends::<String>(&other, "c")
        .sends::<String>(&one, "{id}.{no name}.{}.{a.b}")
        .serves(
            &client
                .service("a b")
                .method("m n", handler)
                .method("m/~n", handler)
                .method("m_n", handler),
            Methods::new(),
        )
        .unwrap();
    for queue in queues {
        document = document.receives::<()>(&client.consumer(queue).handle(handler));
    }
    let document = valid(&document);
    let channels = document["channels"].as_object().unwrap();
    // The service and the consumer of its queue share one, and its replies have another.
    assert_eq!(channels.len(), 3 + queues.len() + 1);
    let requests = channels["a_b"]["messages"].as_object().unwrap();
    assert_eq!(requests.keys().filter(|id| id.contains("m_n")).count(), 3, "{requests:?}");
    let exchange_of = |channel: &Value| channel["bindings"]["amqp"]["exchange"]["name"].clone();
    let sent = channels.values().filter(|channel| exchange_of(channel) == "a b");
    assert_eq!(sent.map(|channel| channel["address"].clone()).collect::<Vec<_>>(), ["c"]);
    let parameters = channels.values().filter_map(|channel| channel["parameters"].as_object());
    let mut names: Vec<&String> = parameters.flat_map(|parameters| parameters.keys()).collect();
    names.sort();
    assert_eq!(names, ["1", "id"]);
}

#[tokio::test]
async fn the_document_has_no_user_and_password() {
    let document = AsyncApi::new("a", "1").server("one", "amqp://me:secret@[::1]:5673").unwrap();
    let document = valid(&document);
    assert!(!document.to_string().contains("secret") && !document.to_string().contains("me:"));
    assert_eq!(document["servers"]["one"]["host"], "[::1]:5673");
    assert_eq!(document["servers"]["one"]["pathname"], "/%2F");
    assert!(AsyncApi::new("a", "1").server("one", "http://example.com").is_err());
}

#[test]
fn an_invalid_document_fails_the_validation() {
    let good = AsyncApi::new("a", "1").to_json();
    validated(&good).unwrap();
    for (path, wrong) in [("asyncapi", json!("2.0.0")), ("info", json!({})), ("servers", json!([]))]
    {
        let mut document = good.clone();
        document[path] = wrong;
        assert!(validated(&document).is_err(), "{path}");
    }
    let mut document = good;
    document["operations"]["x"] =
        json!({ "action": "send", "channel": { "$ref": "#/channels/nowhere" } });
    assert!(validated(&document).is_err());
}

#[tokio::test]
async fn exchanges_of_plugins_and_transient_messages_are_in_the_document() {
    let client = embedded().await;
    let hashed = ExchangeKind::Other("x-consistent-hash".to_owned());
    let events = client.events("e").exchange(Exchange::new("hashed", hashed));
    let publisher = client.publisher("").transient().build().await.unwrap();
    let document =
        AsyncApi::new("a", "1").sends::<String>(&events, "k").publishes::<String>(&publisher, "q");
    let document = valid(&document);
    let operations = document["operations"].as_object().unwrap();
    let sent = |exchange: &str| {
        let described = operations.values().map(|operation| {
            let channel = operation["channel"]["$ref"].as_str().unwrap().strip_prefix('#').unwrap();
            let channel = document.pointer(channel).unwrap();
            (operation["bindings"]["amqp"].clone(), channel["bindings"]["amqp"]["exchange"].clone())
        });
        described.into_iter().find(|(_, found)| found["name"] == exchange).unwrap()
    };
    let (sending, exchange) = sent("hashed");
    assert_eq!((&exchange["type"], sending["deliveryMode"].as_i64()), (&Value::Null, Some(2)));
    assert_eq!(exchange["x-leveret-type"], "x-consistent-hash");
    let (sending, exchange) = sent("");
    assert_eq!((&exchange["type"], sending["deliveryMode"].as_i64()), (&json!("default"), Some(1)));
}

#[tokio::test]
async fn the_references_of_a_schema_stay_valid() {
    let client = embedded().await;
    let events = client.events("e");
    let tick = json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "place": { "$ref": "#/definitions/Place" },
            "before": { "anyOf": [{ "$ref": "#" }, { "type": "null" }] },
            "other": { "$ref": "#/components/schemas/u8" },
        },
        "definitions": { "Place": { "type": "string" } },
    });
    let document = AsyncApi::new("a", "1")
        .sends::<Json<Tick>>(&events, "tick")
        .schema::<Tick>(tick)
        .schema::<u8>(json!(true))
        .schema::<u16>(json!(false));
    let document = valid(&document);
    let schemas = &document["components"]["schemas"];
    let properties = &schemas["Tick"]["properties"];
    assert_eq!(properties["place"]["$ref"], "#/components/schemas/Tick/definitions/Place");
    assert_eq!(properties["before"]["anyOf"][0]["$ref"], "#/components/schemas/Tick");
    assert_eq!((&schemas["u8"], &schemas["u16"]), (&json!({}), &json!({ "not": {} })));
}
