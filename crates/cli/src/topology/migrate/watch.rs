//! When a queue that is being emptied is known to be empty.

use crate::management::QueueFacts;

/// Who may still send to a queue that is being emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Others {
    /// Nobody can.
    None,
    /// Who knows its name; it has to be known that there is nobody.
    LookedFor,
    /// Who knows its name, and that is how it is.
    Allowed,
}

/// What is known of a queue that is being emptied. Counts come every few seconds, with nothing that says when they were made but
/// how much the queue's process had computed by then.
#[derive(Debug)]
pub(super) struct Watch {
    others: Others,
    /// What it had computed at the last count.
    last: Option<u64>,
    /// How many new counts have come.
    counts: u32,
    /// In how many of the last of them nothing was out.
    clear: u32,
    /// How many messages had been published into it.
    published: Option<u64>,
    /// How often in a row no new count came, and nothing was known to be in it.
    silent: u32,
}

/// New counts in which nothing is out. The first may be of the time before.
const CLEAR: u32 = 2;
/// New counts after which it is known how many messages were published before the queue was cut off. Publishers' channels report
/// on their own, as often.
const SETTLED: u32 = 4;
/// So often without a new count, a queue that only the migration fills is taken for idle: by then, after a minute, counts of what
/// was in it would have come.
const SILENT: u32 = 200;
/// New counts after which somebody who sends all the time would have been noticed.
const NOTICED: u32 = 6;

impl Watch {
    pub(super) fn new(others: Others) -> Self {
        Watch { others, last: None, counts: 0, clear: 0, published: None, silent: 0 }
    }

    pub(super) fn note(&mut self, facts: &QueueFacts, ready: u32, consumers: u32) {
        let is_new = self.last.is_some() && facts.reductions != self.last;
        self.last = facts.reductions;
        if is_new {
            self.counts += 1;
            self.clear += 1;
        }
        let is_zero = |count: Option<u64>| count.unwrap_or(0) == 0;
        let may_be_idle = is_zero(facts.messages) && is_zero(facts.out()) && ready + consumers == 0;
        self.silent = if is_new || !may_be_idle { 0 } else { self.silent + 1 };
        // What is ready now, or was when it was counted, may be at a consumer by then.
        let has_some = ready > 0 || facts.messages.is_some_and(|messages| messages > 0);
        if facts.out() != Some(0) || (has_some && self.others != Others::Allowed) {
            self.clear = 0;
        }
        if self.counts >= SETTLED {
            self.published.get_or_insert(facts.published());
        }
    }

    /// Whether somebody sends to it by its name who should not.
    pub(super) fn has_seen_others(&self, facts: &QueueFacts) -> bool {
        let more = self.published.is_some_and(|published| facts.published() > published);
        self.others == Others::LookedFor && more
    }

    /// Whether nothing is out, and nobody was noticed.
    pub(super) fn is_over(&self) -> bool {
        let is_idle = self.others == Others::None && self.silent >= SILENT;
        is_idle
            || self.clear >= CLEAR && (self.others != Others::LookedFor || self.counts >= NOTICED)
    }

    /// Whether the broker does not count it, and nothing is known to be in it. It is 0 for a queue whose leader is away, too.
    pub(super) fn is_silent(&self) -> bool {
        self.others == Others::None && self.silent >= SILENT
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn facts(unacked: Option<u64>, reductions: u64, published: u64) -> QueueFacts {
        let facts = json!({
            "messages_unacknowledged": unacked, "reductions": reductions, "message_stats": { "publish": published },
        });
        serde_json::from_value(facts).unwrap()
    }

    #[test]
    fn a_queue_is_empty_when_it_was_counted_since_and_nothing_was_out() {
        let mut watch = Watch::new(Others::None);
        let mut after = |unacked, reductions, ready| {
            watch.note(&facts(unacked, reductions, 0), ready, 0);
            watch.is_over()
        };
        // What is known at first, and the count after it, may be old.
        assert_eq!(
            [10, 10, 20, 20, 30].map(|at| after(Some(0), at, 0)),
            [false, false, false, false, true]
        );
        // Somebody has a message, or may have taken one, or nobody knows: it begins anew.
        for (unacked, ready) in [(Some(1), 0), (Some(0), 1), (None, 0)] {
            assert!(!after(unacked, 40, ready));
            assert_eq!([40, 50, 60].map(|at| after(Some(0), at, 0)), [false, false, true]);
        }
        // It was ready when it was counted, and is not now.
        let counted = json!({ "messages": 1, "messages_unacknowledged": 0, "reductions": 70 });
        watch.note(&serde_json::from_value(counted).unwrap(), 0, 0);
        assert!(!watch.is_over());
    }

    #[test]
    fn a_queue_of_ours_that_the_broker_never_counts_is_silent_after_a_while() {
        let uncounted = QueueFacts::default();
        let silent = |others| {
            let mut watch = Watch::new(others);
            (0..SILENT).for_each(|_| watch.note(&uncounted, 0, 0));
            watch
        };
        let mut watch = silent(Others::None);
        assert!(watch.is_silent());
        // A consumer may have a message.
        watch.note(&uncounted, 0, 1);
        assert!(!watch.is_silent());
        // The last count was of a message that is out.
        (0..=SILENT).for_each(|_| watch.note(&facts(Some(1), 5, 0), 0, 0));
        assert!(!watch.is_silent());
        for others in [Others::LookedFor, Others::Allowed] {
            assert!(!silent(others).is_silent());
        }
    }

    #[test]
    fn who_sends_to_a_queue_by_its_name_is_noticed() {
        let mut watch = Watch::new(Others::LookedFor);
        // What came before is counted late.
        for (count, published) in [(0, 5), (1, 7), (2, 9), (3, 9), (4, 9), (5, 9)] {
            watch.note(&facts(Some(0), count, published), 0, 0);
            assert!(!watch.is_over() && !watch.has_seen_others(&facts(Some(0), count, published)));
        }
        let one_more = facts(Some(0), 6, 10);
        watch.note(&one_more, 0, 0);
        assert!(watch.has_seen_others(&one_more));
        let mut allowed = Watch::new(Others::Allowed);
        for count in 0..3 {
            allowed.note(&facts(Some(0), count, count), 1, 0);
        }
        assert!(allowed.is_over() && !allowed.has_seen_others(&one_more));
    }
}
