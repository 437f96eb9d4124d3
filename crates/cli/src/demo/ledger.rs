//! The ledger of a scenario: what it sent, message by message, and what became of it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leveret::Summary;
use tokio::sync::Notify;
use tokio::time::timeout;

/// How long nothing may move before a scenario no longer waits for what is missing.
const PATIENCE: Duration = Duration::from_secs(20);

/// How many different complaints are kept.
const MAX_FAULTS: usize = 3;

/// What should become of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Fate {
    #[default]
    Done,
    /// Done by two who do not know of each other.
    DoneByTwo,
    Parked,
}

/// Who has done their part of a message.
#[derive(Clone, Copy, Debug)]
pub(super) enum Party {
    First = 1,
    Second = 2,
}

/// What is known of a message.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    fate: Fate,
    is_sent: bool,
    is_confirmed: bool,
    is_parked: bool,
    /// A bit for each party that is done with it.
    done: u8,
}

impl Entry {
    fn is_done(&self) -> bool {
        let parts = match self.fate {
            Fate::DoneByTwo => Party::First as u8 | Party::Second as u8,
            Fate::Done | Fate::Parked => Party::First as u8,
        };
        self.done & parts == parts
    }

    fn is_settled(&self) -> bool {
        self.is_done() || self.is_parked
    }
}

/// Of each message of a scenario, by its number, what was sent and what became of it.
#[derive(Debug)]
pub(super) struct Ledger {
    title: &'static str,
    state: Mutex<State>,
    moved: Notify,
}

#[derive(Debug)]
struct State {
    entries: Vec<Entry>,
    counts: Counts,
    /// Messages of which a handler has failed, for now.
    failures: u64,
    faults: Vec<String>,
}

/// A row of the table at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) sent: u64,
    pub(super) confirmed: u64,
    pub(super) done: u64,
    pub(super) retried: u64,
    pub(super) parked: u64,
    /// Copies that were recognised, and not done again.
    pub(super) duplicates: u64,
    /// Confirmed, and neither done nor parked.
    pub(super) lost: u64,
}

impl Ledger {
    pub(super) fn new(title: &'static str, messages: u64) -> Self {
        let state = State {
            entries: vec![Entry::default(); messages as usize],
            counts: Counts::default(),
            failures: 0,
            faults: Vec::new(),
        };
        Ledger { title, state: Mutex::new(state), moved: Notify::new() }
    }

