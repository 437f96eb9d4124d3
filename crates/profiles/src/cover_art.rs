//! The design of the Cover Art Archive's indexer: a header counts down how often a message may still be tried again.

use std::time::Duration;

use leveret::amqp::{Array, RawProperties, Value};
use leveret::retry::{FailedMessage, ForwardedMessage, RetryProfile, RetryStep, WorkQueue};
use leveret::{Decision, Error, Exchange, Facts, ParkReason, Queue, Retry, RetryPolicy, Topology};

use crate::names::Names;
use crate::one_wait::OneWait;
use crate::queues::{self, MAX_HISTORY};
use crate::routes;

/// Jobs of several kinds share a queue in which they wait for hours, and one in which they end: the design of the Cover Art
/// Archive's indexer.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use leveret::Client;
/// use leveret_profiles::CoverArt;
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
/// the headers that [`Retry`] lists. A parked one has no `mb-retries`, so that it counts from the beginning if it is published again.
///
/// A message that came under another routing key than that of its job, because it was published to its queue,
/// waits under that of the job, or it would not find back; handlers see its own. Further keys in a header `CC` wait in
/// `x-leveret-cc`: else others would get copies each time.
///
/// All messages wait the same: what [`Failure::retry_after`](leveret::Failure::retry_after) asks for is not heard, and a
/// warning says so once. (With an `expiration` of its own a message would still stand behind those that came before.) Where
/// messages wait in quorum queues of RabbitMQ 4.0, one of higher priority goes before the others, which then wait longer: only
/// what is first expires.
#[derive(Clone, Debug)]
#[must_use]
pub struct CoverArt {
    name: String,
    jobs: Vec<Job>,
    wait: OneWait,
    names: Names,
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
            names: Names::default(),
        }
    }

    wait_setters!();

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

    name_setters! {
        /// The name of the exchange of messages that wait, `cover-art-archive.retry` by default.
        retry_exchange;
        /// The name of the queue in which messages wait, `cover-art-archive.retry` by default.
        retry_queue;
        /// The name of the exchange of messages that are not tried again, `cover-art-archive.failed` by default.
        failed_exchange;
        /// The name of the parking lot, `cover-art-archive.failed` by default.
        failed_queue;
        /// The header that counts down, `mb-retries` by default.
        retries_header;
        /// The header that has the errors, `mb-exceptions` by default.
        exceptions_header;
    }

    /// All that there has to be, the queues of all jobs included.
    pub fn topology(&self) -> Result<Topology, Error> {
        let mut all = Topology::new();
        for job in &self.jobs {
            let work = WorkQueue::from(self.typed(Queue::new(self.queue_of(job))));
            all = all.and(self.around(&work)?);
        }
        Ok(all)
    }

    fn around(&self, work: &WorkQueue) -> Result<Topology, Error> {
        self.wait.check(work)?;
        let job = self.check_job(work)?;
        let [retry, failed, wait_queue, lot] =
            [RETRY, FAILED, RETRY_QUEUE, FAILED_QUEUE].map(|what| self.shared(what));
        let waiting = self.wait.wait_queue(work, wait_queue.clone(), &self.name);
        let parking = self.wait.parking_lot(work, lot.clone());
        let topology = Topology::new()
            .exchange(Exchange::direct(self.name.as_str()))
            .exchange(Exchange::fanout(retry.as_str()))
            .exchange(Exchange::fanout(failed.as_str()))
            .queue(waiting.bind(&retry, ""))
            .queue(parking.bind(&failed, ""))
            .queue(work.queue().bind(self.name.as_str(), job));
        let routes = [
            ("a failed message", &*retry, None, &*wait_queue),
            ("a message that has waited", &self.name, Some(job), work.name()),
            ("a parked message", &failed, None, &lot),
        ];
        let jobs: Vec<String> = self.jobs.iter().map(|job| self.queue_of(job)).collect();
        let queues = jobs.iter().chain([&wait_queue, &lot]).map(String::as_str).collect();
        routes::check(work, &topology, queues, &routes)?;
        Ok(topology)
    }

    fn check_job(&self, work: &WorkQueue) -> Result<&str, Error> {
        if self.wait.policy.retries().is_none() {
            let header = self.header(RETRIES);
            let why = format!(
                "its messages count down in {header:?}, so there has to be a number of retries"
            );
            return Err(work.refusal(why));
        }
        self.job_of(work.name()).ok_or_else(|| {
            let queues: Vec<String> = self.jobs.iter().map(|job| self.queue_of(job)).collect();
            work.refusal(format!("it is not the queue of a job: those are {queues:?}"))
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

    /// The work queues are of the type that was asked for, as those beside them.
    fn typed(&self, queue: Queue) -> Queue {
        match self.wait.queue_type {
            Some(queue_type) => queue.of_type(queue_type),
            None => queue,
        }
    }

    /// A name that was set, or else that of the exchange with an ending.
    fn shared(&self, (what, ending): (&str, &str)) -> String {
        self.names.or(what, format!("{}.{ending}", self.name))
    }

    fn header<'a>(&'a self, (what, default): (&str, &'a str)) -> &'a str {
        self.names.get(what).unwrap_or(default)
    }

    fn max(&self) -> u32 {
        self.wait.policy.retries().unwrap_or(u32::MAX)
    }

    /// How many retries a message has left.
    fn left(&self, properties: &RawProperties) -> u32 {
        queues::count(properties, self.header(RETRIES)).unwrap_or(self.max())
    }

    fn forward(&self, failed: &FailedMessage<'_>, exchange: String, key: &str) -> ForwardedMessage {
        let mut message = failed.forward_to(exchange, key);
        let name = self.header(EXCEPTIONS);
        let mut errors = if failed.is_brief() { Array::new() } else { past(message.header(name)) };
        // Cut, as the consumer wrote it; text always can be in a list.
        if let Some(error) = message.header("x-leveret-error") {
            let _ = errors.push(error);
        }
        message.set_header(name, Value::Array(errors));
        message
    }
}

const RETRY: (&str, &str) = ("retry_exchange", "retry");
const RETRY_QUEUE: (&str, &str) = ("retry_queue", "retry");
const FAILED: (&str, &str) = ("failed_exchange", "failed");
const FAILED_QUEUE: (&str, &str) = ("failed_queue", "failed");
const RETRIES: (&str, &str) = ("retries_header", "mb-retries");
const EXCEPTIONS: (&str, &str) = ("exceptions_header", "mb-exceptions");

/// The errors so far, without those there is no room for: the first one stays, and the last ones.
fn past(header: Option<Value<'_>>) -> Array<'static> {
    let past = header.as_ref().and_then(Value::as_array);
    let past: Vec<Value<'_>> = past.into_iter().flat_map(|past| past.iter()).collect();
    let dropped = (past.len() + 1).saturating_sub(MAX_HISTORY);
    let mut kept = Array::new();
    for (index, entry) in past.into_iter().enumerate() {
        if index == 0 || index > dropped {
            // It was in a list before, so it can be in one.
            let _ = kept.push(entry);
        }
    }
    kept
}

impl RetryProfile for CoverArt {
    fn policy(&self) -> &RetryPolicy {
        &self.wait.policy
    }

    fn topology(&self, work: &WorkQueue) -> Result<Topology, Error> {
        match (work.declared(), self.wait.queue_type) {
            (None, Some(_)) => self.around(&WorkQueue::from(self.typed(work.queue()))),
            _ => self.around(work),
        }
    }

    /// What a message says itself about its retries counts, also if it has more of them than others.
    fn decide(&self, facts: &Facts<'_>) -> Decision {
        let left = || {
            let header = facts.headers.get(self.header(RETRIES));
            header.and_then(|left| queues::number(&left)).unwrap_or(self.max())
        };
        match self.wait.policy.decide(facts) {
            Decision::Park(ParkReason::Exhausted) if left() > 0 => {
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

    fn retry(&self, failed: &FailedMessage<'_>, _: Duration) -> RetryStep {
        let key = self.job_of(failed.queue()).unwrap_or_default();
        let mut message = self.forward(failed, self.shared(RETRY), key);
        let left = self.left(failed.properties()).saturating_sub(1);
        // Other workers know an integer of 32 bits only, and take any other value for none.
        message.set_header(self.header(RETRIES), i32::try_from(left).unwrap_or(i32::MAX));
        message.into()
    }

    fn park(&self, failed: &FailedMessage<'_>) -> RetryStep {
        let key = failed.origin().routing_key.to_str_lossy();
        let mut message = self.forward(failed, self.shared(FAILED), &key);
        message.remove_header(self.header(RETRIES));
        // Under any other key it would not get back that way, and with further ones not alone.
        let is_its_key = self.job_of(failed.queue()) == Some(&*key);
        if is_its_key && !queues::has_copies(&message) {
            message.set_header(queues::RETURN, self.name.as_str());
        }
        message.into()
    }
}

impl From<CoverArt> for Retry {
    fn from(profile: CoverArt) -> Self {
        Retry::with_profile(profile)
    }
}
