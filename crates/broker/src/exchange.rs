//! The bindings of an exchange: who gets a message.
//!
//! One file per type of exchange, each with the same few functions: `add`, `remove` and `route`. They hold what routing
//! needs and nothing else; what makes two bindings the same, and which of them go when a queue does, is kept here, once
//! for all types.

mod destinations;
mod direct;
mod fanout;
mod headers;
mod topic;

#[cfg(test)]
#[path = "../tests/routing/mod.rs"]
mod reference;
#[cfg(test)]
mod tests;

use std::collections::hash_map::Entry;
use std::hash::Hash;

use foldhash::{HashMap, HashMapExt, HashSet};
use leveret_wire::Table;

use crate::Profile;
use crate::fields::Fields;
use crate::refusal::Refusal;
use direct::Direct;
use fanout::Fanout;
use headers::Headers;
use topic::Topic;

/// A type of exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Direct,
    Fanout,
    Topic,
    Headers,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Direct, Kind::Fanout, Kind::Topic, Kind::Headers];

    /// The type that has this name on the wire.
    pub(crate) fn parse(name: &[u8]) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name().as_bytes() == name)
    }

    /// Its name on the wire.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Direct => "direct",
            Kind::Fanout => "fanout",
            Kind::Topic => "topic",
            Kind::Headers => "headers",
        }
    }
}

/// Refuses a binding that RabbitMQ refuses. (Unbinding is never refused.)
pub(crate) fn validate(
    kind: Kind,
    profile: Profile,
    key: &[u8],
    arguments: &Table<'_>,
) -> Result<(), Refusal> {
    match kind {
        Kind::Direct | Kind::Fanout => Ok(()),
        Kind::Topic => topic::validate(profile, key),
        Kind::Headers => headers::validate(profile, arguments),
    }
}

/// What became of a request to bind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    /// The binding is new.
    Made,
    /// There was the same one already.
    Existed,
}

/// A binding of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Binding<'a, D> {
    pub(crate) key: &'a [u8],
    /// Sorted by name.
    pub(crate) arguments: &'a Table<'static>,
    pub(crate) destination: D,
}

/// All bindings that lead away from one exchange.
#[derive(Debug)]
pub(crate) struct Bindings<D> {
    /// The bindings themselves. By destination, so that deleting a queue costs what the queue has and not what the
    /// exchange has.
    by_destination: HashMap<D, HashSet<Label>>,
    len: usize,
    /// The same bindings once more, in the form that routing wants.
    routes: Routes<D>,
}

/// What tells the bindings to one destination apart.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Label {
    key: Box<[u8]>,
    arguments: Table<'static>,
}

#[derive(Debug)]
enum Routes<D> {
    Direct(Direct<D>),
    Fanout(Fanout<D>),
    /// Boxed because it is many times as large as the others.
    Topic(Box<Topic<D>>),
    Headers(Headers<D>),
}

impl<D: Copy + Eq + Hash> Bindings<D> {
    pub(crate) fn new(kind: Kind, profile: Profile) -> Self {
        let routes = match kind {
            Kind::Direct => Routes::Direct(Direct::new()),
            Kind::Fanout => Routes::Fanout(Fanout::new()),
            Kind::Topic => Routes::Topic(Box::new(Topic::new())),
            Kind::Headers => Routes::Headers(Headers::new(profile)),
        };
        Bindings { by_destination: HashMap::new(), len: 0, routes }
    }

    /// Binds a destination. Two bindings to it are the same if key and arguments are, in whatever order the arguments
    /// come; a number of another width is another argument.
    pub(crate) fn bind(&mut self, key: &[u8], arguments: &Table<'_>, destination: D) -> Bound {
        let label = Label::new(key, arguments);
        let stored = label.arguments.clone();
        if !self.by_destination.entry(destination).or_default().insert(label) {
            return Bound::Existed;
        }
        self.len += 1;
        self.routes.add(key, stored, destination);
        Bound::Made
    }

