//! The task of a publisher: opens its channel again after a loss, resends what was not confirmed, and fails what takes too long.

use std::pin::pin;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use tokio::time::sleep;

use super::state::{Overdue, Patience, PublisherState};
use super::{Settings, Shared};
use crate::amqp::{self, Channel, Connection, Tracked, deadline_in, lock};
use crate::connection::core::Core;
use crate::connection::managed::LiveConnection;
use crate::connection::{LossCause, PoisonBisection, Resend, ResendSearching};
use crate::error::Error;

/// How many ticks the shortest timeout of a publish has.
const TICKS: u32 = 16;

/// How long a tick may be.
const TICK_RANGE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// The pause before a channel that was refused is opened again.
const PAUSE: Duration = Duration::from_millis(100);

pub(super) struct PublisherTask {
    shared: Arc<Shared>,
    core: Arc<Core>,
    tick: Duration,
    patience: Patience,
}

/// Why the task is woken.
enum Wake {
    Tick(Overdue),
    Kick,
}

/// How often the task of such a publisher checks its deadlines.
pub(super) fn tick(settings: &Settings) -> Duration {
    let shortest = settings.resend_after.unwrap_or(settings.timeout).min(settings.timeout);
    (shortest / TICKS).clamp(TICK_RANGE.0, TICK_RANGE.1)
}

impl PublisherTask {
    pub(super) fn new(shared: Arc<Shared>, core: Arc<Core>) -> Self {
        let settings = &shared.settings;
        let tick = tick(settings);
        let ticks = |time: Duration| {
            u32::try_from(time.as_nanos() / tick.as_nanos()).unwrap_or(u32::MAX / 2)
        };
        let patience =
            Patience { whole: ticks(settings.timeout), resend: settings.resend_after.map(ticks) };
        PublisherTask { shared, core, tick, patience }
    }

    /// Keeps the publisher going until the client is closed.
    pub(super) async fn run(self) {
        while let Some(channel) = self.shared.channel.with_open(Arc::clone) {
            let cause = self.serve(&channel).await;
            self.shared.channel_is_lost();
            // The channel may report its end before its sink has been told.
            let error = self.with_deadlines(channel.ended()).await;
            self.shared.with_state(|state, wakers| state.lost(&error, wakers));
            drop(channel);
            match self.with_deadlines(self.reopen(cause)).await {
                Ok(channel) => self.shared.channel_is_open(channel),
                Err(error) => self.end(error),
            }
        }
    }

    /// Nothing is confirmed any more.
    fn end(&self, error: Error) {
        // First the state: a message published from here on finds no channel, and those published before fail.
        let _channel = self.shared.with_state(|state, wakers| state.end(&error, wakers));
        self.shared.channel_has_ended(error);
    }

    /// Checks deadlines until the channel is lost.
    async fn serve(&self, channel: &Channel<Tracked>) -> LossCause {
        loop {
            tokio::select! {
                error = channel.ended() => return LossCause::of(&error),
                wake = self.next_wake() => if let Wake::Tick(Overdue::Channel) = wake {
                    channel.close_now();
                    return LossCause::Connection;
                },
            }
        }
    }

