//! What an application needs on the broker: exchanges, queues and the bindings between them, as a value.
//!
//! ```
//! use std::time::Duration;
//! use leveret::{Exchange, Queue, Topology};
//!
//! let topology = Topology::new()
//!     .exchange(Exchange::topic("orders"))
//!     .queue(Queue::quorum("billing").bind("orders", "order.*").message_ttl(Duration::from_secs(60)));
//! assert_eq!(topology.queues()[0].name(), "billing");
//! ```
//!
//! [`Client::apply`](crate::Client::apply) declares it, and has it declared again whenever the broker was away.

pub(crate) mod arguments;
mod binding;
pub(crate) mod cycle;
mod declare;
mod exchange;
#[cfg(feature = "files")]
mod file;
mod graph;
mod plan;
mod queue;
mod remembered;

use std::collections::HashMap;

pub use binding::{Binding, Destination};
pub use declare::Applied;
pub use exchange::{Exchange, ExchangeKind};
pub use plan::{Change, Plan, Step};
pub use queue::{Overflow, Queue, QueueType};

pub(crate) use declare::Object;
pub(crate) use remembered::{Declarer, Failed, Remembered};

/// Exchanges, queues and bindings.
///
/// Objects of one name replace each other: the last one counts. The order in which they are given is of no meaning;
/// they are declared, and declared again after a reconnect, as exchanges, queues, bindings.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "files", derive(serde::Deserialize), serde(try_from = "file::File"))]
pub struct Topology {
    exchanges: Vec<Exchange>,
    queues: Vec<Queue>,
    bindings: Vec<Binding>,
}

impl Topology {
    /// Nothing yet.
    pub fn new() -> Self {
        Topology::default()
    }

    /// With an exchange, and the bindings it names.
    #[must_use]
    pub fn exchange(mut self, mut exchange: Exchange) -> Self {
        self.add_bindings(std::mem::take(&mut exchange.bindings));
        match self.exchanges.iter_mut().find(|known| known.name == exchange.name) {
            Some(known) => *known = exchange,
            None => self.exchanges.push(exchange),
        }
        self
    }

    /// With a queue, and the bindings it names.
    #[must_use]
    pub fn queue(mut self, mut queue: Queue) -> Self {
        self.add_bindings(std::mem::take(&mut queue.bindings));
        match self.queues.iter_mut().find(|known| known.name == queue.name) {
            Some(known) => *known = queue,
            None => self.queues.push(queue),
        }
        self
    }

    /// With a binding between objects that may be part of this topology, or exist already.
    #[must_use]
    pub fn binding(mut self, binding: Binding) -> Self {
        self.add_bindings([binding]);
        self
    }

    /// With all that another one has.
    #[must_use]
    pub fn and(mut self, other: Topology) -> Self {
        replace_or_add(&mut self.exchanges, other.exchanges, |exchange| &exchange.name);
        replace_or_add(&mut self.queues, other.queues, |queue| &queue.name);
        if !other.bindings.is_empty() {
            self.bindings.extend(other.bindings);
            drop_repeated(&mut self.bindings);
        }
        self
    }

    fn add_bindings(&mut self, bindings: impl IntoIterator<Item = Binding>) {
        for binding in bindings {
            if !self.bindings.contains(&binding) {
                self.bindings.push(binding);
            }
        }
    }

    /// Its exchanges.
    pub fn exchanges(&self) -> &[Exchange] {
        &self.exchanges
    }

    /// Its queues.
    pub fn queues(&self) -> &[Queue] {
        &self.queues
    }

    /// Its bindings, those that were given with an exchange or a queue included.
    pub fn bindings(&self) -> &[Binding] {
        &self.bindings
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.exchanges.is_empty() && self.queues.is_empty() && self.bindings.is_empty()
    }

