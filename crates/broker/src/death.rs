//! What a message is told when a queue gives it up, and where it may go then.
//!
//! ```text
//! Dying  a message in its queue  --+
//!                                  +-- dead_letter --> DeadLetter  what is routed by the dead-letter exchange
//! Death  where, why and when     --+                       |
//!                                                          +-- is_cycle: the queues that do not get it
//! ```
//!
//! The two profiles keep the story of a message in different places, and everything else follows from that:
//!
//! - **3.10: the headers are the story** (`header`). Whoever publishes an `x-death` has written the first chapters. An
//!   entry made beside others has its fields in alphabetical order, one that was alone in the order they are written
//!   in; three entries and more change places with every death, since RabbitMQ turns their order round when it looks
//!   for doubles. The cycle rule goes by that order: with three deaths it drops messages that were rejected in between,
//!   and lets others go round for ever: whoever sends dead letters on must not wait for that to end. A dead-letter
//!   routing key takes the `CC` header away.
//! - **4.3: the story is kept beside the message** (`history`), newest death first, and told in the headers. What a
//!   client claims under the same names is overwritten by the first death. There are `x-last-death-*`, too, and `CC`
//!   stays. A headers exchange sees `x-first-death-*` and `x-last-death-*` of the broker but not its `x-death`.
//!
//! Either way the story is put together only when a client, or a headers exchange, is to see it: a message may die thousands of
//! times on its way.
//!
//! Both sort the headers by name, take `expiration` away (whatever the reason; it is recorded as
//! `original-expiration`), leave every other property alone, and write all values anew in their usual spelling. An
//! entry whose queue and reason come again counts up; exchange, keys, time and expiration stay those of the first time.
//! Kind of queue and dead-letter strategy make no difference to any of this.
//!
//! Two places where RabbitMQ is not followed:
//!
//! - The queue of a 3.10 does not get over a client's `x-death` that holds anything but tables, or a count that is no
//!   integer: a persistent message is back in it afterwards (with a count that is a float it moves on, and the
//!   connection that is to get it is closed with 541). Here such a header is taken for none at all, as RabbitMQ does
//!   with one that is no array.
//! - Properties that this codec cannot read (nested deeper than 64) go on as they are: deaths are counted, not told.

mod header;
mod history;
#[cfg(test)]
mod tests;

use std::slice;
use std::sync::{Arc, OnceLock};

use leveret_wire::{RawProperties, ShortStr, Table};

use crate::profile::Profile;

const X_DEATH: &str = "x-death";
const REJECTED: &str = "rejected";

/// What is kept of a queue and reason, beside what is told of them.
const ENTRY: usize = 160;

/// Why a queue gives a message up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Reason {
    /// A consumer refused it and did not want it back in the queue.
    Rejected,
    /// Its time, or the queue's for each message, is over.
    Expired,
    /// The queue is full, whichever end of it has to go.
    MaxLen,
    /// It failed more often than a quorum queue allows.
    DeliveryLimit,
}

impl Reason {
    /// What it is called in headers.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Reason::Rejected => REJECTED,
            Reason::Expired => "expired",
            Reason::MaxLen => "maxlen",
            Reason::DeliveryLimit => "delivery_limit",
        }
    }
}

/// A message in its queue, as far as its death is concerned.
#[derive(Clone, Debug)]
pub(crate) struct Dying<'a> {
    /// As they were published or, after a death, as [`DeadLetter`] has them.
    pub(crate) properties: &'a RawProperties,
    /// What the message brought along from queues before this one.
    pub(crate) deaths: &'a Deaths,
    /// With which exchange it got into the queue: the one it was published to, whichever led on from there.
    pub(crate) exchange: ShortStr<'a>,
    /// With which keys it got into the queue: the routing key, then those of `CC`, then those of `BCC`. After a death
    /// they are those of the [`DeadLetter`].
    pub(crate) routing_keys: &'a [ShortStr<'a>],
    /// The keys of `BCC` when it was published, which stay with it: they are not told to anybody.
    pub(crate) bcc: &'a [ShortStr<'a>],
    /// How often it failed, as 4.3 counts it in queues of every kind: by `basic.reject`, this last one included, and
    /// by consumers that went away with it; not by `basic.nack`.
    pub(crate) failures: u32,
}

/// How a message ended in a queue.
#[derive(Clone, Debug)]
pub(crate) struct Death<'a> {
    pub(crate) queue: ShortStr<'a>,
    pub(crate) reason: Reason,
    /// Seconds since 1970.
    pub(crate) time: u64,
    /// The queue's `x-dead-letter-routing-key`. An empty one is one, too.
    pub(crate) routing_key: Option<&'a ShortStr<'a>>,
}

/// A message on its way to the dead-letter exchange.
#[derive(Clone, Debug)]
pub(crate) struct DeadLetter<'a> {
    /// Without what is told of its deaths: consumers get [`Deaths::told`].
    pub(crate) properties: RawProperties,
    /// To be kept with the message.
    pub(crate) deaths: Deaths,
    /// The keys to route it with; the first is the one its consumers see.
    pub(crate) routing_keys: &'a [ShortStr<'a>],
    /// Failures that count on in the next queue. If there are any, the message is `redelivered` there from the first
    /// time on; a quorum queue says them as `x-delivery-count` and `x-acquired-count` and adds its own to the former.
    pub(crate) failures: u32,
}

