//! The client: what an application holds. Brokers may come and go underneath.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{timeout, timeout_at};

use crate::amqp::{self, Channel, Connector, DeleteExchange, DeleteQueue, GetOptions, deadline_in};
use crate::connection::core::{Core, Options};
use crate::connection::endpoint::{Dial, Endpoint, Endpoints};
use crate::connection::registry::Members;
use crate::connection::{
    Backoff, Client, ClientEvent, ClientEvents, ConnectLimits, Health, IntoEndpoints, checkup,
    health,
};
use crate::consumer::ConsumerContext;
use crate::delay::ready::Ready;
use crate::delivery::Delivery;
use crate::error::{Error, ErrorKind};
use crate::parking::HeldMessages;
use crate::topology::{Applied, Failed, Plan, Topology};

/// How long [`Client::close`] waits for each connection to end, beyond its own deadlines.
const CLOSE: Duration = Duration::from_secs(60);

/// How to make a [`Client`].
#[derive(Clone, Debug)]
#[must_use]
pub struct ClientBuilder {
    endpoints: Vec<Endpoint>,
    connector: Option<Arc<dyn Dial>>,
    options: Options,
}

impl Default for ClientBuilder {
    fn default() -> Self {
        ClientBuilder {
            endpoints: Vec::new(),
            connector: None,
            options: Options {
                name: "leveret".to_owned(),
                connect: ConnectLimits::default(),
                backoff: Backoff::default(),
                give_up_after: None,
                max_subscriptions: 1000,
                timeout: Duration::from_secs(30),
                check_every: Duration::from_secs(30),
            },
        }
    }
}

impl ClientBuilder {
    /// One broker more, by its URL or options; the first that answers is used. Without any, [`ClientBuilder::connect`]
    /// starts an embedded broker, or fails if the cargo feature `embedded` is off.
    pub fn endpoint(mut self, endpoints: impl IntoEndpoints) -> Result<Self, Error> {
        self.endpoints.extend(endpoints.into_endpoints()?.into_iter().map(Endpoint::at));
        Ok(self)
    }

    /// A broker in this process.
    #[cfg(feature = "embedded")]
    pub fn broker(mut self, broker: &leveret_broker::Broker) -> Self {
        self.endpoints.push(Endpoint::embedded(broker));
        self
    }

    /// How streams to the brokers are opened that [`ClientBuilder::endpoint`] was given: by this, and not by TCP. Brokers in this
    /// process need none.
    ///
    /// ```
    /// use std::io;
    ///
    /// use leveret::amqp::{Connector, Options};
    /// use leveret::{Client, Queue, Topology};
    /// use leveret_broker::Broker;
    /// use tokio::net::TcpStream;
    ///
    /// /// All brokers are reached through one gateway.
    /// struct Gateway(String);
    ///
    /// impl Connector for Gateway {
    ///     type Stream = TcpStream;
    ///
    ///     async fn connect(&self, _broker: &Options) -> io::Result<TcpStream> {
    ///         TcpStream::connect(&self.0).await
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leveret::BoxError> {
    /// # let broker = Broker::builder().start()?;
    /// # let gateway = broker.listen("127.0.0.1:0").await?.to_string();
    /// let builder = Client::builder().endpoint("amqp://rabbit-1")?;
    /// let client = builder.connector(Gateway(gateway)).connect().await?;
    /// client.apply(&Topology::new().queue(Queue::quorum("jobs"))).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn connector(mut self, connector: impl Connector) -> Self {
        self.connector = Some(Arc::new(connector));
        self
    }

