//! The design of the Cover Art Archive's indexer: a header counts down how often a message may still be tried again.

use std::time::Duration;

use crate::amqp::{Array, RawProperties, Value};
use crate::delivery::Delivery;
use crate::error::Error;
use crate::forwarder::ForwardedMessage;
use crate::topology::{Exchange, Queue, QueueType, Topology};

use crate::connection::ParkReason;
use crate::retry::failed_message::FailedMessage;
use crate::retry::one_wait::OneWait;
use crate::retry::policy::{Decision, Facts, RetryPolicy};
use crate::retry::profile::{RetryProfile, RetryStep, WorkQueue};
use crate::retry::stamp::{self, Detail, Failed, header};
use crate::retry::{Retry, traps};

/// Jobs of several kinds share a queue in which they wait for hours, and one in which they end: the design of the Cover Art
/// Archive's indexer.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use leveret::{Client, CoverArt};
///
/// let client = Client::embedded().await?;
/// let retry = CoverArt::new().max_retries(4);
/// client.apply(&retry.topology()?).await?;
/// let runner = client.consumer("cover-art-archive.index").retry(retry).handle(async |body: String| {
///     println!("{body}");
/// });
/// # let _ = runner;
/// # Ok(())
/// # }
/// ```
///
/// There are
///
/// - `cover-art-archive`, a direct exchange, with the queues `cover-art-archive.index`, `.delete` and `.move`, bound with
///   `index`, `delete` and `move`;
/// - `cover-art-archive.retry`, a fanout exchange and a queue: where failed messages wait for four hours, to go back to
///   `cover-art-archive` under their routing key;
/// - `cover-art-archive.failed`, a fanout exchange and a queue: the parking lot.
///
/// Each of these names and keys can be set on its own.
///
/// A failed message is published to one of the fanouts, confirmed, and only then acked. In its header `mb-retries` it says
/// how many retries it has left: if there is none, it has as many as this is told; each takes one away. It is an integer of 32
/// bits, the only one that all workers know. `mb-exceptions` has
/// the texts of its errors, the oldest first; there are never more than ten, the first and the last ones. It also carries
/// the headers that [`Retry`] lists. A parked one has no `mb-retries`, so that it begins anew if it is published again.
///
/// A message that came under another routing key than that of its job, because somebody has published it to its queue,
/// waits under that of the job, or it would not find back; handlers see its own. Further keys in a header `CC` wait in
/// `x-leveret-cc`: else others would get copies each time.
///
/// All messages wait the same: what [`Failure::retry_after`](crate::Failure::retry_after) asks for is not heard, and a
/// warning says so once. (With an `expiration` of its own a message would still stand behind those that came before.) Where
/// messages wait in quorum queues of RabbitMQ 4.0, one of higher priority goes before the others, which then wait longer: only
/// what is first expires.
#[derive(Clone, Debug)]
#[must_use]
pub struct CoverArt {
    name: String,
    jobs: Vec<Job>,
    wait: OneWait,
    retry_exchange: Option<String>,
    retry_queue: Option<String>,
    failed_exchange: Option<String>,
    failed_queue: Option<String>,
    retries_header: String,
    exceptions_header: String,
}

/// A kind of jobs.
#[derive(Clone, Debug)]
struct Job {
    key: String,
    /// The queue, unless it is named after the key.
    queue: Option<String>,
}

impl Job {
    fn new(key: impl Into<String>) -> Self {
        Job { key: key.into(), queue: None }
    }
}

impl Default for CoverArt {
    fn default() -> Self {
        CoverArt::new()
    }
}

impl CoverArt {
    /// Four retries, four hours apart.
    pub fn new() -> Self {
        CoverArt {
            name: "cover-art-archive".to_owned(),
            jobs: ["index", "delete", "move"].map(Job::new).to_vec(),
            wait: OneWait::new(Duration::from_secs(4 * 3600), 4),
            retry_exchange: None,
            retry_queue: None,
            failed_exchange: None,
            failed_queue: None,
            retries_header: "mb-retries".to_owned(),
            exceptions_header: "mb-exceptions".to_owned(),
        }
    }

    /// The name of the exchange, with which all other names begin.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// The kinds of jobs: the queue of each is named after it, and bound with it.
    pub fn jobs<J: Into<String>>(mut self, jobs: impl IntoIterator<Item = J>) -> Self {
        self.jobs = jobs.into_iter().map(Job::new).collect();
        self
    }

    /// A kind of jobs whose queue has this name, bound with this key. It takes the place of one with the same key, and of a
    /// known kind whose queue has that name. Comes after [`name`](Self::name).
    pub fn job(mut self, queue: impl Into<String>, key: impl Into<String>) -> Self {
        let job = Job { key: key.into(), queue: Some(queue.into()) };
        let queue = self.queue_of(&job);
        let mut jobs = std::mem::take(&mut self.jobs);
        jobs.retain(|known| {
            known.key != job.key && (known.queue.is_some() || self.queue_of(known) != queue)
        });
        jobs.push(job);
        self.jobs = jobs;
        self
    }

