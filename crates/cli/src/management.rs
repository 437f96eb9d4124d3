//! RabbitMQ's management API, for what AMQP does not tell: bindings, and how many messages are out at consumers.

use std::fmt;
use std::time::Duration;

use clap::Args;
use leveret::amqp::{Auth, Options};
use reqwest::{Method, StatusCode, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::failure::{Failure, last_cause};
use crate::http::{client_for, excerpt, is_web};
use crate::text::escape;

/// Where its plugin listens unless told otherwise, and where with encryption.
const USUAL_PORTS: [u16; 2] = [15672, 15671];

/// Where the management API is.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Broker")]
pub(crate) struct ManagementOptions {
    /// The broker's management API, if it is not at port 15672 of the broker's host, or with amqps:// at 15671:
    /// http://user:password@host:port, or https://. Without a user, that of the broker's URL.
    #[arg(
        long = "management",
        env = "LEVERET_MANAGEMENT_URL",
        hide_env_values = true,
        value_name = "URL"
    )]
    url: Option<String>,
}

/// The management API of a virtual host.
#[derive(Debug)]
pub(crate) struct Management {
    base: Url,
    user: Option<(String, String)>,
    vhost: String,
    client: reqwest::Client,
}

/// A queue, as far as it is asked for.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct QueueFacts {
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
    pub(crate) durable: bool,
    pub(crate) exclusive: bool,
    pub(crate) auto_delete: bool,
    pub(crate) arguments: Map<String, Value>,
    /// A list instead of an object if it is empty, in some versions.
    effective_policy_definition: Value,
    /// All of them: ready, and out at consumers. None if no count has come yet.
    pub(crate) messages: Option<u64>,
    pub(crate) messages_unacknowledged: Option<u64>,
    /// Waiting to be dead-lettered, beside the others.
    messages_dlx: Option<u64>,
    /// Put back, to be delivered later.
    messages_delayed: Option<u64>,
    /// How much its process has computed. It grows from one count to the next.
    pub(crate) reductions: Option<u64>,
    pub(crate) consumer_details: Vec<ConsumerFacts>,
    pub(crate) exclusive_consumer_tag: Option<String>,
    message_stats: Option<MessageStats>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ConsumerFacts {
    consumer_tag: String,
    channel_details: ChannelFacts,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct ChannelFacts {
    connection_name: Option<String>,
    user: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct MessageStats {
    publish: u64,
}

/// What the API says of itself.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Overview {
    cluster_name: Option<String>,
    rates_mode: Option<String>,
    disable_stats: bool,
}

/// A binding.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Bound {
    pub(crate) source: String,
    pub(crate) destination: String,
    pub(crate) destination_type: String,
    pub(crate) routing_key: String,
    #[serde(default)]
    arguments: Value,
    /// What the API calls it.
    #[serde(default)]
    properties_key: String,
}

