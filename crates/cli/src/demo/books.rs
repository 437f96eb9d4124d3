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

    /// Counts an order at its first time.
    fn mark(&self, order: u64, what: u8, count: &AtomicU64) {
        let Some(mark) = self.orders.get(order as usize) else { return };
        if mark.fetch_or(what, Ordering::Relaxed) & what == 0 {
            count.fetch_add(1, Ordering::Relaxed);
            self.progress.notify_waiters();
        } else if what != PARKED {
            self.duplicates.fetch_add(1, Ordering::Relaxed);
        }
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
        loop {
            let moved = self.progress.notified();
            if self.settled() >= orders {
                return;
            }
            if timeout(patience, moved).await.is_err() {
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
        self.confirmed == self.sent && self.lost == 0 && self.parked == self.declined
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
            ("parked", self.parked, "different orders with a card that was declined"),
            ("duplicates", self.duplicates, "sent or delivered again because a connection was cut"),
            ("redelivered", self.redelivered, "deliveries that the broker marked as such"),
            ("cuts", self.cuts, "of all connections at once"),
            ("reconnects", self.reconnects, ""),
            ("lost", self.lost, "confirmed, and neither consumed nor parked"),
        ];
        for (name, count, note) in rows {
            let row = format!("{name:>12} {count:>9}  {note}");
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
