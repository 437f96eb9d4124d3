//! The keeper of a publisher: gives it a new channel when one is lost, sends again what was not confirmed, and ends what
//! takes too long.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::book::{Again, Overdue, Patience, lost};
use super::{OnLoss, Open, Phase, Settings, Shared, open};
use crate::amqp::{
    self, Channel, Confirm, Connection, ErrorKind as Amqp, Publish, ReplyCode, lock,
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

/// What was sent again together.
#[derive(Default)]
struct Sent {
    count: usize,
    last: Option<Again>,
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
        while let Some(open) = self.shared.open_now() {
            let why = self.serve(&open.channel).await;
            self.shared.set_phase(Phase::Interrupted { since: Instant::now() });
            drop(open);
            match self.watching(self.reopen(why)).await {
                Ok(open) => self.shared.set_phase(Phase::Open(open)),
                Err(error) => self.end(error),
            }
        }
    }

    /// Nothing is confirmed any more.
    fn end(&self, error: Error) {
        {
            // At once: what is published after this finds no channel, and what was before is told.
            let mut desk = lock(&self.shared.desk);
            desk.open = None;
            desk.book.end(&error);
        }
        self.shared.set_phase(Phase::Ended(error));
    }

    /// Watches over a channel, until it is over.
    async fn serve(&self, channel: &Channel<Confirm>) -> Why {
        loop {
            // Something may have gone over the channel before, after all that was on it had been sent again.
            let mut search = Search::new();
            let mut replay = pin!(self.replay(channel, Why::Lost, &mut search));
            let (mut is_replaying, mut is_kicked) = (true, false);
            while is_replaying || !is_kicked {
                tokio::select! {
                    error = channel.ended() => return Why::of(&error),
                    replayed = &mut replay, if is_replaying => match replayed {
                        Ok(()) => is_replaying = false,
                        Err(error) => return Why::of(&error),
                    },
                    wake = self.next_wake() => match wake {
                        Wake::Kick => is_kicked = true,
                        Wake::Tick(Overdue::Nothing) => {}
                        Wake::Tick(Overdue::Channel) => {
                            channel.close_now();
                            return Why::Lost;
                        }
                    },
                }
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
        if lock(&self.shared.desk).book.rest() {
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
        Wake::Tick(lock(&self.shared.desk).book.tick(self.patience, late))
    }

    /// Opens a channel and sends again what was lost, as often as it takes.
    async fn reopen(&self, mut why: Why) -> Result<Open, Error> {
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
                lock(&self.shared.desk).book.fail_lost(&failure);
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
            let Ok(channel) = open(&connection, &self.shared.settings).await else { return false };
            match self.replay(&channel, Why::Connection, &mut search).await {
                Ok(()) => {}
                Err(error) if Why::of(&error) == Why::Lost => return true,
                Err(_) => sleep(PAUSE).await,
            }
        }
        true
    }

    fn has_to_replay(&self) -> bool {
        self.shared.settings.on_loss == OnLoss::Replay
            && lock(&self.shared.desk).book.lost_from(0).is_some()
    }

    async fn open_and_replay(
        &self,
        connection: &Connection,
        why: Why,
        search: &mut Search,
    ) -> Result<Open, amqp::Error> {
        let channel = Arc::new(open(connection, &self.shared.settings).await?);
        let epoch = lock(&self.shared.desk).book.begin_epoch();
        self.replay(&channel, why, search).await?;
        if why == Why::NoExchange {
            channel.confirmed(self.shared.settings.timeout).await?;
        }
        Ok(Open { channel, epoch })
    }

    /// Sends again what was lost, in order. Fails if the channel does; one that is still open, but does not take it,
    /// is closed.
    async fn replay(
        &self,
        channel: &Channel<Confirm>,
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
        channel: &Channel<Confirm>,
        why: Why,
        search: &mut Search,
    ) -> Result<(), amqp::Error> {
        if self.shared.settings.on_loss == OnLoss::Fail {
            return Ok(());
        }
        let is_awaited = matches!(why, Why::Message | Why::Connection);
        let mut next = 0;
        loop {
            let mut sent = Sent::default();
            let result = async {
                while sent.count < search.group
                    && let Some(again) = { lock(&self.shared.desk).book.lost_from(next) }
                {
                    self.send_again(channel, &again).await?;
                    next = again.number + 1;
                    sent.count += 1;
                    sent.last = Some(again);
                }
                match is_awaited && sent.count > 0 {
                    true => channel.confirmed(self.shared.settings.timeout).await.map(drop),
                    false => Ok(()),
                }
            };
            if let Err(error) = result.await {
                if is_awaited && sent.count > 0 && is_for_a_message(&error, why) {
                    search.failed(sent.count);
                    self.blame(sent, &error);
                }
                return Err(error);
            }
            if sent.count == 0 {
                return Ok(());
            }
            search.passed(sent.count);
        }
    }

    /// A channel was closed for one of these: one that was alone fails.
    fn blame(&self, sent: Sent, error: &amqp::Error) {
        if let (1, Some(last)) = (sent.count, sent.last) {
            let failure = lost(last.routing_key(), error.clone());
            lock(&self.shared.desk).book.fail(last.number, failure);
        }
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
                lock(&self.shared.desk).book.sent_again(again.number, confirmation);
                Ok(())
            }
            // This broker takes smaller frames than the one before.
            Err(error) if error.kind() == Amqp::InvalidArgument => {
                let failure = lost(again.routing_key(), error);
                lock(&self.shared.desk).book.fail(again.number, failure);
                Ok(())
            }
            Err(error) => Err(error),
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
    use crate::amqp::Properties;
    use crate::client::Client;
    use crate::error::ErrorKind;
    use crate::publisher::Ticket;
    use crate::publisher::heads::Heads;
    use crate::topology::{Queue, Topology};

    #[tokio::test(start_paused = true)]
    async fn deadlines_are_kept_while_something_is_sent_again() {
        let patience = Duration::from_secs(10);
        let broker = leveret_broker::Broker::builder().start().unwrap();
        let client = Client::builder().broker(&broker).connect().await.unwrap();
        client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
        let publisher = client.publisher("").timeout(patience).build().await.unwrap();
        let shared = publisher.shared();

        // A message of a channel that was lost, entered when the next channel is at work already.
        let up = shared.line.up().await.unwrap();
        let lost = open(&up.connection, &shared.settings).await.unwrap();
        let publish = Publish { routing_key: "q", body: "1".into(), ..Publish::default() };
        let confirmation = lost.publish_now(&publish).unwrap().unwrap();
        lost.close_now();
        let mut heads = Heads::default();
        let place = heads.add(&Properties::default(), "q");
        let head = heads.take_last(place);

        broker.faults().block("no memory");
        publisher.publish("q", "the last").await.unwrap();
        up.connection.blocked().wait_for(Option::is_some).await.unwrap();
        let began = Instant::now();
        let number = shared.enter(&head, publish.body, confirmation, u64::MAX).unwrap();
        let error = Ticket::new(Arc::clone(&publisher.handle), number).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert!(began.elapsed() < 2 * patience, "after {:?}", began.elapsed());
    }
}
