//! The service behind the redelivery queue: a consumer whose messages have failed elsewhere, and a design of where they go.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leveret::amqp::{RawProperties, ShortStr, Value};
use leveret::retry::{
    FailedMessage, ForwardedMessage, Origin, RetryProfile, RetryStep, WorkQueue, first_failure,
};
use leveret::{
    Client, Death, Deaths, Decision, Error, Facts, Failure, Incoming, ParkReason, Retry,
    RetryPolicy, Runner, Topology,
};

use super::Orb;
use crate::queues;

/// What delayed messages carry on their way, as numbers and booleans in earlier versions.
const DELAY_PREFIX: &[u8] = b"leveret-delay-";

/// The priority of a delayed message, a number in earlier versions.
const PRIORITY: &str = "x-leveret-priority";

/// How many messages are on their way at a time.
const WORKERS: usize = 16;

pub(super) fn service(orb: &Orb, client: &Client) -> Runner {
    let redelivery = Redelivery(orb.clone());
    let consumer = client.consumer(&orb.redelivery.queue).workers(WORKERS);
    let retry = Retry::with_profile(redelivery.clone());
    consumer.retry(retry).handle(move |incoming: Incoming| {
        let failure = redelivery.failure(incoming.raw_properties());
        async move { Err::<(), _>(failure) }
    })
}

/// Decides where a message of the redelivery queue goes from there.
#[derive(Clone, Debug)]
struct Redelivery(Orb);

/// What is known of a message in the redelivery queue.
struct Rejected {
    /// The queue it goes back to.
    queue: Option<String>,
    /// Its last death, unless that was the end of its wait.
    death: Option<Death>,
    has_waited: bool,
}

impl Redelivery {
    fn rejected(&self, deaths: &Deaths, queue_header: Option<Value<'_>>) -> Rejected {
        let last = deaths.iter().next();
        let has_waited = last.is_some_and(|death| death.queue == self.0.wait.queue);
        let death = last.filter(|_| !has_waited).cloned();
        let queue = match has_waited {
            true => queue_header.and_then(|queue| queue.as_str().map(str::to_owned)),
            false => death.as_ref().map(|death| death.queue.clone()),
        };
        Rejected { queue, death, has_waited }
    }

    fn of(&self, properties: &RawProperties) -> Rejected {
        self.rejected(&Deaths::of(properties), properties.header(&self.0.queue_header))
    }

    fn failure(&self, properties: &RawProperties) -> Failure {
        let Rejected { queue, has_waited, .. } = self.of(properties);
        let text = match queue {
            None => "nothing says which queue it should go back to".to_owned(),
            Some(queue) if has_waited => format!("its wait for queue {queue:?} is over"),
            Some(queue) => format!("consumers of queue {queue:?} have rejected it"),
        };
        Failure::retry(text).kind("rejected")
    }
}

impl Rejected {
    /// Removes deaths: the next one is the last one then, on every broker.
    fn forget_deaths(&self, message: &mut ForwardedMessage) {
        if let Some(death) = &self.death {
            message.note_death(death);
        }
        message.remove_deaths();
    }
}

/// Removes the steps of a delay, and writes its priority as text: Orb's programs refuse a header that is neither text nor a list.
fn forget_delay(message: &mut ForwardedMessage, properties: &RawProperties) {
    let headers = properties.get().headers.unwrap_or_default();
    for (name, _) in headers.iter().filter(|(name, _)| name.as_bytes().starts_with(DELAY_PREFIX)) {
        message.remove_header(&name.to_str_lossy());
    }
    let priority = message.header(PRIORITY).and_then(|priority| queues::number(&priority));
    if let Some(priority) = priority {
        message.set_header(PRIORITY, priority.to_string());
    }
}

impl RetryProfile for Redelivery {
    fn policy(&self) -> &RetryPolicy {
        &self.0.policy
    }

    fn topology(&self, queue: &WorkQueue) -> Result<Topology, Error> {
        queue.check(&self.0.policy)?;
        let shared = self.0.shared();
        self.0.check(queue, &shared, None)?;
        Ok(shared)
    }

