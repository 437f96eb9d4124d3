//! The file of a service.
//!
//! ```toml
//! name = "shop"
//! url = "amqp://localhost"              # or a list; --url and LEVERET_URL go before it
//!
//! [[topology.exchange]]                 # the form of `leveret topology`; or topology-file = "topology.toml"
//! name = "orders"
//! type = "topic"
//!
//! [[topology.queue]]
//! name = "billing"
//! type = "quorum"
//! bind = [{ exchange = "orders", key = "order.*" }]
//!
//! [[consumer]]
//! queue = "billing"
//! command = ["./bill", "--fast"]        # the message on stdin; 0: done, 75: try again, 65: park it
//! workers = 4
//! timeout = "30s"
//! retry = { wait = "2s", multiplier = 1.5, longest = "1m", times = 5 }
//!
//! [[consumer]]
//! queue = "audit"
//! http = "http://localhost:8080/audit"  # POST; 2xx: done, 429 and 5xx: try again, other 4xx: park it
//! batch = { size = 100, within = "1s" } # lines of JSON
//!
//! [[service]]
//! name = "prices"
//! command = ["./quote"]                 # what it writes is the reply
//! ```
//!
//! With `relay-delays = true` it also takes the last step of delayed messages to exchanges.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use leveret::amqp::ShortStr;
use leveret::{BatchOptions, Exchange, IntoEndpoints, Queue, Retry, RetryPolicy, Topology};
use leveret_profiles::Orb;
use serde::Deserialize;
use serde::de::{self, Deserializer};

use super::command;
use super::http;
use super::pools::Pools;
use super::retry::RetryOptions;
use crate::failure::Failure;
use crate::files;

/// What a file says.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct File {
    /// The name of the client, which the broker's management pages show.
    #[serde(default = "File::default_name")]
    pub(super) name: String,
    #[serde(default)]
    url: Urls,
    #[serde(default)]
    topology: Topology,
    /// Beside the file, if it is relative.
    topology_file: Option<PathBuf>,
    /// Whether it takes the last step of delayed messages to exchanges, for those who publish and go.
    #[serde(default)]
    pub(super) relay_delays: bool,
    #[serde(default)]
    pub(super) consumer: Vec<Consumer>,
    #[serde(default)]
    pub(super) service: Vec<Service>,
}

/// One URL, or several.
#[derive(Debug, Default, Deserialize)]
#[serde(untagged, expecting = "a URL in quotes, or a list of them")]
enum Urls {
    #[default]
    None,
    One(String),
    Several(Vec<String>),
}

/// A queue, and what is done with its messages.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Consumer {
    pub(super) queue: String,
    pub(super) command: Option<Vec<String>>,
    pub(super) http: Option<String>,
    #[serde(default = "default_timeout")]
    pub(super) timeout: Time,
    #[serde(default = "one")]
    pub(super) workers: usize,
    pub(super) prefetch: Option<u16>,
    subscribers: Option<usize>,
    /// As many subscribers as the program's flag for this pool says.
    pool: Option<Pool>,
    pub(super) batch: Option<Batch>,
    pub(super) retry: Option<RetryOptions>,
}

/// A service, and what answers its requests.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Service {
    pub(super) name: String,
    pub(super) exchange: Option<String>,
    pub(super) command: Option<Vec<String>>,
    pub(super) http: Option<String>,
    #[serde(default = "default_timeout")]
    pub(super) timeout: Time,
    #[serde(default = "one")]
    pub(super) workers: usize,
    pub(super) prefetch: Option<u16>,
    pub(super) retry: Option<RetryOptions>,
}

/// A pool of subscribers, after those of Orb.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Pool {
    Op,
    Observer,
}

impl Consumer {
    /// How many consumers of the queue there are.
    pub(super) fn subscribers(&self, pools: &Pools) -> usize {
        match self.pool {
            Some(Pool::Op) => pools.op_pool,
            Some(Pool::Observer) => pools.observer_pool,
            None => self.subscribers.unwrap_or(1),
        }
    }
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Batch {
    size: u16,
    #[serde(default = "default_within")]
    within: Time,
}

impl From<Batch> for BatchOptions {
    fn from(batch: Batch) -> Self {
        BatchOptions { size: batch.size, within: batch.within.0 }
    }
}

/// `4h`, `1500ms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Time(pub(super) Duration);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let named = |error| de::Error::custom(format!("{text:?}: {error}"));
        crate::reach::duration(&text).map(Time).map_err(named)
    }
}

