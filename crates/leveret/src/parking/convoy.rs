//! Many parcels under way at once, in order, each with its outcome.

use std::collections::VecDeque;

use crate::client::Client;
use crate::error::{Error, ErrorKind};
use crate::mover::{Mover, Moving, Parcel};

/// How many messages may be sent and not confirmed.
const WINDOW: usize = 512;
/// The same in bytes of bodies.
const WINDOW_BYTES: usize = 16 * 1024 * 1024;

/// How often in a row a message is sent again because a connection was lost.
pub(super) const MAX_LOSSES: u32 = 5;

/// Sends parcels, each with something of the sender's that tells which it is.
///
/// If the channel is lost, everything without an outcome is sent again, one by one and in order, before anything that
/// follows: so the order is kept, and the one for which a broker closes the channel is found.
pub(super) struct Convoy<T> {
    mover: Mover,
    window: VecDeque<Sent<T>>,
    bytes: usize,
    settled: VecDeque<(T, Result<(), Error>)>,
}

struct Sent<T> {
    which: T,
    parcel: Parcel,
    moving: Moving,
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

    /// Sends one more, and waits for others if too many are under way. An error is not about this one alone: it ends the
    /// convoy.
    pub(super) async fn send(&mut self, which: T, parcel: Parcel) -> Result<(), Error> {
        while self.window.len() >= WINDOW
            || (self.bytes + parcel.body.len() > WINDOW_BYTES && !self.window.is_empty())
        {
            self.settle_first().await?;
        }
        match self.send_in_order(&parcel).await {
            Ok(moving) => {
                self.bytes += parcel.body.len();
                self.window.push_back(Sent { which, parcel, moving });
                Ok(())
            }
            Err(error) if is_about_message(&error) => {
                // Outcomes are told in order.
                self.settle_all().await?;
                self.settled.push_back((which, Err(error)));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Sends one after all that are under way: if their channel is gone, after they were sent again.
    async fn send_in_order(&mut self, parcel: &Parcel) -> Result<Moving, Error> {
        if !self.window.is_empty() {
            if let Some(moving) = self.mover.follow(parcel.clone()).await? {
                return Ok(moving);
            }
            self.settle_all().await?;
        }
        self.mover.send(parcel.clone()).await
    }

    /// Waits until all have their outcome.
    pub(super) async fn settle_all(&mut self) -> Result<(), Error> {
        while !self.window.is_empty() {
            self.settle_first().await?;
        }
        Ok(())
    }

    /// An outcome that was not told yet, in the order of sending.
    pub(super) fn settled(&mut self) -> Option<(T, Result<(), Error>)> {
        self.settled.pop_front()
    }

    async fn settle_first(&mut self) -> Result<(), Error> {
        let Some(Sent { which, parcel, moving }) = self.window.pop_front() else { return Ok(()) };
        self.bytes -= parcel.body.len();
        let outcome = moving.confirmed().await;
        if !outcome.as_ref().is_err_and(|error| !is_about_message(error)) {
            self.settled.push_back((which, outcome));
            return Ok(());
        }
        // The channel is gone, and with it the outcome of most that follow.
        let rest: Vec<Sent<T>> = self.window.drain(..).collect();
        self.bytes = 0;
        let outcome = self.send_again(&parcel).await?;
        self.settled.push_back((which, outcome));
        for Sent { which, parcel, moving } in rest {
            let outcome = match moving.confirmed().await {
                Err(error) if !is_about_message(&error) => self.send_again(&parcel).await?,
                outcome => outcome,
            };
            self.settled.push_back((which, outcome));
        }
        Ok(())
    }

    /// Sends one alone, so that it is known to be the cause if the channel is closed again.
    async fn send_again(&self, parcel: &Parcel) -> Result<Result<(), Error>, Error> {
        let mut losses = 0;
        loop {
            match self.mover.deliver(parcel.clone()).await {
                Ok(()) => return Ok(Ok(())),
                Err(error) if is_about_message(&error) || error.kind() == ErrorKind::Broker => {
                    return Ok(Err(error));
                }
                Err(error) if is_loss(&error) && losses < MAX_LOSSES => losses += 1,
                Err(error) => return Err(error),
            }
        }
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
