//! The service behind the redelivery queue: decides where a message goes from there, and takes it there.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use crate::amqp::ShortStr;
use crate::clock;
use crate::connection::{Client, ClientEvent, ParkReason};
use crate::consumer::{Incoming, unless};
use crate::deaths::{Death, Deaths};
use crate::delay::forget_steps;
use crate::error::{Error, ErrorKind};
use crate::forwarder::{ForwardedMessage, Forwarder};
use crate::random;
use crate::retry::plain::InPlace;
use crate::retry::policy::{Decision, Facts};
use crate::retry::rejecting;
use crate::retry::stamp::{self, Detail, Failed, Origin, header};
use crate::retry::{Retry, Verdict, iso8601};
use crate::telemetry::Consumed;

use super::{Orb, Route};

/// How long a message that cannot be moved now stays with the service before it goes back to the redelivery queue.
const PAUSE: Duration = Duration::from_secs(1);

/// How many messages are on their way at a time.
const WORKERS: usize = 16;

/// What a [redelivery service](Orb::redelivery) did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Redelivered {
    /// How often a message was sent back to its queue.
    pub sent_back: u64,
    /// How often a message was sent to where it waits.
    pub made_to_wait: u64,
    /// Messages that were parked.
    pub parked: u64,
}

/// The service of the Orb design that sends rejected messages back, ready to run. See [`Orb::redelivery`].
#[derive(Debug)]
#[must_use = "a redelivery service does nothing until it is run"]
pub struct Redelivery {
    orb: Orb,
    client: Client,
}

impl Redelivery {
    pub(super) fn new(orb: Orb, client: &Client) -> Self {
        Redelivery { orb, client: client.clone() }
    }

    /// Sends messages back until the client is closed.
    pub async fn run(self) -> Result<Redelivered, Error> {
        self.run_until(std::future::pending::<()>()).await
    }

    /// Sends messages back until `stop` is done: then takes no more, finishes what is on its way, and says what was done.
    ///
    /// It fails if it cannot begin, or ends because the redelivery queue stays away.
    pub async fn run_until(self, stop: impl Future) -> Result<Redelivered, Error> {
        let Redelivery { orb, client } = self;
        if let Some(fault) = orb.policy.fault() {
            let text = format!("messages cannot be redelivered like this: {fault}");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let shared = orb.shared();
        orb.check(None, &shared)?;
        let mut stop = std::pin::pin!(stop);
        match unless(&mut stop, client.apply(&shared)).await {
            Some(applied) => applied.map(drop)?,
            None => return Ok(Redelivered::default()),
        }
        let service = Arc::new(Service {
            mover: Forwarder::new(&client, "redelivering a message"),
            orb,
            client: client.clone(),
            done: Counts::default(),
        });
        let handler = {
            let service = Arc::clone(&service);
            move |incoming: Incoming| {
                let service = Arc::clone(&service);
                async move { service.redeliver(&incoming).await }
            }
        };
        let Route { exchange, key, queue } = &service.orb.redelivery;
        let consumer = client.consumer(queue).workers(WORKERS);
        let in_place = Retry::with_profile(InPlace::new(PAUSE).by(exchange, key));
        consumer.retry(in_place).handle(handler).run_until(stop).await?;
        Ok(service.done.read())
    }
}

#[derive(Debug, Default)]
struct Counts {
    sent_back: AtomicU64,
    made_to_wait: AtomicU64,
    parked: AtomicU64,
}

impl Counts {
    fn read(&self) -> Redelivered {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Redelivered {
            sent_back: read(&self.sent_back),
            made_to_wait: read(&self.made_to_wait),
            parked: read(&self.parked),
        }
    }
}

/// What becomes of a message in the redelivery queue.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Plan {
    /// Back to its queue, with this count. One that has only waited, and never failed, has none.
    SendBack { queue: String, count: Option<u32> },
    /// It waits, with the count it has.
    Wait { queue: String, count: u32, time: Duration },
    /// A rule says that it is done.
    Forget,
    /// It is parked, having failed so often.
    Park { queue: String, failures: u32, reason: ParkReason },
}

#[derive(Debug)]
struct Service {
    orb: Orb,
    client: Client,
    mover: Forwarder,
    done: Counts,
}