    /// What the broker's management pages call its connections. `leveret` by default.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.options.name = name.into();
        self
    }

    /// How long to try to connect for the first time.
    pub fn connect_limits(mut self, limits: ConnectLimits) -> Self {
        self.options.connect = limits;
        self
    }

    /// The pauses between attempts to connect.
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.options.backoff = backoff;
        self
    }

    /// Stops trying to connect again after this long. By default it never does.
    pub fn give_up_after(mut self, time: Duration) -> Self {
        self.options.give_up_after = Some(time);
        self
    }

    /// How many consumers share a connection, before the next one gets another. 1000 by default.
    pub fn max_subscriptions(mut self, subscriptions: usize) -> Self {
        self.options.max_subscriptions = subscriptions.max(1);
        self
    }

    /// How long declaring and the like may take as a whole, waiting for the broker to come back included. Half a minute
    /// by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.options.timeout = timeout;
        self
    }

    /// How often the broker is asked whether it still has the client's consumers, as [`Client::check_health`] does. Every
    /// half a minute by default; [`Duration::MAX`] is never.
    pub fn check_every(mut self, time: Duration) -> Self {
        self.options.check_every = time;
        self
    }

    /// The deadlines and bounds of each connection.
    pub fn limits(mut self, limits: amqp::Limits) -> Self {
        for endpoint in &mut self.endpoints {
            endpoint.options_mut().limits = limits.clone();
        }
        self
    }

    /// Connects.
    pub async fn connect(mut self) -> Result<Client, Error> {
        if self.endpoints.is_empty() {
            self = self.in_memory()?;
        }
        for endpoint in &mut self.endpoints {
            endpoint.use_connector(self.connector.as_ref());
        }
        let core = Core::new(self.options, Endpoints::new(self.endpoints));
        let checkup = core.spawn(checkup::keep_checking(Arc::clone(&core)));
        let client = Client::new(core, checkup);
        client.core().home().up().await?;
        Ok(client)
    }

    #[cfg(feature = "embedded")]
    fn in_memory(self) -> Result<Self, Error> {
        let broker = leveret_broker::Broker::builder()
            .start()
            .map_err(|error| Error::caused(ErrorKind::Invalid, "the embedded broker", error))?;
        Ok(self.broker(&broker))
    }

    #[cfg(not(feature = "embedded"))]
    fn in_memory(self) -> Result<Self, Error> {
        let text = "no broker is given, and this program was built without the embedded one: name a URL, or turn on \
                    the cargo feature `embedded` of leveret";
        Err(Error::new(ErrorKind::Invalid, text))
    }
}

impl Client {
    /// Connects to a broker by its URL, or to the first that answers of a list of them.
    pub async fn connect(endpoints: impl IntoEndpoints) -> Result<Client, Error> {
        Client::builder().endpoint(endpoints)?.connect().await
    }

    /// A client of a broker of its own in this process, with nothing installed.
    #[cfg(feature = "embedded")]
    pub async fn embedded() -> Result<Client, Error> {
        Client::builder().connect().await
    }

    /// More choices.
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// Declares a topology, and has it declared again whenever a connection was lost.
    ///
    /// Declaring what exists already is no error. What exists with other parameters is: the error names each of them, see
    /// [`Error::conflicts`]. The rest is declared all the same.
    pub async fn apply(&self, topology: &Topology) -> Result<Applied, Error> {
        let (applied, failed) = self.apply_each(topology).await?;
        match combined(failed) {
            None => Ok(applied),
            Some(error) => Err(error),
        }
    }

    /// The same, and tells of each object why it could not be declared.
    pub(crate) async fn apply_each(
        &self,
        topology: &Topology,
    ) -> Result<(Applied, Vec<Failed>), Error> {
        let core = self.core();
        let patience = core.options.timeout;
        let deadline = deadline_in(patience);
        let home = core.home();
        let late = |_| Error::timed_out("declaring the topology", patience);
        let mut was_refused = false;
        loop {
            core.check_open()?;
            let up = timeout_at(deadline, home.up()).await.map_err(late)??;
            let apply = core.remembered.apply(&up.connection, topology);
            let (applied, failed) = timeout_at(deadline, apply).await.map_err(late)?;
            let is_lost = failed.iter().any(|(_, error)| error.kind() == ErrorKind::Lost);
            // One of them may be what the broker has closed the connection for: then it does so again.
            let is_refused = !is_lost && !failed.is_empty();
            if (!is_lost && up.connection.is_usable()) || (is_refused && was_refused) {
                let bind = self.bind_delayed(&up.connection, topology);
                timeout_at(deadline, bind).await.map_err(late)?;
                return Ok((applied, failed));
            }
            was_refused = is_refused;
        }
    }

