//! What messages are known by, and for how long.

use std::fmt;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use super::Unknown;
use super::high_water::Gaps;
use crate::amqp::{Array, Value};
use crate::clock;
use crate::consumer::Incoming;
use crate::message::Message;

/// Who counts the messages, and the number of this one.
pub(super) const SENDER: &str = "leveret-sender";
pub(super) const SEQUENCE: &str = "leveret-sequence";

/// Numbers that will not come: `17-25`.
pub(super) const GIVEN_UP: &str = "leveret-given-up";

/// Ids of which no more copies come.
const RELEASE: &str = "leveret-release";

/// How long the name of a sender may be, in bytes, as message ids are. Databases have a limit for what they find things by.
const LONGEST_SENDER: usize = 255;

/// How long ids stay beyond their time, because clocks differ.
const SLACK: Duration = Duration::from_secs(60);

/// How an inbox tells messages apart, and how long it remembers them.
///
/// A message is known within its queue: what comes to two queues is handled once in each.
///
/// | what | a message is known by | until |
/// |---|---|---|
/// | [`ids_for`](Self::ids_for) | its message id | a time has passed |
/// | [`until_released`](Self::until_released) | its message id | its sender says that no more copies come |
/// | [`high_water`](Self::high_water) | its sender and number | for ever: a few octets for each sender |
#[derive(Clone)]
#[must_use]
pub struct Remember {
    how: How,
    known_by: Option<KnownBy>,
    scope: Option<String>,
    replies_for: Duration,
    handles_unidentified: bool,
    requires_timestamp: bool,
}

type KnownBy = Arc<dyn Fn(&Incoming) -> Option<Vec<u8>> + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    For(Duration),
    UntilReleased { linger: Duration },
    HighWater(Gaps),
}

/// What a message is to an inbox. This is for who writes one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Known {
    /// It is known by its id.
    Id {
        /// Where ids are unique.
        scope: String,
        /// The id.
        id: Vec<u8>,
    },
    /// It is known by its id, and older than what is remembered: unless it is found all the same, nobody can tell.
    Old {
        /// Where ids are unique.
        scope: String,
        /// The id.
        id: Vec<u8>,
    },
    /// It is known by the number that its sender has given it.
    Number {
        /// Where senders are unique.
        scope: String,
        /// The sender.
        sender: String,
        /// From 1 on.
        number: u64,
        /// What the sender says of others: they do not come.
        given_up: Option<RangeInclusive<u64>>,
    },
    /// It is the word of a sender that no more copies of these come.
    Release {
        /// Where ids are unique.
        scope: String,
        /// Their ids.
        ids: Vec<Vec<u8>>,
    },
    /// It is handled whenever it comes.
    Nothing,
    /// Nobody can tell whether it was handled.
    Unknown(Unknown),
}

impl Remember {
    fn new(how: How) -> Self {
        Remember {
            how,
            known_by: None,
            scope: None,
            replies_for: Duration::from_secs(3600),
            handles_unidentified: false,
            requires_timestamp: false,
        }
    }

    /// Ids, and the replies to requests, for this long after they were handled.
    ///
    /// A message whose `timestamp` is further back is parked as `forgotten`, unless it is still remembered; so the time has to be longer than messages may wait in
    /// queues and parking lots. Of one without a timestamp nobody knows how old it is, and it counts as young, unless
    /// [that is refused](Self::require_timestamp): a copy that comes after the time is then handled again, and nobody hears of it.
    ///
    /// A message that Leveret gives an id has a timestamp as well: by [`Message::identified`], a [`Sequence`](super::Sequence), an
    /// outbox, a call, or a publisher, which knows what it sends
    /// again by it. Who gives ids should give [timestamps](Message::timestamp)
    /// too, both when the message is made and not when it is sent, so that copies have the same.
    pub fn ids_for(time: Duration) -> Self {
        Remember { replies_for: time, ..Remember::new(How::For(time)) }
    }

