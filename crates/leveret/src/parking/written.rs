//! What an export has written, to be known again when a lost connection lets it begin anew.

use std::collections::HashMap;

use super::message::ParkedMessage;

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
        let likeness = message.likeness();
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