impl Service {
    /// Moves a message on; it is acked after that.
    async fn redeliver(&self, incoming: &Incoming) -> Result<(), Error> {
        let letter = Letter::new(incoming, &self.orb);
        match letter.plan(&self.orb) {
            Plan::Forget => {}
            Plan::SendBack { queue, count } => {
                let parcel = letter.back(&self.orb, &queue, count);
                match self.deliver(parcel).await {
                    Ok(()) => count_up(&self.done.sent_back),
                    Err(error) if is_missing(&error) => {
                        let failures = letter.failures();
                        let error = format!("there is no queue {queue:?} to send it back to");
                        self.park(&letter, &queue, failures, ParkReason::Unroutable, &error)
                            .await?;
                    }
                    Err(error) => self.park_unmovable(&letter, &queue, error).await?,
                }
            }
            Plan::Wait { queue, count, time } => {
                match self.deliver(letter.waiting(&self.orb, &queue, count, time)).await {
                    Ok(()) => count_up(&self.done.made_to_wait),
                    Err(error) => self.park_unmovable(&letter, &queue, error).await?,
                }
            }
            Plan::Park { queue, failures, reason } => {
                let error = match reason {
                    ParkReason::Unroutable => {
                        "nothing says which queue it should go back to".to_owned()
                    }
                    _ => format!("consumers of queue {queue:?} have rejected it"),
                };
                self.park(&letter, &queue, failures, reason, &error).await?;
            }
        }
        Ok(())
    }

    /// Publishes, and declares what is missing if something is.
    async fn deliver(&self, parcel: ForwardedMessage) -> Result<(), Error> {
        match self.mover.deliver(parcel.clone()).await {
            Err(error) if is_missing(&error) => {
                self.client.apply(&self.orb.shared()).await?;
                self.mover.deliver(parcel).await
            }
            other => other,
        }
    }

    /// There may be no room for what has to be said about it. Any other trouble passes, and it is tried again.
    async fn park_unmovable(
        &self,
        letter: &Letter<'_>,
        queue: &str,
        error: Error,
    ) -> Result<(), Error> {
        if error.kind() != ErrorKind::Invalid {
            return Err(error);
        }
        let text = error.to_string();
        self.park(letter, queue, letter.failures(), ParkReason::Unmovable, &text).await
    }

    async fn park(
        &self,
        letter: &Letter<'_>,
        queue: &str,
        failures: u32,
        reason: ParkReason,
        error: &str,
    ) -> Result<(), Error> {
        let failed = letter.failed(queue, failures, reason, error);
        let parked = |detail| self.deliver(letter.parked(&self.orb, &failed, detail));
        match parked(Detail::Full).await {
            Err(error) if error.kind() == ErrorKind::Invalid => parked(Detail::Needed).await?,
            other => other?,
        }
        count_up(&self.done.parked);
        Consumed::new(queue).parked();
        let message_id =
            letter.incoming.properties().message_id.map(|id| id.to_str_lossy().into_owned());
        self.client.core().announce(ClientEvent::Parked {
            queue: queue.to_owned(),
            routing_key: letter.incoming.routing_key().to_str_lossy().into_owned(),
            message_id,
            reason,
            error: error.to_owned(),
        });
        Ok(())
    }
}

/// A message in the redelivery queue, with what is known of its last death.
struct Letter<'a> {
    incoming: &'a Incoming,
    deaths: Deaths,
    count: Option<u32>,
    /// The last death, unless that was the end of its wait.
    death: Option<Death>,
    has_waited: bool,
    now: SystemTime,
}

impl<'a> Letter<'a> {
    fn new(incoming: &'a Incoming, orb: &Orb) -> Self {
        let properties = incoming.raw_properties();
        let deaths = Deaths::of(properties);
        let last = deaths.last(properties).cloned();
        let has_waited = last.as_ref().is_some_and(|death| death.queue == orb.wait.queue);
        Letter {
            incoming,
            deaths,
            count: orb.count(properties),
            death: last.filter(|_| !has_waited),
            has_waited,
            now: clock::now(),
        }
    }

    fn failures(&self) -> u32 {
        self.count.unwrap_or(0).saturating_add(u32::from(!self.has_waited))
    }

    /// Where it says itself that it belongs.
    fn named_queue(&self, orb: &Orb) -> Option<String> {
        self.incoming.header(&orb.queue_header)?.as_str().map(str::to_owned)
    }

