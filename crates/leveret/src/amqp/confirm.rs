//! Which publish got which outcome.
//!
//! The broker answers with numbers counted per channel, alone or as "all up to"; a message that it could not route it
//! sends back, before the ack, without a number. The ledger turns that into exactly one [`Outcome`] for each publish.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use leveret_wire::{Properties, RawProperties, ReplyCode};
use tokio::sync::Notify;

use super::error::Error;
use super::lock;
use super::publish::Publish;
use super::settled::{Mark, Settled};

/// How many publishes share one piece of memory: an allocation each would cost more than the publish.
const SEGMENT: usize = 64;

/// What became of a publish.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The broker has taken responsibility for the message.
    Acked,
    /// The broker could not take it. It may or may not be in some of the queues.
    Nacked,
    /// It was mandatory and reached no queue.
    Returned(Box<Returned>),
    /// The channel or connection went before the broker answered: it may have the message, or not.
    Lost(Error),
}

impl Outcome {
    /// Whether the broker has taken responsibility for the message.
    pub fn is_acked(&self) -> bool {
        matches!(self, Outcome::Acked)
    }
}

/// A message that the broker sent back.
#[derive(Clone, Debug, PartialEq)]
pub struct Returned {
    /// Why: `312 NO_ROUTE`, as a rule.
    pub reply_code: ReplyCode,
    /// Why, in the broker's words.
    pub reply_text: String,
    /// The exchange it was published to.
    pub exchange: String,
    /// The routing key it was published with.
    pub routing_key: String,
    /// Its properties.
    pub properties: RawProperties,
    /// Its body.
    pub body: Bytes,
}

/// The outcome of one publish, to be awaited at any time, or dropped.
#[derive(Debug)]
#[must_use = "a publish is safe only once its confirmation says so"]
pub struct Confirmation {
    segment: Arc<Segment>,
    slot: usize,
}

#[derive(Debug)]
struct Segment {
    slots: Mutex<[Slot; SEGMENT]>,
}

#[derive(Debug, Default)]
enum Slot {
    #[default]
    Pending,
    Awaited(Waker),
    Done(Outcome),
}

impl Segment {
    fn new() -> Arc<Segment> {
        Arc::new(Segment { slots: Mutex::new([const { Slot::Pending }; SEGMENT]) })
    }
}

impl Future for Confirmation {
    type Output = Outcome;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        let slot = &mut lock(&self.segment.slots)[self.slot];
        match slot {
            Slot::Done(outcome) => return Poll::Ready(outcome.clone()),
            Slot::Awaited(waker) if waker.will_wake(context.waker()) => {}
            _ => *slot = Slot::Awaited(context.waker().clone()),
        }
        Poll::Pending
    }
}

impl Confirmation {
    fn done(outcome: Outcome) -> Self {
        let segment = Segment::new();
        lock(&segment.slots)[0] = Slot::Done(outcome);
        Confirmation { segment, slot: 0 }
    }

    /// The outcome, if there is one yet.
    pub fn outcome(&self) -> Option<Outcome> {
        match &lock(&self.segment.slots)[self.slot] {
            Slot::Done(outcome) => Some(outcome.clone()),
            _ => None,
        }
    }
}

/// How many publishes got which outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// The broker has taken responsibility.
    pub acked: u64,
    /// The broker could not.
    pub nacked: u64,
    /// Mandatory, and reached no queue.
    pub returned: u64,
}

/// All publishes of a channel that have no outcome yet.
#[derive(Debug)]
pub(super) struct Ledger {
    /// The number of the next publish.
    next: u64,
    settled: Settled,
    /// How many have no outcome.
    open: usize,
    /// The slots from number `(first_segment * SEGMENT) + 1` on.
    segments: VecDeque<Arc<Segment>>,
    first_segment: u64,
    /// What a return is recognised by, for the mandatory ones without an outcome, oldest first.
    mandatory: VecDeque<(u64, Mandatory)>,
    returned: HashMap<u64, Box<Returned>>,
    tally: Tally,
    hasher: RandomState,
    /// Why nothing more is answered.
    closed: Option<Error>,
}

/// What is remembered of a mandatory publish, to know it again when it comes back: hashes, so that no body is kept in
/// memory for it.
#[derive(Clone, Copy, Debug)]
struct Mandatory {
    /// Exchange and routing key.
    address: u64,
    /// Length and both ends: two bodies that differ in their midst alone, to the same address with the same
    /// properties, are told apart by their order.
    body: u64,
    properties: u64,
}

