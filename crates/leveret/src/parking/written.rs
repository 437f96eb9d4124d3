//! What an export has written, to be known again when a lost connection lets it begin anew.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::message::ParkedMessage;
use crate::amqp::{Properties, RawProperties};

/// How many messages of each likeness were written. Their places tell nothing: others may have taken messages meanwhile. It
/// takes some twenty bytes for each message of the lot, and twice that after a loss.
#[derive(Debug, Default)]
pub(super) struct Written {
    all: HashMap<u64, u32>,
    /// Those that were not met again in this walk.
    left: HashMap<u64, u32>,
    walk: u32,
    count: u64,
}

impl Written {
    /// Whether a message of this walk is to be written. If so, it counts as written.
    pub(super) fn is_new(&mut self, walk: u32, message: &ParkedMessage) -> bool {
        if walk != self.walk {
            self.walk = walk;
            self.left = self.all.clone();
        }
        let likeness = likeness(message);
        if let Some(left) = self.left.get_mut(&likeness)
            && *left > 0
        {
            *left -= 1;
            return false;
        }
        *self.all.entry(likeness).or_default() += 1;
        self.count += 1;
        true
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }
}

/// What stays as it is while a message is in the lot, however often it is given back or put in anew.
fn likeness(message: &ParkedMessage) -> u64 {
    let properties = message.properties();
    let mut hasher = DefaultHasher::new();
    message.body().hash(&mut hasher);
    for (name, value) in properties.headers.iter().flat_map(|headers| headers.iter()) {
        if !may_change(name.as_bytes()) {
            (name.as_bytes(), format!("{value:?}")).hash(&mut hasher);
        }
    }
    let stable = Properties {
        headers: None,
        delivery_mode: None,
        priority: None,
        expiration: None,
        user_id: None,
        ..properties
    };
    RawProperties::from(&stable).as_bytes().hash(&mut hasher);
    hasher.finish()
}

/// Headers in which the broker counts, or in which is noted what a message that is put in anew cannot keep.
fn may_change(name: &[u8]) -> bool {
    let counts: [&[u8]; 4] = [b"x-delivery-count", b"x-acquired-count", b"CC", b"BCC"];
    counts.contains(&name) || name.starts_with(b"x-leveret-")
}
