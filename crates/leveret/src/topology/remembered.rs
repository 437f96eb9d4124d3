//! What a client has declared, to be declared again after every reconnect.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use super::declare::{Applied, Declaring, Naming, Object};
use super::{Binding, Destination, Topology};
use crate::amqp::{Connection, lock};
use crate::error::{Error, ErrorKind};

/// The topology of a client, with the names that the broker gave.
#[derive(Debug, Default)]
pub(crate) struct Remembered {
    state: Mutex<State>,
    /// Held while declaring, so that two connections that come back do not mix their declarations up.
    declaring: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    topology: Topology,
    /// By the local name of a queue, what the broker calls it.
    names: BTreeMap<String, String>,
}

/// Which connection declares: what is exclusive belongs to one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Declarer {
    /// The connection that consumes, which owns what is exclusive.
    Home,
    /// Any other: exclusive queues are not its business.
    Other,
}

/// An object that could not be declared, by its name, and why.
pub(crate) type Failed = (String, Error);

impl Remembered {
    /// What the broker calls a queue.
    pub(crate) fn name_of(&self, queue: &str) -> String {
        lock(&self.state).names.get(queue).cloned().unwrap_or_else(|| queue.to_owned())
    }

    /// A copy of all that is remembered.
    pub(crate) fn topology(&self) -> Topology {
        lock(&self.state).topology.clone()
    }

    /// What something makes of all that is remembered, without a copy.
    pub(crate) fn look<T>(&self, at: impl FnOnce(&Topology) -> T) -> T {
        at(&lock(&self.state).topology)
    }

    /// Whether a queue was declared by this client.
    pub(crate) fn has_queue(&self, name: &str) -> bool {
        lock(&self.state).topology.queues().iter().any(|queue| queue.name() == name)
    }

    /// Whether this client has bound a queue.
    pub(crate) fn has_bound(&self, name: &str) -> bool {
        let is_bound = |binding: &Binding| match &binding.destination {
            Destination::Queue(queue) => queue == name,
            Destination::Exchange(_) => false,
        };
        lock(&self.state).topology.bindings().iter().any(is_bound)
    }

    /// Whether a queue belongs to the connection that declared it.
    pub(crate) fn is_exclusive(&self, name: &str) -> bool {
        let state = lock(&self.state);
        state.topology.queues().iter().any(|queue| queue.name() == name && queue.is_exclusive())
    }

    /// Whether a queue gives its messages to one consumer at a time; `None` if this client has not declared it.
    pub(crate) fn has_single_active(&self, name: &str) -> Option<bool> {
        let state = lock(&self.state);
        let queue = state.topology.queues().iter().find(|queue| queue.name() == name)?;
        Some(queue.has_single_active_consumer())
    }

    /// Whether there are queues that belong to the connection that declared them.
    pub(crate) fn has_exclusive(&self) -> bool {
        lock(&self.state).topology.queues().iter().any(|queue| queue.is_exclusive())
    }

    pub(crate) fn forget_queue(&self, name: &str) {
        let mut state = lock(&self.state);
        state.topology.remove_queue(name);
        state.names.remove(name);
    }

    pub(crate) fn forget_exchange(&self, name: &str) {
        lock(&self.state).topology.remove_exchange(name);
    }

    pub(crate) fn forget_binding(&self, binding: &Binding) {
        lock(&self.state).topology.remove_binding(binding);
    }

    /// Declares a topology and remembers what the broker has taken. Says what it has not; the rest is declared all the
    /// same.
    pub(crate) async fn apply(
        &self,
        connection: &Connection,
        topology: &Topology,
    ) -> (Applied, Vec<Failed>) {
        let _alone = self.declaring.lock().await;
        let Declared { applied, failed, reached } =
            self.declare(connection, Naming::Keep, topology.objects()).await;
        let failed_names: BTreeSet<&str> = failed.iter().map(|(name, _)| name.as_str()).collect();
        let mut state = lock(&self.state);
        let reached = topology.objects().take(reached);
        let taken = reached.filter(|o| !failed_names.contains(o.to_string().as_str()));
        let known = std::mem::take(&mut state.topology);
        state.topology = taken.fold(known, |known, object| match object {
            Object::Exchange(exchange) => known.exchange(exchange.clone()),
            Object::Queue(queue) => known.queue(queue.clone()),
            Object::Binding(binding) => known.binding(binding.clone()),
        });
        drop(state);
        (applied, failed)
    }

    /// Declares everything again, after a reconnect. Says what the broker did not take.
    pub(crate) async fn restore(&self, connection: &Connection, who: Declarer) -> Vec<Failed> {
        self.restore_some(connection, who, |_| true).await
    }

