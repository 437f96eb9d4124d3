//! The keeper of a publisher: gives it a new channel when one is lost, sends again what was not confirmed, and ends what
//! takes too long.

use std::pin::pin;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::state::{Overdue, Patience, PublisherState};
use super::{Phase, Settings, Shared};
use crate::amqp::{
    self, Channel, Connection, ErrorKind as Amqp, ReplyCode, Tracked, deadline_in, lock,
};
use crate::client::core::Core;
use crate::client::line::Up;
use crate::error::Error;

/// A watch is looked at this often in the time that a publish may take.
const TICKS: u32 = 16;

/// And not more often than this, nor more rarely.
const TICK_RANGE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// The pause before a channel that was refused is opened again.
const PAUSE: Duration = Duration::from_millis(100);

/// Messages of which one costs the channel are sent again in so many groups, and those of its group in so many again.
const GROUPS: usize = 32;

/// After so many groups that got through, they become twice as large.
const STREAK: u32 = 8;

pub(super) struct Keeper {
    shared: Arc<Shared>,
    core: Arc<Core>,
    tick: Duration,
    patience: Patience,
}

/// Why a channel is no longer used, which decides how what was lost is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// The connection went, or confirms did not come: all is sent at once.
    Lost,
    /// The broker has closed it because of one of the messages, and does not say which: they are sent in groups, each
    /// confirmed before the next, so that the one it closes the channel for again is found, and the others get through.
    Message,
    /// The broker has closed the connection because of something on it, which may be a message of this channel or what
    /// somebody else has sent: as before, but on a connection that nobody else uses.
    Connection,
    /// The exchange does not exist: all is sent at once, and awaited, to know whether it does now.
    NoExchange,
}

impl Why {
    pub(crate) fn of(error: &amqp::Error) -> Why {
        match error.kind() {
            Amqp::ChannelClosed(ReplyCode::NOT_FOUND) => Why::NoExchange,
            Amqp::ChannelClosed(_) => Why::Message,
            Amqp::ConnectionClosed(code) if code != ReplyCode::CONNECTION_FORCED => Why::Connection,
            _ => Why::Lost,
        }
    }
}

/// How the message is searched for that costs the channel: all are sent together, then fewer at a time, until it is alone.
#[derive(Debug)]
struct Search {
    group: usize,
    /// One of so many, from the next on, is the one.
    suspects: usize,
    /// How many groups got through since their size was last changed.
    streak: u32,
}

impl Search {
    fn new() -> Self {
        Search { group: usize::MAX, suspects: 0, streak: 0 }
    }

    /// One of so many costs the channel; if it was alone, it is found, and more of its kind may follow.
    fn failed(&mut self, count: usize) {
        let suspects = if count > 1 { count } else { 0 };
        *self = Search { group: (count / GROUPS).max(1), suspects, streak: 0 };
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

/// What the keeper wakes for.
enum Wake {
    Tick(Overdue),
    Kick,
}

/// How often the keeper of such a publisher looks at its watch.
pub(super) fn tick(settings: &Settings) -> Duration {
    let shortest = settings.resend_after.unwrap_or(settings.timeout).min(settings.timeout);
    (shortest / TICKS).clamp(TICK_RANGE.0, TICK_RANGE.1)
}

impl Keeper {
    pub(super) fn new(shared: Arc<Shared>, core: Arc<Core>) -> Self {
        let settings = &shared.settings;
        let tick = tick(settings);
        let ticks = |time: Duration| {
            u32::try_from(time.as_nanos() / tick.as_nanos()).unwrap_or(u32::MAX / 2)
        };
        let patience =
            Patience { whole: ticks(settings.timeout), resend: settings.resend_after.map(ticks) };
        Keeper { shared, core, tick, patience }
    }

    /// Keeps the publisher going until the client is closed.
    pub(super) async fn run(self) {
        while let Some(channel) = self.shared.open_now() {
            let why = self.serve(&channel).await;
            self.shared.set_phase(Phase::Interrupted { since: Instant::now() });
            // The channel may report its end before its sink has heard of it.
            let error = self.watching(channel.ended()).await;
            self.shared.with_state(|state, wakers| state.lost(&error, wakers));
            drop(channel);
            match self.watching(self.reopen(why)).await {
                Ok(channel) => self.shared.set_phase(Phase::Open(Arc::new(channel))),
                Err(error) => self.end(error),
            }
        }
    }

    /// Nothing is confirmed any more.
    fn end(&self, error: Error) {
        // At once: what is published after this finds no channel, and what was before is told.
        let _channel = self.shared.with_state(|state, wakers| state.end(&error, wakers));
        self.shared.set_phase(Phase::Ended(error));
    }

    /// Watches over a channel, until it is over.
    async fn serve(&self, channel: &Channel<Tracked>) -> Why {
        loop {
            tokio::select! {
                error = channel.ended() => return Why::of(&error),
                wake = self.next_wake() => if let Wake::Tick(Overdue::Channel) = wake {
                    channel.close_now();
                    return Why::Lost;
                },
            }
        }
    }

    /// Does something, and looks at the watch meanwhile.
    async fn watching<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
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
            self.shared.line.timed_out(what, settings.timeout)
        };
        Wake::Tick(self.shared.with_state(|state, wakers| state.tick(self.patience, late, wakers)))
    }

