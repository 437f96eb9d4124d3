//! What goes between a dialect and the rest of the crate.

use std::time::Duration;

use bytes::Bytes;

/// How many lanes an outbox has: the most claims at a time. More would make each search for work more expensive.
pub const LANES: u16 = 64;

/// How many lanes a claim takes at most: a quarter, so that other relays find some too.
pub const LANES_PER_CLAIM: u16 = 16;

/// How many bytes of bodies a claim has at most, give or take the last message of a lane: they are held in memory.
pub const MAX_BYTES: i64 = 16 * 1024 * 1024;

/// How many rows of a table are deleted in one transaction: others wait for it.
pub const ROWS_PER_CLEANUP: i64 = 1000;

/// What an error of the database says about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// It concerns a value, and comes again as often as this message does: it is parked.
    Permanent,
    /// Another transaction has what it waits for.
    Locked,
    /// The database is away, or has chosen another transaction: no failure of the message.
    Passing,
    /// A statement before has failed, so that the transaction takes no more.
    Aborted,
    /// Anything else: a failure of the message.
    Other,
}

/// A sender that numbers its messages.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sender {
    /// Where senders are unique.
    pub scope: String,
    /// Its name.
    pub name: String,
}

/// What a handled message is recorded as.
#[derive(Clone, Debug)]
pub enum Record {
    /// By its id.
    Id {
        /// Where ids are unique.
        scope: String,
        /// The id.
        id: Vec<u8>,
    },
    /// By its number in the mark of its sender.
    Number {
        /// The sender.
        sender: Sender,
        /// From 1 on.
        number: i64,
        /// The mark that this transaction has found or written.
        mark: Vec<u8>,
    },
}

/// A reply, as on the wire.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The encoded properties.
    pub properties: Vec<u8>,
    /// The body.
    pub body: Vec<u8>,
}

/// A message to be written into an outbox.
#[derive(Clone, Debug)]
pub struct NewRow {
    /// Less than [`LANES`].
    pub lane: i16,
    /// Where it goes.
    pub exchange: String,
    /// With this routing key.
    pub routing_key: String,
    /// Messages with the same key are sent in order.
    pub ordering_key: Option<String>,
    /// Whether it has to reach a queue.
    pub mandatory: bool,
    /// The encoded properties.
    pub properties: Bytes,
    /// The body.
    pub body: Bytes,
}

/// What to claim of an outbox.
#[derive(Clone, Debug)]
pub struct ClaimOptions {
    /// How many rows at most, give or take one for each lane.
    pub rows: usize,
    /// Whether a row that was set aside holds back the later rows of its key.
    pub hold_keys: bool,
    /// How long a batch may take. The lanes of a relay that has died are free after this time, or twice as long.
    pub lease: Duration,
    /// A name that no other claim has.
    pub holder: String,
}

/// Rows that no other relay sends now.
#[derive(Debug)]
pub struct Claimed<C> {
    /// In the order of their ids.
    pub rows: Vec<Row>,
    /// The lanes that they are in.
    pub claim: C,
}

/// A row to be sent.
#[derive(Clone, Debug)]
pub struct Row {
    /// Grows in the order of writing.
    pub id: i64,
    /// Messages with the same key are sent in order.
    pub ordering_key: Option<String>,
    /// Where it goes.
    pub exchange: String,
    /// With this routing key.
    pub routing_key: String,
    /// Whether it has to reach a queue.
    pub mandatory: bool,
    /// The encoded properties.
    pub properties: Vec<u8>,
    /// The body.
    pub body: Vec<u8>,
    /// How often the broker has refused it.
    pub attempts: i32,
    /// How long ago it was written, in seconds.
    pub age: f64,
}

/// The outcome of rows.
#[derive(Debug, Default)]
pub struct Settled {
    /// The broker has confirmed these.
    pub sent: Vec<i64>,
    /// Whether those are kept for a while, and not deleted.
    pub keep: bool,
    /// The broker did not take these.
    pub refused: Vec<Refused>,
}

/// A row that the broker did not take.
#[derive(Debug)]
pub struct Refused {
    /// Its id.
    pub id: i64,
    /// Where it should go.
    pub exchange: String,
    /// With this routing key.
    pub routing_key: String,
    /// Why it was refused.
    pub error: String,
    /// When it is tried again, from now on. `None`: it is set aside.
    pub again_in: Option<Duration>,
}

/// A row that was set aside.
#[derive(Clone, Debug)]
pub struct AsideRow {
    /// The row.
    pub row: Row,
    /// Why it was refused the last time.
    pub error: Option<String>,
    /// How long ago it was set aside, in seconds.
    pub since: f64,
}

/// What to do with rows that were set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsideAction {
    /// Send them again.
    SendAgain {
        /// Whether relays are told.
        notify: bool,
    },
    /// Delete them.
    Discard,
}

/// What was done to an outbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Maintained {
    /// Lanes that were missing.
    pub restored: u64,
    /// Rows that were deleted.
    pub deleted: u64,
}

/// The numbers of a sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceNumbers {
    /// All before this one were used.
    pub next: i64,
    /// Up to this one, they may have been used.
    pub reserved: i64,
}