    /// The name of the exchange of messages that wait, `cover-art-archive.retry` by default.
    pub fn retry_exchange(mut self, name: impl Into<String>) -> Self {
        self.retry_exchange = Some(name.into());
        self
    }

    /// The name of the queue in which messages wait, `cover-art-archive.retry` by default.
    pub fn retry_queue(mut self, name: impl Into<String>) -> Self {
        self.retry_queue = Some(name.into());
        self
    }

    /// The name of the exchange of messages that are not tried again, `cover-art-archive.failed` by default.
    pub fn failed_exchange(mut self, name: impl Into<String>) -> Self {
        self.failed_exchange = Some(name.into());
        self
    }

    /// The name of the parking lot, `cover-art-archive.failed` by default.
    pub fn failed_queue(mut self, name: impl Into<String>) -> Self {
        self.failed_queue = Some(name.into());
        self
    }

    /// Queues get no arguments beyond those that the design names: neither `x-dead-letter-strategy` with its `x-overflow` nor
    /// `x-delivery-limit`. For queues that other programs have declared without them. The broker may then lose a message that
    /// it moves, and drops one that is given back too often.
    pub fn plain_arguments(mut self) -> Self {
        self.wait.plain_arguments = true;
        self
    }

    /// How long messages wait. In whole milliseconds.
    pub fn interval(mut self, interval: Duration) -> Self {
        self.wait.set_interval(interval);
        self
    }

    /// How many times a message is tried again that does not say so itself. `n` means `n + 1` deliveries.
    pub fn max_retries(mut self, retries: u32) -> Self {
        self.wait.set_max_retries(retries);
        self
    }

    /// A policy for what interval and number do not say. It has to wait the same each time: there is one wait queue.
    pub fn policy(mut self, policy: RetryPolicy) -> Self {
        self.wait.set_policy(policy);
        self
    }

    /// The header that counts down, `mb-retries` if nobody says so.
    pub fn retries_header(mut self, name: impl Into<String>) -> Self {
        self.retries_header = name.into();
        self
    }

    /// The header that has the errors, `mb-exceptions` if nobody says so.
    pub fn exceptions_header(mut self, name: impl Into<String>) -> Self {
        self.exceptions_header = name.into();
        self
    }

    /// All queues are of this type. Without it, they are of the broker's default type, unless the client has declared the
    /// work queue: then retry queue and parking lot are like that.
    pub fn queue_type(mut self, queue_type: QueueType) -> Self {
        self.wait.queue_type = Some(queue_type);
        self
    }

    /// All that there has to be, the queues of all jobs included.
    pub fn topology(&self) -> Result<Topology, Error> {
        let mut all = Topology::new();
        for job in &self.jobs {
            let name = self.queue_of(job);
            let queue = match self.wait.queue_type {
                Some(queue_type) => Queue::new(name).of_type(queue_type),
                None => Queue::new(name),
            };
            all = all.and(self.around(&WorkQueue::from(queue))?);
        }
        Ok(all)
    }

    fn around(&self, work: &WorkQueue) -> Result<Topology, Error> {
        self.wait.check(work)?;
        let job = self.check_job(work.name())?;
        let (retry, failed) = (self.name_of_retry(), self.name_of_failed());
        let named = |given: &Option<String>, suffix: &str| {
            let name = given.clone().unwrap_or_else(|| format!("{}.{suffix}", self.name));
            self.wait.companion(work, name)
        };
        let waiting = self.wait.wait_queue(named(&self.retry_queue, "retry"), &self.name);
        let parking = self.wait.parking_lot(named(&self.failed_queue, "failed"));
        let [wait_name, parking_name] = [&waiting, &parking].map(|queue| queue.name().to_owned());
        let topology = Topology::new()
            .exchange(Exchange::direct(self.name.as_str()))
            .exchange(Exchange::fanout(retry.as_str()))
            .exchange(Exchange::fanout(failed.as_str()))
            .queue(waiting.bind(&retry, ""))
            .queue(parking.bind(&failed, ""))
            .queue(work.queue().bind(self.name.as_str(), job));
        let routes = [
            ("a failed message", &*retry, None, &*wait_name),
            ("a message that has waited", &self.name, Some(job), work.name()),
            ("a parked message", &failed, None, &parking_name),
        ];
        let jobs: Vec<String> = self.jobs.iter().map(|job| self.queue_of(job)).collect();
        let queues = jobs.iter().chain([&wait_name, &parking_name]).map(String::as_str).collect();
        traps::check_routes(work.name(), &topology, queues, &routes)?;
        Ok(topology)
    }

    fn check_job(&self, queue: &str) -> Result<&str, Error> {
        if self.wait.policy.retries().is_none() {
            let why = format!(
                "its messages count down in {:?}, so there has to be a number of retries",
                self.retries_header
            );
            return Err(traps::refusal(queue, why));
        }
        self.job_of(queue).ok_or_else(|| {
            let queues: Vec<String> = self.jobs.iter().map(|job| self.queue_of(job)).collect();
            let why = format!("it is not the queue of a job: those are {queues:?}");
            traps::refusal(queue, why)
        })
    }