    /// Ids, and the replies to requests, until their sender [releases](release) them: it has its confirmation and sends no more
    /// copies. Because the broker may still deliver one that it has, they stay for `linger` after that. One that is never
    /// released stays for ever, and so does one that is [released](release) too early.
    pub fn until_released(linger: Duration) -> Self {
        Remember { replies_for: linger, ..Remember::new(How::UntilReleased { linger }) }
    }

    /// A mark for each sender, who counts its messages from 1 on and says so in their headers, as a
    /// [`Sequence`](super::Sequence) does. See [`HighWater`](super::HighWater). The name of a sender has 255 bytes at most, and
    /// none of them is zero; otherwise its messages have nothing to be known by.
    pub fn high_water() -> Self {
        Remember::new(How::HighWater(Gaps::Keep))
    }

    /// What becomes of numbers that are missing below the highest. They are waited for by default.
    pub fn gaps(mut self, gaps: Gaps) -> Self {
        if let How::HighWater(kept) = &mut self.how {
            *kept = gaps;
        }
        self
    }

    /// How long replies are kept where there is only a mark otherwise. An hour by default. Later copies of a request are told
    /// that the reply is forgotten.
    pub fn replies_for(mut self, time: Duration) -> Self {
        if matches!(self.how, How::HighWater(_)) {
            self.replies_for = time;
        }
        self
    }

    /// In place of its message id, a message is known by what this makes of it. `None`, or a panic: by nothing.
    ///
    /// ```
    /// # use leveret::inbox::Remember;
    /// # use std::time::Duration;
    /// // The ids of two applications have nothing to do with each other.
    /// let remember = Remember::ids_for(Duration::from_secs(86_400)).known_by(|incoming| {
    ///     let properties = incoming.properties();
    ///     Some(format!("{} {}", properties.app_id?, properties.message_id?).into_bytes())
    /// });
    /// # let _ = remember;
    /// ```
    pub fn known_by(
        mut self,
        key: impl Fn(&Incoming) -> Option<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        self.known_by = Some(Arc::new(key));
        self
    }

    /// Messages are known within this, and not within their queue: what comes over several queues is handled once.
    pub fn scope(mut self, scope: impl Into<String>) -> Self {
        self.scope = Some(scope.into());
        self
    }

    /// A message that has nothing to be known by is handled whenever it comes, as without an inbox. Without this it is parked.
    pub fn handle_unidentified(mut self) -> Self {
        self.handles_unidentified = true;
        self
    }

    /// A message without a timestamp is parked, where ids are remembered for a time.
    pub fn require_timestamp(mut self) -> Self {
        self.requires_timestamp = true;
        self
    }

    /// What a message is known by. This is for who writes an inbox.
    pub fn read(&self, incoming: &Incoming) -> Known {
        let scope = self.scope.clone().unwrap_or_else(|| incoming.queue().to_owned());
        if let Some(ids) = released(incoming) {
            return Known::Release { scope, ids };
        }
        let found = match self.how {
            How::HighWater(_) => self.number(scope, incoming),
            _ => self.id(scope, incoming),
        };
        match found {
            Some(known) => known,
            None if self.handles_unidentified => Known::Nothing,
            None => Known::Unknown(Unknown::Unidentified),
        }
    }

    fn id(&self, scope: String, incoming: &Incoming) -> Option<Known> {
        let id = match &self.known_by {
            Some(known_by) => made(known_by, incoming)?,
            // To be known by nothing is to be unknown: all of them would be copies of the first.
            None => {
                incoming.properties().message_id.filter(|id| !id.is_empty())?.as_bytes().to_vec()
            }
        };
        let is_old = match self.how {
            How::For(time) => self.is_older_than(time, incoming),
            _ => false,
        };
        Some(match is_old {
            true => Known::Old { scope, id },
            false => Known::Id { scope, id },
        })
    }

    fn is_older_than(&self, time: Duration, incoming: &Incoming) -> bool {
        let Some(seconds) = incoming.properties().timestamp else {
            return self.requires_timestamp;
        };
        let sent = UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
        let expires = sent.and_then(|sent| sent.checked_add(time));
        // One that is said to be of the far future is not old.
        expires.is_some_and(|expires| expires < clock::now())
    }