    /// What [applying](Client::apply) a topology would do. Changes nothing.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leveret::Error> {
    /// use leveret::{Change, Client, Queue, Topology};
    ///
    /// let client = Client::embedded().await?;
    /// client.apply(&Topology::new().queue(Queue::quorum("billing"))).await?;
    /// let wanted = Topology::new().queue(Queue::classic("billing")).queue(Queue::quorum("audit"));
    /// let plan = client.plan(&wanted).await?;
    /// assert!(matches!(plan.steps()[0].change, Change::Conflict(_)));
    /// assert!(matches!(plan.steps()[1].change, Change::Create));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn plan(&self, topology: &Topology) -> Result<Plan, Error> {
        let core = self.core();
        let patience = core.options.timeout;
        let late = |_| Error::timed_out("planning the topology", patience);
        let planning = async {
            loop {
                core.check_open()?;
                let up = core.home().up().await?;
                match Plan::make(&up.connection, topology).await {
                    Err(error) if error.kind() == ErrorKind::Lost => {
                        drop(up.connection.ended().await);
                    }
                    planned => return planned,
                }
            }
        };
        timeout_at(deadline_in(patience), planning).await.map_err(late)?
    }

    /// What was applied, all of it.
    pub fn topology(&self) -> Topology {
        self.core().remembered.topology()
    }

    /// What the broker calls a queue of the topology. It differs from its name here if the broker named it.
    pub fn queue_name(&self, queue: &str) -> String {
        self.core().remembered.name_of(queue)
    }

    /// Deletes a queue, and no longer restores it. Says how many messages went with it.
    pub async fn delete_queue(&self, queue: &str, when: DeleteQueue) -> Result<u32, Error> {
        let name = self.queue_name(queue);
        let what = format!("cannot delete queue {queue:?}");
        let name = name.as_str();
        let delete = move |channel: Channel| async move { channel.delete_queue(name, when).await };
        let deleted = self.on_channel(&what, delete).await?;
        self.core().remembered.forget_queue(queue);
        Ready::of(self.core()).was_deleted(queue);
        Ok(deleted)
    }

    /// Deletes an exchange, and no longer restores it.
    pub async fn delete_exchange(&self, exchange: &str, when: DeleteExchange) -> Result<(), Error> {
        let what = format!("cannot delete exchange {exchange:?}");
        let delete =
            move |channel: Channel| async move { channel.delete_exchange(exchange, when).await };
        self.on_channel(&what, delete).await?;
        self.core().remembered.forget_exchange(exchange);
        Ready::of(self.core()).was_deleted(exchange);
        Ok(())
    }

    /// Drops all messages of a queue that are ready for delivery, and says how many.
    pub async fn purge_queue(&self, queue: &str) -> Result<u32, Error> {
        let name = self.queue_name(queue);
        let what = format!("cannot purge queue {queue:?}");
        let name = name.as_str();
        self.on_channel(&what, move |channel| async move { channel.purge_queue(name).await }).await
    }

    /// How many messages and consumers a queue has.
    pub async fn inspect_queue(&self, queue: &str) -> Result<amqp::QueueInfo, Error> {
        let name = self.queue_name(queue);
        let what = format!("cannot inspect queue {queue:?}");
        let name = name.as_str();
        self.on_channel(&what, move |channel| async move { channel.inspect_queue(name).await })
            .await
    }

    /// Takes one message from a queue, if it has one. For more than a few, [consume](Client::consumer).
    pub async fn get(&self, queue: &str, options: GetOptions) -> Result<Option<Delivery>, Error> {
        let name = self.queue_name(queue);
        let what = format!("cannot get from queue {queue:?}");
        let name = name.as_str();
        let get = move |channel: Channel| async move { channel.get(name, options).await };
        let got = self.on_channel(&what, get).await?;
        let context = ConsumerContext::of_queue(queue);
        Ok(got.map(|delivery| Delivery::new(delivery, &context)))
    }

    /// What happens to the client from now on. Any number may listen.
    pub fn watch(&self) -> ClientEvents {
        self.core().announcer().listen()
    }

    /// How the client is at this moment.
    pub fn health(&self) -> Health {
        let registry = &self.core().health;
        Health {
            connections: self.core().lines().iter().map(|line| health::of_line(line)).collect(),
            consumers: registry.consumers(),
            publishers: registry.publishers.all().iter().map(|one| one.health()).collect(),
            callers: registry.callers.all().iter().map(|one| one.health()).collect(),
            pools: registry.pools.all().iter().map(|pool| pool.health()).collect(),
        }
    }

    /// Closes all connections: what was published is confirmed first, and what tasks have taken out of a
    /// [parking lot](Client::parking_lot) is given back, up to a deadline; consumers end. Closing twice is no error, and it never
    /// hangs.
    pub async fn close(&self) {
        // As long as there are connections.
        let held = self.core().extensions.get::<Members<HeldMessages>>().all();
        let given_back = join_all(held.iter().map(|held| held.give_back()));
        let _ = timeout(self.core().options.timeout, given_back).await;
        let first = self.core().begin_close();
        for line in self.core().lines().into_iter().chain(self.core().retired_lines()) {
            let _ = timeout(CLOSE, line.ended()).await;
        }
        if first {
            self.core().announce(ClientEvent::Closed);
        }
    }
}

/// One error that names all failures.
fn combined(mut failed: Vec<Failed>) -> Option<Error> {
    match failed.len() {
        0 => None,
        1 => Some(failed.remove(0).1),
        count => {
            let each = failed.iter().map(|(_, error)| format!("\n  {error}")).collect::<String>();
            let text = format!("{count} objects cannot be declared:{each}");
            let conflicts: Vec<_> =
                failed.iter().flat_map(|(_, error)| error.conflicts()).cloned().collect();
            Some(match conflicts.is_empty() {
                true => Error::new(failed[0].1.kind(), text),
                false => Error::conflicting(text, conflicts),
            })
        }
    }
}
