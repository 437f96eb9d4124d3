//! The keeper of a publisher: gives it a new channel when one is lost, sends again what was not confirmed, and ends what
//! takes too long.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::book::{Again, Overdue, Patience, lost};
use super::{OnLoss, Phase, Shared, open};
use crate::amqp::{
    self, Channel, Confirm, Connection, ErrorKind as Amqp, Publish, ReplyCode, lock,
};
use crate::client::core::Core;
use crate::client::line::Line;
use crate::error::Error;

/// A watch is looked at this often in the time that a publish may take.
const TICKS: u32 = 16;

/// And not more often than this, nor more rarely.
const TICK_RANGE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// The pause before a channel that was refused is opened again.
const PAUSE: Duration = Duration::from_millis(100);

pub(super) struct Keeper {
    shared: Arc<Shared>,
    core: Arc<Core>,
    line: Arc<Line>,
    tick: Duration,
    patience: Patience,
}

/// Why a channel is no longer used, which decides how what was lost is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// The connection went, or confirms did not come: all is sent at once.
    Lost,
    /// The broker has closed it because of one of the messages, and does not say which: each is confirmed before the next
    /// is sent, so that the one it closes the channel for again is found, and the others get through.
    Message,
    /// The exchange does not exist: all is sent at once, and awaited, to know whether it does now.
    NoExchange,
}

impl Why {
    fn of(error: &amqp::Error) -> Why {
        match error.kind() {
            Amqp::ChannelClosed(ReplyCode::NOT_FOUND) => Why::NoExchange,
            Amqp::ChannelClosed(_) => Why::Message,
            Amqp::ConnectionClosed(code) if code != ReplyCode::CONNECTION_FORCED => Why::Message,
            _ => Why::Lost,
        }
    }
}

/// What the keeper wakes for.
enum Wake {
    Tick(Overdue),
    Kick,
}

impl Keeper {
    pub(super) fn new(shared: Arc<Shared>, core: Arc<Core>, line: Arc<Line>) -> Self {
        let settings = &shared.settings;
        let shortest = settings.resend_after.unwrap_or(settings.timeout).min(settings.timeout);
        let tick = (shortest / TICKS).clamp(TICK_RANGE.0, TICK_RANGE.1);
        let ticks = |time: Duration| {
            u32::try_from(time.as_nanos() / tick.as_nanos()).unwrap_or(u32::MAX / 2)
        };
        let patience =
            Patience { whole: ticks(settings.timeout), resend: settings.resend_after.map(ticks) };
        Keeper { shared, core, line, tick, patience }
    }

    /// Keeps the publisher going until the client is closed.
    pub(super) async fn run(self) {
        while let Some((channel, _)) = self.shared.open_now() {
            let why = self.serve(&channel).await;
            self.shared.phase.send_replace(Phase::Interrupted);
            drop(channel);
            let phase = match self.watching(self.reopen(why)).await {
                Ok((channel, epoch)) => Phase::Open { channel, epoch },
                Err(error) => {
                    lock(&self.shared.book).fail_all(&error);
                    Phase::Ended(error)
                }
            };
            self.shared.phase.send_replace(phase);
        }
    }

    /// Watches over a channel, until it is over.
    async fn serve(&self, channel: &Channel<Confirm>) -> Why {
        // Something may have gone over the channel before, after all that was on it had been sent again.
        self.shared.kick.notify_one();
        loop {
            let wake = tokio::select! {
                error = channel.ended() => return Why::of(&error),
                wake = self.next_wake() => wake,
            };
            match wake {
                Wake::Tick(Overdue::Nothing) => {}
                Wake::Tick(Overdue::Channel) => {
                    channel.close_now();
                    return Why::Lost;
                }
                Wake::Kick => {
                    if let Err(error) = self.replay(channel, Why::Lost).await {
                        return Why::of(&error);
                    }
                }
            }
        }
    }