    pub(super) fn title(&self) -> &'static str {
        self.title
    }

    /// How many messages it is about.
    pub(super) fn total(&self) -> u64 {
        self.lock().entries.len() as u64
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn sent(&self, number: u64, fate: Fate) {
        let mut state = self.lock();
        let Some(entry) = state.entries.get_mut(number as usize) else { return };
        *entry = Entry { fate, is_sent: true, ..Entry::default() };
        state.counts.sent += 1;
    }

    pub(super) fn confirmed(&self, number: u64) {
        let mut state = self.lock();
        let Some(entry) = state.entries.get_mut(number as usize) else { return };
        if !std::mem::replace(&mut entry.is_confirmed, true) {
            state.counts.confirmed += 1;
        }
        drop(state);
        self.moved.notify_waiters();
    }

    /// What it was sent for is done, or is known to have been done before.
    pub(super) fn done(&self, number: u64) {
        self.done_by(number, Party::First);
    }

    pub(super) fn done_by(&self, number: u64, party: Party) {
        self.change(number, |entry| {
            let is_first = entry.done & party as u8 == 0;
            entry.done |= party as u8;
            is_first
        });
    }

    /// It was found in the parking lot.
    pub(super) fn parked(&self, number: u64) {
        self.change(number, |entry| !std::mem::replace(&mut entry.is_parked, true));
    }

    /// Changes an entry. What is no news is a duplicate.
    fn change(&self, number: u64, change: impl FnOnce(&mut Entry) -> bool) {
        let mut state = self.lock();
        let Some(entry) = state.entries.get_mut(number as usize).filter(|entry| entry.is_sent)
        else {
            drop(state);
            return self.fault(format!("message {number} came, which nobody has sent"));
        };
        let before = *entry;
        let is_news = change(entry);
        let after = *entry;
        let counts = &mut state.counts;
        counts.duplicates += u64::from(!is_news);
        counts.done += u64::from(after.is_done() && !before.is_done());
        counts.parked += u64::from(after.is_parked && !before.is_parked);
        drop(state);
        self.moved.notify_waiters();
    }

    /// A handler has failed, for now or for good.
    pub(super) fn failed(&self) {
        self.lock().failures += 1;
    }

    /// Something is wrong, whatever the counts say.
    pub(super) fn fault(&self, text: impl Into<String>) {
        let (text, mut state) = (text.into(), self.lock());
        if state.faults.len() < MAX_FAULTS && !state.faults.contains(&text) {
            state.faults.push(text);
        }
    }

    /// What a consumer or service of the scenario has done by itself.
    pub(super) fn add(&self, summary: &Summary) {
        let counts = &mut self.lock().counts;
        counts.retried += summary.retried;
        counts.duplicates += summary.duplicates;
    }

    /// How many messages have come to an end.
    pub(super) fn settled(&self) -> u64 {
        let counts = &self.lock().counts;
        counts.done + counts.parked
    }

    /// How it is going, in a few words.
    pub(super) fn in_short(&self) -> String {
        let state = self.lock();
        match (state.failures, state.counts.parked) {
            (0, _) => String::new(),
            (failures, 0) => format!("{failures} failures"),
            (failures, parked) => format!("{failures} failures, {parked} parked"),
        }
    }

    /// Waits until all that is confirmed has come to an end, or nothing has moved for too long.
    pub(super) async fn until_settled(&self) {
        loop {
            let moved = self.moved.notified();
            let Counts { confirmed, done, parked, .. } = self.lock().counts;
            if done + parked >= confirmed || timeout(PATIENCE, moved).await.is_err() {
                return;
            }
        }
    }

    /// What it adds up to, and what is wrong with that.
    pub(super) fn balance(&self) -> (Counts, Vec<String>) {
        let state = self.lock();
        let count = |is_so: fn(&Entry) -> bool| {
            state.entries.iter().filter(|entry| is_so(entry)).count() as u64
        };
        let lost = count(|entry| entry.is_confirmed && !entry.is_settled());
        let mut faults = state.faults.clone();
        let mut check = |found: u64, what: &str| {
            if found > 0 {
                faults.push(format!("{found} {what}"));
            }
        };
        check(lost, "lost");
        check(count(|entry| !entry.is_sent), "not sent");
        check(count(|entry| entry.is_sent && !entry.is_confirmed), "not confirmed");
        let is_wrongly_done = |entry: &Entry| entry.fate == Fate::Parked && entry.is_done();
        check(count(is_wrongly_done), "done, and should be parked");
        let is_wrongly_parked = |entry: &Entry| entry.fate != Fate::Parked && entry.is_parked;
        check(count(is_wrongly_parked), "parked, and should be done");
        (Counts { lost, ..state.counts }, faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger(fates: &[Fate]) -> Ledger {
        let ledger = Ledger::new("test", fates.len() as u64);
        for (number, fate) in (0..).zip(fates) {
            ledger.sent(number, *fate);
            ledger.confirmed(number);
        }
        ledger
    }

    #[test]
    fn a_confirmed_message_that_is_not_done_is_lost() {
        let ledger = ledger(&[Fate::Done; 2]);
        ledger.done(0);
        ledger.done(0);
        let (counts, faults) = ledger.balance();
        assert_eq!((counts.done, counts.duplicates, counts.lost), (1, 1, 1));
        assert_eq!(faults, ["1 lost"]);
        ledger.done(1);
        assert!(ledger.balance().1.is_empty());
    }

    #[test]
    fn both_parties_have_to_do_their_part() {
        let ledger = ledger(&[Fate::DoneByTwo]);
        ledger.done(0);
        ledger.done(0);
        assert_eq!(ledger.balance().0.lost, 1);
        ledger.done_by(0, Party::Second);
        let (counts, faults) = ledger.balance();
        assert_eq!((counts.done, counts.duplicates, counts.lost), (1, 1, 0));
        assert!(faults.is_empty());
    }

    #[test]
    fn what_should_be_parked_is_and_nothing_else() {
        let ledger = ledger(&[Fate::Parked, Fate::Done]);
        ledger.parked(0);
        ledger.parked(1);
        assert_eq!(ledger.balance().1, ["1 parked, and should be done"]);
        let ledger = self::ledger(&[Fate::Parked]);
        ledger.done(0);
        assert_eq!(ledger.balance().1, ["1 done, and should be parked"]);
    }

    #[test]
    fn what_is_not_sent_or_not_confirmed_is_missed_and_strangers_are_named() {
        let ledger = Ledger::new("test", 3);
        ledger.sent(0, Fate::Done);
        ledger.done(0);
        ledger.done(7);
        let faults = ledger.balance().1;
        assert_eq!(
            faults,
            ["message 7 came, which nobody has sent", "2 not sent", "1 not confirmed"]
        );
    }
}