/// Where a binding leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To<'a> {
    Queue(&'a str),
    Exchange(&'a str),
}

impl QueueFacts {
    /// A setting, by an argument or by a policy: `dead-letter-exchange`.
    pub(crate) fn setting(&self, name: &str) -> Option<&Value> {
        self.arguments.get(&format!("x-{name}")).or_else(|| self.policy(name))
    }

    /// Whether it is known what policies say, if there are any.
    pub(crate) fn has_policies(&self) -> bool {
        !self.effective_policy_definition.is_null()
    }

    /// What a policy says.
    pub(crate) fn policy(&self, name: &str) -> Option<&Value> {
        self.effective_policy_definition.get(name)
    }

    /// How it was declared.
    pub(crate) fn declaration(&self) -> Value {
        let QueueFacts { kind, durable, arguments, .. } = self;
        json!({ "type": kind, "durable": durable, "arguments": arguments })
    }

    /// What is in it and not ready, if that is known: out at consumers, on the way to where dead letters go, or put back for later.
    pub(crate) fn out(&self) -> Option<u64> {
        let beside = self.messages_dlx.unwrap_or(0) + self.messages_delayed.unwrap_or(0);
        self.messages_unacknowledged.map(|messages| messages + beside)
    }

    /// How many messages were published into it, as far as is known by now.
    pub(crate) fn published(&self) -> u64 {
        self.message_stats.as_ref().map_or(0, |stats| stats.publish)
    }

    /// Who consumes from it.
    pub(crate) fn consumers(&self) -> Vec<String> {
        let told = |consumer: &ConsumerFacts| {
            let ConsumerFacts { consumer_tag, channel_details } = consumer;
            let of = channel_details.connection_name.as_deref().unwrap_or("a connection");
            let user = channel_details.user.as_deref().unwrap_or("?");
            escape(&format!("{consumer_tag} of {of} (user {user})"))
        };
        self.consumer_details.iter().map(told).collect()
    }
}

impl Bound {
    /// Whether it lets the same messages through. What the API calls it is made of the key and a sum of the arguments, in which
    /// their types are.
    pub(crate) fn is_like(&self, other: &Bound) -> bool {
        self.source == other.source
            && self.routing_key == other.routing_key
            && self.properties_key == other.properties_key
    }

    /// Its arguments, if it has any. Some versions write none as an empty list.
    pub(crate) fn arguments(&self) -> Option<&Map<String, Value>> {
        self.arguments.as_object().filter(|arguments| !arguments.is_empty())
    }

    fn path(&self) -> [&str; 2] {
        match self.destination_type.as_str() {
            "exchange" => To::Exchange(&self.destination).path(),
            _ => To::Queue(&self.destination).path(),
        }
    }
}

impl<'a> To<'a> {
    fn path(self) -> [&'a str; 2] {
        match self {
            To::Queue(name) => ["q", name],
            To::Exchange(name) => ["e", name],
        }
    }
}

impl ManagementOptions {
    /// Whether it was said where it is: user and password go there.
    pub(crate) fn is_given(&self) -> bool {
        self.url.as_ref().is_some_and(|url| !url.is_empty())
    }

    /// The API of the broker that these options lead to.
    pub(crate) async fn of(
        &self,
        options: &Options,
        timeout: Duration,
    ) -> Result<Management, Failure> {
        let given = self.url.clone().filter(|url| !url.is_empty());
        let usual = || {
            // Who encrypts what goes to the broker does not expect the same password to go there for all to read.
            let [open, encrypted] = USUAL_PORTS;
            let (scheme, port) = match options.tls {
                None => ("http", open),
                Some(_) => ("https", encrypted),
            };
            match options.host.contains(':') {
                true => format!("{scheme}://[{}]:{port}", options.host),
                false => format!("{scheme}://{}:{port}", options.host),
            }
        };
        let mut base = Url::parse(&given.unwrap_or_else(usual))
            .map_err(|error| Failure::wrong(format_args!("--management: {error}")))?;
        if !is_web(&base) {
            return Err(Failure::wrong("--management has to begin with http:// or https://"));
        }
        let user = match (base.username(), &options.auth) {
            ("", Auth::Plain { user, password } | Auth::AmqPlain { user, password }) => {
                Some((user.clone(), password.expose().to_owned()))
            }
            _ => None,
        };
        // Proxies of the environment are for the world, and the broker is at home. A connection that is kept may be closed just
        // when it is used again.
        let client = client_for(&base, &options.tls.clone().unwrap_or_default()).await?;
        let client = client.no_proxy().pool_max_idle_per_host(0).timeout(timeout).build();
        let client = client.map_err(Failure::new)?;
        if let Ok(mut path) = base.path_segments_mut() {
            path.pop_if_empty().push("api");
        }
        Ok(Management { base, user, vhost: options.virtual_host.clone(), client })
    }
}

impl Overview {
    /// Whether it is the API of the broker with this cluster, and tells how many messages queues have, and if need be, how many
    /// were published to them.
    pub(crate) fn check(&self, cluster: Option<&str>, needs_rates: bool) -> Result<(), Failure> {
        if let (Some(here), Some(there)) = (cluster, &self.cluster_name)
            && here != there
        {
            return Err(Failure::wrong(format_args!(
                "--management leads to another broker: it is that of {there:?}, and the URL leads to {here:?}"
            )));
        }
        if self.disable_stats {
            return Err(Failure::new(
                "the management API tells no counts, so it cannot be known when a queue is empty: the broker has \
                 management_agent.disable_metrics_collector",
            ));
        }
        if needs_rates && self.rates_mode.as_deref() == Some("none") {
            return Err(Failure::new(
                "the management API does not tell how many messages are published, since the broker has management.rates_mode = none: \
                 whether somebody sends to the queue by its name cannot be known. If nobody does, say --direct",
            ));
        }
        Ok(())
    }
}

impl Management {
    /// What the API is of.
    pub(crate) async fn overview(&self) -> Result<Overview, Failure> {
        let found = self.get(&["overview"]).await?;
        found.ok_or_else(|| self.silent(format_args!("{} is not found there", self.base.path())))
    }

    /// A queue, if it is there.
    pub(crate) async fn queue(&self, name: &str) -> Result<Option<QueueFacts>, Failure> {
        self.get(&["queues", &self.vhost, name]).await
    }

    /// All queues, and what they are called.
    pub(crate) async fn queues(&self) -> Result<Vec<(String, QueueFacts)>, Failure> {
        let all: Vec<Value> = self.get(&["queues", &self.vhost]).await?.unwrap_or_default();
        let read = |queue: Value| {
            let name = queue["name"].as_str().unwrap_or_default().to_owned();
            serde_json::from_value(queue).map(|facts| (name, facts)).map_err(Failure::new)
        };
        all.into_iter().map(read).collect()
    }

    pub(crate) async fn has_exchange(&self, name: &str) -> Result<bool, Failure> {
        Ok(self.exchange_arguments(name).await?.is_some())
    }

    /// The arguments of an exchange, if it is there. Some versions write none as an empty list.
    pub(crate) async fn exchange_arguments(&self, name: &str) -> Result<Option<Value>, Failure> {
        let found: Option<Value> = self.get(&["exchanges", &self.vhost, name]).await?;
        Ok(found.map(|mut exchange| exchange["arguments"].take()))
    }

    /// What leads somewhere, without the binding that every queue has to the default exchange.
    pub(crate) async fn bindings_to(&self, to: To<'_>) -> Result<Vec<Bound>, Failure> {
        let vhost = self.vhost.as_str();
        let bindings: Option<Vec<Bound>> = match to {
            To::Queue(name) => self.get(&["queues", vhost, name, "bindings"]).await?,
            To::Exchange(name) => {
                self.get(&["exchanges", vhost, name, "bindings", "destination"]).await?
            }
        };
        let bindings = bindings.unwrap_or_default();
        Ok(bindings.into_iter().filter(|bound| !bound.source.is_empty()).collect())
    }

    /// Makes a binding without arguments.
    pub(crate) async fn bind(&self, source: &str, key: &str, to: To<'_>) -> Result<(), Failure> {
        let [kind, destination] = to.path();
        let path = ["bindings", &self.vhost, "e", source, kind, destination];
        let body = json!({ "routing_key": key, "arguments": {} });
        self.send(Method::POST, &path, Some(body)).await.map(drop)
    }

    /// Has all of a fanout exchange go somewhere.
    pub(crate) async fn lead(&self, source: &str, to: To<'_>) -> Result<(), Failure> {
        self.bind(source, "", to).await
    }

    pub(crate) async fn unbind(&self, bound: &Bound) -> Result<(), Failure> {
        let [kind, destination] = bound.path();
        let vhost = self.vhost.as_str();
        let path =
            ["bindings", vhost, "e", &bound.source, kind, destination, &bound.properties_key];
        self.send(Method::DELETE, &path, None).await.map(drop)
    }

    /// A durable fanout exchange.
    pub(crate) async fn declare_fanout(&self, name: &str, arguments: Value) -> Result<(), Failure> {
        let body = json!({
            "type": "fanout", "durable": true, "auto_delete": false, "internal": false, "arguments": arguments,
        });
        self.send(Method::PUT, &["exchanges", &self.vhost, name], Some(body)).await.map(drop)
    }

    pub(crate) async fn delete_exchange(&self, name: &str) -> Result<(), Failure> {
        let path = ["exchanges", &self.vhost, name];
        self.send(Method::DELETE, &path, None).await.map(drop)
    }

    async fn get<T: DeserializeOwned>(&self, path: &[&str]) -> Result<Option<T>, Failure> {
        let Some(text) = self.send(Method::GET, path, None).await? else { return Ok(None) };
        let read = serde_json::from_str(&text);
        read.map(Some).map_err(|error| {
            Failure::new(format_args!("{} answered what cannot be read: {error}", self.at()))
        })
    }

    /// The text of the answer; none if there is no such thing.
    async fn send(
        &self,
        method: Method,
        path: &[&str],
        body: Option<Value>,
    ) -> Result<Option<String>, Failure> {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            for name in path {
                check_name(name)?;
                segments.push(name);
            }
        }
        let mut request = self.client.request(method.clone(), url);
        if let Some((user, password)) = &self.user {
            request = request.basic_auth(user, Some(password));
        }
        if let Some(body) = &body {
            request = request.json(body);
        }
        let silent = |error: reqwest::Error| self.silent(last_cause(&error));
        let answer = request.send().await.map_err(silent)?;
        let status = answer.status();
        let text = answer.text().await.map_err(silent)?;
        let what = format!("{method} {}", path.join(" "));
        match status {
            status if status.is_success() => Ok(Some(text)),
            StatusCode::NOT_FOUND if method == Method::GET || method == Method::DELETE => Ok(None),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(Failure::not_allowed(format_args!(
                    "the management API at {} does not allow {what}: {}. The user needs the tag `management`, and permissions \
                     for the queue and for what begins with its name",
                    self.at(),
                    reason(&text)
                )))
            }
            status => Err(Failure::new(format_args!(
                "the management API at {} answered {status} to {what}: {}",
                self.at(),
                reason(&text)
            ))),
        }
    }

    fn silent(&self, why: impl fmt::Display) -> Failure {
        Failure::no_broker(format_args!(
            "no management API answers at {}: {why}. It is RabbitMQ's plugin rabbitmq_management; --management says where it is",
            self.at()
        ))
    }

    /// Where it is, without the password.
    fn at(&self) -> String {
        let port = self.base.port_or_known_default().unwrap_or_default();
        let host = self.base.host_str().unwrap_or_default();
        format!("{}://{host}:{port}", self.base.scheme())
    }
}