    /// Declares some objects again: those whose names are wanted. Says which of them are not there: the broker did not take
    /// them, or they were not tried because it did not answer before.
    pub(crate) async fn restore_some(
        &self,
        connection: &Connection,
        who: Declarer,
        wanted: impl Fn(&str) -> bool,
    ) -> Vec<Failed> {
        let _alone = self.declaring.lock().await;
        let topology = self.topology();
        let is_wanted = |object: &Object<'_>| {
            (who == Declarer::Home || !concerns_exclusive(&topology, *object))
                && wanted(&object.to_string())
        };
        let objects: Vec<_> = topology.objects().filter(is_wanted).collect();
        let Declared { mut failed, reached, .. } =
            self.declare(connection, Naming::Anew, objects.iter().copied()).await;
        if let Some((_, error)) = failed.last().cloned() {
            let untried = objects[reached..].iter();
            failed.extend(untried.map(|object| (object.to_string(), error.clone())));
        }
        failed
    }

    /// Declares a queue that was deleted again, with the exchanges that its bindings need and the bindings.
    pub(crate) async fn restore_queue(&self, connection: &Connection, queue: &str) -> Vec<Failed> {
        self.restore_around(connection, queue, Naming::Anew).await
    }

    /// Binds a queue again that is there, but may have been deleted meanwhile, and its bindings with it.
    pub(crate) async fn restore_bindings(
        &self,
        connection: &Connection,
        queue: &str,
    ) -> Vec<Failed> {
        self.restore_around(connection, queue, Naming::Keep).await
    }

    /// The queue itself only if it may get another name.
    async fn restore_around(
        &self,
        connection: &Connection,
        queue: &str,
        naming: Naming,
    ) -> Vec<Failed> {
        let topology = self.topology();
        let to_queue = Destination::Queue(queue.to_owned());
        let bindings: Vec<_> =
            topology.bindings().iter().filter(|binding| binding.destination == to_queue).collect();
        let needed = |object: Object<'_>| match object {
            Object::Exchange(exchange) => bindings.iter().any(|b| b.source == exchange.name),
            Object::Queue(object) => naming == Naming::Anew && object.name == queue,
            Object::Binding(binding) => binding.destination == to_queue,
        };
        let _alone = self.declaring.lock().await;
        let objects = topology.objects().filter(|object| needed(*object));
        self.declare(connection, naming, objects).await.failed
    }

    /// Declares an exchange that was deleted again, with the bindings from it and to it.
    pub(crate) async fn restore_exchange(
        &self,
        connection: &Connection,
        exchange: &str,
    ) -> Vec<Failed> {
        let topology = self.topology();
        let to_exchange = Destination::Exchange(exchange.to_owned());
        let needed = |object: Object<'_>| match object {
            Object::Exchange(object) => object.name == exchange,
            Object::Queue(_) => false,
            Object::Binding(binding) => {
                binding.source == exchange || binding.destination == to_exchange
            }
        };
        let _alone = self.declaring.lock().await;
        let objects = topology.objects().filter(|object| needed(*object));
        self.declare(connection, Naming::Keep, objects).await.failed
    }

    async fn declare<'t>(
        &self,
        connection: &Connection,
        naming: Naming,
        objects: impl Iterator<Item = Object<'t>>,
    ) -> Declared {
        let names = lock(&self.state).names.clone();
        let mut declaring = Declaring::new(connection, names, naming);
        let (mut applied, mut failed, mut reached) = (Applied::default(), Vec::new(), 0);
        for object in objects {
            reached += 1;
            match declaring.declare(object).await {
                Ok(Some(info)) => {
                    if let Object::Queue(queue) = object {
                        applied.add(queue.name(), info);
                    }
                }
                Ok(None) => {}
                Err(error) => failed.push((object.to_string(), error)),
            }
            // One that does not answer will not answer to the next one either.
            let is_silent =
                failed.last().is_some_and(|(_, error)| error.kind() == ErrorKind::TimedOut);
            if is_silent || !declaring.is_connected() {
                break;
            }
        }
        let names = declaring.finish().await;
        lock(&self.state).names = names;
        Declared { applied, failed, reached }
    }
}

/// What came of declaring objects.
struct Declared {
    applied: Applied,
    failed: Vec<Failed>,
    /// How many were tried before the connection went, or all.
    reached: usize,
}

/// Whether an object is an exclusive queue, or bound to one.
fn concerns_exclusive(topology: &Topology, object: Object<'_>) -> bool {
    let is_exclusive = |name: &str| {
        topology.queues().iter().any(|queue| queue.name() == name && queue.is_exclusive())
    };
    match object {
        Object::Exchange(_) => false,
        Object::Queue(queue) => queue.is_exclusive(),
        Object::Binding(binding) => match &binding.destination {
            Destination::Queue(queue) => is_exclusive(queue),
            Destination::Exchange(_) => false,
        },
    }
}
