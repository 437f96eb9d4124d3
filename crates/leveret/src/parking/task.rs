//! Something done with the messages of a parking lot: replay, move, purge, or nothing but to look.
//!
//! ```text
//!  Walk --> is it meant? --no--> left at its place
//!                |
//!               yes --> parcel --> Convoy --> confirmed --> ack
//!                                        +-> refused ---> left at its place
//! ```

use std::fmt;
use std::ops::ControlFlow;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep_until};

use super::convoy::{Convoy, MAX_LOSSES, is_about_message, is_loss};
use super::filter::Filter;
use super::message::ParkedMessage;
use super::target::{Draft, Router, Target, reset, straight_to};
use super::walk::{Place, Taken, Walk};
use crate::client::Client;
use crate::error::{Error, ErrorKind};
use crate::mover::Parcel;
use crate::retry::stamp::header;

/// How many messages that were not done are named.
const MAX_NAMED: usize = 100;

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
    /// How many of those have left the lot; in a dry run, how many would have.
    pub done: u64,
    /// How many of those could not be sent on, and stay in the lot.
    pub failed: u64,
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

type Edit<'a> = Box<dyn FnMut(&ParkedMessage, &mut Draft) + Send + 'a>;
type Look<'a> = Box<dyn FnMut(&ParkedMessage) -> ControlFlow<()> + Send + 'a>;
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
/// Messages are taken one after the other from the head of the lot. One that is sent on leaves the lot only when that is
/// confirmed: if something breaks in between, it may be sent twice, and is never lost. One that is not meant, or that the
/// broker does not take, keeps its place. A lost connection is made again, and the task goes on. It ends with the messages
/// that were there when it began, so what fails again and comes back is not replayed for ever.
#[must_use = "nothing is done before it is run"]
pub struct Task<'a> {
    client: Client,
    queue: String,
    action: Action<'a>,
    filter: Filter,
    limit: u64,
    rate: Option<f64>,
    is_dry: bool,
    report: Option<Report<'a>>,
}

impl<'a> Task<'a> {
    pub(super) fn new(client: &Client, queue: &str, action: Action<'a>) -> Self {
        Task {
            client: client.clone(),
            queue: queue.to_owned(),
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
    /// If it fails, or is dropped, what was done until then is done.
    pub async fn run(self) -> Result<Progress, Error> {
        let pace = Pace::new(self.rate)?;
        if let Action::Move(Target::Origin) = self.action {
            let text = "a message is moved to another queue or exchange; to where it came from, it is replayed";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        if self.drops_everything() {
            return self.purge().await;
        }
        let convoy = Convoy::new(&self.client, "sending on a parked message");
        let router = Router::new(&self.client, &self.queue);
        let progress = Progress::default();
        let began = SystemTime::now();
        let mut run = Run { task: self, convoy, router, pace, progress, began, walks: 0 };
        run.finish().await?;
        Ok(run.progress)
    }
}

impl Task<'_> {
    /// Whether the broker can do it alone.
    fn drops_everything(&self) -> bool {
        let is_whole = self.filter.is_all() && self.limit == u64::MAX && self.rate.is_none();
        matches!(self.action, Action::Purge) && is_whole && !self.is_dry
    }

    async fn purge(mut self) -> Result<Progress, Error> {
        let count = u64::from(self.client.purge_queue(&self.queue).await?);
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
            .field("queue", &self.queue)
            .field("filter", &self.filter)
            .field("limit", &self.limit)
            .field("rate", &self.rate)
            .field("is_dry", &self.is_dry)
            .finish_non_exhaustive()
    }
}

/// A task under way.
struct Run<'a> {
    task: Task<'a>,
    convoy: Convoy<Sent>,
    router: Router,
    pace: Pace,
    progress: Progress,
    began: SystemTime,
    walks: u32,
}

/// A message that was sent on and whose original is still in the lot.
struct Sent {
    place: Place,
    position: u64,
    message_id: Option<String>,
    purpose: Purpose,
}

/// Why a message is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// To leave the lot.
    Leave,
    /// To stay in it, as a new message.
    Renew,
}

