//! Which publish got which outcome: the broker's numbers and returns become exactly one [`Outcome`] for each.

use std::collections::HashMap;
use std::task::Waker;

use super::entry::{Entries, Entry};
use super::look::{Look, Mandatory};
use super::{Outcome, Returned, Tally};
use crate::amqp::error::Error;
use crate::amqp::settled::{Mark, Settled};

/// All publishes of a channel that have no outcome yet.
#[derive(Debug)]
pub(in crate::amqp) struct Ledger {
    /// The number of the next publish.
    next: u64,
    settled: Settled,
    entries: Entries,
    mandatory: Mandatory,
    /// Messages that came back and whose ack is to come.
    returned: HashMap<u64, Box<Returned>>,
    tally: Tally,
    /// Why nothing more is answered.
    closed: Option<Error>,
}

impl Ledger {
    pub(super) fn new() -> Self {
        Ledger {
            next: 1,
            settled: Settled::new(),
            entries: Entries::default(),
            mandatory: Mandatory::default(),
            returned: HashMap::new(),
            tally: Tally::default(),
            closed: None,
        }
    }

    /// How many publishes there are from the oldest without an outcome on. It bounds the memory of the ledger.
    pub(in crate::amqp) fn span(&self) -> usize {
        (self.next - self.settled.lowest()) as usize
    }

    /// Whether a publish has no outcome yet.
    pub(in crate::amqp) fn is_waiting(&self) -> bool {
        self.settled.lowest() < self.next
    }

    /// The number of the next publish.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Whether all publishes before this number have their outcomes.
    pub(super) fn is_answered_before(&self, number: u64) -> bool {
        self.settled.lowest() >= number
    }

    /// What the outcomes so far add up to.
    pub(in crate::amqp) fn tally(&self) -> Tally {
        self.tally
    }

    /// A message was encoded, and this is its entry. A mandatory one comes with its look.
    #[inline]
    pub(in crate::amqp) fn publish(&mut self, mandatory: Option<&Look>) -> Entry {
        // The channel may go between the moment a publisher finds it open and this one.
        if let Some(error) = &self.closed {
            self.tally.lost += 1;
            return Entry::done(Outcome::Lost(error.clone()));
        }
        let number = self.next;
        self.next += 1;
        if let Some(look) = mandatory {
            self.mandatory.add(number, *look);
        }
        self.entries.add(number)
    }

    /// A message came back. The ack that follows will be the outcome of the same publish. Gives the message back if no
    /// publish looks like it.
    pub(super) fn returned(&mut self, look: Look, returned: Returned) -> Option<Returned> {
        match self.mandatory.take(look, |number| self.settled.contains(number)) {
            Some(number) => {
                self.returned.insert(number, Box::new(returned));
                None
            }
            None => Some(returned),
        }
    }

    /// The broker acked or nacked a number, or all up to it. The wakers are to be woken once nothing is locked.
    pub(in crate::amqp) fn answered(
        &mut self,
        number: u64,
        multiple: bool,
        acked: bool,
        wakers: &mut Vec<Waker>,
    ) -> Result<(), Error> {
        let last = if number == 0 && multiple { self.next - 1 } else { number };
        if last == 0 && multiple {
            return Ok(());
        }
        if last == 0 || last >= self.next {
            return Err(Error::protocol(format!(
                "the broker confirmed publish {last}, and {} were sent",
                self.next - 1
            )));
        }
        let first = if multiple { self.settled.lowest() } else { last };
        let outcome = if acked { Outcome::Acked } else { Outcome::Nacked };
        for number in first..=last {
            self.resolve(number, &outcome, wakers);
        }
        self.forget_answered();
        Ok(())
    }

    /// The channel is gone: everything without an outcome is lost, but for what came back before.
    pub(super) fn lost(&mut self, error: &Error, wakers: &mut Vec<Waker>) {
        let outcome = Outcome::Lost(error.clone());
        for number in self.settled.lowest()..self.next {
            self.resolve(number, &outcome, wakers);
        }
        self.forget_answered();
        self.closed.get_or_insert_with(|| error.clone());
    }

    /// Gives a publish its outcome if it has none: this one, or that it came back.
    fn resolve(&mut self, number: u64, outcome: &Outcome, wakers: &mut Vec<Waker>) {
        if self.settled.mark(number) == Mark::Again {
            return;
        }
        let came_back = match self.returned.is_empty() {
            true => None,
            false => self.returned.remove(&number),
        };
        let outcome = came_back.map_or_else(|| outcome.clone(), Outcome::Returned);
        *match &outcome {
            Outcome::Acked => &mut self.tally.acked,
            Outcome::Nacked => &mut self.tally.nacked,
            Outcome::Returned(_) => &mut self.tally.returned,
            Outcome::Lost(_) => &mut self.tally.lost,
        } += 1;
        wakers.extend(self.entries.resolve(number, outcome));
    }

