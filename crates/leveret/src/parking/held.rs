//! The messages that a task has taken out of a lot, and what becomes of them.
//!
//! ```text
//!  Walk --> open --+--> let go -------------------------------> acked
//!                  +--> sent: Convoy --> confirmed -----------> acked
//!                  |                +--> refused --+
//!                  +--> stays <--------------------+
//!                         |
//!                         +--> left at its place; or, if the walk says so, put in anew at the end of the queue with
//!                              its page, confirmed, and then acked
//! ```

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout};

use super::convoy::Convoy;
use super::hand::Wanted;
use super::mark::Mark;
use super::message::ParkedMessage;
use super::staying::{At, Staying, anew};
use super::walk::{Place, Taken, Walk};
use crate::amqp::RawProperties;
use crate::connection::Client;
use crate::error::{Error, ErrorKind};
use crate::forwarder::Parcel;
use crate::random;

/// How long to wait for room in a full queue.
const PAUSE: Duration = Duration::from_millis(100);

/// How many messages of a high priority are put in anew together. They were taken one here and one there, so each has an ack of its
/// own; and that many a quorum queue of RabbitMQ takes at once.
const FEW: usize = 24;

/// A message that was sent and whose original is still in the lot.
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

/// What has become of a message that was sent.
pub(super) enum Outcome {
    Left,
    NotSent(Arc<ParkedMessage>, Error),
}

/// What is held.
pub(crate) struct Held {
    client: Client,
    queue: String,
    pub(super) walk: Walk,
    convoy: Convoy<Sent>,
    /// Taken, and not decided about. Not kept where the walk itself can give it back.
    open: Vec<Taken>,
    staying: Staying,
    /// Those of them that could not be sent on, and why. That is told once they were put in anew: before, a lost connection lets them come
    /// again, to be refused again.
    refused: HashMap<Place, Error>,
    /// How many were put in anew since it was marked who does.
    renewed: u64,
    /// How many were put in anew by this walk.
    put_in_anew: u64,
    pub(super) outcomes: VecDeque<Outcome>,
    pub(super) is_over: bool,
    wanted: Arc<Wanted>,
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("queue", &self.queue).finish_non_exhaustive()
    }
}

impl Held {
    pub(super) fn new(
        client: &Client,
        queue: &str,
        walk: Walk,
        renewed: u64,
        wanted: Arc<Wanted>,
    ) -> Self {
        Held {
            client: client.clone(),
            queue: queue.to_owned(),
            walk,
            convoy: Convoy::new(client, "sending on a parked message"),
            open: Vec::new(),
            staying: Staying::default(),
            refused: HashMap::new(),
            renewed,
            put_in_anew: 0,
            outcomes: VecDeque::new(),
            is_over: false,
            wanted,
        }
    }

    /// The next messages that are not ours, at most so many; none if there are no more.
    pub(super) async fn take(&mut self, most: u64) -> Result<Vec<Taken>, Error> {
        let mut page = Vec::new();
        while page.is_empty() && !self.walk.is_around() {
            let most = self.within_reach(most).await?;
            let mut all = Vec::new();
            let taken = match most {
                0 => Ok(()),
                most => self.walk.page(most, &mut all).await,
            };
            if self.walk.renews() {
                self.open.extend(all.iter().cloned());
            }
            taken?;
            if all.is_empty() {
                break;
            }
            let (ours, others): (Vec<Taken>, _) = all.into_iter().partition(|taken| taken.is_ours);
            ours.into_iter().for_each(|taken| self.stay(taken));
            page = others;
        }
        Ok(page)
    }

    /// How many can be taken before the first of ours, as far as the broker's count tells. It may be wrong once.
    async fn within_reach(&mut self, most: u64) -> Result<u64, Error> {
        if self.renewed == 0 {
            return Ok(most);
        }
        for _ in 0..2 {
            let front = self.walk.check_held().await?.saturating_sub(self.renewed);
            if front > 0 {
                return Ok(most.min(front));
            }
            sleep(PAUSE).await;
        }
        // If others take some of ours before the last of another priority, the count is too low.
        Ok(if self.walk.has_seen_early() { most.min(2) } else { 0 })
    }

    /// It was decided what becomes of it.
    fn close(&mut self, place: Place) {
        self.open.retain(|taken| taken.place != place);
    }

    /// It leaves the lot.
    pub(super) fn let_go(&mut self, taken: Taken) {
        self.close(taken.place);
        self.walk.let_go(taken);
    }

    /// It stays in the lot.
    pub(super) fn stay(&mut self, taken: Taken) {
        self.close(taken.place);
        if self.walk.renews() {
            self.staying.hold(taken);
        }
    }

    /// It stays in the lot, because it could not be sent on.
    pub(super) fn refuse(&mut self, taken: Taken, error: Error) {
        self.refused.insert(taken.place, error);
        if !self.walk.renews() {
            self.tell_if_refused(&taken);
        }
        self.stay(taken);
    }

