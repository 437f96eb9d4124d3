//! Events: said once, heard by everybody who wants to.
//!
//! ```text
//!  Events::publish --> exchange --pattern--> queue "billing" --> subscribers of it share its messages
//!                         |     --pattern--> queue "audit"   --> subscribers of it share theirs
//!                         +-----pattern--> temporary queue   --> whoever listens just now
//! ```

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::OnceCell;

use crate::amqp::{ShortStr, Table};
use crate::connection::Client;
use crate::consumer::ConsumerBuilder;
use crate::error::{Error, ErrorKind};
use crate::message::{IntoMessage, Message};
use crate::publisher::Publisher;
use crate::random;
use crate::rpc::{RpcChannel, new_correlation_id};
use crate::topology::cycle::UNLIMITED;
use crate::topology::{Binding, Exchange, ExchangeKind, Queue, Topology};

mod emit;
mod gather;
mod key;

pub use emit::Emit;
pub use gather::{Gather, GatherStream, Gathered};

/// How long the queue of one who listens outlives that nobody consumes it: it was declared, and not used, or the program
/// was paused. Without this, it would take in messages for as long as the connection stays.
const UNUSED: Duration = Duration::from_secs(300);

/// Events that are broadcast through an exchange: whoever publishes does not know who listens.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::BoxError> {
/// use leveret::prelude::*;
/// use serde::{Deserialize, Serialize};
/// use tokio::sync::mpsc;
///
/// #[derive(Serialize, Deserialize)]
/// struct Tick {
///     price: f64,
/// }
///
/// async fn on_tick(Json(tick): Json<Tick>, State(prices): State<mpsc::Sender<f64>>) -> Result<(), BoxError> {
///     Ok(prices.send(tick.price).await?)
/// }
///
/// let client = Client::embedded().await?; // or Client::connect("amqp://localhost")
/// let stock = client.events("stock");
///
/// // The queue `prices-app` keeps what fits its patterns from now on, also while nobody consumes it.
/// let (sender, mut prices) = mpsc::channel::<f64>(10);
/// let subscription = stock.subscribe("prices-app", ["STOCK.IBM.#"]).workers(4).state(sender);
/// subscription.declare().await?;
///
/// stock.publish("STOCK.IBM.NYSE", Json(&Tick { price: 171.5 })).await?;
/// stock.publish("STOCK.KO.NYSE", Json(&Tick { price: 62.0 })).await?; // nobody listens, which is no error
///
/// let summary = subscription.handle(on_tick).run_until(prices.recv()).await?;
/// assert_eq!(summary.handled, 1);
/// # Ok(())
/// # }
/// ```
///
/// The exchange is a durable topic, unless another one is [chosen](Self::exchange), and is declared when it is needed.
/// Keys are words with dots between them, the general before the special: `STOCK.IBM.NYSE`. In a pattern, `*` is one word
/// and `#` any number of them.
///
/// # Handlers of events do not reply
///
/// They have nothing to reply with: whoever publishes an event does not wait. They may emit further events, see [`Emit`].
/// For an answer there are [calls](Client::rpc), and [`gather`](Self::gather), which asks whoever is there.
///
/// # Groups
///
/// Any number of messages belong together by their correlation id: those that are published by a [`group`](Self::group) get
/// its id, and what a handler emits has the id of the event that it handles.
#[derive(Clone, Debug)]
pub struct Events {
    shared: Arc<Shared>,
    /// The correlation id of what is published.
    group: Option<ShortStr<'static>>,
}

#[derive(Debug)]
struct Shared {
    client: Client,
    /// Where events are published to.
    ingress: String,
    /// Where subscribers are bound to; mostly the same.
    exchange: Exchange,
    /// All exchanges that there have to be, and how they are bound to each other.
    topology: Topology,
    /// Made when the first event is published.
    publisher: OnceCell<Publisher>,
    /// Made when the first question is asked.
    rpc: OnceLock<RpcChannel>,
}

impl Client {
    /// Events that are broadcast through a topic exchange of this name, which is declared when it is needed.
    pub fn events(&self, exchange: impl Into<String>) -> Events {
        Events::new(self.clone(), Exchange::topic(exchange))
    }
}

