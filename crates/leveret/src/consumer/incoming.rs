//! A message as a handler sees it.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use crate::amqp::{Content, DeliveryInfo, Properties, RawProperties, ShortStr, Value};
use crate::inbox::Inbox;
use crate::retry::{Origin, Retry, RetryProfile};
use crate::rpc::ReplyRoute;

/// A message on its way through the layers to its handler: what it holds and where it came from. It clones cheaply.
///
/// It cannot be settled from here: what the handler returns decides.
#[derive(Clone)]
pub struct Incoming {
    content: Content<DeliveryInfo>,
    consumer: Arc<ConsumerContext>,
    /// Of all clones. `None` if there are no headers: then it has not failed.
    earlier_attempts: Option<Arc<OnceLock<EarlierAttempts>>>,
    /// Values that layers and the inbox have put into this message.
    lent: Option<Arc<States>>,
    /// Where a reply goes, if it is a request to a service.
    reply_route: Option<ReplyRoute>,
}

/// What the retry profile reads from the headers of a message.
#[derive(Debug)]
struct EarlierAttempts {
    failures: u32,
    origin: Option<Origin>,
}

impl Incoming {
    #[inline]
    pub(crate) fn new(content: Content<DeliveryInfo>, consumer: Arc<ConsumerContext>) -> Self {
        let earlier_attempts = content.properties.has_headers().then(Arc::default);
        Incoming { content, consumer, earlier_attempts, lent: None, reply_route: None }
    }

    /// What the broker said about this delivery.
    pub(crate) fn info(&self) -> &DeliveryInfo {
        &self.content.method
    }

    pub(crate) fn set_reply_route(&mut self, route: ReplyRoute) {
        self.reply_route = Some(route);
    }

    pub(crate) fn reply_route(&self) -> Option<&ReplyRoute> {
        self.reply_route.as_ref()
    }

    /// The body.
    pub fn body(&self) -> &Bytes {
        &self.content.body
    }

    /// The properties.
    pub fn properties(&self) -> Properties<'_> {
        self.content.properties.get()
    }

    /// The properties as they came, to keep or to send on.
    pub fn raw_properties(&self) -> &RawProperties {
        &self.content.properties
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<Value<'_>> {
        self.content.properties.header(name)
    }

    /// The exchange it was published to, also if it is tried again and came another way.
    pub fn exchange(&self) -> ShortStr<'_> {
        self.origin().map_or_else(|| self.info().exchange(), |origin| origin.exchange.borrowed())
    }

    /// The routing key it was published with, also if it is tried again and came with another.
    pub fn routing_key(&self) -> ShortStr<'_> {
        let origin = self.origin();
        origin.map_or_else(|| self.info().routing_key(), |origin| origin.routing_key.borrowed())
    }

    /// Where it was published to before it was tried again, if that is another address.
    pub(crate) fn origin(&self) -> Option<&Origin> {
        self.earlier_attempts()?.origin.as_ref()
    }

    /// How many deliveries of it failed before this one.
    pub(crate) fn failures(&self) -> u32 {
        self.earlier_attempts().map_or(0, |attempts| attempts.failures)
    }

    /// Asks the retry profile the first time, and only about a message with headers.
    fn earlier_attempts(&self) -> Option<&EarlierAttempts> {
        let attempts = self.earlier_attempts.as_ref()?;
        Some(attempts.get_or_init(|| {
            let (profile, properties) = (&self.consumer.retry, self.raw_properties());
            EarlierAttempts {
                failures: profile.failures(properties, self.queue()),
                origin: profile.origin(properties, self.queue()),
            }
        }))
    }

    /// The queue it came from, as the consumer was told it.
    pub fn queue(&self) -> &str {
        &self.consumer.queue
    }

    /// Which attempt this is: 1 at first, 2 if one failed before. Deliveries without an outcome, because a
    /// consumer died, do not count.
    pub fn attempt(&self) -> u32 {
        self.failures().saturating_add(1)
    }

    /// Whether the broker has delivered it before, to any consumer.
    pub fn redelivered(&self) -> bool {
        self.info().redelivered()
    }

    /// Its number on its channel.
    pub fn delivery_tag(&self) -> u64 {
        self.info().delivery_tag()
    }

    pub(crate) fn state<T: Clone + 'static>(&self) -> Option<T> {
        self.consumer.states.get()
    }

    /// Puts a value into the message, for layers further in and for arguments of the handler, see
    /// [`FromIncoming`](crate::FromIncoming). There is one of each type.
    ///
    /// ```
    /// use leveret::{Error, FromIncoming, Incoming};
    ///
    /// /// The sender, as a layer has found out.
    /// #[derive(Clone)]
    /// struct User(String);
    ///
    /// impl FromIncoming for User {
    ///     fn from_incoming(incoming: &Incoming) -> Result<Self, Error> {
    ///         Ok(incoming.lent().unwrap_or(User("nobody".to_owned())))
    ///     }
    /// }
    ///
    /// async fn greet(User(name): User) {
    ///     println!("hello {name}");
    /// }
    /// # let _ = |incoming: &mut Incoming| incoming.lend(User("Ada".to_owned()));
    /// # let _ = greet;
    /// ```
    pub fn lend<T: Clone + Send + Sync + 'static>(&mut self, value: T) {
        Arc::make_mut(self.lent.get_or_insert_default()).set(value);
    }

    /// A clone of the value of this type that was [put into](Self::lend) the message.
    pub fn lent<T: Clone + 'static>(&self) -> Option<T> {
        self.lent.as_ref()?.get()
    }
}

