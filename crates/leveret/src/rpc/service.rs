//! A service: a consumer whose handler replies.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tower::{Layer, Service};

use super::address::{ServiceAddress, Style};
use super::method::{Dispatch, Method, Methods};
use super::replier::{Replying, WayBack};
use crate::client::Client;
use crate::consumer::{BoxError, Call, ConsumerBuilder, HandlerService, Incoming, Runner, Summary};
use crate::error::{Error, ErrorKind};
use crate::retry::{Diagnosis, Failure, Retry};
use crate::topology::{Exchange, Queue, Topology};

/// How many requests are handled at the same time, unless said otherwise.
const WORKERS: usize = 16;

/// How a service is offered: its methods, and how they are run.
#[derive(Clone)]
#[must_use]
pub struct ServiceBuilder {
    client: Client,
    consumer: ConsumerBuilder,
    methods: Methods,
    queue: Queue,
    workers: usize,
    prefetch: Option<u16>,
    retries_calls: bool,
}

impl ServiceBuilder {
    pub(crate) fn new(client: Client, name: String) -> Self {
        ServiceBuilder {
            consumer: client.consumer(name.clone()),
            queue: Queue::classic(name.clone()),
            methods: Methods::new(ServiceAddress::new(name)),
            client,
            workers: WORKERS,
            prefetch: None,
            retries_calls: false,
        }
    }

