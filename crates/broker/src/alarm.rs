//! The alarm that stops publishers: too much memory in use, or somebody's wish.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;

/// Counts the memory that messages take, in all virtual hosts together, and says when it is too much.
///
/// Messages that are still being received count as well, but for half of the limit at most. Only their senders can finish them:
/// if they alone could raise the alarm, nothing that consumers do would end it. Beyond that, senders are refused.
#[derive(Debug)]
pub(crate) struct Alarm {
    used: AtomicUsize,
    limit: usize,
    unfinished: AtomicUsize,
    most_unfinished: usize,
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
    /// Whether it is for want of memory.
    pub(crate) fn is_memory(&self) -> bool {
        self.memory
    }

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
    /// There is always room for one message of the largest size to be received.
    pub(crate) fn new(limit: usize, max_message_size: u64) -> Self {
        let max_message_size = usize::try_from(max_message_size).unwrap_or(usize::MAX);
        Alarm {
            used: AtomicUsize::new(0),
            limit,
            unfinished: AtomicUsize::new(0),
            most_unfinished: max_message_size.max(limit / 2),
            raised: watch::Sender::default(),
        }
    }

    /// A virtual host takes more memory than before, or less.
    pub(crate) fn changed(&self, before: usize, after: usize) {
        if change(&self.used, before, after) {
            self.look();
        }
    }

    /// A connection has sent more of messages that are not finished than before, or less. Says whether there is too much of
    /// them in all connections together.
    pub(crate) fn unfinished_changed(&self, before: usize, after: usize) -> bool {
        if change(&self.unfinished, before, after) {
            self.look();
        }
        self.unfinished.load(Ordering::Relaxed) > self.most_unfinished
    }

    fn look(&self) {
        if self.raised.borrow().memory != self.is_too_much() {
            // Looked at anew: another one may have been quicker.
            self.raised.send_modify(|raised| raised.memory = self.is_too_much());
        }
    }

    fn is_too_much(&self) -> bool {
        let unfinished = self.unfinished.load(Ordering::Relaxed).min(self.limit / 2);
        self.used.load(Ordering::Relaxed).saturating_add(unfinished) > self.limit
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
        self.used.load(Ordering::Relaxed) + self.unfinished.load(Ordering::Relaxed)
    }
}

/// Says whether it has changed.
fn change(count: &AtomicUsize, before: usize, after: usize) -> bool {
    match after.checked_sub(before) {
        Some(0) => return false,
        Some(more) => count.fetch_add(more, Ordering::Relaxed),
        None => count.fetch_sub(before - after, Ordering::Relaxed),
    };
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_raised_above_the_limit_and_by_a_wish() {
        let alarm = Alarm::new(100, 10);
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

    #[test]
    fn unfinished_messages_do_not_raise_it_alone() {
        let alarm = Alarm::new(100, 10);
        let is_raised = || alarm.watch().borrow().is_memory();
        assert!(!alarm.unfinished_changed(0, 50));
        assert!(alarm.unfinished_changed(50, 200));
        assert!(!is_raised());
        alarm.changed(0, 51);
        assert!(is_raised());
        assert_eq!(alarm.used(), 251);
        alarm.changed(51, 50);
        assert!(!is_raised());
        alarm.changed(50, 60);
        assert!(is_raised());
        assert!(!alarm.unfinished_changed(200, 40));
        assert!(!is_raised());
    }

    #[test]
    fn one_message_of_the_largest_size_may_always_be_received() {
        let alarm = Alarm::new(10, 1000);
        assert!(!alarm.unfinished_changed(0, 1000));
        assert!(alarm.unfinished_changed(1000, 1001));
        assert!(!alarm.watch().borrow().is_memory());
    }
}
