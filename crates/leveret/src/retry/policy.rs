//! When to try again, as a pure function: from what is known of a failure to what should happen.

use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::failure::Verdict;
use crate::amqp::Table;
use crate::connection::ParkReason;
use crate::deaths::Deaths;
use crate::error::Error;

/// What is known of a failed message.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Facts<'a> {
    /// How often it has failed, this time included: 1 after the first delivery.
    pub failures: u32,
    /// What its handler's error means.
    pub verdict: Verdict,
    /// The kind of the error, see [`Failure::kind`](super::Failure::kind).
    pub kind: &'a str,
    /// What the error says.
    pub error: &'a str,
    /// How long ago it failed first.
    pub age: Duration,
    /// The headers of the message.
    pub headers: Table<'a>,
    /// What the broker says about where it died before, by its header `x-death`.
    pub deaths: Deaths,
    /// A number from 0 up to, but not including, 1, for whatever is left to chance.
    pub chance: f64,
}

impl Facts<'_> {
    /// A message that has failed so often, of which nothing else is known. For trying a policy out.
    pub fn after(failures: u32) -> Facts<'static> {
        Facts {
            failures,
            verdict: Verdict::Retry,
            kind: "error",
            error: "",
            age: Duration::ZERO,
            headers: Table::new(),
            deaths: Deaths::default(),
            chance: 0.0,
        }
    }
}

/// What should happen to a failed message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is done after all.
    Ack,
    /// It is delivered again after this long, and has failed once more by then.
    RetryAfter(Duration),
    /// It goes back to its queue now, and this does not count.
    Requeue,
    /// It goes to the parking lot.
    Park(ParkReason),
}

