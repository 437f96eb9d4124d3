//! A virtual host that many sessions share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::sleep_until;

use super::{Settings, Vhost};
use crate::alarm::Alarm;
use crate::time::Clock;

/// A virtual host and its lock, the clock it is told the time by, and what wakes its timekeeper.
#[derive(Debug)]
pub(crate) struct Host {
    vhost: Mutex<Vhost>,
    clock: Clock,
    /// There is a deadline before the one that the timekeeper waits for.
    earlier: Notify,
    alarm: Arc<Alarm>,
}

impl Host {
    pub(crate) fn new(name: &str, settings: Settings, clock: Clock, alarm: Arc<Alarm>) -> Self {
        let vhost = Mutex::new(Vhost::new(name, settings, clock));
        Host { vhost, clock, earlier: Notify::new(), alarm }
    }

    fn lock(&self) -> MutexGuard<'_, Vhost> {
        self.vhost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the state machine: tells it the time before, and wakes whom it has something for after.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Vhost) -> T) -> T {
        let mut vhost = self.lock();
        vhost.set_now(self.clock.now());
        let (before, memory) = (vhost.next_deadline(), vhost.memory());
        let result = work(&mut vhost);
        let wakes = vhost.finish();
        let earlier = vhost.next_deadline() < before;
        self.alarm.changed(memory, vhost.memory());
        drop(vhost);
        for outlet in wakes {
            outlet.wake();
        }
        if earlier {
            self.earlier.notify_one();
        }
        result
    }

    /// Keeps the deadlines of the virtual host, for ever: to be run as a task, and to be ended with the broker.
    pub(crate) async fn keep_time(self: Arc<Self>) {
        loop {
            let next = self.lock().next_deadline();
            match self.clock.instant(next) {
                None => self.earlier.notified().await,
                Some(instant) => {
                    tokio::select! {
                        () = sleep_until(instant) => self.with(Vhost::meet_deadlines),
                        () = self.earlier.notified() => {}
                    }
                }
            }
        }
    }
}