    /// Awaits `work`, and checks deadlines meanwhile.
    async fn with_deadlines<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                _ = self.next_wake() => {}
            }
        }
    }

    /// Waits for a tick or a kick, whatever is first; for a kick alone while nothing is unconfirmed.
    async fn next_wake(&self) -> Wake {
        let kick = self.shared.kick.notified();
        if lock(&self.shared.state).rest() {
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
            self.shared.channel.connection().timed_out(what, settings.timeout)
        };
        Wake::Tick(self.shared.with_state(|state, wakers| state.tick(self.patience, late, wakers)))
    }

    /// Opens a channel and resends what was lost, as often as it takes.
    async fn reopen(&self, mut cause: LossCause) -> Result<Channel<Tracked>, Error> {
        let line = self.shared.channel.connection();
        let mut was_restored = false;
        let mut bisection = PoisonBisection::new();
        loop {
            let up = line.up().await?;
            if cause == LossCause::MissingExchange && !was_restored {
                // It was deleted. If this client declared it before, it does so again.
                let exchange = &self.shared.settings.exchange;
                self.core.remembered.restore_exchange(&up.connection, exchange).await;
                was_restored = true;
            }
            if cause == LossCause::ConnectionClosed {
                let is_done = tokio::select! {
                    is_done = self.resend_apart(&up) => is_done,
                    () = line.ended() => true,
                };
                // Without a connection of its own, a message that costs the connection again is to blame: it would do so for ever.
                cause = if is_done { LossCause::Message } else { LossCause::ConnectionClosed };
            }
            let error = match self.open_and_resend(&up.connection, cause, &mut bisection).await {
                Ok(opened) => return Ok(opened),
                Err(error) => error,
            };
            cause = LossCause::of(&error);
            if cause == LossCause::MissingExchange && was_restored {
                let failure = Error::from_amqp(self.shared.settings.what(), error);
                self.shared.with_state(|state, wakers| state.fail_lost(&failure, wakers));
                cause = LossCause::Connection;
            } else if cause == LossCause::Connection && !error.is_connection_error() {
                sleep(PAUSE).await;
            }
        }
    }

    /// Resends what was lost on connections of its own to the same broker, so that a message for which the broker closes the connection
    /// costs no other user's channel. Returns false if the broker grants no such connection.
    async fn resend_apart(&self, up: &LiveConnection) -> bool {
        let name = format!("{}, apart", self.shared.channel.connection().name);
        let mut bisection = PoisonBisection::new();
        while lock(&self.shared.state).has_lost() {
            let connected = self.core.endpoints.get(up.index).connect(&name).await;
            let Ok(connection) = connected else { return false };
            let Ok(channel) = self.shared.open_on(&connection).await else { return false };
            match self.resend(&channel, LossCause::ConnectionClosed, &mut bisection).await {
                Ok(()) => {}
                Err(error) if LossCause::of(&error) == LossCause::Connection => return true,
                Err(_) => sleep(PAUSE).await,
            }
        }
        true
    }

    async fn open_and_resend(
        &self,
        connection: &Connection,
        cause: LossCause,
        bisection: &mut PoisonBisection,
    ) -> Result<Channel<Tracked>, amqp::Error> {
        let channel = self.shared.open_on(connection).await?;
        self.resend(&channel, cause, bisection).await?;
        Ok(channel)
    }

    async fn resend(
        &self,
        channel: &Channel<Tracked>,
        cause: LossCause,
        bisection: &mut PoisonBisection,
    ) -> Result<(), amqp::Error> {
        bisection.resend(&Lost { shared: &self.shared, channel }, cause).await
    }
}

impl Drop for PublisherTask {
    /// Without it, no message would get its outcome.
    fn drop(&mut self) {
        if !self.shared.channel.is_ended() {
            self.end(Error::ended_with_its_runtime(self.shared.settings.what()));
        }
    }
}

/// The lost messages of a publisher, and its next channel.
struct Lost<'a> {
    shared: &'a Shared,
    channel: &'a Channel<Tracked>,
}

impl Resend for Lost<'_> {
    type Id = u64;

    async fn resend_next(&self) -> Result<Option<u64>, amqp::Error> {
        let settings = &self.shared.settings;
        let deadline = deadline_in(settings.timeout);
        loop {
            let resend = |state: &mut PublisherState, wakers: &mut Vec<Waker>| {
                (state.resend(settings, self.channel, wakers), state.has_lost())
            };
            match self.shared.with_state(resend) {
                (Some(sent), _) => return sent.map(Some),
                (None, false) => return Ok(None),
                (None, true) => self.channel.until_room(deadline, settings.timeout).await?,
            }
        }
    }
}

impl ResendSearching for Lost<'_> {
    async fn confirmed(&self) -> Result<(), amqp::Error> {
        self.channel.confirmed(self.shared.settings.timeout).await
    }

    fn blame(&self, number: u64, error: &amqp::Error) {
        self.shared.with_state(|state, wakers| state.blame(number, error, wakers));
    }

    fn close(&self) {
        self.channel.close_now();
    }
}

#[cfg(all(test, feature = "embedded"))]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::connection::Client;
    use crate::error::ErrorKind;
    use crate::topology::{Queue, Topology};

    #[tokio::test(start_paused = true)]
    async fn deadlines_are_kept_while_something_is_sent_again() {
        let patience = Duration::from_secs(10);
        let broker = leveret_broker::Broker::builder().start().unwrap();
        let client = Client::builder().broker(&broker).connect().await.unwrap();
        client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
        let publisher = client.publisher("").timeout(patience).build().await.unwrap();
        broker.faults().freeze();
        let began = Instant::now();
        let mut tickets = Vec::new();
        for number in 0..10 {
            tickets.push(publisher.send("q", vec![number; 100_000]).await.unwrap());
        }
        // The next connection takes no more than fills the outbound buffer.
        broker.faults().cut_all_connections();
        broker.faults().block("no memory");
        broker.faults().thaw();
        for ticket in tickets {
            if let Err(error) = ticket.await {
                assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
            }
        }
        assert!(began.elapsed() >= patience, "nothing was held up");
        assert!(began.elapsed() < 2 * patience, "after {:?}", began.elapsed());
        assert!(!lock(&publisher.shared().state).has_lost());
    }
}