    fn tell_if_refused(&mut self, taken: &Taken) {
        if let Some(error) = self.refused.remove(&taken.place) {
            self.outcomes.push_back(Outcome::NotSent(Arc::clone(&taken.message), error));
        }
    }

    /// They leave the lot once that is confirmed.
    pub(super) async fn send(&mut self, messages: Vec<(Taken, Parcel)>) -> Result<(), Error> {
        for (taken, parcel) in messages {
            self.close(taken.place);
            self.send_for(Purpose::Leave, taken, parcel).await?;
        }
        Ok(())
    }

    async fn send_for(
        &mut self,
        purpose: Purpose,
        taken: Taken,
        parcel: Parcel,
    ) -> Result<(), Error> {
        let sent = self.convoy.send(Sent { taken, purpose }, parcel).await;
        // Soon: what is confirmed and not acked is sent twice if the connection is lost.
        self.settle()?;
        self.insist(sent).await
    }

    /// Sends again what was under way when its channel was lost, if we still have the originals: else they come again to who walks
    /// next, who sends them.
    async fn insist(&mut self, mut sent: Result<(), Error>) -> Result<(), Error> {
        while sent.is_err() && self.convoy.is_lost() {
            self.walk.check_held().await?;
            sent = self.convoy.send_again().await;
            self.settle()?;
        }
        sent
    }

    /// Does what outcomes of messages under way ask for, as far as there are some.
    fn settle(&mut self) -> Result<(), Error> {
        while let Some((Sent { taken, purpose }, outcome)) = self.convoy.settled() {
            match (outcome, purpose) {
                (Ok(()), Purpose::Renew) => {
                    self.renewed += 1;
                    self.put_in_anew += 1;
                    self.tell_if_refused(&taken);
                    self.walk.ack(taken.place);
                }
                (Ok(()), Purpose::Leave) => {
                    self.walk.let_go(taken);
                    self.outcomes.push_back(Outcome::Left);
                }
                (Err(error), Purpose::Leave) => self.refuse(taken, error),
                // There may be room when more are out.
                (Err(error), Purpose::Renew) if error.kind() == ErrorKind::Nacked => {
                    self.staying.hold(taken);
                }
                (Err(error), Purpose::Renew) => {
                    self.tell_if_refused(&taken);
                    let queue = self.queue.as_str();
                    tracing::warn!(queue, "a message is given back, which may be counted: {error}");
                }
            }
        }
        self.walk.send_many_acks()
    }

    pub(super) async fn settle_all(&mut self) -> Result<(), Error> {
        let settled = self.convoy.settle_all().await;
        self.settle()?;
        self.insist(settled).await
    }

    /// The same for who does nothing for a while: what is confirmed and not acked is sent twice if the connection is lost.
    pub(super) async fn settle_for_long(&mut self) -> Result<(), Error> {
        self.settle_all().await?;
        self.walk.send_acks()
    }

    /// Puts what stays at the end of the queue, if the walk may not leave it at its place. What could not be sent on is one of
    /// them, so that is waited for.
    pub(super) async fn put_back(&mut self, at: At) -> Result<(), Error> {
        if !self.walk.renews() {
            self.settle()?;
            return self.walk.send_acks();
        }
        self.settle_all().await?;
        let mut due = self.staying.due(&self.walk, at);
        let put = self.renew_all(&mut due, at).await;
        due.into_iter().for_each(|taken| self.staying.hold(taken));
        put?;
        self.walk.send_acks()?;
        // A full queue takes messages again once many are out; but not any number can be.
        match self.staying.is_full() {
            true => Err(self.no_room()),
            false => Ok(()),
        }
    }

    /// Puts messages in anew, and leaves those that it did not come to.
    async fn renew_all(&mut self, messages: &mut Vec<Taken>, at: At) -> Result<(), Error> {
        while !messages.is_empty() {
            // What is no longer in our hands would be there twice.
            self.walk.check_held().await?;
            let together = if at == At::Page { messages.len() } else { messages.len().min(FEW) };
            let renewed = self.renew(messages, together).await;
            // What is in the queue as a new message is out as an old one.
            self.walk.send_acks()?;
            renewed?;
        }
        Ok(())
    }

    /// Sends the first messages to the end of their queue, and waits until they are there.
    async fn renew(&mut self, messages: &mut Vec<Taken>, count: usize) -> Result<(), Error> {
        let mut sent = Ok(());
        let mut given = 0;
        while given < count && sent.is_ok() {
            let taken = messages[given].clone();
            let parcel = self.parcel_anew(&taken).await;
            sent = self.send_for(Purpose::Renew, taken, parcel).await;
            given += 1;
        }
        messages.drain(..given);
        sent?;
        self.settle_all().await
    }

