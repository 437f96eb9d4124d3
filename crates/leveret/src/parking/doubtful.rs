//! Messages that were acked before a connection was lost, and may come again: nobody knows whether the ack has arrived.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::message::ParkedMessage;
use super::walk::Taken;
use crate::amqp::{Properties, RawProperties};

/// How many there are of each kind, by what can be seen of them. There are no more of them than a page has.
#[derive(Debug, Default)]
pub(super) struct Doubtful(HashMap<u64, usize>);

impl Doubtful {
    pub(super) fn add(&mut self, messages: Vec<Taken>) {
        for taken in messages {
            *self.0.entry(appearance(&taken.message)).or_default() += 1;
        }
    }

    /// Whether this is one of them. It is none after that.
    pub(super) fn has(&mut self, taken: &Taken) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let appearance = appearance(&taken.message);
        let Some(count) = self.0.get_mut(&appearance) else { return false };
        *count -= 1;
        if *count == 0 {
            self.0.remove(&appearance);
        }
        true
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// What does not change when the broker gives a message back: all but the headers, in which it counts.
fn appearance(message: &ParkedMessage) -> u64 {
    let properties = Properties { headers: None, ..message.properties() };
    let mut hasher = DefaultHasher::new();
    (message.exchange(), message.routing_key(), message.body()).hash(&mut hasher);
    RawProperties::from(&properties).as_bytes().hash(&mut hasher);
    hasher.finish()
}
