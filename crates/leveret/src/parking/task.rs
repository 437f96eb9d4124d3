//! Something to be done with the messages of a parking lot: replay, move, purge, or nothing but to look.

use std::fmt;
use std::ops::ControlFlow;

use super::ParkingLot;
use super::filter::Filter;
use super::message::ParkedMessage;
use super::rate::RateLimiter;
use super::run::TaskRun;
use super::target::{Draft, Target};
use crate::error::{Error, ErrorKind};

/// How far a task has come; at its end, what it has done.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Progress {
    /// How many messages the lot had when the task began. What comes later is left alone.
    pub total: u64,
    /// How many of them were looked at.
    pub seen: u64,
    /// How many of those were meant.
    pub selected: u64,
    /// How many of those have left the lot; in a dry run, how many would have. If others add or take messages while a lost connection
    /// comes back, the count may be wrong by what was in flight.
    pub done: u64,
    /// How many of those could not be sent on, and stay in the lot.
    pub failed: u64,
    /// How many messages at most may have been sent twice: they were in flight when a connection was lost, sent and not confirmed, or
    /// confirmed with an ack that the broker may not have taken.
    pub possibly_duplicated: u64,
    /// Which, and why: the first hundred.
    pub not_done: Vec<NotDone>,
}

/// A message that stays in the lot, because it could not be sent on.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NotDone {
    /// Its place.
    pub position: u64,
    /// Its id, if it has one.
    pub message_id: Option<String>,
    /// Why.
    pub error: Error,
}

pub(super) type Edit<'a> = Box<dyn FnMut(&ParkedMessage, &mut Draft) + Send + 'a>;
/// Is told which scan a message is of: after a lost connection there is another one.
type Look<'a> = Box<dyn FnMut(u32, &ParkedMessage) -> ControlFlow<()> + Send + 'a>;
pub(super) type Report<'a> = Box<dyn FnMut(&Progress) + Send + 'a>;

/// What is done with each message.
pub(super) enum Action<'a> {
    Look(Look<'a>),
    Replay { target: Target, edit: Option<Edit<'a>> },
    Move(Target),
    Purge,
}

/// Something to be done with messages of a [`ParkingLot`](super::ParkingLot): [`run`](Task::run) does it.
///
/// A task takes messages from the head of the lot. One that is sent on leaves the lot only when that is confirmed. One that the
/// filter does not select, or that the broker does not take, keeps its place. The task ends with the messages that were there when
/// it began, so what fails again and comes back is not replayed for ever.
///
/// After a lost connection the task begins again at the head, as soon as the broker has given back what was out. It sends again at
/// most what was in flight: [`Progress::possibly_duplicated`].
#[must_use = "nothing is done before it is run"]
pub struct Task<'a> {
    pub(super) lot: ParkingLot,
    pub(super) action: Action<'a>,
    pub(super) filter: Filter,
    pub(super) limit: u64,
    pub(super) rate: Option<f64>,
    pub(super) is_dry: bool,
    pub(super) report: Option<Report<'a>>,
}

impl<'a> Task<'a> {
    pub(super) fn new(lot: &ParkingLot, action: Action<'a>) -> Self {
        Task {
            lot: lot.clone(),
            action,
            filter: Filter::new(),
            limit: u64::MAX,
            rate: None,
            is_dry: false,
            report: None,
        }
    }

    /// With these messages. By default with all.
    pub fn filter(mut self, filter: Filter) -> Self {
        if filter.last_position().is_some() {
            // Another message has its place once it is gone.
            self.limit = self.limit.min(1);
        }
        self.filter = filter;
        self
    }

    /// With so many messages at most.
    pub fn limit(mut self, messages: u64) -> Self {
        self.limit = self.limit.min(messages);
        self
    }

    /// With so many messages a second at most.
    pub fn rate(mut self, messages_per_second: f64) -> Self {
        self.rate = Some(messages_per_second);
        self
    }

    /// Only finds out what would be done, and whether it could be: whether there is a way for each message, and whether it can
    /// be sent. What only the broker knows shows when it is done: that an exchange has no queue for a message, that a queue
    /// is full, that the user may not publish there.
    pub fn dry_run(mut self) -> Self {
        self.is_dry = true;
        self
    }

    /// Is told how far it has come, after each message that is meant.
    pub fn progress(mut self, report: impl FnMut(&Progress) + Send + 'a) -> Self {
        self.report = Some(Box::new(report));
        self
    }

    /// Does it, and says what was done. Messages that could not be sent on are no error: they are counted and named.
    ///
    /// If it fails, or is dropped, what was done until then is done, and what it holds goes back into the lot.
    pub async fn run(self) -> Result<Progress, Error> {
        let rate = RateLimiter::new(self.rate)?;
        if let Action::Move(Target::Origin) = self.action {
            let text = "a message is moved to another queue or exchange; to where it came from, it is replayed";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        if self.drops_everything() {
            return self.purge().await;
        }
        TaskRun::new(self, rate).finish().await
    }
}

impl Task<'_> {
    /// Whether nothing is to leave the lot.
    pub(super) fn only_looks(&self) -> bool {
        self.is_dry || matches!(self.action, Action::Look(_))
    }

    /// Whether messages are published.
    pub(super) fn sends(&self) -> bool {
        !self.is_dry && matches!(self.action, Action::Replay { .. } | Action::Move(_))
    }

    /// Whether they are published to one queue for certain.
    pub(super) fn goes_to_queue(&self) -> bool {
        use Target::Queue;
        let action = &self.action;
        matches!(action, Action::Replay { target: Queue(_), edit: None } | Action::Move(Queue(_)))
    }

    /// Whether the broker can do it alone.
    fn drops_everything(&self) -> bool {
        let is_whole = self.filter.is_all() && self.limit == u64::MAX && self.rate.is_none();
        matches!(self.action, Action::Purge) && is_whole && !self.is_dry
    }

    async fn purge(mut self) -> Result<Progress, Error> {
        let count = u64::from(self.lot.client.purge_queue(&self.lot.queue).await?);
        let progress = Progress {
            total: count,
            seen: count,
            selected: count,
            done: count,
            ..Progress::default()
        };
        if let Some(report) = &mut self.report {
            report(&progress);
        }
        Ok(progress)
    }
}

impl fmt::Debug for Task<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task")
            .field("queue", &self.lot.queue)
            .field("filter", &self.filter)
            .field("limit", &self.limit)
            .field("rate", &self.rate)
            .field("is_dry", &self.is_dry)
            .finish_non_exhaustive()
    }
}