    /// Does something, and looks at the watch meanwhile.
    async fn watching<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                _ = self.next_wake() => {}
            }
        }
    }

    /// Waits for a tick of the watch or a kick, whatever is first; where nothing is to be watched, for a kick.
    async fn next_wake(&self) -> Wake {
        let kick = self.shared.kick.notified();
        if lock(&self.shared.book).rest() {
            kick.await;
            return Wake::Kick;
        }
        tokio::select! {
            () = kick => return Wake::Kick,
            () = sleep(self.tick) => {}
        }
        let settings = &self.shared.settings;
        let late = || {
            let what = format!("{}, and the broker's confirmation of it,", settings.what());
            Error::timed_out(what, settings.timeout)
        };
        Wake::Tick(lock(&self.shared.book).tick(self.patience, late))
    }

    /// Opens a channel and sends again what was lost, as often as it takes.
    async fn reopen(&self, mut why: Why) -> Result<(Arc<Channel<Confirm>>, u64), Error> {
        let mut was_restored = false;
        loop {
            let up = self.line.up().await?;
            if why == Why::NoExchange && !was_restored {
                // Somebody has deleted it. If this client declared it before, it does so again.
                let exchange = &self.shared.settings.exchange;
                self.core.remembered.restore_exchange(&up.connection, exchange).await;
                was_restored = true;
            }
            let error = match self.open_and_replay(&up.connection, why).await {
                Ok(opened) => return Ok(opened),
                Err(error) => error,
            };
            why = Why::of(&error);
            if why == Why::NoExchange && was_restored {
                let failure = Error::from_amqp(self.shared.settings.what(), error);
                lock(&self.shared.book).fail_lost(&failure);
                why = Why::Lost;
            } else if why == Why::Lost && !error.is_connection_error() {
                sleep(PAUSE).await;
            }
        }
    }

    async fn open_and_replay(
        &self,
        connection: &Connection,
        why: Why,
    ) -> Result<(Arc<Channel<Confirm>>, u64), amqp::Error> {
        let channel = Arc::new(open(connection, &self.shared.settings).await?);
        let epoch = lock(&self.shared.book).begin_epoch();
        self.replay(&channel, why).await?;
        if why == Why::NoExchange {
            channel.confirmed(self.shared.settings.timeout).await?;
        }
        Ok((channel, epoch))
    }

    /// Sends again what was lost, in order. Fails if the channel does.
    async fn replay(&self, channel: &Channel<Confirm>, why: Why) -> Result<(), amqp::Error> {
        if self.shared.settings.on_loss == OnLoss::Fail {
            return Ok(());
        }
        let mut next = 0;
        while let Some(again) = { lock(&self.shared.book).lost_from(next) } {
            next = again.number + 1;
            self.send_again(channel, &again).await?;
            if why != Why::Message {
                continue;
            }
            if let Err(error) = channel.confirmed(self.shared.settings.timeout).await {
                if Why::of(&error) != Why::Lost {
                    let failure = lost(again.routing_key(), error.clone());
                    lock(&self.shared.book).fail(again.number, failure);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    async fn send_again(
        &self,
        channel: &Channel<Confirm>,
        again: &Again,
    ) -> Result<(), amqp::Error> {
        let settings = &self.shared.settings;
        let publish = Publish {
            exchange: &settings.exchange,
            routing_key: again.routing_key(),
            mandatory: settings.mandatory,
            properties: again.properties(),
            body: again.body.clone(),
        };
        match channel.publish_within(&publish, settings.timeout).await {
            Ok(confirmation) => {
                lock(&self.shared.book).sent_again(again.number, confirmation);
                Ok(())
            }
            // This broker takes smaller frames than the one before.
            Err(error) if error.kind() == Amqp::InvalidArgument => {
                let failure = lost(again.routing_key(), error);
                lock(&self.shared.book).fail(again.number, failure);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}