/// How much of either end of a body its hash covers.
const BODY_ENDS: usize = 128;

impl Mandatory {
    fn new(
        hasher: &RandomState,
        (exchange, routing_key): (&[u8], &[u8]),
        properties: &Properties<'_>,
        body: &[u8],
    ) -> Self {
        let ends = body.len().min(BODY_ENDS);
        Mandatory {
            address: hasher.hash_one((exchange, routing_key)),
            body: hasher.hash_one((body.len(), &body[..ends], &body[body.len() - ends..])),
            properties: hash_properties(hasher, properties),
        }
    }
}

/// The same whatever the order of the headers: RabbitMQ 4.3 sorts them.
fn hash_properties(hasher: &RandomState, properties: &Properties<'_>) -> u64 {
    let text = [
        &properties.content_type,
        &properties.content_encoding,
        &properties.correlation_id,
        &properties.reply_to,
        &properties.expiration,
        &properties.message_id,
        &properties.kind,
        &properties.user_id,
        &properties.app_id,
        &properties.cluster_id,
    ];
    let numbers = (properties.delivery_mode, properties.priority, properties.timestamp);
    let headers = properties.headers.as_ref().map_or(0, |headers| {
        let fields = headers.encoded_fields().map(|field| hasher.hash_one(field));
        fields.fold(1, u64::wrapping_add)
    });
    hasher.hash_one((text, numbers, headers))
}

impl Ledger {
    pub(super) fn new() -> Self {
        Ledger {
            next: 1,
            settled: Settled::new(),
            open: 0,
            segments: VecDeque::new(),
            first_segment: 0,
            mandatory: VecDeque::new(),
            returned: HashMap::new(),
            tally: Tally::default(),
            hasher: RandomState::new(),
            closed: None,
        }
    }

    /// How many publishes have no outcome yet.
    #[cfg(test)]
    fn open(&self) -> usize {
        self.open
    }