    fn plan(&self, orb: &Orb) -> Plan {
        let failures = self.failures();
        let queue = match &self.death {
            _ if self.has_waited => self.named_queue(orb),
            Some(death) => Some(death.queue.clone()),
            None => None,
        };
        let Some(queue) = queue else {
            let queue = self.named_queue(orb).unwrap_or_default();
            return Plan::Park { queue, failures, reason: ParkReason::Unroutable };
        };
        if self.has_waited {
            return Plan::SendBack {
                queue,
                count: self.count.map(|count| count.saturating_add(1)),
            };
        }
        match orb.policy.decide(&self.facts(failures)) {
            Decision::Ack => Plan::Forget,
            Decision::Park(reason) => Plan::Park { queue, failures, reason },
            Decision::RetryAfter(time) if !time.is_zero() => {
                Plan::Wait { queue, count: failures - 1, time }
            }
            _ => Plan::SendBack { queue, count: Some(failures) },
        }
    }

    fn facts(&self, failures: u32) -> Facts<'_> {
        let properties = self.incoming.raw_properties();
        Facts {
            failures,
            verdict: Verdict::Retry,
            kind: KIND,
            error: "",
            age: self.now.duration_since(self.first_failure()).unwrap_or_default(),
            headers: properties.get().headers.unwrap_or_default(),
            deaths: self.deaths.clone(),
            chance: random::unit(),
        }
    }

    fn first_failure(&self) -> SystemTime {
        let told = stamp::first_failure(self.incoming.raw_properties());
        let died = || stamp::time(self.death.as_ref()?.time?);
        told.or_else(died).unwrap_or(self.now)
    }

    fn origin(&self) -> Origin {
        let told = stamp::origin(self.incoming.raw_properties());
        let died = || rejecting::origin_of(self.death.as_ref()?);
        told.or_else(died).unwrap_or_else(|| Origin {
            exchange: ShortStr::default(),
            routing_key: self.incoming.routing_key().into_owned(),
        })
    }

    /// What all ways on have in common. Its deaths are forgotten: the next one is the last one then, on every broker.
    fn parcel(&self, exchange: &str, routing_key: &str) -> ForwardedMessage {
        let incoming = self.incoming;
        let (raw, body) = (incoming.raw_properties(), incoming.body());
        let mut parcel =
            ForwardedMessage::new(exchange.to_owned(), routing_key.to_owned(), raw, body);
        parcel.keep_expiration();
        if let Some(death) = &self.death {
            rejecting::keep_what_dying_took(&mut parcel, death);
        }
        parcel.keep_copies();
        parcel.forget_deaths();
        forget_steps(&mut parcel);
        parcel
    }

    fn addressed(
        &self,
        orb: &Orb,
        exchange: &str,
        key: &str,
        queue: &str,
        count: Option<u32>,
    ) -> ForwardedMessage {
        let mut parcel = self.parcel(exchange, key);
        parcel.set_header(&orb.queue_header, queue);
        if let Some(count) = count {
            parcel.set_header(&orb.count_header, count.to_string());
            self.origin().stamp(&mut parcel);
            parcel.set_header(header::FIRST, iso8601::format(self.first_failure()));
        }
        parcel
    }

    fn back(&self, orb: &Orb, queue: &str, count: Option<u32>) -> ForwardedMessage {
        self.addressed(orb, &orb.exchange, queue, queue, count)
    }

    fn waiting(&self, orb: &Orb, queue: &str, count: u32, time: Duration) -> ForwardedMessage {
        let mut parcel = self.addressed(orb, &orb.wait.exchange, &orb.wait.key, queue, Some(count));
        let milliseconds = time.as_millis().max(1).to_string();
        parcel.properties.expiration = stamp::short(milliseconds.as_bytes());
        parcel
    }

    fn parked(&self, orb: &Orb, failed: &Failed<'_>, detail: Detail) -> ForwardedMessage {
        let key = failed.origin.routing_key.to_str_lossy();
        let mut parcel = self.parcel("", &key);
        orb.park_it(&mut parcel, failed, detail);
        parcel
    }

    fn failed<'f>(
        &self,
        queue: &'f str,
        failures: u32,
        reason: ParkReason,
        error: &'f str,
    ) -> Failed<'f> {
        Failed {
            failures,
            kind: KIND,
            error,
            first: self.first_failure(),
            at: self.now,
            queue,
            origin: self.origin(),
            reason: Some(reason),
        }
    }
}

/// The kind of the only error that the service knows of.
const KIND: &str = "rejected";

fn count_up(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

fn is_missing(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unroutable | ErrorKind::Missing)
}