fn one() -> usize {
    1
}

fn default_timeout() -> Time {
    Time(Duration::from_secs(60))
}

fn default_within() -> Time {
    Time(Duration::from_secs(1))
}

impl File {
    fn default_name() -> String {
        "leveret run".to_owned()
    }

    /// Reads a file: TOML, or YAML if its name ends in `.yaml` or `.yml`. The failure names the line, the field and what is
    /// allowed.
    pub(super) fn read(path: &Path) -> Result<File, Failure> {
        let named = |error: &dyn std::fmt::Display| {
            Failure::wrong(format_args!("{}: {error}", path.display()))
        };
        let mut file: File = files::read(path)?;
        if let Some(topology) = &file.topology_file {
            let beside = path.parent().unwrap_or(Path::new(".")).join(topology);
            let read = Topology::read(beside).map_err(|error| named(&error))?;
            let wrong = |text: String| named(&format_args!("topology-file = {topology:?}: {text}"));
            check_same("exchange", file.topology.exchanges(), read.exchanges(), Exchange::name)
                .and_then(|()| {
                    check_same("queue", file.topology.queues(), read.queues(), Queue::name)
                })
                .map_err(wrong)?;
            file.topology = std::mem::take(&mut file.topology).and(read);
        }
        file.check().map_err(|text| named(&text))?;
        Ok(file)
    }

    /// What only makes sense together.
    fn check(&self) -> Result<(), String> {
        if self.consumer.is_empty() && self.service.is_empty() && !self.relay_delays {
            return Err("there is nothing to run: neither a [[consumer]] nor a [[service]], nor relay-delays = true".to_owned());
        }
        self.urls().into_endpoints().map_err(|error| format!("url: {error}"))?;
        check_names(&self.topology)?;
        for consumer in &self.consumer {
            let whose = format!("the consumer of {:?}", consumer.queue);
            check_name("queue", &consumer.queue)?;
            check_work(&whose, &consumer.command, &consumer.http)?;
            check_limits(&whose, consumer.timeout, consumer.prefetch)?;
            check_workers(&whose, consumer.workers)?;
            check_workers(&whose, consumer.subscribers.unwrap_or(1))?;
            if consumer.pool.is_some() && consumer.subscribers.is_some() {
                return Err(format!("{whose}: both pool and subscribers are given"));
            }
            match consumer.batch {
                Some(batch) if batch.size == 0 => {
                    return Err(format!("{whose}: a batch has a size of at least 1"));
                }
                Some(_) if consumer.workers > 1 => {
                    return Err(format!(
                        "{whose}: batches are handled one after the other; leave out workers or batch"
                    ));
                }
                Some(_) if consumer.pool.is_some() || consumer.subscribers.unwrap_or(1) > 1 => {
                    return Err(format!(
                        "{whose}: batches have one subscriber; leave out subscribers and pool, or batch"
                    ));
                }
                _ => {}
            }
            check_retry(&whose, &consumer.retry)?;
        }
        for service in &self.service {
            let whose = format!("the service {:?}", service.name);
            check_name("service", &service.name)?;
            check_name("exchange", service.exchange.as_deref().unwrap_or_default())?;
            check_work(&whose, &service.command, &service.http)?;
            check_limits(&whose, service.timeout, service.prefetch)?;
            check_workers(&whose, service.workers)?;
            check_retry(&whose, &service.retry)?;
        }
        self.check_orbs()
    }

    pub(super) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Where the brokers are, by the file.
    pub(super) fn urls(&self) -> Vec<String> {
        match &self.url {
            Urls::None => Vec::new(),
            Urls::One(url) => vec![url.clone()],
            Urls::Several(urls) => urls.clone(),
        }
    }

    /// The queue as the file declares it, if it does.
    pub(super) fn declared(&self, queue: &str) -> Option<Queue> {
        self.topology.queues().iter().find(|declared| declared.name() == queue).cloned()
    }

    /// How the consumer of a queue retries, or that there is none.
    pub(super) fn retry_of(&self, queue: &str) -> Option<Retry> {
        let consumer = self.consumer.iter().find(|consumer| consumer.queue == queue)?;
        let default = || RetryPolicy::default().into();
        Some(consumer.retry.as_ref().map_or_else(default, RetryOptions::without_pools))
    }