    /// Lets go of entries and looks of publishes that have their outcomes.
    fn forget_answered(&mut self) {
        self.entries.forget_before(self.settled.lowest());
        self.mandatory.forget(|number| self.settled.contains(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amqp::confirm::look::Looks;
    use crate::amqp::{ErrorKind, Properties, Publish, RawProperties, ReplyCode};
    use bytes::Bytes;
    use proptest::prelude::*;

    /// A ledger and what looks at its messages.
    struct Books {
        ledger: Ledger,
        looks: Looks,
    }

    impl Books {
        fn new() -> Self {
            Books { ledger: Ledger::new(), looks: Looks::new() }
        }

        fn publish_mandatory(&mut self, publish: &Publish<'_>) -> Entry {
            let look = self.looks.of(publish.prepared());
            self.ledger.publish(Some(&look))
        }

        fn returned(&mut self, returned: Returned) -> Option<Returned> {
            let look = self.looks.of_returned(&returned);
            self.ledger.returned(look, returned)
        }

        fn answer(&mut self, number: u64, multiple: bool, acked: bool) {
            self.ledger.answered(number, multiple, acked, &mut Vec::new()).unwrap();
        }

        /// How many publishes have no outcome.
        fn open(&self) -> u64 {
            let Tally { acked, nacked, returned, lost } = self.ledger.tally();
            self.ledger.next() - 1 - (acked + nacked + returned + lost)
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        /// A publish to one of few addresses with one of few bodies and ids, so that messages look alike.
        Publish { mandatory: bool, look: (u8, u8, u8) },
        /// The broker answers up to, or just, one of those without an outcome; it returns first what it must.
        Answer { which: prop::sample::Index, multiple: bool, acked: bool },
        /// The broker answers all.
        AnswerAll { acked: bool },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (any::<bool>(), (0..2u8, 0..2u8, 0..2u8))
                .prop_map(|(mandatory, look)| Step::Publish { mandatory, look }),
            2 => (any::<prop::sample::Index>(), any::<bool>(), any::<bool>())
                .prop_map(|(which, multiple, acked)| Step::Answer { which, multiple, acked }),
            1 => any::<bool>().prop_map(|acked| Step::AnswerAll { acked }),
        ]
    }

    /// What the simple model knows of a publish.
    struct Sent {
        entry: Entry,
        /// It will come back: mandatory, and its id says so. Address and body do not tell.
        unroutable: bool,
        look: (u8, u8, u8),
        came_back: bool,
        expected: Option<&'static str>,
    }

    fn publish((address, body, id): (u8, u8, u8)) -> Publish<'static> {
        let properties = Properties {
            message_id: Some(["routable", "unroutable"][usize::from(id)].try_into().unwrap()),
            ..Properties::default()
        };
        let routing_key = ["key 0", "key 1"][usize::from(address)];
        Publish { exchange: "x", routing_key, mandatory: true, properties, body: vec![body].into() }
    }

    fn returned(look: (u8, u8, u8)) -> Returned {
        let publish = publish(look);
        Returned {
            reply_code: ReplyCode::NO_ROUTE,
            reply_text: "NO_ROUTE".to_owned(),
            exchange: publish.exchange.to_owned(),
            routing_key: publish.routing_key.to_owned(),
            properties: RawProperties::from(&publish.properties),
            body: publish.body,
        }
    }

    fn name(outcome: Option<Outcome>) -> Option<&'static str> {
        Some(match outcome? {
            Outcome::Acked => "acked",
            Outcome::Nacked => "nacked",
            Outcome::Returned(_) => "returned",
            Outcome::Lost(_) => "lost",
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(600))]

        /// The broker of this model handles publishes in order and as late as it can: when it answers one, it has
        /// returned all unroutable ones up to that one, and none after it.
        #[test]
        fn every_publish_gets_the_one_outcome_that_the_model_says(
            steps in prop::collection::vec(step(), 0..200),
            dies in any::<bool>(),
        ) {
            let mut books = Books::new();
            let mut sent: Vec<Sent> = Vec::new();
            for step in steps {
                let (first, last, acked, multiple) = match step {
                    Step::Publish { mandatory, look } => {
                        let entry = match mandatory {
                            true => books.publish_mandatory(&publish(look)),
                            false => books.ledger.publish(None),
                        };
                        let unroutable = mandatory && look.2 == 1;
                        sent.push(Sent { entry, unroutable, look, came_back: false, expected: None });
                        continue;
                    }
                    Step::Answer { which, multiple, acked } => {
                        let open: Vec<_> =
                            (0..sent.len()).filter(|n| sent[*n].expected.is_none()).collect();
                        if open.is_empty() {
                            continue;
                        }
                        let last = *which.get(&open);
                        (if multiple { 0 } else { last }, last, acked, multiple)
                    }
                    Step::AnswerAll { .. } if sent.is_empty() => continue,
                    Step::AnswerAll { acked } => (0, sent.len() - 1, acked, true),
                };
                for one in &mut sent[..=last] {
                    if one.unroutable && !one.came_back {
                        one.came_back = true;
                        prop_assert!(books.returned(returned(one.look)).is_none());
                    }
                }
                books.answer(last as u64 + 1, multiple, acked);
                for one in &mut sent[first..=last] {
                    one.expected.get_or_insert(match (one.unroutable, acked) {
                        (true, _) => "returned",
                        (false, true) => "acked",
                        (false, false) => "nacked",
                    });
                }
            }
            let open = sent.iter().filter(|one| one.expected.is_none()).count();
            prop_assert_eq!(books.open(), open as u64);
            if dies {
                let error = Error::new(ErrorKind::ConnectionLost, "gone");
                books.ledger.lost(&error, &mut Vec::new());
                prop_assert_eq!(books.open(), 0);
            }
            for one in &sent {
                let at_death = if one.came_back { "returned" } else { "lost" };
                let expected = one.expected.or(dies.then_some(at_death));
                prop_assert_eq!(name(one.entry.outcome()), expected);
            }
            if sent.iter().all(|one| one.expected.is_some()) || dies {
                let Ledger { mandatory, returned, entries, .. } = &books.ledger;
                prop_assert!(mandatory.is_empty() && returned.is_empty());
                prop_assert!(entries.segments() <= 1);
            }
        }
    }

    fn names(entries: &[Entry]) -> Vec<&'static str> {
        entries.iter().map(|entry| name(entry.outcome()).unwrap()).collect()
    }