    /// The key of a queue's job, by which its messages are routed.
    fn job_of(&self, queue: &str) -> Option<&str> {
        let job = self.jobs.iter().find(|job| self.queue_of(job) == queue)?;
        Some(&job.key)
    }

    fn queue_of(&self, job: &Job) -> String {
        job.queue.clone().unwrap_or_else(|| format!("{}.{}", self.name, job.key))
    }

    fn name_of_retry(&self) -> String {
        self.retry_exchange.clone().unwrap_or_else(|| format!("{}.retry", self.name))
    }

    fn name_of_failed(&self) -> String {
        self.failed_exchange.clone().unwrap_or_else(|| format!("{}.failed", self.name))
    }

    fn max(&self) -> u32 {
        self.wait.policy.retries().unwrap_or(u32::MAX)
    }

    /// How many retries a message has left.
    fn left(&self, properties: &RawProperties) -> u32 {
        if !properties.has_headers() {
            return self.max();
        }
        self.left_by(properties.header(&self.retries_header))
    }

    fn left_by(&self, header: Option<Value<'_>>) -> u32 {
        header.and_then(|left| stamp::count(&left)).unwrap_or(self.max())
    }

    fn add_exception(&self, parcel: &mut ForwardedMessage, failed: &Failed<'_>, detail: Detail) {
        let (mut errors, longest) = match detail {
            Detail::Full => {
                (stamp::past_of(parcel.header(&self.exceptions_header)), stamp::MAX_ERROR)
            }
            Detail::Needed => (Array::new(), 100),
        };
        // Text always can be.
        let _ = errors.push(stamp::cut(failed.error, longest));
        parcel.set_header(&self.exceptions_header, Value::Array(errors));
    }

    fn parcel(
        &self,
        delivery: &Delivery,
        exchange: String,
        failed: &Failed<'_>,
        detail: Detail,
    ) -> ForwardedMessage {
        let mut parcel = ForwardedMessage::of(delivery, exchange);
        parcel.keep_expiration();
        parcel.keep_copies();
        self.add_exception(&mut parcel, failed, detail);
        failed.stamp(&mut parcel, detail);
        parcel
    }
}

impl RetryProfile for CoverArt {
    fn policy(&self) -> &RetryPolicy {
        &self.wait.policy
    }

    fn topology(&self, work: &WorkQueue) -> Result<Topology, Error> {
        match (work.declared(), self.wait.queue_type) {
            (None, Some(queue_type)) => {
                self.around(&WorkQueue::from(work.queue().of_type(queue_type)))
            }
            _ => self.around(work),
        }
    }

    /// What a message says itself about its retries counts, also if it has more of them than others.
    fn decide(&self, facts: &Facts<'_>) -> Decision {
        match self.wait.policy.decide(facts) {
            Decision::Park(ParkReason::Exhausted)
                if self.left_by(facts.headers.get(&self.retries_header)) > 0 =>
            {
                Decision::RetryAfter(self.wait.interval)
            }
            decision => decision,
        }
    }

    /// All other objects serve several queues.
    fn belongings(&self, _: &WorkQueue) -> Result<Topology, Error> {
        Ok(Topology::new())
    }

    fn requires_queue_type(&self) -> bool {
        self.wait.queue_type.is_some()
    }

    fn failures(&self, properties: &RawProperties, _queue: &str) -> u32 {
        self.max().saturating_sub(self.left(properties))
    }

    fn retry(&self, message: &FailedMessage<'_>, _: Duration) -> RetryStep {
        let FailedMessage { delivery, failed, detail } = *message;
        let mut parcel = self.parcel(delivery, self.name_of_retry(), failed, detail);
        let left = self.left(delivery.raw_properties()).saturating_sub(1);
        // Other workers know an integer of 32 bits only, and take any other value for none.
        parcel.set_header(&self.retries_header, i32::try_from(left).unwrap_or(i32::MAX));
        parcel.forget_fatal_deaths(delivery.queue());
        if let Some(job) = self.job_of(delivery.queue()) {
            parcel.routing_key = job.to_owned();
        }
        parcel.into()
    }

    fn park(&self, message: &FailedMessage<'_>) -> RetryStep {
        let FailedMessage { delivery, failed, detail } = *message;
        let mut parcel = self.parcel(delivery, self.name_of_failed(), failed, detail);
        parcel.remove_header(&self.retries_header);
        // Under any other key it would not get back that way, and with further ones not alone.
        let key = failed.origin.routing_key.as_bytes();
        let is_its_key = self.job_of(delivery.queue()).is_some_and(|job| job.as_bytes() == key);
        if is_its_key && !parcel.has_copies() {
            parcel.set_header(header::RETURN, self.name.as_str());
        }
        parcel.into()
    }
}

impl From<CoverArt> for Retry {
    fn from(profile: CoverArt) -> Self {
        Retry::with_profile(profile)
    }
}
