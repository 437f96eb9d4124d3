//! A task under way: it decides about each message, and counts.
//!
//! ```text
//!  Hand --> is it meant? --no--> stays
//!                |
//!               yes --> shown, and stays; or let go; or addressed and sent
//! ```
//!
//! A lost connection lets it begin anew at the head of the lot, where all is again that was not acked. Who only looks begins to count
//! anew, too; for others, what was counted as gone and comes again is not counted twice.

use std::ops::ControlFlow;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep_until};

use super::convoy::{MAX_LOSSES, is_about_message, is_loss};
use super::doubtful::Doubtful;
use super::hand::Hand;
use super::held::Outcome;
use super::mark::Mark;
use super::message::ParkedMessage;
use super::pace::Pace;
use super::target::{Draft, Router, Target, note_address, reset};
use super::task::{Action, Edit, NotDone, Progress, Task};
use super::walk::Taken;
use crate::error::Error;
use crate::forwarder::{Mover, Parcel};

/// How many messages that were not done are named.
const MAX_NAMED: usize = 100;

/// How many messages are sent together.
const OUTBOX: usize = 64;

/// So long an ack may wait for others.
const A_WHILE: Duration = Duration::from_millis(50);

pub(super) struct Run<'a> {
    task: Task<'a>,
    /// Knows what can be sent.
    mover: Mover,
    router: Router,
    pace: Pace,
    progress: Progress,
    /// What is about to be sent, to go together.
    outbox: Vec<(Taken, Parcel)>,
    began: SystemTime,
    walks: u32,
    doubtful: Doubtful,
    /// What is put in anew has this mark, and so many have it.
    mark: (Mark, u64),
}

impl<'a> Run<'a> {
    pub(super) fn new(task: Task<'a>, pace: Pace) -> Self {
        Run {
            mover: Mover::new(&task.client, "sending on a parked message"),
            router: Router::new(&task.client, &task.queue),
            pace,
            progress: Progress::default(),
            outbox: Vec::new(),
            began: SystemTime::now(),
            walks: 0,
            doubtful: Doubtful::default(),
            mark: (Mark::new(), 0),
            task,
        }
    }

