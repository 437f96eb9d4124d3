//! The faults of a [`FaultProxy`](super::FaultProxy), as they are set at a moment.

use std::num::{NonZeroU64, NonZeroUsize};
use std::time::Duration;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

/// How a connection is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// In good order (FIN): the other side reads an end of file.
    Finish,
    /// Without notice (RST): the other side gets an error.
    Reset,
}

/// Which bytes are inverted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corruption {
    /// The one at this offset of each connection's stream, counted from 0.
    At(u64),
    /// Every one whose offset, counted from 1, is a multiple of this.
    Every(NonZeroU64),
}

impl Corruption {
    /// Corrupts a piece of a stream that begins at this offset.
    pub(super) fn apply(self, piece: &mut [u8], begin: u64) {
        for (offset, byte) in (begin..).zip(piece) {
            let hit = match self {
                Corruption::At(at) => offset == at,
                Corruption::Every(nth) => (offset + 1) % nth == 0,
            };
            if hit {
                *byte = !*byte;
            }
        }
    }
}

/// The state of all switches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Faults {
    pub(super) refusing: bool,
    /// How many cuts there were, and how the last one was done. A connection ends when the number
    /// grows.
    pub(super) cut: (u64, Cut),
    to_server: Flow,
    to_client: Flow,
}

/// The switches of one direction.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Flow {
    pub(super) stalled: bool,
    pub(super) delay: Duration,
    pub(super) split: Option<NonZeroUsize>,
    pub(super) corruption: Option<Corruption>,
}

impl Default for Faults {
    fn default() -> Faults {
        Faults {
            refusing: false,
            cut: (0, Cut::Finish),
            to_server: Flow::default(),
            to_client: Flow::default(),
        }
    }
}

impl Faults {
    /// Takes everything back but the cuts, which have happened.
    pub(super) fn heal(&mut self) {
        *self = Faults { cut: self.cut, ..Faults::default() };
    }

    pub(super) fn flow(&self, direction: Direction) -> Flow {
        match direction {
            Direction::ToServer => self.to_server,
            Direction::ToClient => self.to_client,
        }
    }

    pub(super) fn flow_mut(&mut self, direction: Direction) -> &mut Flow {
        match direction {
            Direction::ToServer => &mut self.to_server,
            Direction::ToClient => &mut self.to_client,
        }
    }
}
