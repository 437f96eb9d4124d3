//! Something done with the messages of a parking lot: replay, move, purge, or nothing but to look.
//!
//! ```text
//!  Walk --> is it meant? --no--> stays at its place
//!                |
//!               yes --> parcel --> Convoy --> confirmed --> ack
//!                                        +-> refused ---> stays at its place
//! ```
//!
//! What stays is left, or with its page put in anew at the end of the queue, if the walk says so. Then all that follow have to
//! go the same way, whether they are of interest or not.

use std::fmt;
use std::ops::ControlFlow;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use tokio::time::{Instant, sleep, sleep_until};

use super::convoy::{Convoy, MAX_LOSSES, is_about_message, is_loss};
use super::filter::Filter;
use super::message::ParkedMessage;
use super::staying::{At, Staying, anew};
use super::target::{Draft, Router, Target, reset};
use super::walk::{Taken, Walk};
use crate::amqp::RawProperties;
use crate::client::Client;
use crate::error::{Error, ErrorKind};
use crate::mover::Parcel;
use crate::random;
use crate::retry::stamp::header;

/// How many messages that were not done are named.
const MAX_NAMED: usize = 100;

/// How long to wait for room in a full queue.
const PAUSE: Duration = Duration::from_millis(100);

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
        let staying = Staying::default();
        let mut run = Run { task: self, convoy, router, pace, staying, progress, began, walks: 0 };
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
    staying: Staying,
    progress: Progress,
    began: SystemTime,
    walks: u32,
}

/// A message that was sent on and whose original is still in the lot.
struct Sent {
    taken: Taken,
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