impl Events {
    pub(crate) fn new(client: Client, exchange: Exchange) -> Self {
        let topology = Topology::new().exchange(exchange.clone());
        let shared = Shared {
            client,
            ingress: exchange.name().to_owned(),
            exchange,
            topology,
            publisher: OnceCell::new(),
            rpc: OnceLock::new(),
        };
        Events { shared: Arc::new(shared), group: None }
    }

    /// By a direct exchange: subscribers name whole keys, no patterns. It can be faster where that is enough.
    #[must_use]
    pub fn direct(self) -> Self {
        let exchange = Exchange::direct(self.exchange_name());
        self.exchange(exchange)
    }

    /// By an exchange of your own making: one that has an alternate, is gone with the broker, or of another kind.
    #[must_use]
    pub fn exchange(self, exchange: Exchange) -> Self {
        Events { group: self.group, ..Events::new(self.shared.client.clone(), exchange) }
    }

    /// Published to this exchange, from which the topology leads them to the one where they are heard. It is declared with that
    /// one.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leveret::Error> {
    /// use leveret::{Client, Exchange, Topology};
    ///
    /// let client = Client::embedded().await?;
    /// let topology = Topology::new()
    ///     .exchange(Exchange::fanout("all-news"))
    ///     .exchange(Exchange::topic("news").bind("all-news", ""));
    /// let news = client.events("news").through("all-news", topology);
    /// let sport = news.subscribe("sport", ["sport.#"]);
    /// sport.declare().await?;
    /// news.publish("sport.tennis", "6:4").await?;
    /// assert_eq!(client.inspect_queue("sport").await?.messages, 1);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn through(self, ingress: impl Into<String>, topology: Topology) -> Self {
        let Shared { client, exchange, topology: own, .. } = &*self.shared;
        let shared = Shared {
            client: client.clone(),
            ingress: ingress.into(),
            exchange: exchange.clone(),
            topology: own.clone().and(topology),
            publisher: OnceCell::new(),
            rpc: OnceLock::new(),
        };
        Events { shared: Arc::new(shared), group: self.group }
    }

    /// The exchange at which events are heard, by its name.
    pub fn exchange_name(&self) -> &str {
        self.shared.exchange.name()
    }

    /// The exchange that events are published to, which may pass them on to the one at which they are heard.
    pub fn ingress(&self) -> &Exchange {
        let Shared { ingress, exchange, topology, .. } = &*self.shared;
        topology.exchanges().iter().find(|known| known.name() == ingress).unwrap_or(exchange)
    }

    fn kind(&self) -> &ExchangeKind {
        self.shared.exchange.kind()
    }

    /// Declares the exchange. Publishing and subscribing do so by themselves.
    pub async fn declare(&self) -> Result<(), Error> {
        self.shared.client.apply(&self.shared.topology).await.map(drop)
    }

    /// Publishes an event, and waits until the broker has it: it is then in the queue of every subscriber whose patterns
    /// fit. That there is none is no error.
    ///
    /// A key that is a pattern is refused, since nobody could subscribe to it.
    pub async fn publish(&self, key: &str, event: impl IntoMessage) -> Result<(), Error> {
        key::check_key(self.kind(), key)?;
        let event = self.grouped(event.into_message()?);
        self.publisher().await?.publish(key, event).await
    }

    fn grouped(&self, event: Message) -> Message {
        match &self.group {
            Some(id) => event.in_group(id),
            None => event,
        }
    }

    /// The publisher behind this, for many events at once: [`send`](Publisher::send), batches, delays. It does not look at
    /// keys, and knows of no groups.
    pub async fn publisher(&self) -> Result<Publisher, Error> {
        let Shared { client, ingress, publisher, .. } = &*self.shared;
        let make = || async {
            self.declare().await?;
            client.publisher(ingress).allow_unroutable().build().await
        };
        publisher.get_or_try_init(make).await.cloned()
    }

    /// The same events, for messages that belong together: what is published by this has the id as its correlation id,
    /// unless it has one of its own. Fails if the id has more than 255 bytes.
    pub fn group(&self, id: impl Into<String>) -> Result<Self, Error> {
        let id = ShortStr::try_from(id.into());
        let id =
            id.map_err(|error| Error::caused(ErrorKind::Invalid, "a correlation id", error))?;
        Ok(self.in_group(Some(id)))
    }

    /// The same, with an id that nobody has had before, a UUID.
    #[must_use]
    pub fn new_group(&self) -> Self {
        self.in_group(Some(new_correlation_id()))
    }

    /// The correlation id that published messages get, if this is a group.
    pub fn correlation_id(&self) -> Option<&ShortStr<'static>> {
        self.group.as_ref()
    }

    fn in_group(&self, group: Option<ShortStr<'static>>) -> Self {
        Events { shared: Arc::clone(&self.shared), group }
    }

    /// A consumer of a queue that gets what fits the patterns. The queue is durable and replicated; it keeps events while
    /// nobody consumes it. Consumers of one queue share its events, queues get each event each.
    ///
    /// Exchange, queue and bindings are declared when the consumer begins, or by [`ConsumerBuilder::declare`]. Failed
    /// events are tried again and parked like other messages, see [`ConsumerBuilder::retry`].
    ///
    /// **Patterns are only ever added.** A queue keeps the bindings that an earlier version of the program has made, since
    /// AMQP has no way to list them: take away by [`unbind`](Self::unbind) what is no longer wanted.
    pub fn subscribe(
        &self,
        queue: impl Into<String>,
        patterns: impl IntoIterator<Item = impl Into<String>>,
    ) -> ConsumerBuilder {
        // From RabbitMQ 4.0 on, a queue without a limit of its own drops what was delivered 20 times to consumers that died.
        let queue = Queue::quorum(queue).argument("x-delivery-limit", UNLIMITED);
        self.subscribe_queue(queue, patterns)
    }

    /// The same with a queue of your own making: its type, its limits, what it is bound to besides.
    pub fn subscribe_queue(
        &self,
        queue: Queue,
        patterns: impl IntoIterator<Item = impl Into<String>>,
    ) -> ConsumerBuilder {
        let name = queue.name().to_owned();
        let bound = self.bound(queue, patterns);
        let needs = bound.map(|queue| self.shared.topology.clone().queue(queue));
        self.shared.client.consumer(name).needing(needs).state(self.in_group(None))
    }

    /// A consumer for this program alone: it gets what fits the patterns from when it begins, or is
    /// [declared](ConsumerBuilder::declare), until it ends. What happens while its connection is lost, it misses.
    pub fn listen(&self, patterns: impl IntoIterator<Item = impl Into<String>>) -> ConsumerBuilder {
        let name = format!("{} ({:016x})", self.exchange_name(), random::number());
        self.subscribe_queue(Queue::temporary(name).expires(UNUSED), patterns).temporary()
    }

    /// The queue with bindings for these patterns.
    fn bound(
        &self,
        queue: Queue,
        patterns: impl IntoIterator<Item = impl Into<String>>,
    ) -> Result<Queue, Error> {
        let patterns: Vec<String> = patterns.into_iter().map(Into::into).collect();
        if patterns.is_empty() && queue.bindings.is_empty() {
            let text = format!(
                "queue {:?} subscribes to no pattern of exchange {:?}, and would get nothing: name one, `#` is all",
                queue.name(),
                self.exchange_name()
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let mut bound = queue;
        for pattern in patterns {
            key::check_pattern(self.kind(), &pattern)?;
            bound = bound.bind(self.exchange_name(), pattern);
        }
        Ok(bound)
    }

    /// Takes patterns away from a queue. Those that it does not have are no error.
    pub async fn unbind(
        &self,
        queue: &str,
        patterns: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<(), Error> {
        let Shared { client, exchange, .. } = &*self.shared;
        let (exchange, name) = (exchange.name(), client.queue_name(queue));
        let what = format!("cannot unbind queue {queue:?} from exchange {exchange:?}");
        for pattern in patterns {
            let (name, pattern) = (name.as_str(), pattern.as_ref());
            // Forgotten first: a reconnect in between would bring it back.
            client.core().remembered.forget_binding(&Binding::to_queue(queue, exchange, pattern));
            let unbind = move |channel: crate::amqp::Channel| async move {
                channel.unbind_queue(name, exchange, pattern, &Table::new()).await
            };
            client.on_channel(&what, unbind).await?;
        }
        Ok(())
    }
}
