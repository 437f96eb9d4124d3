//! Decides when a broker that has fallen silent counts as dead.
//!
//! ```text
//!   heard from ----> silent ---- two intervals ----------------------------------------> dead
//!      ^               |
//!      |               +-- a call or publish waits --> asked -- no answer for 5 s,
//!      +--- any frame -+---------------------------------+      silent for an interval and 2 s --> dead
//! ```
//!
//! The question is a `channel.flow` on an open channel, which RabbitMQ answers at once. A missing answer alone proves
//! nothing: a broker that slows a publisher down stops reading from its connection. It sends heartbeats all the same, at
//! least one in an interval, so the verdict waits for one of those as well. A connection that is blocked is not asked.

use std::pin::pin;
use std::time::Duration;

use super::connection::Core;
use super::error::{Error, ErrorKind};
use super::idle::IdleTimer;

/// The clock ticks at least this often, if there are heartbeats. All other times are rounded up to its ticks.
const LONGEST_TICK: Duration = Duration::from_millis(2500);

/// A call or publish that has waited for this long on a silent connection is a reason to ask the broker.
const ASK_AFTER: Duration = Duration::from_secs(1);

/// From then on, the connection is not healthy.
pub(super) const UNHEALTHY_AFTER: Duration = Duration::from_secs(4);

/// The broker has this long to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// A heartbeat may come so much later than after one interval.
const HEARTBEAT_DELAY: Duration = Duration::from_secs(2);

/// What the reader of a connection knows of the broker being alive.
#[derive(Debug)]
pub(super) struct Liveness {
    timer: IdleTimer,
    /// The interval that was agreed on; zero if there are no heartbeats.
    heartbeat: Duration,
    tick: Duration,
    /// At how many ticks in a row something waited for the broker.
    waiting_ticks: u32,
    /// How long it had waited when the broker was asked.
    asked_at: Option<Duration>,
}

impl Liveness {
    pub(super) fn new(heartbeat: Duration) -> Self {
        let tick = (heartbeat / 4).min(LONGEST_TICK);
        let timer = IdleTimer::new(tick);
        Liveness { timer, heartbeat, tick, waiting_ticks: 0, asked_at: None }
    }

    /// Something came from the broker.
    pub(super) fn heard(&mut self, core: &Core) {
        self.timer.reset();
        if self.waiting_ticks > 0 {
            (self.waiting_ticks, self.asked_at) = (0, None);
            core.set_suspected(false);
            core.set_unanswered(false);
        }
    }

    /// Waits for a read, as long as the broker may take to be heard from.
    pub(super) async fn within<T>(
        &mut self,
        core: &Core,
        read: impl Future<Output = T>,
    ) -> Result<T, Error> {
        let mut read = pin!(read);
        loop {
            match self.timer.until_tick(read.as_mut()).await {
                Some(read) => return Ok(read),
                None => self.check(core)?,
            }
        }
    }

    fn check(&mut self, core: &Core) -> Result<(), Error> {
        let silent = self.timer.idle_for();
        if silent >= self.heartbeat * 2 {
            return Err(dead(format!("nothing was heard from the broker for {silent:?}")));
        }
        if !core.is_awaited() {
            (self.waiting_ticks, self.asked_at) = (0, None);
            core.set_unanswered(false);
            return Ok(());
        }
        self.waiting_ticks += 1;
        let waited = self.tick * (self.waiting_ticks - 1);
        core.set_unanswered(waited >= UNHEALTHY_AFTER);
        let asked_at = match self.asked_at {
            Some(asked_at) => asked_at,
            None if waited >= ASK_AFTER || core.is_suspected() => {
                core.ask();
                *self.asked_at.insert(waited)
            }
            None => return Ok(()),
        };
        let was_due = silent >= self.heartbeat + HEARTBEAT_DELAY;
        if was_due && waited >= asked_at + ANSWER_WITHIN {
            let text = "nothing was heard from the broker";
            return Err(dead(format!("{text} for {silent:?}, in which it owed an answer")));
        }
        Ok(())
    }
}

fn dead(text: String) -> Error {
    Error::new(ErrorKind::HeartbeatLost, text)
}