    /// Undoes [`bind`](Self::bind). Whether there was such a binding.
    pub(crate) fn unbind(&mut self, key: &[u8], arguments: &Table<'_>, destination: D) -> bool {
        let label = Label::new(key, arguments);
        let Entry::Occupied(mut labels) = self.by_destination.entry(destination) else {
            return false;
        };
        if !labels.get_mut().remove(&label) {
            return false;
        }
        if labels.get().is_empty() {
            labels.remove();
        }
        self.len -= 1;
        self.routes.remove(&label, destination);
        true
    }

    /// Whether there is such a binding.
    pub(crate) fn contains(&self, key: &[u8], arguments: &Table<'_>, destination: D) -> bool {
        let labels = self.by_destination.get(&destination);
        labels.is_some_and(|labels| labels.contains(&Label::new(key, arguments)))
    }

    /// Takes out all bindings to a destination, and says how many there were.
    pub(crate) fn remove_destination(&mut self, destination: D) -> usize {
        let labels = self.by_destination.remove(&destination).unwrap_or_default();
        for label in &labels {
            self.routes.remove(label, destination);
        }
        self.len -= labels.len();
        labels.len()
    }

    /// Appends every destination that a message with this key and these headers goes to. One to which several bindings
    /// lead may be appended several times: it is for the caller to give it the message once.
    #[inline]
    pub(crate) fn route(&self, key: &[u8], headers: Option<&Table<'_>>, found: &mut Vec<D>) {
        match &self.routes {
            Routes::Direct(direct) => direct.route(key, found),
            Routes::Fanout(fanout) => fanout.route(found),
            Routes::Topic(topic) => topic.route(key, found),
            Routes::Headers(bindings) => bindings.route(headers, found),
        }
    }

    /// The same for a message with several keys, each of them given once. What is appended is bounded by the bindings, however
    /// many keys there are.
    pub(crate) fn route_all(
        &self,
        keys: &[&[u8]],
        headers: Option<&Table<'_>>,
        found: &mut Vec<D>,
    ) {
        match &self.routes {
            Routes::Direct(direct) => keys.iter().for_each(|key| direct.route(key, found)),
            Routes::Topic(topic) => topic.route_all(keys, found),
            // They do not go by keys.
            Routes::Fanout(_) | Routes::Headers(_) => self.route(b"", headers, found),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether any binding leads there.
    pub(crate) fn lead_to(&self, destination: D) -> bool {
        self.by_destination.contains_key(&destination)
    }

    /// Where the bindings lead, each destination once.
    pub(crate) fn destinations(&self) -> impl Iterator<Item = D> {
        self.by_destination.keys().copied()
    }

    /// The bindings, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Binding<'_, D>> {
        self.by_destination.iter().flat_map(|(&destination, labels)| {
            labels.iter().map(move |label| {
                let Label { key, arguments } = label;
                Binding { key, arguments, destination }
            })
        })
    }
}

impl<D: Copy + Eq + Hash> Routes<D> {
    fn add(&mut self, key: &[u8], arguments: Table<'static>, destination: D) {
        match self {
            Routes::Direct(direct) => direct.add(key, destination),
            Routes::Fanout(fanout) => fanout.add(destination),
            Routes::Topic(topic) => topic.add(key, destination),
            Routes::Headers(headers) => headers.add(arguments, destination),
        }
    }

    /// Takes out what one `add` brought in.
    fn remove(&mut self, label: &Label, destination: D) {
        match self {
            Routes::Direct(direct) => direct.remove(&label.key, destination),
            Routes::Fanout(fanout) => fanout.remove(destination),
            Routes::Topic(topic) => topic.remove(&label.key, destination),
            Routes::Headers(headers) => headers.remove(&label.arguments, destination),
        }
    }
}

impl Label {
    fn new(key: &[u8], arguments: &Table<'_>) -> Self {
        let mut fields = Fields::of(arguments);
        fields.sort();
        // In one spelling, so that arguments which mean the same have the same bytes.
        Label { key: key.into(), arguments: fields.to_table() }
    }
}
