//! The books of the demo: a row for each scenario, and what they add up to.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use console::style;

use super::ledger::{Counts, Ledger};
use crate::output::counted;

/// The ledgers of all scenarios, and what happened to the connections meanwhile.
#[derive(Debug, Default)]
pub(super) struct Books {
    ledgers: Vec<Arc<Ledger>>,
    cuts: AtomicU64,
    reconnects: AtomicU64,
}

impl Books {
    pub(super) fn new(ledgers: impl IntoIterator<Item = Ledger>) -> Self {
        Books { ledgers: ledgers.into_iter().map(Arc::new).collect(), ..Books::default() }
    }

    pub(super) fn ledgers(&self) -> &[Arc<Ledger>] {
        &self.ledgers
    }

    pub(super) fn total(&self) -> u64 {
        self.ledgers.iter().map(|ledger| ledger.total()).sum()
    }

    pub(super) fn settled(&self) -> u64 {
        self.ledgers.iter().map(|ledger| ledger.settled()).sum()
    }

    pub(super) fn cut(&self) {
        self.cuts.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn reconnected(&self) {
        self.reconnects.fetch_add(1, Ordering::Relaxed);
    }

    /// What has happened to the connections.
    pub(super) fn in_short(&self) -> String {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        match read(&self.cuts) {
            0 => String::new(),
            cuts => format!(
                "all connections cut {}, {} made again",
                counted(cuts, "time"),
                read(&self.reconnects)
            ),
        }
    }

    /// What it all adds up to.
    pub(super) fn balance(&self, took: Duration) -> Report {
        let row = |ledger: &Arc<Ledger>| {
            let (counts, faults) = ledger.balance();
            Row { title: ledger.title(), counts, faults }
        };
        Report {
            rows: self.ledgers.iter().map(row).collect(),
            cuts: self.cuts.load(Ordering::Relaxed),
            reconnects: self.reconnects.load(Ordering::Relaxed),
            took,
        }
    }
}

/// The end of the books.
#[derive(Debug)]
pub(super) struct Report {
    rows: Vec<Row>,
    cuts: u64,
    reconnects: u64,
    took: Duration,
}

#[derive(Debug)]
struct Row {
    title: &'static str,
    counts: Counts,
    faults: Vec<String>,
}

const HEADINGS: [&str; 6] = ["sent", "done", "retried", "parked", "duplicates suppressed", "lost"];

impl Counts {
    fn columns(&self) -> [u64; HEADINGS.len()] {
        [self.sent, self.done, self.retried, self.parked, self.duplicates, self.lost]
    }

    fn add(self, other: &Counts) -> Counts {
        Counts {
            sent: self.sent + other.sent,
            confirmed: self.confirmed + other.confirmed,
            done: self.done + other.done,
            retried: self.retried + other.retried,
            parked: self.parked + other.parked,
            duplicates: self.duplicates + other.duplicates,
            lost: self.lost + other.lost,
        }
    }
}

impl Report {
    pub(super) fn is_balanced(&self) -> bool {
        self.rows.iter().all(|row| row.faults.is_empty())
    }
}

/// A line of the table: the title to the left, columns to the right.
fn line(title: &str, cells: impl IntoIterator<Item = String>) -> String {
    let mut line = format!("{title:<10}");
    for (cell, heading) in cells.into_iter().zip(HEADINGS) {
        let width = heading.len().max(8);
        line.push_str(&format!(" {cell:>width$}"));
    }
    line
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = |counts: &Counts| counts.columns().map(|count| count.to_string());
        writeln!(f, "{}", style(line("", HEADINGS.map(str::to_owned))).dim())?;
        for Row { title, counts, faults } in &self.rows {
            f.write_str(&line(title, numbers(counts)))?;
            match faults.is_empty() {
                true => writeln!(f)?,
                false => writeln!(f, "  {}", style(format!("WRONG: {}", faults.join("; "))).red())?,
            }
        }
        let all = self.rows.iter().fold(Counts::default(), |sum, row| sum.add(&row.counts));
        writeln!(f, "{}", style(line("all", numbers(&all))).bold())?;
        writeln!(
            f,
            "\nAll connections were cut {}, and {} made again; it took {:.1} s.",
            counted(self.cuts, "time"),
            self.reconnects,
            self.took.as_secs_f64()
        )?;
        match self.is_balanced() {
            true => style("The books balance.").green().bold().fmt(f),
            false => style("THE BOOKS DO NOT BALANCE").red().bold().fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::ledger::Fate;

    #[test]
    fn one_wrong_row_is_named_and_unbalances_all() {
        let books = Books::new(["well", "ill"].map(|title| Ledger::new(title, 1)));
        for ledger in books.ledgers() {
            ledger.sent(0, Fate::Done);
            ledger.confirmed(0);
            ledger.done(0);
        }
        assert!(books.balance(Duration::ZERO).is_balanced());
        books.ledgers()[1].fault("a reply is wrong");
        let report = books.balance(Duration::ZERO);
        assert!(!report.is_balanced());
        let text = report.to_string();
        let wrong: Vec<_> = text.lines().filter(|line| line.contains("WRONG")).collect();
        assert!(wrong.len() == 1 && wrong[0].starts_with("ill "), "{text}");
        assert!(wrong[0].ends_with("a reply is wrong"), "{text}");
    }
}
