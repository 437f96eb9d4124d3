//! A task under way: it decides about each message, and counts.
//!
//! A lost connection lets it begin again at the head of the lot, where everything is that was not acked. Nothing is published again
//! before it is met again there.

use std::ops::ControlFlow;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::message::ParkedMessage;
use super::rate::RateLimiter;
use super::scan::TakenMessage;
use super::target::{Draft, Router, Target, note_address, reset};
use super::task::{Action, Edit, NotDone, Progress, Task};
use super::window::{is_about_message, is_channel_closed_over_message, is_loss};
use super::work::ScanWork;
use crate::error::{Error, ErrorKind};
use crate::forwarder::ForwardedMessage;

/// How many messages that were not done are named.
const MAX_NAMED: usize = 100;

/// How often in a row a task begins again after a lost connection, without getting anything done.
pub(super) const MAX_LOSSES: u32 = 5;

/// After so many acks the broker is asked whether it has taken them.
const MAX_UNPROVEN: u64 = 64;

/// Before a pause this long, too.
const LONG_PAUSE: Duration = Duration::from_millis(500);

/// How often to ask whether the broker has given back what a lost connection had taken, and for how long the answer has to be the
/// same if acks may have been lost.
const RETURN_POLL: Duration = Duration::from_millis(100);
const STABLE_POLLS: u32 = 5;

pub(super) struct TaskRun<'a> {
    task: Task<'a>,
    router: Router,
    rate: RateLimiter,
    progress: Progress,
    began: SystemTime,
    scans: u32,
    /// How many acks the broker may not have taken when the last scan was interrupted.
    doubtful: u64,
    /// Whether the broker has closed the channel over a message: the next scan finds out over which.
    is_careful: bool,
    stop: bool,
    /// Whether only the return of messages is left to do.
    is_ending: bool,
}

impl<'a> TaskRun<'a> {
    pub(super) fn new(task: Task<'a>, rate: RateLimiter) -> Self {
        TaskRun {
            router: Router::new(&task.lot.client, &task.lot.queue),
            rate,
            progress: Progress::default(),
            began: SystemTime::now(),
            scans: 0,
            doubtful: 0,
            is_careful: false,
            stop: false,
            is_ending: false,
            task,
        }
    }

