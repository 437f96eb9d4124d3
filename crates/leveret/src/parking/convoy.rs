//! Many parcels under way at once, in order, each with its outcome.

use std::collections::VecDeque;

use tokio::time::Instant;

use crate::connection::Client;
use crate::error::{Error, ErrorKind};
use crate::forwarder::{Mover, Moving, Parcel};

/// How many messages may be sent and not confirmed.
const WINDOW: usize = 512;
/// The same in bytes of bodies.
const WINDOW_BYTES: usize = 16 * 1024 * 1024;

/// How often in a row a message is sent again because a connection was lost.
pub(super) const MAX_LOSSES: u32 = 5;

/// Sends parcels, each with something of the sender's that tells which it is.
///
/// ```text
///  send --> window --answered--> settled
///             |  ^
///             |  +-- send_again: the channel is gone, and with it the answers
///             +----> rest: nobody waits for the answer any longer
/// ```
///
/// Whatever was given to it is in the window until it has its outcome, though sending it failed. If the channel is lost, nothing is sent
/// before the sender says so: it may be that it has to be sent from elsewhere.
pub(super) struct Convoy<T> {
    mover: Mover,
    window: VecDeque<Sent<T>>,
    bytes: usize,
    settled: VecDeque<(T, Result<(), Error>)>,
}

struct Sent<T> {
    which: T,
    parcel: Parcel,
    /// Or why it could not be sent.
    moving: Result<Moving, Error>,
    losses: u32,
}

impl<T> Sent<T> {
    /// What has become of it, if that is known.
    fn outcome(&self) -> Option<Result<(), Error>> {
        match &self.moving {
            Ok(moving) => moving.answer(),
            Err(error) => is_about_message(error).then(|| Err(error.clone())),
        }
    }

    /// Waits until that is known; an error if it will not be, or not in time.
    async fn settled(&mut self) -> Result<Result<(), Error>, Error> {
        match &mut self.moving {
            Ok(moving) => moving.answered().await,
            Err(error) if is_about_message(error) => Ok(Err(error.clone())),
            Err(error) => Err(error.clone()),
        }
    }

    fn is_lost(&self) -> bool {
        match &self.moving {
            Ok(moving) => moving.is_lost(),
            Err(error) => is_loss(error),
        }
    }
}

impl<T> Convoy<T> {
    pub(super) fn new(client: &Client, what: &'static str) -> Self {
        let mover = Mover::new(client, what);
        Convoy { mover, window: VecDeque::new(), bytes: 0, settled: VecDeque::new() }
    }

    /// Whether one could be sent, without sending it.
    pub(super) async fn check(&self, parcel: Parcel) -> Result<(), Error> {
        self.mover.check(parcel).await
    }

    /// Sends one alone, and waits for its outcome.
    pub(super) async fn deliver(&self, parcel: Parcel) -> Result<(), Error> {
        self.mover.deliver(parcel).await
    }

    /// Sends one more, and waits for others if too many are under way. An error is not about this one alone.
    pub(super) async fn send(&mut self, which: T, parcel: Parcel) -> Result<(), Error> {
        let moving = match self.make_room(parcel.body.len()).await {
            Ok(()) => self.send_after_others(&parcel).await,
            Err(error) => Err(error),
        };
        let failure = moving.as_ref().err().filter(|error| !is_about_message(error)).cloned();
        self.bytes += parcel.body.len();
        self.window.push_back(Sent { which, parcel, moving, losses: 0 });
        failure.map_or(Ok(()), Err)
    }

    async fn make_room(&mut self, bytes: usize) -> Result<(), Error> {
        while self.window.len() >= WINDOW
            || (self.bytes + bytes > WINDOW_BYTES && !self.window.is_empty())
        {
            self.settle_first().await?;
        }
        Ok(())
    }

