//! Doing work once, however often its message comes.
//!
//! A broker delivers a message again when it has lost the connection over which the ack should have come, and senders send
//! again what was not confirmed. An [`Inbox`] remembers what was done, and a consumer that is given one handles each message
//! [exactly once](crate::ConsumerBuilder::exactly_once): a copy is acked and not handled, and if the message is a request, it
//! gets the very reply that the first one got.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), leveret::Error> {
//! use std::time::Duration;
//! use leveret::inbox::{MemoryInbox, Remember};
//! use leveret::{Client, Message, Queue, Topology};
//! use tokio::sync::mpsc;
//!
//! let client = Client::embedded().await?;
//! client.apply(&Topology::new().queue(Queue::quorum("jobs"))).await?;
//! let publisher = client.publisher("").build().await?;
//! for body in ["first", "a copy of it"] {
//!     publisher.publish("jobs", Message::new(body).message_id("job 1")).await?;
//! }
//! publisher.publish("jobs", Message::new("another").message_id("job 2")).await?;
//!
//! let (sender, mut done) = mpsc::channel(10);
//! let work = move |job: String| {
//!     let sender = sender.clone();
//!     async move { sender.send(job).await }
//! };
//! let summary = client
//!     .consumer("jobs")
//!     .exactly_once(MemoryInbox::new(Remember::ids_for(Duration::from_secs(3600))))
//!     .handle(work)
//!     .run_until(async {
//!         assert_eq!(done.recv().await.unwrap(), "first");
//!         assert_eq!(done.recv().await.unwrap(), "another");
//!     })
//!     .await?;
//! assert_eq!((summary.handled, summary.duplicates), (2, 1));
//! # Ok(())
//! # }
//! ```
//!
//! # What once means
//!
//! The work is done once if the record of the message and the work itself happen together or not at all. That takes a
//! database that has both, and a handler that does its work in the transaction it is given: an inbox in a database has such
//! transactions. A [`MemoryInbox`] has none: it is for tests, for work that is in the same memory, and for effects of which
//! it is enough that they are not repeated as long as the program runs.
//!
//! | what happens | what becomes of it |
//! |---|---|
//! | the handler succeeds, or says that all is [done](crate::Failure::done) already | record and work are committed, the reply goes out, the message is acked |
//! | it says so because the database has refused a statement, which spoils the whole transaction of PostgreSQL | the same with the record alone; nothing of the work stays |
//! | it fails | nothing of it stays, and the message is tried again or parked as the [retry policy](crate::Retry) says |
//! | a method of a service fails, and its caller gets an error | nothing of it stays but the error if that is [permanent](crate::Failure::permanent): copies get the same one. What may pass is told and not recorded, so that a copy may do better |
//! | it fails while copies of its request wait for it | each of them has it called once more, since nothing stays of the call before; so it may fail as often as there are copies, and what one of them has recorded counts for all |
//! | the program or a connection dies before the commit | nothing of it stays; the broker delivers the message again |
//! | the commit fails, and the message is not to blame: the database is away, or has chosen another transaction | nothing of it stays, or all, which nobody knows; the message goes back to its queue, uncounted, and the inbox tells |
//! | it dies after it | the broker delivers the message again; it is a copy, and gets the same reply |
//! | a copy comes while the first one is being handled | it waits for that |
//! | the inbox cannot be asked | the message is held and asked for again; after half a minute it goes back to its queue, uncounted |
//!
//! # What is remembered, and for how long
//!
//! That is what a [`Remember`] says: ids for a while, ids until their sender releases them, or numbers that increase, of
//! which one mark for each sender is enough. What leaves the window is not handled as if it were new: a message without an id, or
//! one that is older than what is remembered, is a failure of the kind `unidentified`, `forgotten`, `given-up` or `gaps`, and
//! parked at once, unless a [rule](crate::RetryPolicy::rule) of the retry policy wants otherwise. Who called is told the same.

use std::any::TypeId;
use std::fmt;
use std::ops::RangeInclusive;
use std::pin::Pin;

use crate::consumer::Incoming;
use crate::error::BoxError;
use crate::message::Message;
use crate::retry::Failure;

mod high_water;
mod memory;
pub(crate) mod once;
mod remember;
mod sequence;

pub use high_water::{Gaps, HighWater, InvalidHighWater, Progress};
pub use memory::MemoryInbox;
pub use remember::{Known, Remember, release};
pub use sequence::{KeepNumbers, Numbers, Sequence, numbered};

/// What an inbox is about to do.
pub type Doing<'a, T> = Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send + 'a>>;

