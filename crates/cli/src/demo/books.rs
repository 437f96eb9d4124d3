//! The books of the demo: what was sent, confirmed and consumed, by order.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

const CONFIRMED: u8 = 1;
const CONSUMED: u8 = 2;

/// Counts, and a mark for each order.
#[derive(Debug)]
pub(super) struct Books {
    orders: Vec<AtomicU8>,
    sent: AtomicU64,
    confirmed: AtomicU64,
    failed: AtomicU64,
    /// Orders, not deliveries.
    consumed: AtomicU64,
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
        let Some(mark) = self.orders.get(order as usize) else { return };
        if mark.fetch_or(CONSUMED, Ordering::Relaxed) & CONSUMED == 0 {
            self.consumed.fetch_add(1, Ordering::Relaxed);
            self.progress.notify_waiters();
        } else {
            self.duplicates.fetch_add(1, Ordering::Relaxed);
        }
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

    pub(super) fn consumed(&self) -> u64 {
        self.consumed.load(Ordering::Relaxed)
    }

    pub(super) fn cuts(&self) -> u64 {
        self.cuts.load(Ordering::Relaxed)
    }

    /// Waits until so many orders are consumed, or nothing has moved for too long.
    pub(super) async fn until_consumed(&self, orders: u64, patience: Duration) {
        loop {
            let moved = self.progress.notified();
            if self.consumed() >= orders {
                return;
            }
            if timeout(patience, moved).await.is_err() {
                return;
            }
        }
    }

    /// What it all adds up to.
    pub(super) fn balance(&self) -> Report {
        let is =
            |mark: &AtomicU8, what| mark.load(Ordering::Relaxed) & (CONFIRMED | CONSUMED) == what;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Report {
            sent: read(&self.sent),
            confirmed: self.confirmed(),
            failed: read(&self.failed),
            consumed: self.consumed(),
            duplicates: read(&self.duplicates),
            redelivered: read(&self.redelivered),
            lost: self.orders.iter().filter(|mark| is(mark, CONFIRMED)).count() as u64,
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
    /// Confirmed and not consumed.
    lost: u64,
    cuts: u64,
    reconnects: u64,
}

impl Report {
    pub(super) fn is_balanced(&self) -> bool {
        self.confirmed == self.sent && self.lost == 0
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("sent", self.sent, ""),
            ("confirmed", self.confirmed, "the broker has taken responsibility"),
            ("failed", self.failed, "their publisher was told"),
            ("consumed", self.consumed, "different orders"),
            ("duplicates", self.duplicates, "sent or delivered again because a connection was cut"),
            ("redelivered", self.redelivered, "deliveries that the broker marked as such"),
            ("cuts", self.cuts, "of all connections at once"),
            ("reconnects", self.reconnects, ""),
            ("lost", self.lost, "confirmed and never consumed"),
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
}