    /// How many publishes there are from the oldest without an outcome on. It bounds the memory of the ledger.
    pub(super) fn span(&self) -> usize {
        (self.next - self.settled.lowest()) as usize
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
    pub(super) fn tally(&self) -> Tally {
        self.tally
    }

    /// A message was encoded, and this is its number's place.
    #[inline]
    pub(super) fn publish(&mut self, mandatory: Option<&Publish<'_>>) -> Confirmation {
        // The channel may go between the moment a publisher finds it open and this one.
        if let Some(error) = &self.closed {
            return Confirmation::done(Outcome::Lost(error.clone()));
        }
        let index = (self.next - 1) % SEGMENT as u64;
        if index == 0 {
            self.segments.push_back(Segment::new());
        }
        if let Some(publish) = mandatory {
            let address = (publish.exchange.as_bytes(), publish.routing_key.as_bytes());
            let known = Mandatory::new(&self.hasher, address, &publish.properties, &publish.body);
            self.mandatory.push_back((self.next, known));
        }
        self.next += 1;
        self.open += 1;
        // There is a last segment: `index == 0` makes one, and it stays until it is full.
        let segment = Arc::clone(self.segments.back().expect("a segment for the publish"));
        Confirmation { segment, slot: index as usize }
    }

    /// A message came back. The ack that follows will be the outcome of the same publish.
    ///
    /// Returns come in the order of the publishes, so it is the oldest unanswered mandatory one that looks the same and
    /// has not come back. Should the broker have altered the message (it does to some properties), body and address, or
    /// the address alone, have to do. Gives the message back if there is none.
    pub(super) fn returned(&mut self, returned: Returned) -> Option<Returned> {
        let address = (returned.exchange.as_bytes(), returned.routing_key.as_bytes());
        let known =
            Mandatory::new(&self.hasher, address, &returned.properties.get(), &returned.body);
        let oldest = |same: &dyn Fn(&Mandatory) -> bool| {
            self.mandatory.iter().position(|(number, one)| {
                one.address == known.address && same(one) && !self.settled.contains(*number)
            })
        };
        let index = oldest(&|one| one.body == known.body && one.properties == known.properties)
            .or_else(|| oldest(&|one| one.body == known.body))
            .or_else(|| oldest(&|_| true));
        match index.and_then(|index| self.mandatory.remove(index)) {
            Some((number, _)) => {
                self.returned.insert(number, Box::new(returned));
                None
            }
            None => Some(returned),
        }
    }

    /// The broker acked or nacked a number, or all up to it. The wakers are to be woken once nothing is locked.
    pub(super) fn answered(
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
        for number in first..=last {
            if self.settled.mark(number) == Mark::Again {
                continue;
            }
            let outcome = self.outcome_of(number, acked);
            self.resolve(number, outcome, wakers);
        }
        self.forget_answered();
        Ok(())
    }

    fn outcome_of(&mut self, number: u64, acked: bool) -> Outcome {
        if !self.returned.is_empty()
            && let Some(returned) = self.returned.remove(&number)
        {
            self.tally.returned += 1;
            return Outcome::Returned(returned);
        }
        if acked {
            self.tally.acked += 1;
            Outcome::Acked
        } else {
            self.tally.nacked += 1;
            Outcome::Nacked
        }
    }

    /// The channel is gone: everything without an outcome is lost, but for what came back before.
    pub(super) fn lost(&mut self, error: &Error, wakers: &mut Vec<Waker>) {
        for number in self.settled.lowest()..self.next {
            if self.settled.mark(number) != Mark::Again {
                let outcome = match self.returned.remove(&number) {
                    Some(returned) => {
                        self.tally.returned += 1;
                        Outcome::Returned(returned)
                    }
                    None => Outcome::Lost(error.clone()),
                };
                self.resolve(number, outcome, wakers);
            }
        }
        self.forget_answered();
        self.closed.get_or_insert_with(|| error.clone());
    }

    fn resolve(&mut self, number: u64, outcome: Outcome, wakers: &mut Vec<Waker>) {
        self.open -= 1;
        let place = number - 1;
        let segment = (place / SEGMENT as u64 - self.first_segment) as usize;
        let mut slots = lock(&self.segments[segment].slots);
        let slot = &mut slots[(place % SEGMENT as u64) as usize];
        if let Slot::Awaited(waker) = std::mem::replace(slot, Slot::Done(outcome)) {
            wakers.push(waker);
        }
    }

    /// Lets go of segments and mandatory messages that have all their outcomes.
    fn forget_answered(&mut self) {
        let lowest = self.settled.lowest();
        while (self.first_segment + 1) * (SEGMENT as u64) < lowest {
            self.segments.pop_front();
            self.first_segment += 1;
        }
        while let Some((number, _)) = self.mandatory.front()
            && self.settled.contains(*number)
        {
            self.mandatory.pop_front();
        }
    }
}

/// A ledger and the ones that wait for it to empty.
#[derive(Debug)]
pub(super) struct Confirms {
    pub(super) ledger: Mutex<Ledger>,
    /// Woken whenever outcomes came.
    pub(super) progress: Notify,
}

impl Confirms {
    pub(super) fn new() -> Self {
        Confirms { ledger: Mutex::new(Ledger::new()), progress: Notify::new() }
    }

    /// The channel is gone: everything without an outcome is lost.
    pub(super) fn lost(&self, error: &Error) {
        let mut wakers = Vec::new();
        lock(&self.ledger).lost(error, &mut wakers);
        for waker in wakers {
            waker.wake();
        }
        self.progress.notify_waiters();
    }

    /// Waits until the ledger is as it should be.
    pub(super) async fn until(&self, is_so: impl Fn(&Ledger) -> bool) {
        loop {
            let mut progress = pin!(self.progress.notified());
            // Registered before the check, so that no wake-up falls between the two.
            progress.as_mut().enable();
            if is_so(&lock(&self.ledger)) {
                return;
            }
            progress.await;
        }
    }