    pub(super) async fn finish(mut self) -> Result<Progress, Error> {
        let mut losses = 0;
        loop {
            let done = self.progress.done;
            match self.scan().await {
                Ok(()) => return Ok(self.progress),
                Err(error) if is_loss(&error) => {
                    losses = if self.progress.done > done { 1 } else { losses + 1 };
                    if losses > MAX_LOSSES {
                        return Err(error);
                    }
                    tracing::warn!(
                        queue = self.task.lot.queue,
                        "begins again at the head: {error}"
                    );
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Goes through the lot once.
    async fn scan(&mut self) -> Result<(), Error> {
        let (mut work, depth) = ScanWork::begin(&self.task.lot).await?;
        self.scans += 1;
        self.is_ending = false;
        match self.scans {
            1 => self.progress.total = depth,
            _ => self.resume(depth).await?,
        }
        if self.is_careful {
            work.open.window.send_one_at_a_time();
        }
        match self.go(&mut work).await {
            Err(error) => self.interrupted(&mut work, error).await,
            Ok(()) => Ok(()),
        }
    }

    /// Counts what an interrupted scan leaves open, and gives back what it holds if the connection is still there.
    async fn interrupted(&mut self, work: &mut ScanWork, error: Error) -> Result<(), Error> {
        let unproven = work.scan.held.unproven();
        if is_loss(&error) && self.is_ending && work.scan.held.is_ending() && unproven == 0 {
            // The broker gives back the rest.
            return Ok(());
        }
        if work.scan.held.prove().await.is_ok() {
            while let Ok(true) = self.settle_next(work).await {}
        }
        let unconfirmed = work.open.window.len() as u64;
        self.progress.selected = self.progress.selected.saturating_sub(unconfirmed);
        self.doubtful = match work.open.release().await {
            Ok(()) => 0,
            Err(_) => work.scan.held.unproven(),
        };
        if self.task.sends() {
            self.progress.possibly_duplicated += unconfirmed + self.doubtful;
        }
        self.report();
        Err(error)
    }

    /// Counts what was done, now that a lost connection has let the scan begin again.
    async fn resume(&mut self, depth: u64) -> Result<(), Error> {
        let progress = &mut self.progress;
        if self.task.only_looks() {
            *progress = Progress { total: progress.total, ..Progress::default() };
        }
        self.stop = false;
        let left = self.left();
        let depth = self.until_given_back(depth, left).await?;
        // What is there beyond that was acked, and the broker has not taken the ack.
        let came_back = depth.saturating_sub(left).min(self.doubtful);
        let progress = &mut self.progress;
        progress.done = progress.done.saturating_sub(came_back);
        progress.seen = progress.done;
        progress.selected = progress.done;
        progress.failed = 0;
        progress.not_done.clear();
        self.doubtful = 0;
        Ok(())
    }

    /// The broker may learn later than the client that a connection is lost: waits until all messages are back, up to the client's
    /// timeout, since others may take some. Returns how many there are.
    async fn until_given_back(&mut self, mut depth: u64, left: u64) -> Result<u64, Error> {
        let lot = self.task.lot.clone();
        let deadline = Instant::now() + lot.client.core().options.timeout;
        let mut stable = 0;
        while Instant::now() < deadline && depth < left + self.doubtful {
            if depth >= left && stable >= STABLE_POLLS {
                break;
            }
            sleep(RETURN_POLL).await;
            let now = lot.depth().await?;
            stable = if now == depth { stable + 1 } else { 0 };
            depth = now;
        }
        Ok(depth)
    }

    async fn go(&mut self, work: &mut ScanWork) -> Result<(), Error> {
        if self.needs_default_exchange() {
            work.open.check_publishing().await?;
        }
        let last = self.task.filter.last_position().unwrap_or(u64::MAX);
        // A queue that is said to be empty may not be.
        let is_unknown = self.progress.total == 0;
        let mut left = if is_unknown { u64::MAX } else { self.left() };
        while left > 0 && !self.stop && !self.is_enough() && work.scan.seen() < last {
            let most = left.min(last - work.scan.seen()).min(self.page_limit());
            let page = work.scan.page(most).await?;
            if page.is_empty() {
                break;
            }
            if self.progress.total == 0 {
                left = page.len() as u64 + work.scan.held.prove().await?.0;
                self.progress.total = left;
            }
            left = left.saturating_sub(page.len() as u64);
            work.open.page.extend(page);
            while let Some(taken) = work.open.page.front().cloned() {
                self.visit(work, &taken).await?;
                work.open.page.pop_front();
            }
            self.settle_all(work).await?;
        }
        self.is_ending = true;
        work.scan.end().await
    }

    /// How many of the messages that were there when the task began are still there.
    fn left(&self) -> u64 {
        let gone = if self.task.only_looks() { 0 } else { self.progress.done };
        self.progress.total.saturating_sub(gone)
    }

    /// Whether messages leave the lot through the default exchange for certain.
    fn needs_default_exchange(&self) -> bool {
        self.task.sends() && self.task.goes_to_queue()
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
        needed.min(self.rate.per_minute())
    }

    async fn visit(&mut self, work: &mut ScanWork, taken: &TakenMessage) -> Result<(), Error> {
        self.settle_answered(work).await?;
        if self.stop || self.is_enough() {
            return Ok(());
        }
        self.progress.seen += 1;
        if !self.is_selected(&taken.message) {
            return Ok(());
        }
        self.progress.selected += 1;
        match &self.task.action {
            Action::Look(_) => self.look(work, taken).await?,
            Action::Purge => self.purge(work, taken).await?,
            Action::Replay { .. } | Action::Move(_) => self.send(work, taken).await?,
        }
        self.report();
        Ok(())
    }

    fn is_selected(&self, message: &ParkedMessage) -> bool {
        // It has failed again since the task began, and was sent before the connection was lost.
        let is_back = self.scans > 1 && message.story().last_failure > Some(self.began);
        !is_back && self.task.filter.matches(message, SystemTime::now())
    }

    async fn look(&mut self, work: &mut ScanWork, taken: &TakenMessage) -> Result<(), Error> {
        self.keep_rate(work).await?;
        if let Action::Look(look) = &mut self.task.action {
            self.stop = look(self.scans, &taken.message) == ControlFlow::Break(());
        }
        self.progress.done += 1;
        Ok(())
    }

    async fn purge(&mut self, work: &mut ScanWork, taken: &TakenMessage) -> Result<(), Error> {
        if !self.task.is_dry {
            self.keep_rate(work).await?;
            work.scan.held.ack(taken.place)?;
        }
        self.progress.done += 1;
        Ok(())
    }

    async fn send(&mut self, work: &mut ScanWork, taken: &TakenMessage) -> Result<(), Error> {
        let parcel = match self.parcel(work, &taken.message).await {
            Ok(parcel) => parcel,
            Err(error) if is_about_message(&error) => {
                self.refused(taken, error);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if self.task.is_dry {
            self.progress.done += 1;
            return Ok(());
        }
        self.keep_rate(work).await?;
        while !work.open.window.has_room_for(&parcel) {
            self.settle_next(work).await?;
        }
        match work.open.window.send(taken.clone(), parcel).await {
            Err(error) if is_about_message(&error) => {
                self.refused(taken, error);
                Ok(())
            }
            sent => sent,
        }
    }

    /// The message in the form and with the address in which it is sent on.
    async fn parcel(
        &mut self,
        work: &ScanWork,
        message: &ParkedMessage,
    ) -> Result<ForwardedMessage, Error> {
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
                // A message that was parked keeps them in a header: its story would be nested in what cannot be read.
                if message.raw_properties().fault().is_some() {
                    parcel.restore_deep_headers();
                }
                note_address(&mut parcel, message);
                target.clone()
            }
            Action::Look(_) | Action::Purge => Target::Origin,
        };
        self.router.address(&mut parcel, &target, message).await?;
        if self.task.is_dry {
            work.open.window.mover().check(parcel.clone()).await?;
        }
        Ok(parcel)
    }

    /// Acks what is confirmed, without waiting for more.
    async fn settle_answered(&mut self, work: &mut ScanWork) -> Result<(), Error> {
        while let Some((taken, outcome)) = work.open.window.answered() {
            self.settle(work, &taken, outcome).await?;
        }
        match work.scan.held.unproven() >= MAX_UNPROVEN {
            true => work.scan.held.prove().await.map(drop),
            false => Ok(()),
        }
    }

    /// Waits for the oldest message that was published. Returns whether there was one.
    async fn settle_next(&mut self, work: &mut ScanWork) -> Result<bool, Error> {
        let (taken, outcome) = match work.open.window.next_outcome().await {
            Ok(Some(settled)) => settled,
            Ok(None) => return Ok(false),
            Err(error) if is_channel_closed_over_message(&error) => {
                if work.open.window.len() > 1 {
                    self.is_careful = true;
                    let text = "the broker has closed the channel over one of the messages";
                    return Err(Error::caused(ErrorKind::Lost, text, error));
                }
                match work.open.window.pop() {
                    Some(taken) => (taken, Err(error)),
                    None => return Ok(false),
                }
            }
            Err(error) => return Err(error),
        };
        self.settle(work, &taken, outcome).await?;
        Ok(true)
    }

    async fn settle(
        &mut self,
        work: &mut ScanWork,
        taken: &TakenMessage,
        outcome: Result<(), Error>,
    ) -> Result<(), Error> {
        match outcome {
            Ok(()) => {
                let acked = work.scan.held.ack(taken.place);
                if acked.as_ref().is_err_and(|error| error.kind() == ErrorKind::Closed) {
                    // It was given back meanwhile.
                    self.progress.possibly_duplicated += 1;
                }
                acked?;
                self.progress.done += 1;
            }
            Err(error) => self.refused(taken, error),
        }
        self.report();
        Ok(())
    }

    /// Waits for everything that was published, and that the broker has taken the acks.
    async fn settle_all(&mut self, work: &mut ScanWork) -> Result<(), Error> {
        while self.settle_next(work).await? {}
        match work.scan.held.unproven() {
            0 => Ok(()),
            _ => work.scan.held.prove().await.map(drop),
        }
    }

    /// Waits for the message's time. What was published is settled meanwhile.
    async fn keep_rate(&mut self, work: &mut ScanWork) -> Result<(), Error> {
        let Some(at) = self.rate.reserve() else { return Ok(()) };
        while !work.open.window.is_empty() {
            if timeout_at(at, work.open.window.wait()).await.is_err() {
                return Ok(());
            }
            self.settle_next(work).await?;
        }
        if at > Instant::now() + LONG_PAUSE {
            self.settle_all(work).await?;
        }
        sleep_until(at).await;
        Ok(())
    }

    /// It stays where it is.
    fn refused(&mut self, taken: &TakenMessage, error: Error) {
        self.progress.failed += 1;
        if self.progress.not_done.len() < MAX_NAMED {
            let (position, message_id) = (taken.message.position(), taken.message.message_id());
            self.progress.not_done.push(NotDone { position, message_id, error });
        }
    }

    fn report(&mut self) {
        if let Some(report) = &mut self.task.report {
            report(&self.progress);
        }
    }
}

/// What is left of a parcel after the caller has changed it.
fn edited(
    parcel: &mut ForwardedMessage,
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