    /// Opens a channel and sends again what was lost, as often as it takes.
    async fn reopen(&self, mut why: Why) -> Result<Channel<Tracked>, Error> {
        let mut was_restored = false;
        let mut search = Search::new();
        loop {
            let up = self.shared.line.up().await?;
            if why == Why::NoExchange && !was_restored {
                // Somebody has deleted it. If this client declared it before, it does so again.
                let exchange = &self.shared.settings.exchange;
                self.core.remembered.restore_exchange(&up.connection, exchange).await;
                was_restored = true;
            }
            if why == Why::Connection {
                let is_done = tokio::select! {
                    is_done = self.replay_apart(&up) => is_done,
                    () = self.shared.line.ended() => true,
                };
                // If the broker lets nobody else in, what costs the connection again is to blame: it would do so for ever.
                why = if is_done { Why::Message } else { Why::Connection };
            }
            let error = match self.open_and_replay(&up.connection, why, &mut search).await {
                Ok(opened) => return Ok(opened),
                Err(error) => error,
            };
            why = Why::of(&error);
            if why == Why::NoExchange && was_restored {
                let failure = Error::from_amqp(self.shared.settings.what(), error);
                self.shared.with_state(|state, wakers| state.fail_lost(&failure, wakers));
                why = Why::Lost;
            } else if why == Why::Lost && !error.is_connection_error() {
                sleep(PAUSE).await;
            }
        }
    }

    /// Sends again what was lost, on connections of its own to the same broker: one for which such a connection is closed
    /// fails, and the rest has the next. Says whether there were such connections.
    async fn replay_apart(&self, up: &Up) -> bool {
        let name = format!("{}, apart", self.shared.line.name);
        let mut search = Search::new();
        while self.has_to_replay() {
            let connected = self.core.endpoints.get(up.index).connect(&name).await;
            let Ok(connection) = connected else { return false };
            let Ok(channel) = self.shared.open_on(&connection).await else { return false };
            match self.replay(&channel, Why::Connection, &mut search).await {
                Ok(()) => {}
                Err(error) if Why::of(&error) == Why::Lost => return true,
                Err(_) => sleep(PAUSE).await,
            }
        }
        true
    }

    fn has_to_replay(&self) -> bool {
        lock(&self.shared.state).has_lost()
    }

    async fn open_and_replay(
        &self,
        connection: &Connection,
        why: Why,
        search: &mut Search,
    ) -> Result<Channel<Tracked>, amqp::Error> {
        let channel = self.shared.open_on(connection).await?;
        self.replay(&channel, why, search).await?;
        if why == Why::NoExchange {
            channel.confirmed(self.shared.settings.timeout).await?;
        }
        Ok(channel)
    }

    /// Sends again what was lost, in order. Fails if the channel does; one that is still open, but does not take it,
    /// is closed.
    async fn replay(
        &self,
        channel: &Channel<Tracked>,
        why: Why,
        search: &mut Search,
    ) -> Result<(), amqp::Error> {
        let replayed = self.send_lost(channel, why, search).await;
        if replayed.is_err() {
            channel.close_now();
        }
        replayed
    }

    /// In groups, each confirmed before the next, unless nobody is searched for.
    async fn send_lost(
        &self,
        channel: &Channel<Tracked>,
        why: Why,
        search: &mut Search,
    ) -> Result<(), amqp::Error> {
        let is_awaited = matches!(why, Why::Message | Why::Connection);
        loop {
            let (mut count, mut last) = (0, None);
            let result = async {
                while count < search.group
                    && let Some(number) = self.resend(channel).await?
                {
                    count += 1;
                    last = Some(number);
                }
                match is_awaited && count > 0 {
                    true => channel.confirmed(self.shared.settings.timeout).await,
                    false => Ok(()),
                }
            };
            if let Err(error) = result.await {
                if is_awaited && count > 0 && is_for_a_message(&error, why) {
                    search.failed(count);
                    // A channel was closed for one of these: one that was alone fails.
                    if let (1, Some(number)) = (count, last) {
                        self.shared.with_state(|state, wakers| state.blame(number, &error, wakers));
                    }
                }
                return Err(error);
            }
            if count == 0 {
                return Ok(());
            }
            search.passed(count);
        }
    }

    /// Sends the next lost message, once there is room, and gives its number.
    async fn resend(&self, channel: &Channel<Tracked>) -> Result<Option<u64>, amqp::Error> {
        let settings = &self.shared.settings;
        let deadline = deadline_in(settings.timeout);
        loop {
            let resend = |state: &mut PublisherState, wakers: &mut Vec<Waker>| {
                (state.resend(settings, channel, wakers), state.has_lost())
            };
            match self.shared.with_state(resend) {
                (Some(sent), _) => return sent.map(Some),
                (None, false) => return Ok(None),
                (None, true) => channel.until_room(deadline, settings.timeout).await?,
            }
        }
    }
}

impl Drop for Keeper {
    /// Without it, nobody would be told what became of a message.
    fn drop(&mut self) {
        if !matches!(&*self.shared.phase.borrow(), Phase::Ended(_)) {
            self.end(Error::ended_with_its_runtime(self.shared.settings.what()));
        }
    }
}

/// Whether the broker has closed a channel, on which messages were sent again, for one of them.
fn is_for_a_message(error: &amqp::Error, why: Why) -> bool {
    match Why::of(error) {
        Why::Message => true,
        // Where others send, too, it may be one of theirs.
        Why::Connection => why == Why::Connection,
        Why::Lost | Why::NoExchange => false,
    }
}

#[cfg(all(test, feature = "embedded"))]
mod tests {
    use super::*;
    use crate::client::Client;
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