    /// The Orb designs that are in use, each with its redelivery queue, which needs a consumer.
    pub(super) fn orbs(&self, pools: &Pools) -> Vec<(Orb, String)> {
        let all = self.retries().filter_map(|retry| Some((retry.orb_name()?, retry)));
        let mut names = Vec::new();
        let first = all.filter(|(name, _)| {
            let is_new = !names.contains(name);
            names.push(*name);
            is_new
        });
        first.map(|(name, retry)| (retry.orb(pools), retry.redelivery_queue(name))).collect()
    }

    fn retries(&self) -> impl Iterator<Item = &RetryOptions> {
        let of_consumers = self.consumer.iter().map(|consumer| &consumer.retry);
        of_consumers.chain(self.service.iter().map(|service| &service.retry)).flatten()
    }

    /// Who sends messages back does so for all that share a name.
    fn check_orbs(&self) -> Result<(), String> {
        let mut known: Vec<&RetryOptions> = Vec::new();
        for retry in self.retries().filter(|retry| retry.orb_name().is_some()) {
            match known.iter().find(|other| other.orb_name() == retry.orb_name()) {
                Some(other) if **other != *retry => {
                    let name = retry.orb_name().unwrap_or_default();
                    return Err(format!(
                        "retry: the profile orb is used twice under the name {name:?}, and not in the same way"
                    ));
                }
                _ => known.push(retry),
            }
        }
        Ok(())
    }
}

/// Objects of one name in both files have to be the same: the second one would silently replace the first.
fn check_same<T: PartialEq>(
    kind: &str,
    objects: &[T],
    others: &[T],
    name: impl Fn(&T) -> &str,
) -> Result<(), String> {
    let known: HashMap<&str, &T> = objects.iter().map(|object| (name(object), object)).collect();
    let differs = |other: &&T| known.get(name(other)).is_some_and(|object| *object != *other);
    match others.iter().find(differs) {
        None => Ok(()),
        Some(other) => Err(format!(
            "{kind} {:?} is described there and in this file, and not in the same way: leave one of the two out",
            name(other)
        )),
    }
}

fn check_names(topology: &Topology) -> Result<(), String> {
    for exchange in topology.exchanges() {
        check_name("exchange", exchange.name())?;
    }
    for queue in topology.queues() {
        check_name("queue", queue.name())?;
    }
    for binding in topology.bindings() {
        check_name("exchange", binding.source())?;
        check_name("key", binding.routing_key())?;
    }
    Ok(())
}

fn check_name(kind: &str, name: &str) -> Result<(), String> {
    let fits = ShortStr::try_from(name);
    fits.map(drop).map_err(|error| format!("{kind} {name:?}: {error}"))
}

fn check_retry(whose: &str, retry: &Option<RetryOptions>) -> Result<(), String> {
    let checked = retry.as_ref().map_or(Ok(()), RetryOptions::check);
    checked.map_err(|text| format!("{whose}: {text}"))
}

fn check_work(
    whose: &str,
    command: &Option<Vec<String>>,
    http: &Option<String>,
) -> Result<(), String> {
    match (command, http) {
        (Some(_), Some(_)) => {
            Err(format!("{whose} has both a command and http: one of them is to do the work"))
        }
        (None, None) => {
            Err(format!("{whose} has neither a command nor http: who is to do the work?"))
        }
        (Some(command), None) if command.is_empty() => Err(format!(
            "{whose}: the command is an empty list; write a program and its arguments, as in [\"./bill\", \"--fast\"]"
        )),
        (Some(command), None) => {
            match command.first().map(|program| command::check_program(program)) {
                Some(Err(wrong)) => Err(format!("{whose}: {wrong}")),
                _ => Ok(()),
            }
        }
        (None, Some(url)) => match http::check(url) {
            Ok(_) => Ok(()),
            Err(wrong) => Err(format!("{whose}: {wrong}")),
        },
    }
}

fn check_limits(whose: &str, timeout: Time, prefetch: Option<u16>) -> Result<(), String> {
    if timeout.0.is_zero() {
        return Err(format!(
            "{whose}: a timeout of 0 leaves no time for the work; leave it out for 60s"
        ));
    }
    if prefetch == Some(0) {
        return Err(format!(
            "{whose}: a prefetch of at least 1 is needed; leave it out for the default"
        ));
    }
    Ok(())
}

fn check_workers(whose: &str, number: usize) -> Result<(), String> {
    match number {
        1..=10_000 => Ok(()),
        _ => Err(format!("{whose}: {number} workers or subscribers; 1 to 10000 are allowed")),
    }
}