    #[test]
    fn alike_messages_that_come_back_are_the_oldest_of_their_kind() {
        let mut books = Books::new();
        let same = (0, 0, 0);
        let entries = [(); 3].map(|()| books.publish_mandatory(&publish(same)));
        // The first is answered alone, so the one that comes back must be the second.
        books.answer(1, false, true);
        assert!(books.returned(returned(same)).is_none());
        books.answer(3, true, true);
        assert_eq!(names(&entries), ["acked", "returned", "acked"]);
    }

    /// With a property that it did not have.
    fn altered(look: (u8, u8, u8)) -> Returned {
        let properties = Properties { priority: Some(1), ..publish(look).properties };
        Returned { properties: RawProperties::from(&properties), ..returned(look) }
    }

    #[test]
    fn a_message_that_the_broker_altered_is_known_by_its_body_or_its_address() {
        let mut books = Books::new();
        let entries =
            [(0, 0, 0), (0, 1, 0), (1, 0, 0)].map(|look| books.publish_mandatory(&publish(look)));
        assert!(books.returned(altered((0, 1, 0))).is_none());
        let other_body = Returned { body: Bytes::from_static(b"?"), ..returned((1, 0, 0)) };
        assert!(books.returned(other_body).is_none());
        books.answer(0, true, true);
        assert_eq!(names(&entries), ["acked", "returned", "returned"]);
    }

    #[test]
    fn a_message_that_came_back_without_its_id_is_not_taken_for_delivered() {
        let mut books = Books::new();
        let nameless = Publish { properties: Properties::default(), ..publish((0, 0, 0)) };
        let entries =
            [nameless, publish((0, 1, 0))].map(|publish| books.publish_mandatory(&publish));
        let nameless = Returned { properties: RawProperties::default(), ..returned((0, 1, 0)) };
        assert!(books.returned(nameless).is_none());
        books.answer(0, true, true);
        assert_eq!(names(&entries), ["acked", "returned"]);
    }

    #[test]
    fn a_message_that_the_broker_altered_is_not_taken_for_one_with_another_id() {
        let mut books = Books::new();
        let entries = [(0, 0, 0), (0, 0, 1)].map(|look| books.publish_mandatory(&publish(look)));
        assert!(books.returned(altered((0, 0, 1))).is_none());
        books.answer(0, true, true);
        assert_eq!(names(&entries), ["acked", "returned"]);
    }

    #[test]
    fn a_publish_after_the_end_is_lost_at_once() {
        let mut ledger = Ledger::new();
        let before = ledger.publish(None);
        ledger.lost(&Error::new(ErrorKind::ConnectionLost, "gone"), &mut Vec::new());
        let after = ledger.publish(None);
        assert_eq!(names(&[before, after]), ["lost", "lost"]);
        assert_eq!(ledger.tally(), Tally { lost: 2, ..Tally::default() });
        assert_eq!(ledger.span(), 0);
    }

    #[test]
    fn an_answer_to_what_was_never_published_is_an_error() {
        let mut books = Books::new();
        let ledger = &mut books.ledger;
        let mut wakers = Vec::new();
        assert!(ledger.answered(1, false, true, &mut wakers).is_err());
        assert!(ledger.answered(0, false, true, &mut wakers).is_err());
        ledger.answered(0, true, true, &mut wakers).unwrap();
        drop(ledger.publish(None));
        assert!(ledger.answered(2, true, true, &mut wakers).is_err());
        assert!(books.returned(returned((0, 0, 0))).is_some());
    }
}
