//! The exchanges and queues of ACAPI.

use leveret::{
    Client, ConsumerBuilder, Error, Events, Exchange, ExchangeKind, Method, Queue, Replies,
    RpcBuilder, ServiceBuilder, Topology,
};

use super::Acapi;

/// Events by the conventions of ACAPI: all of them are published to one fanout, which feeds exchanges of other kinds, and
/// applications bind their queues to the one that suits them.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::BoxError> {
/// use leveret::Client;
/// use leveret_profiles::AcapiSite;
///
/// let client = Client::embedded().await?;
/// let site = AcapiSite::new("dc0", "preprod");
/// let events = site.events(&client);
///
/// // The queue `dc0.preprod.q.ledger.policies`.
/// let policies = site.subscribe(&events, "ledger", "policies", ["info.events.policy.#"])?;
/// policies.declare().await?;
/// events.publish("info.events.policy.created", "{}").await?;
///
/// let mut deliveries = policies.stream().await?;
/// assert_eq!(deliveries.next().await.expect("an event")?.body(), "{}");
/// # Ok(())
/// # }
/// ```
///
/// For a site `dc0` and an environment `preprod` there are
///
/// - `dc0.preprod.e.fanout.events`: where events are published to; for those who want all of them,
/// - `dc0.preprod.e.topic.events`, bound to it: for patterns of keys,
/// - `dc0.preprod.e.direct.events`, bound to it: for whole keys,
/// - `dc0.preprod.e.header.events`, bound to it: for headers,
/// - the same four for `requests`,
/// - `dc0.preprod.q.APP.NAME`: the queues of applications, with the objects of [`Acapi`], by which failed messages are
///   tried again.
///
/// A queue that is bound in several of these ways gets an event once.
///
/// # Requests
///
/// Requests go the same way through exchanges of their own, and one application should reply to a kind of them. The
/// reply goes to a queue that is made for that one reply, and named in `reply-to`:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::BoxError> {
/// use leveret::Client;
/// use leveret_profiles::AcapiSite;
///
/// let client = Client::embedded().await?;
/// let site = AcapiSite::new("dc0", "preprod");
/// let method = async |id: String| format!("the policy {id}");
/// let service = site.serve(&client, "ledger", "policy-requests", ["resource.policy"], method).await?;
/// service.declare().await?;
/// tokio::spawn(service.run());
///
/// let requests = site.requests(&client).build().await?;
/// let policy: String = requests.call("resource.policy", "17").await?;
/// assert_eq!(policy, "the policy 17");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct AcapiSite {
    /// Site and environment.
    prefix: String,
    retry: Acapi,
    /// Names of exchanges that differ from the usual ones.
    named: Vec<(ExchangeKind, AcapiTraffic, String)>,
}

/// The two things that ACAPI's exchanges carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AcapiTraffic {
    /// What has happened, for everybody who wants to know.
    Events,
    /// What should be done, by one who replies.
    Requests,
}

impl AcapiTraffic {
    fn as_str(self) -> &'static str {
        match self {
            AcapiTraffic::Events => "events",
            AcapiTraffic::Requests => "requests",
        }
    }
}

/// The kinds of exchanges that the fanouts feed.
const FED: [ExchangeKind; 3] = [ExchangeKind::Topic, ExchangeKind::Headers, ExchangeKind::Direct];

/// The key of the bindings to the fanouts, which do not look at it.
const EVERYTHING: &str = "#";

impl AcapiSite {
    /// A site (`dc0`) and an environment (`preprod`).
    pub fn new(site: impl AsRef<str>, environment: impl AsRef<str>) -> Self {
        let prefix = format!("{}.{}", site.as_ref(), environment.as_ref());
        AcapiSite { prefix, retry: Acapi::new(), named: Vec::new() }
    }

    /// How failed messages are tried again. Five times, a minute apart, by default.
    pub fn retry(mut self, retry: Acapi) -> Self {
        self.retry = retry;
        self
    }

    /// The name of an exchange where it is another than [`exchange_name`](Self::exchange_name) makes.
    pub fn exchange(
        mut self,
        kind: ExchangeKind,
        traffic: AcapiTraffic,
        name: impl Into<String>,
    ) -> Self {
        self.named.insert(0, (kind, traffic, name.into()));
        self
    }

    /// The name of an exchange.
    pub fn exchange_name(&self, kind: &ExchangeKind, traffic: AcapiTraffic) -> String {
        let is_it =
            |named: &&(ExchangeKind, AcapiTraffic, String)| (&named.0, named.1) == (kind, traffic);
        if let Some((.., name)) = self.named.iter().find(is_it) {
            return name.clone();
        }
        let kind = match kind {
            ExchangeKind::Headers => "header",
            kind => kind.as_str(),
        };
        format!("{}.e.{kind}.{}", self.prefix, traffic.as_str())
    }

