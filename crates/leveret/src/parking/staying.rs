//! Messages that stay in the lot and have to be put in anew, because the broker may count what is given back.

use super::message::ParkedMessage;
use super::target::{note_address, straight_to};
use super::walk::{Taken, Walk};
use crate::forwarder::Parcel;

/// How many bytes may be held back for long: messages that would come again at once, and those for which there is no room.
const MAX_HELD: usize = 64 * 1024 * 1024;

#[derive(Debug, Default)]
pub(super) struct Staying {
    held: Vec<Taken>,
    has_begun: bool,
}

impl Staying {
    pub(super) fn hold(&mut self, taken: Taken) {
        self.has_begun = true;
        self.held.push(taken);
    }

    /// Those that are to be put in now, in their order. High priorities wait for the end of the walk, as long as there is
    /// room: they would be handed out again before others were seen.
    pub(super) fn due(&mut self, walk: &Walk, at: At) -> Vec<Taken> {
        let all = at == At::End || self.is_full();
        let held = std::mem::take(&mut self.held).into_iter();
        let (mut due, later) = held.partition(|taken| all || !walk.comes_early(&taken.message));
        self.held = later;
        due.sort_by_key(|taken: &Taken| taken.message.position());
        due
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.held.iter().map(|taken| taken.message.size()).sum::<usize>() > MAX_HELD
    }

    /// Whether some stay, so that all that follow have to be put in after them.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }
}

/// Where a walk stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum At {
    Page,
    End,
}

/// The same message for the end of its queue, with a note of how it had come there; and without.
pub(super) fn anew(message: &ParkedMessage, queue: &str) -> (Parcel, Parcel) {
    let mut bare = message.parcel();
    straight_to(&mut bare, queue);
    let mut noted = bare.clone();
    if (message.exchange(), message.routing_key()) != ("", queue) {
        note_address(&mut noted, message);
    }
    (noted, bare)
}