/// Names that a path cannot have, and that would be another name there.
fn check_name(name: &str) -> Result<(), Failure> {
    match matches!(name, "." | "..") || name.contains(['\t', '\n', '\r']) {
        false => Ok(()),
        true => {
            Err(Failure::wrong(format_args!("the management API cannot be asked for {name:?}")))
        }
    }
}

/// `{"error":"not_authorised","reason":"Login failed"}` is: Login failed.
fn reason(text: &str) -> String {
    let read: Option<Value> = serde_json::from_str(text).ok();
    let reason = read.as_ref().and_then(|answer| answer["reason"].as_str());
    excerpt(reason.unwrap_or(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(key: &str, name: &str, arguments: Value) -> Bound {
        serde_json::from_value(json!({
            "source": "orders", "destination": "billing", "destination_type": "queue", "routing_key": key,
            "arguments": arguments, "properties_key": name,
        }))
        .unwrap()
    }

    #[test]
    fn bindings_are_alike_that_let_the_same_through() {
        let one = bound("a", "a", json!({}));
        assert!(one.is_like(&bound("a", "a", json!([]))) && one.arguments().is_none());
        assert!(!one.is_like(&bound("b", "b", json!({}))));
        // A number of another width is told as the same.
        let narrow = bound("a", "a~1", json!({ "number": 5 }));
        assert!(!narrow.is_like(&bound("a", "a~2", json!({ "number": 5 }))));
        assert_eq!(narrow.arguments().map(Map::len), Some(1));
    }

    #[test]
    fn an_api_of_another_broker_or_without_counts_is_refused() {
        let check = |told: Value, needs_rates| {
            let overview: Overview = serde_json::from_value(told).unwrap();
            overview.check(Some("rabbit@here"), needs_rates).is_ok()
        };
        assert!(check(json!({ "cluster_name": "rabbit@here", "rates_mode": "basic" }), true));
        assert!(check(json!({}), true));
        assert!(!check(json!({ "cluster_name": "rabbit@there" }), true));
        assert!(!check(json!({ "disable_stats": true }), false));
        assert!(!check(json!({ "rates_mode": "none" }), true));
        assert!(check(json!({ "rates_mode": "none" }), false));
    }

    #[test]
    fn a_name_that_would_be_another_in_a_path_is_refused() {
        assert!([".", "..", "a\nb", "a\tb"].iter().all(|name| check_name(name).is_err()));
        assert!(["a.b", "...", "a/b", "a%2Fb", "ü"].iter().all(|name| check_name(name).is_ok()));
    }

    #[test]
    fn what_waits_to_be_dead_lettered_is_in_the_queue() {
        let read = |text| serde_json::from_str::<QueueFacts>(text).unwrap();
        let counts = r#"{"messages_unacknowledged": 1, "messages_dlx": 2, "effective_policy_definition": []}"#;
        assert_eq!(read(counts).out(), Some(3));
        assert_eq!(read("{}").out(), None);
        assert!(read(counts).has_policies() && !read("{}").has_policies());
    }

    #[test]
    fn a_setting_is_an_argument_or_a_policys() {
        let facts: QueueFacts = serde_json::from_value(json!({
            "arguments": { "x-message-ttl": 5 },
            "effective_policy_definition": { "message-ttl": 6, "dead-letter-exchange": "failed" },
        }))
        .unwrap();
        assert_eq!(facts.setting("message-ttl"), Some(&json!(5)));
        assert_eq!(facts.setting("dead-letter-exchange"), Some(&json!("failed")));
        assert_eq!(facts.setting("max-length"), None);
    }

    #[tokio::test]
    async fn it_is_beside_the_broker_unless_told_otherwise() {
        let at = async |broker: &str, url: Option<&str>| {
            let options: Options = broker.parse().unwrap();
            let of = ManagementOptions { url: url.map(str::to_owned) };
            let api = of.of(&options, Duration::from_secs(1)).await;
            api.map(|api| (api.base.to_string(), api.user))
        };
        let shop = Some(("shop".to_owned(), "secret".to_owned()));
        assert_eq!(
            at("amqp://shop:secret@rabbit", None).await.unwrap(),
            ("http://rabbit:15672/api".to_owned(), shop.clone())
        );
        let here = at("amqp://shop:secret@[::1]", None).await.unwrap().0;
        assert_eq!(here, "http://[::1]:15672/api");
        assert_eq!(
            at("amqp://shop:secret@rabbit", Some("http://other:1/behind/")).await.unwrap(),
            ("http://other:1/behind/api".to_owned(), shop)
        );
        assert_eq!(at("amqp://rabbit", Some("http://a:b@other")).await.unwrap().1, None);
        // A password that goes to the broker encrypted does not go to its API otherwise, unless that is asked for.
        let encrypted = "amqps://rabbit?verify=verify_none";
        assert_eq!(at(encrypted, None).await.unwrap().0, "https://rabbit:15671/api");
        let open = at(encrypted, Some("http://localhost:15672")).await.unwrap().0;
        assert_eq!(open, "http://localhost:15672/api");
        let refused = at("amqp://rabbit", Some("ftp://other")).await.unwrap_err().to_string();
        assert!(refused.contains("http:// or https://"), "{refused}");
    }
}
