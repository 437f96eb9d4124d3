//! A message as a handler sees it.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::amqp::{Letter, Properties, RawProperties, ShortStr, Source, Value};
use crate::inbox::Inbox;
use crate::retry::{Origin, Retry, RetryProfile};
use crate::rpc::WayBack;

/// A message on its way through the layers to its handler: what it holds and where it came from. It clones cheaply.
///
/// It cannot be settled from here: what the handler returns decides.
#[derive(Clone)]
pub struct Incoming {
    letter: Letter,
    common: Arc<Common>,
    /// What is for this message alone.
    lent: Option<Arc<States>>,
    /// Where a reply goes, if it is a request to a service.
    way_back: Option<WayBack>,
}

impl Incoming {
    #[inline]
    pub(crate) fn new(letter: Letter, common: Arc<Common>) -> Self {
        Incoming { letter, common, lent: None, way_back: None }
    }

    /// The names it came with.
    pub(crate) fn source(&self) -> &Source {
        &self.letter.method.source
    }

    pub(crate) fn set_way_back(&mut self, way: WayBack) {
        self.way_back = Some(way);
    }

    pub(crate) fn way_back(&self) -> Option<&WayBack> {
        self.way_back.as_ref()
    }

    /// The body.
    pub fn body(&self) -> &Bytes {
        &self.letter.body
    }

    /// The properties.
    pub fn properties(&self) -> Properties<'_> {
        self.letter.properties.get()
    }

    /// The properties as they came, to keep or to send on.
    pub fn raw_properties(&self) -> &RawProperties {
        &self.letter.properties
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<Value<'_>> {
        self.letter.properties.header(name)
    }

    /// The exchange it was published to, also if it is tried again and came another way.
    pub fn exchange(&self) -> ShortStr<'_> {
        self.origin().map_or_else(|| self.source().exchange(), |origin| origin.exchange)
    }

    /// The routing key it was published with, also if it is tried again and came with another.
    pub fn routing_key(&self) -> ShortStr<'_> {
        self.origin().map_or_else(|| self.came_with_key(), |origin| origin.routing_key)
    }

    /// The routing key it came with, whoever published it last.
    pub(crate) fn came_with_key(&self) -> ShortStr<'_> {
        self.source().routing_key()
    }

    fn origin(&self) -> Option<Origin> {
        self.common.retry.origin(&self.letter.properties, self.queue())
    }

    /// The queue it came from, as the consumer was told it.
    pub fn queue(&self) -> &str {
        &self.common.queue
    }

    /// Which attempt this is: 1 at first, 2 if one failed before. Deliveries that nobody decided about, because a
    /// consumer died, do not count.
    pub fn attempt(&self) -> u32 {
        self.common.retry.failures(&self.letter.properties, self.queue()).saturating_add(1)
    }

    /// Whether it was delivered before, to anyone.
    pub fn redelivered(&self) -> bool {
        self.letter.method.redelivered
    }

    /// Its number on its channel.
    pub fn delivery_tag(&self) -> u64 {
        self.letter.method.tag
    }

    pub(crate) fn state<T: Clone + 'static>(&self) -> Option<T> {
        self.common.states.get()
    }

    /// Puts a value into the message for those who get it from here on: layers further in, and arguments of the handler, see
    /// [`FromIncoming`](crate::FromIncoming). There is one of each type.
    ///
    /// ```
    /// use leveret::{Error, FromIncoming, Incoming};
    ///
    /// /// Who sent it, as a layer has found out.
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

/// What all messages of one consumer have in common.
#[derive(Debug)]
pub(crate) struct Common {
    /// As the consumer was told it.
    queue: Box<str>,
    retry: Arc<dyn RetryProfile>,
    states: States,
}

impl Common {
    pub(crate) fn new(queue: &str, retry: Arc<dyn RetryProfile>, states: States) -> Arc<Self> {
        Arc::new(Common { queue: queue.into(), retry, states })
    }

    /// Of messages that are tried again by nobody.
    pub(crate) fn of_queue(queue: &str) -> Arc<Self> {
        Common::new(queue, Retry::discard().profile(), States::default())
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