    pub(super) async fn finish(mut self) -> Result<Progress, Error> {
        let mut left = None;
        let mut losses = 0;
        loop {
            let done = self.progress.done;
            match self.walk(&mut left).await {
                Ok(()) => return Ok(self.progress),
                Err(error) if is_loss(&error) => {
                    losses = if self.progress.done > done { 1 } else { losses + 1 };
                    if losses > MAX_LOSSES {
                        return Err(error);
                    }
                    tracing::warn!(queue = self.task.queue, "begins anew at the head: {error}");
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Goes through the lot once. `left` is how many of the messages that were there at first may still be there, or at their
    /// old place.
    async fn walk(&mut self, left: &mut Option<u64>) -> Result<(), Error> {
        let mark = self.mark.clone();
        let reached = Hand::reach_into(&self.task.client, &self.task.queue, mark).await;
        let (hand, depth) = reached?;
        self.walks += 1;
        let mut total = *left.get_or_insert(depth);
        if self.walks == 1 {
            self.progress.total = total;
        }
        let (client, queue) = (&self.task.client, &self.task.queue);
        let depth = self.doubtful.until_given_back(client, queue, depth).await?;
        // If an earlier look was cut off, the first message is no longer at the head, and some may be there twice.
        let mut before = 0;
        if hand.renews() && self.only_looks() && self.walks > 1 {
            before = total % self.progress.total.max(1);
            total = depth.max(self.progress.total);
        }
        let gone = self.go_through(&hand, before, total).await;
        match gone {
            // What was only looked at is back at its place, whoever has closed the channel.
            Err(error)
                if self.only_looks()
                    && is_loss(&error)
                    && hand.walk(|walk| walk.is_over()).await =>
            {
                Ok(())
            }
            Err(error) => {
                hand.give_up().await;
                self.note(&hand).await;
                let (acked, for_sure) = hand.walk(|walk| walk.acked()).await;
                let expected = (depth + hand.put_in_anew().await).saturating_sub(acked);
                self.doubtful.add(hand.walk(|walk| walk.doubtful()).await, expected);
                self.mark.1 = hand.renewed().await;
                *left = Some((before + total).saturating_sub(for_sure));
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }

    async fn go_through(&mut self, hand: &Hand, before: u64, total: u64) -> Result<(), Error> {
        self.set_out(hand, total).await?;
        if self.only_looks() && self.walks > 1 {
            // What a look that was cut off did not come to.
            hand.pass_by(before).await?;
            self.mark.0 = Mark::new();
            hand.begin_anew(self.mark.0.clone()).await;
        }
        self.go(hand, total).await
    }

    /// What is to be known before the first message is taken.
    async fn set_out(&mut self, hand: &Hand, total: u64) -> Result<(), Error> {
        self.outbox.clear();
        let gone = self.progress.total.saturating_sub(total);
        if self.only_looks() {
            let total = self.progress.total;
            self.progress = Progress { total, ..Progress::default() };
        } else if self.walks > 1 {
            self.progress.seen = gone;
            if hand.renews() {
                // What could not be sent on is put in anew as well, and not met again.
                hand.walk(|walk| walk.go_on_after(gone)).await;
            } else {
                self.progress.failed = 0;
                self.progress.not_done.clear();
            }
            self.progress.selected = self.progress.done + self.progress.failed;
        }
        let is_whole = self.task.filter.is_all() && !self.only_looks();
        match hand.renews() && !is_whole && total > 0 {
            true => hand.check_renewing().await,
            false => Ok(()),
        }
    }

    async fn go(&mut self, hand: &Hand, total: u64) -> Result<(), Error> {
        let last = self.task.filter.last_position().unwrap_or(u64::MAX);
        let mut left = total;
        let mut stop = false;
        while left > 0 && !stop && !self.is_enough() {
            let seen = hand.walk(|walk| walk.seen()).await;
            if seen >= last {
                break;
            }
            let most = left.min(last - seen).min(self.page_limit());
            let page = hand.take(most).await?;
            if page.is_empty() {
                break;
            }
            left = left.saturating_sub(page.len() as u64);
            for taken in page {
                if stop || self.is_enough() {
                    hand.stay(taken).await;
                    continue;
                }
                stop = self.visit(hand, taken).await?.is_break();
            }
            self.send(hand).await?;
            let turned = hand.turn_page().await;
            self.note(hand).await;
            turned?;
        }
        self.settle_all(hand).await?;
        let ended = hand.end(left).await;
        self.note(hand).await;
        ended
    }

    /// Whether nothing is to leave the lot.
    fn only_looks(&self) -> bool {
        self.task.is_dry || matches!(self.task.action, Action::Look(_))
    }

    fn is_enough(&self) -> bool {
        self.progress.selected >= self.task.limit && self.doubtful.is_empty()
    }

    /// How many messages to take at once: none that will not be needed, and none that would be held for long.
    fn page_limit(&self) -> u64 {
        let needed = match self.task.filter.is_all() && self.doubtful.is_empty() {
            true => self.task.limit.saturating_sub(self.progress.selected),
            false => u64::MAX,
        };
        needed.min(self.pace.in_a_minute())
    }

    async fn visit(&mut self, hand: &Hand, taken: Taken) -> Result<ControlFlow<()>, Error> {
        self.progress.seen += 1;
        let mut flow = ControlFlow::Continue(());
        if !self.is_meant(&taken.message) {
            hand.stay(taken).await;
            return Ok(flow);
        }
        if self.doubtful.has(&taken) {
            // It was counted, and is still there.
            self.progress.done = self.progress.done.saturating_sub(1);
            self.progress.selected = self.progress.selected.saturating_sub(1);
        } else if self.progress.selected >= self.task.limit {
            // It is only gone past: what was given back may come first or last.
            hand.stay(taken).await;
            return Ok(flow);
        }
        self.progress.selected += 1;
        if matches!(self.task.action, Action::Look(_)) {
            self.keep_pace(hand).await?;
        }
        if let Action::Look(look) = &mut self.task.action {
            flow = look(self.walks, &taken.message);
            hand.stay(taken).await;
            self.progress.done += 1;
        } else if let Action::Purge = self.task.action {
            match self.task.is_dry {
                true => hand.stay(taken).await,
                false => {
                    self.keep_pace(hand).await?;
                    hand.let_go(taken).await;
                }
            }
            self.progress.done += 1;
        } else {
            self.send_on(hand, taken).await?;
        }
        self.tell();
        Ok(flow)
    }

    fn is_meant(&self, message: &ParkedMessage) -> bool {
        // It has failed again since the task began, and was seen before the connection was lost.
        let is_back = self.walks > 1 && message.story().last_failure > Some(self.began);
        !is_back && self.task.filter.matches(message, SystemTime::now())
    }

    async fn send_on(&mut self, hand: &Hand, taken: Taken) -> Result<(), Error> {
        let parcel = match self.checked_parcel(&taken.message).await {
            Ok(parcel) => parcel,
            Err(error) if is_about_message(&error) => {
                hand.refuse(taken, error).await;
                self.note(hand).await;
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if self.task.is_dry {
            self.progress.done += 1;
            hand.stay(taken).await;
            return Ok(());
        }
        self.keep_pace(hand).await?;
        self.outbox.push((taken, parcel));
        match self.outbox.len() >= OUTBOX || self.task.rate.is_some() {
            true => self.send(hand).await,
            false => Ok(()),
        }
    }

    async fn send(&mut self, hand: &Hand) -> Result<(), Error> {
        if self.outbox.is_empty() {
            return Ok(());
        }
        let sent = hand.send(std::mem::take(&mut self.outbox)).await;
        self.note(hand).await;
        sent
    }

    /// The same as [`parcel`](Self::parcel), and if nothing is to be sent, whether it could be.
    async fn checked_parcel(&mut self, message: &ParkedMessage) -> Result<Parcel, Error> {
        let parcel = self.parcel(message).await?;
        if self.task.is_dry {
            self.mover.check(parcel.clone()).await?;
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
        Ok(parcel)
    }

    /// Counts what has become of messages that were sent.
    async fn note(&mut self, hand: &Hand) {
        for outcome in hand.outcomes().await {
            match outcome {
                Outcome::Left => {
                    self.progress.done += 1;
                    self.tell();
                }
                Outcome::NotSent(message, error) => self.not_done(&message, error),
            }
        }
    }

    fn not_done(&mut self, message: &ParkedMessage, error: Error) {
        self.progress.failed += 1;
        if self.progress.not_done.len() < MAX_NAMED {
            let (position, message_id) = (message.position(), message.message_id());
            self.progress.not_done.push(NotDone { position, message_id, error });
        }
        self.tell();
    }

    async fn settle_all(&mut self, hand: &Hand) -> Result<(), Error> {
        let settled = hand.settle_all().await;
        self.note(hand).await;
        settled
    }

    /// Waits for its time. What is under way is settled meanwhile.
    async fn keep_pace(&mut self, hand: &Hand) -> Result<(), Error> {
        if let Some(at) = self.pace.next() {
            let settled = match at > Instant::now() + A_WHILE {
                true => hand.settle_for_long().await,
                false => hand.settle_all().await,
            };
            self.note(hand).await;
            settled?;
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