/// A rule of one's own. It comes before all others.
type Rule = Arc<dyn Fn(&Facts<'_>) -> Option<Decision> + Send + Sync>;

/// When a failed message is tried again, and when no longer.
///
/// ```
/// use std::time::Duration;
/// use leveret::{Decision, Facts, ParkReason, RetryPolicy};
///
/// let policy = RetryPolicy::exponential(Duration::from_secs(2), 1.5)
///     .capped(Duration::from_secs(60))
///     .max_retries(5);
/// let wait = |failures| policy.decide(&Facts::after(failures));
/// assert_eq!(wait(1), Decision::RetryAfter(Duration::from_secs(2)));
/// assert_eq!(wait(2), Decision::RetryAfter(Duration::from_secs(3)));
/// assert_eq!(wait(6), Decision::Park(ParkReason::Exhausted));
/// ```
///
/// `max_retries(n)` means `n + 1` deliveries. Without one it is 10, and the policy that is used if none is named,
/// [`RetryPolicy::default`], waits 1 s, 2 s, 4 s and so on up to 5 minutes: a quarter of an hour altogether.
#[derive(Clone)]
#[must_use]
pub struct RetryPolicy {
    waits: Waits,
    cap: Option<Duration>,
    jitter: f64,
    immediate_first: bool,
    max_retries: Option<u32>,
    max_age: Option<Duration>,
    rule: Option<Rule>,
}

/// How waits grow.
#[derive(Clone, Debug, PartialEq)]
enum Waits {
    Fixed(Duration),
    Linear(Duration),
    Exponential { initial: Duration, multiplier: f64 },
    Steps(Vec<Duration>),
}

/// What `max_retries` is if nobody says so.
const MAX_RETRIES: u32 = 10;

/// Into how many different waits jitter spreads one: each needs a queue.
const JITTERED: u32 = 5;

/// What a wait is multiplied by, if it grows at all. Less is a mistake, and would need endless retries to be seen.
const SLOWEST_GROWTH: f64 = 1.001;

/// A wait is never longer: RabbitMQ keeps a TTL in 32 bits of milliseconds, 49 days.
const LONGEST: Duration = Duration::from_millis(u32::MAX as u64 - 1);

impl Default for RetryPolicy {
    fn default() -> Self {
        RetryPolicy::exponential(Duration::from_secs(1), 2.0).capped(Duration::from_secs(300))
    }
}

impl RetryPolicy {
    fn new(waits: Waits) -> Self {
        RetryPolicy {
            waits,
            cap: None,
            jitter: 0.0,
            immediate_first: false,
            max_retries: Some(MAX_RETRIES),
            max_age: None,
            rule: None,
        }
    }

    /// Never again: what fails is parked at once.
    pub fn never() -> Self {
        RetryPolicy::new(Waits::Fixed(Duration::ZERO)).max_retries(0)
    }

    /// Always after the same time.
    pub fn fixed(wait: Duration) -> Self {
        RetryPolicy::new(Waits::Fixed(wait))
    }

    /// After this time, then twice this time, then three times.
    pub fn linear(step: Duration) -> Self {
        RetryPolicy::new(Waits::Linear(step))
    }

    /// After `initial`, then `initial × multiplier`, then `initial × multiplier²`. The multiplier is 1, or 1.001 or more.
    pub fn exponential(initial: Duration, multiplier: f64) -> Self {
        RetryPolicy::new(Waits::Exponential { initial, multiplier })
    }

    /// After these times, one after the other, and then no more; with more [`max_retries`](Self::max_retries) than steps,
    /// the last one is repeated.
    pub fn steps(waits: impl IntoIterator<Item = Duration>) -> Self {
        let waits: Vec<_> = waits.into_iter().collect();
        let retries = u32::try_from(waits.len()).unwrap_or(u32::MAX);
        RetryPolicy::new(Waits::Steps(waits)).max_retries(retries)
    }

    /// No wait is longer than this.
    pub fn capped(mut self, longest: Duration) -> Self {
        self.cap = Some(longest);
        self
    }

    /// Waits differ by up to this part of themselves in both directions, so that what failed together does not come back
    /// together. 0.2 makes 8 s to 12 s of 10 s, in five steps; each of them is a queue of its own.
    pub fn jitter(mut self, part: f64) -> Self {
        self.jitter = part;
        self
    }

    /// The first retry comes without a wait; the waits begin with the second.
    pub fn immediate_first(mut self) -> Self {
        self.immediate_first = true;
        self
    }

    /// How many times it is tried again. `n` means `n + 1` deliveries.
    pub fn max_retries(mut self, retries: u32) -> Self {
        self.max_retries = Some(retries);
        self
    }

    /// It is tried again for as long as it takes, or until it is too old.
    pub fn unlimited_retries(mut self) -> Self {
        self.max_retries = None;
        self
    }

    /// It is parked if it would be older than this at its next attempt, counted from its first failure.
    pub fn max_age(mut self, age: Duration) -> Self {
        self.max_age = Some(age);
        self
    }

    /// A rule of one's own, which is asked before all others; with `None` the others decide. It has the last word, also over
    /// the number of retries. One that panics is passed over.
    ///
    /// ```
    /// use leveret::{Decision, ParkReason, RetryPolicy};
    ///
    /// let policy = RetryPolicy::default().rule(|facts| {
    ///     let is_test = facts.headers.get("test").is_some();
    ///     is_test.then_some(Decision::Park(ParkReason::Permanent))
    /// });
    /// # let _ = policy;
    /// ```
    pub fn rule(
        mut self,
        rule: impl Fn(&Facts<'_>) -> Option<Decision> + Send + Sync + 'static,
    ) -> Self {
        self.rule = Some(Arc::new(rule));
        self
    }

    /// What should happen.
    pub fn decide(&self, facts: &Facts<'_>) -> Decision {
        if let Some(decision) = self.rule.as_ref().and_then(|rule| ask(rule, facts)) {
            return decision;
        }
        let wait = match facts.verdict {
            Verdict::Done => return Decision::Ack,
            Verdict::Requeue => return Decision::Requeue,
            Verdict::Permanent => return Decision::Park(ParkReason::Permanent),
            Verdict::RetryAfter(wait) => wait.min(LONGEST),
            Verdict::Retry => self.wait(facts.failures, facts.chance),
        };
        if self.max_retries.is_some_and(|retries| facts.failures > retries) {
            return Decision::Park(ParkReason::Exhausted);
        }
        if self.max_age.is_some_and(|age| facts.age.saturating_add(wait) > age) {
            return Decision::Park(ParkReason::TooOld);
        }
        Decision::RetryAfter(wait)
    }

    /// How long it waits before its `retry`th retry, counted from 1.
    fn wait(&self, retry: u32, chance: f64) -> Duration {
        let step = match (self.immediate_first, retry) {
            (true, 0 | 1) => return Duration::ZERO,
            (true, retry) => retry - 1,
            (false, retry) => retry.max(1),
        };
        let wait = self.unjittered(step);
        if self.jitter == 0.0 {
            return wait;
        }
        // Steps, and not a continuum: see `JITTERED`.
        let place = (chance * f64::from(JITTERED)).floor() / f64::from(JITTERED - 1) * 2.0 - 1.0;
        let wait = in_milliseconds(wait.as_secs_f64() * (1.0 + self.jitter * place));
        wait.min(self.longest())
    }

    fn unjittered(&self, step: u32) -> Duration {
        let wait = match &self.waits {
            Waits::Fixed(wait) => *wait,
            Waits::Linear(wait) => wait.saturating_mul(step),
            Waits::Exponential { initial, multiplier } => {
                let power = i32::try_from(step - 1).unwrap_or(i32::MAX);
                in_milliseconds(initial.as_secs_f64() * multiplier.powi(power))
            }
            Waits::Steps(waits) => {
                let index = (step as usize - 1).min(waits.len().saturating_sub(1));
                waits.get(index).copied().unwrap_or_default()
            }
        };
        wait.min(self.longest())
    }

    fn longest(&self) -> Duration {
        self.cap.unwrap_or(LONGEST).min(LONGEST)
    }

    /// The same policy, but it always waits this long.
    pub fn with_wait(self, wait: Duration) -> Self {
        let waits = Waits::Fixed(wait);
        RetryPolicy { waits, cap: None, jitter: 0.0, immediate_first: false, ..self }
    }

    /// How long it waits, if that is always the same: for designs with one wait queue.
    pub fn only_wait(&self) -> Option<Duration> {
        let waits = self.all_waits(1)?;
        if self.immediate_first { None } else { waits.first().copied() }
    }

    /// How many times it tries a message again; `None` if without an end. See [`max_retries`](Self::max_retries).
    pub fn retries(&self) -> Option<u32> {
        self.max_retries
    }

    /// All waits there can be, or none if there are more than `most`: they need a queue each.
    pub(crate) fn all_waits(&self, most: usize) -> Option<BTreeSet<Duration>> {
        let mut waits = BTreeSet::new();
        for retry in 1..=self.max_retries.unwrap_or(u32::MAX) {
            let step = retry - u32::from(self.immediate_first);
            let wait = if step == 0 { Duration::ZERO } else { self.unjittered(step) };
            let chances = (0..JITTERED).map(|n| f64::from(n) / f64::from(JITTERED));
            waits.extend(chances.map(|chance| self.wait(retry, chance)));
            if waits.len() > most {
                return None;
            }
            // From here on they stay as they are: growing ones have met their cap, a list has ended. That one is like the one
            // before says nothing: in milliseconds, it may have grown too little to be seen.
            let has_settled = match &self.waits {
                Waits::Fixed(_) => true,
                Waits::Steps(steps) => step as usize >= steps.len(),
                Waits::Linear(step) => step.is_zero() || wait == self.longest(),
                Waits::Exponential { initial, multiplier } => {
                    // Of what is no number, and refused, 1 is the greater.
                    let does_grow = multiplier.max(1.0) >= SLOWEST_GROWTH && !initial.is_zero();
                    !does_grow || wait == self.longest()
                }
            };
            if step > 0 && has_settled {
                break;
            }
        }
        waits.remove(&Duration::ZERO);
        Some(waits)
    }

    /// Whether it can be carried out: the error says which of its numbers cannot be. Whatever uses a policy checks it, too.
    pub fn check(&self) -> Result<(), Error> {
        self.fault().map_or(Ok(()), |fault| Err(Error::invalid(fault)))
    }

    /// What is wrong with it, if anything is.
    pub(crate) fn fault(&self) -> Option<String> {
        if let Waits::Exponential { multiplier, .. } = self.waits
            && !(multiplier.is_finite() && (multiplier == 1.0 || multiplier >= SLOWEST_GROWTH))
        {
            return Some(format!(
                "the multiplier is {multiplier}, and has to be 1, or {SLOWEST_GROWTH} or more"
            ));
        }
        if !(0.0..=1.0).contains(&self.jitter) {
            return Some(format!("the jitter is {}, and has to be from 0 to 1", self.jitter));
        }
        let is_empty = matches!(&self.waits, Waits::Steps(steps) if steps.is_empty());
        if is_empty && self.max_retries != Some(0) {
            return Some("the list of waits is empty, and retries are asked for".to_owned());
        }
        let waits: Vec<Duration> = match &self.waits {
            Waits::Fixed(wait) | Waits::Linear(wait) => vec![*wait],
            Waits::Exponential { initial, .. } => vec![*initial],
            Waits::Steps(steps) => steps.clone(),
        };
        if let Some(wait) = waits.iter().chain(&self.cap).find(|wait| **wait > LONGEST) {
            return Some(format!(
                "a wait of {wait:?} is longer than a queue can keep a message, 49 days"
            ));
        }
        if self.max_retries.is_none()
            && self.max_age.is_none()
            && waits.iter().all(Duration::is_zero)
        {
            return Some("it tries again without a wait and without an end".to_owned());
        }
        None
    }
}

/// What a rule says. One that panics says nothing: its message would go back to the queue and come again at once, for ever.
fn ask(rule: &Rule, facts: &Facts<'_>) -> Option<Decision> {
    catch_unwind(AssertUnwindSafe(|| rule(facts))).unwrap_or_else(|_| {
        tracing::error!("a rule of a retry policy panicked, and is passed over");
        None
    })
}

/// Rounded to whole milliseconds, which is what queues know.
fn in_milliseconds(seconds: f64) -> Duration {
    // Nothing, taken endlessly often, is not a number.
    let milliseconds = if seconds.is_nan() { 0.0 } else { (seconds * 1000.0).round() };
    if milliseconds < LONGEST.as_millis() as f64 {
        Duration::from_millis(milliseconds.max(0.0) as u64)
    } else {
        LONGEST
    }
}

impl fmt::Debug for RetryPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryPolicy")
            .field("waits", &self.waits)
            .field("cap", &self.cap)
            .field("jitter", &self.jitter)
            .field("immediate_first", &self.immediate_first)
            .field("max_retries", &self.max_retries)
            .field("max_age", &self.max_age)
            .field("rule", &self.rule.is_some())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn waits(policy: &RetryPolicy, failures: u32) -> Vec<u128> {
        (1..=failures)
            .map_while(|failures| match policy.decide(&Facts::after(failures)) {
                Decision::RetryAfter(wait) => Some(wait.as_millis()),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn each_form_waits_as_it_says() {
        let table = [
            (RetryPolicy::never(), vec![]),
            (RetryPolicy::fixed(SECOND).max_retries(3), vec![1000, 1000, 1000]),
            (RetryPolicy::linear(SECOND).max_retries(4), vec![1000, 2000, 3000, 4000]),
            (
                RetryPolicy::exponential(2 * SECOND, 1.5).capped(6 * SECOND).max_retries(5),
                vec![2000, 3000, 4500, 6000, 6000],
            ),
            (RetryPolicy::steps([SECOND, 5 * SECOND]), vec![1000, 5000]),
            (RetryPolicy::steps([SECOND, 5 * SECOND]).max_retries(3), vec![1000, 5000, 5000]),
            (
                RetryPolicy::exponential(2 * SECOND, 1.5).immediate_first().max_retries(4),
                vec![0, 2000, 3000, 4500],
            ),
        ];
        for (policy, expected) in table {
            assert_eq!(waits(&policy, 20), expected, "{policy:?}");
            assert_eq!(policy.fault(), None, "{policy:?}");
        }
    }

    #[test]
    fn what_the_error_says_comes_before_the_waits() {
        let policy = RetryPolicy::fixed(SECOND).max_retries(2);
        let decide =
            |failures, verdict| policy.decide(&Facts { verdict, ..Facts::after(failures) });
        let table = [
            (1, Verdict::Done, Decision::Ack),
            (9, Verdict::Done, Decision::Ack),
            (1, Verdict::Permanent, Decision::Park(ParkReason::Permanent)),
            (9, Verdict::Requeue, Decision::Requeue),
            (2, Verdict::RetryAfter(9 * SECOND), Decision::RetryAfter(9 * SECOND)),
            (3, Verdict::RetryAfter(9 * SECOND), Decision::Park(ParkReason::Exhausted)),
            (3, Verdict::Retry, Decision::Park(ParkReason::Exhausted)),
        ];
        for (failures, verdict, expected) in table {
            assert_eq!(decide(failures, verdict), expected, "{failures} {verdict:?}");
        }
    }

    #[test]
    fn waits_that_grow_too_little_to_be_seen_at_first_are_all_known() {
        let slow = RetryPolicy::exponential(Duration::from_millis(4), 1.1).max_retries(5);
        let waits = slow.all_waits(100).unwrap();
        assert_eq!(waits, [4, 5, 6].map(Duration::from_millis).into());
        let barely = RetryPolicy::exponential(Duration::from_nanos(1), SLOWEST_GROWTH);
        assert_eq!(barely.unlimited_retries().all_waits(100), None);
        for multiplier in [1.0, 0.5, f64::NAN] {
            let constant = RetryPolicy::exponential(SECOND, multiplier).unlimited_retries();
            assert!(constant.all_waits(100).is_some(), "{multiplier}");
        }
    }

    #[test]
    fn no_wait_stays_none_however_often_it_is_multiplied() {
        let policy = RetryPolicy::exponential(Duration::ZERO, 2.0).unlimited_retries();
        let decision = policy.decide(&Facts::after(5000));
        assert_eq!(decision, Decision::RetryAfter(Duration::ZERO));
    }

    #[test]
    fn what_would_be_too_old_is_parked_before_it_waits() {
        let policy = RetryPolicy::fixed(10 * SECOND).unlimited_retries().max_age(60 * SECOND);
        let decide = |age| policy.decide(&Facts { age, ..Facts::after(1000) });
        assert_eq!(decide(50 * SECOND), Decision::RetryAfter(10 * SECOND));
        assert_eq!(decide(51 * SECOND), Decision::Park(ParkReason::TooOld));
    }

    #[test]
    fn a_rule_of_ones_own_has_the_last_word() {
        let policy = RetryPolicy::never()
            .rule(|facts| (facts.kind == "busy").then_some(Decision::RetryAfter(SECOND)));
        let busy = Facts { kind: "busy", ..Facts::after(100) };
        assert_eq!(policy.decide(&busy), Decision::RetryAfter(SECOND));
        assert_eq!(policy.decide(&Facts::after(1)), Decision::Park(ParkReason::Exhausted));
    }

    #[test]
    fn what_cannot_work_says_why() {
        let table = [
            (RetryPolicy::exponential(SECOND, 0.5), "multiplier"),
            (RetryPolicy::exponential(SECOND, f64::NAN), "multiplier"),
            (RetryPolicy::exponential(SECOND, 1.000_01), "multiplier"),
            (RetryPolicy::fixed(SECOND).jitter(1.5), "jitter"),
            (RetryPolicy::steps([]).max_retries(1), "empty"),
            (RetryPolicy::fixed(50 * 24 * 3600 * SECOND), "49 days"),
            (RetryPolicy::fixed(Duration::ZERO).unlimited_retries(), "without an end"),
        ];
        for (policy, word) in table {
            let fault = policy.fault().unwrap_or_else(|| panic!("{policy:?}"));
            assert!(fault.contains(word), "{fault}");
        }
    }

    proptest! {
        #[test]
        fn a_message_is_tried_max_retries_plus_one_times_and_never_waits_beyond_its_cap(
            initial in 0u64..100_000,
            multiplier in prop_oneof![Just(1.0), SLOWEST_GROWTH..1.1, 1.1f64..4.0],
            cap in 1u64..1_000_000,
            retries in 0u32..50,
            jitter in 0.0f64..1.0,
            immediate: bool,
            chances in proptest::collection::vec(0.0f64..1.0, 60),
        ) {
            let cap = Duration::from_millis(cap);
            let mut policy = RetryPolicy::exponential(Duration::from_millis(initial), multiplier)
                .capped(cap)
                .jitter(jitter)
                .max_retries(retries);
            if immediate {
                policy = policy.immediate_first();
            }
            let mut deliveries = 0;
            loop {
                deliveries += 1;
                let chance = chances[deliveries as usize];
                let facts = Facts { chance, ..Facts::after(deliveries) };
                match policy.decide(&facts) {
                    Decision::RetryAfter(wait) => {
                        prop_assert!(wait <= cap);
                        if wait > Duration::ZERO {
                            let all = policy.all_waits(1000).expect("not so many");
                            prop_assert!(all.contains(&wait), "{wait:?} is not in {all:?}");
                        }
                    }
                    Decision::Park(ParkReason::Exhausted) => break,
                    other => prop_assert!(false, "{other:?}"),
                }
            }
            prop_assert_eq!(deliveries, retries + 1);
        }

        #[test]
        fn no_number_of_failures_overflows(failures: u32, initial: u64, multiplier in 1.0f64..1e9) {
            let initial = Duration::from_millis(initial);
            for policy in [
                RetryPolicy::exponential(initial, multiplier),
                RetryPolicy::linear(initial),
                RetryPolicy::fixed(initial),
                RetryPolicy::steps([initial]),
            ] {
                let policy = policy.unlimited_retries().jitter(1.0);
                let decision = policy.decide(&Facts { chance: 0.999, ..Facts::after(failures) });
                let Decision::RetryAfter(wait) = decision else { panic!("{decision:?}") };
                prop_assert!(wait <= LONGEST);
            }
        }
    }
}