    /// The name of an application's queue.
    pub fn queue_name(&self, application: &str, name: &str) -> String {
        format!("{}.q.{application}.{name}", self.prefix)
    }

    /// All exchanges, of events and of requests.
    pub fn topology(&self) -> Topology {
        self.exchanges(AcapiTraffic::Events).and(self.exchanges(AcapiTraffic::Requests))
    }

    fn exchanges(&self, traffic: AcapiTraffic) -> Topology {
        let fanout = self.exchange_name(&ExchangeKind::Fanout, traffic);
        let fed = |kind: ExchangeKind| {
            let name = self.exchange_name(&kind, traffic);
            Exchange::new(name, kind).bind(&fanout, EVERYTHING)
        };
        let ingress = Topology::new().exchange(Exchange::fanout(&fanout));
        FED.into_iter().map(fed).fold(ingress, Topology::exchange)
    }

    /// Its events, for subscribers with patterns of keys.
    pub fn events(&self, client: &Client) -> Events {
        self.events_at(client, ExchangeKind::Topic)
    }

    /// Its events, for subscribers with whole keys.
    pub fn direct_events(&self, client: &Client) -> Events {
        self.events_at(client, ExchangeKind::Direct)
    }

    /// Its events, for subscribers that want all of them.
    pub fn all_events(&self, client: &Client) -> Events {
        self.events_at(client, ExchangeKind::Fanout)
    }

    fn events_at(&self, client: &Client, kind: ExchangeKind) -> Events {
        self.traffic_at(client, kind, AcapiTraffic::Events)
    }

    fn traffic_at(&self, client: &Client, kind: ExchangeKind, traffic: AcapiTraffic) -> Events {
        let ingress = self.exchange_name(&ExchangeKind::Fanout, traffic);
        let heard = Exchange::new(self.exchange_name(&kind, traffic), kind);
        let events = client.events(heard.name()).exchange(heard);
        events.through(ingress, self.exchanges(traffic))
    }

    /// Its requests, to be made: the method of a call is the routing key. Each call has a queue of its own, and what comes there
    /// is its reply, with a correlation id or without. A call may wait for ever unless it has a
    /// [timeout](RpcBuilder::timeout). The exchanges have to exist, see [`topology`](Self::topology).
    pub fn requests(&self, client: &Client) -> RpcBuilder {
        let fanout = self.exchange_name(&ExchangeKind::Fanout, AcapiTraffic::Requests);
        client.rpc(&fanout).exchange(&fanout).replies(Replies::QueuePerCall)
    }

    /// A service that replies to requests whose key fits the patterns. It declares the exchanges of requests.
    pub async fn serve<A: 'static>(
        &self,
        client: &Client,
        application: &str,
        name: &str,
        patterns: impl IntoIterator<Item = impl Into<String>>,
        method: impl Method<A>,
    ) -> Result<ServiceBuilder, Error> {
        let requests = self.traffic_at(client, ExchangeKind::Topic, AcapiTraffic::Requests);
        requests.respond(self.queue_name(application, name), patterns, method).await
    }

    /// A consumer of an application's queue, which gets what fits the patterns. It is a quorum queue. Fails if messages of the queue
    /// cannot be tried again.
    pub fn subscribe(
        &self,
        events: &Events,
        application: &str,
        name: &str,
        patterns: impl IntoIterator<Item = impl Into<String>>,
    ) -> Result<ConsumerBuilder, Error> {
        let queue = Queue::quorum(self.queue_name(application, name));
        self.subscribe_queue(events, queue, patterns)
    }

    /// The same with a queue of your own making, to be named by [`queue_name`](Self::queue_name): existing ones may be
    /// classic.
    pub fn subscribe_queue(
        &self,
        events: &Events,
        queue: Queue,
        patterns: impl IntoIterator<Item = impl Into<String>>,
    ) -> Result<ConsumerBuilder, Error> {
        let patterns: Vec<String> = patterns.into_iter().map(Into::into).collect();
        let exchange = events.exchange_name();
        let bound =
            patterns.iter().fold(queue.clone(), |queue, pattern| queue.bind(exchange, pattern));
        let with_retry = self.retry.topology(bound)?;
        let consumer = events.subscribe_queue(queue, patterns);
        Ok(consumer.declaring(with_retry).retry(self.retry.clone()))
    }
}