/// What becomes of a message that a queue with a dead-letter exchange gives up.
pub(crate) fn dead_letter<'a>(
    profile: Profile,
    dying: &Dying<'a>,
    death: &Death<'a>,
) -> DeadLetter<'a> {
    let deaths = dying.deaths.after(profile, dying, death);
    let properties = deaths.properties().cloned().unwrap_or_default();
    let routing_keys = match death.routing_key {
        Some(key) => slice::from_ref(key),
        None => dying.routing_keys,
    };
    let failures = match profile {
        Profile::RabbitMq3_10 => 0,
        Profile::RabbitMq4_3 => dying.failures,
    };
    DeadLetter { properties, deaths, routing_keys, failures }
}

impl DeadLetter<'_> {
    /// Whether a queue that it is routed to does not get it, because it would come back there without anybody's doing:
    /// it has died there, and neither then nor later was it rejected.
    pub(crate) fn is_cycle(&self, queue: &ShortStr<'_>) -> bool {
        self.deaths.is_cycle(queue.as_bytes())
    }

    /// What a headers exchange goes by.
    pub(crate) fn routing_headers(&self) -> Table<'static> {
        self.deaths.routing_headers()
    }
}

/// What a message has behind it. Nothing for one that has not died here.
#[derive(Clone, Debug, Default)]
pub(crate) struct Deaths(Option<Arc<Story>>);

#[derive(Debug)]
struct Story {
    history: History,
    /// What clients get, once it was asked for.
    told: OnceLock<RawProperties>,
    /// How much memory the deaths take, about.
    size: usize,
}

#[derive(Debug)]
enum History {
    InHeader(header::History),
    Beside(history::History),
}

impl Deaths {
    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// In how many queues, and for how many reasons in each.
    pub(crate) fn len(&self) -> usize {
        match self.history() {
            None => 0,
            Some(History::InHeader(history)) => history.len(),
            Some(History::Beside(history)) => history.len(),
        }
    }

    /// How much memory they take, about.
    pub(crate) fn size(&self) -> usize {
        self.0.as_ref().map_or(0, |story| story.size)
    }

    fn history(&self) -> Option<&History> {
        self.0.as_ref().map(|story| &story.history)
    }

    /// These and one more.
    fn after(&self, profile: Profile, dying: &Dying<'_>, death: &Death<'_>) -> Deaths {
        let history = match self.history() {
            Some(History::InHeader(before)) => {
                History::InHeader(header::History::after(Some(before), dying, death))
            }
            Some(History::Beside(before)) => {
                History::Beside(history::History::after(Some(before), dying, death))
            }
            None if profile == Profile::RabbitMq3_10 && dying.properties.fault().is_none() => {
                History::InHeader(header::History::after(None, dying, death))
            }
            None => History::Beside(history::History::after(None, dying, death)),
        };
        let (properties, entries) = match &history {
            History::InHeader(history) => (&history.properties, history.size()),
            History::Beside(history) => (&history.published, history.size()),
        };
        // All of it twice: once more when it is told.
        let size = 2 * (properties.as_bytes().len() + entries);
        Deaths(Some(Arc::new(Story { history, told: OnceLock::new(), size })))
    }

    /// The properties without what is told of the deaths.
    fn properties(&self) -> Option<&RawProperties> {
        Some(match self.history()? {
            History::InHeader(history) => &history.properties,
            History::Beside(history) => &history.published,
        })
    }

    /// The properties as consumers get them, if there is anything to tell.
    pub(crate) fn told(&self) -> Option<&RawProperties> {
        let story = self.0.as_deref()?;
        Some(story.told.get_or_init(|| match &story.history {
            History::InHeader(history) => history.told(),
            History::Beside(history) => history.told(),
        }))
    }

    fn is_cycle(&self, queue: &[u8]) -> bool {
        match self.history() {
            None => false,
            Some(History::InHeader(history)) => is_cycle(queue, history.newest_first()),
            Some(History::Beside(history)) => is_cycle(queue, history.newest_first()),
        }
    }

    fn routing_headers(&self) -> Table<'static> {
        match self.history() {
            Some(History::Beside(history)) => history.routing_headers(),
            _ => {
                let headers = self.told().and_then(|told| told.get().headers);
                headers.unwrap_or_default().into_owned()
            }
        }
    }
}

/// A death as the cycle rule sees it.
struct Station<'a> {
    /// `None` if a client wrote something else there.
    queue: Option<&'a [u8]>,
    rejected: bool,
}

/// Walks back from the newest death to the last one in that queue.
fn is_cycle<'a>(queue: &[u8], newest_first: impl IntoIterator<Item = Station<'a>>) -> bool {
    for station in newest_first {
        if station.rejected {
            return false;
        }
        if station.queue == Some(queue) {
            return true;
        }
    }
    false
}
