//! Resending what was lost with a channel, and finding the message for which the broker closes it.

use super::LossCause;
use crate::amqp;

/// A group with a poison message is resent in so many groups.
const GROUPS: usize = 32;

/// After so many groups that got through, groups become twice as large.
const STREAK: u32 = 8;

/// The lost messages of a user, and the channel to resend them on.
pub(crate) trait Resend {
    /// Identifies a message.
    type Id: Send;

    /// Resends the oldest lost message, once there is room for it; `None` if no message is lost.
    fn resend_next(&self) -> impl Future<Output = Result<Option<Self::Id>, amqp::Error>> + Send;
}

/// Resends all lost messages, in order.
pub(crate) async fn resend_all(lost: &impl Resend) -> Result<(), amqp::Error> {
    while lost.resend_next().await?.is_some() {}
    Ok(())
}

/// Lost messages of which one may be poison: the broker closes the channel for it.
pub(crate) trait ResendSearching: Resend {
    /// Waits until all that was sent on the channel is confirmed.
    fn confirmed(&self) -> impl Future<Output = Result<(), amqp::Error>> + Send;

    /// Fails the message for which the broker closed the channel.
    fn blame(&self, message: Self::Id, error: &amqp::Error);

    /// Closes the channel.
    fn close(&self);
}

/// The search for the message that costs the channel: all are resent together, then fewer at a time, until it is alone.
#[derive(Debug)]
pub(crate) struct PoisonBisection {
    group: usize,
    /// One of so many, from the next on, is the one.
    suspects: usize,
    /// How many groups got through since their size was last changed.
    streak: u32,
}

impl PoisonBisection {
    pub(crate) fn new() -> Self {
        PoisonBisection { group: usize::MAX, suspects: 0, streak: 0 }
    }

    /// Resends all lost messages, in order. Fails if the channel does; one that is still open, but does not take them, is closed.
    pub(crate) async fn resend(
        &mut self,
        lost: &impl ResendSearching,
        cause: LossCause,
    ) -> Result<(), amqp::Error> {
        let resent = self.resend_groups(lost, cause).await;
        if resent.is_err() {
            lost.close();
        }
        resent
    }

    /// Each group is confirmed before the next, if one of the messages may be poison.
    async fn resend_groups(
        &mut self,
        lost: &impl ResendSearching,
        cause: LossCause,
    ) -> Result<(), amqp::Error> {
        let is_awaited = matches!(cause, LossCause::Message | LossCause::ConnectionClosed);
        loop {
            let (mut count, mut last) = (0, None);
            let result = async {
                while count < self.group
                    && let Some(message) = lost.resend_next().await?
                {
                    count += 1;
                    last = Some(message);
                }
                match is_awaited && count > 0 {
                    true => lost.confirmed().await,
                    false => Ok(()),
                }
            };
            if let Err(error) = result.await {
                if is_awaited && count > 0 && is_for_a_message(&error, cause) {
                    self.failed(count);
                    if let (1, Some(message)) = (count, last) {
                        lost.blame(message, &error);
                    }
                }
                return Err(error);
            }
            if count == 0 {
                break;
            }
            self.passed(count);
        }
        match cause {
            LossCause::MissingExchange => lost.confirmed().await,
            _ => Ok(()),
        }
    }

    /// One of so many costs the channel; if it was alone, it is found, and more of its kind may follow.
    fn failed(&mut self, count: usize) {
        let suspects = if count > 1 { count } else { 0 };
        *self = PoisonBisection { group: (count / GROUPS).max(1), suspects, streak: 0 };
    }

    /// So many got through.
    fn passed(&mut self, count: usize) {
        let was_searching = self.suspects > 0;
        self.suspects = self.suspects.saturating_sub(count);
        self.streak = if was_searching { 0 } else { self.streak + 1 };
        if self.streak == STREAK {
            (self.group, self.streak) = (self.group.saturating_mul(2), 0);
        }
    }
}

/// Whether the broker closed the channel for one of the messages that were resent on it.
fn is_for_a_message(error: &amqp::Error, cause: LossCause) -> bool {
    match LossCause::of(error) {
        LossCause::Message => true,
        // The message of another channel may be why, unless the connection was closed for one of these before.
        LossCause::ConnectionClosed => cause == LossCause::ConnectionClosed,
        LossCause::Connection | LossCause::MissingExchange => false,
    }
}