    /// Waits until every publish so far has its outcome.
    pub(super) async fn until_answered(&self) {
        let next = lock(&self.ledger).next();
        self.until(|ledger| ledger.is_answered_before(next)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amqp::{ErrorKind, Table, Value};
    use proptest::prelude::*;

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
        confirmation: Confirmation,
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
            let mut ledger = Ledger::new();
            let mut wakers = Vec::new();
            let mut sent: Vec<Sent> = Vec::new();
            for step in steps {
                let (first, last, acked, multiple) = match step {
                    Step::Publish { mandatory, look } => {
                        let confirmation = ledger.publish(mandatory.then_some(&publish(look)));
                        let unroutable = mandatory && look.2 == 1;
                        sent.push(Sent { confirmation, unroutable, look, came_back: false, expected: None });
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
                        prop_assert!(ledger.returned(returned(one.look)).is_none());
                    }
                }
                ledger.answered(last as u64 + 1, multiple, acked, &mut wakers).unwrap();
                for one in &mut sent[first..=last] {
                    one.expected.get_or_insert(match (one.unroutable, acked) {
                        (true, _) => "returned",
                        (false, true) => "acked",
                        (false, false) => "nacked",
                    });
                }
            }
            let open = sent.iter().filter(|one| one.expected.is_none()).count();
            prop_assert_eq!(ledger.open(), open);
            if dies {
                ledger.lost(&Error::new(ErrorKind::ConnectionLost, "gone"), &mut wakers);
                prop_assert_eq!(ledger.open(), 0);
            }
            for one in &sent {
                let at_death = if one.came_back { "returned" } else { "lost" };
                let expected = one.expected.or(dies.then_some(at_death));
                prop_assert_eq!(name(one.confirmation.outcome()), expected);
            }
            if sent.iter().all(|one| one.expected.is_some()) || dies {
                prop_assert!(ledger.mandatory.is_empty() && ledger.returned.is_empty());
                prop_assert!(ledger.segments.len() <= 1);
            }
        }
    }

    #[test]
    fn alike_messages_that_come_back_are_the_oldest_of_their_kind() {
        let mut ledger = Ledger::new();
        let mut wakers = Vec::new();
        let same = (0, 0, 0);
        let confirmations: Vec<_> = (0..3).map(|_| ledger.publish(Some(&publish(same)))).collect();
        // The first is answered alone, so the one that comes back must be the second.
        ledger.answered(1, false, true, &mut wakers).unwrap();
        assert!(ledger.returned(returned(same)).is_none());
        ledger.answered(3, true, true, &mut wakers).unwrap();
        let names: Vec<_> = confirmations.iter().map(|one| name(one.outcome()).unwrap()).collect();
        assert_eq!(names, ["acked", "returned", "acked"]);
    }

    #[test]
    fn a_message_that_the_broker_altered_is_known_by_its_body_or_its_address() {
        let mut ledger = Ledger::new();
        let confirmations: Vec<_> = [(0, 0, 0), (0, 1, 0), (1, 0, 0)]
            .map(|look| ledger.publish(Some(&publish(look))))
            .into();
        let altered = Returned { properties: RawProperties::default(), ..returned((0, 1, 0)) };
        assert!(ledger.returned(altered).is_none());
        let altered = Returned { body: Bytes::from_static(b"?"), ..returned((1, 0, 0)) };
        assert!(ledger.returned(altered).is_none());
        ledger.answered(0, true, true, &mut Vec::new()).unwrap();
        let names: Vec<_> = confirmations.iter().map(|one| name(one.outcome()).unwrap()).collect();
        assert_eq!(names, ["acked", "returned", "returned"]);
    }

    #[test]
    fn the_order_of_headers_does_not_matter() {
        let hasher = RandomState::new();
        let hash = |pairs: [(&str, Value<'_>); 2]| {
            let headers = Some(Table::from_pairs(pairs).unwrap());
            hash_properties(&hasher, &Properties { headers, ..Properties::default() })
        };
        assert_eq!(
            hash([("a", 1.into()), ("b", 2.into())]),
            hash([("b", 2.into()), ("a", 1.into())])
        );
        assert_ne!(
            hash([("a", 1.into()), ("b", 2.into())]),
            hash([("a", 2.into()), ("b", 1.into())])
        );
    }

    #[test]
    fn a_publish_after_the_end_is_lost_at_once() {
        let mut ledger = Ledger::new();
        ledger.lost(&Error::new(ErrorKind::ConnectionLost, "gone"), &mut Vec::new());
        assert_eq!(name(ledger.publish(None).outcome()), Some("lost"));
        assert_eq!(ledger.open(), 0);
    }

    #[test]
    fn an_answer_to_what_was_never_published_is_an_error() {
        let mut ledger = Ledger::new();
        let mut wakers = Vec::new();
        assert!(ledger.answered(1, false, true, &mut wakers).is_err());
        assert!(ledger.answered(0, false, true, &mut wakers).is_err());
        ledger.answered(0, true, true, &mut wakers).unwrap();
        drop(ledger.publish(None));
        assert!(ledger.answered(2, true, true, &mut wakers).is_err());
        assert!(ledger.returned(returned((0, 0, 0))).is_some());
    }
}