    fn requires_queue_type(&self) -> bool {
        self.0.queue_type.is_some()
    }

    fn decide(&self, facts: &Facts<'_>) -> Decision {
        let header = facts.headers.get(&self.0.queue_header);
        match self.rejected(&facts.deaths, header) {
            Rejected { queue: None, .. } => Decision::Park(ParkReason::Unroutable),
            Rejected { has_waited: true, .. } => Decision::RetryAfter(Duration::ZERO),
            _ => match self.0.policy.decide(facts) {
                // Back to its own queue, and not to this one.
                Decision::Requeue => Decision::RetryAfter(Duration::ZERO),
                decision => decision,
            },
        }
    }

    fn failures(&self, properties: &RawProperties, _queue: &str) -> u32 {
        self.0.count(properties).unwrap_or(0)
    }

    /// Of a message that another program made to wait, only its queue is known: it goes there by this service's exchange.
    fn origin(&self, properties: &RawProperties, _queue: &str) -> Option<Origin> {
        Origin::of(properties).or_else(|| {
            let Rejected { queue, death, .. } = self.of(properties);
            if let Some(death) = &death {
                return Origin::of_death(death);
            }
            let exchange = ShortStr::try_from(self.0.exchange.clone()).ok()?;
            Some(Origin { exchange, routing_key: ShortStr::try_from(queue?).ok()? })
        })
    }

    fn first_failure(&self, properties: &RawProperties, _queue: &str) -> Option<SystemTime> {
        first_failure(properties).or_else(|| {
            UNIX_EPOCH.checked_add(Duration::from_secs(self.of(properties).death?.time?))
        })
    }

    /// Back to its queue with the number of its failures, or to where it waits with the number before.
    fn retry(&self, failed: &FailedMessage<'_>, wait: Duration) -> RetryStep {
        let (orb, rejected) = (&self.0, self.of(failed.properties()));
        let queue = rejected.queue.as_deref().unwrap_or_default();
        let waits = !wait.is_zero();
        let (exchange, key) = match waits {
            true => (&*orb.wait.exchange, &*orb.wait.key),
            false => (&*orb.exchange, queue),
        };
        let mut message = match rejected.has_waited {
            true => failed.forward_unstamped(exchange, key),
            false => failed.forward_to(exchange, key),
        };
        rejected.forget_deaths(&mut message);
        forget_delay(&mut message, failed.properties());
        message.set_header(&orb.queue_header, queue);
        if !rejected.has_waited {
            message.set_header(queues::QUEUE, queue);
        }
        // One that has only waited, and never failed, has no count.
        if !rejected.has_waited || orb.count(failed.properties()).is_some() {
            let count = failed.failures() - u32::from(waits);
            message.set_header(&orb.count_header, count.to_string());
        }
        if waits {
            message.set_expiration(wait);
            return message.into();
        }
        RetryStep::MoveOrPark(Box::new(message))
    }

    fn park(&self, failed: &FailedMessage<'_>) -> RetryStep {
        let rejected = self.of(failed.properties());
        let named = failed.properties().header(&self.0.queue_header);
        let queue = rejected.queue.clone();
        let queue = queue.or_else(|| named?.as_str().map(str::to_owned)).unwrap_or_default();
        let mut message = self.0.parked(failed, &queue);
        rejected.forget_deaths(&mut message);
        forget_delay(&mut message, failed.properties());
        // The last death may have shown further routing keys: by this address, a replay would send copies there.
        if queues::has_copies(&message) {
            message.remove_header(queues::RETURN);
        }
        // The end of a wait is no failure of its own.
        if rejected.has_waited {
            message.set_header(queues::ATTEMPTS, (failed.failures() - 1).to_string());
        }
        match queue.is_empty() {
            true => drop(message.remove_header(queues::QUEUE)),
            false => message.set_header(queues::QUEUE, queue),
        }
        message.into()
    }
}