    /// Everything in the order in which it has to be declared.
    pub(crate) fn objects(&self) -> impl Iterator<Item = Object<'_>> {
        let of = |to_queue: bool| {
            self.bindings.iter().filter(move |binding| binding.is_to_queue() == to_queue)
        };
        let exchanges = self.exchanges.iter().map(Object::Exchange);
        let queues = self.queues.iter().map(Object::Queue);
        let bindings = of(false).chain(of(true)).map(Object::Binding);
        exchanges.chain(queues).chain(bindings)
    }

    /// Without a queue and what is bound to it.
    pub(crate) fn remove_queue(&mut self, name: &str) {
        self.queues.retain(|queue| queue.name != name);
        self.bindings.retain(|binding| binding.destination != Destination::Queue(name.to_owned()));
    }

    /// Without a binding.
    pub(crate) fn remove_binding(&mut self, binding: &Binding) {
        self.bindings.retain(|known| known != binding);
    }

    /// Removes an exchange and its bindings in both directions.
    pub fn remove_exchange(&mut self, name: &str) {
        self.exchanges.retain(|exchange| exchange.name != name);
        let destination = Destination::Exchange(name.to_owned());
        self.bindings
            .retain(|binding| binding.source != name && binding.destination != destination);
    }
}

/// Replaces objects by those of the same name among others, and adds the rest. There may be many: none is searched for.
fn replace_or_add<T>(objects: &mut Vec<T>, others: Vec<T>, name: impl Fn(&T) -> &str) {
    if others.is_empty() {
        return;
    }
    let places: HashMap<String, usize> = objects
        .iter()
        .enumerate()
        .map(|(place, object)| (name(object).to_owned(), place))
        .collect();
    for other in others {
        match places.get(name(&other)) {
            Some(&place) => objects[place] = other,
            None => objects.push(other),
        }
    }
}

/// Leaves the first of bindings that are the same. There may be many: only those that have the same hash are compared.
fn drop_repeated(bindings: &mut Vec<Binding>) {
    let mut known: HashMap<_, Vec<&Binding>> = HashMap::new();
    let mut are_new = Vec::new();
    for binding in bindings.iter() {
        let Binding { source, destination, routing_key, arguments } = binding;
        let key = (source, destination, routing_key, arguments.to_table().ok());
        let same = known.entry(key).or_default();
        are_new.push(!same.contains(&binding));
        if !same.contains(&binding) {
            same.push(binding);
        }
    }
    let mut are_new = are_new.into_iter();
    bindings.retain(|_| are_new.next().unwrap_or(true));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_come_as_exchanges_queues_and_bindings() {
        let topology = Topology::new()
            .queue(Queue::classic("q").bind("b", "k"))
            .exchange(Exchange::fanout("b").bind("a", ""))
            .exchange(Exchange::topic("a"));
        let names: Vec<String> = topology.objects().map(|object| object.to_string()).collect();
        assert_eq!(
            names,
            [
                r#"exchange "b""#,
                r#"exchange "a""#,
                r#"queue "q""#,
                r#"binding of exchange "b" to exchange "a""#,
                r#"binding of queue "q" to exchange "b" with key "k""#,
            ]
        );
    }

    #[test]
    fn the_last_of_one_name_counts() {
        let topology = Topology::new()
            .queue(Queue::classic("q").bind("x", "1"))
            .and(Topology::new().queue(Queue::quorum("q").bind("x", "1").bind("x", "2")));
        assert_eq!(topology.queues().len(), 1);
        assert_eq!(topology.queues()[0].queue_type(), Some(QueueType::Quorum));
        assert_eq!(topology.bindings().len(), 2);
    }

    #[test]
    fn bindings_with_other_arguments_are_others() {
        let binding = |value: i64| Binding::to_queue("q", "x", "k").argument("a", value);
        let of = |values: [i64; 2]| {
            values.into_iter().map(binding).fold(Topology::new(), Topology::binding)
        };
        let both = of([1, 2]).and(of([2, 3]));
        assert_eq!(both.bindings(), [binding(1), binding(2), binding(3)]);
    }

    #[test]
    fn what_is_removed_takes_its_bindings_along() {
        let mut topology = Topology::new()
            .exchange(Exchange::topic("a"))
            .exchange(Exchange::topic("b").bind("a", "#"))
            .queue(Queue::classic("q").bind("b", "k"));
        topology.remove_exchange("b");
        assert_eq!(topology.bindings(), []);
        topology.remove_queue("q");
        topology.remove_exchange("a");
        assert!(topology.is_empty());
    }
}
