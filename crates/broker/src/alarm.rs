//! The alarm that stops publishers: too much memory in use, or somebody's wish.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;

/// Counts the memory that messages take, in all virtual hosts together, and says when it is too much.
#[derive(Debug)]
pub(crate) struct Alarm {
    used: AtomicUsize,
    limit: usize,
    raised: watch::Sender<Raised>,
}

/// Why publishers are stopped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Raised {
    memory: bool,
    /// Somebody wants it so.
    wished: Option<String>,
}

impl Raised {
    /// The reason that clients are told, if publishers are stopped.
    pub(crate) fn reason(&self) -> Option<&str> {
        match self {
            Raised { wished: Some(reason), .. } => Some(reason),
            Raised { memory: true, .. } => Some("low on memory"),
            Raised { .. } => None,
        }
    }
}

impl Alarm {
    pub(crate) fn new(limit: usize) -> Self {
        Alarm { used: AtomicUsize::new(0), limit, raised: watch::Sender::default() }
    }

    /// A virtual host takes more memory than before, or less.
    pub(crate) fn changed(&self, before: usize, after: usize) {
        if before == after {
            return;
        }
        let used = match after.checked_sub(before) {
            Some(more) => self.used.fetch_add(more, Ordering::Relaxed) + more,
            None => self.used.fetch_sub(before - after, Ordering::Relaxed) - (before - after),
        };
        let too_much = used > self.limit;
        if self.raised.borrow().memory != too_much {
            // Looked at anew: another one may have been quicker.
            let too_much = || self.used.load(Ordering::Relaxed) > self.limit;
            self.raised.send_modify(|raised| raised.memory = too_much());
        }
    }

    /// Stops publishers for this reason, or lets them go on.
    pub(crate) fn wish(&self, reason: Option<String>) {
        self.raised.send_modify(|raised| raised.wished = reason);
    }

    pub(crate) fn watch(&self) -> watch::Receiver<Raised> {
        self.raised.subscribe()
    }

    /// How much memory messages take, about.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_raised_above_the_limit_and_by_a_wish() {
        let alarm = Alarm::new(100);
        let reason = || alarm.watch().borrow().reason().map(str::to_owned);
        alarm.changed(0, 100);
        assert_eq!(reason(), None);
        alarm.changed(10, 11);
        assert_eq!(reason().as_deref(), Some("low on memory"));
        alarm.changed(50, 20);
        assert_eq!((reason(), alarm.used()), (None, 71));
        alarm.wish(Some("because".to_owned()));
        assert_eq!(reason().as_deref(), Some("because"));
        alarm.wish(None);
        assert_eq!(reason(), None);
    }
}