impl fmt::Debug for Incoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_as("Incoming", f)
    }
}

impl Incoming {
    pub(crate) fn fmt_as(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("tag", &self.delivery_tag())
            .field("queue", &self.queue())
            .field("exchange", &self.exchange())
            .field("routing_key", &self.routing_key())
            .field("redelivered", &self.redelivered())
            .field("properties", self.raw_properties())
            .field("body", &format_args!("{} bytes", self.body().len()))
            .finish()
    }
}

/// What all messages of a consumer share.
#[derive(Debug)]
pub(crate) struct ConsumerContext {
    /// As the consumer was told it.
    queue: Box<str>,
    retry: Arc<dyn RetryProfile>,
    states: States,
}

impl ConsumerContext {
    pub(crate) fn new(queue: &str, retry: Arc<dyn RetryProfile>, states: States) -> Arc<Self> {
        Arc::new(ConsumerContext { queue: queue.into(), retry, states })
    }

    /// Of messages that are not retried.
    pub(crate) fn of_queue(queue: &str) -> Arc<Self> {
        ConsumerContext::new(queue, Retry::discard().profile(), States::default())
    }
}

/// What handlers share, one value of each type.
#[derive(Clone, Default)]
pub(crate) struct States(HashMap<TypeId, Arc<dyn Any + Send + Sync>>);

impl States {
    pub(super) fn set<T: Send + Sync + 'static>(&mut self, value: T) {
        self.0.insert(TypeId::of::<T>(), Arc::new(value));
    }

    fn has<T: 'static>(&self) -> bool {
        self.0.contains_key(&TypeId::of::<T>())
    }

    fn get<T: Clone + 'static>(&self) -> Option<T> {
        self.0.get(&TypeId::of::<T>())?.downcast_ref().cloned()
    }
}

/// What a consumer or service has for the arguments of its handlers.
pub struct Given<'g> {
    states: &'g States,
    inbox: Option<&'g dyn Inbox>,
    is_service: bool,
}

impl<'g> Given<'g> {
    pub(super) fn new(states: &'g States, inbox: Option<&'g dyn Inbox>, is_service: bool) -> Self {
        Given { states, inbox, is_service }
    }

    pub(crate) fn has_state<T: 'static>(&self) -> bool {
        self.states.has::<T>()
    }

    pub(crate) fn has_inbox(&self) -> bool {
        self.inbox.is_some()
    }

    pub(crate) fn is_service(&self) -> bool {
        self.is_service
    }

    /// Whether its inbox may put values of this type into messages, for their handlers to take.
    pub fn lends<T: 'static>(&self) -> bool {
        self.inbox.is_some_and(|inbox| inbox.lends(TypeId::of::<T>()))
    }
}

impl fmt::Debug for States {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "States({})", self.0.len())
    }
}
