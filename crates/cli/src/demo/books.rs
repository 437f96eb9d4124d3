//! The books of the demo: what was sent, confirmed and consumed, by order.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

const CONFIRMED: u8 = 1;
const CONSUMED: u8 = 2;
const DECLINED: u8 = 4;
const PARKED: u8 = 8;
const CHARGED: u8 = 16;
const HEARD: u8 = 32;

/// Counts, and a mark for each order.
#[derive(Debug)]
pub(super) struct Books {
    orders: Vec<AtomicU8>,
    sent: AtomicU64,
    confirmed: AtomicU64,
    failed: AtomicU64,
    /// Orders, not deliveries.
    consumed: AtomicU64,
    /// Orders that should end in the parking lot.
    declined: AtomicU64,
    /// Orders that did.
    parked: AtomicU64,
    /// Orders for which the bank was called, and answered.
    charged: AtomicU64,
    /// Calls that got the reply to another one.
    wrong_replies: AtomicU64,
    /// Orders of which the audit was told.
    heard: AtomicU64,
    retried: AtomicU64,
    duplicates: AtomicU64,
    redelivered: AtomicU64,
    cuts: AtomicU64,
    reconnects: AtomicU64,
    progress: Notify,
}

impl Books {
    pub(super) fn new(total: u64) -> Self {
        Books {
            orders: (0..total).map(|_| AtomicU8::new(0)).collect(),
            sent: AtomicU64::new(0),
            confirmed: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            consumed: AtomicU64::new(0),
            declined: AtomicU64::new(0),
            parked: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            wrong_replies: AtomicU64::new(0),
            heard: AtomicU64::new(0),
            retried: AtomicU64::new(0),
            duplicates: AtomicU64::new(0),
            redelivered: AtomicU64::new(0),
            cuts: AtomicU64::new(0),
            reconnects: AtomicU64::new(0),
            progress: Notify::new(),
        }
    }

    pub(super) fn total(&self) -> u64 {
        self.orders.len() as u64
    }