    /// Goes through the lot once. `left` is how many of the messages that were there at first may still be there, or at their
    /// old place.
    async fn walk(&mut self, left: &mut Option<u64>) -> Result<(), Error> {
        let (mut walk, depth) = Walk::begin(&self.task.client, &self.task.queue).await?;
        self.walks += 1;
        let mut total = *left.get_or_insert(depth);
        if self.walks == 1 {
            self.progress.total = total;
        }
        // If an earlier look was cut off, the first message is no longer at the head, and some may be there twice.
        let mut before = 0;
        if walk.renews() && self.is_look() && self.walks > 1 {
            before = total % self.progress.total.max(1);
            total = depth.max(self.progress.total);
        }
        self.set_out(&mut walk, total).await?;
        let mut gone = self.restore_order(&mut walk, before).await;
        if gone.is_ok() {
            gone = self.go(&mut walk, total).await;
        }
        if gone.is_ok() {
            gone = walk.end().await;
        }
        match gone {
            // What was only looked at is back at its place, whoever has closed the channel.
            Err(error) if self.is_look() && walk.is_over() && is_loss(&error) => Ok(()),
            Err(error) => {
                *left = Some((before + total).saturating_sub(walk.acked_for_sure()));
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }

    /// What is to be known before the first message is taken.
    async fn set_out(&mut self, walk: &mut Walk, total: u64) -> Result<(), Error> {
        self.staying.forget();
        let gone = self.progress.total.saturating_sub(total);
        if self.is_look() {
            (self.progress.seen, self.progress.selected, self.progress.done) = (0, 0, 0);
        } else if self.walks > 1 {
            self.progress.seen = gone;
            if walk.renews() {
                // What could not be sent on is put in anew as well, and not met again.
                walk.go_on_after(gone);
            } else {
                self.progress.failed = 0;
                self.progress.not_done.clear();
            }
            self.progress.selected = self.progress.done + self.progress.failed;
        }
        let is_whole = self.task.filter.is_all() && !self.task.is_dry && !self.is_look();
        match walk.renews() && !is_whole && total > 0 {
            true => self.check_renewing().await,
            false => Ok(()),
        }
    }

    /// Whether messages can be put in anew: better not to take any if not.
    async fn check_renewing(&mut self) -> Result<(), Error> {
        let key = format!("leveret.nowhere.{:x}", random::number());
        let nowhere = Parcel::new(String::new(), key, &RawProperties::default(), &Bytes::new());
        match self.convoy.deliver(nowhere).await {
            Err(error) if error.kind() == ErrorKind::Refused => {
                let text = format!(
                    "looking into queue {:?} may cost its messages: brokers before RabbitMQ 4.3 count what is given back to a \
                     quorum queue. To put them in anew instead, this user needs the permission to write to the default \
                     exchange",
                    self.task.queue
                );
                Err(Error::caused(ErrorKind::Refused, text, error))
            }
            Err(error) if error.kind() != ErrorKind::Unroutable => Err(error),
            _ => Ok(()),
        }
    }

    async fn go(&mut self, walk: &mut Walk, total: u64) -> Result<(), Error> {
        let last = self.task.filter.last_position().unwrap_or(u64::MAX);
        let mut left = total;
        let mut stop = false;
        while left > 0 && !stop && !self.is_enough() && walk.seen() < last {
            let most = left.min(last - walk.seen()).min(self.page_limit());
            let page = walk.page(most).await?;
            if page.is_empty() {
                break;
            }
            left = left.saturating_sub(page.len() as u64);
            for taken in page {
                if stop || self.is_enough() {
                    self.stay(walk, taken);
                    continue;
                }
                stop = self.visit(walk, taken).await?.is_break();
            }
            self.put_back(walk, At::Page).await?;
        }
        self.settle_all(walk).await?;
        if self.staying.has_begun() {
            self.pass_by(walk, left).await?;
        }
        while walk.is_among_returned() {
            for taken in walk.page(u64::MAX).await? {
                self.stay(walk, taken);
            }
        }
        self.put_back_rest(walk).await
    }

    /// Goes past so many messages that are put in anew: as often as there are, and all are in their order again.
    async fn pass_by(&mut self, walk: &mut Walk, messages: u64) -> Result<(), Error> {
        let seen = walk.seen();
        let mut left = messages;
        while left > 0 {
            let page = walk.page(left).await?;
            if page.is_empty() {
                break;
            }
            left = left.saturating_sub(page.len() as u64);
            for taken in page {
                self.stay(walk, taken);
            }
            self.put_back(walk, At::Page).await?;
        }
        walk.go_on_after(seen);
        Ok(())
    }

    /// Puts in anew what a look that was cut off did not come to.
    async fn restore_order(&mut self, walk: &mut Walk, messages: u64) -> Result<(), Error> {
        if messages == 0 {
            return Ok(());
        }
        self.pass_by(walk, messages).await?;
        self.put_back_rest(walk).await
    }

    fn is_look(&self) -> bool {
        matches!(self.task.action, Action::Look(_))
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
        self.progress.seen += 1;
        let mut flow = ControlFlow::Continue(());
        if !self.is_meant(&taken.message) {
            self.stay(walk, taken);
            return Ok(flow);
        }
        self.progress.selected += 1;
        if let Action::Look(look) = &mut self.task.action {
            flow = look(&taken.message);
            self.stay(walk, taken);
            self.progress.done += 1;
        } else if let Action::Purge = self.task.action {
            match self.task.is_dry {
                true => self.stay(walk, taken),
                false => {
                    self.keep_pace(walk).await?;
                    walk.ack(taken.place)?;
                }
            }
            self.progress.done += 1;
        } else {
            self.send_on(walk, taken).await?;
        }
        self.tell();
        Ok(flow)
    }

    fn is_meant(&self, message: &ParkedMessage) -> bool {
        // It has failed again since the task began, and was seen before the connection was lost.
        let is_back = self.walks > 1 && message.story().last_failure > Some(self.began);
        !is_back && self.task.filter.matches(message, SystemTime::now())
    }

    async fn send_on(&mut self, walk: &mut Walk, taken: Taken) -> Result<(), Error> {
        let parcel = match self.checked_parcel(&taken.message).await {
            Ok(parcel) => parcel,
            Err(error) if is_about_message(&error) => {
                self.not_done(&taken.message, error);
                self.stay(walk, taken);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if self.task.is_dry {
            self.progress.done += 1;
            self.stay(walk, taken);
            return Ok(());
        }
        self.keep_pace(walk).await?;
        self.send(walk, Sent { taken, purpose: Purpose::Leave }, parcel).await
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

    async fn send(&mut self, walk: &mut Walk, sent: Sent, parcel: Parcel) -> Result<(), Error> {
        let result = self.convoy.send(sent, parcel).await;
        // Before all else: what is confirmed need not be sent twice.
        self.settle(walk)?;
        result
    }

    /// Stays in the lot.
    fn stay(&mut self, walk: &mut Walk, taken: Taken) {
        match walk.renews() {
            true => self.staying.hold(taken),
            false => walk.leave(taken.place),
        }
    }

    /// Puts what stays at the end of the queue, if the walk may not leave it at its place. What could not be sent on is one of
    /// them, so that is waited for.
    async fn put_back(&mut self, walk: &mut Walk, at: At) -> Result<(), Error> {
        if !walk.renews() {
            return Ok(());
        }
        self.settle_all(walk).await?;
        let due = self.staying.due(walk, at);
        if !due.is_empty() {
            // What is no longer in our hands would be there twice.
            walk.check_held().await?;
        }
        for taken in due {
            let parcel = self.parcel_anew(&taken.message).await;
            self.send(walk, Sent { taken, purpose: Purpose::Renew }, parcel).await?;
        }
        self.settle_all(walk).await?;
        // A full queue takes messages again once many are out; but not any number can be.
        match self.staying.is_full() {
            true => Err(self.no_room()),
            false => Ok(()),
        }
    }

    /// The same at the end, with a while of patience.
    async fn put_back_rest(&mut self, walk: &mut Walk) -> Result<(), Error> {
        let deadline = Instant::now() + self.task.client.core().options.timeout;
        loop {
            self.put_back(walk, At::End).await?;
            if self.staying.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(self.no_room());
            }
            sleep(PAUSE).await;
        }
    }

    fn no_room(&self) -> Error {
        let text = format!(
            "queue {:?} takes no messages, so that what was taken out of it to be looked at goes back by the broker, which \
             may count that",
            self.task.queue
        );
        Error::new(ErrorKind::Nacked, text)
    }

    async fn parcel_anew(&mut self, message: &ParkedMessage) -> Parcel {
        let (noted, bare) = anew(message, &self.task.client.queue_name(&self.task.queue));
        match bare {
            Some(bare) if self.convoy.check(noted.clone()).await.is_err() => bare,
            _ => noted,
        }
    }

    /// Does what outcomes of messages under way ask for.
    fn settle(&mut self, walk: &mut Walk) -> Result<(), Error> {
        while let Some((Sent { taken, purpose }, outcome)) = self.convoy.settled() {
            match (outcome, purpose) {
                (Ok(()), Purpose::Renew) => walk.ack(taken.place)?,
                (Ok(()), Purpose::Leave) => {
                    walk.ack(taken.place)?;
                    self.progress.done += 1;
                    self.tell();
                }
                (Err(error), Purpose::Leave) => {
                    self.not_done(&taken.message, error);
                    self.stay(walk, taken);
                }
                // There may be room when more are out.
                (Err(error), Purpose::Renew) if error.kind() == ErrorKind::Nacked => {
                    self.staying.hold(taken);
                }
                (Err(error), Purpose::Renew) => {
                    let queue = self.task.queue.as_str();
                    tracing::warn!(queue, "a message is given back, which may be counted: {error}");
                    walk.leave(taken.place);
                }
            }
        }
        Ok(())
    }

    fn not_done(&mut self, message: &ParkedMessage, error: Error) {
        self.progress.failed += 1;
        if self.progress.not_done.len() < MAX_NAMED {
            let (position, message_id) = (message.position(), message.message_id());
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