    /// Only on the channel of those that are under way: if they are to be sent again, then before it.
    async fn send_after_others(&self, parcel: &Parcel) -> Result<Moving, Error> {
        if self.window.is_empty() {
            return self.mover.send(parcel.clone()).await;
        }
        let gone = || Error::new(ErrorKind::Lost, "the channel of the messages before it is gone");
        self.mover.follow(parcel.clone()).await?.ok_or_else(gone)
    }

    /// Waits until all have their outcome. An error if some will not have one, or not in time.
    pub(super) async fn settle_all(&mut self) -> Result<(), Error> {
        while !self.window.is_empty() {
            self.settle_first().await?;
        }
        Ok(())
    }

    async fn settle_first(&mut self) -> Result<(), Error> {
        let Some(first) = self.window.front_mut() else { return Ok(()) };
        let outcome = first.settled().await?;
        self.first_is_settled(outcome);
        Ok(())
    }

    fn first_is_settled(&mut self, outcome: Result<(), Error>) {
        if let Some(Sent { which, parcel, .. }) = self.window.pop_front() {
            self.bytes -= parcel.body.len();
            self.settled.push_back((which, outcome));
        }
    }

    /// An outcome that was not told yet, in the order of sending.
    pub(super) fn settled(&mut self) -> Option<(T, Result<(), Error>)> {
        if self.settled.is_empty() {
            let outcome = self.window.front()?.outcome()?;
            self.first_is_settled(outcome);
        }
        self.settled.pop_front()
    }

    /// Whether the channel is gone, and with it the answers to what was sent, so that it may be sent again.
    pub(super) fn is_lost(&self) -> bool {
        self.window.front().is_some_and(|first| first.is_lost() && first.losses < MAX_LOSSES)
    }

    /// Sends again what has no outcome because the channel is gone, until all have theirs, or the channel is gone once more. One by one
    /// and in order: so the one for which the broker closes the channel is found.
    pub(super) async fn send_again(&mut self) -> Result<(), Error> {
        while let Some(first) = self.window.front_mut() {
            let outcome = match first.is_lost() {
                false => first.settled().await?,
                true => match self.mover.deliver(first.parcel.clone()).await {
                    Ok(()) => Ok(()),
                    Err(error) if is_about_message(&error) || error.kind() == ErrorKind::Broker => {
                        Err(error)
                    }
                    Err(error) => {
                        // What is no loss goes no better the next time.
                        first.losses = if is_loss(&error) { first.losses + 1 } else { MAX_LOSSES };
                        return Err(error);
                    }
                },
            };
            self.first_is_settled(outcome);
        }
        Ok(())
    }

    /// Sends again what is lost, for those who need not look whether it still has to be sent.
    pub(super) async fn insist(&mut self, mut sent: Result<(), Error>) -> Result<(), Error> {
        while sent.is_err() && self.is_lost() {
            sent = self.send_again().await;
        }
        sent
    }

    /// Gives those that are under way until then, though it was to be sooner.
    pub(super) fn wait_until(&mut self, deadline: Instant) {
        for sent in &mut self.window {
            if let Ok(moving) = &mut sent.moving {
                moving.wait_until(deadline);
            }
        }
    }

    /// Those whose outcome nobody knows. Nobody will be told.
    pub(super) fn rest(&mut self) -> Vec<T> {
        self.bytes = 0;
        let mut rest = Vec::new();
        for sent in std::mem::take(&mut self.window) {
            match sent.outcome() {
                Some(outcome) => self.settled.push_back((sent.which, outcome)),
                None => rest.push(sent.which),
            }
        }
        rest
    }
}

/// Whether the broker has an answer about one message, and takes others.
pub(super) fn is_about_message(error: &Error) -> bool {
    use ErrorKind::{Invalid, Missing, Nacked, Unroutable};
    matches!(error.kind(), Invalid | Missing | Nacked | Unroutable)
}

/// Whether it may go better on the next connection.
pub(super) fn is_loss(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Lost | ErrorKind::Stale)
}