    pub(super) fn sent(&self) {
        self.sent.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn note_confirmed(&self, order: u64) {
        self.orders[order as usize].fetch_or(CONFIRMED, Ordering::Relaxed);
        self.confirmed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn note_failed(&self, error: &leveret::Error) {
        if self.failed.fetch_add(1, Ordering::Relaxed) == 0 {
            eprintln!("leveret: an order could not be published: {error}");
        }
    }

    pub(super) fn note_consumed(&self, order: u64, redelivered: bool) {
        self.redelivered.fetch_add(u64::from(redelivered), Ordering::Relaxed);
        self.mark(order, CONSUMED, &self.consumed);
    }

    pub(super) fn note_declined(&self, order: u64) {
        self.mark(order, DECLINED, &self.declined);
    }

    pub(super) fn note_parked(&self, order: u64) {
        self.mark(order, PARKED, &self.parked);
    }

    pub(super) fn note_charged(&self, order: u64, is_right: bool) {
        self.count_once(order, CHARGED, &self.charged);
        self.wrong_replies.fetch_add(u64::from(!is_right), Ordering::Relaxed);
    }

    pub(super) fn note_heard(&self, order: u64) {
        self.count_once(order, HEARD, &self.heard);
    }

    /// Counts an order at its first time, and a duplicate at every other.
    fn mark(&self, order: u64, what: u8, count: &AtomicU64) {
        if !self.count_once(order, what, count) && what != PARKED {
            self.duplicates.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts an order at its first time, and says whether it was.
    fn count_once(&self, order: u64, what: u8, count: &AtomicU64) -> bool {
        let Some(mark) = self.orders.get(order as usize) else { return true };
        let is_first = mark.fetch_or(what, Ordering::Relaxed) & what == 0;
        if is_first {
            count.fetch_add(1, Ordering::Relaxed);
            self.progress.notify_waiters();
        }
        is_first
    }

    pub(super) fn retried(&self, retried: u64) {
        self.retried.store(retried, Ordering::Relaxed);
    }

    pub(super) fn cut(&self) {
        self.cuts.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn reconnected(&self) {
        self.reconnects.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn confirmed(&self) -> u64 {
        self.confirmed.load(Ordering::Relaxed)
    }

    fn consumed(&self) -> u64 {
        self.consumed.load(Ordering::Relaxed)
    }

    /// Orders that have come to an end, good or bad.
    pub(super) fn settled(&self) -> u64 {
        self.consumed() + self.declined.load(Ordering::Relaxed)
    }

    pub(super) fn cuts(&self) -> u64 {
        self.cuts.load(Ordering::Relaxed)
    }

    /// Waits until so many orders have come to an end, or nothing has moved for too long.
    pub(super) async fn until_settled(&self, orders: u64, patience: Duration) {
        self.until(|| self.settled() >= orders, patience).await;
    }

    /// Waits until the audit has heard of every charge, or nothing has moved for too long.
    pub(super) async fn until_heard(&self, patience: Duration) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        self.until(|| read(&self.heard) >= read(&self.charged), patience).await;
    }

    async fn until(&self, is_so: impl Fn() -> bool, patience: Duration) {
        loop {
            let moved = self.progress.notified();
            if is_so() || timeout(patience, moved).await.is_err() {
                return;
            }
        }
    }

    /// What it all adds up to.
    pub(super) fn balance(&self) -> Report {
        let is_lost = |mark: &&AtomicU8| {
            mark.load(Ordering::Relaxed) & (CONFIRMED | CONSUMED | PARKED) == CONFIRMED
        };
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Report {
            sent: read(&self.sent),
            confirmed: self.confirmed(),
            failed: read(&self.failed),
            consumed: self.consumed(),
            duplicates: read(&self.duplicates),
            redelivered: read(&self.redelivered),
            charged: read(&self.charged),
            wrong_replies: read(&self.wrong_replies),
            heard: read(&self.heard),
            retried: read(&self.retried),
            declined: read(&self.declined),
            parked: read(&self.parked),
            lost: self.orders.iter().filter(is_lost).count() as u64,
            cuts: self.cuts(),
            reconnects: read(&self.reconnects),
        }
    }
}

/// The end of the books.
#[derive(Debug)]
pub(super) struct Report {
    sent: u64,
    confirmed: u64,
    failed: u64,
    consumed: u64,
    duplicates: u64,
    redelivered: u64,
    charged: u64,
    wrong_replies: u64,
    heard: u64,
    retried: u64,
    declined: u64,
    parked: u64,
    /// Confirmed, and neither consumed nor parked.
    lost: u64,
    cuts: u64,
    reconnects: u64,
}

impl Report {
    pub(super) fn is_balanced(&self) -> bool {
        self.confirmed == self.sent
            && self.lost == 0
            && self.parked == self.declined
            && self.wrong_replies == 0
            && self.heard == self.charged
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("sent", self.sent, ""),
            ("confirmed", self.confirmed, "the broker has taken responsibility"),
            ("failed", self.failed, "their publisher was told"),
            ("consumed", self.consumed, "different orders"),
            ("retried", self.retried, "attempts at which the bank did not answer"),
            ("charged", self.charged, "different orders for which the bank was called"),
            ("wrong replies", self.wrong_replies, "calls that got the reply to another"),
            ("heard", self.heard, "different charges of which the audit was told"),
            ("parked", self.parked, "different orders with a card that was declined"),
            ("duplicates", self.duplicates, "sent or delivered again because a connection was cut"),
            ("redelivered", self.redelivered, "deliveries that the broker marked as such"),
            ("cuts", self.cuts, "of all connections at once"),
            ("reconnects", self.reconnects, ""),
            ("lost", self.lost, "confirmed, and neither consumed nor parked"),
        ];
        for (name, count, note) in rows {
            let row = format!("{name:>13} {count:>9}  {note}");
            writeln!(f, "{}", row.trim_end())?;
        }
        f.write_str(if self.is_balanced() {
            "the books balance"
        } else {
            "THE BOOKS DO NOT BALANCE"
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_confirmed_order_that_is_not_consumed_is_lost() {
        let books = Books::new(2);
        for order in 0..2 {
            books.sent();
            books.note_confirmed(order);
        }
        books.note_consumed(0, false);
        books.note_consumed(0, true);
        let report = books.balance();
        assert_eq!((report.lost, report.duplicates, report.redelivered), (1, 1, 1));
        assert!(!report.is_balanced());
        books.note_consumed(1, false);
        assert!(books.balance().is_balanced());
    }

    #[test]
    fn what_is_charged_has_to_be_heard_of_and_no_reply_may_be_wrong() {
        let books = Books::new(2);
        books.note_charged(0, true);
        assert!(!books.balance().is_balanced());
        books.note_heard(0);
        books.note_heard(0);
        assert!(books.balance().is_balanced());
        books.note_charged(1, false);
        books.note_heard(1);
        assert!(!books.balance().is_balanced());
    }

    #[test]
    fn a_declined_order_has_to_be_parked() {
        let books = Books::new(1);
        books.sent();
        books.note_confirmed(0);
        books.note_declined(0);
        assert!(!books.balance().is_balanced());
        books.note_parked(0);
        assert!(books.balance().is_balanced());
    }
}