    /// A method, by its name: an async function whose arguments are picked by type, see
    /// [`FromIncoming`](crate::FromIncoming), and whose result is the reply, see [`IntoReply`](crate::IntoReply).
    pub fn method<A: 'static>(mut self, name: &str, method: impl Method<A>) -> Self {
        self.methods.add(name, method);
        self
    }

    /// What is called for requests of any other method. Without it they are answered with an error of the kind
    /// `unknown-method`; one that asks for no reply is parked.
    pub fn fallback<A: 'static>(mut self, method: impl Method<A>) -> Self {
        self.methods.set_fallback(method);
        self
    }

    /// Requests come over an exchange of the service's own, a direct one, and the routing key is the method. Others may bind
    /// queues to it, to see what is asked. By default requests come straight to the queue that is named like the service,
    /// and the property `type` has the method.
    pub fn exchange(mut self, exchange: impl Into<String>) -> Self {
        self.methods.address.style = Style::Own(exchange.into());
        self
    }

    /// Requests come over a topic exchange that several services share, and the routing key is the service, a dot and the
    /// method: `prices.quote`.
    pub fn shared_exchange(mut self, exchange: impl Into<String>) -> Self {
        self.methods.address.style = Style::Shared(exchange.into());
        self
    }

    /// The queue that requests wait in, in place of a durable classic one that is named like the service. That is the
    /// default because who calls waits for an answer, and knows when there is none; where requests without replies must
    /// survive the loss of a node, take a quorum queue.
    pub fn queue(mut self, queue: Queue) -> Self {
        self.queue = queue;
        self
    }

    /// How many requests are handled at the same time. 16 by default.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers.max(1);
        self
    }

    /// How many requests may be here at a time, those that wait for a worker included. Twice the workers by default: what
    /// waits here cannot be taken by another instance of the service.
    pub fn prefetch(mut self, requests: u16) -> Self {
        self.prefetch = Some(requests.max(1));
        self
    }

    /// How many subscriptions handle requests beside each other, see [`ConsumerBuilder::subscribers`]. One by default.
    pub fn subscribers(mut self, subscribers: usize) -> Self {
        self.consumer = self.consumer.subscribers(subscribers);
        self
    }

    /// How long methods get to finish when the service is stopped. Half a minute by default.
    pub fn drain(mut self, time: Duration) -> Self {
        self.consumer = self.consumer.drain(time);
        self
    }

    /// What becomes of requests without replies whose method fails, see [`ConsumerBuilder::retry`]. One that asks for a reply
    /// gets an error as its reply, unless there is [`retry_calls`](Self::retry_calls).
    pub fn retry(mut self, retry: impl Into<Retry>) -> Self {
        self.consumer = self.consumer.retry(retry);
        self
    }

    /// Requests that ask for a reply are tried again, too, and get one when it goes well, or an error when they are parked.
    pub fn retry_calls(mut self) -> Self {
        self.retries_calls = true;
        self
    }

    /// A value for methods to share, one of each type. They get a clone of it as an argument [`State`](crate::State).
    pub fn state<T: Clone + Send + Sync + 'static>(mut self, value: T) -> Self {
        self.consumer = self.consumer.state(value);
        self
    }

    /// A layer of tower around the methods: timeouts, limits, tracing. The first one is the outermost. An error of a layer is
    /// answered like one of a method.
    pub fn layer<L>(mut self, layer: L) -> Self
    where
        L: Layer<HandlerService> + Send + Sync + 'static,
        L::Service: Service<Incoming, Response = ()> + Clone + Send + Sync + 'static,
        <L::Service as Service<Incoming>>::Error: Into<BoxError>,
        <L::Service as Service<Incoming>>::Future: Send + 'static,
    {
        self.consumer = self.consumer.layer(layer);
        self
    }

    /// The names of its methods, sorted.
    pub fn method_names(&self) -> Vec<String> {
        self.methods.names()
    }

    /// What the service needs: its queue, and exchange and bindings where it has one.
    pub fn topology(&self) -> Topology {
        let ServiceAddress { service, style } = &self.methods.address;
        let mut queue = self.queue.clone();
        let topology = Topology::new();
        match style {
            Style::Queue => topology.queue(queue),
            Style::Own(exchange) => {
                for method in self.methods.names() {
                    queue = queue.bind(exchange, method);
                }
                topology.exchange(Exchange::direct(exchange)).queue(queue)
            }
            Style::Shared(exchange) => {
                for method in self.methods.names() {
                    queue = queue.bind(exchange, format!("{service}.{method}"));
                }
                if self.methods.has_fallback() {
                    queue = queue.bind(exchange, format!("{service}.#"));
                }
                topology.exchange(Exchange::topic(exchange)).queue(queue)
            }
        }
    }

    fn check(&self) -> Result<(), Error> {
        let ServiceAddress { service, style } = &self.methods.address;
        let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
        if *style == Style::Queue && self.queue.name() != service {
            return invalid(format!(
                "service {service:?} is to have the queue {:?}, and is called by the name of its queue: give both the \
                 same name, or the service an exchange",
                self.queue.name()
            ));
        }
        let is_pattern = |name: &String| name.contains(['#', '*']);
        match self.methods.names().into_iter().find(is_pattern) {
            Some(name) => invalid(format!("a method cannot be named {name:?}: that is a pattern")),
            None => Ok(()),
        }
    }

    /// Serves until the client is closed.
    pub async fn run(self) -> Result<Summary, Error> {
        self.run_until(std::future::pending::<()>()).await
    }

    /// Declares what the service [needs](Self::topology) and serves until `stop` is done: then takes no more requests, lets
    /// the methods that are at work finish and reply within the time for draining, and returns what was done.
    ///
    /// It fails if the service cannot begin, or ends because its queue stays away.
    pub async fn run_until(self, stop: impl Future) -> Result<Summary, Error> {
        self.runner().await?.run_until(stop).await
    }

    async fn runner(self) -> Result<Runner, Error> {
        self.check()?;
        self.client.apply(&self.topology()).await?;
        let replying = Replying::start(&self.client, &self.methods.address.service).await?;
        let twice = u16::try_from(self.workers.saturating_mul(2)).unwrap_or(u16::MAX);
        let consumer = self
            .consumer
            .of_queue(self.queue.name())
            .workers(self.workers)
            .prefetch(self.prefetch.unwrap_or(twice));
        let methods = consumer.layered(Dispatch(Arc::new(self.methods)));
        let answering =
            Arc::new(Answering { methods, replying, retries_calls: self.retries_calls });
        let call = Call::plain(move |incoming| {
            let answering = Arc::clone(&answering);
            Box::pin(async move { answering.answer(incoming).await })
        });
        Ok(consumer.call(call))
    }
}

impl fmt::Debug for ServiceBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceBuilder")
            .field("address", &self.methods.address)
            .field("methods", &self.methods.names())
            .finish_non_exhaustive()
    }
}

/// Has requests handled, and answers them.
struct Answering {
    /// With the layers around them.
    methods: Call,
    replying: Arc<Replying>,
    retries_calls: bool,
}

impl Answering {
    async fn answer(&self, mut incoming: Incoming) -> Result<(), BoxError> {
        let way = WayBack::of(&incoming, &self.replying);
        incoming.set_way_back(way.clone());
        let handled = self.methods.call(incoming).await;
        let replied = match handled {
            Ok(()) => way.finish().await,
            Err(error) if !way.is_wanted() || self.retries_calls => return Err(error),
            Err(error) => {
                let seen = Diagnosis::of(&error);
                tracing::debug!(kind = seen.kind, "a request failed: {}", seen.text);
                way.fail(&seen).await
            }
        };
        // The reply may not have gone out, so it must not be lost: somebody handles the request again.
        replied.map_err(|error| Failure::requeue(error).into())
    }
}