impl Run<'_> {
    async fn finish(&mut self) -> Result<(), Error> {
        let mut left = None;
        let mut losses = 0;
        loop {
            let done = self.progress.done;
            match self.walk(&mut left).await {
                Ok(()) => return Ok(()),
                Err(error) if is_loss(&error) => {
                    losses = if self.progress.done > done { 1 } else { losses + 1 };
                    if losses > MAX_LOSSES {
                        return Err(error);
                    }
                    tracing::warn!(queue = self.task.queue, "begins anew at the head: {error}");
                    self.convoy.clear();
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Goes through the lot once. `left` is how many of the messages that were there at first may still be there.
    async fn walk(&mut self, left: &mut Option<u64>) -> Result<(), Error> {
        let (mut walk, depth) = Walk::begin(&self.task.client, &self.task.queue).await?;
        self.walks += 1;
        let total = *left.get_or_insert(depth);
        if self.walks == 1 {
            self.progress.total = total;
        } else {
            self.progress.seen = self.progress.total.saturating_sub(total);
            self.progress.selected = self.progress.done;
            self.progress.failed = 0;
            self.progress.not_done.clear();
        }
        if let Action::Look(_) = self.task.action {
            (self.progress.selected, self.progress.done) = (0, 0);
        }
        let mut gone = self.go(&mut walk, total).await;
        if gone.is_ok() {
            gone = walk.end().await;
        }
        let is_look = matches!(self.task.action, Action::Look(_));
        match gone {
            // What was only looked at is back at its place, whoever has closed the channel.
            Err(error) if is_look && walk.is_over() && is_loss(&error) => Ok(()),
            Err(error) => {
                *left = Some(total.saturating_sub(walk.acked_for_sure()));
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }

    async fn go(&mut self, walk: &mut Walk, total: u64) -> Result<(), Error> {
        let last = self.task.filter.last_position().unwrap_or(u64::MAX);
        let mut left = total.min(last);
        while left > 0 && !self.is_enough() {
            let page = walk.page(left.min(self.page_limit())).await?;
            if page.is_empty() {
                break;
            }
            left = left.saturating_sub(page.len() as u64);
            let mut stop = false;
            for taken in page {
                if stop || self.is_enough() {
                    self.leave(walk, taken.place, &taken.message).await?;
                    continue;
                }
                stop = self.visit(walk, taken).await?.is_break();
            }
            if stop {
                break;
            }
        }
        self.settle_all(walk).await?;
        while walk.is_among_returned() {
            for taken in walk.page(u64::MAX).await? {
                self.leave(walk, taken.place, &taken.message).await?;
            }
        }
        self.settle_all(walk).await
    }

    fn is_enough(&self) -> bool {
        self.progress.selected >= self.task.limit
    }

    /// How many messages to take at once: none that will not be needed, and none that would be held for long.
    fn page_limit(&self) -> u64 {
        let needed = match self.task.filter.is_all() {
            true => self.task.limit.saturating_sub(self.progress.selected),
            false => u64::MAX,
        };
        needed.min(self.pace.in_a_minute())
    }

    async fn visit(&mut self, walk: &mut Walk, taken: Taken) -> Result<ControlFlow<()>, Error> {
        let Taken { place, message } = taken;
        self.progress.seen += 1;
        let mut flow = ControlFlow::Continue(());
        if !self.is_meant(&message) {
            self.leave(walk, place, &message).await?;
            return Ok(flow);
        }
        self.progress.selected += 1;
        if let Action::Look(look) = &mut self.task.action {
            flow = look(&message);
            self.leave(walk, place, &message).await?;
            self.progress.done += 1;
        } else if let Action::Purge = self.task.action {
            match self.task.is_dry {
                true => self.leave(walk, place, &message).await?,
                false => {
                    self.keep_pace(walk).await?;
                    walk.ack(place)?;
                }
            }
            self.progress.done += 1;
        } else {
            self.send_on(walk, place, &message).await?;
        }
        self.tell();
        Ok(flow)
    }

    fn is_meant(&self, message: &ParkedMessage) -> bool {
        // It has failed again since the task began, and was seen before the connection was lost.
        let is_back = self.walks > 1 && message.story().last_failure > Some(self.began);
        !is_back && self.task.filter.matches(message, SystemTime::now())
    }

    async fn send_on(
        &mut self,
        walk: &mut Walk,
        place: Place,
        message: &ParkedMessage,
    ) -> Result<(), Error> {
        let parcel = match self.checked_parcel(message).await {
            Ok(parcel) => parcel,
            Err(error) if is_about_message(&error) => {
                self.not_done(message.position(), message.message_id(), error);
                return self.leave(walk, place, message).await;
            }
            Err(error) => return Err(error),
        };
        if self.task.is_dry {
            self.progress.done += 1;
            return self.leave(walk, place, message).await;
        }
        self.keep_pace(walk).await?;
        self.send(walk, place, message, parcel, Purpose::Leave).await
    }

    /// The same as [`parcel`](Self::parcel), and if nothing is to be sent, whether it could be.
    async fn checked_parcel(&mut self, message: &ParkedMessage) -> Result<Parcel, Error> {
        let parcel = self.parcel(message).await?;
        if self.task.is_dry {
            self.convoy.check(parcel.clone()).await?;
        }
        Ok(parcel)
    }

    /// The message in the form and with the address in which it is sent on.
    async fn parcel(&mut self, message: &ParkedMessage) -> Result<Parcel, Error> {
        let mut parcel = message.parcel();
        let target = match &mut self.task.action {
            Action::Replay { target, edit } => {
                reset(&mut parcel);
                match edit {
                    None => target.clone(),
                    Some(edit) => edited(&mut parcel, target.clone(), edit, message),
                }
            }
            Action::Move(target) => {
                note_address(&mut parcel, message);
                target.clone()
            }
            Action::Look(_) | Action::Purge => Target::Origin,
        };
        self.router.address(&mut parcel, &target, message).await?;
        Ok(parcel)
    }

    async fn send(
        &mut self,
        walk: &mut Walk,
        place: Place,
        message: &ParkedMessage,
        parcel: Parcel,
        purpose: Purpose,
    ) -> Result<(), Error> {
        let (position, message_id) = (message.position(), message.message_id());
        let sent = self.convoy.send(Sent { place, position, message_id, purpose }, parcel).await;
        // Before all else: what is confirmed need not be sent twice.
        self.settle(walk)?;
        sent
    }

    /// Stays in the lot; where looking at it wears it out, as a new message at the end.
    async fn leave(
        &mut self,
        walk: &mut Walk,
        place: Place,
        message: &ParkedMessage,
    ) -> Result<(), Error> {
        if !walk.wears_out(message).await {
            walk.leave(place);
            return Ok(());
        }
        let mut parcel = message.parcel();
        note_address(&mut parcel, message);
        parcel.remove("x-delivery-count");
        straight_to(&mut parcel, &self.task.queue);
        self.send(walk, place, message, parcel, Purpose::Renew).await
    }

    /// Does what outcomes of messages under way ask for.
    fn settle(&mut self, walk: &mut Walk) -> Result<(), Error> {
        while let Some((sent, outcome)) = self.convoy.settled() {
            match outcome {
                Ok(()) => {
                    walk.ack(sent.place)?;
                    if sent.purpose == Purpose::Leave {
                        self.progress.done += 1;
                        self.tell();
                    }
                }
                Err(error) => {
                    walk.leave(sent.place);
                    self.not_done(sent.position, sent.message_id, error);
                }
            }
        }
        Ok(())
    }

    fn not_done(&mut self, position: u64, message_id: Option<String>, error: Error) {
        self.progress.failed += 1;
        if self.progress.not_done.len() < MAX_NAMED {
            self.progress.not_done.push(NotDone { position, message_id, error });
        }
        self.tell();
    }

    async fn settle_all(&mut self, walk: &mut Walk) -> Result<(), Error> {
        let settled = self.convoy.settle_all().await;
        self.settle(walk)?;
        settled
    }

    /// Waits for its time. What is under way is settled meanwhile.
    async fn keep_pace(&mut self, walk: &mut Walk) -> Result<(), Error> {
        if let Some(at) = self.pace.next() {
            self.settle_all(walk).await?;
            sleep_until(at).await;
        }
        Ok(())
    }

    fn tell(&mut self) {
        if let Some(report) = &mut self.task.report {
            report(&self.progress);
        }
    }
}

/// What is left of a parcel after somebody has changed it.
fn edited(
    parcel: &mut Parcel,
    target: Target,
    edit: &mut Edit<'_>,
    message: &ParkedMessage,
) -> Target {
    let properties = std::mem::take(&mut parcel.properties);
    let mut draft = Draft { body: parcel.body.clone(), properties, target };
    edit(message, &mut draft);
    parcel.body = draft.body;
    parcel.properties = draft.properties;
    draft.target
}

/// How it had been published is noted, if it is not yet: it gets another address.
pub(super) fn note_address(parcel: &mut Parcel, message: &ParkedMessage) {
    let story = message.story();
    if story.exchange.is_none() {
        parcel.set(header::EXCHANGE, message.exchange());
    }
    if story.routing_key.is_none() {
        parcel.set(header::ROUTING_KEY, message.routing_key());
    }
}

/// A rate that is lower than one message in this time, a year, is taken for that.
const LONGEST_PACE: Duration = Duration::from_secs(365 * 86_400);

/// When the next message may go.
#[derive(Debug)]
pub(super) struct Pace {
    every: Option<Duration>,
    next: Instant,
}

impl Pace {
    pub(super) fn new(rate: Option<f64>) -> Result<Self, Error> {
        let every = match rate {
            None => None,
            Some(rate) if rate > 0.0 => {
                let every = Duration::try_from_secs_f64(1.0 / rate).unwrap_or(LONGEST_PACE);
                Some(every.min(LONGEST_PACE))
            }
            Some(rate) => {
                let text = format!("{rate} messages a second is no rate: it has to be above 0");
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        };
        Ok(Pace { every, next: Instant::now() })
    }

    /// When the next message may go, if that is not now.
    pub(super) fn next(&mut self) -> Option<Instant> {
        let every = self.every?;
        let now = Instant::now();
        let at = self.next.max(now);
        self.next = at + every;
        (at > now).then_some(at)
    }

    /// How many messages go in a minute.
    fn in_a_minute(&self) -> u64 {
        match self.every {
            None => u64::MAX,
            Some(every) => (60.0 / every.as_secs_f64()).clamp(1.0, 1e9) as u64,
        }
    }
}
