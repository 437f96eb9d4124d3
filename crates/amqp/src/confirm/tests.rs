//! The confirms of a channel against a model.

use super::*;
use crate::{ErrorKind, Properties, Publish};
use proptest::prelude::*;

fn publish_mandatory(confirms: &Confirms, publish: &Publish<'_>) -> Entry {
    let Publish { exchange, routing_key, properties, body, .. } = publish;
    confirms.publish(Some(confirms.fingerprints.of(exchange, routing_key, properties, body)))
}

fn answer(confirms: &Confirms, tag: u64, multiple: bool, acked: bool) {
    confirms.answered(tag, multiple, acked, &mut Vec::new()).unwrap();
}

/// How many publishes have no outcome.
fn unconfirmed(confirms: &Confirms) -> usize {
    lock(&confirms.state).tracker.unconfirmed()
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
        let confirms = Confirms::new();
        let mut sent: Vec<Sent> = Vec::new();
        for step in steps {
            let (first, last, acked, multiple) = match step {
                Step::Publish { mandatory, look } => {
                    let entry = match mandatory {
                        true => publish_mandatory(&confirms, &publish(look)),
                        false => confirms.publish(None),
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
                    prop_assert!(confirms.returned(returned(one.look)).is_none());
                }
            }
            answer(&confirms, last as u64 + 1, multiple, acked);
            for one in &mut sent[first..=last] {
                one.expected.get_or_insert(match (one.unroutable, acked) {
                    (true, _) => "returned",
                    (false, true) => "acked",
                    (false, false) => "nacked",
                });
            }
        }
        let open = sent.iter().filter(|one| one.expected.is_none()).count();
        prop_assert_eq!(unconfirmed(&confirms), open);
        if dies {
            let error = Error::new(ErrorKind::ConnectionLost, "gone");
            confirms.lost(&error);
            prop_assert_eq!(unconfirmed(&confirms), 0);
        }
        for one in &sent {
            let at_death = if one.came_back { "returned" } else { "lost" };
            let expected = one.expected.or(dies.then_some(at_death));
            prop_assert_eq!(name(one.entry.outcome()), expected);
        }
        if sent.iter().all(|one| one.expected.is_some()) || dies {
            prop_assert_eq!(confirms.span(), 0);
        }
    }
}

fn names(entries: &[Entry]) -> Vec<&'static str> {
    entries.iter().map(|entry| name(entry.outcome()).unwrap()).collect()
}

#[test]
fn of_messages_that_look_alike_the_oldest_unconfirmed_one_came_back() {
    let confirms = Confirms::new();
    let same = (0, 0, 0);
    let entries = [(); 3].map(|()| publish_mandatory(&confirms, &publish(same)));
    // The first is answered alone, so the one that comes back must be the second.
    answer(&confirms, 1, false, true);
    assert!(confirms.returned(returned(same)).is_none());
    answer(&confirms, 3, true, true);
    assert_eq!(names(&entries), ["acked", "returned", "acked"]);
}

fn without_id(look: (u8, u8, u8)) -> Publish<'static> {
    Publish { properties: Properties::default(), ..publish(look) }
}

fn returned_without_id(look: (u8, u8, u8)) -> Returned {
    Returned { properties: RawProperties::default(), ..returned(look) }
}

#[test]
fn a_message_without_an_id_is_known_by_its_body() {
    let confirms = Confirms::new();
    let looks = [(0, 0, 0), (0, 1, 0), (1, 1, 0)];
    let entries = looks.map(|look| publish_mandatory(&confirms, &without_id(look)));
    assert!(confirms.returned(returned_without_id((0, 1, 0))).is_none());
    answer(&confirms, 0, true, true);
    assert_eq!(names(&entries), ["acked", "returned", "acked"]);
}

#[test]
fn a_message_that_was_altered_on_the_way_is_not_taken_for_delivered() {
    let confirms = Confirms::new();
    let entries = [(0, 0, 0), (1, 1, 0)].map(|look| publish_mandatory(&confirms, &publish(look)));
    assert!(confirms.returned(returned_without_id((1, 1, 0))).is_none());
    answer(&confirms, 0, true, true);
    assert_eq!(names(&entries), ["acked", "returned"]);
}

#[test]
fn a_publish_after_the_end_is_lost_at_once() {
    let confirms = Confirms::new();
    let before = confirms.publish(None);
    confirms.lost(&Error::new(ErrorKind::ConnectionLost, "gone"));
    let after = confirms.publish(None);
    assert_eq!(names(&[before, after]), ["lost", "lost"]);
    assert_eq!(confirms.tally(), Tally { lost: 2, ..Tally::default() });
    assert_eq!(confirms.span(), 0);
}

#[test]
fn a_message_that_was_not_published_here_is_given_back() {
    let confirms = Confirms::new();
    drop(confirms.publish(None));
    assert!(confirms.returned(returned((0, 0, 0))).is_some());
}