/// Remembers which messages were handled. Use one of those that there are: [`MemoryInbox`], or one in a database.
pub trait Inbox: Send + Sync + 'static {
    /// Begins the work for a message, unless it was done. If a copy of it is at work, that is waited for, within a time.
    ///
    /// An error means that the inbox cannot be asked now: the message is held, and asked for again; unless it is a
    /// [`Failure::permanent`], which is one of the message.
    fn open<'a>(&'a self, incoming: &'a Incoming) -> Doing<'a, Opened>;

    /// Begins the work for several messages, which is committed together. Of two copies among them one is new.
    ///
    /// After a [`Failure::permanent`] each is asked for on its own. An inbox that does not say otherwise has no batches.
    fn open_batch<'a>(&'a self, batch: &'a [Incoming]) -> Doing<'a, OpenedBatch> {
        let _ = batch;
        Box::pin(std::future::ready(Err("this inbox has no batches".into())))
    }

    /// Whether handlers may take values of this type, which its [`Work`] puts into the message, as arguments.
    #[doc(hidden)]
    fn lends(&self, _argument: TypeId) -> bool {
        true
    }
}

/// What an [`Inbox`] knows of several messages.
pub struct OpenedBatch {
    /// The work for those that are new.
    pub work: Box<dyn Work>,
    /// Of each message, in the order of the batch.
    pub messages: Vec<Standing>,
}

/// What an [`Inbox`] knows of one message of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It was not handled before.
    New,
    /// It was, or a copy of it is handled with this batch.
    Done,
    /// It is the sender's word that no more copies of others come, and they are forgotten.
    Released,
    /// Nobody can tell whether it was handled.
    Unknown(Unknown),
}

/// What an [`Inbox`] knows of a message.
pub enum Opened {
    /// It was not handled before.
    New(Box<dyn Work>),
    /// It was, with this reply if it had one that is still known.
    Done(Option<Message>),
    /// It is the sender's word that no more copies of others come, and they are forgotten.
    Released,
    /// Nobody can tell whether it was handled.
    Unknown(Unknown),
}

/// The work for a message: what its handler changes, and the record that it was handled. Dropped, nothing of it stays.
pub trait Work: Send {
    /// Puts what the handler may take as arguments into the message, see [`Incoming::lend`].
    fn lend(&mut self, incoming: &mut Incoming) {
        let _ = incoming;
    }

    /// Makes the work permanent, and the message known as handled, with its reply; all of that or nothing. An error is a failure
    /// of the message, unless it is a [`Failure::requeue`], as for a database that cannot be reached.
    fn commit(self: Box<Self>, changes: Changes, reply: Option<&Message>) -> Doing<'_, Report>;
}

/// What becomes of that which a handler has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changes {
    /// It stays.
    Keep,
    /// It stays if nothing of it was refused, and is undone otherwise. The message is handled either way: its handler says that
    /// all was [done](crate::Failure::done) before, and may know that because it was refused.
    KeepIfSound,
    /// It is undone, because the handler has failed; and yet the message is handled, and its reply says so.
    Undo,
}

/// What there is to say about a commit; mostly nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Numbers that are no longer waited for, with their sender. It is told by an event, a counter and a line in the log.
    pub given_up: Vec<(String, RangeInclusive<u64>)>,
}

impl Report {
    /// These numbers of a sender are no longer waited for.
    pub fn give_up(
        &mut self,
        sender: &str,
        numbers: impl IntoIterator<Item = RangeInclusive<u64>>,
    ) {
        let sender = |numbers| (sender.to_owned(), numbers);
        self.given_up.extend(numbers.into_iter().map(sender));
    }
}

/// Why nobody can tell whether a message was handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Unknown {
    /// It has nothing to be known by.
    Unidentified,
    /// It is older than what is remembered.
    Forgotten,
    /// Its number was given up.
    GivenUp,
    /// So many numbers before it are missing that there is no room to remember one more gap.
    Gaps,
}

impl Unknown {
    /// A word for it: the kind of the failure that it is.
    pub fn as_str(self) -> &'static str {
        match self {
            Unknown::Unidentified => "unidentified",
            Unknown::Forgotten => "forgotten",
            Unknown::GivenUp => "given-up",
            Unknown::Gaps => "gaps",
        }
    }

    pub(crate) fn failure(self) -> Failure {
        Failure::permanent(self.to_string()).kind(self.as_str())
    }
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unknown::Unidentified => {
                "the message has nothing to be known by, so that it could not be handled exactly once: its sender has to \
                 give it a message id, or a sender and a number"
            }
            Unknown::Forgotten => {
                "the message is older than what the inbox remembers, so that nobody knows whether it was handled"
            }
            Unknown::GivenUp => {
                "the number of the message was missing for long and given up, so that nobody knows whether it was handled"
            }
            Unknown::Gaps => {
                "too many messages of its sender are missing, so that there is no room to remember this one"
            }
        })
    }
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Opened::New(_) => f.write_str("New"),
            Opened::Done(reply) => f.debug_tuple("Done").field(reply).finish(),
            Opened::Released => f.write_str("Released"),
            Opened::Unknown(unknown) => f.debug_tuple("Unknown").field(unknown).finish(),
        }
    }
}