    fn number(&self, scope: String, incoming: &Incoming) -> Option<Known> {
        let sender = incoming.header(SENDER)?.as_str().filter(|sender| is_name(sender))?.to_owned();
        let number = incoming.header(SEQUENCE)?.as_i64()?;
        let number = u64::try_from(number).ok().filter(|number| *number > 0)?;
        let given_up = incoming.header(GIVEN_UP);
        let given_up = given_up.as_ref().and_then(Value::as_str).and_then(range_of);
        Some(Known::Number { scope, sender, number, given_up })
    }

    /// How long an id is kept that was handled now; `None` if until it is released.
    pub fn keeps_ids_for(&self) -> Option<Duration> {
        match self.how {
            How::For(time) => Some(time.saturating_add(SLACK)),
            How::UntilReleased { .. } => None,
            How::HighWater(_) => Some(self.replies_for),
        }
    }

    /// How long an id is kept that was released now.
    pub fn lingers_for(&self) -> Option<Duration> {
        match self.how {
            How::UntilReleased { linger } => Some(linger),
            _ => None,
        }
    }

    /// What becomes of missing numbers.
    pub fn gaps_policy(&self) -> Gaps {
        match self.how {
            How::HighWater(gaps) => gaps,
            _ => Gaps::Keep,
        }
    }
}

impl fmt::Debug for Remember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remember").field("how", &self.how).finish_non_exhaustive()
    }
}

fn made(known_by: &KnownBy, incoming: &Incoming) -> Option<Vec<u8>> {
    catch_unwind(AssertUnwindSafe(|| known_by(incoming))).unwrap_or_else(|_| {
        let queue = incoming.queue();
        tracing::error!(queue, "what a message is known by could not be made: panic");
        None
    })
}

/// Whether every inbox can know a sender by this: what one cannot write down would be asked for again and again.
pub(super) fn is_name(sender: &str) -> bool {
    (1..=LONGEST_SENDER).contains(&sender.len()) && !sender.contains('\0')
}

/// The numbers of a range that is written as `17-25`.
fn range_of(text: &str) -> Option<RangeInclusive<u64>> {
    let (from, to) = text.split_once('-')?;
    let (from, to) = (from.parse().ok()?, to.parse().ok()?);
    (0 < from && from <= to).then_some(from..=to)
}

fn released(incoming: &Incoming) -> Option<Vec<Vec<u8>>> {
    let bytes = |value: &Value<'_>| value.as_bytes().map(<[u8]>::to_vec);
    match incoming.header(RELEASE)? {
        Value::Array(ids) => Some(ids.iter().filter_map(|id| bytes(&id)).collect()),
        one => Some(bytes(&one).into_iter().collect()),
    }
}

/// The third leg of an exchange: a message by which a sender lets go of others. It has had its confirmation, a reply for
/// example, and sends no more copies of messages with these ids; whoever remembers them
/// [until they are released](Remember::until_released) may forget them. It is published to the queue that they went to, and never
/// reaches the handler.
///
/// Only what is handled by then can be forgotten. A release that overtakes its message, which waits to be tried again or is still
/// at work elsewhere, changes nothing: the message is handled once all the same, and its id stays. So a publisher's confirm is no
/// reason to release: wait for the reply, or for whatever else tells that it was handled.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// # let client = leveret::Client::embedded().await?;
/// # client.apply(&leveret::Topology::new().queue(leveret::Queue::quorum("jobs"))).await?;
/// let publisher = client.publisher("").build().await?;
/// publisher.publish("jobs", leveret::Message::new("work").message_id("job 1")).await?;
/// // … when it has heard that job 1 is done:
/// publisher.publish("jobs", leveret::inbox::release(["job 1"])).await?;
/// # Ok(())
/// # }
/// ```
pub fn release<I: AsRef<str>>(ids: impl IntoIterator<Item = I>) -> Message {
    let ids = ids.into_iter().map(|id| Value::from(id.as_ref().to_owned()));
    match Array::from_values(ids) {
        Ok(ids) => Message::default().header(RELEASE, ids),
        // Text always goes into an array.
        Err(_) => Message::default(),
    }
}