    /// The same at the end, with a while of patience.
    async fn put_back_rest(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + self.client.core().options.timeout;
        loop {
            self.put_back(At::End).await?;
            if self.staying.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(self.no_room());
            }
            sleep(PAUSE).await;
        }
    }

    /// The same message for the end of its queue, with all that is to be noted on it, or as much of that as fits.
    async fn parcel_anew(&mut self, taken: &Taken) -> Parcel {
        let queue = self.client.queue_name(&self.queue);
        let (noted, bare) = anew(&taken.message, &queue);
        for mut parcel in [noted, bare.clone()] {
            self.walk.mark().put_on(&mut parcel, &queue, &taken.marks);
            if self.convoy.check(parcel.clone()).await.is_ok() {
                return parcel;
            }
        }
        bare
    }

    fn no_room(&self) -> Error {
        let text = format!(
            "queue {:?} takes no messages, so that what was taken out of it to be looked at goes back by the broker, which \
             may count that",
            self.queue
        );
        Error::new(ErrorKind::Nacked, text)
    }

    /// Begins anew before the first message, as somebody else.
    pub(super) fn begin_anew(&mut self, mark: Mark) {
        self.walk.begin_anew(mark);
        self.renewed = 0;
    }

    /// How many have the mark.
    pub(super) fn renewed(&self) -> u64 {
        self.renewed
    }

    /// How many were put in anew in all.
    pub(super) fn put_in_anew(&self) -> u64 {
        self.put_in_anew
    }

    /// Goes past so many messages that are put in anew: as often as there are, and all are in their order again.
    pub(super) async fn pass_by(&mut self, messages: u64) -> Result<(), Error> {
        let seen = self.walk.seen();
        let mut left = messages;
        while left > 0 {
            self.wanted.check()?;
            let page = self.take(left).await?;
            if page.is_empty() {
                break;
            }
            left = left.saturating_sub(page.len() as u64);
            for taken in page {
                self.stay(taken);
            }
            self.put_back(At::Page).await?;
        }
        self.put_back_rest().await?;
        self.walk.go_on_after(seen);
        Ok(())
    }

    /// Comes to the end, with so many messages that may not have been seen.
    pub(super) async fn end(&mut self, unseen: u64) -> Result<(), Error> {
        self.settle_all().await?;
        if self.staying.has_begun() {
            self.pass_by(unseen).await?;
        }
        self.walk.catch_up().await?;
        while self.walk.is_among_returned() {
            self.wanted.check()?;
            for taken in self.take(u64::MAX).await? {
                self.stay(taken);
            }
        }
        self.put_back_rest().await?;
        self.walk.end().await?;
        self.is_over = true;
        Ok(())
    }

    /// Whether messages can be put in anew: better not to take any if not.
    pub(super) async fn check_renewing(&mut self) -> Result<(), Error> {
        let key = format!("leveret.nowhere.{:x}", random::number());
        let nowhere = Parcel::new(String::new(), key, &RawProperties::default(), &Bytes::new());
        match self.convoy.deliver(nowhere).await {
            Err(error) if error.kind() == ErrorKind::Refused => {
                let text = format!(
                    "looking into queue {:?} may cost its messages: brokers before RabbitMQ 4.3 count what is given back to a \
                     quorum queue. To put them in anew instead, this user needs the permission to write to the default \
                     exchange",
                    self.queue
                );
                Err(Error::caused(ErrorKind::Refused, text, error))
            }
            Err(error) if error.kind() != ErrorKind::Unroutable => Err(error),
            _ => Ok(()),
        }
    }

    /// Nobody goes on with it: all that is held goes back into the lot.
    pub(super) async fn give_up(&mut self) {
        if self.is_over {
            return;
        }
        self.is_over = true;
        let patience = self.client.core().options.timeout;
        let given_back = timeout(patience, self.put_back_everything()).await;
        let error = match given_back {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => Error::timed_out("putting back what was looked at", patience),
        };
        let queue = self.queue.as_str();
        tracing::warn!(
            queue,
            "what was looked at goes back by the broker, which may count it: {error}"
        );
    }

    async fn put_back_everything(&mut self) -> Result<(), Error> {
        self.walk.stop_consuming(&mut self.open).await?;
        self.settle_some().await?;
        match self.walk.renews() {
            true => {
                std::mem::take(&mut self.open)
                    .into_iter()
                    .for_each(|taken| self.staying.hold(taken));
                self.put_back_rest().await?;
            }
            false => self.open.clear(),
        }
        self.walk.end().await
    }

    /// Waits a while for the outcome of what is under way. What has none then stays: it may be in two places, and is in none too few.
    async fn settle_some(&mut self) -> Result<(), Error> {
        // The rest of the time is for putting back.
        self.convoy.wait_until(Instant::now() + self.client.core().options.timeout / 2);
        let settled = self.convoy.settle_all().await;
        let rest = self.convoy.rest();
        if let Err(error) = settled {
            let queue = self.queue.as_str();
            tracing::debug!(queue, "{} messages have no outcome, and stay: {error}", rest.len());
        }
        rest.into_iter().for_each(|sent| self.stay(sent.taken));
        self.settle()
    }
}
